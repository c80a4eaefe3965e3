//! Models made of blocks: the same bits with and without recomputation, buckets that leave during the backward pass, and
//! failures inside a block. In a process of their own and one at a time, because Burn has one stream of random numbers for each
//! process.

#[expect(dead_code, reason = "the other tests of this crate use the rest")]
#[path = "ddp/support.rs"]
mod support;

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use burn::module::Module;
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig,
};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Tensor};
use paceline_collective::ProcessGroup;
use paceline_ddp::{
    BucketCaps, Ddp, DdpError, DdpOptions, GradScaler, Precision, ShardStep, SyncBatchNorm, in_f32,
    weights,
};
use paceline_nn::tape::{Point, custom};
use paceline_nn::{Block, Pass, Recompute};

use crate::support::{batch, device, optimizer, options, ranks};

fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(|broken| broken.into_inner())
}

/// A residual layer with every kind of state: dropout, running statistics, a parameter that is never read.
#[derive(Module, Debug)]
struct Layer {
    norm: LayerNorm,
    up: Linear,
    batch_norm: BatchNorm,
    down: Linear,
    dropout: Dropout,
    idle: Linear,
}

impl Layer {
    fn new(dropout: f64, device: &Device) -> Self {
        Self {
            norm: LayerNormConfig::new(6).init(device),
            up: LinearConfig::new(6, 12).init(device),
            batch_norm: BatchNormConfig::new(12).init(device),
            down: LinearConfig::new(12, 6).init(device),
            dropout: DropoutConfig::new(dropout).init(),
            idle: LinearConfig::new(2, 2).init(device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let hidden = in_f32(x.clone(), |x| self.norm.forward(x));
        let hidden = gelu(self.up.forward(hidden));
        let hidden = in_f32(hidden, |x| self.batch_norm.forward(x));
        x + self.dropout.forward(self.down.forward(hidden))
    }
}

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    layers: Vec<Block<Layer>>,
    /// The first layer once more, without its own parameters.
    tied: Block<Layer>,
    dropout: Dropout,
    last: Linear,
}

impl Net {
    fn new(dropout: f64, device: &Device) -> Self {
        device.seed(1);
        let layer = |index| Block::new(index, Layer::new(dropout, device));
        let layers: Vec<_> = (0..2).map(layer).collect();
        let net = Self {
            first: LinearConfig::new(6, 6).init(device),
            tied: Block::new(2, layers[0].module().clone()),
            layers,
            dropout: DropoutConfig::new(dropout).init(),
            last: LinearConfig::new(6, 3).init(device),
        };
        // Burn makes weights at their first use: now.
        let _ = net.valid();
        net
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let mut x = self.dropout.forward(self.first.forward(x));
        for layer in self.layers.iter().chain([&self.tied]) {
            x = layer.forward(x, Layer::forward);
        }
        self.last.forward(self.dropout.forward(x))
    }
}

/// The hash of the weights after three steps of two micro-batches for each of four shards.
fn train(group: ProcessGroup, net: &Net, recompute: Recompute, precision: Precision) -> String {
    train_on(0, group, net, recompute, precision)
}

/// The same, with the shards of each rank on this many replicas; 0 for none.
fn train_on(
    replicas: usize,
    group: ProcessGroup,
    net: &Net,
    recompute: Recompute,
    precision: Precision,
) -> String {
    let device = device();
    let options = DdpOptions {
        accumulate: 2,
        recompute,
        precision,
        scaler: (precision == Precision::F16).then(GradScaler::default),
        ..options(4)
    };
    // With running statistics of its own.
    let net = net.valid().train();
    let (mut ddp, mut net) = Ddp::new(group, net, options).expect("ranks agree");
    let mut optimizer = optimizer();
    for step in 0..3 {
        let run = |shard: &mut ShardStep<'_, Net>| {
            for micro in 0..2 {
                let first = (step * 4 + shard.shard()) * 20 + micro * 5;
                let indices: Vec<usize> = (first..first + 5).collect();
                let (x, y) = batch(&indices, shard.device());
                let output = shard.model()?.forward(precision.input(x));
                let loss = (precision.logits(output) - y).powf_scalar(2.0).mean();
                shard.backward(loss, 5.0)?;
            }
            Ok::<_, DdpError>(())
        };
        let reduced = match replicas {
            0 => ddp.step(&net, run),
            _ => ddp.step_on_replicas(&net, &vec![device.clone(); replicas], run),
        };
        let reduced = reduced.expect("a step");
        assert_eq!(
            reduced.unused,
            ["0", "1"]
                .map(|at| format!("layers.{at}.idle"))
                .iter()
                .flat_map(|idle| [format!("{idle}.weight"), format!("{idle}.bias")])
                .collect::<Vec<_>>()
        );
        net = optimizer.step(0.01, net, reduced.grads);
    }
    weights::sha256(&weights::export(&net))
}

