//! Messages between two ranks: order, size, failure, and life beside the collective operations.

mod common;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{WIRES, Wire, on_ranks, on_ranks_with, options};
use paceline_collective::{Error, GroupOptions, ProcessGroup, ReduceOp};
use paceline_rendezvous::env::{WorkerEnv, worker_vars};
use paceline_rendezvous::page::{Phase, Revocation};
use paceline_rendezvous::token::Token;
use paceline_testing::Meeting;

/// The bound on how late a failure may be known.
const SOON: Duration = Duration::from_secs(8);

fn quick(wire: Wire, timeout: Duration) -> GroupOptions {
    GroupOptions {
        timeout,
        ..options(wire)
    }
}

/// Does nothing until another rank has given up.
fn until_broken(group: &ProcessGroup) {
    let started = Instant::now();
    while group.health().is_ok() {
        assert!(started.elapsed() < Duration::from_secs(20));
        std::thread::yield_now();
    }
}

/// Numbers that tell who sent them, with which tag.
fn numbers(from: usize, tag: u32, len: usize) -> Vec<i64> {
    (0..len as i64)
        .map(|i| i + 1_000_000 * i64::from(tag) + 1_000_000_000 * from as i64)
        .collect()
}

#[test]
fn a_ring_receives_its_tags_in_any_order() {
    for wire in WIRES {
        for world in [1, 2, 3, 5] {
            on_ranks(wire, world, |group| {
                let (next, previous) = (
                    (group.rank() + 1) % world,
                    (group.rank() + world - 1) % world,
                );
                for tag in 0..4 {
                    let data = numbers(group.rank(), tag, 100 * tag as usize);
                    group.send(&data, next, tag).unwrap();
                }
                for tag in [2, 0, 3, 1] {
                    let mut data = vec![0_i64; 100 * tag as usize];
                    group.recv(&mut data, previous, tag).unwrap();
                    assert_eq!(data, numbers(previous, tag, 100 * tag as usize));
                }
            });
        }
    }
}

#[test]
fn messages_of_one_tag_arrive_in_their_order() {
    for wire in WIRES {
        on_ranks(wire, 2, |group| {
            let peer = 1 - group.rank();
            for i in 0..500 {
                group.send(&[f64::from(i)], peer, 9).unwrap();
            }
            for i in 0..500 {
                let mut data = [0.0_f64];
                group.recv(&mut data, peer, 9).unwrap();
                assert_eq!(data, [f64::from(i)]);
            }
        });
    }
}

#[test]
fn large_messages_cross_without_waiting_for_each_other() {
    for wire in WIRES {
        on_ranks(wire, 2, |group| {
            let peer = 1 - group.rank();
            for tag in 0..3 {
                let data = numbers(group.rank(), tag, 1 << 20);
                group.send(&data, peer, tag).unwrap();
            }
            for tag in (0..3).rev() {
                let mut data = vec![0_i64; 1 << 20];
                group.recv(&mut data, peer, tag).unwrap();
                assert_eq!(data, numbers(peer, tag, 1 << 20));
            }
        });
    }
}

#[test]
fn a_sender_waits_while_too_much_is_on_its_way() {
    for wire in [Wire::Local, Wire::Shm] {
        on_ranks(wire, 2, |group| {
            let part = vec![7_u8; 24 << 20];
            if group.rank() == 0 {
                // Two of these fit the bound, five do not: it ends only because the other rank takes them.
                for _ in 0..5 {
                    group.send_bytes(&part, 1, 1).unwrap();
                }
                group.send_bytes(b"all", 1, 2).unwrap();
            } else {
                for _ in 0..5 {
                    assert_eq!(group.recv_bytes(0, 1).unwrap().len(), part.len());
                }
                assert_eq!(group.recv_bytes(0, 2).unwrap(), b"all");
            }
        });
        // With nobody who takes them the sender's time is over.
        let options = quick(wire, Duration::from_secs(3));
        on_ranks_with(wire, 2, &options, |group| {
            if group.rank() == 0 {
                let part = vec![7_u8; 40 << 20];
                group.send_bytes(&part, 1, 1).unwrap();
                let error = group.send_bytes(&part, 1, 1).unwrap_err();
                assert!(error.is_deadline() && error.culprit() == Some(1), "{error}");
                assert!(
                    error.to_string().contains("send #2 to rank 1, tag 1"),
                    "{error}"
                );
            } else {
                until_broken(&group);
            }
        });
    }
}

