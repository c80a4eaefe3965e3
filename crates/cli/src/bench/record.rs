//! What a measurement comes to, as JSON has it.

use paceline_collective::ProcessGroup;
use paceline_usage::environment;
use serde::Serialize;

use super::measurement::{Memory, Settings};
use super::op::Op;
use super::quantile::quantile;
use super::shape::Shape;

/// Sizes below this part of the memory that is streamed through are not compared with it: they may stay in the caches.
const SHARE_PART_MIN: usize = 4;
/// Most shares of one report.
const SHARES_MAX: usize = 3;

/// One line of a report.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "record", rename_all = "kebab-case")]
pub(crate) enum Record {
    /// What is measured, and where.
    Run(Run),
    /// One operation at one size.
    Timing(Timing),
    /// The memory system.
    Streaming(Streaming),
}

/// What is measured, and where.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Run {
    /// Always `paceline`; other libraries measured beside it have their own names.
    pub(crate) library: &'static str,
    /// Version of this crate.
    pub(crate) version: &'static str,
    /// The commit that `PACELINE_COMMIT` named at build time.
    pub(crate) commit: Option<&'static str>,
    /// Processor of rank 0's host.
    pub(crate) cpu: String,
    /// Cores that rank 0 may use.
    pub(crate) cores: usize,
    /// Operating system of rank 0's host.
    pub(crate) system: String,
    /// Number of ranks.
    pub(crate) world: usize,
    /// Number of hosts.
    pub(crate) hosts: usize,
    /// How bytes travel.
    pub(crate) transport: &'static str,
    /// Whose memory the operations work on.
    pub(crate) memory: &'static str,
}

impl Run {
    pub(super) fn new(group: &ProcessGroup, settings: &Settings) -> Self {
        Self {
            library: "paceline",
            version: env!("CARGO_PKG_VERSION"),
            commit: option_env!("PACELINE_COMMIT"),
            cpu: environment::cpu(),
            cores: environment::cores(),
            system: environment::system(),
            world: group.world(),
            hosts: group.env().node_count,
            transport: group.transport(),
            memory: settings.memory.name(),
        }
    }
}

/// One operation at one size. Times are those of the slowest rank in each iteration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Timing {
    /// Always `paceline`.
    pub(crate) library: &'static str,
    /// [`Op::name`].
    pub(crate) operation: &'static str,
    /// How bytes travel.
    pub(crate) transport: &'static str,
    /// Number of ranks.
    pub(crate) world: usize,
    /// Whose memory the operation works on; none for a barrier.
    pub(crate) memory: Option<&'static str>,
    /// Size in nccl-tests' sense: of the longest buffer of a rank.
    pub(crate) bytes: usize,
    /// The same in elements.
    pub(crate) elements: usize,
    /// Type of the elements; none for a barrier.
    pub(crate) dtype: Option<String>,
    /// How numbers are combined, in operations that do.
    pub(crate) reduction: Option<String>,
    /// The root, in operations that have one.
    pub(crate) root: Option<usize>,
    /// The algorithm that ran; none of operations without one, or if operations are not recorded.
    pub(crate) algorithm: Option<String>,
    /// Calls that count.
    pub(crate) iterations: usize,
    /// Fastest iteration, in microseconds.
    pub(crate) min_us: f64,
    /// Median, in microseconds.
    pub(crate) p50_us: f64,
    /// 99th percentile, in microseconds.
    pub(crate) p99_us: f64,
    /// Bytes by the median, in 1e9 bytes a second; none for a barrier.
    pub(crate) algbw_gb_s: Option<f64>,
    /// The same times nccl-tests' factor of the operation.
    pub(crate) busbw_gb_s: Option<f64>,
    /// Elements of all ranks' results that are not what they must be; none when nobody looked.
    pub(crate) wrong: Option<u64>,
}

