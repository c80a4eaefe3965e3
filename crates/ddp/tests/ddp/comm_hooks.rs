//! Compressed gradients: the same bits on any number of ranks, exact bytes, and no trace of a step that failed.

use std::num::{NonZeroU64, NonZeroUsize};

use burn::optim::{AdamWConfig, SgdConfig};
use burn::tensor::Tensor;
use paceline_collective::ProcessGroup;
use paceline_ddp::{
    CommHook, Ddp, DdpError, DdpOptions, GradScaler, LocalSgdOptions, OuterOptimizer,
    PowerSgdOptions, ZeroRedundancyOptimizer, weights,
};

use crate::support::*;

const SHARDS: usize = 6;

fn power_sgd(rank: usize, start_iter: u64) -> CommHook {
    CommHook::PowerSgd(PowerSgdOptions {
        rank: NonZeroUsize::new(rank).expect("not 0"),
        start_iter,
    })
}

fn per_shard() -> [CommHook; 4] {
    [
        CommHook::Int8,
        CommHook::TopK { fraction: 0.2 },
        power_sgd(1, 0),
        power_sgd(2, 2),
    ]
}

fn hooked(comm_hook: CommHook) -> DdpOptions {
    DdpOptions {
        comm_hook,
        sums: 1,
        ..options(SHARDS)
    }
}

/// The hash of the weights after some steps.
fn train_with(group: ProcessGroup, hook: CommHook, steps: usize) -> String {
    let (device, mut optimizer) = (device(), optimizer());
    let made = Ddp::new(group, fixed_net(&device), hooked(hook));
    let (mut ddp, mut net) = made.expect("ranks agree");
    for _ in 0..steps {
        let reduced = train_step(&mut ddp, &net, &device).expect("a step");
        assert_eq!(reduced.weight as f32, reduced.sums[0], "counts are exact");
        net = optimizer.step(0.01, net, reduced.grads);
    }
    weights::sha256(&weights::export(&net))
}

/// The shards are uneven, some have no samples, and some do not use the side branch.
#[test]
fn what_is_compressed_shard_by_shard_does_not_depend_on_the_number_of_ranks() {
    let mut seen = vec![ranks(1, |group| train_with(group, CommHook::None, 6)).remove(0)];
    for hook in per_shard() {
        let expected = ranks(1, |group| train_with(group, hook, 6)).remove(0);
        for world in [2, 3, 4, SHARDS] {
            for hash in ranks(world, |group| train_with(group, hook, 6)) {
                assert_eq!(hash, expected, "{hook} on {world} ranks");
            }
        }
        assert!(!seen.contains(&expected), "{hook} has bits of its own");
        seen.push(expected);
    }
}

#[test]
fn before_its_first_step_power_sgd_gives_the_bits_of_no_hook() {
    let plain = ranks(3, |group| train_with(group, CommHook::None, 4));
    assert_eq!(
        ranks(3, |group| train_with(group, power_sgd(1, 4), 4)),
        plain
    );
    assert_ne!(
        ranks(3, |group| train_with(group, power_sgd(1, 3), 4)),
        plain
    );
}

/// Residuals are not lost: over many steps with the same weights and samples, the mean of the compressed gradients is the
/// gradient, although a single one is far from it.
#[test]
fn the_mean_of_compressed_gradients_approaches_the_gradient() {
    let mean = |hook, steps: usize| {
        let all = ranks(2, |group| {
            let device = device();
            let made = Ddp::new(group, fixed_net(&device), hooked(hook));
            let (mut ddp, net) = made.expect("ranks agree");
            let mut mean = vec![0.0; 16 * 3];
            for _ in 0..steps {
                let reduced = ddp.step(&net, |shard| {
                    let part = [shard.shard(), shard.shard() + 20];
                    // Uneven weights.
                    let loss = loss(&shard.model()?, &part, true, &device);
                    shard.backward(loss, 2.0 + shard.shard() as f32)
                });
                let reduced = reduced.unwrap_or_else(|error: DdpError| panic!("{error}"));
                let found = reduced.grads.get::<2>(net.second.weight.id);
                let found = found.expect("a gradient").into_data();
                let found = found.try_to_vec::<f32>().expect("f32");
                mean.iter_mut()
                    .zip(found)
                    .for_each(|(mean, x)| *mean += x / steps as f32);
            }
            mean
        });
        assert_eq!(all[0], all[1], "{hook}");
        all[0].clone()
    };
    let norm = |values: &[f32]| values.iter().map(|x| x * x).sum::<f32>().sqrt();
    let whole = mean(CommHook::None, 1);
    let error = |hook, steps| {
        let found = mean(hook, steps);
        let apart: Vec<f32> = whole.iter().zip(&found).map(|(a, b)| a - b).collect();
        norm(&apart) / norm(&whole)
    };
    assert!(error(CommHook::Int8, 1) < 0.02);
    for hook in [CommHook::TopK { fraction: 0.1 }, power_sgd(1, 0)] {
        let (one, many) = (error(hook, 1), error(hook, 60));
        assert!(one > 0.1 && many < one / 4.0, "{hook}: {one} {many}");
    }
}

