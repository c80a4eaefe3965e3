//! What a rank does wrong, all ranks learn: at once, with the right rank, and never by a hang.

mod common;

use std::time::{Duration, Instant};

use common::{WIRES, Wire, errors, on_ranks, options};
use paceline_collective::{
    AllGather, AllReduce, Error, GroupOptions, ProcessGroup, ReduceOp, ReduceScatter, Transport,
    Tree,
};
use paceline_rendezvous::env::WorkerEnv;
use paceline_rendezvous::page::{Phase, Revocation};
use paceline_rendezvous::token::Token;
use paceline_testing::{Meeting, wait_until};

/// Within this time a failure is known by itself: far below the deadline of these groups, and above what a machine stands
/// still that others use too.
const SOON: Duration = Duration::from_secs(8);

fn quick(wire: Wire, timeout: Duration) -> GroupOptions {
    GroupOptions {
        timeout,
        ..options(wire)
    }
}

fn all_reduce(group: &ProcessGroup, len: usize) -> Result<(), Error> {
    group.all_reduce(&mut vec![1.0_f32; len], ReduceOp::Sum)
}

/// All ranks report the very same mismatch, with these words in it.
#[track_caller]
fn assert_mismatch(errors: &[Error], culprit: Option<usize>, words: &[&str]) {
    for error in errors {
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        assert_eq!(error.to_string(), errors[0].to_string());
        assert_eq!(error.culprit(), culprit, "{error}");
        for word in words {
            assert!(error.to_string().contains(word), "{error} lacks {word:?}");
        }
    }
}

#[test]
fn a_deadline_that_is_set_later_holds_for_the_next_operation() {
    let options = GroupOptions {
        auto_timeout: true,
        ..GroupOptions::default()
    };
    let groups = ProcessGroup::local(2, &options).expect("a group");
    assert_eq!(groups[0].auto_timeout(), Some(options.timeout));
    groups[0].set_timeout(Duration::from_millis(50));
    let error = groups[0].barrier().expect_err("rank 1 does not come");
    assert!(matches!(error, Error::Deadline { .. }), "{error}");
    assert_eq!(error.culprit(), Some(1));
}

#[test]
fn a_different_length_names_the_odd_rank_on_every_rank() {
    for wire in WIRES {
        let errors = errors(wire, 3, |group| {
            all_reduce(&group, if group.rank() == 1 { 65 } else { 64 })
        });
        let words = [
            "ranks 0, 2 called all-reduce (sum) of 64 f32",
            "rank 1 called all-reduce (sum) of 65 f32",
            "#1",
        ];
        assert_mismatch(&errors, Some(1), &words);
    }
}

#[test]
fn a_large_different_length_does_not_block_on_full_sockets() {
    for wire in WIRES {
        let errors = errors(wire, 4, |group| {
            all_reduce(&group, 900_000 + group.rank() / 3)
        });
        assert_mismatch(
            &errors,
            Some(3),
            &["rank 3 called all-reduce (sum) of 900001 f32"],
        );
    }
}

#[test]
fn a_different_operation_names_the_odd_rank() {
    for wire in WIRES {
        let errors = errors(wire, 3, |group| match group.rank() {
            2 => group.broadcast(&mut [0.0_f32; 8], 0),
            _ => all_reduce(&group, 8),
        });
        assert_mismatch(
            &errors,
            Some(2),
            &["rank 2 called broadcast of 8 f32 from rank 0"],
        );
    }
}

#[test]
fn a_different_type_reduction_or_root_is_a_mismatch() {
    for wire in WIRES {
        let dtype = errors(wire, 3, |group| match group.rank() {
            0 => group.all_reduce(&mut [0_i64; 8], ReduceOp::Sum),
            _ => group.all_reduce(&mut [0_f64; 8], ReduceOp::Sum),
        });
        assert_mismatch(
            &dtype,
            Some(0),
            &["rank 0 called all-reduce (sum) of 8 i64"],
        );
        let reduction = errors(wire, 2, |group| {
            group.all_reduce(
                &mut [0.0_f32],
                if group.rank() == 0 {
                    ReduceOp::Min
                } else {
                    ReduceOp::Max
                },
            )
        });
        assert_mismatch(
            &reduction,
            None,
            &[
                "rank 0 called all-reduce (min)",
                "rank 1 called all-reduce (max)",
            ],
        );
        let root = errors(wire, 3, |group| {
            group.broadcast(&mut [0.0_f32], group.rank() / 2)
        });
        assert_mismatch(
            &root,
            Some(2),
            &["rank 2 called broadcast of 1 f32 from rank 1"],
        );
    }
}

