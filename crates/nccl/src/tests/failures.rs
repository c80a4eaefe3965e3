//! Calls that fail: a rank that gives up, an error of NCCL's, a call that never ends, functions that never return.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paceline_collective::{GroupOptions, ProcessGroup, Tree};
use paceline_fake_cuda::Library;
use paceline_testing::seconds_after;

use super::{Bench, PATIENCE, buffer, machine, on_ranks, options};
use crate::{Before, Communicator, Float, Label, NcclError, Ticket, TreeSum};

/// Longest that a failure with a deadline of a second may take on a busy machine; a hang is longer.
const SOON: Duration = Duration::from_secs(20);

const LABEL: Label = Label {
    bucket: Some(1),
    step: 41,
};

fn sum(comm: &Communicator, bench: &Bench) -> Ticket {
    let room = bench.floats(&[1.0; 16]);
    // Freeing it would wait for what is behind it.
    std::mem::forget(room.clone());
    comm.all_reduce(buffer(&room), Float::F32, Before::Now, LABEL)
}

/// How the second sum ended on every rank, with what `main` does before it waits. The first one works.
fn second(
    library: &Library,
    world: usize,
    timeout: Duration,
    main: impl Fn(&ProcessGroup, &Communicator) + Sync,
) -> Vec<NcclError> {
    let begun = Instant::now();
    let errors = on_ranks(world, timeout, |group| {
        let comm = Communicator::join(&group, group.rank(), &options(library)).unwrap();
        let bench = Bench::new(library, group.rank());
        sum(&comm, &bench).wait().unwrap();
        group.barrier().unwrap();
        let ticket = sum(&comm, &bench);
        main(&group, &comm);
        let error = ticket.wait().unwrap_err();
        // It latches, and later calls do not wait.
        assert_eq!(comm.health().unwrap_err().to_string(), error.to_string());
        let again = sum(&comm, &bench);
        assert_eq!(again.wait().unwrap_err().to_string(), error.to_string());
        assert_eq!(
            comm.release(&[&again]).unwrap_err().to_string(),
            error.to_string()
        );
        drop(comm);
        error
    });
    assert!(begun.elapsed() < timeout + SOON);
    errors
}