/// Bytes that each rank brings to the collectives of each gradient bucket.
fn bytes(world: usize, hook: CommHook, step: usize) -> Vec<usize> {
    let all: Vec<Vec<usize>> = ranks(world, |group| {
        let device = device();
        let made = Ddp::new(group, fixed_net(&device), hooked(hook));
        let (mut ddp, net) = made.expect("ranks agree");
        let timelines = (0..=step).map(|_| train_step(&mut ddp, &net, &device).expect("a step"));
        let mut buckets = timelines.last().expect("a step").timeline.buckets;
        // The tail is never compressed.
        buckets.pop();
        buckets.iter().map(|bucket| bucket.bytes).collect()
    });
    all[0].clone()
}

#[test]
fn the_bytes_of_each_bucket_are_those_of_the_arithmetic() {
    // In the order of the buckets, of at most 64 and 256 bytes: elements with padding, and the parameters' shapes.
    let buckets: [(usize, &[[usize; 2]]); 5] = [
        (48, &[[1, 2], [2, 2], [1, 3]]),
        (48, &[[6, 3], [1, 3]]),
        (64, &[[16, 3], [1, 16]]),
        (32, &[[1, 16], [1, 16]]),
        (96, &[[6, 16]]),
    ];
    let flat = |of: &dyn Fn(usize, &[[usize; 2]]) -> usize| {
        let sizes = buckets.iter().map(|(len, shapes)| of(*len, shapes));
        sizes.collect::<Vec<_>>()
    };
    let plain = bytes(3, CommHook::None, 0);
    assert_eq!(plain.len(), buckets.len(), "{plain:?}");
    let halves: Vec<usize> = plain.iter().map(|bytes| bytes / 2).collect();
    assert_eq!(bytes(3, CommHook::Bf16Compress, 0), halves);
    assert_eq!(bytes(3, CommHook::Fp16Compress, 0), halves);

    for world in [1, 2, 3] {
        let shards = SHARDS / world;
        // A chunk of up to 256 elements of a parameter and its scale, in as many slices as ranks: for every shard, and once for the sum.
        let expected = flat(&|_, shapes| {
            let chunks = shapes
                .iter()
                .map(|shape| (shape[0] * shape[1]).div_ceil(256));
            let slice = chunks.sum::<usize>().div_ceil(world) * 260;
            world * shards * slice + slice
        });
        assert_eq!(bytes(world, CommHook::Int8, 0), expected);
        let expected = flat(&|_, shapes| {
            let len: usize = shapes.iter().map(|[rows, columns]| rows * columns).sum();
            shards * 8 * (len as f64 * 0.2).ceil() as usize
        });
        assert_eq!(bytes(world, CommHook::TopK { fraction: 0.2 }, 0), expected);
        let expected = flat(&|_, shapes| {
            let of = |[rows, columns]: &[usize; 2]| {
                let thin = rows + columns;
                4 * if 2 * thin < rows * columns {
                    thin
                } else {
                    rows * columns
                }
            };
            shapes.iter().map(of).sum()
        });
        assert_eq!(bytes(world, power_sgd(1, 0), 0), expected);
    }
}

