//! Several hosts with several ranks on some: shared memory within hosts, TCP between them, all in one group. Ranks say
//! which host they are on, as containers do.

mod common;
mod serial;

use std::time::Duration;

use common::{Wire, noise, on_ranks, on_ranks_with, options, reference};
use paceline_collective::{
    AllReduce, Error, GroupOptions, Override, ProcessGroup, ReduceOp, Transport, Tree, bf16,
};
use paceline_testing::Meeting;
use serial::expected::Expected;
use serial::{Tested, assert_same};

/// Two hosts with two ranks each, with three each, with three and one, and three hosts with one, one and two.
const NEIGHBOURS: [&[usize]; 4] = [
    &[0, 0, 1, 1],
    &[0, 0, 0, 1, 1, 1],
    &[0, 0, 0, 1],
    &[0, 1, 2, 2],
];
/// Ranks 0 and 2 on one host, 1 and 3 on the other; and three hosts, none with neighbours only.
const SCATTERED: [&[usize]; 2] = [&[0, 1, 0, 1], &[0, 1, 0, 2, 1]];

fn shapes() -> impl Iterator<Item = &'static [usize]> {
    NEIGHBOURS.into_iter().chain(SCATTERED)
}

/// All operations over the hosts, for one type.
fn check<T: Tested>(hosts: &'static [usize], lengths: &[usize], algorithm: &str) {
    let world = hosts.len();
    let all = lengths.iter().map(|len| Expected::<T>::new(world, *len));
    let all: Vec<_> = all.collect();
    let wire = Wire::Hosts(hosts);
    let options = GroupOptions {
        algorithm: Override::parse(algorithm).unwrap(),
        ..options(wire)
    };
    on_ranks_with(wire, world, &options, |group| {
        assert_eq!(group.transport(), "hierarchical");
        for expected in &all {
            expected.check(&group, &format!("{algorithm} over {hosts:?}"));
        }
    });
}

#[test]
fn every_operation_gives_the_references_bytes_on_every_shape() {
    // Nothing, what fits a cell, what is staged, and what is folded by hosts.
    let lengths = [0, 1, 65, 129, 1025, 9001];
    for hosts in shapes() {
        check::<f32>(hosts, &lengths, "");
        check::<f64>(hosts, &lengths, "");
        check::<bf16>(hosts, &lengths, "");
        check::<i64>(hosts, &lengths, "");
        check::<u8>(hosts, &lengths, "");
        check::<bool>(hosts, &lengths, "");
    }
}

#[test]
fn calls_longer_than_one_piece() {
    // A piece of half a MiB, of one slot and of several, ends inside, at and behind these.
    for len in [(512 << 10) / 4 - 1, (512 << 10) / 4 + 1, 300_007] {
        check::<f32>(&[0, 0, 1, 1], &[len], "");
    }
    check::<f32>(&[0, 1, 0], &[300_007], "");
}

#[test]
fn every_algorithm_runs_over_memory_and_streams_at_once() {
    for algorithm in ["direct", "one-shot", "hierarchical"] {
        for hosts in shapes() {
            check::<f32>(hosts, &[7, 1025, 40_009], algorithm);
            check::<i64>(hosts, &[7, 1025], algorithm);
        }
    }
    // These change the order of additions, which integers do not feel.
    for algorithm in ["ring", "tree"] {
        for hosts in shapes() {
            check::<i64>(hosts, &[7, 1025, 40_009], algorithm);
        }
    }
}

