//! The promise: the same bytes for the same leaves on any number of ranks and any transport, also with thousands of
//! operations on their way.

mod common;

use std::sync::Arc;

use common::{Bits, WIRES, Wire, assert_same, noise, on_ranks, reference};
use paceline_collective::{
    AllGather, AllReduce, Buffer, Done, ProcessGroup, ReduceOp, ReduceScatter, Ticket, Tree, bf16,
};

/// What a rank of a training job does: pushes its leaves one after another, merging like a binary counter.
fn fill(group: &ProcessGroup, tree: &Tree, len: usize) -> Buffer<f32> {
    let rank = group.rank();
    let mut stack: Vec<Vec<f32>> = Vec::new();
    for leaf in tree.range(rank) {
        stack.push(noise(leaf, len));
        for _ in 0..tree.merges_after(rank, leaf) {
            let right = stack.pop().unwrap();
            stack
                .last_mut()
                .unwrap()
                .iter_mut()
                .zip(right)
                .for_each(|(left, right)| *left += right);
        }
    }
    let mut buffer = group.buffer(stack.len() * len).unwrap();
    stack
        .iter()
        .enumerate()
        .for_each(|(i, block)| buffer[i * len..][..len].copy_from_slice(block));
    buffer
}

fn sum(op: ReduceOp, tree: &Arc<Tree>, len: usize) -> AllReduce {
    AllReduce {
        op,
        tree: Some(tree.clone()),
        len,
        bucket: Some(0),
        step: 0,
    }
}

#[test]
fn eight_leaves_have_the_same_sum_on_any_world_and_transport() {
    check_leaves(8, &[1, 2, 3, 4, 5, 8]);
}

#[test]
fn leaves_that_are_no_power_of_two() {
    check_leaves(11, &[1, 2, 3, 7, 11]);
}

fn check_leaves(leaves: usize, worlds: &[usize]) {
    for len in [1, 17, 5000] {
        let inputs: Vec<Vec<f32>> = (0..leaves).map(|leaf| noise(leaf, len)).collect();
        let expected = reference(&inputs, &|left, right| left + right);
        let average: Vec<f32> = expected.iter().map(|sum| sum / leaves as f32).collect();
        let running: Vec<f32> = (0..len)
            .map(|i| inputs.iter().map(|input| input[i]).sum())
            .collect();
        assert!(
            len < 17 || running != expected,
            "the inputs cannot tell one order from another"
        );
        for wire in WIRES {
            for &world in worlds {
                let tree = Tree::split(leaves, world).unwrap();
                on_ranks(wire, world, |group| {
                    let what = format!("{leaves} leaves of {len} on {world} ranks over {wire:?}");
                    let buffer = fill(&group, &tree, len);
                    let done = group
                        .all_reduce_async(buffer, sum(ReduceOp::Sum, &tree, len))
                        .wait()
                        .unwrap();
                    assert_same(&done.buffer[..len], &expected, &what);
                    let buffer = fill(&group, &tree, len);
                    let done = group
                        .all_reduce_async(buffer, sum(ReduceOp::Average, &tree, len))
                        .wait()
                        .unwrap();
                    assert_same(&done.buffer[..len], &average, &what);
                    let timing = done.timing;
                    assert!(
                        timing.submitted <= timing.started && timing.started <= timing.peers_ready
                    );
                    assert!(timing.peers_ready <= timing.finished);
                });
            }
        }
    }
}

fn scattered(op: ReduceOp, tree: Option<&Arc<Tree>>, counts: Option<&[usize]>) -> ReduceScatter {
    ReduceScatter {
        op,
        tree: tree.cloned(),
        counts: counts.map(Into::into),
        bucket: Some(5),
        step: 9,
    }
}

/// Deals `len` elements: unevenly, and to some ranks none.
fn dealt(len: usize, world: usize) -> Vec<usize> {
    let mut counts: Vec<usize> = (0..world)
        .map(|rank| rank % 3 * len / (2 * world))
        .collect();
    counts[world - 1] += len - counts.iter().sum::<usize>();
    counts
}

/// What a sharded optimizer does in a step, in one buffer: scatters the sums of gradients, computes on its own slice, and gathers
/// all slices; beside an all-reduce of the same blocks.
fn check_halves<T: Bits>(
    group: &ProcessGroup,
    tree: &Arc<Tree>,
    len: usize,
    fill: impl Fn() -> Buffer<T>,
) {
    let (rank, world) = (group.rank(), group.world());
    let counts = dealt(len, world);
    let start: usize = counts[..rank].iter().sum();
    let own = start..start + counts[rank];
    for op in [ReduceOp::Sum, ReduceOp::Average] {
        let whole = group.all_reduce_async(fill(), sum(op, tree, len));
        let brought = fill();
        let before = brought.to_vec();
        let call = scattered(op, Some(tree), Some(&counts));
        let scatter = group.reduce_scatter_async(brought, call);
        let whole = whole.wait().unwrap().buffer;
        let slice = scatter.wait().unwrap().buffer;
        let what = format!("{counts:?} of {len} on rank {rank} of {world}, {op}");
        assert_same(&slice[own.clone()], &whole[own.clone()], &what);
        assert_same(&slice[..own.start], &before[..own.start], &what);
        assert_same(&slice[own.end..], &before[own.end..], &what);
        let call = AllGather {
            counts: Some(counts.as_slice().into()),
            bucket: Some(5),
            step: 9,
        };
        let gathered = group.all_gather_async(slice, call).wait().unwrap().buffer;
        assert_same(&gathered[..len], &whole[..len], &what);
    }
}

