//! When and why this rank was idle. The summary derives from it whether the devices really worked at the same time.

use std::time::{Duration, Instant};

use burn::tensor::Device;
use paceline_collective::ProcessGroup;
use paceline_ddp::timeline::{Activity, Timeline};
use paceline_ddp::{Ddp, DdpError, device};
use paceline_rendezvous::monotonic_ns;
use paceline_usage::busy::{BusyTime, Interval};
use paceline_usage::spans::{self, Bucket, Kind, Notes, Spans, SpansRecord};
use serde::{Deserialize, Serialize};

use crate::error::TrainError;

/// A rank's report to rank 0 on a time window.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Window {
    /// Of the group, since which the times count.
    generation: u64,
    end_ns: u64,
    /// Start and end of each interval.
    idle: Vec<(u64, u64)>,
    spans: Vec<Spans>,
}

/// A rank's report to rank 0 at the end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RankTotals {
    /// Time lost waiting for other ranks, in nanoseconds.
    pub(crate) waited_for_ranks_ns: u64,
    /// Time lost waiting for data, in nanoseconds.
    pub(crate) waited_for_data_ns: u64,
    /// Largest resident memory, in bytes.
    pub(crate) peak_bytes: Option<u64>,
    /// Bytes sent to other ranks.
    pub(crate) sent_bytes: u64,
    /// Its GPU; `None` on the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) device: Option<DeviceTotals>,
}

/// A rank's report to rank 0 on its GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DeviceTotals {
    /// Its name.
    pub(crate) name: String,
    /// Device memory that Burn holds in this rank, in bytes: the peak use plus fragmentation.
    pub(crate) held_bytes: Option<u64>,
}

/// Collects the idle intervals of this rank and the spans of a few steps, and on rank 0 those of all ranks.
pub(crate) struct Observer {
    /// Of the group, since which the times count.
    generation: u64,
    origin: Instant,
    idle: Vec<Interval>,
    /// Of the step that runs, if its spans are kept.
    notes: Option<Notes>,
    spans: Vec<Spans>,
    totals: RankTotals,
    window_start_ns: u64,
    usage: BusyTime,
}

impl Observer {
    /// Starts observing at the same moment on all ranks.
    ///
    /// *Errors*: those of the barrier.
    pub(crate) fn start(ddp: &mut Ddp, group: &ProcessGroup) -> Result<Self, TrainError> {
        // A new rank begins when the others have admitted it.
        if !ddp.has_joined() {
            all_gather(ddp, group, &[])?;
        }
        Ok(Self::new(group.generation(), group.world()))
    }

    fn new(generation: u64, world: usize) -> Self {
        Self {
            generation,
            origin: Instant::now(),
            idle: Vec::new(),
            notes: None,
            spans: Vec::new(),
            totals: RankTotals {
                waited_for_ranks_ns: 0,
                waited_for_data_ns: 0,
                peak_bytes: None,
                sent_bytes: 0,
                device: None,
            },
            window_start_ns: 0,
            usage: BusyTime::new(world),
        }
    }

    /// The origin of all times.
    pub(crate) fn origin(&self) -> Instant {
        self.origin
    }

    /// Begins a step, and notes that the rank has waited for its data since `asked`.
    pub(crate) fn begin_step(&mut self, asked: Instant, keeps_spans: bool) {
        let now = Instant::now();
        self.notes = keeps_spans.then(Notes::new);
        self.did(Kind::Data, asked, now);
        self.totals.waited_for_data_ns += nanos(now - asked);
        self.note(asked, now);
    }

    /// Notes that the rank waited for other ranks.
    pub(crate) fn waited_for_ranks(&mut self, start: Instant, end: Instant) {
        self.totals.waited_for_ranks_ns += nanos(end - start);
        self.note(start, end);
    }

