//! What one step returns: gradients, weights, sums, unused parameters, errors.

use std::collections::HashMap;

use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use paceline_collective::ProcessGroup;
use paceline_ddp::{
    Ddp, DdpError, DdpOptions, Give, GradScaler, GradScalerOptions, Recovery, weights,
};

use crate::support::*;

fn gradient(grads: &GradientsParams, net: &Net) -> Vec<f32> {
    let gradient: Tensor<2> = grads.get(net.first.weight.id).expect("a gradient");
    gradient.into_data().try_to_vec().expect("f32")
}

#[test]
fn one_shard_on_one_rank_gives_the_bits_that_plain_burn_gives() {
    let device = device();
    let net = fixed_net(&device);
    let indices: Vec<usize> = (0..10).collect();
    let plain = GradientsParams::from_grads(loss(&net, &indices, true, &device).backward(), &net);
    let expected = gradient(&plain, &net);

    let group = ranks(1, |group| group).remove(0);
    let (mut ddp, net) = Ddp::new(group, fixed_net(&device), options(1)).expect("ranks agree");
    let reduced = ddp
        .step(&net, |shard| {
            let loss = loss(&shard.model()?, &indices, true, &device);
            shard.backward(loss, 10.0)
        })
        .expect("a step");
    assert_eq!(gradient(&reduced.grads, &net), expected);
    assert_eq!(reduced.weight, 10.0);
}

#[test]
fn a_parameter_that_no_rank_uses_keeps_no_gradient_and_is_named() {
    let found = ranks(2, |group| {
        let device = device();
        let (mut ddp, net) = Ddp::new(group, fixed_net(&device), options(2)).expect("ranks agree");
        let reduced = ddp
            .step(&net, |shard| {
                let loss = loss(&shard.model()?, &[1, 2, 3], false, &device);
                shard.backward(loss, 3.0)
            })
            .expect("a step");
        (reduced.unused, reduced.grads.len())
    });
    for (unused, grads) in found {
        assert_eq!(
            unused,
            ["side.weight", "side.bias", "never.weight", "never.bias"]
        );
        assert_eq!(grads, 6);
    }
}

#[test]
fn a_parameter_that_only_some_ranks_use_gets_the_average_on_all() {
    let found = ranks(2, |group| {
        let device = device();
        let (mut ddp, net) = Ddp::new(group, fixed_net(&device), options(2)).expect("ranks agree");
        let reduced = ddp
            .step(&net, |shard| {
                let side = shard.shard() == 1;
                let loss = loss(&shard.model()?, &[4, 5], side, &device);
                shard.backward(loss, 2.0)
            })
            .expect("a step");
        let side: Tensor<2> = reduced.grads.get(net.side.weight.id).expect("a gradient");
        side.into_data().try_to_vec::<f32>().expect("f32")
    });
    let device = device();
    let net = fixed_net(&device);
    let plain = GradientsParams::from_grads(loss(&net, &[4, 5], true, &device).backward(), &net);
    let plain: Tensor<2> = plain.get(net.side.weight.id).expect("a gradient");
    let half: Vec<f32> = plain.into_data().try_to_vec::<f32>().expect("f32");
    let half: Vec<f32> = half.iter().map(|x| x * 2.0 / 4.0).collect();
    assert_eq!(found[0], found[1]);
    assert_eq!(found[0], half);
}

#[test]
fn accumulation_gives_the_gradient_of_the_whole_batch() {
    let device = device();
    let indices: Vec<usize> = (0..9).collect();
    let run = |chunk: usize| {
        let group = ranks(1, |group| group).remove(0);
        let mut net = fixed_net(&device);
        net.norm = net.norm.clone();
        let (mut ddp, net) = Ddp::new(group, net, options(1)).expect("ranks agree");
        let reduced = ddp
            .step(&net, |shard| {
                let micro: Vec<&[usize]> = indices.chunks(chunk).collect();
                shard.micro_batches(micro.len());
                for part in micro {
                    let net = shard.model()?;
                    let (x, y) = batch(part, &device);
                    // Without batch normalisation, whose statistics depend on the micro-batch.
                    let output = net.second.forward(net.first.forward(x));
                    let loss = (output - y).powf_scalar(2.0).mean();
                    shard.backward(loss, part.len() as f32)?;
                }
                Ok::<(), DdpError>(())
            })
            .expect("a step");
        gradient(&reduced.grads, &net)
    };
    let (whole, parts) = (run(9), run(4));
    for (a, b) in whole.iter().zip(&parts) {
        assert!((a - b).abs() < 1e-6, "{a} and {b}");
    }
}

