//! Every fault at every moment, over each transport.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use paceline_rendezvous::page::Revocation;
use paceline_rendezvous::store::Store as _;
use rustix::process::Signal;

use super::case::{Case, Fault, MOMENTS, Moment, SOON};
use super::ops::{KINDS, Op};
use super::rank::played;
use crate::common::job::{Job, PATIENCE};

/// Cases that are played at the same time: most of them wait.
const AT_ONCE: usize = 4;
/// A ring's slices of this many elements, for three ranks.
const RING_LEN: usize = 3 * 16 * 2000;
const LARGE_LEN: usize = 300_000;

/// Plays all possible ones of the cases.
#[track_caller]
fn check(test: &str, cases: impl IntoIterator<Item = Case>) {
    let cases: Vec<Case> = cases.into_iter().filter(Case::is_possible).collect();
    assert!(!cases.is_empty());
    let (queue, wrong) = (Mutex::new(cases.into_iter()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let Some(case) = queue.lock().unwrap().next() else {
                        return;
                    };
                    if let Err(reason) = case.play(test) {
                        wrong.lock().unwrap().push(reason);
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// One fault at all moments over both transports.
fn at_all_moments(fault: &Fault) -> Vec<Case> {
    let mut cases = Vec::new();
    for transport in ["shm", "tcp"] {
        for moment in MOMENTS {
            let len = match moment {
                Moment::InData => LARGE_LEN,
                Moment::BetweenRounds => RING_LEN,
                _ => 1000,
            };
            cases.push(Case::new(
                transport,
                fault.clone(),
                moment,
                "all-reduce",
                len,
            ));
        }
    }
    cases
}

macro_rules! at_all_moments {
    ($($name:ident: $fault:ident;)*) => {$(
        #[test]
        fn $name() {
            if played() {
                return;
            }
            check(concat!("matrix::", stringify!($name)), at_all_moments(&Fault::$fault));
        }
    )*};
}

at_all_moments! {
    a_killed_rank_is_named: Kill;
    a_stopped_rank_is_named_at_the_deadline: Stop;
    a_rank_that_exits_without_a_word_is_named: Exit;
    a_rank_that_aborts_is_named: Abort;
    a_rank_that_leaves_too_early_is_named: Leave;
    a_rank_whose_connections_are_reset_is_named: Reset;
    a_rank_whose_machine_is_gone_is_named_at_the_deadline: Vanish;
    a_rank_that_is_not_heard_is_named_at_the_deadline: HoldOut;
    a_rank_that_hears_nobody_is_named_at_the_deadline: HoldIn;
    a_rank_whose_head_has_a_flipped_bit_is_named: Flip;
    a_rank_whose_data_ends_in_the_middle_is_named: Cut;
    a_rank_whose_goodbye_has_a_flipped_bit_is_named: FlipGoodbye;
}

/// Every kind of operation, with a rank that dies or stops while the others wait and in the middle of the data.
#[test]
fn every_operation_names_the_rank_that_fails_in_it() {
    if played() {
        return;
    }
    let mut cases = Vec::new();
    for transport in ["shm", "tcp"] {
        for kind in KINDS {
            for (fault, moment, len) in [
                (Fault::Kill, Moment::Waiting, 500),
                (Fault::Kill, Moment::InData, LARGE_LEN),
                (Fault::Stop, Moment::Waiting, 500),
                (Fault::Vanish, Moment::InData, LARGE_LEN),
            ] {
                cases.push(Case::new(transport, fault, moment, kind, len));
            }
        }
    }
    check(
        "matrix::every_operation_names_the_rank_that_fails_in_it",
        cases,
    );
}

/// What goes wrong on the connections for sends and receives alone: those for messages and data stand.
#[test]
fn a_rank_whose_messages_do_not_come_through_is_named() {
    if played() {
        return;
    }
    let mut cases = Vec::new();
    for fault in [Fault::Flip, Fault::Cut, Fault::Stall, Fault::ResetLane] {
        for world in [3, 4] {
            for (moment, len) in [
                (Moment::Forming, 500),
                (Moment::Before, 500),
                (Moment::Between, 500),
                (Moment::Waiting, 500),
                (Moment::InData, LARGE_LEN),
            ] {
                cases.push(Case {
                    world,
                    ..Case::new("tcp", fault.clone(), moment, "pass", len)
                });
            }
        }
    }
    check(
        "matrix::a_rank_whose_messages_do_not_come_through_is_named",
        cases,
    );
}

/// Data stands still between ranks that live: messages pass, and so the ranks know that it is nobody's fault.
#[test]
fn nobody_is_named_for_data_that_the_network_holds_up() {
    if played() {
        return;
    }
    let mut cases = Vec::new();
    for kind in ["all-reduce", "broadcast", "all-gather"] {
        for (moment, len) in [
            (Moment::Between, 500),
            (Moment::Waiting, 500),
            (Moment::InData, LARGE_LEN),
        ] {
            cases.push(Case::new("tcp", Fault::Stall, moment, kind, len));
        }
    }
    check(
        "matrix::nobody_is_named_for_data_that_the_network_holds_up",
        cases,
    );
}

/// Through TLS the proxy only knows who is dialed, so that a fault on the wire is about rank 0, which all others dial.
#[test]
fn ranks_that_fail_behind_tls_are_named_too() {
    if played() {
        return;
    }
    use Fault::*;
    use Moment::*;
    let mut cases = Vec::new();
    for (fault, moments) in [
        (Kill, &[Between, Waiting, InData][..]),
        (Stop, &[Waiting]),
        (Exit, &[Leaving]),
        (Reset, &[Forming, Between, Waiting, InData]),
        (Vanish, &[Forming, Waiting, InData]),
        (HoldOut, &[InData]),
        (HoldIn, &[InData]),
        (Flip, &[Waiting, InData]),
        (Cut, &[InData]),
    ] {
        for moment in moments {
            let len = match moment {
                InData => LARGE_LEN,
                _ => 1000,
            };
            let case = Case::new("tls", fault.clone(), *moment, "all-reduce", len);
            cases.push(Case { victim: 0, ..case });
        }
    }
    check("matrix::ranks_that_fail_behind_tls_are_named_too", cases);
}

/// What ranks can call differently: the others' call and the odd one.
fn differences() -> Vec<(Op, Op)> {
    let op = Op::new;
    let sum = op("all-reduce", 64);
    let bucket = Op {
        bucket: 3,
        step: 7,
        ..op("bucket", 16)
    };
    let half = |kind| Op {
        bucket: 3,
        step: 7,
        counts: vec![4, 5, 6],
        ..op(kind, 0)
    };
    let counts = |counts: [usize; 3]| Op {
        counts: counts.into(),
        ..op("all-gather-v", 0)
    };
    vec![
        // The operation, which is also what a wrong order or a missing call looks like.
        (sum.clone(), op("broadcast", 64)),
        (op("barrier", 0), sum.clone()),
        (op("pass", 8), op("barrier", 0)),
        (sum.clone(), op("reduce-scatter", 64)),
        // Reduction, dtype, length.
        (
            sum.clone(),
            Op {
                max: true,
                ..sum.clone()
            },
        ),
        (
            sum.clone(),
            Op {
                wide: true,
                ..sum.clone()
            },
        ),
        (sum.clone(), op("all-reduce", 65)),
        (op("all-reduce", 90_000), op("all-reduce", 90_001)),
        // Root, counts.
        (
            op("broadcast", 8),
            Op {
                root: 2,
                ..op("broadcast", 8)
            },
        ),
        (
            op("reduce", 8),
            Op {
                root: 2,
                ..op("reduce", 8)
            },
        ),
        (counts([4, 5, 6]), counts([4, 6, 5])),
        // Tree, bucket, step.
        (
            bucket.clone(),
            Op {
                leaves: 8,
                ..bucket.clone()
            },
        ),
        (
            bucket.clone(),
            Op {
                bucket: 4,
                ..bucket.clone()
            },
        ),
        (
            bucket.clone(),
            Op {
                step: 8,
                ..bucket.clone()
            },
        ),
        // The same of the halves of an all-reduce.
        (half("bucket-scatter"), bucket),
        (
            half("bucket-scatter"),
            Op {
                counts: vec![4, 6, 5],
                ..half("bucket-scatter")
            },
        ),
        (
            half("bucket-scatter"),
            Op {
                step: 8,
                ..half("bucket-scatter")
            },
        ),
        (
            half("bucket-gather"),
            Op {
                bucket: 4,
                ..half("bucket-gather")
            },
        ),
    ]
}

#[test]
fn a_rank_that_calls_something_else_is_named() {
    if played() {
        return;
    }
    let mut cases = Vec::new();
    for transport in ["shm", "tcp"] {
        for moment in [Moment::Before, Moment::Between, Moment::Waiting] {
            for (op, odd) in differences() {
                // The barrier's odd one out waits in the receive of "pass", which nobody compares: only time would tell.
                if op.kind == "pass" {
                    continue;
                }
                cases.push(Case {
                    op,
                    ..Case::new(
                        transport,
                        Fault::Differ(Box::new(odd)),
                        moment,
                        "barrier",
                        0,
                    )
                });
            }
            cases.push(Case::new(
                transport,
                Fault::Algorithm,
                moment,
                "all-reduce",
                3000,
            ));
        }
    }
    check("matrix::a_rank_that_calls_something_else_is_named", cases);
}

/// Two ranks are a special case of nothing, four have more to confuse.
#[test]
fn groups_of_two_and_four_name_the_rank_too() {
    if played() {
        return;
    }
    let mut cases = Vec::new();
    for world in [2, 4] {
        for transport in ["shm", "tcp"] {
            for fault in [
                Fault::Kill,
                Fault::Stop,
                Fault::Vanish,
                Fault::HoldIn,
                Fault::Cut,
            ] {
                for moment in [Moment::Between, Moment::Waiting] {
                    cases.push(Case {
                        world,
                        victim: world - 1,
                        pause: Duration::from_millis(10),
                        ..Case::new(transport, fault.clone(), moment, "all-reduce", 5000)
                    });
                }
            }
        }
    }
    check("matrix::groups_of_two_and_four_name_the_rank_too", cases);
}

/// A rank that dies while the group forms is known by the launcher alone: nobody has a connection to it yet.
#[test]
fn the_launchers_word_reaches_ranks_that_wait_for_one_that_never_comes() {
    let test = "matrix::the_launchers_word_reaches_ranks_that_wait_for_one_that_never_comes";
    if played() {
        return;
    }
    for transport in ["shm", "tcp"] {
        // Rank 2 never comes; or rank 0 has come and died before the others dial it.
        for (culprit, forming) in [(2, [0, 1]), (0, [1, 2])] {
            let role = format!("{0} {0}", PATIENCE.as_millis());
            let mut job = Job::start(test, transport, 3, &role, true);
            let store = job.store();
            let run_id = job.run_id.clone();
            let reported = |rank: usize| {
                let key = format!("paceline/collective/{run_id}/0/1/record/{rank}");
                store.get(&key, PATIENCE).unwrap();
            };
            if culprit == 0 {
                job.tell(0, "form");
                reported(0);
                job.signal(0, Signal::KILL);
            }
            for rank in forming {
                job.tell(rank, "form");
            }
            forming.iter().for_each(|rank| reported(*rank));
            let text = format!("rank {culprit} was killed by signal 9");
            job.page.as_ref().unwrap().revoke(&Revocation {
                rank: Some(culprit),
                text: text.clone(),
            });
            let revoked = Instant::now();
            for rank in forming {
                let expected = format!("failed {culprit}: the launcher ended the job: {text}");
                assert_eq!(job.line(rank), expected, "{transport}");
                assert!(revoked.elapsed() < SOON, "{:?}", revoked.elapsed());
            }
        }
    }
}

/// Six moments of the same few milliseconds: who has connected to whom differs from one to the next.
#[test]
fn a_rank_that_fails_while_all_connect_is_named() {
    if played() {
        return;
    }
    let mut cases = Vec::new();
    for transport in ["shm", "tcp"] {
        for fault in [Fault::Kill, Fault::Stop] {
            for moment in 0..6 {
                cases.push(Case {
                    victim: moment % 3,
                    pause: Duration::from_micros(2500 * moment as u64),
                    ..Case::new(
                        transport,
                        fault.clone(),
                        Moment::Joining,
                        "all-reduce",
                        1000,
                    )
                });
            }
        }
    }
    check(
        "matrix::a_rank_that_fails_while_all_connect_is_named",
        cases,
    );
}