#[test]
fn a_step_that_fails_on_all_ranks_leaves_no_residuals() {
    let run = |hook: CommHook, fails: bool| {
        ranks(2, |group| {
            let (device, mut optimizer) = (device(), optimizer());
            let made = Ddp::new(group, fixed_net(&device), hooked(hook));
            let (mut ddp, mut net) = made.expect("ranks agree");
            for step in 0..4 {
                if fails && step == 2 {
                    let last = ddp.shards().end - 1;
                    let failed = ddp.step(&net, |shard| {
                        if shard.shard() == last {
                            return Err("the last shard cannot be read".into());
                        }
                        let loss = loss(&shard.model()?, &[1, 2], true, &device);
                        Ok(shard.backward(loss, 2.0)?)
                    });
                    let error: Box<dyn std::error::Error> = failed.err().expect("an error");
                    assert!(error.to_string().contains("cannot be read"), "{error}");
                }
                let reduced = ddp.step(&net, |shard| {
                    let part = [step, 7 * step + shard.shard()];
                    let loss = loss(&shard.model()?, &part, true, &device);
                    shard.backward(loss, 2.0)
                });
                let reduced = reduced.unwrap_or_else(|error: DdpError| panic!("{error}"));
                net = optimizer.step(0.01, net, reduced.grads);
            }
            weights::sha256(&weights::export(&net))
        })
    };
    for hook in [CommHook::Int8, CommHook::TopK { fraction: 0.1 }] {
        assert_eq!(run(hook, true), run(hook, false), "{hook}");
    }
}

#[test]
fn a_step_that_fails_after_all_gradients_have_arrived_leaves_no_residuals() {
    for hook in [CommHook::TopK { fraction: 0.2 }, power_sgd(1, 0)] {
        ranks(2, |group| {
            let (device, rank) = (device(), group.rank());
            let made = Ddp::new(group, fixed_net(&device), hooked(hook));
            let (mut ddp, mut net) = made.expect("ranks agree");
            let state = |ddp: &Ddp| ddp.hook_state().expect("between two steps");
            if rank == 1 {
                let drifted = |bias: Tensor<1>| bias.inner().add_scalar(1.0).autodiff();
                net.second.bias = net
                    .second
                    .bias
                    .map(|bias| bias.map(|bias| drifted(bias).require_grad()));
            }
            for step in 0..20 {
                let before = state(&ddp);
                let reduced = ddp.step(&net, |shard| {
                    let part = [step, 7 * step + shard.shard()];
                    let loss = loss(&shard.model()?, &part, true, &device);
                    shard.backward(loss, 2.0)
                });
                let after = state(&ddp);
                match reduced {
                    Ok(_) => assert!(rank != 0 || after != before, "{hook} keeps something"),
                    Err(error) => {
                        assert!(matches!(error, DdpError::Diverged { .. }), "{error}");
                        assert_eq!(after, before, "{hook}");
                        return;
                    }
                }
            }
            panic!("the drift is not found");
        });
    }
}

#[test]
fn settings_that_exclude_each_other_are_refused() {
    let group = || ranks(1, |group| group).remove(0);
    let hook = CommHook::TopK { fraction: 0.5 };
    let options = DdpOptions {
        scaler: Some(GradScaler::default()),
        ..hooked(hook)
    };
    let error = Ddp::new(group(), fixed_net(&device()), options).err();
    assert_eq!(
        error.expect("residuals have no scale").to_string(),
        "communication hook topk:0.5 does not work with a gradient scaler: what the hook has not sent yet has the scale of an earlier step"
    );
    let net = fixed_net(&device());
    let (mut ddp, net) = Ddp::new(group(), net, hooked(CommHook::Int8)).expect("ranks agree");
    let adamw = AdamWConfig::new().init();
    let error = ZeroRedundancyOptimizer::new(&mut ddp, &net, adamw).err();
    let error = error.expect("slices");
    assert_eq!(
        error.to_string(),
        "communication hook int8 does not work with a sharded optimizer: the hook compresses whole gradients, of which a rank gets only \
         its slices"
    );
    let hint = "take bf16, fp16 or none; stages of a pipeline divide the optimizer's state with every hook";
    assert_eq!(error.hint().as_deref(), Some(hint));
}

fn local(period: u64, start_iter: u64, outer: Option<OuterOptimizer>) -> CommHook {
    CommHook::LocalSgd(LocalSgdOptions {
        period: NonZeroU64::new(period).expect("not 0"),
        start_iter,
        outer,
    })
}

/// The weights of each rank after each step.
fn train_locally(world: usize, hook: CommHook, steps: usize) -> Vec<Vec<Vec<f32>>> {
    ranks(world, |group| {
        let (device, mut optimizer) = (device(), SgdConfig::new().init());
        let made = Ddp::new(group, fixed_net(&device), hooked(hook));
        let (mut ddp, mut net) = made.expect("ranks agree");
        let steps = (0..steps).map(|_| {
            let reduced = train_step(&mut ddp, &net, &device).expect("a step");
            let stepped = optimizer.step(0.05, net.clone(), reduced.grads);
            net = ddp.average(stepped).expect("ranks agree");
            let weight = net.first.weight.val().into_data();
            weight.try_to_vec::<f32>().expect("f32")
        });
        steps.collect()
    })
}

