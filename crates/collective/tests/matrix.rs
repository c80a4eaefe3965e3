//! Every operation over every transport, world size, awkward length and type, compared byte by byte with a serial reference.

mod common;

use common::{Bits, WIRES, Wire, assert_same, noise, on_ranks, reference};
use paceline_collective::{DType, ProcessGroup, ReduceOp};

/// Nothing, less than a line, around it, primes, and beyond one chunk of the fold for every rank.
const LENGTHS: [usize; 8] = [0, 1, 3, 7, 64, 1009, 16_385, 70_000];
const OPS: [ReduceOp; 4] = [
    ReduceOp::Sum,
    ReduceOp::Average,
    ReduceOp::Min,
    ReduceOp::Max,
];

/// A type under test: numbers made from noise, and how two combine.
trait Tested: Bits {
    fn make(noise: f32) -> Self;
    fn combine(op: ReduceOp, left: Self, right: Self) -> Self;
    fn over(self, count: usize) -> Self;
}

macro_rules! tested {
    ($type:ty, $scale:expr, $add:expr) => {
        impl Tested for $type {
            fn make(noise: f32) -> Self {
                (noise * $scale) as $type
            }

            fn combine(op: ReduceOp, left: Self, right: Self) -> Self {
                match op {
                    ReduceOp::Sum | ReduceOp::Average => $add(left, right),
                    ReduceOp::Min => {
                        if right < left {
                            right
                        } else {
                            left
                        }
                    }
                    ReduceOp::Max => {
                        if right > left {
                            right
                        } else {
                            left
                        }
                    }
                }
            }

            fn over(self, count: usize) -> Self {
                self / count as $type
            }
        }
    };
}

tested!(f32, 1.0, |a, b| a + b);
tested!(f64, 1.0, |a, b| a + b);
tested!(i64, 1e6, i64::wrapping_add);

fn values<T: Tested>(leaf: usize, len: usize) -> Vec<T> {
    noise(leaf, len).into_iter().map(T::make).collect()
}

fn reduced<T: Tested>(op: ReduceOp, leaves: usize, len: usize) -> Vec<T> {
    let inputs: Vec<Vec<T>> = (0..leaves).map(|leaf| values(leaf, len)).collect();
    let mut result = reference(&inputs, &|left, right| T::combine(op, left, right));
    if op == ReduceOp::Average {
        result
            .iter_mut()
            .for_each(|value| *value = value.over(leaves));
    }
    result
}

/// What all ranks must get for one length; computed once, not by every rank.
struct Expected<T> {
    len: usize,
    reduced: Vec<(ReduceOp, Vec<T>)>,
    /// The reduction of inputs `world` times as long.
    scattered: Vec<(ReduceOp, Vec<T>)>,
    gathered: Vec<T>,
}

impl<T: Tested> Expected<T> {
    fn new(world: usize, len: usize) -> Self {
        let ops = || {
            OPS.into_iter()
                .filter(|op| *op != ReduceOp::Average || T::DTYPE != DType::I64)
        };
        Self {
            len,
            reduced: ops().map(|op| (op, reduced(op, world, len))).collect(),
            scattered: ops()
                .map(|op| (op, reduced(op, world, len * world)))
                .collect(),
            gathered: (0..world).flat_map(|from| values(from, len)).collect(),
        }
    }

    fn check(&self, group: &ProcessGroup, what: &str) {
        let (rank, world, len) = (group.rank(), group.world(), self.len);
        let what = format!("{what}: {len} {} on rank {rank} of {world}", T::DTYPE);
        for (op, expected) in &self.reduced {
            let mut data: Vec<T> = values(rank, len);
            group.all_reduce(&mut data, *op).unwrap();
            assert_same(&data, expected, &format!("all-reduce ({op}), {what}"));
        }
        let input: Vec<T> = values(rank, len * world);
        let mut output = vec![T::default(); len];
        for (op, expected) in &self.scattered {
            group.reduce_scatter(&input, &mut output, *op).unwrap();
            assert_same(
                &output,
                &expected[rank * len..][..len],
                &format!("reduce-scatter ({op}), {what}"),
            );
        }
        let mut output = vec![T::default(); len * world];
        group
            .all_gather(&values::<T>(rank, len), &mut output)
            .unwrap();
        assert_same(&output, &self.gathered, &format!("all-gather, {what}"));
        for root in [0, world - 1] {
            let mut data: Vec<T> = values(rank, len);
            group.broadcast(&mut data, root).unwrap();
            assert_same(
                &data,
                &self.gathered[root * len..][..len],
                &format!("broadcast from {root}, {what}"),
            );
        }
        group.barrier().unwrap();
    }
}

