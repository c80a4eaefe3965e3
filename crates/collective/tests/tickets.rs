//! Asynchronous operations and who executes them: order, tickets that nobody waits for, deadlines, and ranks that bring
//! different kinds of memory.

mod common;

use std::time::{Duration, Instant};

use common::{WIRES, Wire, noise, on_ranks, on_ranks_with, options, reference};
use paceline_collective::{
    AllGather, AllReduce, Buffer, Error, GroupOptions, ProcessGroup, ReduceOp, Ticket,
};

/// Long enough for whatever must happen, short enough for a test to fail.
const PATIENCE: Duration = Duration::from_secs(20);

fn call(len: usize) -> AllReduce {
    AllReduce::new(ReduceOp::Sum, len)
}

fn filled(group: &ProcessGroup, len: usize, value: i64) -> Buffer<i64> {
    let mut buffer = group.buffer(len).unwrap();
    buffer.fill(value);
    buffer
}

fn summed(group: &ProcessGroup, len: usize, value: i64) -> Ticket<i64> {
    group.all_reduce_async(filled(group, len, value), call(len))
}

/// Gives the core to others until something has come about.
fn until(what: &str, mut came: impl FnMut() -> bool) {
    let started = Instant::now();
    while !came() {
        assert!(started.elapsed() < PATIENCE, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn operations_run_in_the_order_of_their_calls_whoever_executes_them() {
    for wire in WIRES {
        on_ranks(wire, 3, |group| {
            // Small and large ones, waited for from the last to the first, with synchronous calls among them. Another
            // order on one rank would be a mismatch.
            let lens = [1, 2, 9000, 3, 100_000, 4, 5, 128, 129];
            for round in 0..20 {
                let mut tickets: Vec<Ticket<i64>> = Vec::new();
                for (place, len) in lens.into_iter().enumerate() {
                    tickets.push(summed(&group, len, round + place as i64));
                    if (place + round as usize).is_multiple_of(4) {
                        let mut data = [round];
                        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                        assert_eq!(data, [3 * round]);
                    }
                }
                for (place, ticket) in tickets.into_iter().enumerate().rev() {
                    let done = ticket.wait().unwrap();
                    assert_eq!(done.buffer[lens[place] - 1], 3 * (round + place as i64));
                    assert!(done.timing.submitted <= done.timing.started);
                    assert!(done.timing.started <= done.timing.peers_ready);
                    assert!(done.timing.peers_ready <= done.timing.finished);
                }
            }
        });
    }
}

#[test]
fn one_thread_can_hold_the_tickets_of_several_ranks() {
    let groups = ProcessGroup::local(3, &options(Wire::Local)).unwrap();
    for len in [1, 128, 129, 50_000] {
        let tickets: Vec<_> = groups.iter().map(|group| summed(group, len, 7)).collect();
        for ticket in tickets.into_iter().rev() {
            assert_eq!(ticket.wait().unwrap().buffer[len - 1], 21);
        }
    }
}

#[test]
fn an_operation_ends_although_nobody_waits_for_it() {
    for wire in WIRES {
        on_ranks(wire, 2, |group| {
            for len in [1, 1000] {
                let ticket = summed(&group, len, 5);
                until("is_done", || ticket.is_done());
                assert_eq!(ticket.wait().unwrap().buffer[0], 10);
                let mut ticket = summed(&group, len, 6);
                let done = loop {
                    match ticket.wait_timeout(Duration::from_micros(50)) {
                        Ok(done) => break done.unwrap(),
                        Err(again) => ticket = again,
                    }
                };
                assert_eq!(done.buffer[0], 12);
            }
        });
    }
}

#[test]
fn the_memory_of_a_dropped_ticket_comes_back_by_itself() {
    let small = GroupOptions {
        arena_bytes: Some(64 << 10),
        ..options(Wire::Local)
    };
    on_ranks_with(Wire::Local, 2, &small, |group| {
        for round in 0..100 {
            // A quarter of the arena each time.
            let mut taken = None;
            until("memory", || match group.buffer::<i64>(2048) {
                Ok(buffer) => taken.replace(buffer).is_none(),
                Err(_) => false,
            });
            let mut buffer = taken.unwrap();
            buffer.fill(round);
            drop(group.all_reduce_async(buffer, call(1)));
        }
        group.barrier().unwrap();
    });
}

#[test]
fn a_peer_that_never_comes_is_noticed_at_the_deadline_although_nobody_waits() {
    let hasty = GroupOptions {
        timeout: Duration::from_millis(300),
        ..options(Wire::Local)
    };
    on_ranks_with(Wire::Local, 2, &hasty, |group| {
        let ticket = (group.rank() == 0).then(|| summed(&group, 1, 1));
        until("the failure", || group.health().is_err());
        let error = group.health().unwrap_err();
        assert_eq!(error.culprit(), Some(1), "{error}");
        if let Some(ticket) = ticket {
            assert_eq!(ticket.wait().unwrap_err().to_string(), error.to_string());
        }
    });
}

#[test]
fn calls_begun_by_their_callers_are_compared_like_all_others() {
    for wire in WIRES {
        let errors = on_ranks(wire, 3, |group| {
            let len = if group.rank() == 2 { 2 } else { 1 };
            summed(&group, len, 1).wait().unwrap_err()
        });
        for error in errors {
            assert!(matches!(error, Error::Mismatch { .. }), "{error}");
            assert_eq!(error.culprit(), Some(2), "{error}");
        }
    }
}

#[test]
fn a_group_ends_after_what_was_submitted_and_tickets_outlive_it() {
    for wire in WIRES {
        let tickets = on_ranks(wire, 2, |group| {
            [1, 1, 5000].map(|len| summed(&group, len, 4))
        });
        for ticket in tickets.into_iter().flatten() {
            assert_eq!(ticket.wait().unwrap().buffer[0], 8);
        }
    }
}

#[test]
fn a_buffer_here_and_ordinary_memory_there_are_one_call() {
    for wire in [Wire::Local, Wire::Shm, Wire::Tcp] {
        // Below, at and above the length at which ordinary memory is cut.
        for len in [1000, 131_072, 131_073, 700_001] {
            on_ranks(wire, 3, |group| {
                let rank = group.rank();
                let inputs: Vec<Vec<f32>> = (0..3).map(|leaf| noise(leaf, len)).collect();
                let expected = reference(&inputs, &|left, right| left + right);
                for owner in [0, 2] {
                    let mut buffer = group.buffer::<f32>(len).unwrap();
                    buffer.copy_from_slice(&inputs[rank]);
                    let mut data = inputs[rank].clone();
                    if rank == owner {
                        buffer = group.all_reduce_buffer(buffer, call(len)).unwrap().buffer;
                        data.copy_from_slice(&buffer);
                    } else {
                        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    }
                    common::assert_same(&data, &expected, "all-reduce");
                }
            });
        }
    }
}

#[test]
fn slots_brought_in_a_buffer_and_in_ordinary_memory_go_together() {
    for wire in [Wire::Local, Wire::Tcp] {
        on_ranks(wire, 3, |group| {
            let (rank, each) = (group.rank(), 200_000);
            let all: Vec<f32> = (0..3).flat_map(|leaf| noise(leaf, each)).collect();
            let mut output = vec![0.0; 3 * each];
            if rank == 1 {
                let mut buffer = group.buffer::<f32>(3 * each).unwrap();
                buffer[rank * each..][..each].copy_from_slice(&noise(rank, each));
                output = group
                    .all_gather_async(buffer, AllGather::default())
                    .wait()
                    .unwrap()
                    .buffer
                    .to_vec();
            } else {
                group.all_gather(&noise(rank, each), &mut output).unwrap();
            }
            common::assert_same(&output, &all, "all-gather");
        });
    }
}

#[test]
fn between_hosts_a_long_call_on_two_kinds_of_memory_says_what_to_do() {
    let len = 700_001;
    let errors = on_ranks(Wire::Pairs, 4, |group| match group.rank() {
        3 => group
            .all_reduce_async(group.buffer::<f32>(len).unwrap(), call(len))
            .wait()
            .map(drop)
            .unwrap_err(),
        _ => group
            .all_reduce(&mut vec![1.0_f32; len], ReduceOp::Sum)
            .unwrap_err(),
    });
    for error in errors {
        assert!(error.to_string().contains("it is one call"), "{error}");
        assert!(error.hint().unwrap().contains("on every rank"), "{error}");
    }
}
