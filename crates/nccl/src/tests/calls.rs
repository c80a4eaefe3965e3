//! Calls that work: their results, their order, their times.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;

use paceline_collective::{AllReduce, ReduceOp, Tree, bf16, f16};

use super::{Bench, buffer, joined, machine};
use crate::{Before, Communicator, Float, Label, TreeSum};
use paceline_fake_cuda::Library;

pub(super) const NONE: Label = Label {
    bucket: None,
    step: 0,
};

#[test]
fn a_sum_reaches_all_ranks_in_every_kind_of_number() {
    let library = machine(3, "");
    joined(&library, 3, |comm, bench| {
        let rank = comm.rank() as f32;
        let singles = bench.floats(&[rank, 1.0, -0.5 * rank, 1024.0]);
        let sum = comm.all_reduce(buffer(&singles), Float::F32, Before::Now, NONE);
        sum.wait().unwrap();
        assert_eq!(bench.read(&singles), [3.0, 3.0, -1.5, 3072.0]);

        let halves = bench.room(4);
        for (float, own, expected) in [
            (
                Float::Bf16,
                [bf16::from_f32(rank), bf16::ONE].map(|it| it.to_bits()),
                [bf16::from_f32(3.0); 2].map(|it| it.to_bits()),
            ),
            (
                Float::F16,
                [f16::from_f32(rank), f16::ONE].map(|it| it.to_bits()),
                [f16::from_f32(3.0); 2].map(|it| it.to_bits()),
            ),
        ] {
            let bytes: Vec<u8> = own.iter().flat_map(|it| it.to_le_bytes()).collect();
            halves.write(&bytes, &bench.stream).unwrap();
            let sum = comm.all_reduce(buffer(&halves), float, Before::Now, NONE);
            sum.wait().unwrap();
            let mut read = [0; 4];
            halves.read(&mut read, &bench.stream).unwrap();
            let read = [[read[0], read[1]], [read[2], read[3]]].map(u16::from_le_bytes);
            assert_eq!(read, expected, "{float:?}");
        }
    });
}

#[test]
fn parts_of_a_sum_and_a_gather_of_parts_are_as_uneven_as_the_caller_likes() {
    let library = machine(3, "");
    joined(&library, 3, |comm, bench| {
        let (rank, counts) = (comm.rank() as u8, [1, 0, 3]);
        for (float, size) in [(Float::F32, 4), (Float::Bf16, 2)] {
            let bytes: Vec<u8> = (0..4)
                .flat_map(|at| match size {
                    4 => (f32::from(10 * at + rank)).to_le_bytes().to_vec(),
                    _ => bf16::from(10 * at + rank).to_le_bytes().to_vec(),
                })
                .collect();
            let room = bench.room(bytes.len());
            room.write(&bytes, &bench.stream).unwrap();
            let sum = comm.reduce_scatter(buffer(&room), (float, counts.into()), Before::Now, NONE);
            assert_eq!(
                sum.call().to_string(),
                format!("reduce-scatter #{}", sum.call().seq)
            );
            sum.wait().unwrap();
            let sizes = counts.map(|count| count * size);
            let gathered = comm.all_gather(buffer(&room), sizes.into(), Before::Now, NONE);
            gathered.wait().unwrap();
            let mut read = vec![0; 4 * size];
            room.read(&mut read, &bench.stream).unwrap();
            let found: Vec<f32> = match size {
                4 => bench.read(&room),
                _ => read
                    .chunks_exact(2)
                    .map(|it| bf16::from_le_bytes([it[0], it[1]]).to_f32())
                    .collect(),
            };
            assert_eq!(found, [3.0, 33.0, 63.0, 93.0], "{float:?}");
        }
    });
}

