//! What one rank did, over all the processes that were it.

use paceline_gpu::snapshot::Reading;

use super::{Absence, Mean, Peak, Span, nanos};
use crate::sample::RankSample;

/// What one rank did.
#[derive(Debug, Default)]
pub(crate) struct RankTotals {
    /// The global rank.
    pub(crate) rank: u32,
    /// Processor time of all its processes since it was first seen.
    pub(crate) cpu_ns: u64,
    /// Utilisation over all the time, in percent of one core.
    pub(crate) percent: Mean,
    /// The same while it was busy.
    pub(crate) busy: Mean,
    /// Resident memory.
    pub(crate) resident: Peak<u64>,
    /// How often another process became this rank.
    pub(crate) restarts: u64,
    /// Time in which its processor time could not be read.
    pub(crate) absence: Absence,
    pid: Option<u32>,
    process_ns: Option<u64>,
    is_seen: bool,
}

impl RankTotals {
    pub(crate) fn new(rank: u32) -> Self {
        Self {
            rank,
            ..Self::default()
        }
    }

    /// Adds an interval; utilisation in percent of one core, where it is known.
    pub(crate) fn add(&mut self, now: &RankSample, span: Span, busy_percent: u32) -> Option<u32> {
        let is_first = !std::mem::replace(&mut self.is_seen, true);
        if let Some(pid) = now.pid
            && self.pid != Some(pid)
        {
            self.restarts += u64::from(self.pid.is_some());
            self.pid = Some(pid);
            // A process that was there before the first sample brings time from before; a later one began at nothing.
            self.process_ns = (!is_first).then_some(0);
        }
        if let Some(bytes) = now.resident_bytes.known() {
            self.resident.add(*bytes, span.at_ns);
        }
        let percent = if now.pid.is_none() {
            Some(0)
        } else {
            self.spent(&now.cpu, span)
        };
        if let Some(percent) = percent {
            self.percent.add(u64::from(percent), span.ns);
            if percent >= busy_percent {
                self.busy.add(u64::from(percent), span.ns);
            }
        }
        percent
    }

    fn spent(&mut self, cpu: &Reading<std::time::Duration>, span: Span) -> Option<u32> {
        let now_ns = match cpu {
            Reading::Known(cpu) => nanos(*cpu),
            Reading::Missing { missing } => {
                self.absence.add(missing, span);
                return None;
            }
        };
        let before_ns = self
            .process_ns
            .replace(now_ns.max(self.process_ns.unwrap_or(0)))?;
        // Time of children that ended may be out of the sum for a moment: it never runs backwards.
        let spent_ns = now_ns.saturating_sub(before_ns);
        self.cpu_ns = self.cpu_ns.saturating_add(spent_ns);
        if span.elapsed_ns == 0 {
            return None;
        }
        let percent = u128::from(spent_ns) * 100 / u128::from(span.elapsed_ns);
        (span.ns > 0).then(|| u32::try_from(percent).unwrap_or(u32::MAX))
    }
}