#[test]
fn a_receiver_reads_no_further_than_its_bound() {
    on_ranks(Wire::Tcp, 2, |group| {
        let part = vec![7_u8; 60 << 20];
        if group.rank() == 0 {
            for _ in 0..6 {
                group.send_bytes(&part, 1, 1).unwrap();
            }
            group.send_bytes(b"all", 1, 2).unwrap();
        } else {
            for _ in 0..6 {
                let bytes = group.recv_bytes(0, 1).unwrap();
                assert_eq!((bytes.len(), bytes[bytes.len() - 1]), (part.len(), 7));
            }
            assert_eq!(group.recv_bytes(0, 2).unwrap(), b"all");
        }
    });
}

#[test]
fn a_rank_that_has_called_nothing_still_takes_what_it_is_sent() {
    for wire in WIRES {
        on_ranks(wire, 3, |group| {
            if group.rank() == 0 {
                group.send(&numbers(0, 0, 2 << 20), 2, 0).unwrap();
                for _ in 0..2000 {
                    group.send_bytes(b"", 2, 1).unwrap();
                }
            }
            group.barrier().unwrap();
            if group.rank() == 2 {
                let mut data = vec![0_i64; 2 << 20];
                group.recv(&mut data, 0, 0).unwrap();
                assert_eq!(data, numbers(0, 0, 2 << 20));
                for _ in 0..2000 {
                    assert!(group.recv_bytes(0, 1).unwrap().is_empty());
                }
            }
        });
    }
}

#[test]
fn a_rank_sends_to_itself() {
    let alone = || vec![ProcessGroup::connect(WorkerEnv::alone(), &options(Wire::Local)).unwrap()];
    let local = || ProcessGroup::local(1, &options(Wire::Local)).unwrap();
    for group in alone().into_iter().chain(local()) {
        group.send(&[1.0_f32, 2.0], 0, 3).unwrap();
        let mut buffer = group.buffer::<f32>(2).unwrap();
        buffer.copy_from_slice(&[3.0, 4.0]);
        let ticket = group.send_async(buffer, 0, 3).unwrap();
        let mut data = [0.0_f32; 2];
        group.recv(&mut data, 0, 3).unwrap();
        assert_eq!(data, [1.0, 2.0]);
        assert_eq!(group.recv_any(&mut data, 3).unwrap(), 0);
        assert_eq!(data, [3.0, 4.0]);
        assert_eq!(ticket.wait().unwrap()[..], [3.0, 4.0]);
    }
}

#[test]
fn any_source_says_who_it_was() {
    for wire in WIRES {
        on_ranks(wire, 4, |group| {
            if group.rank() > 0 {
                group.send(&[group.rank() as i64], 0, 5).unwrap();
                group.send_bytes(&vec![b'x'; group.rank()], 0, 6).unwrap();
                return;
            }
            let mut seen = Vec::new();
            for _ in 1..4 {
                let mut data = [0_i64];
                let from = group.recv_any(&mut data, 5).unwrap();
                assert_eq!(data, [from as i64]);
                let (other, bytes) = group.recv_bytes_any(6).unwrap();
                assert_eq!(bytes.len(), other);
                seen.push((from, other));
            }
            let (mut froms, mut others): (Vec<_>, Vec<_>) = seen.into_iter().unzip();
            froms.sort_unstable();
            others.sort_unstable();
            assert_eq!((froms, others), (vec![1, 2, 3], vec![1, 2, 3]));
        });
    }
}

#[test]
fn posted_receives_are_served_in_their_order_whichever_is_waited_for_first() {
    for wire in WIRES {
        on_ranks(wire, 2, |group| {
            if group.rank() == 1 {
                for number in [1_i64, 2] {
                    group.send(&[number], 0, 5).unwrap();
                }
                return;
            }
            let first = group.post_recv::<i64>(1, None, 5).unwrap();
            let second = group.post_recv::<i64>(1, Some(1), 5).unwrap();
            let mut data = [0];
            assert_eq!((second.wait(&mut data).unwrap(), data), (1, [2]));
            assert_eq!((first.wait(&mut data).unwrap(), data), (1, [1]));
        });
    }
}