/// One rank, because ranks that are threads share Burn's random numbers.
#[test]
fn recomputed_blocks_train_to_the_same_bits_in_every_precision() {
    let _alone = alone();
    let net = Net::new(0.2, &device());
    let hash = |recompute, precision| {
        let one = |group| train(group, &net, recompute, precision);
        ranks(1, one).remove(0)
    };
    let mut seen = Vec::new();
    for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
        let expected = hash(Recompute::None, precision);
        for policy in ["blocks", "2", "burn"] {
            let recompute = policy.parse().expect("a policy");
            assert_eq!(
                hash(recompute, precision),
                expected,
                "{precision}, {policy}"
            );
        }
        assert!(!seen.contains(&expected), "the precision matters");
        seen.push(expected);
    }
}

#[test]
fn recomputed_blocks_train_to_the_same_bits_on_any_number_of_ranks() {
    let _alone = alone();
    let net = Net::new(0.0, &device());
    let hashes =
        |world, recompute| ranks(world, |group| train(group, &net, recompute, Precision::F32));
    let expected = hashes(1, Recompute::None).remove(0);
    for world in 1..=4 {
        for hash in hashes(world, Recompute::Blocks) {
            assert_eq!(hash, expected, "{world} ranks");
        }
    }
}

#[test]
fn replicas_in_threads_train_to_the_same_bits_in_every_precision_with_recomputed_blocks_too() {
    let _alone = alone();
    let net = Net::new(0.2, &device());
    let hash = |replicas, recompute, precision| {
        let one = |group| train_on(replicas, group, &net, recompute, precision);
        ranks(1, one).remove(0)
    };
    for precision in [Precision::F32, Precision::F16] {
        let expected = hash(0, Recompute::None, precision);
        for replicas in [1, 2, 3, 4, 7] {
            for recompute in [Recompute::None, Recompute::Blocks] {
                let found = hash(replicas, recompute, precision);
                assert_eq!(
                    found, expected,
                    "{precision}, {recompute}, {replicas} replicas"
                );
            }
        }
    }
}

#[test]
fn replicas_of_several_ranks_train_to_the_same_bits() {
    let _alone = alone();
    let net = Net::new(0.0, &device());
    let hashes = |world, replicas| {
        ranks(world, |group| {
            train_on(replicas, group, &net, Recompute::None, Precision::F32)
        })
    };
    let expected = hashes(1, 0).remove(0);
    assert_eq!(hashes(2, 2), [expected.clone(), expected]);
}

/// The first failed shard is reported, nothing of the step is applied, and the next step runs.
#[test]
fn a_replica_that_fails_ends_the_step_and_leaves_the_model_as_it_was() {
    let _alone = alone();
    let device = device();
    let group = ranks(1, |group| group).remove(0);
    let (mut ddp, net) = Ddp::new(group, Net::new(0.2, &device), options(4)).expect("one rank");
    let before = weights::sha256(&weights::export(&net));
    let devices = vec![device; 2];
    let mut step = |fails: bool| {
        ddp.step_on_replicas(&net, &devices, |shard: &mut ShardStep<'_, Net>| {
            if fails && shard.shard() % 2 == 1 {
                return Err(DdpError::Device(format!("shard {} is lost", shard.shard())));
            }
            let (x, _) = batch(&[1, 2, 3], shard.device());
            let loss = shard.model()?.forward(x).mean();
            shard.backward(loss, 3.0)
        })
    };
    let error = step(true).err().expect("the step fails").to_string();
    assert!(error.contains("shard 1 is lost"), "{error}");
    assert_eq!(weights::sha256(&weights::export(&net)), before);
    assert_eq!(step(false).expect("a step").weight, 12.0);
    assert_ne!(
        weights::sha256(&weights::export(&net)),
        before,
        "running statistics moved"
    );
}