#[test]
fn an_error_in_the_middle_of_accumulation_leaves_no_trace() {
    let run = |fail: bool| {
        let hashes = ranks(2, |group| {
            let device = device();
            let mut optimizer = optimizer();
            let options = DdpOptions {
                accumulate: 2,
                ..options(2)
            };
            let (mut ddp, mut net) =
                Ddp::new(group, fixed_net(&device), options).expect("ranks agree");
            if fail {
                let failed = ddp.step(&net, |shard| {
                    let loss = loss(&shard.model()?, &[1, 2], true, &device);
                    shard.backward(loss, 2.0)?;
                    Err("the second micro-batch cannot be read".into())
                });
                let error: Box<dyn std::error::Error> = failed.err().expect("an error");
                assert!(error.to_string().contains("cannot be read"));
            }
            for _ in 0..2 {
                let reduced = ddp
                    .step(&net, |shard| {
                        for part in [[1, 2], [3, 4]] {
                            let base = 10 * shard.shard() + 20 * shard.step() as usize;
                            let part = part.map(|i| i + base);
                            let loss = loss(&shard.model()?, &part, true, &device);
                            shard.backward(loss, 2.0)?;
                        }
                        Ok::<(), DdpError>(())
                    })
                    .expect("a step");
                net = optimizer.step(0.01, net, reduced.grads);
            }
            weights::sha256(&weights::export(&net))
        });
        assert_eq!(hashes[0], hashes[1]);
        hashes[0].clone()
    };
    assert_eq!(run(true), run(false));
}

/// Rank 1 fails in its closure, and rank 0 when it waits for rank 1's gradients.
#[test]
fn a_failed_step_leaves_no_trace_and_can_be_repeated_on_a_new_group() {
    const STEPS: usize = 5;
    let run = |fail_at: Option<u64>| {
        let group = || ProcessGroup::local(2, &group_options()).expect("a local group");
        let groups: Vec<(ProcessGroup, ProcessGroup)> = group().into_iter().zip(group()).collect();
        let hashes = paceline_testing::on_threads(groups, |(group, next_group)| {
            let device = device();
            let mut optimizer = optimizer();
            let options = DdpOptions {
                sums: 1,
                scaler: Some(GradScaler::new(GradScalerOptions::default()).expect("good options")),
                ..options(4)
            };
            let rank = group.rank();
            let (mut ddp, mut net) =
                Ddp::new(group, fixed_net(&device), options.clone()).expect("ranks agree");
            let mut next_group = Some(next_group);
            while (ddp.next_step() as usize) < STEPS {
                let is_failing = next_group.is_some() && fail_at == Some(ddp.next_step());
                if is_failing {
                    let hash = |net| weights::sha256(&weights::export(net));
                    let before = (hash(&net), ddp.state_dict());
                    let (last, group) = (ddp.shards().end - 1, ddp.group().clone());
                    let failed = ddp.step(&net, |shard| {
                        let loss = loss(&shard.model()?, &[1, 2, 3], true, &device);
                        shard.backward(loss, 3.0)?;
                        if rank == 1 && shard.shard() == last {
                            group.abort("it is on fire");
                            return Err(DdpError::Device("it is on fire".into()));
                        }
                        Ok(())
                    });
                    let error = failed.err().expect("an error").to_string();
                    assert!(error.contains("on fire"), "{error}");
                    assert_eq!((hash(&net), ddp.state_dict()), before, "rank {rank}");
                    let state = ddp.state_dict();
                    let group = next_group.take().expect("one failure");
                    let (next, restored) =
                        Ddp::new(group, net, options.clone()).expect("ranks agree");
                    ddp = next;
                    let restored = ddp.load_state_dict(restored, &state, HashMap::new());
                    net = restored.expect("the state fits");
                }
                let reduced = train_step(&mut ddp, &net, &device).expect("a step");
                net = optimizer.step(0.01, net, reduced.grads);
            }
            weights::sha256(&weights::export(&net))
        });
        assert_eq!(hashes[0], hashes[1]);
        hashes[0].clone()
    };
    assert_eq!(run(Some(2)), run(None));
}

#[test]
fn a_missing_micro_batch_is_an_error_that_says_so() {
    let device = device();
    let group = ranks(1, |group| group).remove(0);
    let options = DdpOptions {
        accumulate: 2,
        ..options(1)
    };
    let (mut ddp, net) = Ddp::new(group, fixed_net(&device), options).expect("ranks agree");
    let result = ddp.step(&net, |shard| {
        let loss = loss(&shard.model()?, &[1, 2], true, &device);
        shard.backward(loss, 2.0)
    });
    let error = result.err().expect("an error");
    assert_eq!(
        error.to_string(),
        "step 0, shard 0: 2 micro-batches announced, 1 run"
    );
}