#[test]
fn a_different_tree_or_bucket_is_a_mismatch() {
    for wire in WIRES {
        let call = |group: &ProcessGroup, leaves, bucket| {
            let tree = Tree::split(leaves, 3).unwrap();
            let buffer = group
                .buffer::<f32>(16 * tree.blocks(group.rank()).len())
                .unwrap();
            let call = AllReduce {
                op: ReduceOp::Sum,
                tree: Some(tree),
                len: 16,
                bucket: Some(bucket),
                step: 0,
            };
            group.all_reduce_async(buffer, call).wait().map(drop)
        };
        let errors_ = errors(wire, 3, |group| {
            call(&group, if group.rank() == 1 { 8 } else { 6 }, 0)
        });
        assert_mismatch(
            &errors_,
            Some(1),
            &["rank 1 called all-reduce (sum) of 16 f32 over 8 leaves"],
        );
        let errors_ = errors(wire, 3, |group| call(&group, 6, group.rank() as u32 / 2));
        assert_mismatch(&errors_, Some(2), &["rank 2 called", "bucket 1"]);
    }
}

#[test]
fn a_bucket_of_another_step_is_a_mismatch_that_names_both() {
    let counts: Option<std::sync::Arc<[usize]>> = Some([3, 0, 2].into());
    let words = [
        "ranks 0, 1 called",
        "bucket 4 of step 8",
        "rank 2 called",
        "bucket 4 of step 9",
    ];
    for wire in WIRES {
        let step = |group: &ProcessGroup| 8 + group.rank() as u64 / 2;
        let scattered = errors(wire, 3, |group| {
            let call = ReduceScatter {
                op: ReduceOp::Sum,
                tree: None,
                counts: counts.clone(),
                bucket: Some(4),
                step: step(&group),
            };
            let buffer = group.buffer::<f32>(5).unwrap();
            group.reduce_scatter_async(buffer, call).wait().map(drop)
        });
        assert_mismatch(&scattered, Some(2), &words);
        let gathered = errors(wire, 3, |group| {
            let call = AllGather {
                counts: counts.clone(),
                bucket: Some(4),
                step: step(&group),
            };
            let buffer = group.buffer::<f32>(5).unwrap();
            group.all_gather_async(buffer, call).wait().map(drop)
        });
        assert_mismatch(&gathered, Some(2), &words);
    }
}

#[test]
fn the_first_failure_is_the_answer_to_every_later_call() {
    for wire in WIRES {
        on_ranks(wire, 2, |group| {
            let first = all_reduce(&group, group.rank() + 1)
                .unwrap_err()
                .to_string();
            assert_eq!(group.barrier().unwrap_err().to_string(), first);
            let call = AllReduce::new(ReduceOp::Sum, 1);
            if let Ok(buffer) = group.buffer::<f32>(1) {
                assert_eq!(
                    group
                        .all_reduce_async(buffer, call)
                        .wait()
                        .unwrap_err()
                        .to_string(),
                    first
                );
            }
            assert_eq!(group.health().unwrap_err().to_string(), first);
        });
    }
}

#[test]
fn a_call_that_cannot_work_fails_on_all_ranks_with_its_author() {
    for wire in WIRES {
        let errors = errors(wire, 2, |group| match group.rank() {
            1 => group.all_reduce(&mut [1_i64], ReduceOp::Average),
            _ => group.all_reduce(&mut [1_i64], ReduceOp::Sum),
        });
        assert_eq!(
            errors[1].to_string(),
            "rank 1 called all-reduce wrongly: an average of i64 is not an i64"
        );
        assert!(errors[1].hint().unwrap().contains("divide"));
        assert_eq!(errors[0].culprit(), Some(1), "{}", errors[0]);
        assert!(
            errors[0].to_string().contains("an average of i64"),
            "{}",
            errors[0]
        );
    }
}