/// What a [`Timing`] is made of.
pub(super) struct Measured<'a> {
    pub(super) op: Op,
    pub(super) shape: &'a Shape,
    /// The slowest rank's time of each iteration, in nanoseconds, in any order.
    pub(super) nanos: Vec<i64>,
    pub(super) algorithm: Option<String>,
    pub(super) wrong: Option<u64>,
}

impl Timing {
    pub(super) fn new(group: &ProcessGroup, settings: &Settings, measured: Measured<'_>) -> Self {
        let Measured {
            op,
            shape,
            mut nanos,
            algorithm,
            wrong,
        } = measured;
        nanos.sort_unstable();
        let micros = |share| quantile(&nanos, share) as f64 / 1e3;
        let moves_data = op != Op::Barrier;
        let bytes = shape.total * settings.dtype.bytes();
        let p50_us = micros(0.5);
        // Bytes by microseconds are 1e6 bytes a second.
        let algbw = moves_data.then(|| bytes as f64 / p50_us.max(1e-3) / 1e3);
        Self {
            library: "paceline",
            operation: op.name(),
            transport: group.transport(),
            world: group.world(),
            memory: moves_data.then(|| settings.memory.name()),
            bytes,
            elements: shape.total,
            dtype: moves_data.then(|| settings.dtype.to_string()),
            reduction: op.reduces().then(|| settings.reduction.to_string()),
            root: op.has_root().then_some(settings.root),
            algorithm,
            iterations: nanos.len(),
            min_us: micros(0.0),
            p50_us,
            p99_us: micros(0.99),
            algbw_gb_s: algbw,
            busbw_gb_s: algbw
                .zip(op.bus_factor(group.world()))
                .map(|(algbw, factor)| algbw * factor),
            wrong,
        }
    }
}

/// The memory system under all ranks at once, each on memory of its own.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Streaming {
    /// Always `paceline`.
    pub(crate) library: &'static str,
    /// Number of ranks.
    pub(crate) world: usize,
    /// Memory that each rank streams through, in bytes.
    pub(crate) bytes: usize,
    /// Passes that count, of each kind.
    pub(crate) passes: usize,
    /// Bytes that all ranks read and write by time, with ordinary stores; median.
    pub(crate) ordinary_gb_s: f64,
    /// The same with stores past the caches; none where the processor has none.
    pub(crate) non_temporal_gb_s: Option<f64>,
    /// The faster of the two.
    pub(crate) gb_s: f64,
    /// How near to it the largest all-reduces in the arena come; the largest last.
    pub(crate) shares: Vec<Share>,
}

/// How near an all-reduce comes to the streaming bandwidth.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Share {
    /// Size of the all-reduce, in bytes.
    pub(crate) bytes: usize,
    /// Bytes that all ranks together must read and write at least: every input once and every result once.
    pub(crate) moved_bytes: usize,
    /// The same by the median time.
    pub(crate) gb_s: f64,
    /// The same by the streaming bandwidth.
    pub(crate) share: f64,
}

impl Streaming {
    /// Adds the shares of all-reduces that are large enough to be compared.
    pub(super) fn with_shares(mut self, timings: &[Timing]) -> Self {
        let is_compared = |timing: &&Timing| {
            timing.operation == Op::AllReduce.name()
                && timing.memory == Some(Memory::Arena.name())
                && matches!(timing.transport, "shm" | "local")
                && timing.bytes >= self.bytes / SHARE_PART_MIN
        };
        let mut compared: Vec<&Timing> = timings.iter().filter(is_compared).collect();
        compared.sort_by_key(|timing| timing.bytes);
        let first = compared.len().saturating_sub(SHARES_MAX);
        let shares = compared[first..].iter().map(|timing| {
            let moved_bytes = 2 * timing.bytes * timing.world;
            let gb_s = moved_bytes as f64 / timing.p50_us.max(1e-3) / 1e3;
            Share {
                bytes: timing.bytes,
                moved_bytes,
                gb_s,
                share: gb_s / self.gb_s,
            }
        });
        self.shares = shares.collect();
        self
    }
}

#[cfg(test)]
pub(super) mod tests;