/// A fault of rank 1's second all-reduce.
fn fault(does: &str) -> String {
    format!(r#", "faults": [{{"call": "ncclAllReduce", "rank": 1, "after": 1, "does": {does}}}]"#)
}

#[test]
fn a_rank_that_gives_up_ends_the_calls_of_the_others() {
    let library = machine(3, &fault(r#""hang""#));
    let errors = second(&library, 3, PATIENCE, |group, _| {
        if group.rank() == 2 {
            group.abort("the loss is not a number");
        }
    });
    for error in &errors {
        assert_eq!(
            error.to_string(),
            "rank 2 gave up: the loss is not a number"
        );
        assert_eq!(error.culprit(), Some(2));
        assert!(matches!(error, NcclError::Group(_)));
    }
}

#[test]
fn the_ranks_that_are_left_join_anew_after_an_abort() {
    // An orderly end would wait for the lost rank.
    let faults = r#", "faults": [
        {"call": "ncclCommFinalize", "does": "hang"},
        {"call": "ncclCommDestroy", "does": "hang"}
    ]"#;
    for peer_death in ["error", "hang"] {
        let library = machine(3, &format!(r#"{faults}, "peer_death": "{peer_death}""#));
        let next = ProcessGroup::local(2, &GroupOptions::default()).unwrap();
        let next = Mutex::new(next);
        let sums = on_ranks(3, PATIENCE, |group| {
            let device = group.rank();
            let bench = Bench::new(&library, device);
            let comm = Communicator::join(&group, device, &options(&library)).unwrap();
            sum(&comm, &bench).wait().unwrap();
            group.barrier().unwrap();
            if device == 1 {
                group.abort("it dies");
                comm.abort().unwrap();
                return 0.0;
            }
            let lost = sum(&comm, &bench).wait().unwrap_err();
            assert_eq!(lost.culprit(), Some(1), "{lost}");
            comm.abort().unwrap();
            let next = {
                let mut next = next.lock().unwrap();
                let rank = usize::from(device == 2);
                let at = next.iter().position(|group| group.rank() == rank);
                next.swap_remove(at.unwrap())
            };
            let comm = Communicator::join(&next, device, &options(&library)).unwrap();
            let room = bench.floats(&[1.0; 16]);
            let call = comm.all_reduce(buffer(&room), Float::F32, Before::Now, LABEL);
            call.wait().unwrap();
            // Once the call is over on all ranks, they may part one by one.
            next.barrier().unwrap();
            comm.abort().unwrap();
            bench.read(&room)[0]
        });
        assert_eq!(sums, [2.0, 0.0, 2.0], "{peer_death}");
    }
}

#[test]
fn a_rank_that_gives_up_ends_the_messages_to_and_from_it() {
    let library = machine(3, "");
    let errors = on_ranks(3, PATIENCE, |group| {
        let comm = Communicator::join(&group, group.rank(), &options(&library)).unwrap();
        group.barrier().unwrap();
        let bench = Bench::new(&library, group.rank());
        let room = bench.floats(&[1.0; 16]);
        // Freeing it would wait for what is behind it.
        std::mem::forget(room.clone());
        let ticket = match group.rank() {
            0 => comm.send(buffer(&room), 1, Before::Now, LABEL),
            1 => {
                group.abort("the loss is not a number");
                return String::new();
            }
            _ => comm.receive(buffer(&room), 1, Before::Now, LABEL),
        };
        ticket.wait().unwrap_err().to_string()
    });
    for error in [&errors[0], &errors[2]] {
        assert_eq!(error, "rank 1 gave up: the loss is not a number");
    }
}

#[test]
fn a_message_to_no_other_rank_is_refused_on_all_ranks() {
    for peer in [0, 2] {
        let library = machine(2, "");
        let errors = on_ranks(2, PATIENCE, |group| {
            let comm = Communicator::join(&group, group.rank(), &options(&library)).unwrap();
            group.barrier().unwrap();
            let bench = Bench::new(&library, group.rank());
            let room = bench.floats(&[1.0]);
            std::mem::forget(room.clone());
            let ticket = match group.rank() {
                0 => comm.send(buffer(&room), peer, Before::Now, LABEL),
                _ => comm.receive(buffer(&room), 0, Before::Now, LABEL),
            };
            ticket.wait().unwrap_err().to_string()
        });
        let own = format!(
            "rank 0 called NCCL's send #1 (bucket 1, step 41) with invalid arguments: {peer} is no other rank of 2"
        );
        assert_eq!(errors[0], own);
        assert_eq!(errors[1], format!("rank 0 gave up: {own}"));
    }
}

#[test]
fn an_error_in_the_background_names_the_call() {
    let library = machine(3, &fault(r#"{"async": 3}"#));
    let errors = second(&library, 3, PATIENCE, |_, _| {});
    let own = errors[1].to_string();
    assert!(
        own.contains(" failed during all-reduce #2 (bucket 1, step 41): an error inside NCCL"),
        "{own}"
    );
    for other in [&errors[0], &errors[2]] {
        assert_eq!(other.to_string(), format!("rank 1 gave up: {own}"));
    }
}

#[test]
fn a_refused_call_names_it() {
    let library = machine(2, &fault(r#"{"code": 5}"#));
    let errors = second(&library, 2, PATIENCE, |_, _| {});
    let own = errors[1].to_string();
    assert!(
        own.starts_with(
            "ncclAllReduce failed during all-reduce #2 (bucket 1, step 41): an invalid use"
        ),
        "{own}"
    );
    assert!(errors[1].hint().unwrap().contains("NCCL_DEBUG=INFO"));
    assert_eq!(errors[0].to_string(), format!("rank 1 gave up: {own}"));
}

#[test]
fn a_failure_between_the_calls_of_a_group_still_ends_the_work_before_it() {
    let faults = r#", "faults": [
        {"call": "ncclAllReduce", "does": "hang"},
        {"call": "ncclSend", "rank": 1, "does": {"code": 5}}
    ]"#;
    let library = machine(2, faults);
    let kept = on_ranks(2, PATIENCE, |group| {
        let comm = Communicator::join(&group, group.rank(), &options(&library)).unwrap();
        let bench = Bench::new(&library, group.rank());
        let [hanging, failing] = [(); 2].map(|()| bench.floats(&[1.0; 64]));
        let work = comm.all_reduce(buffer(&hanging), Float::F32, Before::Now, LABEL);
        let sum = TreeSum {
            tree: Tree::split(2, 2).unwrap(),
            len: 64,
            stride: 64,
            counts: None,
        };
        let sum = comm.reduce_in_tree_order(buffer(&failing), sum, Before::Now, LABEL);
        let (own, error) = (work.wait().unwrap_err(), sum.wait().unwrap_err());
        assert_eq!(own.to_string(), error.to_string());
        assert!(
            error
                .to_string()
                .contains("ncclSend failed during sum in the tree's order #2"),
            "{error}"
        );
        drop(comm);
        // What a call keeps is let go once the device is done with it, which NCCL's abort sees to.
        let kept = Arc::strong_count(&hanging) - 1;
        if kept > 0 {
            std::mem::forget(hanging);
        }
        kept
    });
    assert_eq!(kept, [0, 0]);
}

#[test]
fn a_call_that_never_ends_has_a_deadline() {
    let library = machine(2, &fault(r#""hang""#));
    let errors = second(&library, 2, Duration::from_secs(1), |_, _| {});
    let own = |error: &NcclError| matches!(error, NcclError::Deadline { source: None, .. });
    assert!(errors.iter().any(own), "{errors:?}");
    for error in &errors {
        let text = error.to_string();
        let seconds = seconds_after(&text, "all-reduce #2 (bucket 1, step 41) timed out after ");
        assert!((1.5..20.0).contains(&seconds), "{text}");
    }
}

#[test]
fn a_function_that_never_returns_is_left_behind() {
    let library = machine(2, &fault(r#""block""#));
    let errors = second(&library, 2, Duration::from_secs(1), |group, comm| {
        if group.rank() == 1 {
            while !comm.is_wedged() {
                std::thread::yield_now();
            }
        }
    });
    let NcclError::Wedged {
        rank: 1,
        function: "ncclAllReduce",
        ..
    } = &errors[1]
    else {
        panic!("{errors:?}");
    };
    for error in &errors {
        assert_eq!(error.culprit(), Some(1), "{error}");
    }
}

#[test]
fn a_driver_that_waits_for_a_lost_call_is_let_go_by_the_abort() {
    let faults = r#", "faults": [
        {"call": "ncclAllReduce", "rank": 1, "after": 1, "does": "hang"},
        {"call": "cuEventQuery", "does": "while_busy"}
    ]"#;
    let library = machine(2, faults);
    let errors = second(&library, 2, PATIENCE, |group, _| {
        if group.rank() == 0 {
            group.abort("the loss is not a number");
        }
    });
    for error in &errors {
        // With a function that never returns it would be another error.
        assert!(matches!(error, NcclError::Group(_)), "{error}");
        assert_eq!(error.culprit(), Some(0));
    }
    assert_eq!(library.calls("ncclCommAbort"), 2);
}

#[test]
fn giving_up_that_never_returns_does_not_keep_the_error() {
    let faults = r#", "faults": [
        {"call": "ncclAllReduce", "rank": 1, "after": 1, "does": {"async": 3}},
        {"call": "ncclCommAbort", "rank": 1, "does": "block"}
    ]"#;
    let library = machine(2, faults);
    let errors = second(&library, 2, PATIENCE, |group, comm| {
        // The error is there long before; that this ends shows that the watchdog sees the thread.
        while group.rank() == 1 && !comm.is_wedged() {
            std::thread::yield_now();
        }
    });
    let own = errors[1].to_string();
    assert!(own.contains(" failed during all-reduce #2"), "{own}");
    assert_eq!(errors[0].to_string(), format!("rank 1 gave up: {own}"));
}

#[test]
fn giving_back_that_never_returns_does_not_keep_whoever_drops_the_communicator() {
    let faults = r#", "faults": [{"call": "cuStreamDestroy_v2", "does": "block"}]"#;
    let library = machine(1, faults);
    let begun = Instant::now();
    on_ranks(1, Duration::from_secs(1), |group| {
        let comm = Communicator::join(&group, 0, &options(&library)).unwrap();
        drop(comm);
    });
    assert!(begun.elapsed() < SOON);
}

#[test]
fn a_fence_that_fails_fails_all_ranks() {
    let library = machine(2, "");
    let errors = on_ranks(2, PATIENCE, |group| {
        let comm = Communicator::join(&group, group.rank(), &options(&library)).unwrap();
        group.barrier().unwrap();
        let bench = Bench::new(&library, group.rank());
        let room = bench.floats(&[1.0]);
        let before = match group.rank() {
            0 => Before::Now,
            _ => Before::Fence(Box::new(|| Err("the stream is broken".into()))),
        };
        std::mem::forget(room.clone());
        let call = comm.all_reduce(buffer(&room), Float::F32, before, LABEL);
        call.wait().unwrap_err().to_string()
    });
    let own = "the data of all-reduce #1 (bucket 1, step 41) did not become ready on rank 1: the stream is broken";
    assert_eq!(errors, [format!("rank 1 gave up: {own}"), own.to_string()]);
}

#[test]
fn a_rank_that_panics_ends_the_calls_of_the_others() {
    let library = machine(2, "");
    let errors = on_ranks(2, PATIENCE, |group| {
        let comm = Communicator::join(&group, group.rank(), &options(&library)).unwrap();
        group.barrier().unwrap();
        if group.rank() == 1 {
            let lost = std::thread::spawn(move || {
                let _held = (comm, group);
                panic!("on purpose");
            });
            assert!(lost.join().is_err());
            return None;
        }
        let bench = Bench::new(&library, 0);
        Some(sum(&comm, &bench).wait().unwrap_err().to_string())
    });
    assert_eq!(errors[0].as_deref(), Some("rank 1 gave up: it panicked"));
}

#[test]
fn a_communicator_is_dropped_with_calls_on_their_way() {
    let library = machine(2, r#", "delays_ms": {"nccl": 20}"#);
    on_ranks(2, PATIENCE, |group| {
        let comm = Communicator::join(&group, group.rank(), &options(&library)).unwrap();
        group.barrier().unwrap();
        let bench = Bench::new(&library, group.rank());
        let tickets: Vec<_> = (0..5).map(|_| sum(&comm, &bench)).collect();
        drop(comm);
        for ticket in tickets {
            ticket.poll().expect("dropping has waited").unwrap();
            ticket.order_after().unwrap();
        }
    });
}