#[test]
fn messages_arrive_in_one_order_between_all_pairs() {
    let library = machine(3, "");
    joined(&library, 3, |comm, bench| {
        // Each pair in both directions, in one order on all ranks.
        let pairs = [(0, 1), (2, 0), (1, 0), (1, 2), (0, 2), (2, 1)];
        let own = pairs.iter().enumerate().flat_map(|(at, (from, to))| {
            let sent = [at as f32, -1.5];
            match comm.rank() {
                rank if rank == *from => {
                    let room = bench.floats(&sent);
                    let ticket = comm.send(buffer(&room), *to, Before::Context, NONE);
                    Some((ticket, room, sent))
                }
                rank if rank == *to => {
                    let room = bench.floats(&[0.0; 2]);
                    let ticket = comm.receive(buffer(&room), *from, Before::Context, NONE);
                    Some((ticket, room, sent))
                }
                _ => None,
            }
        });
        let own: Vec<_> = own.collect();
        for (ticket, room, expected) in own {
            ticket.wait().unwrap();
            assert_eq!(bench.read(&room), expected, "{}", ticket.call());
        }
    });
}

#[test]
fn one_rank_alone_works_too() {
    let library = machine(1, "");
    joined(&library, 1, |comm, bench| {
        let room = bench.floats(&[1.0, 2.0]);
        let call = comm.all_reduce(buffer(&room), Float::F32, Before::Now, NONE);
        call.wait().unwrap();
        let sum = TreeSum {
            tree: Tree::split(5, 1).unwrap(),
            len: 2,
            stride: 2,
            counts: None,
        };
        let call = comm.reduce_in_tree_order(buffer(&room), sum, Before::Now, NONE);
        call.wait().unwrap();
        assert_eq!(bench.read(&room), [1.0, 2.0]);
        assert_eq!(comm.report().ranks.len(), 1);
    });
}

