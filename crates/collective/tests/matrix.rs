//! Operation x type x reduction x transport x world 1..16 x length, compared byte by byte with a serial reference.

mod common;
mod serial;

use common::{WIRES, Wire, on_ranks};
use paceline_collective::{AllReduce, DType, ReduceOp, Tree, bf16, f16};
use serial::expected::Expected;
use serial::{Tested, assert_same, reduced, values};

/// Nothing, less than a line, around it, primes, around what fits a cell in elements of 8 to 1 bytes (128 to 1024), and
/// more than one chunk of a fold.
const LENGTHS: [usize; 14] = [
    0, 1, 3, 7, 16, 64, 127, 129, 257, 513, 1009, 1024, 1025, 9001,
];
/// Powers of two, others that are even or odd, and a prime far from both powers beside it.
const LARGE: [usize; 5] = [5, 6, 8, 11, 16];
/// For worlds whose ranks share few cores.
const FEW: [usize; 6] = [0, 1, 7, 129, 1025, 4099];

fn check_type<T: Tested>(wire: Wire, world: usize, lengths: &[usize]) {
    let all: Vec<Expected<T>> = lengths
        .iter()
        .map(|len| Expected::new(world, *len))
        .collect();
    on_ranks(wire, world, |group| {
        all.iter()
            .for_each(|expected| expected.check(&group, &format!("{wire:?}")));
    });
}

fn check_worlds(wire: Wire, worlds: impl IntoIterator<Item = usize>, lengths: &[usize]) {
    for world in worlds {
        check_type::<f32>(wire, world, lengths);
        check_type::<f64>(wire, world, lengths);
        check_type::<f16>(wire, world, lengths);
        check_type::<bf16>(wire, world, lengths);
        check_type::<i64>(wire, world, lengths);
        check_type::<i32>(wire, world, lengths);
        check_type::<i8>(wire, world, lengths);
        check_type::<u8>(wire, world, lengths);
        check_type::<bool>(wire, world, lengths);
    }
}

/// Every third type in turn: all of them over the worlds, in a third of the time.
fn check_some(wire: Wire, worlds: impl IntoIterator<Item = usize>, lengths: &[usize]) {
    for world in worlds {
        match world % 3 {
            0 => {
                check_type::<f32>(wire, world, lengths);
                check_type::<bf16>(wire, world, lengths);
                check_type::<i8>(wire, world, lengths);
            }
            1 => {
                check_type::<f64>(wire, world, lengths);
                check_type::<i64>(wire, world, lengths);
                check_type::<bool>(wire, world, lengths);
            }
            _ => {
                check_type::<f16>(wire, world, lengths);
                check_type::<i32>(wire, world, lengths);
                check_type::<u8>(wire, world, lengths);
            }
        }
    }
}

#[test]
fn threads_in_worlds_of_1_to_4() {
    check_worlds(Wire::Local, 1..=4, &LENGTHS);
}

#[test]
fn threads_in_worlds_of_5_to_16() {
    check_some(Wire::Local, LARGE, &FEW);
}

#[test]
fn shared_memory_in_worlds_of_1_to_4() {
    check_worlds(Wire::Shm, 1..=4, &LENGTHS);
}

#[test]
fn shared_memory_in_worlds_of_5_to_16() {
    check_some(Wire::Shm, LARGE, &FEW);
}

#[test]
fn tcp_in_worlds_of_1_to_4() {
    check_worlds(Wire::Tcp, 1..=4, &LENGTHS);
}

#[test]
fn tcp_in_worlds_of_5_to_16() {
    check_some(Wire::Tcp, LARGE, &FEW);
}

#[test]
fn tls_in_worlds_of_2_to_5() {
    check_worlds(Wire::Tls, 2..=3, &LENGTHS);
    check_some(Wire::Tls, [4, 5], &FEW);
}

#[test]
fn tcp_over_ipv6() {
    check_some(Wire::Tcp6, [2, 3, 4], &FEW);
}

#[test]
fn calls_longer_than_one_piece() {
    // A piece of half a MiB, of one slot and of several, ends inside, at and behind these.
    let piece = (512 << 10) / 4;
    for (len, world) in [(piece - 1, 2), (piece + 1, 3), (300_007, 2)] {
        for wire in WIRES {
            check_type::<f32>(wire, world, &[len]);
        }
    }
}