#[test]
fn buffers_are_sent_and_received_while_the_caller_computes() {
    for wire in WIRES {
        on_ranks(wire, 2, |group| {
            let (rank, peer) = (group.rank(), 1 - group.rank());
            let len = 300_000;
            let receives: Vec<_> = (0..3)
                .map(|tag| {
                    let buffer = group.buffer::<i64>(len).unwrap();
                    group.recv_async(buffer, peer, tag).unwrap()
                })
                .collect();
            let sends: Vec<_> = (0..3)
                .map(|tag| {
                    let mut buffer = group.buffer::<i64>(len).unwrap();
                    buffer.copy_from_slice(&numbers(rank, tag, len));
                    group.send_async(buffer, peer, tag).unwrap()
                })
                .collect();
            for (tag, receive) in receives.into_iter().enumerate().rev() {
                let received = receive.wait().unwrap();
                assert_eq!(received.from, peer);
                assert_eq!(received.buffer[..], numbers(peer, tag as u32, len));
            }
            for (tag, send) in sends.into_iter().enumerate() {
                let buffer = send.wait().unwrap();
                assert_eq!(buffer[..], numbers(rank, tag as u32, len));
            }
        });
    }
}

#[test]
fn a_message_does_not_overtake_a_buffer_sent_before_it() {
    for wire in WIRES {
        on_ranks(wire, 2, |group| {
            if group.rank() == 0 {
                let mut tickets = Vec::new();
                for i in 0..20 {
                    let mut buffer = group.buffer::<i64>(50_000).unwrap();
                    buffer.fill(2 * i);
                    tickets.push(group.send_async(buffer, 1, 0).unwrap());
                    group.send(&vec![2 * i + 1; 50_000], 1, 0).unwrap();
                }
                for ticket in tickets {
                    ticket.wait().unwrap();
                }
            } else {
                for i in 0..40 {
                    let mut data = vec![0_i64; 50_000];
                    group.recv(&mut data, 0, 0).unwrap();
                    assert!(data.iter().all(|value| *value == i));
                }
            }
        });
    }
}

#[test]
fn a_ticket_tells_whether_its_message_has_come() {
    for wire in WIRES {
        on_ranks(wire, 2, |group| {
            if group.rank() == 0 {
                let buffer = group.buffer::<f32>(4).unwrap();
                let ticket = group.recv_async(buffer, 1, 1).unwrap();
                assert!(!ticket.is_done());
                let ticket = ticket.wait_timeout(Duration::from_millis(20)).unwrap_err();
                // A receive that is given up takes no message away.
                drop(group.recv_async(group.buffer::<f32>(4).unwrap(), 1, 1));
                group.barrier().unwrap();
                let done = ticket.wait_timeout(Duration::from_secs(20));
                assert_eq!(done.unwrap().unwrap().buffer[..], [1.0; 4]);
                let mut data = [0.0_f32; 4];
                group.recv(&mut data, 1, 1).unwrap();
                assert_eq!(data, [2.0; 4]);
            } else {
                group.barrier().unwrap();
                group.send(&[1.0_f32; 4], 0, 1).unwrap();
                group.send(&[2.0_f32; 4], 0, 1).unwrap();
            }
        });
    }
}

#[test]
fn messages_travel_beside_reductions_from_several_threads() {
    for wire in WIRES {
        on_ranks(wire, 3, |group| {
            let (rank, world) = (group.rank(), group.world());
            std::thread::scope(|scope| {
                for tag in 0..2_u32 {
                    let group = &group;
                    scope.spawn(move || {
                        let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
                        for round in 0..50 {
                            let len = 1 + 977 * round;
                            group.send(&numbers(rank, tag, len), next, tag).unwrap();
                            let mut data = vec![0_i64; len];
                            group.recv(&mut data, previous, tag).unwrap();
                            assert_eq!(data, numbers(previous, tag, len));
                        }
                    });
                }
                for round in 0..100 {
                    let mut data = vec![f64::from(round); 1000];
                    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    assert!(data.iter().all(|value| *value == 3.0 * f64::from(round)));
                }
            });
        });
    }
}

#[test]
fn another_length_or_type_is_a_mismatch_on_both_ranks() {
    for wire in WIRES {
        for (what, sent, wanted) in [
            (0, "64 f32", "65 f32"),
            (1, "64 f32", "64 f64"),
            (2, "64 f32", "bytes"),
            (3, "3 bytes", "64 f32"),
        ] {
            let errors = on_ranks(wire, 2, |group| {
                if group.rank() == 0 {
                    match what {
                        3 => group.send_bytes(b"abc", 1, 7).unwrap(),
                        _ => group.send(&[0.0_f32; 64], 1, 7).unwrap(),
                    }
                    return group.barrier().unwrap_err();
                }
                match what {
                    0 => group.recv(&mut [0.0_f32; 65], 0, 7).unwrap_err(),
                    1 => group.recv(&mut [0.0_f64; 64], 0, 7).unwrap_err(),
                    2 => group.recv_bytes(0, 7).unwrap_err(),
                    _ => group.recv(&mut [0.0_f32; 64], 0, 7).unwrap_err(),
                }
            });
            for error in errors {
                assert!(matches!(error, Error::Mismatch { .. }), "{error}");
                let words = format!(
                    "rank 0 called send of {sent} to rank 1, tag 7; rank 1 called recv of {wanted} from rank 0"
                );
                assert!(error.to_string().contains(&words), "{error}");
            }
        }
    }
}

