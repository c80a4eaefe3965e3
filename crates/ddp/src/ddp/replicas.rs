//! The step of a rank that computes its shards on replicas, with one thread for each.

use std::fmt;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use super::step::{Before, Seat};
use super::{Ddp, Reduced, ShardStep};
use crate::error::DdpError;
use crate::hook::{GradientSink, Tokens};
use crate::reducer::Event;
use crate::sync_batch_norm::Meeting;
use crate::timeline::Timeline;

/// Shards that a replica may be ahead of their addition; each holds one set of gradients.
const AHEAD: usize = 1;

impl Ddp {
    /// Like [`step`](Self::step), but this rank's shards run on replicas of `model`, one for each of `devices` (with autodiff)
    /// and each in a thread. They are copied for every step. Shards are dealt to them in turn, and their gradients are added on
    /// the model's device in the order of `step`.
    ///
    /// Forward passes take turns, because Burn has one source of random numbers for a process; backward passes run side by side.
    /// With several micro-batches in a shard, only the last backward pass does. If the model has a
    /// [`SyncBatchNorm`](crate::SyncBatchNorm), every shard has a replica and a thread, and one runs at a time.
    ///
    /// *Numerics*: the bits of `step`. *Memory*: each replica holds its weights, its activations, and the gradients of at most
    /// three shards. *Cost*: each step copies the weights to every other device and the gradients back.
    ///
    /// *Errors*: those of `step`; the first by shard; parameters that are dealt to the ranks. A panic of `run` is passed on.
    pub fn step_on_replicas<M, E>(
        &mut self,
        model: &M,
        devices: &[Device],
        run: impl Fn(&mut ShardStep<'_, M>) -> Result<(), E> + Sync,
    ) -> Result<Reduced, E>
    where
        M: Module,
        E: From<DdpError> + fmt::Display + Send,
    {
        if self.sharded.is_some() {
            let why = "replicas in threads need whole parameters";
            return Err(DdpError::Sharded(why).into());
        }
        if self.is_live() {
            let what = "replicas in threads";
            return Err(DdpError::Recovery { what }.into());
        }
        self.attempt(model, |ddp, before, timeline| {
            ddp.run_replicas(model, devices, before, timeline, &run)
        })
    }

    fn run_replicas<M, E>(
        &self,
        model: &M,
        devices: &[Device],
        before: &Before,
        timeline: &mut Timeline,
        run: &(impl Fn(&mut ShardStep<'_, M>) -> Result<(), E> + Sync),
    ) -> Result<(), E>
    where
        M: Module,
        E: From<DdpError> + fmt::Display + Send,
    {
        let shards = self.shards();
        let meeting = self.norms.as_ref().map(Meeting::new);
        let count = match &meeting {
            Some(_) => shards.len(),
            None => devices.len().clamp(1, shards.len()),
        };
        thread::scope(|scope| {
            // Wakes the shards that wait, however this ends.
            let _end = GiveUp(meeting.as_deref());
            let mut replicas = Vec::with_capacity(count);
            for at in 0..count {
                let device = devices.get(at % devices.len().max(1));
                let device = device.unwrap_or(&self.device);
                let (sender, receiver) = sync_channel(AHEAD);
                let replica = Replica {
                    ddp: self,
                    device,
                    shards: shards.clone(),
                    first: shards.start + at,
                    stride: count,
                    meeting: meeting.as_ref(),
                    sender,
                };
                // With weights and running statistics of its own: a clone would share the tape's leaves.
                let model = model.valid().train().fork(device);
                let name = format!("rank{}/replica{at}", self.group.rank());
                let thread = thread::Builder::new().name(name);
                let thread = thread.spawn_scoped(scope, move || replica.run(&model, before, run));
                let thread = thread
                    .map_err(|error| DdpError::Device(format!("cannot start a thread: {error}")))?;
                replicas.push((thread, receiver));
            }
            for (turn, _) in shards.enumerate() {
                let (_, receiver): &(_, Receiver<Result<Ran, E>>) = &replicas[turn % count];
                // A replica that ends early has panicked; joining it tells why.
                let Ok(ran) = receiver.recv() else { break };
                let ran = ran.map_err(|error| {
                    // It may have waited for a shard that failed.
                    let cause = meeting.as_ref().and_then(|meeting| meeting.ended_first());
                    let cause = cause.filter(|cause| *cause > turn);
                    let cause = cause.and_then(|cause| replicas[cause].1.recv().ok()?.err());
                    cause.unwrap_or(error)
                })?;
                timeline.spans.extend(ran.timeline.spans);
                for word in ran.words {
                    match word {
                        Word::Event(event) => self.reducer.apply(event),
                        Word::Gradient(index, gradient) => self.sink.gradient(index, gradient),
                    }
                }
            }
            for (thread, receiver) in replicas {
                drop(receiver);
                thread.join().unwrap_or_else(|panic| resume_unwind(panic));
            }
            Ok(())
        })
    }
}

/// A replica's thread.
struct Replica<'a, E> {
    ddp: &'a Ddp,
    device: &'a Device,
    /// The shards of the rank.
    shards: Range<usize>,
    first: usize,
    stride: usize,
    meeting: Option<&'a Arc<Meeting>>,
    sender: SyncSender<Result<Ran, E>>,
}

impl<E: From<DdpError>> Replica<'_, E> {
    fn run<M: Module>(
        self,
        model: &M,
        before: &Before,
        run: &impl Fn(&mut ShardStep<'_, M>) -> Result<(), E>,
    ) {
        let own = (self.first..self.shards.end).step_by(self.stride);
        for shard in own {
            let ran = self.one(model, shard, before, run);
            // Without a receiver, the step has failed elsewhere.
            if self.sender.send(ran).is_err() {
                return;
            }
        }
    }

    fn one<M: Module>(
        &self,
        model: &M,
        shard: usize,
        before: &Before,
        mut run: &impl Fn(&mut ShardStep<'_, M>) -> Result<(), E>,
    ) -> Result<Ran, E> {
        let ddp = self.ddp;
        if shard != self.first {
            ddp.write_buffers(model, &before.statistics);
        }
        let words = Arc::new(Words {
            device: ddp.device.clone().inner(),
            words: Mutex::default(),
        });
        let sink: Arc<dyn GradientSink> = words.clone();
        let tokens =
            (*self.device != ddp.device).then(|| Tokens::new(ddp.parameters.len(), self.device));
        let seat = Seat {
            shard,
            wishes: before.wishes.filter(|_| shard == self.shards.start),
            said: before.said,
            device: self.device,
            tokens: tokens.as_ref().unwrap_or(&ddp.tokens),
            sink: &sink,
            apply: &|event| words.push(Word::Event(event)),
            takes_turns: self.meeting.is_none(),
            meeting: self.meeting,
        };
        let mut timeline = Timeline::default();
        ddp.run_shard(model, seat, &mut timeline, &mut run)?;
        words.push(Word::Event(Event::ShardEnd(ddp.read_buffers(model)?)));
        let words = std::mem::take(&mut *words.lock());
        Ok(Ran { words, timeline })
    }
}

struct GiveUp<'a>(Option<&'a Meeting>);

impl Drop for GiveUp<'_> {
    fn drop(&mut self) {
        if let Some(meeting) = self.0 {
            meeting.give_up();
        }
    }
}

/// A shard that a replica has computed.
struct Ran {
    words: Vec<Word>,
    timeline: Timeline,
}

/// What the reducer would have heard if the shard had run on the model itself.
#[expect(clippy::large_enum_variant, reason = "nearly all are gradients")]
enum Word {
    Event(Event),
    Gradient(usize, Tensor<1>),
}

struct Words {
    /// The model's device, without autodiff.
    device: Device,
    words: Mutex<Vec<Word>>,
}

impl Words {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Word>> {
        self.words.lock().expect("no holder panics")
    }

    fn push(&self, word: Word) {
        self.lock().push(word);
    }
}

impl GradientSink for Words {
    fn gradient(&self, index: usize, gradient: Tensor<1>) {
        self.push(Word::Gradient(index, gradient.to_device(&self.device)));
    }
}