/// One all-reduce over a tree with leaves of its own, on every rank.
fn over_leaves(wire: Wire, world: usize, leaves: usize, len: usize) -> Vec<Vec<f32>> {
    on_ranks(wire, world, |group| {
        let tree = Tree::split(leaves, world).unwrap();
        let blocks = tree.blocks(group.rank());
        let mut buffer = group.buffer::<f32>(len * blocks.len()).unwrap();
        for (block, part) in blocks.iter().zip(buffer.chunks_mut(len)) {
            let inputs: Vec<Vec<f32>> = block.clone().map(|leaf| noise(leaf, len)).collect();
            part.copy_from_slice(&reference(&inputs, &|left, right| left + right));
        }
        let call = AllReduce {
            op: ReduceOp::Sum,
            tree: Some(tree),
            len,
            bucket: Some(1),
            step: 7,
        };
        let done = group.all_reduce_async(buffer, call).wait().unwrap();
        done.buffer[..len].to_vec()
    })
}

#[test]
fn the_fixed_trees_bytes_are_those_of_one_host() {
    for hosts in shapes() {
        for (leaves, len) in [(8, 1009), (8, 40_009), (7, 20_011)] {
            let world = hosts.len();
            let here = over_leaves(Wire::Local, world, leaves, len);
            let there = over_leaves(Wire::Hosts(hosts), world, leaves, len);
            for (here, there) in here.iter().zip(&there) {
                assert_same(there, here, &format!("{leaves} leaves over {hosts:?}"));
            }
        }
    }
}

#[test]
fn the_hosts_decide_unless_a_transport_is_asked_for() {
    for (hosts, wish, expected) in [
        (&[0, 0, 1][..], Transport::Auto, "hierarchical"),
        (&[0, 0, 1], Transport::Hierarchical, "hierarchical"),
        (&[0, 0, 1], Transport::Tcp, "tcp"),
        (&[0, 0, 0], Transport::Auto, "shm"),
        (&[0, 0, 0], Transport::Hierarchical, "shm"),
        (&[0, 1, 2], Transport::Auto, "tcp"),
        (&[0, 1, 2], Transport::Hierarchical, "tcp"),
    ] {
        let wire = Wire::Hosts(hosts);
        let options = GroupOptions {
            transport: wish,
            ..options(wire)
        };
        on_ranks_with(wire, 3, &options, |group| {
            assert_eq!(group.transport(), expected, "{wish:?} over {hosts:?}");
            let mut data = vec![1_i64; 50_000];
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert!(data.iter().all(|sum| *sum == 3));
        });
    }
}

#[test]
fn a_sub_group_chooses_its_transport_by_its_own_hosts() {
    for wish in [Transport::Auto, Transport::Hierarchical] {
        let wire = Wire::Hosts(&[0, 0, 1, 1]);
        let options = GroupOptions {
            transport: wish,
            ..options(wire)
        };
        on_ranks_with(wire, 4, &options, |group| {
            let rank = group.rank();
            for (colour, expected) in [
                ([0, 0, 1, 1], ["shm"; 4]),
                ([0, 1, 0, 1], ["tcp"; 4]),
                (
                    [0, 0, 0, 1],
                    ["hierarchical", "hierarchical", "hierarchical", "none"],
                ),
                ([0, 0, 0, 0], ["hierarchical"; 4]),
            ] {
                let sub = group.split(Some(colour[rank]), 0).unwrap().unwrap();
                assert_eq!(sub.transport(), expected[rank], "{colour:?}");
                let mut data = vec![1.0_f32; 30_000];
                sub.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert!(data.iter().all(|value| *value == sub.world() as f32));
            }
            group.barrier().unwrap();
        });
    }
}

