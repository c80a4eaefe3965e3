//! What groups say of their memory, and that it stays within the bounds they give.

mod common;

use common::{WIRES, Wire, on_ranks};
use paceline_collective::{AllReduce, MemoryReport, ProcessGroup, ReduceOp};

const MIB: usize = 1 << 20;

/// Every operation on ordinary memory that has a staging area of its own shape, and one on a buffer.
fn work(group: &ProcessGroup, each: usize) {
    let world = group.world();
    let mut all = vec![1.0_f32; each * world];
    let mut other = all.clone();
    group.all_reduce(&mut all, ReduceOp::Max).unwrap();
    group.all_gather(&all[..each], &mut other).unwrap();
    group
        .reduce_scatter(&all, &mut other[..each], ReduceOp::Max)
        .unwrap();
    group.all_to_all(&all, &mut other).unwrap();
    let call = AllReduce::new(ReduceOp::Max, each);
    let buffer = group.buffer::<f32>(each).unwrap();
    group.all_reduce_buffer(buffer, call).unwrap();
}

fn reports(wire: Wire) -> Vec<[MemoryReport; 3]> {
    on_ranks(wire, 3, |group| {
        work(&group, 300_000);
        let first = group.memory();
        for _ in 0..3 {
            work(&group, 300_000);
        }
        let again = group.memory();
        work(&group, 3_000_000);
        group.barrier().unwrap();
        [first, again, group.memory()]
    })
}

#[test]
fn calls_of_the_same_lengths_take_no_more_memory_the_second_time() {
    for wire in WIRES {
        for [first, again, _] in reports(wire) {
            let kept = |report: &MemoryReport| {
                let used = report.arena.map(|arena| (arena.used, arena.peak));
                (used, report.staging, report.temp, report.connections)
            };
            assert_eq!(kept(&first), kept(&again), "{wire:?}");
        }
    }
}

#[test]
fn long_calls_on_ordinary_memory_are_staged_in_two_mebibytes() {
    for [_, _, long] in reports(Wire::Shm) {
        assert!((1..=2 * MIB).contains(&long.staging), "{long}");
        let arena = long.arena.unwrap();
        assert_eq!(arena.used, long.staging, "{long}");
        assert!(
            arena.peak >= 12_000_000 && arena.peak <= arena.size,
            "{long}"
        );
        assert_eq!((long.connections, long.queued.now), (0, 0), "{long}");
    }
}

#[test]
fn connections_hold_pieces_whatever_the_length() {
    for [first, _, long] in reports(Wire::Tcp) {
        assert_eq!(long.arena, None);
        assert!(first.connections > 0, "{first}");
        // Two peers, eight connections each at most, and rings of 4 pieces of 128 KiB for two inputs and a result.
        let bound = 2 * 8 * (16 << 10) + 3 * 4 * (128 << 10);
        assert!(long.connections <= bound, "{long}");
    }
}

#[test]
fn messages_count_until_they_are_taken() {
    for wire in WIRES {
        on_ranks(wire, 2, |group| {
            let before = group.memory();
            assert_eq!((before.sent.now, before.received.now), (0, 0));
            group.barrier().unwrap();
            if group.rank() == 0 {
                group.send(&[7_u8; 10_000], 1, 3).unwrap();
                group.send(&[7_u8; 10_000], 1, 4).unwrap();
            } else {
                // Messages keep their order: once the second is here, so is the first.
                let mut data = [0_u8; 10_000];
                group.recv(&mut data, 0, 4).unwrap();
                let waits = group.memory();
                assert_eq!(waits.received.now, 10_000, "{waits}");
                assert!(waits.received.now <= waits.received.limit);
                group.recv(&mut data, 0, 3).unwrap();
                assert_eq!(group.memory().received.now, 0);
            }
            group.barrier().unwrap();
        });
    }
}