#[test]
fn wrong_arguments_are_refused() {
    let group = || {
        ProcessGroup::local(1, &options(Wire::Local))
            .unwrap()
            .remove(0)
    };
    let call = |len| AllReduce::new(ReduceOp::Sum, len);
    let gather = |len, counts: Option<&[usize]>| {
        let group = group();
        let call = AllGather {
            counts: counts.map(Into::into),
            ..AllGather::default()
        };
        let buffer = group.buffer::<f32>(len).unwrap();
        group.all_gather_async(buffer, call).wait().unwrap_err()
    };
    let foreign = group().buffer::<f32>(4).unwrap();
    let own = group();
    for (error, words) in [
        (
            group().broadcast(&mut [0.0_f32], 1).unwrap_err(),
            "rank 1 is not one of the 1 ranks",
        ),
        (
            group().all_gather(&[0.0_f32], &mut [0.0; 2]).unwrap_err(),
            "the output has 2 elements, expected 1 times 1",
        ),
        (
            group()
                .reduce_scatter(&[0.0_f32], &mut [], ReduceOp::Sum)
                .unwrap_err(),
            "the input has 1 elements",
        ),
        (
            group().broadcast_bytes(None, 0).unwrap_err(),
            "the string is given on the root",
        ),
        (
            group()
                .all_reduce_async(foreign, call(4))
                .wait()
                .unwrap_err(),
            "belongs to another group",
        ),
        (
            own.all_reduce_async(own.buffer::<f32>(3).unwrap(), call(4))
                .wait()
                .unwrap_err(),
            "the buffer has 3 elements, expected 1 blocks of 4",
        ),
        (
            gather(3, Some(&[4])),
            "the buffer has 3 elements, expected 1 blocks of 4",
        ),
        (
            gather(3, Some(&[1, 2])),
            "2 counts for the buffer, expected one for each of the 1 ranks",
        ),
    ] {
        assert!(
            matches!(error, Error::Call { rank: 0, .. }) && error.to_string().contains(words),
            "{error}"
        );
    }
}

#[test]
fn a_stalled_rank_is_named_at_the_deadline_with_what_it_does() {
    let deadline = Duration::from_secs(2);
    for wire in WIRES {
        let all_are_ready = Meeting::new(3);
        let stalled = on_ranks(wire, 3, |group| {
            group.barrier().unwrap();
            group.set_phase(
                if group.rank() == 2 {
                    Phase::DataLoader
                } else {
                    Phase::Backward
                },
                812,
            );
            all_are_ready.wait();
            group.set_timeout(deadline);
            if group.rank() == 2 {
                wait_until("the others give up", || group.health().is_err());
            }
            let started = Instant::now();
            let error = all_reduce(&group, 100).unwrap_err();
            assert!(
                started.elapsed() < deadline + SOON,
                "{:?}",
                started.elapsed()
            );
            error
        });
        for error in &stalled {
            assert!(
                error.is_deadline() && error.culprit() == Some(2),
                "{wire:?}: {error}"
            );
            let text = error.to_string();
            assert!(text.contains("all-reduce #2"), "{text}");
            assert!(
                text.contains("is in the data loader at step 812 since"),
                "{wire:?}: {text}"
            );
            assert!(text.contains("ranks 0, 1 wait"), "{text}");
        }
    }
}

#[test]
fn a_rank_that_panics_is_named_at_once() {
    for wire in WIRES {
        let started = Instant::now();
        let errors = on_ranks(wire, 3, |group| {
            let rank = group.rank();
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                let met = group.barrier();
                assert!(group.rank() != 1, "this rank is meant to panic");
                // Rank 1 may panic before the others hear that all have come.
                met.and_then(|()| all_reduce(&group, 10)).unwrap_err()
            }));
            assert_eq!(outcome.is_err(), rank == 1);
            outcome.ok()
        });
        assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
        for error in errors.iter().flatten() {
            assert_eq!(error.culprit(), Some(1), "{error}");
            assert_eq!(error.to_string(), "rank 1 gave up: it panicked");
        }
    }
}

#[test]
fn a_rank_that_gives_up_over_another_names_it_on_all_ranks() {
    for wire in WIRES {
        let errors = errors(wire, 3, |group| {
            if group.rank() == 0 {
                group.abort_over(Some(2), "rank 2 left the devices waiting");
            }
            all_reduce(&group, 64)
        });
        for error in errors {
            assert_eq!(
                error.to_string(),
                "rank 0 gave up: rank 2 left the devices waiting"
            );
            assert_eq!(error.culprit(), Some(2));
        }
    }
}

#[test]
fn a_rank_that_gives_up_says_why() {
    for wire in WIRES {
        let errors = on_ranks(wire, 3, |group| {
            if group.rank() == 0 {
                group.abort("the loss is not a number");
            }
            all_reduce(&group, 10).unwrap_err()
        });
        for error in &errors {
            assert_eq!(error.culprit(), Some(0), "{error}");
            assert_eq!(
                error.to_string(),
                "rank 0 gave up: the loss is not a number"
            );
        }
    }
}

#[test]
fn a_rank_that_leaves_early_is_missed_by_the_next_operation_only() {
    for wire in WIRES {
        let started = Instant::now();
        let outcomes = on_ranks(wire, 3, |group| {
            for _ in 0..5 {
                all_reduce(&group, 1000).unwrap();
            }
            if group.rank() == 1 {
                return None;
            }
            Some(all_reduce(&group, 1000).unwrap_err())
        });
        assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
        for error in outcomes.iter().flatten() {
            assert_eq!(error.culprit(), Some(1), "{error}");
            assert!(
                error
                    .to_string()
                    .contains("rank 1 left the group after operation #5, while all-reduce #6"),
                "{error}"
            );
        }
    }
}

