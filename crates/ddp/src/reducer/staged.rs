//! Gradients staged through the host: a thread reads them back from their device, bucket by bucket, during the backward pass.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use burn::tensor::{DType, Tensor};

use super::{Event, Finished, Gathered, HostReducer, Kept, Reducer, Setup, lock};
use crate::buffer::{self, Value};
use crate::error::DdpError;
use crate::hook::GradientSink;
use crate::plan::BucketPlan;

/// Backward passes whose gradients may wait to be read. Two let reading overlap the next pass; more would cost more device
/// memory, because each pass holds all gradients.
const PASSES_WAITING: usize = 2;

enum Message {
    Event(Event),
    /// Gradients of one bucket.
    Gradients(Box<Packed>),
    /// Answered once everything before it is done or has failed.
    Settle(Sender<Result<(), DdpError>>),
}

/// Gradients of one bucket in one tensor.
struct Packed {
    /// Parameters with their numbers of values, in the tensor's order.
    lens: Vec<(usize, usize)>,
    values: Tensor<1>,
    /// Memory allocated after the packing was submitted to the device.
    after: Tensor<1>,
}

/// The compute thread's side of the staging thread.
pub(crate) struct StagedReducer {
    host: Arc<HostReducer>,
    plan: Arc<BucketPlan>,
    /// `None` tells the thread to end.
    messages: Option<Sender<Message>>,
    /// Gradients of this backward pass, by bucket.
    pending: Mutex<Vec<Vec<(usize, Tensor<1>)>>>,
    /// See [`Micro::is_ordered`](super::Micro::is_ordered).
    is_ordered: AtomicBool,
    passes: Arc<Passes>,
    thread: Option<JoinHandle<()>>,
}

/// Backward passes that have ended on the compute thread but not on the staging thread.
#[derive(Default)]
struct Passes {
    waiting: Mutex<usize>,
    fewer: Condvar,
}

impl StagedReducer {
    /// *Errors*: no thread.
    pub(crate) fn new(setup: Setup) -> Result<Self, DdpError> {
        let rank = setup.group.global_rank(setup.group.rank());
        let plan = setup.plan.clone();
        let host = Arc::new(HostReducer::new(setup));
        let (sender, receiver) = channel();
        let passes = Arc::new(Passes::default());
        let theirs = (host.clone(), passes.clone());
        let thread = std::thread::Builder::new()
            .name(format!("rank{rank}/stage"))
            .spawn(move || run(&receiver, &theirs.0, &theirs.1))
            .map_err(|error| DdpError::Device(format!("cannot start a thread: {error}")))?;
        let buckets = plan.buckets.len();
        Ok(Self {
            host,
            plan,
            messages: Some(sender),
            pending: Mutex::new(vec![Vec::new(); buckets]),
            is_ordered: AtomicBool::new(false),
            passes,
            thread: Some(thread),
        })
    }

    fn hand_over(&self, gradients: Vec<(usize, Tensor<1>)>) {
        let lens = gradients.iter().map(|(index, g)| (*index, g.dims()[0]));
        let lens: Vec<(usize, usize)> = lens.collect();
        let parts = gradients.into_iter();
        let mut parts: Vec<Tensor<1>> = parts.map(|(_, g)| g.cast(DType::F32)).collect();
        if let [gradient] = parts.as_slice() {
            // Makes `cat` copy even a single gradient, see below.
            parts.push(Tensor::zeros([1], &gradient.device()));
        }
        // Gives the packed tensor its own memory: CubeCL lets an operation write in place once a read holds the only other
        // tensor, even before that read is in the device's queue. It also makes one copy per bucket to the host.
        let values = Tensor::cat(parts, 0);
        // CubeCL synchronizes another thread's read with the allocation of the memory, not with the last write: a read of an
        // earlier bucket in between would satisfy this bucket's wait. Memory allocated now forces a new wait.
        let after = Tensor::empty([1], &values.device());
        // Flushes now instead of at the read: the device begins at once, and the fusion of kernels does not depend on the
        // speed of the other thread. A device failure shows at the read.
        let _ = values.device().flush();
        let packed = Packed {
            lens,
            values,
            after,
        };
        self.send(Message::Gradients(Box::new(packed)));
    }

    /// Sends the first `buckets` if this backward pass left them incomplete, because unused parameters have no gradient.
    fn flush(&self, buckets: usize) {
        for gradients in lock(&self.pending).iter_mut().take(buckets) {
            if !gradients.is_empty() {
                self.hand_over(std::mem::take(gradients));
            }
        }
    }