#[test]
fn calls_run_in_order_and_their_times_do_too() {
    let library = machine(2, r#", "delays_ms": {"nccl": 2}"#);
    joined(&library, 2, |comm, bench| {
        let room = bench.floats(&[1.0]);
        let begun = Instant::now();
        let tickets: Vec<_> = (0..10)
            .map(|bucket| {
                let label = Label {
                    bucket: Some(bucket),
                    step: 7,
                };
                comm.all_reduce(buffer(&room), Float::F32, Before::Now, label)
            })
            .collect();
        let times: Vec<_> = tickets
            .iter()
            .map(|ticket| ticket.wait().unwrap())
            .collect();
        let ended = Instant::now();
        assert_eq!(bench.read(&room), [1024.0]);
        assert_eq!(
            tickets[3].call().to_string(),
            "all-reduce #4 (bucket 3, step 7)"
        );
        for (before, after) in times.iter().zip(&times[1..]) {
            assert!(before.finished <= after.started, "{before:?} {after:?}");
        }
        for time in &times {
            assert!(begun <= time.submitted && time.submitted <= time.launched);
            assert!(
                time.started <= time.finished && time.finished <= ended,
                "{time:?}"
            );
        }
    });
}

#[test]
fn what_a_call_keeps_is_dropped_before_its_ticket_says_so() {
    let library = machine(2, "");
    joined(&library, 2, |comm, bench| {
        for _ in 0..20 {
            let room = bench.floats(&[1.0]);
            let call = comm.all_reduce(buffer(&room), Float::F32, Before::Now, NONE);
            call.wait().unwrap();
            assert_eq!(Arc::strong_count(&room), 1);
        }
    });
}

#[test]
fn the_device_waits_for_the_data_and_later_work_for_the_result() {
    // What comes first takes long, so that a wait that is missing shows: once the copy before NCCL, once NCCL before the
    // copy.
    for slow in ["copy", "nccl"] {
        let library = machine(2, &format!(r#", "delays_ms": {{"{slow}": 60}}"#));
        joined(&library, 2, |comm, bench| {
            assert!(comm.has_context_events());
            let (source, room) = (bench.floats(&[2.5; 4]), bench.floats(&[0.0; 4]));
            let target = bench.floats(&[-1.0; 4]);
            let meet = || comm.shared().group.barrier().unwrap();
            meet();
            library.hold();
            bench.copy(&room, &source);
            let call = comm.all_reduce(buffer(&room), Float::F32, Before::Context, NONE);
            comm.release(&[&call]).unwrap();
            bench.copy(&target, &room);
            assert!(call.poll().is_none(), "the device has gone on");
            meet();
            library.let_go();
            assert_eq!(bench.read(&target), [5.0; 4], "slow {slow}");
            call.wait().unwrap();
        });
    }
}

#[test]
fn an_old_driver_waits_on_the_host() {
    let library = Library::without(&["cuCtxRecordEvent", "cuCtxWaitEvent"]);
    library.load(r#"{"devices": 2, "driver": 12040, "delays_ms": {"nccl": 20}}"#);
    joined(&library, 2, |comm, bench| {
        assert!(!comm.has_context_events());
        let room = bench.floats(&[1.0]);
        let (tell, told) = channel();
        let fence = Before::Fence(Box::new(move || {
            told.recv().map_err(|error| error.to_string())
        }));
        let call = comm.all_reduce(buffer(&room), Float::F32, fence, NONE);
        assert!(call.poll().is_none());
        tell.send(()).unwrap();
        comm.release(&[&call]).unwrap();
        call.poll().expect("the host has waited").unwrap();
        assert_eq!(bench.read(&room), [2.0]);
    });
}

#[test]
fn an_old_driver_refuses_to_record_a_context() {
    let library = Library::without(&["cuCtxRecordEvent"]);
    library.load(r#"{"devices": 1, "driver": 12040}"#);
    joined(&library, 1, |comm, bench| {
        let room = bench.floats(&[1.0]);
        let call = comm.all_reduce(buffer(&room), Float::F32, Before::Context, NONE);
        let error = call.wait().unwrap_err();
        assert_eq!(
            error.to_string(),
            "the driver (CUDA 12.4) has no cuCtxRecordEvent"
        );
        assert!(error.hint().unwrap().contains("12.5"));
    });
}

/// Numbers whose sum depends on the order of additions.
pub(super) fn noise(rank: usize, count: usize) -> Vec<f32> {
    let number = |i: usize| {
        let mixed = ((i * 31 + rank) as u32 ^ 0x9E37_79B9).wrapping_mul(0x85EB_CA6B);
        let mixed = (mixed ^ mixed >> 13).wrapping_mul(0xC2B2_AE35);
        (mixed as i32) as f32 / (1_u32 << (mixed % 23)) as f32
    };
    (0..count).map(number).collect()
}

/// The same sum on the devices and on the host.
fn both(comm: &Communicator, bench: &Bench, sum: &TreeSum) -> [Vec<u32>; 2] {
    let blocks = sum.tree.blocks(comm.rank()).len();
    let own = noise(comm.rank(), blocks * sum.stride);
    let room = bench.floats(&own);
    let call = comm.reduce_in_tree_order(buffer(&room), sum.clone(), Before::Now, NONE);
    call.wait().unwrap();
    let mut on_device = bench.read(&room);
    on_device.truncate(sum.len);

    let group = &comm.shared().group;
    let mut host = group.buffer::<f32>(blocks * sum.len).unwrap();
    for block in 0..blocks {
        host[block * sum.len..][..sum.len].copy_from_slice(&own[block * sum.stride..][..sum.len]);
    }
    let call = AllReduce {
        tree: Some(sum.tree.clone()),
        ..AllReduce::new(ReduceOp::Sum, sum.len)
    };
    let done = group.all_reduce_buffer(host, call).unwrap();
    let on_host = &done.buffer[..sum.len];
    [&on_device[..], on_host].map(|all| all.iter().map(|it| it.to_bits()).collect())
}

#[test]
fn sums_in_the_trees_order_have_the_bytes_of_the_host() {
    let library = machine(5, "");
    for world in [2, 3, 4, 5] {
        joined(&library, world, |comm, bench| {
            for leaves in [world, world + 1, 8, 13] {
                for len in [1, 7, 4 * world, 300, 1029] {
                    let sum = TreeSum {
                        tree: Tree::split(leaves, world).unwrap(),
                        len,
                        stride: len + 3,
                        counts: None,
                    };
                    let [on_device, on_host] = both(comm, bench, &sum);
                    assert!(
                        on_device == on_host,
                        "{leaves} leaves on {world} ranks, {len} numbers"
                    );
                    // The last rank has the most, others nothing if there is little.
                    let mut counts = vec![len / world / 2; world];
                    counts[world - 1] = len - (world - 1) * counts[0];
                    let own = comm.rank() * counts[0];
                    let own = own..own + counts[comm.rank()];
                    let sum = TreeSum {
                        counts: Some(counts.into()),
                        ..sum
                    };
                    let [on_device, on_host] = both(comm, bench, &sum);
                    assert!(
                        on_device[own.clone()] == on_host[own.clone()],
                        "{leaves} leaves on {world} ranks, {own:?} of {len} numbers"
                    );
                }
            }
        });
    }
}

#[test]
fn the_same_leaves_have_the_same_sum_on_any_number_of_ranks() {
    const LEAVES: usize = 6;
    const LEN: usize = 500;
    let leaf = |leaf: usize| noise(leaf + 100, LEN);
    let library = machine(4, "");
    let mut seen: Vec<Vec<f32>> = Vec::new();
    for world in 1..=4 {
        seen.extend(joined(&library, world, |comm, bench| {
            let tree = Tree::split(LEAVES, world).unwrap();
            // As the reducer does it: a stack of partial sums.
            let mut stack: Vec<Vec<f32>> = Vec::new();
            for number in tree.range(comm.rank()) {
                stack.push(leaf(number));
                for _ in 0..tree.merges_after(comm.rank(), number) {
                    let right = stack.pop().unwrap();
                    let left = stack.last_mut().unwrap();
                    left.iter_mut()
                        .zip(right)
                        .for_each(|(left, right)| *left += right);
                }
            }
            let room = bench.floats(&stack.concat());
            let sum = TreeSum {
                tree,
                len: LEN,
                stride: LEN,
                counts: None,
            };
            let call = comm.reduce_in_tree_order(buffer(&room), sum, Before::Now, NONE);
            call.wait().unwrap();
            bench.read(&room)[..LEN].to_vec()
        }));
    }
    for other in &seen {
        assert!(other == &seen[0]);
    }
    let plain = (0..LEAVES).fold(vec![0.0; LEN], |mut sum, number| {
        sum.iter_mut()
            .zip(leaf(number))
            .for_each(|(sum, it)| *sum += it);
        sum
    });
    assert!(
        plain != seen[0],
        "the order does not matter to these numbers: the test shows nothing"
    );
}

#[test]
fn calls_with_wrong_arguments_are_refused_in_words() {
    let library = machine(1, "");
    let word = |wrong: &(dyn Fn(&Communicator, &Bench) -> crate::Ticket + Sync)| {
        let all = joined(&library, 1, |comm, bench| {
            let error = wrong(comm, bench).wait().unwrap_err();
            assert_eq!(error.culprit(), Some(0));
            assert_eq!(comm.health().unwrap_err().to_string(), error.to_string());
            error.to_string()
        });
        all[0].clone()
    };
    assert_eq!(
        word(&|comm, bench| {
            let room = bench.room(6);
            comm.all_reduce(buffer(&room), Float::F32, Before::Now, NONE)
        }),
        "rank 0 called NCCL's all-reduce #1 with invalid arguments: 6 bytes are no multiple of a number's 4"
    );
    assert_eq!(
        word(&|comm, bench| {
            comm.all_gather(buffer(&bench.room(6)), [2, 4].into(), Before::Now, NONE)
        }),
        "rank 0 called NCCL's all-gather #1 with invalid arguments: 2 parts for 1 ranks"
    );
    assert_eq!(
        word(&|comm, bench| {
            let parts = (Float::F32, [3].into());
            comm.reduce_scatter(buffer(&bench.room(8)), parts, Before::Now, NONE)
        }),
        "rank 0 called NCCL's reduce-scatter #1 with invalid arguments: the parts [3] are not 2 elements"
    );
}
