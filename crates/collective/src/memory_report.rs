//! What a group's memory is spent on, and what bounds each part.

use std::fmt;
use std::sync::atomic::Ordering;

use crate::executor::QUEUE_MAX;
use crate::group::ProcessGroup;
use crate::memory::{Allocator, ArenaReport, Share};

/// A group's memory at one moment, on one rank. Displays as one line.
///
/// Everything that grows with calls or with what peers do is here, with its bound. What is not here has one size for the
/// life of the group: control pages (4 KiB a rank), a plan for each of the last 64 different calls, the flight recorder's
/// ring, and 2 KiB for each peer's messages about the group's health.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryReport {
    /// Memory that the ranks of this host share; none where no memory is shared.
    pub arena: Option<ArenaReport>,
    /// Copies of callers' memory that peers see during a call. A part of the arena where there is one.
    ///
    /// *Units*: bytes. *Bound*: of calls on ordinary memory that go through an arena 2 MiB, because these are cut into
    /// pieces; of other calls that need a copy four times the longest of them.
    pub staging: usize,
    /// Intermediate results, kept for the next call.
    ///
    /// *Units*: bytes. *Bound*, rounded up to a power of two: what this rank folds for others in the longest call, once for
    /// each node of the tree that its host holds, of which there are at most twice the tree's depth. Nothing but
    /// `hierarchical` and `ring` has any.
    pub temp: usize,
    /// What data connections have read ahead, and pieces in flight.
    ///
    /// *Units*: bytes. *Bound*: 16 KiB for each connection, and 4 pieces of at most 128 KiB for each input or result of a
    /// round, whatever the length of the call.
    pub connections: usize,
    /// Messages by [`send`](ProcessGroup::send) that have not been taken yet, and memory kept for the next ones.
    pub sent: Share,
    /// Messages from peers that have not been received yet. If memory is shared, they lie in the senders' arenas.
    pub received: Share,
    /// Operations that wait to be executed; a thread that submits one more waits for room.
    pub queued: Share,
}

impl ProcessGroup {
    /// What this rank's side of the group spends memory on.
    ///
    /// *Blocks*: not on operations. *Cost*: the system's list of mappings is read, about a millisecond.
    ///
    /// # Example
    ///
    /// ```
    /// use paceline_collective::{GroupOptions, ProcessGroup};
    ///
    /// let group = ProcessGroup::local(1, &GroupOptions::default())?.remove(0);
    /// let _buffer = group.buffer::<f32>(1 << 20)?;
    /// let report = group.memory();
    /// assert_eq!(report.arena.unwrap().used, 4 << 20);
    /// assert!(report.to_string().starts_with("arena 4.0 MiB of "));
    /// # Ok::<(), paceline_collective::Error>(())
    /// ```
    pub fn memory(&self) -> MemoryReport {
        let member = self.member();
        let gauges = &member.gauges;
        let arena = match &member.allocator {
            Allocator::Heap => None,
            Allocator::Arena(arena) => Some(arena.report()),
        };
        let (sent, received) = member.p2p.usage();
        MemoryReport {
            arena,
            staging: gauges.staging.load(Ordering::Relaxed),
            temp: gauges.temp.load(Ordering::Relaxed),
            connections: gauges.streams.load(Ordering::Relaxed),
            sent,
            received,
            queued: Share {
                now: member.executor.queued(),
                limit: QUEUE_MAX,
            },
        }
    }
}

/// "arena 64.0 MiB of 8.0 GiB (peak 96.0 MiB, huge pages 62.0 MiB), staging 1.0 MiB, ...".
impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.arena {
            Some(arena) => {
                let [used, peak, size] = [arena.used, arena.peak, arena.size].map(text);
                write!(f, "arena {used} of {size} (peak {peak}, ")?;
                match arena.huge {
                    0 => write!(f, "no huge pages)")?,
                    huge => write!(f, "huge pages {})", text(huge))?,
                }
            }
            None => write!(f, "no arena")?,
        }
        let [staging, temp, connections] = [self.staging, self.temp, self.connections].map(text);
        write!(
            f,
            ", staging {staging}, intermediate {temp}, connections {connections}"
        )?;
        for (what, share) in [("sent", self.sent), ("received", self.received)] {
            write!(f, ", {what} {} of {}", text(share.now), text(share.limit))?;
        }
        write!(f, ", queued {} of {}", self.queued.now, self.queued.limit)
    }
}

/// A number of bytes with one decimal, in the largest unit that leaves it at 1 or more.
fn text(bytes: usize) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = "B";
    for larger in units {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, larger);
    }
    match unit {
        "B" => format!("{bytes} B"),
        _ => format!("{value:.1} {unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> MemoryReport {
        let none = |limit| Share { now: 0, limit };
        MemoryReport {
            arena: Some(ArenaReport {
                used: 64 << 20,
                peak: 96 << 20,
                size: 8 << 30,
                huge: 0,
            }),
            staging: 1 << 20,
            temp: 100,
            connections: 0,
            sent: none(96 << 20),
            received: none(256 << 20),
            queued: Share {
                now: 3,
                limit: 1024,
            },
        }
    }

    #[test]
    fn a_report_is_one_line() {
        let rest = ", staging 1.0 MiB, intermediate 100 B, connections 0 B, sent 0 B of 96.0 MiB, received 0 B of \
                    256.0 MiB, queued 3 of 1024";
        let mut report = report();
        let arena = "arena 64.0 MiB of 8.0 GiB (peak 96.0 MiB, no huge pages)";
        assert_eq!(report.to_string(), format!("{arena}{rest}"));
        report.arena.as_mut().unwrap().huge = 3 << 19;
        assert!(report.to_string().contains("huge pages 1.5 MiB"));
        report.arena = None;
        assert_eq!(report.to_string(), format!("no arena{rest}"));
    }

    #[test]
    fn bytes_have_the_largest_unit_that_fits() {
        for (bytes, expected) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536 << 10, "1.5 MiB"),
            (usize::MAX, "16777216.0 TiB"),
        ] {
            assert_eq!(text(bytes), expected);
        }
    }
}
