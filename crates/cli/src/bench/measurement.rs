//! Measures the operations of a group, and the memory system that bounds them, in one run.
//!
//! The method is nccl-tests': ranks meet in a barrier, every rank times its own call, and the slowest rank's time of each
//! iteration counts. Times are exchanged after the loop. Before and after it one call runs on inputs whose sums are exact
//! in any order, and every element of every rank's result is compared with what it must be.
//!
//! The same ranks then stream through private memory all at once, two reads and two writes for each element, as an
//! all-reduce of two ranks in place must: the bandwidth that shared memory cannot beat on these cores at this moment.
//!
//! *Source*: nccl-tests, `doc/PERFORMANCE.md`, for sizes, bandwidths and their factors; STREAM for the second part.

use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use clap::{ArgAction, Args};
use paceline_collective::{DType, Error, ProcessGroup, ReduceOp, Transport};

use super::op::Op;
use super::record::{Record, Run};
use super::{count, stream, timing};
use crate::flags::one_of;

/// Most iterations of one measurement: their times are kept.
pub(super) const ITERATIONS_MAX: usize = 1_000_000;

/// The reductions that commands offer.
pub(super) const REDUCTIONS: [ReduceOp; 4] = [
    ReduceOp::Sum,
    ReduceOp::Average,
    ReduceOp::Min,
    ReduceOp::Max,
];

/// The transports that can be asked for.
pub(super) const TRANSPORTS: [Transport; 4] = [
    Transport::Auto,
    Transport::Shm,
    Transport::Tcp,
    Transport::Mpi,
];

/// What to measure.
#[derive(Debug, Clone, PartialEq, Args)]
pub(crate) struct Settings {
    /// What to measure, one table after the other
    #[arg(id = "operations", value_name = "OPERATIONS")]
    #[arg(default_value = "all-reduce")]
    #[arg(value_parser = one_of(Op::ALL, |op| op.name().into()))]
    pub(crate) ops: Vec<Op>,
    /// One row for each, in this order; see `sizes::sizes`.
    ///
    /// *Units*: bytes, in nccl-tests' sense: of the longest buffer of a rank.
    #[arg(skip)]
    pub(crate) sizes: Vec<usize>,
    /// Type of the elements
    #[arg(long, value_name = "NAME", default_value = "f32")]
    #[arg(value_parser = one_of(&DType::ALL, |dtype| dtype.to_string()))]
    pub(crate) dtype: DType,
    /// How operations that reduce combine
    #[arg(long, value_name = "NAME", default_value = "sum")]
    #[arg(value_parser = one_of(&REDUCTIONS, |op| op.to_string()))]
    pub(crate) reduction: ReduceOp,
    /// The root of operations that have one
    #[arg(long, value_name = "RANK", value_parser = RangedU64ValueParser::<usize>::new(), default_value = "0")]
    pub(crate) root: usize,
    /// Work on the group's buffers (arena) or on ordinary memory
    #[arg(long, value_name = "NAME", default_value = "arena")]
    #[arg(value_parser = one_of(&Memory::ALL, |memory| memory.name().into()))]
    pub(crate) memory: Memory,
    /// How long to measure each size.
    #[arg(skip = Amount::Time(Duration::from_millis(500)))]
    pub(crate) amount: Amount,
    /// Calls of each size before those that count
    #[arg(long, value_name = "N", value_parser = count(0..=ITERATIONS_MAX as u64), default_value = "5")]
    pub(crate) warmup: usize,
    /// Compare nothing
    #[arg(id = "no_check", long = "no-check", overrides_with = "check", action = ArgAction::SetFalse)]
    pub(crate) check: bool,
    /// Private memory that each rank streams through; 0 leaves that part out.
    ///
    /// *Units*: bytes.
    #[arg(skip = 64_usize << 20)]
    pub(crate) stream_bytes: usize,
}

/// Whose memory an operation works on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    /// The group's own [`Buffer`](paceline_collective::Buffer)s, by the asynchronous calls and a wait.
    Arena,
    /// The caller's, by the synchronous calls.
    Ordinary,
}

impl Memory {
    /// Both.
    pub(crate) const ALL: [Self; 2] = [Self::Arena, Self::Ordinary];

    /// The name in settings and reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Arena => "arena",
            Self::Ordinary => "ordinary",
        }
    }
}

/// How long one size is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Amount {
    /// This many calls.
    Iterations(usize),
    /// As many calls as last about this long, 5 at least.
    Time(Duration),
}