#[test]
fn the_launchers_word_reaches_ranks_that_wait_and_marks_the_victims() {
    let errors = on_ranks(Wire::Local, 3, |group| {
        if group.rank() == 2 {
            group.page().revoke(&Revocation {
                rank: Some(2),
                text: "rank 2 was killed by signal 9".into(),
            });
            return None;
        }
        let error = all_reduce(&group, 10).unwrap_err();
        assert_eq!(group.page().slot(group.rank()).victim_of(), Some(2));
        Some(error)
    });
    for error in errors.iter().flatten() {
        assert_eq!(error.culprit(), Some(2), "{error}");
    }
}

#[test]
fn ranks_that_never_come_are_named() {
    for wire in [Wire::Shm, Wire::Tcp] {
        let token = Token::generate().unwrap();
        let server = common::server(wire, &token);
        let envs = common::envs(4, &server, &token);
        let options = quick(wire, Duration::from_secs(3));
        std::thread::scope(|scope| {
            for env in envs.into_iter().take(2) {
                let options = &options;
                scope.spawn(move || {
                    let error = ProcessGroup::connect(env, options).unwrap_err();
                    assert!(
                        matches!(&error, Error::Absent { missing, .. } if *missing == [2, 3]),
                        "{error}"
                    );
                    assert!(
                        error.is_deadline() && error.to_string().contains("for ranks 2, 3"),
                        "{error}"
                    );
                });
            }
        });
    }
}

#[test]
fn ranks_that_ask_for_different_transports_are_told_apart() {
    let token = Token::generate().unwrap();
    let server = common::server(Wire::Tcp, &token);
    let envs = common::envs(2, &server, &token);
    std::thread::scope(|scope| {
        for (env, transport) in envs.into_iter().zip([Transport::Tcp, Transport::Shm]) {
            scope.spawn(move || {
                let options = GroupOptions {
                    transport,
                    ..options(Wire::Tcp)
                };
                let error = ProcessGroup::connect(env, &options)
                    .unwrap_err()
                    .to_string();
                assert!(
                    error.contains("rank 0 asks for transport tcp, rank 1 for shm"),
                    "{error}"
                );
            });
        }
    });
}

#[test]
fn ranks_of_which_only_some_speak_tls_name_the_variable_at_once() {
    for wire in [Wire::Tcp, Wire::Tls] {
        let token = Token::generate().unwrap();
        let server = common::server(wire, &token);
        let env = WorkerEnv {
            tls: wire != Wire::Tls,
            ..common::envs(2, &server, &token).remove(1)
        };
        let started = Instant::now();
        let error = ProcessGroup::connect(env, &options(wire)).unwrap_err();
        assert!(matches!(error, Error::Store { rank: 1, .. }), "{error}");
        let source = std::error::Error::source(&error).unwrap();
        assert!(source.to_string().contains("PACELINE_TLS"), "{source}");
        assert!(started.elapsed() < SOON);
    }
}

#[test]
fn a_wrong_token_is_refused() {
    let token = Token::generate().unwrap();
    let server = common::server(Wire::Shm, &token);
    let env = common::envs(2, &server, &Token::generate().unwrap()).remove(0);
    let error = ProcessGroup::connect(env, &quick(Wire::Shm, Duration::from_secs(5))).unwrap_err();
    assert!(matches!(error, Error::Store { rank: 0, .. }), "{error}");
}

#[test]
fn auto_takes_shared_memory_on_one_host_and_the_environment_overrides_it() {
    for (asked, expected) in [(None, "shm"), (Some("tcp"), "tcp")] {
        let token = Token::generate().unwrap();
        let server = common::server(Wire::Shm, &token);
        std::thread::scope(|scope| {
            for env in common::envs(2, &server, &token) {
                scope.spawn(move || {
                    let env = WorkerEnv {
                        transport: asked.map(str::to_owned),
                        ..env
                    };
                    let group = ProcessGroup::connect(env, &GroupOptions::default()).unwrap();
                    assert_eq!(group.transport(), expected);
                    all_reduce(&group, 10).unwrap();
                });
            }
        });
    }
}

#[test]
fn a_world_of_one_needs_nobody() {
    let group = ProcessGroup::connect(WorkerEnv::alone(), &GroupOptions::default()).unwrap();
    let mut data = [2.0_f32, 4.0];
    group.all_reduce(&mut data, ReduceOp::Average).unwrap();
    assert_eq!((data, group.transport()), ([2.0, 4.0], "none"));
    assert_eq!(group.all_gather_bytes(b"me").unwrap(), [b"me"]);
    group.barrier().unwrap();
}