#[test]
fn wrong_arguments_are_refused() {
    let local = |world| ProcessGroup::local(world, &options(Wire::Local)).unwrap();
    let group = || local(1).remove(0);
    let foreign = group().buffer::<f32>(4).unwrap();
    for (error, words) in [
        (
            group().send(&[0.0_f32], 1, 0).unwrap_err(),
            "rank 0 called send wrongly: rank 1 is not one of the 1 ranks",
        ),
        (
            group().recv(&mut [0.0_f32], 9, 0).unwrap_err(),
            "rank 0 called recv wrongly: rank 9 is not one of the 1 ranks",
        ),
        (
            group().send_async(foreign, 0, 0).unwrap_err(),
            "belongs to another group",
        ),
        (
            group()
                .send_bytes(&vec![0; (1 << 30) + 1], 0, 0)
                .unwrap_err(),
            "1073741825 bytes, at most 1073741824",
        ),
    ] {
        assert!(
            matches!(error, Error::Call { .. }) && error.to_string().contains(words),
            "{error}"
        );
    }
}

#[test]
fn a_sender_that_stalls_is_named_at_the_deadline_with_what_it_does() {
    for wire in WIRES {
        let options = quick(wire, Duration::from_secs(3));
        let all_are_ready = Meeting::new(3);
        on_ranks_with(wire, 3, &options, |group| {
            group.barrier().unwrap();
            all_are_ready.wait();
            if group.rank() == 1 {
                group.set_phase(Phase::DataLoader, 812);
                return until_broken(&group);
            }
            let started = Instant::now();
            let error = group.recv(&mut [0.0_f32], 1, 7).unwrap_err();
            assert!(started.elapsed() < options.timeout + SOON);
            assert!(error.is_deadline() && error.culprit() == Some(1), "{error}");
            let text = error.to_string();
            assert!(
                text.contains("recv #1 from rank 1, tag 7 timed out after"),
                "{text}"
            );
            assert!(text.contains("rank 1 (host "), "{text}");
            assert!(
                text.contains("is in the data loader at step 812 since"),
                "{text}"
            );
        });
    }
}

#[test]
fn a_receive_ends_at_once_when_a_rank_panics_or_gives_up() {
    for wire in WIRES {
        for panics in [true, false] {
            // The group's own barrier ends on one rank while another still waits in it.
            let all_wait = Meeting::new(3);
            let errors = on_ranks(wire, 3, |group| {
                if group.rank() != 1 {
                    let buffer = group.buffer::<f32>(1).unwrap();
                    let ticket = group.recv_async(buffer, 2 - group.rank(), 0).unwrap();
                    all_wait.wait();
                    let started = Instant::now();
                    let error = group.recv(&mut [0.0_f32], 1, 7).unwrap_err();
                    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
                    assert!(ticket.is_done());
                    assert_eq!(ticket.wait().unwrap_err().to_string(), error.to_string());
                    return Some(error);
                }
                all_wait.wait();
                if panics {
                    let moved = std::panic::AssertUnwindSafe(move || {
                        assert!(group.world() == 0, "this rank is meant to panic");
                    });
                    std::panic::catch_unwind(moved).unwrap_err();
                } else {
                    group.abort("the loss is not a number");
                }
                None
            });
            let cause = if panics {
                "it panicked"
            } else {
                "the loss is not a number"
            };
            for error in errors.iter().flatten() {
                assert_eq!(error.to_string(), format!("rank 1 gave up: {cause}"));
                assert_eq!(error.culprit(), Some(1));
            }
        }
    }
}

#[test]
fn the_launchers_word_ends_a_receive() {
    on_ranks(Wire::Local, 2, |group| {
        if group.rank() == 1 {
            group.page().revoke(&Revocation {
                rank: Some(1),
                text: "rank 1 was killed".into(),
            });
            return;
        }
        let started = Instant::now();
        let error = group.recv(&mut [0.0_f32], 1, 0).unwrap_err();
        assert!(
            matches!(error, Error::Revoked { .. } | Error::PeerLeft { .. }),
            "{error}"
        );
        assert!(started.elapsed() < SOON);
    });
}