#[test]
fn a_reduce_scatter_and_an_all_gather_have_the_bytes_of_the_all_reduce() {
    for wire in WIRES {
        for (leaves, world) in [(1, 1), (8, 1), (8, 2), (8, 3), (11, 4), (9, 8)] {
            let tree = Tree::split(leaves, world).unwrap();
            on_ranks(wire, world, |group| {
                for len in [0, 1, 17, 5000, 70_000] {
                    check_halves(&group, &tree, len, || fill(&group, &tree, len));
                    check_halves(&group, &tree, len, || {
                        let blocks = fill(&group, &tree, len);
                        let mut half = group.buffer::<bf16>(blocks.len()).unwrap();
                        let pairs = half.iter_mut().zip(&blocks[..]);
                        pairs.for_each(|(half, whole)| *half = bf16::from_f32(*whole));
                        half
                    });
                }
            });
        }
    }
}

#[test]
fn thousands_of_operations_on_their_way_come_back_in_order() {
    for wire in WIRES {
        for world in [1, 2, 4] {
            on_ranks(wire, world, |group| {
                let tickets: Vec<Ticket<i64>> = (0..3000)
                    .map(|i| {
                        let mut buffer = group.buffer::<i64>(1 + i % 3).unwrap();
                        buffer.fill((i * 10 + group.rank()) as i64);
                        let call = AllReduce {
                            op: ReduceOp::Sum,
                            tree: None,
                            len: 1 + i % 3,
                            bucket: Some(i as u32),
                            step: 0,
                        };
                        group.all_reduce_async(buffer, call)
                    })
                    .collect();
                for (i, ticket) in tickets.into_iter().enumerate() {
                    let Done { buffer, .. } = ticket.wait().unwrap();
                    let expected = (world * i * 10 + world * (world - 1) / 2) as i64;
                    assert_eq!(
                        buffer[..],
                        vec![expected; 1 + i % 3],
                        "operation {i} of {world} ranks over {wire:?}"
                    );
                }
            });
        }
    }
}

#[test]
fn synchronous_calls_wait_for_their_turn_behind_asynchronous_ones() {
    for wire in WIRES {
        on_ranks(wire, 3, |group| {
            for round in 0..50_i64 {
                let mut buffer = group.buffer::<i64>(100).unwrap();
                buffer.fill(round);
                let call = AllReduce::new(ReduceOp::Max, 100);
                let ticket = group.all_reduce_async(buffer, call);
                let mut data = [round, group.rank() as i64];
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, [3 * round, 3]);
                assert_eq!(ticket.wait().unwrap().buffer[99], round);
            }
        });
    }
}

#[test]
fn the_other_operations_work_in_place_too() {
    for wire in WIRES {
        for world in [1, 3] {
            on_ranks(wire, world, |group| {
                let (rank, n) = (group.rank(), 1000);
                let mut buffer = group.buffer::<f32>(n * world).unwrap();
                buffer[rank * n..][..n].copy_from_slice(&noise(rank, n));
                let mut buffer = group
                    .all_gather_async(buffer, AllGather::default())
                    .wait()
                    .unwrap()
                    .buffer;
                let all: Vec<f32> = (0..world).flat_map(|from| noise(from, n)).collect();
                assert_same(&buffer, &all, "all-gather");

                buffer.copy_from_slice(&noise(rank, n * world));
                let buffer = group
                    .reduce_scatter_async(buffer, scattered(ReduceOp::Sum, None, None))
                    .wait()
                    .unwrap()
                    .buffer;
                let inputs: Vec<Vec<f32>> = (0..world).map(|from| noise(from, n * world)).collect();
                let expected = reference(&inputs, &|left, right| left + right);
                assert_same(
                    &buffer[rank * n..][..n],
                    &expected[rank * n..][..n],
                    "reduce-scatter",
                );

                let buffer = group
                    .broadcast_async(buffer, world - 1)
                    .wait()
                    .unwrap()
                    .buffer;
                let last = (world - 1) * n;
                assert_same(&buffer[last..][..n], &expected[last..][..n], "broadcast");
            });
        }
    }
}

#[test]
fn a_dropped_ticket_does_not_stop_its_operation() {
    for wire in WIRES {
        on_ranks(wire, 2, |group| {
            for _ in 0..20 {
                let buffer = group.buffer::<f64>(100).unwrap();
                let call = AllReduce::new(ReduceOp::Sum, 100);
                drop(group.all_reduce_async(buffer, call));
            }
            let mut data = [1.0];
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [2.0]);
        });
    }
}

#[test]
fn two_groups_of_one_job_do_not_meet_each_other() {
    let options = common::options(Wire::Shm);
    let token = paceline_rendezvous::token::Token::generate().unwrap();
    let server = common::server(Wire::Shm, &token);
    let envs = common::envs(2, &server, &token);
    std::thread::scope(|scope| {
        for env in envs {
            let options = &options;
            scope.spawn(move || {
                let first = ProcessGroup::connect(env.clone(), options).unwrap();
                let second = ProcessGroup::connect(env, options).unwrap();
                let mut data = [1_i64];
                second.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                first.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, [4]);
            });
        }
    });
}