    /// Notes the passes and waits of a step that all ranks have just reduced.
    pub(crate) fn reduced(&mut self, timeline: &Timeline) {
        for span in &timeline.spans {
            let kind = match span.activity {
                Activity::Forward => Kind::Forward,
                Activity::Backward => Kind::Backward,
            };
            self.did(kind, span.start, span.end);
        }
        for (start, end) in timeline.waits() {
            self.did(Kind::Wait, start, end);
            self.waited_for_ranks(start, end);
        }
        if let Some(notes) = &mut self.notes {
            notes.reduced(Instant::now());
            for bucket in timeline.gathers.iter().chain(&timeline.buckets) {
                notes.add_bucket(Bucket {
                    bytes: bucket.bytes as u64,
                    started: bucket.started,
                    peers_ready: bucket.peers_ready,
                    finished: bucket.finished,
                });
            }
        }
    }

    /// Notes what the rank did in the step, if the step's spans are kept.
    pub(crate) fn did(&mut self, kind: Kind, start: Instant, end: Instant) {
        if let Some(notes) = &mut self.notes {
            notes.add(kind, start, end);
        }
    }

    /// Ends a step; `step` are done with it.
    pub(crate) fn end_step(&mut self, step: u64, group: &ProcessGroup) {
        let notes = self.notes.take();
        let node = group.env().node_rank;
        self.spans
            .extend(notes.map(|notes| notes.done(step, node, monotonic_ns())));
    }

    fn note(&mut self, start: Instant, end: Instant) {
        self.idle.push(Interval {
            start_ns: nanos(start.saturating_duration_since(self.origin)),
            end_ns: nanos(end.saturating_duration_since(self.origin)),
        });
    }

    /// Ends a window: adds all ranks' idle intervals to the usage, and returns the spans of all ranks in the steps that have ended;
    /// on a rank that keeps neither, does nothing but take part. Called once per epoch to bound memory.
    ///
    /// *Blocks*: until all ranks have come. *Errors* - those of the collective.
    pub(crate) fn close_window(
        &mut self,
        ddp: &mut Ddp,
        group: &ProcessGroup,
        keeps: bool,
    ) -> Result<Vec<SpansRecord>, TrainError> {
        let start = Instant::now();
        let idle = self.idle.drain(..);
        let mine = Window {
            generation: self.generation,
            end_ns: nanos(self.origin.elapsed()),
            idle: idle.map(|idle| (idle.start_ns, idle.end_ns)).collect(),
            spans: std::mem::take(&mut self.spans),
        };
        let bytes = serde_json::to_vec(&mine).expect("numbers always encode");
        let all = all_gather(ddp, group, &bytes)?;
        if !keeps {
            self.totals.waited_for_ranks_ns += nanos(start.elapsed());
            return Ok(Vec::new());
        }
        let mut windows: Vec<Window> = all
            .iter()
            .map(|bytes| serde_json::from_slice(bytes).unwrap_or_default())
            .collect();
        let spans = windows.iter_mut();
        let spans: Vec<_> = spans
            .map(|window| std::mem::take(&mut window.spans))
            .collect();
        self.add(mine.end_ns, windows);
        self.totals.waited_for_ranks_ns += nanos(start.elapsed());
        Ok(spans::records(&spans))
    }

    /// Adds the windows of all ranks, of which this one's ends at `own_end_ns`.
    fn add(&mut self, own_end_ns: u64, windows: Vec<Window>) {
        // A rank that was a commit ahead when others were lost learns of it only now, and has times of the generation before.
        if windows
            .iter()
            .any(|window| window.generation != self.generation)
        {
            self.window_start_ns = own_end_ns;
            return;
        }
        let ends = windows.iter().map(|window| window.end_ns);
        let end_ns = ends.max().unwrap_or(0);
        let idle: Vec<Vec<Interval>> = windows
            .into_iter()
            .map(|window| {
                // The earlier ranks waited for the last one.
                let idle = window.idle.into_iter().chain([(window.end_ns, end_ns)]);
                idle.map(|(start_ns, end_ns)| Interval { start_ns, end_ns })
                    .collect()
            })
            .collect();
        let window = Interval {
            start_ns: self.window_start_ns,
            end_ns,
        };
        self.usage.add(window, &idle);
        self.window_start_ns = end_ns;
    }