#[test]
fn what_a_rank_has_sent_outlives_its_leaving() {
    // Long enough to be still copied when the sender is gone, if only sometimes.
    const LEN: usize = 500_000;
    for wire in WIRES {
        for _ in 0..5 {
            on_ranks(wire, 2, |group| {
                if group.rank() == 0 {
                    group.send(&numbers(0, 1, LEN), 1, 1).unwrap();
                    return;
                }
                // Only once the other has left nothing more can come.
                let mut data = vec![0_i64; LEN];
                group.recv(&mut data, 0, 1).unwrap();
                assert!(data == numbers(0, 1, LEN), "{wire:?}");
                let error = group.recv(&mut data, 0, 1).unwrap_err();
                assert_eq!(
                    error.to_string(),
                    "rank 0 left the group after operation #0, while recv #2 from rank 0, tag 1 needs it"
                );
            });
        }
    }
}

#[test]
fn a_buffer_whose_receiver_leaves_is_an_error_and_not_a_hang() {
    for wire in [Wire::Local, Wire::Shm] {
        on_ranks(wire, 2, |group| {
            if group.rank() == 1 {
                return;
            }
            let buffer = group.buffer::<f32>(10).unwrap();
            let ticket = group
                .send_async(buffer, 1, 1)
                .and_then(|ticket| ticket.wait());
            let error = ticket.unwrap_err();
            assert!(matches!(error, Error::PeerLeft { rank: 1, .. }), "{error}");
        });
    }
}

/// Set in the processes that play a rank.
const ROLE: &str = "PACELINE_TEST_P2P_ROLE";

#[test]
fn a_process_that_dies_is_named_by_those_who_wait_for_its_message() {
    if std::env::var_os(ROLE).is_some() {
        let group = ProcessGroup::init(&options(Wire::Tcp)).unwrap();
        let pair = group.split(Some(4), 0).unwrap().unwrap();
        if group.rank() == 1 {
            group.recv_bytes(0, 1).unwrap();
            // As a program that calls exit in the middle: nothing is dropped, nobody is told.
            std::process::exit(0);
        }
        group.send_bytes(b"go", 1, 1).unwrap();
        let started = Instant::now();
        let error = group.recv(&mut [0.0_f32], 1, 7).unwrap_err();
        assert!(started.elapsed() < SOON);
        println!("\n@@ {error}");
        let error = pair.recv_bytes(1, 8).unwrap_err();
        assert!(started.elapsed() < SOON);
        println!("\n@@ {error}");
        return;
    }
    for transport in ["shm", "tcp"] {
        let token = Token::generate().unwrap();
        let server = common::server(Wire::Tcp, &token);
        let ranks: Vec<_> = common::envs(2, &server, &token)
            .into_iter()
            .map(|env| {
                let env = WorkerEnv {
                    transport: Some(transport.into()),
                    ..env
                };
                let test = "a_process_that_dies_is_named_by_those_who_wait_for_its_message";
                Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", test, "--nocapture", "--test-threads=1"])
                    .env(ROLE, "yes")
                    .envs(worker_vars(&env))
                    .stdout(Stdio::piped())
                    .stderr(Stdio::null())
                    .spawn()
                    .unwrap()
            })
            .collect();
        let pid = ranks[1].id();
        let outputs: Vec<_> = ranks
            .into_iter()
            .map(|child| child.wait_with_output().unwrap())
            .collect();
        let said = String::from_utf8_lossy(&outputs[0].stdout).into_owned();
        let mut lines = said.lines().filter_map(|line| line.strip_prefix("@@ "));
        let mut line = || {
            lines
                .next()
                .unwrap_or_else(|| panic!("{transport}: {said}"))
        };
        let (of_world, of_pair) = (line(), line());
        assert!(
            of_world.starts_with("rank 1 (host ") && of_world.contains(&format!("pid {pid}) died")),
            "{transport}: {of_world}"
        );
        assert!(
            of_pair.starts_with("rank 1 (world/4, rank 1 of the job, host ")
                && of_pair.contains(&format!("pid {pid}) died")),
            "{transport}: {of_pair}"
        );
        // It may be gone before the send is over.
        let during = ["recv #2 from rank 1, tag 7", "send #1 to rank 1, tag 1"];
        let named = during.iter().any(|during| of_world.ends_with(during));
        assert!(named, "{transport}: {of_world}");
    }
}
