//! Models with f64 parameters: gradients are summed in f64, with the same bits on any number of ranks.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::tanh;
use burn::tensor::{DType, Device, Tensor, TensorData};
use paceline_collective::ProcessGroup;
use paceline_ddp::{
    Block, CommHook, Ddp, DdpError, DdpOptions, ZeroRedundancyOptimizer, ZeroStage,
};

use crate::support::{device, optimizer, options, ranks};

/// One layer is in f32 among others in f64.
#[derive(Module, Debug)]
struct Net {
    first: Block<Linear>,
    single: Block<Linear>,
    second: Block<Linear>,
    last: Linear,
    never: Linear,
}

/// Fixed weights of one type.
struct Waves(DType);

impl ModuleMapper for Waves {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            let shape = tensor.dims();
            let values = (0..shape.iter().product()).map(|at| wave(at + 7 * shape[0]));
            let values = TensorData::new(values.collect::<Vec<f64>>(), shape);
            Tensor::<D>::from_data(values, (&tensor.device(), self.0)).require_grad()
        })
    }
}

/// A number that needs the digits of an f64.
fn wave(at: usize) -> f64 {
    (at as f64 * 0.7).sin() / 3.0
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |from, to, dtype| {
            let layer: Linear = LinearConfig::new(from, to).init(device);
            layer.map(&mut Waves(dtype))
        };
        Self {
            // More than one chunk, so that several ranks have slices of it.
            first: Block::new(0, linear(5, 417, DType::F64)),
            single: Block::new(1, linear(417, 17, DType::F32)),
            second: Block::new(2, linear(17, 3, DType::F64)),
            last: linear(3, 3, DType::F64),
            never: linear(2, 2, DType::F64),
        }
    }

    fn loss(&self, samples: &[usize]) -> Tensor<1> {
        let values = samples
            .iter()
            .flat_map(|s| (0..5).map(move |k| wave(s * 5 + k)));
        let values = TensorData::new(values.collect::<Vec<f64>>(), [samples.len(), 5]);
        let x = Tensor::<2>::from_data(values, (&self.last.weight.device(), DType::F64));
        let run = |layer: &Linear, x| tanh(layer.forward(x));
        let x = self.first.forward(x, run);
        let x = self.single.forward(x.cast(DType::F32), run);
        let x = self.second.forward(x.cast(DType::F64), run);
        (self.last.forward(x) - 0.5).powf_scalar(2.0).mean()
    }
}

/// Trains some steps of uneven micro-batches; returns the hash of the weights, the last norm and a loss.
fn train(
    group: ProcessGroup,
    shards: usize,
    clip_norm: Option<f64>,
    zero: Option<ZeroStage>,
) -> (String, Option<f64>, f64) {
    let made = Ddp::new(
        group,
        Net::new(&device()),
        DdpOptions {
            clip_norm,
            accumulate: 2,
            ..options(shards)
        },
    );
    let (mut ddp, mut net) = made.expect("ranks agree");
    let (mut whole, mut norm) = (optimizer(), None);
    let mut sharded = zero.map(|stage| {
        let made = ZeroRedundancyOptimizer::at_stage(&mut ddp, net.clone(), optimizer(), stage);
        let sharded;
        (sharded, net) = made.expect("slices");
        sharded
    });
    for step in 0..4 {
        let reduced = ddp.step(&net, |shard| {
            for micro in 0..2 {
                let first = 100 * step + 10 * shard.shard() + 5 * micro;
                let samples: Vec<usize> = (first..first + 2 + shard.shard() % 3).collect();
                let loss = shard.model()?.loss(&samples);
                shard.backward(loss, samples.len() as f32)?;
            }
            Ok::<_, DdpError>(())
        });
        let reduced = reduced.expect("a step");
        assert_eq!(reduced.unused, ["never.weight", "never.bias"]);
        norm = reduced.grad_norm;
        net = match &mut sharded {
            None => whole.step(0.01, net, reduced.grads),
            Some(sharded) => sharded.step(0.01, net, reduced.grads).expect("a step"),
        };
    }
    let is_dealt = zero == Some(ZeroStage::Parameters);
    let first = net.first.module().weight.val();
    assert_eq!(
        (first.dtype(), first.dims()[0] == 0),
        (DType::F64, is_dealt)
    );
    let loss = ddp.evaluate(&net, |net| net.loss(&[1, 2]).into_scalar::<f64>());
    let hash = ddp.sha256(&net).expect("a hash");
    (hash, norm, loss.expect("an evaluation"))
}

#[test]
fn f64_models_have_the_same_bits_on_any_number_of_ranks() {
    for (shards, clip_norm) in [(4, None), (5, Some(0.01))] {
        let expected = ranks(1, |group| train(group, shards, clip_norm, None)).remove(0);
        assert_eq!(expected.1.is_some(), clip_norm.is_some());
        let (first, second) = (Some(ZeroStage::Optimizer), Some(ZeroStage::Gradients));
        let third = Some(ZeroStage::Parameters);
        for (world, zero) in [
            (2, None),
            (3, None),
            (4, None),
            (1, first),
            (3, first),
            (2, second),
            (4, second),
            (1, third),
            (2, third),
            (3, third),
            (4, third),
        ] {
            for found in ranks(world, |group| train(group, shards, clip_norm, zero)) {
                assert_eq!(found, expected, "{world} ranks, {zero:?}");
            }
        }
    }
}

/// With one shard the gradients are Burn's own; with several, their mean keeps the digits of an f64.
#[test]
fn gradients_are_summed_in_f64() {
    let gradient = |shards: usize, part: fn(usize) -> Vec<usize>| {
        let group = ranks(1, |group| group).remove(0);
        let made = Ddp::new(group, Net::new(&device()), options(shards));
        let (mut ddp, net) = made.expect("one rank");
        let reduced = ddp.step(&net, |shard| {
            let loss = shard.model()?.loss(&part(shard.shard()));
            shard.backward(loss, 4.0)
        });
        let reduced: Result<_, DdpError> = reduced;
        let gradient = reduced
            .expect("a step")
            .grads
            .get::<2>(net.first.module().weight.id);
        let gradient = gradient.expect("a gradient").into_data();
        gradient.try_to_vec::<f64>().expect("f64")
    };
    let whole = gradient(1, |_| (0..16).collect());
    let split = gradient(4, |shard| (4 * shard..4 * shard + 4).collect());
    let net = Net::new(&device());
    let plain = net
        .first
        .module()
        .weight
        .grad(&net.loss(&(0..16).collect::<Vec<_>>()).backward());
    let plain = plain.expect("a gradient").into_data();
    assert_eq!(whole, plain.try_to_vec::<f64>().expect("f64"));
    for (a, b) in whole.iter().zip(&split) {
        assert!((a - b).abs() < 1e-14, "{a} {b}");
    }
}

#[test]
fn what_does_not_take_f64_parameters_says_so() {
    let group = || ranks(1, |group| group).remove(0);
    let hooked = DdpOptions {
        comm_hook: CommHook::Bf16Compress,
        ..options(1)
    };
    let error = Ddp::new(group(), Net::new(&device()), hooked).err();
    assert_eq!(
        error.expect("half the bytes").to_string(),
        "communication hook bf16 does not work with parameters in f64: hooks compress sums in f32"
    );
    let recorded = DdpOptions {
        record: std::num::NonZeroU64::new(1),
        ..options(1)
    };
    let error = Ddp::new(group(), Net::new(&device()), recorded).err();
    assert_eq!(
        error.expect("digests are of f32").to_string(),
        "gradients are not recorded with parameters in f64"
    );
}