#[test]
fn a_premultiplied_sum_takes_each_ranks_own_factor() {
    for wire in WIRES {
        for world in [1, 2, 5] {
            for len in [3, 1009, 200_000] {
                on_ranks(wire, world, |group| {
                    let factor = |rank: usize| 0.5 + rank as f64;
                    let data = |rank: usize| vec![(rank + 1) as f32; len];
                    let scaled: f64 = (0..world)
                        .map(|rank| (rank + 1) as f64 * factor(rank))
                        .sum();
                    let op = ReduceOp::PreMulSum(factor(group.rank()));
                    let mut all = data(group.rank());
                    group.all_reduce(&mut all, op).unwrap();
                    assert!(all.iter().all(|value| f64::from(*value) == scaled));
                    let input = vec![(group.rank() + 1) as f32; len * world];
                    let mut part = vec![0.0; len];
                    group.reduce_scatter(&input, &mut part, op).unwrap();
                    assert!(part.iter().all(|value| f64::from(*value) == scaled));
                    assert!(
                        input
                            .iter()
                            .all(|value| *value == (group.rank() + 1) as f32)
                    );
                });
            }
        }
    }
}

#[test]
fn half_precision_is_rounded_once() {
    // 2048 + 1 is 2048 in f16, so a sum that rounded every addition would lose all the ones.
    for wire in WIRES {
        on_ranks(wire, 5, |group| {
            let first = if group.rank() == 0 { 2048.0 } else { 1.0 };
            let mut data = vec![f16::from_f32(first); 3000];
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert!(data.iter().all(|value| value.to_f32() == 2052.0));
        });
    }
}

#[test]
fn trees_with_more_leaves_than_ranks_give_the_same_bytes() {
    let sum: Vec<f32> = reduced(ReduceOp::Sum, 8, 1009);
    for wire in WIRES {
        for world in [1, 2, 3, 5, 8] {
            on_ranks(wire, world, |group| {
                let tree = Tree::split(8, world).unwrap();
                let blocks = tree.blocks(group.rank());
                let mut buffer = group.buffer::<f32>(1009 * blocks.len()).unwrap();
                for (block, part) in blocks.iter().zip(buffer.chunks_mut(1009)) {
                    let leaves: Vec<Vec<f32>> =
                        block.clone().map(|leaf| values(leaf, 1009)).collect();
                    part.copy_from_slice(&common::reference(&leaves, &|a, b| a + b));
                }
                let call = AllReduce {
                    op: ReduceOp::Sum,
                    tree: Some(tree),
                    len: 1009,
                    bucket: Some(1),
                    step: 7,
                };
                let done = group.all_reduce_async(buffer, call).wait().unwrap();
                assert_same(
                    &done.buffer[..1009],
                    &sum,
                    &format!("{wire:?}, {world} ranks"),
                );
            });
        }
    }
}

#[test]
fn byte_strings_of_any_length() {
    for wire in WIRES {
        for world in [1, 2, 5] {
            on_ranks(wire, world, |group| {
                let rank = group.rank();
                let string = |from: usize, to: usize| {
                    (0..(from * 7 + to * 3) % 20)
                        .map(|i| (from * 31 + i) as u8)
                        .collect::<Vec<u8>>()
                };
                let all: Vec<Vec<u8>> = (0..world).map(|from| string(from, 0)).collect();
                assert_eq!(group.all_gather_bytes(&all[rank]).unwrap(), all);
                for root in 0..world {
                    let mine = string(root, 1);
                    let bytes = (rank == root).then_some(&mine[..]);
                    assert_eq!(group.broadcast_bytes(bytes, root).unwrap(), mine);
                    let received = group.broadcast_long(bytes, mine.len(), root).unwrap();
                    assert_eq!(received, (rank != root).then_some(mine));
                }
            });
        }
    }
}

#[test]
fn every_type_has_a_name_and_a_size() {
    let sizes = [
        (DType::F64, 8),
        (DType::F32, 4),
        (DType::F16, 2),
        (DType::BF16, 2),
        (DType::I64, 8),
        (DType::I32, 4),
        (DType::I8, 1),
        (DType::U8, 1),
        (DType::Bool, 1),
    ];
    let names: Vec<String> = sizes.iter().map(|(dtype, _)| dtype.to_string()).collect();
    assert_eq!(
        names,
        [
            "f64", "f32", "f16", "bf16", "i64", "i32", "i8", "u8", "bool"
        ]
    );
    assert!(sizes.iter().all(|(dtype, bytes)| dtype.bytes() == *bytes));
}
