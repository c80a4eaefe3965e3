//! The average of the weights is PyTorch's, and its state survives being stored.

use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::Tensor;
use paceline_nn::{AdamWConfig, Ema};

use crate::support::{device, values};

#[test]
fn the_average_follows_the_weights_and_changes_no_step() {
    let (device, _alone) = device();
    let net: Linear = LinearConfig::new(7, 5).with_bias(false).init(&device);
    let step = |optimizer: &mut ModuleOptimizer, net: Linear| {
        let loss = net.forward(values([3, 7], &device)).powi_scalar(2).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        optimizer.step(0.05, net, gradients)
    };
    let of = |net: &Linear| -> Vec<f32> { net.weight.val().into_data().iter().collect() };
    let mut plain = ModuleOptimizer::from(AdamWConfig::new().build());
    let fresh = || ModuleOptimizer::from(Ema::new(AdamWConfig::new().build(), 0.75));
    let (mut averaging, mut nets) = (fresh(), [net.clone(), net]);
    let mut expected: Option<Vec<f32>> = None;
    for _ in 0..4 {
        nets[0] = step(&mut plain, nets[0].clone());
        nets[1] = step(&mut averaging, nets[1].clone());
        assert_eq!(of(&nets[0]), of(&nets[1]));
        let weights = of(&nets[1]);
        expected = Some(match expected {
            None => weights,
            Some(average) => {
                let pairs = average.iter().zip(&weights);
                pairs.map(|(old, new)| old + (new - old) * 0.25).collect()
            }
        });
        // Each step goes on from a stored state.
        averaging = fresh().load_record(averaging.to_record());
    }
    let bytes = averaging.into_bytes().expect("it encodes");
    let expected = expected.expect("some steps");
    let expected: Vec<u8> = expected
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let stores = |part: &[u8]| bytes.windows(part.len()).any(|stored| stored == part);
    assert!(stores(&expected), "the average is in the state");
}

#[test]
fn an_optimizer_without_a_state_has_an_average_too() {
    let (device, _alone) = device();
    let net: Linear = LinearConfig::new(2, 2).with_bias(false).init(&device);
    let loss = net.forward(Tensor::<2>::ones([1, 2], &device)).sum();
    let gradients = GradientsParams::from_grads(loss.backward(), &net);
    let fresh = || ModuleOptimizer::from(Ema::new(SgdConfig::new().build(), 0.9));
    let mut optimizer = fresh();
    optimizer.step(0.1, net, gradients);
    let stored = optimizer.into_bytes().expect("it encodes");
    let read = fresh().from_bytes(stored.clone()).expect("it is read");
    assert_eq!(read.into_bytes().expect("it encodes")[..], stored[..]);
}
