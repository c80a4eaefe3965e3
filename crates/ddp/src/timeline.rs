//! Timing inside a step: for reports, for the overlap test and for traces.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_collective::OpTiming;
use serde::Serialize;

use crate::reducer::DeviceTicket;

/// An activity of a rank's compute thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// From taking the hooked model to the start of its backward pass.
    Forward,
    /// The backward pass.
    Backward,
}

/// A span of the compute thread's time.
#[derive(Clone, Debug)]
pub struct Span {
    /// The activity.
    pub activity: Activity,
    /// The shard.
    pub shard: usize,
    /// When it began.
    pub start: Instant,
    /// When it ended.
    pub end: Instant,
}

/// A bucket's timing in a step.
#[derive(Clone, Debug)]
pub struct BucketTiming {
    /// Index in launch order; the last one is the tail with running statistics and sums.
    pub bucket: usize,
    /// Bytes that this rank brings to the bucket's collectives: the block that is reduced, or what a communication hook makes
    /// of it.
    pub bytes: usize,
    /// Its collective, such as `all_reduce`.
    pub operation: &'static str,
    /// When it was complete on this rank.
    pub ready: Instant,
    /// When the compute thread handed it to the comm thread.
    pub submitted: Instant,
    /// When the comm thread started on it.
    pub started: Instant,
    /// When it was complete on the last rank.
    pub peers_ready: Instant,
    /// When the reduced values had arrived.
    pub finished: Instant,
    /// When the compute thread began to wait for it, and when it had it.
    pub waited: (Instant, Instant),
    /// The source of the device's begin and end times, once it has finished.
    pub(crate) device: Option<Late>,
}

impl BucketTiming {
    /// A bucket in ordinary memory, complete at `ready` or when it was submitted.
    pub(crate) fn on_host(
        (bucket, bytes, operation): (usize, usize, &'static str),
        ready: Option<Instant>,
        done: OpTiming,
        wait_start: Instant,
    ) -> Self {
        Self {
            bucket,
            bytes,
            operation,
            ready: ready.unwrap_or(done.submitted),
            submitted: done.submitted,
            started: done.started,
            peers_ready: done.peers_ready,
            finished: done.finished,
            waited: (wait_start, Instant::now()),
            device: None,
        }
    }

    /// A bucket that stays on its device: `started` and `finished` are those of the host until
    /// [`Timeline::settle`].
    pub(crate) fn on_device(
        (bucket, bytes, operation): (usize, usize, &'static str),
        ready: Instant,
        waited: (Instant, Instant),
        ticket: Arc<dyn DeviceTicket>,
    ) -> Self {
        Self {
            bucket,
            bytes,
            operation,
            ready,
            submitted: ready,
            started: ready,
            peers_ready: ready,
            finished: waited.1,
            waited,
            device: Some(Late(ticket)),
        }
    }
}

#[derive(Clone)]
pub(crate) struct Late(Arc<dyn DeviceTicket>);

impl fmt::Debug for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Late")
    }
}

/// The timing of one step on one rank.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// The compute thread, in order.
    pub spans: Vec<Span>,
    /// The buckets, in launch order.
    pub buckets: Vec<BucketTiming>,
    /// The gathers of blocks' parameters at stage 3 of ZeRO, in order; each is numbered as the bucket of the block's gradients.
    pub gathers: Vec<BucketTiming>,
    /// When the compute thread waited for messages from other parts of the model.
    pub messages: Vec<(Instant, Instant)>,
}

impl Timeline {
    /// Waits for the device's work and replaces the host's times with the device's.
    pub fn settle(&mut self) {
        for bucket in self.buckets.iter_mut().chain(&mut self.gathers) {
            let late = bucket.device.take();
            if let Some((started, finished)) = late.and_then(|late| late.0.times()) {
                bucket.started = started;
                // A device does not tell waiting for peers from reducing.
                bucket.peers_ready = started;
                bucket.finished = finished;
            }
        }
    }

    /// End of the last backward pass.
    pub fn backward_end(&self) -> Option<Instant> {
        self.spans
            .iter()
            .rev()
            .find(|span| span.activity == Activity::Backward)
            .map(|span| span.end)
    }

    /// Time for which the compute thread waited for communication.
    pub fn waited(&self) -> Duration {
        self.waits().map(|(start, end)| end - start).sum()
    }

    /// The stretches in which it waited.
    pub fn waits(&self) -> impl Iterator<Item = (Instant, Instant)> {
        let buckets = self.gathers.iter().chain(&self.buckets);
        let buckets = buckets.map(|bucket| bucket.waited);
        buckets.chain(self.messages.iter().copied())
    }

    /// This step as Chrome trace events, the JSON that Perfetto (ui.perfetto.dev) opens. Each rank is a process with one
    /// track for the compute thread and one for each comm thread. Times are microseconds since `origin`.
    pub fn trace_events(&self, rank: usize, origin: Instant) -> Vec<serde_json::Value> {
        let event = |track: u32, name: String, start: Instant, end: Instant| {
            let since = |t: Instant| t.saturating_duration_since(origin).as_nanos() as f64 / 1e3;
            serde_json::json!({
                "name": name, "ph": "X", "pid": rank, "tid": track,
                "ts": since(start), "dur": (since(end) - since(start)).max(0.0),
            })
        };
        let label = |track: u32, kind: &str, name: String| serde_json::json!({"name": kind, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}});
        let mut events = vec![
            label(0, "process_name", format!("rank {rank}")),
            label(0, "thread_name", "compute".into()),
            label(1, "thread_name", "comm".into()),
        ];
        for span in &self.spans {
            let name = match span.activity {
                Activity::Forward => format!("forward, shard {}", span.shard),
                Activity::Backward => format!("backward, shard {}", span.shard),
            };
            events.push(event(0, name, span.start, span.end));
        }
        for (start, end) in &self.messages {
            events.push(event(0, "wait for a message".into(), *start, *end));
        }
        if !self.gathers.is_empty() {
            events.push(label(2, "thread_name", "gathers".into()));
        }
        let buckets = self.buckets.iter().map(|bucket| (1, bucket));
        let gathers = self.gathers.iter().map(|bucket| (2, bucket));
        for (track, bucket) in buckets.chain(gathers) {
            let call = bucket.operation;
            let (start, ready, end) = (bucket.started, bucket.peers_ready, bucket.finished);
            let index = bucket.bucket;
            events.push(event(
                0,
                format!("wait for {call} of bucket {index}"),
                bucket.waited.0,
                bucket.waited.1,
            ));
            events.push(event(
                track,
                format!("wait for peers, bucket {index}"),
                start,
                ready,
            ));
            let mut reduce = event(track, format!("{call} bucket {index}"), ready, end);
            reduce["args"] = serde_json::json!({ "bytes": bucket.bytes });
            events.push(reduce);
            let (name, at) = match track {
                1 => (format!("bucket {index} ready"), bucket.ready),
                _ => (format!("{call} of bucket {index} sent"), bucket.submitted),
            };
            events.push(serde_json::json!({
                "name": name, "ph": "i", "s": "t", "pid": rank, "tid": 0,
                "ts": at.saturating_duration_since(origin).as_nanos() as f64 / 1e3,
            }));
        }
        events
    }
}
