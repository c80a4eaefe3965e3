//! Gradients are sent while the backward pass still runs.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use paceline_ddp::{BucketCaps, Ddp, DdpOptions};

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