    /// Waits while too many backward passes are unread.
    fn wait_for_room(&self) {
        let mut waiting = lock(&self.passes.waiting);
        while *waiting >= PASSES_WAITING && !self.has_ended() {
            waiting = self
                .passes
                .fewer
                .wait(waiting)
                .unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    /// Waits until every message sent so far is handled.
    ///
    /// *Errors*: the device could not be read.
    fn settle(&self) -> Result<(), DdpError> {
        let (answer, outcome) = channel();
        self.send(Message::Settle(answer));
        let ended = || DdpError::Device("the thread that reads gradients has ended".into());
        outcome.recv().map_err(|_| ended())?
    }

    fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    fn send(&self, message: Message) {
        // A thread that has ended has panicked; `settle` reports it.
        let _ = self.messages.as_ref().map(|sender| sender.send(message));
    }
}

impl Reducer for StagedReducer {
    fn reserve(&self) -> Result<(), DdpError> {
        self.host.reserve()
    }

    fn apply(&self, event: Event) {
        match event {
            Event::Step { .. } => lock(&self.pending).iter_mut().for_each(Vec::clear),
            Event::Micro(micro) => {
                self.is_ordered.store(micro.is_ordered, Ordering::Relaxed);
                self.wait_for_room();
            }
            Event::MicroEnd => {
                self.is_ordered.store(false, Ordering::Relaxed);
                self.flush(usize::MAX);
                *lock(&self.passes.waiting) += 1;
            }
            Event::Open(buckets) => self.flush(buckets),
            // The thread has nothing left to do.
            Event::Commit => return self.host.apply(event),
            Event::Shard(_) | Event::Extra { .. } | Event::ShardEnd(_) => {}
        }
        self.send(Message::Event(event));
    }

    fn launched(&self) -> usize {
        // If the thread cannot be waited for, assume that it sent: the group is then aborted.
        self.settle().map_or(usize::MAX, |()| self.host.launched())
    }

    fn finish(&self) -> Result<Finished, DdpError> {
        self.settle()?;
        self.host.finish()
    }

    fn finish_with(&self, tail: Vec<f32>) -> Option<Finished> {
        self.host.finish_with(tail)
    }

    fn kept(&self, kept: Kept, index: usize, with: &mut dyn FnMut(&mut [f32])) {
        self.host.kept(kept, index, with);
    }

    fn send_weights(&self, bucket: usize, own: &HashMap<usize, Value>) -> Result<(), DdpError> {
        self.host.send_weights(bucket, own)
    }

    fn receive_weights(&self, bucket: usize) -> Result<Gathered, DdpError> {
        self.host.receive_weights(bucket)
    }
}

impl GradientSink for StagedReducer {
    /// Keeps a gradient until its bucket is complete.
    fn gradient(&self, index: usize, gradient: Tensor<1>) {
        let (bucket, _) = self.plan.places[index];
        if self.is_ordered.load(Ordering::Relaxed) {
            self.flush(bucket);
        }
        let complete = {
            let mut pending = lock(&self.pending);
            pending[bucket].push((index, gradient));
            let is_complete = pending[bucket].len() == self.plan.buckets[bucket].segments.len();
            is_complete.then(|| std::mem::take(&mut pending[bucket]))
        };
        if let Some(gradients) = complete {
            self.hand_over(gradients);
        }
    }
}

impl Drop for StagedReducer {
    fn drop(&mut self) {
        drop(self.messages.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run(messages: &Receiver<Message>, host: &HostReducer, passes: &Passes) {
    // Wakes the waiting thread however this one ends.
    let _end = Wake(passes);
    let mut failed: Option<DdpError> = None;
    for message in messages {
        match message {
            Message::Event(event) => {
                match event {
                    Event::Step { .. } => failed = None,
                    Event::MicroEnd => passes.one_less(),
                    _ => {}
                }
                // After a failed read no bucket is sent: it would lack gradients.
                if failed.is_none() {
                    host.apply(event);
                }
            }
            Message::Gradients(..) if failed.is_some() => {}
            Message::Gradients(packed) => {
                failed = read(*packed, host).err();
            }
            Message::Settle(answer) => {
                let _ = answer.send(failed.clone().map_or(Ok(()), Err));
            }
        }
    }
}

/// Reads the gradients of one bucket in one copy.
fn read(packed: Packed, host: &HostReducer) -> Result<(), DdpError> {
    let values = buffer::read([packed.values, packed.after], "gradients")?;
    let values = buffer::floats(&values[0]);
    let mut rest = &values[..];
    host.write(packed.lens.into_iter().map(|(index, len)| {
        let (gradient, after) = rest.split_at(len);
        rest = after;
        (index, gradient)
    }));
    Ok(())
}

impl Passes {
    fn one_less(&self) {
        let mut waiting = lock(&self.waiting);
        *waiting = waiting.saturating_sub(1);
        self.fewer.notify_all();
    }
}

struct Wake<'a>(&'a Passes);

impl Drop for Wake<'_> {
    fn drop(&mut self) {
        *lock(&self.0.waiting) = 0;
        self.0.fewer.notify_all();
    }
}