fn expected<T: Tested>(world: usize, lengths: &[usize]) -> Vec<Expected<T>> {
    lengths
        .iter()
        .map(|len| Expected::new(world, *len))
        .collect()
}

fn check_worlds(wire: Wire, worlds: impl IntoIterator<Item = usize>, lengths: &[usize]) {
    for world in worlds {
        let singles = expected::<f32>(world, lengths);
        let doubles = expected::<f64>(world, lengths);
        let integers = expected::<i64>(world, lengths);
        on_ranks(wire, world, |group| {
            let what = format!("{wire:?}");
            singles
                .iter()
                .for_each(|expected| expected.check(&group, &what));
            doubles
                .iter()
                .for_each(|expected| expected.check(&group, &what));
            integers
                .iter()
                .for_each(|expected| expected.check(&group, &what));
        });
    }
}

#[test]
fn threads_in_worlds_of_1_to_4() {
    check_worlds(Wire::Local, 1..=4, &LENGTHS);
}

#[test]
fn threads_in_worlds_of_5_to_8() {
    check_worlds(Wire::Local, 5..=8, &LENGTHS[..7]);
}

#[test]
fn shared_memory_in_worlds_of_1_to_4() {
    check_worlds(Wire::Shm, 1..=4, &LENGTHS);
}

#[test]
fn shared_memory_in_worlds_of_5_to_8() {
    check_worlds(Wire::Shm, 5..=8, &LENGTHS[..7]);
}

#[test]
fn tcp_in_worlds_of_1_to_4() {
    check_worlds(Wire::Tcp, 1..=4, &LENGTHS);
}

#[test]
fn tcp_in_worlds_of_5_to_8() {
    check_worlds(Wire::Tcp, 5..=8, &LENGTHS[..7]);
}

#[test]
fn tcp_over_ipv6() {
    check_worlds(Wire::Tcp6, [2, 3], &LENGTHS);
}

#[test]
fn sixteen_ranks_on_however_few_cores() {
    for wire in WIRES {
        check_worlds(wire, [16], &[0, 1, 1009]);
    }
}

#[test]
fn calls_longer_than_one_piece() {
    let len = (4 << 20) / 4 * 2 + 5;
    let sums: Vec<f32> = reduced(ReduceOp::Sum, 2, len);
    for wire in WIRES {
        on_ranks(wire, 2, |group| {
            let mut data: Vec<f32> = values(group.rank(), len);
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_same(&data, &sums, "long all-reduce");
            let mut output = vec![0.0; len];
            group
                .all_gather(
                    &values::<f32>(group.rank(), len)[..len / 2],
                    &mut output[..len / 2 * 2],
                )
                .unwrap();
            for from in 0..2 {
                let part = &output[from * (len / 2)..][..len / 2];
                assert_same(
                    part,
                    &values::<f32>(from, len)[..len / 2],
                    "long all-gather",
                );
            }
        });
    }
}

#[test]
fn byte_strings_of_any_length() {
    for wire in WIRES {
        for world in [1, 2, 5] {
            on_ranks(wire, world, |group| {
                let string = |rank: usize| {
                    (0..rank * 7 % 20)
                        .map(|i| (rank * 31 + i) as u8)
                        .collect::<Vec<u8>>()
                };
                let all = group.all_gather_bytes(&string(group.rank())).unwrap();
                assert_eq!(all, (0..world).map(string).collect::<Vec<_>>());
                for root in 0..world {
                    let mine = string(root);
                    let bytes = (group.rank() == root).then_some(&mine[..]);
                    assert_eq!(group.broadcast_bytes(bytes, root).unwrap(), mine);
                }
            });
        }
    }
}