#[test]
fn local_steps_part_the_ranks_and_the_end_of_a_round_joins_them() {
    let found = train_locally(3, local(3, 2, None), 8);
    let is_one: Vec<bool> = (0..8)
        .map(|step| found.iter().all(|rank| rank[step] == found[0][step]))
        .collect();
    assert_eq!(is_one, [true, true, false, false, true, false, false, true]);
    // Rank 0 had no gradients of others in step 2, and steps 0 and 1 are those without a hook.
    let plain = train_locally(3, CommHook::None, 3);
    assert_eq!(found[0][..2], plain[0][..2]);
    assert_ne!(found[0][2], plain[0][2]);
}

/// With SGD, one rate and even weights, the average of one local step is the step of the average.
#[test]
fn a_round_of_one_step_is_an_ordinary_step() {
    let run = |hook| {
        ranks(2, |group| {
            let (device, mut optimizer) = (device(), SgdConfig::new().init());
            let made = Ddp::new(group, fixed_net(&device), hooked(hook));
            let (mut ddp, mut net) = made.expect("ranks agree");
            for step in 0..3 {
                let reduced = ddp.step(&net, |shard| {
                    let part = [step, step + shard.shard()];
                    let loss = loss(&shard.model()?, &part, true, &device);
                    shard.backward(loss, 2.0)
                });
                let reduced = reduced.unwrap_or_else(|error: DdpError| panic!("{error}"));
                net = optimizer.step(0.05, net, reduced.grads);
                net = ddp.average(net).expect("ranks agree");
            }
            let weight = net.first.weight.val().into_data();
            weight.try_to_vec::<f32>().expect("f32")
        })
    };
    let plain = run(CommHook::None);
    let outer = OuterOptimizer {
        lr: 1.0,
        momentum: 0.0,
    };
    for hook in [local(1, 0, None), local(1, 0, Some(outer))] {
        let found = run(hook);
        assert_eq!(found[0], found[1], "{hook}");
        for (a, b) in plain[0].iter().zip(&found[0]) {
            assert!((a - b).abs() < 1e-5, "{hook}: {a} {b}");
        }
    }
}

/// The arithmetic of two rounds, from the same local steps without an outer optimizer.
#[test]
fn the_outer_step_is_sgd_with_nesterov_momentum() {
    let (lr, momentum) = (0.7_f32, 0.9_f32);
    let start = fixed_net(&device()).first.weight.val().into_data();
    let start = start.try_to_vec::<f32>().expect("f32");
    let mean = &train_locally(2, local(2, 0, None), 2)[0][1];
    let outer = Some(OuterOptimizer { lr, momentum });
    let found = train_locally(2, local(2, 0, outer), 4);
    assert_eq!(found[0][1], found[1][1]);
    assert_eq!(found[0][3], found[1][3]);
    for ((start, mean), found) in start.iter().zip(mean).zip(&found[0][1]) {
        let gradient = start - mean;
        let expected = start - lr * (gradient + momentum * gradient);
        assert!((found - expected).abs() < 1e-6, "{found} {expected}");
    }
}

#[test]
fn a_forgotten_average_is_an_error() {
    let errors = ranks(2, |group| {
        let device = device();
        let made = Ddp::new(group, fixed_net(&device), hooked(local(4, 0, None)));
        let (mut ddp, net) = made.expect("ranks agree");
        train_step(&mut ddp, &net, &device).expect("a step");
        let error = train_step(&mut ddp, &net, &device).err();
        let error = error.expect("no average");
        (error.to_string(), error.hint().expect("advice"))
    });
    let (error, hint) = &errors[0];
    assert_eq!(
        error,
        "step 1: the weights after the last step have not been averaged"
    );
    assert!(hint.contains("Ddp::average"), "{hint}");
}

#[test]
fn local_steps_send_no_gradients() {
    assert_eq!(bytes_of_step(2, local(2, 0, None)), 0);
    assert!(bytes_of_step(2, local(2, 1, None)) > 0);
}

fn bytes_of_step(world: usize, hook: CommHook) -> usize {
    bytes(world, hook, 0).iter().sum()
}