/// Measures, and hands rank 0 one record after another as they come.
///
/// All ranks call it with the same settings. `report` is called on rank 0 only: first the [`Run`], then a
/// [`Timing`](Record::Timing) for each operation and size, last the [`Streaming`](Record::Streaming).
///
/// *Blocks*: about the settings' amount for each operation and size. *Errors*: the group's.
pub(super) fn run(
    group: &ProcessGroup,
    settings: &Settings,
    mut report: impl FnMut(&Record),
) -> Result<(), Error> {
    let mut tell = |record: Record| {
        if group.rank() == 0 {
            report(&record);
        }
    };
    tell(Record::Run(Run::new(group, settings)));
    let mut timings = Vec::new();
    for op in &settings.ops {
        let sizes = if *op == Op::Barrier {
            &[0]
        } else {
            &settings.sizes[..]
        };
        for bytes in sizes {
            let timing = timing::measure(group, settings, *op, *bytes)?;
            tell(Record::Timing(timing.clone()));
            timings.push(timing);
        }
    }
    if settings.stream_bytes > 0 {
        let streaming = stream::measure(group, settings.stream_bytes)?;
        tell(Record::Streaming(streaming.with_shares(&timings)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use paceline_collective::GroupOptions;

    use super::super::record::Timing;
    use super::super::sizes;
    use super::*;

    /// Every record of rank 0 of a group of threads.
    fn records(world: usize, settings: &Settings) -> Vec<Record> {
        records_with(world, "auto", settings)
    }

    /// The same with algorithms that are asked for.
    fn records_with(world: usize, algorithm: &str, settings: &Settings) -> Vec<Record> {
        let options = GroupOptions {
            arena_bytes: Some(64 << 20),
            algorithm: algorithm.parse().unwrap(),
            ..GroupOptions::default()
        };
        let groups = ProcessGroup::local(world, &options).unwrap();
        std::thread::scope(|scope| {
            let ranks: Vec<_> = groups
                .into_iter()
                .map(|group| {
                    scope.spawn(move || {
                        let mut records = Vec::new();
                        run(&group, settings, |record| records.push(record.clone())).unwrap();
                        records
                    })
                })
                .collect();
            let mut all: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
            assert!(all[1..].iter().all(Vec::is_empty), "only rank 0 reports");
            all.swap_remove(0)
        })
    }

    impl Default for Settings {
        /// All-reduce of `f32` sums, 8 B to 64 MiB by factors of 8, in the arena, half a second for each size.
        fn default() -> Self {
            Self {
                ops: vec![Op::AllReduce],
                sizes: sizes::sizes(8, 64 << 20, 8),
                dtype: DType::F32,
                reduction: ReduceOp::Sum,
                root: 0,
                memory: Memory::Arena,
                amount: Amount::Time(Duration::from_millis(500)),
                warmup: 5,
                check: true,
                stream_bytes: 64 << 20,
            }
        }
    }

    fn tiny() -> Settings {
        Settings {
            ops: Op::ALL.to_vec(),
            sizes: vec![8, 1000, 70_000],
            amount: Amount::Iterations(3),
            warmup: 1,
            stream_bytes: 64 << 10,
            ..Settings::default()
        }
    }

    #[test]
    fn every_operation_is_right_in_either_memory_and_on_any_number_of_ranks() {
        for memory in Memory::ALL {
            for world in [1, 2, 3] {
                let settings = Settings { memory, ..tiny() };
                let records = records(world, &settings);
                let timings: Vec<&Timing> = records
                    .iter()
                    .filter_map(|record| match record {
                        Record::Timing(timing) => Some(timing),
                        _ => None,
                    })
                    .collect();
                // One row of a barrier.
                assert_eq!(timings.len(), (Op::ALL.len() - 1) * 3 + 1);
                for timing in timings {
                    assert_eq!(timing.wrong, Some(0), "{timing:?}");
                    assert_eq!(timing.iterations, 3);
                    assert!(timing.min_us <= timing.p50_us && timing.p50_us <= timing.p99_us);
                }
                assert!(matches!(records[0], Record::Run(_)));
                assert!(matches!(records.last(), Some(Record::Streaming(_))));
            }
        }
    }

    #[test]
    fn every_type_and_reduction_is_right_and_another_root_too() {
        let others = [ReduceOp::BitAnd, ReduceOp::BitOr, ReduceOp::BitXor];
        for dtype in DType::ALL {
            for reduction in REDUCTIONS.into_iter().chain(others) {
                if reduction.check(dtype).is_err() {
                    continue;
                }
                let settings = Settings {
                    dtype,
                    reduction,
                    root: 2,
                    sizes: vec![1000],
                    stream_bytes: 0,
                    ..tiny()
                };
                for record in records(3, &settings) {
                    if let Record::Timing(timing) = record {
                        assert_eq!(timing.wrong, Some(0), "{timing:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_share_of_the_bound_is_told_for_all_reduce_in_the_arena_only() {
        let shares = |settings: &Settings| match records(2, settings).pop() {
            Some(Record::Streaming(streaming)) => streaming.shares.len(),
            other => panic!("{other:?}"),
        };
        let large = Settings {
            ops: vec![Op::AllReduce, Op::Broadcast],
            sizes: vec![1 << 20, 2 << 20],
            ..tiny()
        };
        assert_eq!(shares(&large), 2);
        let memory = Memory::Ordinary;
        assert_eq!(shares(&Settings { memory, ..large }), 0);
    }

    #[test]
    fn a_row_names_the_algorithm_that_ran_whoever_chose_it() {
        let check = |asked: &str, ops: &[Op], bytes, expect: Option<&str>| {
            let settings = Settings {
                ops: ops.into(),
                sizes: vec![bytes],
                stream_bytes: 0,
                ..tiny()
            };
            for record in records_with(3, asked, &settings) {
                if let Record::Timing(timing) = record {
                    assert_eq!(timing.algorithm.as_deref(), expect, "{asked}: {timing:?}");
                }
            }
        };
        let all_reduce = &[Op::AllReduce][..];
        // The table's choice.
        check("auto", all_reduce, 64, Some("one-shot"));
        check("auto", all_reduce, 64 << 10, Some("direct"));
        check("all-reduce:ring", all_reduce, 64, Some("ring"));
        // Ranks without several hosts cannot do that, so the table chooses.
        check("hierarchical", all_reduce, 64, Some("one-shot"));
        check("ring", &[Op::Gather], 64, Some("direct"));
        check("ring", &[Op::Barrier, Op::SendRecv], 64, None);
    }
}