    /// Goes on with the ranks that are left, or with new ones. Usage and time begin anew.
    pub(crate) fn follow(&mut self, group: &ProcessGroup) {
        let totals = self.totals.clone();
        *self = Self {
            totals,
            ..Self::new(group.generation(), group.world())
        };
    }

    /// Share of the time in which all ranks computed at once, up to the last window's end; only rank 0 knows it.
    pub(crate) fn all_busy(&self) -> Option<f64> {
        let usage = &self.usage;
        (!usage.total().is_zero()).then(|| usage.all_busy_share())
    }

    /// All ranks' usage.
    pub(crate) fn usage(&self) -> &BusyTime {
        &self.usage
    }

    /// All ranks' totals, in rank order.
    ///
    /// *Blocks*: until all ranks have come. *Errors* - those of the collective.
    pub(crate) fn totals(
        &mut self,
        ddp: &mut Ddp,
        group: &ProcessGroup,
        device: &Device,
    ) -> Result<Vec<RankTotals>, TrainError> {
        self.totals.peak_bytes = paceline_usage::memory::peak_resident_bytes();
        self.totals.sent_bytes = group.sent_bytes();
        self.totals.device = device::name(device).map(|name| DeviceTotals {
            name,
            held_bytes: device.memory_pool_usage().map(|usage| usage.bytes_reserved),
        });
        let bytes = serde_json::to_vec(&self.totals).expect("numbers always encode");
        let all = all_gather(ddp, group, &bytes)?;
        let totals = all
            .iter()
            .map(|bytes| serde_json::from_slice(bytes).unwrap_or_else(|_| self.totals.clone()))
            .collect();
        Ok(totals)
    }
}

/// All ranks' bytes, in rank order; again if ranks of the replicas are lost meanwhile.
///
/// *Blocks*: until all ranks have come.
pub(crate) fn all_gather(
    ddp: &mut Ddp,
    group: &ProcessGroup,
    own: &[u8],
) -> Result<Vec<Vec<u8>>, DdpError> {
    let all = ddp.with_recovery(|ddp| {
        // Along a mesh, `group` has more ranks than the replicas, and there is no next generation.
        let group = match ddp.group().generation() == group.generation() {
            true => group,
            false => ddp.group(),
        };
        Ok::<_, DdpError>(packed(&group.all_gather_bytes(own)?))
    })?;
    Ok(unpacked(&all))
}

/// Byte strings as one, each behind its length.
fn packed(strings: &[Vec<u8>]) -> Vec<u8> {
    let lens = strings.iter().map(|string| string.len() as u64);
    let strings = lens.map(u64::to_le_bytes).zip(strings);
    strings
        .flat_map(|(len, string)| [&len[..], string].concat())
        .collect()
}

fn unpacked(mut rest: &[u8]) -> Vec<Vec<u8>> {
    let mut strings = Vec::new();
    while let Some((len, after)) = rest.split_first_chunk() {
        let len = usize::try_from(u64::from_le_bytes(*len)).unwrap_or(usize::MAX);
        let (string, next) = after.split_at(len.min(after.len()));
        strings.push(string.to_vec());
        rest = next;
    }
    strings
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(generation: u64, end_ns: u64, idle: &[(u64, u64)]) -> Window {
        Window {
            generation,
            end_ns,
            idle: idle.to_vec(),
            spans: Vec::new(),
        }
    }

    #[test]
    fn times_of_an_earlier_generation_are_left_out() {
        let mut observer = Observer::new(1, 2);
        observer.add(
            30,
            vec![window(1, 30, &[]), window(0, 3_000, &[(5, 2_000)])],
        );
        assert_eq!(observer.usage().total_ns, 0);
        observer.add(70, vec![window(1, 70, &[]), window(1, 60, &[(40, 50)])]);
        let usage = observer.usage();
        assert_eq!((usage.total_ns, &usage.busy_ns[..]), (40, &[40, 20][..]));
    }
}
