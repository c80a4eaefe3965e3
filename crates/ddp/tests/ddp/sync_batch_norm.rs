//! `SyncBatchNorm`: ranks together give what one batch norm over all their samples gives.

use burn::module::{Module, ModuleDisplay};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::activation::tanh;
use burn::tensor::{Device, Tensor, TensorData};
use paceline_ddp::{Ddp, DdpError, SyncBatchNorm, weights};

use crate::support::*;

#[derive(Module, Debug)]
struct Net<N: Module> {
    first: Linear,
    norm: N,
    last: Linear,
}

trait Norm: Module + ModuleDisplay {
    fn made(norm: BatchNorm) -> Self;
    fn run(&self, input: Tensor<3>) -> Tensor<3>;
}

impl Norm for BatchNorm {
    fn made(norm: BatchNorm) -> Self {
        norm
    }

    fn run(&self, input: Tensor<3>) -> Tensor<3> {
        self.forward(input)
    }
}

impl Norm for SyncBatchNorm {
    fn made(norm: BatchNorm) -> Self {
        norm.into()
    }

    fn run(&self, input: Tensor<3>) -> Tensor<3> {
        self.forward(input)
    }
}

impl<N: Norm> Net<N> {
    fn new(device: &Device) -> Self {
        let net = Self {
            first: LinearConfig::new(6, 8).init(device),
            norm: N::made(BatchNormConfig::new(4).init(device)),
            last: LinearConfig::new(8, 3).init(device),
        };
        let fixed = weights::export(&net).into_iter().enumerate();
        let fixed = fixed.filter(|(_, (path, _))| !path.starts_with("norm"));
        let fixed = fixed.map(|(at, (path, data))| {
            let value = |i: usize| ((i * 37 + at * 11) % 29) as f32 / 29.0 - 0.4;
            let values: Vec<f32> = (0..data.num_elements()).map(value).collect();
            (path, TensorData::new(values, data.shape().clone()))
        });
        weights::import(net, fixed.collect())
    }

    fn loss(&self, samples: &[usize], device: &Device) -> Tensor<1> {
        let (x, y) = batch(samples, device);
        let count = samples.len();
        // Far from zero, so that a variance of large numbers is taken; 4 features with 2 values each.
        let x = self
            .first
            .forward(x)
            .reshape([count, 4, 2])
            .add_scalar(100.0);
        let x = tanh(self.norm.run(x)).reshape([count, 8]);
        (self.last.forward(x) - y).powf_scalar(2.0).mean()
    }
}

/// Different numbers of samples on the ranks.
const COUNTS: [usize; 4] = [3, 6, 2, 5];

fn part(step: usize, shard: usize) -> Vec<usize> {
    let before: usize = COUNTS[..shard].iter().sum();
    (0..COUNTS[shard])
        .map(|at| step * 100 + before + at)
        .collect()
}

/// The samples of a step, on how many ranks.
#[derive(Clone, Copy)]
enum Layout {
    /// All in one shard.
    Whole,
    /// In as many shards as there are counts, on so many ranks.
    Split(usize),
}

/// All tensors of each rank after some steps with the samples of `shards` shards.
fn train<N: Norm>(shards: usize, layout: Layout) -> Vec<Vec<f32>> {
    let (world, count) = match layout {
        Layout::Whole => (1, 1),
        Layout::Split(world) => (world, shards),
    };
    ranks(world, |group| {
        let (device, mut optimizer) = (device(), SgdConfig::new().init());
        let made = Ddp::new(group, Net::<N>::new(&device), options(count));
        let (mut ddp, mut net) = made.expect("ranks agree");
        for step in 0..4 {
            let reduced = ddp.step_on_replicas(&net, &[], |shard| {
                let samples: Vec<usize> = match layout {
                    Layout::Split(_) => part(step, shard.shard()),
                    Layout::Whole => (0..shards).flat_map(|shard| part(step, shard)).collect(),
                };
                let loss = shard.model()?.loss(&samples, &device);
                shard.backward(loss, samples.len() as f32)
            });
            let reduced = reduced.unwrap_or_else(|error: DdpError| panic!("{error}"));
            net = optimizer.step(0.1, net, reduced.grads);
        }
        let tensors = weights::export(&net).into_iter();
        let values = tensors.filter_map(|(_, data)| data.try_to_vec::<f32>().ok());
        values.flatten().collect()
    })
}