#[test]
fn clipping_scales_the_whole_gradient_to_the_limit() {
    let device = device();
    let norm_with = |clip_norm: Option<f64>| {
        let group = ranks(1, |group| group).remove(0);
        let options = DdpOptions {
            clip_norm,
            ..options(1)
        };
        let (mut ddp, net) = Ddp::new(group, fixed_net(&device), options).expect("ranks agree");
        let reduced = ddp
            .step(&net, |shard| {
                let loss = loss(&shard.model()?, &[1, 2, 3, 4], true, &device);
                shard.backward(loss, 4.0)
            })
            .expect("a step");
        let first: f32 = gradient(&reduced.grads, &net).iter().map(|x| x * x).sum();
        (reduced.grad_norm, f64::from(first).sqrt())
    };
    let (none, plain) = norm_with(None);
    assert_eq!(none, None);
    let (norm, clipped) = norm_with(Some(1e-3));
    let norm = norm.expect("a norm");
    assert!(norm > 1e-3);
    assert!((clipped / plain - 1e-3 / norm).abs() < 1e-4);
}

#[test]
fn a_step_without_any_sample_changes_nothing() {
    let device = device();
    let group = ranks(1, |group| group).remove(0);
    let (mut ddp, net) = Ddp::new(group, fixed_net(&device), options(1)).expect("ranks agree");
    let before = weights::sha256(&weights::export(&net));
    let reduced = ddp
        .step(&net, |shard| {
            shard.micro_batches(0);
            Ok::<(), DdpError>(())
        })
        .expect("a step");
    assert!(reduced.grads.is_empty());
    assert_eq!(weights::sha256(&weights::export(&net)), before);
}

#[test]
fn a_rank_that_left_out_a_step_is_noticed_at_the_next_one() {
    let errors = ranks(2, |group| {
        let device = device();
        let rank = group.rank();
        let (mut ddp, net) = Ddp::new(group, fixed_net(&device), options(2)).expect("ranks agree");
        if rank == 1 {
            let failed = ddp.step(&net, |_| {
                Err::<(), Box<dyn std::error::Error>>("no data".into())
            });
            assert!(failed.is_err());
        }
        let result = ddp.step(&net, |shard| {
            let loss = loss(&shard.model()?, &[1, 2], true, &device);
            shard.backward(loss, 2.0)
        });
        result.err().expect("the steps do not match").to_string()
    });
    for error in errors {
        assert!(
            error.contains("of step 0") && error.contains("of step 1"),
            "{error}"
        );
    }
}

#[test]
fn a_request_to_one_rank_is_the_answer_on_all_after_the_same_step() {
    let stops = |stop_on_signal| {
        ranks(3, |group| {
            let device = device();
            let options = DdpOptions {
                stop_on_signal,
                sums: 1,
                ..options(4)
            };
            let (mut ddp, net) = Ddp::new(group, fixed_net(&device), options).expect("ranks agree");
            let stop = (1..=5).find_map(|step| {
                if (ddp.group().rank(), step) == (1, 3) {
                    ddp.group().page().request_stop(10);
                }
                let reduced = ddp.step(&net, |shard| {
                    shard.add(0, 1.0);
                    let loss = loss(&shard.model()?, &[1, 2, 3], true, &device);
                    shard.backward(loss, 3.0)
                });
                let reduced = reduced.expect("a step");
                assert_eq!((reduced.weight, reduced.sums), (12.0, vec![4.0]));
                ddp.stop_requested()
            });
            let told = ddp.group().page().slot(ddp.group().local_rank()).stopped();
            assert_eq!(told.map(|told| told.signal), stop, "the launcher is told");
            (stop.map(|signal| signal.to_string()), ddp.next_step())
        })
    };
    assert_eq!(stops(true), vec![(Some("SIGUSR1".to_owned()), 3); 3]);
    assert_eq!(stops(false), vec![(None, 5); 3]);
}

#[test]
fn live_recovery_adds_no_message_to_a_step() {
    let sent = |recovery| {
        ranks(3, |group| {
            let device = device();
            let options = DdpOptions {
                recovery,
                ..options(4)
            };
            let (mut ddp, mut net) =
                Ddp::new(group, fixed_net(&device), options).expect("ranks agree");
            let mut optimizer = optimizer();
            let counts = |ddp: &Ddp| {
                let groups = ddp.group().dump_flight().groups;
                let submitted: u64 = groups.iter().map(|group| group.submitted).sum();
                let p2p: usize = groups.iter().map(|group| group.p2p.len()).sum();
                (submitted, p2p, ddp.group().sent_bytes())
            };
            let before = counts(&ddp);
            for _ in 0..5 {
                let reduced = ddp.step(&net, |shard| {
                    let loss = loss(&shard.model()?, &[1, 2, 3], true, &device);
                    shard.backward(loss, 3.0)
                });
                net = optimizer.step(0.01, net, reduced.expect("a step").grads);
                let give =
                    |_: &Ddp, _: &mut Give<'_>| -> Result<(), DdpError> { panic!("nobody joins") };
                ddp.admit(&net, give).expect("nobody joins");
            }
            let after = counts(&ddp);
            assert!(after.0 - before.0 >= 5 * ddp.bucket_count() as u64);
            (after.0 - before.0, after.1 - before.1, after.2 - before.2)
        })
    };
    assert_eq!(sent(Recovery::Live), sent(Recovery::None));
}
