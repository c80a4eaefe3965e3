//! Cross entropy and the best class over classes in parts.

use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::{Device, Tensor, Tolerance};
use paceline_split::tensor::TensorParallel;

use crate::support::{classes, on_ranks, values};

#[test]
fn cross_entropy_over_parts_is_close_to_that_of_whole_scores_and_its_bits_do_not_depend_on_ranks() {
    const CLASSES: usize = 13;
    let device = Device::flex().autodiff();
    let scores = (values([20, CLASSES], &device) * 5.0).require_grad();
    let right = classes(20, CLASSES, &device);
    let loss = CrossEntropyLossConfig::new().init(&device);
    let loss = loss.forward(scores.clone(), right.clone());
    let gradient = scores
        .grad(&loss.backward())
        .expect("a gradient")
        .into_data();
    let best = scores.clone().argmax(1).squeeze_dim::<1>(1).into_data();
    let mut first = None;
    for world in 1..=4 {
        let ranks = on_ranks(world, |group| {
            let tp = TensorParallel::new(group, 4).expect("parts");
            let scores = (values([20, CLASSES], &device) * 5.0).require_grad();
            let cut = |part| scores.clone().slice_dim(1, tp.share(CLASSES, part));
            let parts: Vec<Tensor<2>> = tp.local().map(cut).collect();
            let best = tp.argmax(parts.clone(), CLASSES).expect("classes");
            assert_eq!(best.dims(), [20]);
            let losses = tp.cross_entropy(parts, CLASSES, right.clone());
            let loss = losses.mean();
            let gradient = scores.grad(&loss.backward()).expect("a gradient");
            let best = best.into_data().convert::<i64>();
            (loss.into_data(), gradient.into_data(), best)
        });
        let tolerance = Tolerance::<f32>::rel_abs(1e-5, 1e-7);
        let mut sum = Tensor::<2>::zeros([20, CLASSES], &device);
        for (own, part, classes) in ranks {
            own.assert_approx_eq(&loss.clone().into_data(), tolerance);
            assert_eq!(classes, best.clone().convert::<i64>());
            assert_eq!(*first.get_or_insert(own.clone()), own);
            // Outside of a rank's parts its gradient is zero.
            sum = sum + Tensor::from_data(part, &device);
        }
        sum.into_data().assert_approx_eq(&gradient, tolerance);
    }
}

#[test]
fn large_scores_do_not_overflow_and_a_tie_goes_to_the_first_class() {
    let device = Device::flex();
    let right = Tensor::from_ints([0, 3], &device);
    let results = on_ranks(2, |group| {
        let tp = TensorParallel::new(group, 2).expect("parts");
        let scores = Tensor::<2>::from_floats([[1e4, 0.0, 1e4, 0.0], [-1e4; 4]], &device);
        let parts: Vec<_> = tp
            .local()
            .map(|part| scores.clone().slice_dim(1, tp.share(4, part)))
            .collect();
        let best = tp.argmax(parts.clone(), 4).expect("classes").into_data();
        (
            tp.cross_entropy(parts, 4, right.clone()).into_data(),
            best.convert::<i64>(),
        )
    });
    for (losses, best) in results {
        let expected = Tensor::<1>::from_floats([2.0_f32.ln(), 4.0_f32.ln()], &device);
        losses.assert_approx_eq(&expected.into_data(), Tolerance::<f32>::rel_abs(1e-6, 1e-6));
        assert_eq!(best.try_to_vec::<i64>().expect("numbers"), [0, 0]);
    }
}