#[derive(Clone, Debug, PartialEq)]
enum Event {
    /// A recomputed layer begins its second run.
    Again(usize),
    /// A bucket is complete.
    Ready(usize),
}

#[derive(Module, Debug)]
struct Deep {
    layers: Vec<Block<Linear>>,
}

/// While the layers before are still to be computed again, the buckets of later layers have left.
#[test]
fn buckets_leave_between_the_recomputed_blocks() {
    const LAYERS: usize = 6;
    let _alone = alone();
    let orders = ranks(2, |group| {
        let device = device();
        let layer_bytes = (64 * 64 + 64) * size_of::<f32>();
        let options = DdpOptions {
            shards: Some(2),
            caps: BucketCaps {
                first_bytes: layer_bytes,
                bytes: layer_bytes,
            },
            recompute: Recompute::Blocks,
            ..DdpOptions::default()
        };
        let layer = |index| Block::new(index, LinearConfig::new(64, 64).init(&device));
        let net = Deep {
            layers: (0..LAYERS).map(layer).collect(),
        };
        let (mut ddp, net) = Ddp::new(group, net, options).expect("ranks agree");
        assert_eq!(ddp.bucket_count(), LAYERS);
        let runs: Arc<Mutex<Vec<(usize, Instant)>>> = Arc::default();
        let reduced = ddp.step(&net, |shard| {
            let x = Tensor::<2>::ones([16, 64], &device);
            let model = shard.model()?;
            let output = model.layers.iter().fold(x, |x, layer| {
                let (index, runs) = (layer.index(), runs.clone());
                layer.forward(x, move |linear, x| {
                    runs.lock().unwrap().push((index, Instant::now()));
                    gelu(linear.forward(x))
                })
            });
            shard.backward(output.mean(), 1.0)
        });
        let timeline = reduced.expect("a step").timeline;
        let runs = runs.lock().unwrap().clone();
        assert_eq!(runs.len(), 2 * LAYERS, "each layer runs twice");
        let again = runs[LAYERS..]
            .iter()
            .map(|(at, time)| (*time, Event::Again(*at)));
        let ready = timeline.buckets.iter().take(LAYERS).enumerate();
        let ready = ready.map(|(at, bucket)| (bucket.ready, Event::Ready(at)));
        let mut order: Vec<_> = again.chain(ready).collect();
        order.sort_by_key(|(time, _)| *time);
        order
            .into_iter()
            .map(|(_, event)| event)
            .collect::<Vec<_>>()
    });
    for order in orders {
        let place = |event| order.iter().position(|e| *e == event).expect("an event");
        // Bucket b has the gradients of layer LAYERS - 1 - b.
        for bucket in 0..LAYERS - 2 {
            let layer = LAYERS - 1 - bucket;
            // One layer of slack, as in the tests beside `hook.rs`.
            let (ready, again) = (Event::Ready(bucket), Event::Again(layer - 2));
            assert!(place(ready) < place(again), "{order:?}");
        }
    }
}

/// The error of a step in which `part` runs inside a block, on each of two ranks.
fn error_of(part: impl Fn(&Tensor<2>, usize, Tensor<2>) -> Tensor<2> + Sync) -> Vec<DdpError> {
    let _alone = alone();
    ranks(2, |group| {
        let device = device();
        let rank = group.rank();
        let options = DdpOptions {
            recompute: Recompute::Blocks,
            ..options(2)
        };
        let net = Net::new(0.2, &device);
        let (mut ddp, net) = Ddp::new(group, net, options).expect("ranks agree");
        let step = ddp.step(&net, |shard| {
            let model = shard.model()?;
            let weight = model.first.weight.val();
            let x = model.forward(Tensor::ones([4, 6], &device));
            let x = part(&weight, rank, x);
            shard.backward(x.mean(), 1.0)
        });
        step.err().expect("the step fails")
    })
}

