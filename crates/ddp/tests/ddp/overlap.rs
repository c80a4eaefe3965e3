//! Gradients are sent while the backward pass still runs.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor, TensorData};
use paceline_collective::ProcessGroup;
use paceline_ddp::{BucketCaps, Ddp, DdpError, DdpOptions, weights};

use crate::support::{device, ranks};

/// Eight layers deep, one bucket each.
#[derive(Module, Debug)]
struct Deep {
    layers: Vec<Linear>,
}

impl Deep {
    fn new(device: &Device) -> Self {
        Self {
            layers: (0..8)
                .map(|_| LinearConfig::new(64, 64).init(device))
                .collect(),
        }
    }

    fn forward(&self, mut x: Tensor<2>) -> Tensor<2> {
        for layer in &self.layers {
            x = relu(layer.forward(x));
        }
        x
    }
}

/// One shard per rank, so that the first backward pass sends gradients.
fn per_rank() -> DdpOptions {
    DdpOptions {
        shards: Some(2),
        ..DdpOptions::default()
    }
}

/// Buckets of one layer each become ready in order, all before the pass returns. The tests beside `hook.rs` check when in the
/// pass each gradient is delivered.
#[test]
fn all_gradient_buckets_are_ready_before_the_backward_pass_returns() {
    let timelines = ranks(2, |group| {
        let device = device();
        let layer_bytes = (64 * 64 + 64) * size_of::<f32>();
        let options = DdpOptions {
            caps: BucketCaps {
                first_bytes: layer_bytes,
                bytes: layer_bytes,
            },
            ..per_rank()
        };
        let (mut ddp, net) = Ddp::new(group, Deep::new(&device), options).expect("ranks agree");
        assert_eq!(ddp.bucket_count(), 8);
        let reduced = ddp
            .step(&net, |shard| {
                let x = Tensor::<2>::ones([256, 64], &device);
                let loss = shard.model()?.forward(x).mean();
                shard.backward(loss, 1.0)
            })
            .expect("a step");
        reduced.timeline
    });
    for timeline in timelines {
        let end = timeline.backward_end().expect("a backward pass");
        let ready: Vec<_> = timeline.buckets.iter().map(|bucket| bucket.ready).collect();
        assert!(ready.is_sorted(), "buckets become ready in launch order");
        let early = ready.iter().filter(|at| **at < end).count();
        assert_eq!(
            early, 8,
            "every gradient bucket is ready before the pass has returned"
        );
    }
}

/// Layers that run in some order, between two that are never used. In the last step the one that runs third is left out.
#[derive(Module, Debug)]
struct Shuffled {
    unused: Linear,
    layers: Vec<Linear>,
    last_unused: Linear,
}

/// By the order of registration.
type Order = [usize; 6];

const SHUFFLED: Order = [3, 0, 5, 1, 4, 2];
const REVERSED: Order = [5, 4, 3, 2, 1, 0];
const STEPS: u64 = 4;

impl Shuffled {
    fn new(device: &Device) -> Self {
        let layer = || {
            let layer: Linear = LinearConfig::new(16, 16).init(device);
            let tensors = weights::export(&layer).into_iter();
            let fixed = tensors.map(|(path, data)| {
                let value = |at: usize| ((at * 37) % 29) as f32 / 29.0 - 0.4;
                let values: Vec<f32> = (0..data.num_elements()).map(value).collect();
                (path, TensorData::new(values, data.shape().clone()))
            });
            weights::import(layer, fixed.collect())
        };
        Self {
            unused: layer(),
            layers: SHUFFLED.iter().map(|_| layer()).collect(),
            last_unused: layer(),
        }
    }

    fn loss(&self, order: Order, step: u64, shard: usize, device: &Device) -> Tensor<1> {
        let mut x = Tensor::<2>::ones([4, 16], device).mul_scalar(0.1 * (shard + 1) as f32);
        for (turn, at) in order.into_iter().enumerate() {
            if step + 1 < STEPS || turn != 2 {
                x = relu(self.layers[at].forward(x));
            }
        }
        x.mean()
    }
}