#[test]
fn shards_of_uneven_batches_give_the_batch_norm_of_all_samples_on_any_number_of_ranks() {
    for shards in [1, 2, 4] {
        let whole = train::<BatchNorm>(shards, Layout::Whole).remove(0);
        let synced = train::<SyncBatchNorm>(shards, Layout::Split(1)).remove(0);
        assert_eq!(synced.len(), whole.len());
        for (a, b) in synced.iter().zip(&whole) {
            let is_near = (a - b).abs() <= 2e-4 * b.abs().max(1.0);
            assert!(is_near, "{shards} shards: {a} {b}");
        }
        for world in 1..=shards {
            for values in train::<SyncBatchNorm>(shards, Layout::Split(world)) {
                assert_eq!(values, synced, "{shards} shards on {world} ranks");
            }
        }
        let apart = train::<BatchNorm>(shards, Layout::Split(1)).remove(0);
        let largest = apart.iter().zip(&whole).map(|(a, b)| (a - b).abs());
        let largest = largest.fold(0.0, f32::max);
        assert!(shards == 1 || largest > 1e-2, "{shards} shards: {largest}");
    }
}

#[test]
fn its_saved_state_is_that_of_a_batch_norm() {
    let paths = |tensors: Vec<(String, TensorData)>| {
        tensors
            .into_iter()
            .map(|(path, _)| path)
            .collect::<Vec<_>>()
    };
    let device = device();
    assert_eq!(
        paths(weights::export(&Net::<SyncBatchNorm>::new(&device))),
        paths(weights::export(&Net::<BatchNorm>::new(&device)))
    );
}

#[test]
fn several_shards_on_a_rank_one_after_the_other_are_refused_with_the_remedy() {
    let errors = ranks(2, |group| {
        let made = Ddp::new(group, Net::<SyncBatchNorm>::new(&device()), options(3));
        let (mut ddp, net) = made.expect("ranks agree");
        let error = ddp.step(&net, |_| Ok::<_, DdpError>(())).err();
        let error = error.expect("two shards on a rank");
        (error.to_string(), error.hint().expect("advice"))
    });
    for (error, hint) in errors {
        assert_eq!(
            error,
            "SyncBatchNorm needs all shards at once, but Ddp::step runs those of a rank one after the other, and the job has \
             3 shards on 2 ranks"
        );
        assert!(hint.contains("step_on_replicas"), "{hint}");
        assert!(hint.contains("number of shards to 2"), "{hint}");
    }
}

/// Shard 2 fails; shards 0, 1 and 3 wait for it, the first two on another rank.
#[test]
fn a_shard_that_fails_among_others_is_the_error_of_all_ranks() {
    let failed = |shard_2: fn() -> Result<(), Box<dyn std::error::Error + Send>>| {
        ranks(2, |group| {
            let device = device();
            let made = Ddp::new(group, Net::<SyncBatchNorm>::new(&device), options(4));
            let (mut ddp, net) = made.expect("ranks agree");
            let reduced = ddp.step_on_replicas(&net, &[], |shard| {
                if shard.shard() == 2 {
                    shard.micro_batches(0);
                    return shard_2().map_err(|error| Failed(error.to_string()));
                }
                let loss = shard.model()?.loss(&[1, 2], &device);
                Ok(shard.backward(loss, 2.0)?)
            });
            reduced.err().expect("an error").0
        })
    };
    let errors = failed(|| Err(Box::new(std::fmt::Error)));
    let own = std::fmt::Error.to_string();
    assert_eq!(errors[1], own);
    assert!(
        errors[0].contains("rank 1") && errors[0].contains(&own),
        "{}",
        errors[0]
    );
    for error in failed(|| Ok(())) {
        assert!(error.contains("shard 2 has no samples"), "{error}");
    }
}

struct Failed(String);

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<DdpError> for Failed {
    fn from(error: DdpError) -> Self {
        Self(error.to_string())
    }
}

/// The other rank waits in the layer's collective.
#[test]
fn a_rank_that_fails_or_has_no_samples_is_an_error_on_all() {
    let failed = |rank_1: fn() -> Result<(), Box<dyn std::error::Error>>| {
        ranks(2, |group| {
            let device = device();
            let made = Ddp::new(group, Net::<SyncBatchNorm>::new(&device), options(2));
            let (mut ddp, net) = made.expect("ranks agree");
            let reduced = ddp.step(&net, |shard| {
                if shard.shard() == 1 {
                    shard.micro_batches(0);
                    return rank_1();
                }
                let loss = shard.model()?.loss(&[1, 2], &device);
                Ok(shard.backward(loss, 2.0)?)
            });
            reduced.err().expect("an error").to_string()
        })
    };
    let [first, second] = &failed(|| Err("its data is gone".into()))[..] else {
        panic!("two ranks");
    };
    assert_eq!(second, "its data is gone");
    assert!(
        first.contains("rank 1") && first.contains("its data is gone"),
        "{first}"
    );
    let errors = failed(|| Ok(()));
    for error in errors {
        assert!(error.contains("shard 1 has no samples"), "{error}");
    }
}