#[test]
fn a_block_that_captures_a_tracked_tensor_fails_the_step() {
    let errors = error_of(|weight, _, x| {
        let weight = weight.clone();
        Block::new(9, DropoutConfig::new(0.5).init())
            .forward(x, move |_, x| x + weight.clone().sum().unsqueeze::<2>())
    });
    for error in &errors {
        assert!(error.to_string().contains("captures a tensor"), "{error}");
    }
    // A rank that hears of the other one's failure before its own has no advice.
    let mut hints = errors.iter().filter_map(DdpError::hint);
    assert!(hints.any(|hint| hint.contains("input")), "{errors:?}");
}

/// One rank fails in its backward pass, after nothing or something was sent; its peer must not wait for the rest.
#[test]
fn a_failure_in_the_backward_pass_ends_the_step_on_all_ranks() {
    let errors = error_of(|_, rank, x| {
        let failure = Pass::current().expect("a step is a pass").failure().clone();
        let origin = Point::origin(&x);
        custom(x.clone(), x, &origin, move |gradient| {
            failure.attempt(|| {
                if rank == 1 {
                    Err("no more")
                } else {
                    Ok(gradient)
                }
            })
        })
    });
    assert_eq!(errors[1].to_string(), "step 0: no more");
    assert!(errors[0].to_string().contains("no more"), "{}", errors[0]);
    assert_eq!(errors[0].culprit(), Some(1));
}

/// Dropout around a synchronised norm, and one in a block.
#[derive(Module, Debug)]
struct Synced {
    dropout: Dropout,
    norm: SyncBatchNorm,
    block: Block<SyncedLayer>,
    last: Linear,
}

#[derive(Module, Debug)]
struct SyncedLayer {
    norm: SyncBatchNorm,
    dropout: Dropout,
}

impl Synced {
    fn new(device: &Device) -> Self {
        device.seed(1);
        let norm = || BatchNormConfig::new(6).init(device).into();
        let dropout = DropoutConfig::new(0.3).init();
        let layer = SyncedLayer {
            norm: norm(),
            dropout: dropout.clone(),
        };
        Self {
            dropout,
            norm: norm(),
            block: Block::new(0, layer),
            last: LinearConfig::new(6, 3).init(device),
        }
        .materialize()
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.norm.forward(self.dropout.forward(x));
        let x = self.block.forward(self.dropout.forward(x), |layer, x| {
            let x = layer.norm.forward(layer.dropout.forward(x));
            layer.dropout.forward(x)
        });
        self.last.forward(self.dropout.forward(x))
    }
}

/// The shards of the rank take turns at every norm, so their random numbers would mix if the numbers after a norm did not
/// belong to the shard.
#[test]
fn shards_that_normalise_together_draw_random_numbers_of_their_own() {
    let _alone = alone();
    let train = |shards: &[usize], recompute| {
        let net = Synced::new(&device());
        let group = ranks(1, |group| group).remove(0);
        let options = DdpOptions {
            accumulate: 2,
            recompute,
            ..options(shards.len())
        };
        let (mut ddp, mut net) = Ddp::new(group, net, options).expect("one rank");
        let mut optimizer = optimizer();
        for step in 0..3 {
            let reduced = ddp.step_on_replicas(&net, &[], |shard| {
                for micro in 0..2 {
                    let first = (step * 4 + shards[shard.shard()]) * 20 + micro * 5;
                    let indices: Vec<usize> = (first..first + 5).collect();
                    let (x, y) = batch(&indices, shard.device());
                    let loss = (shard.model()?.forward(x) - y).powf_scalar(2.0).mean();
                    shard.backward(loss, 5.0)?;
                }
                Ok::<_, DdpError>(())
            });
            net = optimizer.step(0.01, net, reduced.expect("a step").grads);
        }
        weights::sha256(&weights::export(&net))
    };
    let expected = train(&[0, 1, 2, 3], Recompute::None);
    assert_eq!(train(&[0, 1, 2, 3], Recompute::None), expected);
    assert_eq!(train(&[0, 1, 2, 3], Recompute::Blocks), expected);
    assert_ne!(train(&[0, 1, 2], Recompute::None), expected);
}