/// How many buckets of each step left before its backward pass ended, and the hash of the weights.
fn train_shuffled(group: ProcessGroup, order: Order) -> (Vec<usize>, String) {
    let device = device();
    let layer_bytes = (16 * 16 + 16) * size_of::<f32>();
    let options = DdpOptions {
        shards: Some(4),
        caps: BucketCaps {
            first_bytes: layer_bytes,
            bytes: layer_bytes,
        },
        ..DdpOptions::default()
    };
    let made = Ddp::new(group, Shuffled::new(&device), options);
    let (mut ddp, mut net) = made.expect("ranks agree");
    let mut optimizer = SgdConfig::new().init();
    let early = (0..STEPS).map(|step| {
        let reduced = ddp.step(&net, |shard| {
            let loss = shard.model()?.loss(order, step, shard.shard(), &device);
            shard.backward(loss, 1.0)
        });
        let reduced = reduced.unwrap_or_else(|error: DdpError| panic!("{error}"));
        net = optimizer.step(0.1, net.clone(), reduced.grads);
        let end = reduced.timeline.backward_end().expect("a backward pass");
        // A bucket leaves when it and all before it are ready.
        let buckets = reduced.timeline.buckets.iter();
        buckets.take_while(|bucket| bucket.ready < end).count()
    });
    let early = early.collect();
    (early, weights::sha256(&weights::export(&net)))
}

/// Of eight buckets with a layer each, those of unused layers wait for nobody: they are known when the gradient of a layer behind them comes.
/// In the first step, two or five layers wait for one that was registered after them and ran before; the first one registered, which is
/// unused, is behind all. From the second on, the six that are used leave during the backward pass, and so does the one that is left out.
#[test]
fn buckets_leave_in_the_order_of_the_backward_pass_and_wait_for_no_unused_parameter() {
    for order in [SHUFFLED, REVERSED] {
        let (_, expected) = train_shuffled(ranks(1, |group| group).remove(0), order);
        for world in [2, 4] {
            for (early, hash) in ranks(world, |group| train_shuffled(group, order)) {
                assert_eq!(early, [7, 6, 6, 6], "{world} ranks, {order:?}");
                assert_eq!(hash, expected, "{world} ranks, {order:?}");
            }
        }
    }
}

/// Gradients lie in the memory of their buckets, which the next step needs.
#[test]
fn gradients_that_the_program_keeps_stay_as_they_are() {
    let kept = ranks(2, |group| {
        let device = device();
        let (mut ddp, net) = Ddp::new(group, Deep::new(&device), per_rank()).expect("ranks agree");
        let mut step = |scale: f32| {
            let reduced = ddp.step(&net, |shard| {
                let x = Tensor::<2>::ones([4, 64], &device).mul_scalar(scale);
                let loss = shard.model()?.forward(x).mean();
                shard.backward(loss, 1.0)
            });
            let grads = reduced
                .unwrap_or_else(|error: DdpError| panic!("{error}"))
                .grads;
            let layer = net.layers.last().expect("eight layers");
            let gradient = grads.get::<2>(layer.weight.id).expect("it is used");
            (gradient.clone(), gradient.into_data())
        };
        let all = [1.0, 2.0, 0.0, 3.0].map(&mut step);
        // Written in place, which the other owners must not see.
        let (written, _) = step(4.0);
        let _ = written.mul_scalar(0.0);
        all.map(|(kept, at_once)| (kept.into_data(), at_once))
    });
    for (kept, at_once) in kept.into_iter().flatten() {
        assert_eq!(kept, at_once);
    }
}

#[test]
fn after_a_failure_every_later_step_has_its_first_cause() {
    let errors = ranks(2, |group| {
        let device = device();
        let rank = group.rank();
        let (mut ddp, net) = Ddp::new(group, Deep::new(&device), per_rank()).expect("ranks agree");
        let mut one_step = |fails: bool| {
            let result = ddp.step(&net, |shard| {
                let x = Tensor::<2>::ones([4, 64], &device);
                let loss = shard.model()?.forward(x).mean();
                shard.backward(loss, 1.0)?;
                // Every parameter is used, so gradients have been sent by now.
                if fails {
                    return Err("a late error".into());
                }
                Ok(())
            });
            let error: Box<dyn std::error::Error> = result.err().expect("an error");
            error.to_string()
        };
        (one_step(rank == 1), one_step(false), one_step(false))
    });
    for (rank, (first, second, third)) in errors.iter().enumerate() {
        assert!(first.contains("a late error"), "rank {rank}: {first}");
        assert!(second.contains("a late error"), "rank {rank}: {second}");
        assert_eq!(second, third);
    }
}