#[test]
fn messages_go_through_memory_or_streams_as_the_pair_can() {
    for hosts in [&[0, 0, 1, 1][..], &[0, 1, 0]] {
        on_ranks(Wire::Hosts(hosts), hosts.len(), |group| {
            let (rank, world) = (group.rank(), group.world());
            let data = |from: usize, to: usize, i: usize| {
                vec![(from * 100 + to * 10 + i) as i64; 1 + 20_000 * i]
            };
            for i in 0..3 {
                for to in 0..world {
                    group.send(&data(rank, to, i), to, 5).unwrap();
                }
            }
            let tickets = (0..world).map(|to| {
                let mut buffer = group.buffer::<i64>(60_001).unwrap();
                buffer.copy_from_slice(&data(rank, to, 3));
                group.send_async(buffer, to, 5).unwrap()
            });
            let tickets: Vec<_> = tickets.collect();
            for from in 0..world {
                for i in 0..4 {
                    let expected = data(from, rank, i);
                    let mut got = vec![0; expected.len()];
                    group.recv(&mut got, from, 5).unwrap();
                    assert_eq!(got, expected, "message {i} from {from} to {rank}");
                }
            }
            for ticket in tickets {
                ticket.wait().unwrap();
            }
            group.barrier().unwrap();
        });
    }
}

/// What a call came to on each rank.
fn failures(
    hosts: &'static [usize],
    timeout: Duration,
    call: impl Fn(&ProcessGroup) -> Result<(), Error> + Sync,
) -> Vec<Error> {
    let all_are_ready = Meeting::new(hosts.len());
    on_ranks(Wire::Hosts(hosts), hosts.len(), |group| {
        assert_eq!(group.transport(), "hierarchical");
        // Connections and page have been used before something goes wrong.
        group.barrier().unwrap();
        all_are_ready.wait();
        group.set_timeout(timeout);
        call(&group).unwrap_err()
    })
}

#[test]
fn a_different_call_names_the_odd_rank_on_all_hosts() {
    for hosts in [&[0, 0, 1, 1][..], &[0, 0, 0, 1], &[0, 1, 0, 1]] {
        for odd in 0..4 {
            for len in [64, 900_000] {
                let errors = failures(hosts, Duration::from_secs(30), |group| {
                    let len = if group.rank() == odd { len + 1 } else { len };
                    group.all_reduce(&mut vec![1.0_f32; len], ReduceOp::Sum)
                });
                for error in &errors {
                    let words = format!("rank {odd} called all-reduce (sum) of {} f32", len + 1);
                    assert!(matches!(error, Error::Mismatch { .. }), "{error}");
                    assert_eq!(error.culprit(), Some(odd), "{error}");
                    assert!(error.to_string().contains(&words), "{error}");
                    assert_eq!(error.to_string(), errors[0].to_string());
                }
            }
        }
    }
}

#[test]
fn a_different_operation_on_each_host_is_one_mismatch() {
    let errors = failures(&[0, 0, 1, 1], Duration::from_secs(30), |group| {
        match group.rank() / 2 {
            0 => group.barrier(),
            _ => group.broadcast(&mut [0.0_f32; 8], 0),
        }
    });
    for error in &errors {
        let words = "ranks 0, 1 called barrier; ranks 2, 3 called broadcast of 8 f32 from rank 0";
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(error.culprit(), None);
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_on_all_hosts_at_the_deadline() {
    for hosts in [&[0, 0, 1, 1][..], &[0, 1, 0, 1]] {
        for late in [0, 3] {
            let errors = failures(hosts, Duration::from_secs(2), |group| {
                if group.rank() != late {
                    return group.all_reduce(&mut vec![1.0_f32; 100_000], ReduceOp::Sum);
                }
                loop {
                    group.health()?;
                    std::thread::yield_now();
                }
            });
            for error in &errors {
                assert!(error.is_deadline(), "{error}");
                assert_eq!(error.culprit(), Some(late), "{error}");
            }
        }
    }
}

#[test]
fn who_gives_up_on_one_host_is_known_on_the_other() {
    let errors = failures(&[0, 0, 1, 1], Duration::from_secs(30), |group| {
        if group.rank() == 2 {
            group.abort("it had enough");
            return group.health();
        }
        group.all_reduce(&mut vec![1.0_f32; 100_000], ReduceOp::Sum)
    });
    for error in &errors {
        assert_eq!(error.culprit(), Some(2), "{error}");
        assert!(error.to_string().contains("it had enough"), "{error}");
    }
}
