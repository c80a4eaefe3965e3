//! One step: shards forward and backward, then averaged gradients.

mod shard;

use std::sync::Arc;
use std::time::Instant;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Device;
use paceline_collective::{ProcessGroup, ReduceOp};
use paceline_nn::{Pass, Recompute, Turn, compute_here, mix};
use paceline_rendezvous::page::{self, Phase};
use paceline_rendezvous::stop::StopSignal;

use super::Ddp;
use super::average::RoundPhase;
use super::pacing::Said;
use crate::buffer;
use crate::device_threads::DeviceThreads;
use crate::error::DdpError;
use crate::gradients::{self, Whole};
use crate::hook::{GradientSink, Tokens};
use crate::reducer::{Event, Finished, Means};
use crate::scaler::{self, GradScaler};
use crate::sync_batch_norm::Meeting;
use crate::timeline::Timeline;
use crate::zero::Sharded;
pub use shard::{BackwardPart, ShardStep};

/// Sums that travel with each step, by slot.
pub(super) mod extra {
    use paceline_rendezvous::stop::VOTES;

    /// The weight from the user.
    pub(in crate::ddp) const WEIGHT: usize = 0;
    /// Losses times their weights, set by `step_on`.
    pub(in crate::ddp) const LOSS: usize = 1;
    /// Number of ranks asked to stop, by signal in the order of [`VOTES`].
    pub(in crate::ddp) const STOP: usize = 2;
    /// Number of ranks that are invited to admit replacements of lost ranks.
    pub(in crate::ddp) const ADMIT: usize = STOP + VOTES.len();
    /// Seconds from the end of the step before the last one to the end of the last one, from rank 0.
    pub(in crate::ddp) const INTERVAL: usize = ADMIT + 1;
    /// The user's sums. For each shard one more number follows: see [`busy`].
    pub(in crate::ddp) const USER: usize = INTERVAL + 1;

    /// The slot of a rank that begins with `shard`, with `sums` sums of the user: its seconds for a shard in the last step.
    pub(in crate::ddp) fn busy(sums: usize, shard: usize) -> usize {
        USER + sums + shard
    }
}

/// The result of a step.
pub struct Reduced {
    /// The averaged gradients; a parameter that no rank used has none. With a
    /// [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer) they are those of this rank's slices, for that optimizer
    /// only.
    pub grads: GradientsParams,
    /// Sum of the weights of all micro-batches of all ranks.
    pub weight: f64,
    /// Mean loss over the step's samples on all ranks, from [`Ddp::step_on`] or [`ShardStep::add_loss`].
    pub loss: f64,
    /// The user sums over all shards of all ranks, see [`ShardStep::add`].
    pub sums: Vec<f32>,
    /// 2-norm of the averaged gradient before clipping; `None` without clipping and in a skipped step.
    pub grad_norm: Option<f64>,
    /// Whether the step had an infinity or NaN, and a scaler or
    /// [`DdpOptions::skip_non_finite`](super::DdpOptions::skip_non_finite) looks for them. Then `grads` is empty on all ranks, and an optimizer step with it changes
    /// nothing.
    pub skipped: bool,
    /// The loss scale of this step; 1 without a scaler.
    pub scale: f32,
    /// Paths of parameters that no rank used in this step.
    pub unused: Vec<String>,
    /// Timing of the step on this rank.
    pub timeline: Timeline,
}

impl Ddp {
    /// Runs one step. Calls `run` once per shard of this rank, in order, for the forward and backward passes. Gradients are
    /// sent to the other ranks while the last backward pass still runs.
    ///
    /// *Blocks*: until the gradients of all ranks have arrived, at most the group's timeout per bucket.
    ///
    /// *Errors*: those of `run` and of the collectives. After any error, the model's running statistics and this `Ddp` are as
    /// they were before the call, so the next call repeats the step with the same random numbers. If `run` fails before a
    /// bucket was sent, the other ranks must have failed in the same step; otherwise the next step fails on all ranks with an
    /// error about the different step numbers. If `run` fails after a bucket was sent, the group is aborted, because the other
    /// ranks wait for the rest. With [`Recovery::Live`](crate::Recovery), the loss of other ranks is no error: the step is
    /// repeated, so `run` may be called again, for other shards.
    pub fn step<M, E>(
        &mut self,
        model: &M,
        mut run: impl FnMut(&mut ShardStep<'_, M>) -> Result<(), E>,
    ) -> Result<Reduced, E>
    where
        M: Module,
        E: From<DdpError> + std::fmt::Display,
    {
        let (shards, world) = (self.shard_count(), self.group.world());
        if self.norms.is_some() && shards != world {
            page::tell_misconfigured(true);
            return Err(DdpError::SyncBatchNorm { shards, world }.into());
        }
        self.repeat_step(model, |ddp| {
            ddp.attempt(model, |ddp, before, timeline| {
                ddp.run_shards(model, before, timeline, &mut run)
            })
        })
    }

    fn run_shards<M, E>(
        &self,
        model: &M,
        before: &Before,
        timeline: &mut Timeline,
        run: &mut impl FnMut(&mut ShardStep<'_, M>) -> Result<(), E>,
    ) -> Result<(), E>
    where
        M: Module,
        E: From<DdpError>,
    {
        let meeting = self.norms.as_ref().map(Meeting::new);
        compute_here();
        for (turn, shard) in self.shards().enumerate() {
            if turn > 0 {
                self.write_buffers(model, &before.statistics);
            }
            let seat = Seat {
                shard,
                wishes: before.wishes.filter(|_| turn == 0),
                said: before.said,
                device: &self.device,
                tokens: &self.tokens,
                sink: &self.sink,
                apply: &|event| self.reducer.apply(event),
                takes_turns: false,
                meeting: meeting.as_ref(),
            };
            self.run_shard(model, seat, timeline, run)?;
            let buffers = self.read_buffers(model)?;
            self.reducer.apply(Event::ShardEnd(buffers));
        }
        Ok(())
    }

    /// Runs one step whose shards `shards` computes. After an error everything is as before.
    pub(super) fn attempt<M, E>(
        &mut self,
        model: &M,
        shards: impl FnOnce(&Self, &Before, &mut Timeline) -> Result<(), E>,
    ) -> Result<Reduced, E>
    where
        M: Module,
        E: From<DdpError> + std::fmt::Display,
    {
        let before = self.before(model).map_err(|error| self.located(error))?;
        let mut timeline = Timeline::default();
        let begun = self
            .begin(model)
            .map_err(|error| self.located(error).into());
        let ran = begun.and_then(|()| {
            let start = Instant::now();
            let ran = shards(self, &before, &mut timeline);
            self.clock.computed(start.elapsed(), self.shards().len());
            ran.inspect_err(|error| self.give_up(error))
        });
        let reduced = ran.and_then(|()| {
            let reduced = self.end(model, &before.statistics, timeline);
            Ok(reduced.map_err(|error| self.located(error))?)
        });
        self.group.slot().hide_weights();
        if reduced.is_err() {
            self.undo(model, before);
        }
        reduced
    }

    /// With the job's number of the rank to blame, if it has another one among the replicas of this part.
    pub(super) fn located(&self, error: DdpError) -> DdpError {
        match error {
            DdpError::Collective(error) if self.parts.is_some() => {
                DdpError::along(&self.group, error)
            }
            error => error,
        }
    }

    /// Everything that a step changes before it has succeeded.
    fn before<M: Module>(&self, model: &M) -> Result<Before, DdpError> {
        // A failed group never recovers: every later step returns the first cause.
        self.group.health()?;
        self.sharded.as_ref().map_or(Ok(()), |s| s.health())?;
        self.require_weights()?;
        let stop = self.group.stop_wish();
        let wishes = Wishes {
            stop: stop.filter(|_| self.options.stop_on_signal),
            admit: self.is_live() && self.is_asked_to_admit(),
        };
        Ok(Before {
            statistics: self.read_buffers(model)?,
            rounds: self.rounds.as_ref().map(|rounds| rounds.phase),
            stop: self.stop,
            learns: self.uses.is_some(),
            wishes: Some(wishes),
            said: self.clock.said,
        })
    }

    fn is_asked_to_admit(&self) -> bool {
        #[cfg(test)]
        if crate::recovery::faults::is_invited(self.step) {
            return true;
        }
        self.group.is_invited()
    }

    fn begin<M: Module>(&mut self, model: &M) -> Result<(), DdpError> {
        let step = self.step;
        if self
            .rounds
            .as_ref()
            .is_none_or(|rounds| rounds.phase.is_in_sync)
        {
            self.fingerprint.choose(&self.group, model, step);
        }
        self.begin_round(model, step)?;
        // Nothing may follow a step's last operation with live recovery, see `recovery`.
        if buffer::is_host(&self.device) || self.is_live() {
            self.send_fingerprint()?;
        }
        self.limit_step();
        let undone = self.undone;
        self.reducer.apply(Event::Step { step, undone });
        if let Some(sharded) = &self.sharded {
            sharded.begin_step(step);
        }
        self.stop = None;
        Ok(())
    }

    fn end<M: Module>(
        &mut self,
        model: &M,
        start: &[Vec<f32>],
        timeline: Timeline,
    ) -> Result<Reduced, DdpError> {
        self.group.set_phase(Phase::Communication, self.step);
        self.gather(Sharded::end_step)?;
        let finished = self.reducer.finish();
        let finished = finished.inspect_err(|error| self.abandon(error))?;
        self.conclude(model, start, timeline, finished)
    }

    /// Ends a step whose sums have come.
    pub(super) fn conclude<M: Module>(
        &mut self,
        model: &M,
        start: &[Vec<f32>],
        timeline: Timeline,
        finished: Finished,
    ) -> Result<Reduced, DdpError> {
        let step = self.step;
        if self.is_live() {
            let tail = finished.tail.iter().flat_map(|value| value.to_le_bytes());
            self.commits.complete(tail.collect());
        }
        let pace = self.heard(&finished.extras);
        let collected = self.collect(model, start, timeline, finished);
        let (reduced, agreed) = collected.inspect_err(|error| self.abandon(error))?;
        // By now the device has computed the weights of this step's start. Reading them still waits for all work that this
        // thread has submitted. It cannot be sent earlier: another thread submits operations to the group until the last
        // bucket has arrived.
        self.send_fingerprint()?;
        let checked = self.fingerprint.check(&self.group);
        let is_finite = !reduced.skipped && reduced.loss.is_finite();
        let checked = checked.and_then(|()| match is_finite {
            true => Ok(()),
            false => self.compare_weights(model),
        });
        // The program may go back to a state on which all ranks agreed.
        let is_final = |error: &&DdpError| {
            !matches!(error, DdpError::Diverged { .. }) || self.agreed_step().is_none()
        };
        if let Some(error) = checked.as_ref().err().filter(is_final) {
            blame(&self.group, error);
        }
        checked?;
        self.group.set_phase(Phase::BetweenSteps, step);
        self.stop = agreed.stop;
        self.is_invited = agreed.admit;
        self.skipped = reduced.skipped;
        if let Some(rounds) = &mut self.rounds {
            rounds.phase.is_pending = true;
        }
        self.learn_order()?;
        // A step without samples is no evidence about the scale.
        if let Some(scaler) = self.scaler.as_mut().filter(|_| reduced.weight > 0.0) {
            scaler.update(reduced.skipped);
        }
        self.reducer.apply(Event::Commit);
        self.step += 1;
        self.keep_pace(&pace)?;
        Ok(reduced)
    }

    pub(super) fn run_shard<M, E>(
        &self,
        model: &M,
        seat: Seat<'_>,
        timeline: &mut Timeline,
        run: &mut impl FnMut(&mut ShardStep<'_, M>) -> Result<(), E>,
    ) -> Result<(), E>
    where
        M: Module,
        E: From<DdpError>,
    {
        let step = self.step;
        let shard = seat.shard;
        self.group.set_phase(Phase::StepClosure, step);
        let turn = shard - self.shards().start;
        let _attendance = seat.meeting.map(|meeting| meeting.attend(turn));
        let seed = mix(self.options.seed, step, shard as u64);
        let random_numbers = seat.takes_turns.then(Turn::take);
        seat.device.seed(seed);
        (seat.apply)(Event::Shard(shard));
        let wishes = seat.wishes.unwrap_or_default();
        let stop = wishes.stop.map(|signal| extra::STOP + signal.vote());
        for slot in stop.into_iter().chain(wishes.admit.then_some(extra::ADMIT)) {
            (seat.apply)(Event::Extra { slot, value: 1.0 });
        }
        if seat.wishes.is_some() {
            let [interval, busy] = [seat.said.interval, seat.said.busy];
            let slots = [
                (extra::INTERVAL, interval.filter(|_| shard == 0)),
                (extra::busy(self.options.sums, shard), busy),
            ];
            for (slot, value) in slots {
                if let Some(value) = value {
                    (seat.apply)(Event::Extra { slot, value });
                }
            }
        }
        let pass = Pass::new(self.options.recompute).with_seed(mix(seed, 0, 0));
        let pass = match (seat.takes_turns, &self.sharded) {
            (true, _) => pass.in_turns(),
            (false, Some(sharded)) => pass.with_supply(sharded),
            (false, None) => pass,
        };
        let mut turn = ShardStep {
            ddp: self,
            model,
            seat,
            step,
            pass: pass.clone(),
            seed,
            random_numbers,
            announced: self.options.accumulate,
            done: 0,
            timeline,
            forward_start: None,
        };
        let result = self.casts.explain(step, || pass.enter(|| run(&mut turn)));
        // Another error may be its consequence.
        let finished = pass.finish();
        let finished = finished.map_err(|error| DdpError::of_pass(step, error));
        finished.or_else(|error| {
            let told = self.gather(|_| Err(error.clone()));
            told.and(Err(self.located(error)))
        })?;
        result??;
        let recompute = self.options.recompute;
        let has_run = turn.done == 0 || pass.has_run_blocks();
        if recompute != Recompute::None && !has_run && step == 0 && shard == 0 {
            paceline_rendezvous::notice!(
                WARN,
                "recompute is {recompute}, but the model ran no Block: nothing is recomputed"
            );
        }
        if turn.done != turn.announced {
            return Err(E::from(turn.miscounted(turn.done)));
        }
        if turn.done == 0 && self.norms.is_some() {
            return Err(E::from(DdpError::NothingToNormalise { step, shard }));
        }
        Ok(())
    }

    fn send_fingerprint(&mut self) -> Result<(), DdpError> {
        let sent = self.fingerprint.send(&self.group);
        sent.inspect_err(|error| self.abandon(error))
    }

    /// Compares all weights between the ranks, because one rank's may be the cause of numbers that are not finite.
    fn compare_weights<M: Module>(&mut self, model: &M) -> Result<(), DdpError> {
        let all = match self.comparable_hash(model)? {
            Some(own) => self.with_recovery(|ddp| ddp.gather_hashes(own))?,
            None => Vec::new(),
        };
        let (hashes, _) = all.as_chunks::<8>();
        let hashes = hashes.iter().map(|bytes| i64::from_le_bytes(*bytes));
        let (group, step) = (&self.group, self.step);
        self.fingerprint
            .check_weights(group, step, hashes.collect())
    }

    /// The hash of this rank's weights, if it should be that of all ranks.
    pub(super) fn comparable_hash<M: Module>(&self, model: &M) -> Result<Option<i64>, DdpError> {
        // Ranks that take steps by themselves have weights of their own.
        match self.group.world() == 1 || self.rounds.is_some() {
            true => Ok(None),
            false => self.fingerprint.hash_of_weights(model),
        }
    }

    /// The hashes of all ranks, as bytes.
    pub(super) fn gather_hashes(&self, own: i64) -> Result<Vec<u8>, DdpError> {
        let all = self.group.all_gather_bytes(&own.to_le_bytes())?;
        Ok(all.concat())
    }

    /// Takes back what a step that failed has changed.
    fn undo<M: Module>(&mut self, model: &M, before: Before) {
        self.write_buffers(model, &before.statistics);
        self.fingerprint.undo();
        if let (Some(rounds), Some(phase)) = (&mut self.rounds, before.rounds) {
            rounds.phase = phase;
        }
        self.stop = before.stop;
        self.uses = before.learns.then(Arc::default);
        self.undone += 1;
    }

    /// Aborts the groups if other ranks wait for this one, whose shards have failed.
    fn give_up(&self, error: &impl std::fmt::Display) {
        // The other ranks wait for the rest, or know nothing of a failure among the parts of this replica.
        let is_awaited =
            self.reducer.launched() > 0 || self.parts.is_some() || self.norms.is_some();
        let why = || format!("step {} failed: {error}", self.step);
        if let Some(norms) = &self.norms {
            norms.abort(&why());
        }
        if let Some(parts) = &self.parts {
            parts.abort(&why());
        }
        match &self.sharded {
            Some(sharded) if is_awaited || sharded.has_met() => sharded.give_up(&why()),
            None if is_awaited && self.group.world() > 1 => self.group.abort(&why()),
            _ => {}
        }
    }

    fn collect<M: Module>(
        &mut self,
        model: &M,
        start: &[Vec<f32>],
        mut timeline: Timeline,
        finished: Finished,
    ) -> Result<(Reduced, Wishes), DdpError> {
        let Finished {
            mut means,
            used,
            statistics,
            mut extras,
            timings,
            tail: _,
        } = finished;
        self.check_device()?;
        timeline.buckets = timings;
        timeline.gathers = self
            .sharded
            .as_ref()
            .map_or(Vec::new(), |s| s.take_timings());
        let unused = self.parameters.iter().enumerate();
        let unused = unused
            .filter(|(index, _)| !used[*index])
            .map(|(_, entry)| entry.path.clone())
            .collect();
        let skipped = self.has_to_skip(&means, extras[extra::LOSS])?;
        // A step in which no shard had a sample changes nothing, and NaN would stay in running statistics for ever.
        let is_finite = |values: &Vec<f32>| values.iter().all(|value| value.is_finite());
        let statistics = statistics.filter(|all| !skipped || all.iter().all(is_finite));
        self.write_buffers(model, statistics.as_deref().unwrap_or(start));
        let scaler = self.scaler.as_ref();
        match scaler {
            _ if skipped => means.clear(),
            // Before clipping, because the limit applies to the true norm.
            Some(scaler) => scaler.unscale_means(&mut means),
            None => {}
        }
        let limit = self.options.clip_norm.filter(|_| !skipped);
        let grad_norm = limit
            .map(|limit| self.clip(&mut means, limit))
            .transpose()?;
        if let Some(parts) = &self.parts {
            parts.add(&mut extras)?;
        }
        let grads = gradients::register(model, &self.parameters, means, &self.plan, &self.device);
        let votes = std::array::from_fn(|vote| extras[extra::STOP + vote] > 0.0);
        let weight = f64::from(extras[extra::WEIGHT]);
        let reduced = Reduced {
            grads,
            weight,
            loss: f64::from(extras[extra::LOSS]) / weight.max(f64::MIN_POSITIVE),
            sums: extras[extra::USER..][..self.options.sums].to_vec(),
            grad_norm,
            skipped,
            scale: self.scaler.as_ref().map_or(1.0, GradScaler::get_scale),
            unused,
            timeline,
        };
        let agreed = Wishes {
            stop: StopSignal::elected(votes),
            admit: extras[extra::ADMIT] > 0.0,
        };
        Ok((reduced, agreed))
    }

    /// Whether the step has a gradient or loss that is not finite, and all ranks skip it.
    fn has_to_skip(&self, means: &Means, loss: f32) -> Result<bool, DdpError> {
        let skips = self.options.skip_non_finite;
        if !skips && !self.scaler.as_ref().is_some_and(GradScaler::is_enabled) {
            return Ok(false);
        }
        let is_bad = (skips && !loss.is_finite()) || !scaler::are_finite(means)?;
        self.any_rank(is_bad)
    }

    /// Scales gradients so that their common 2-norm is at most `limit`; returns the norm before.
    fn clip(&mut self, means: &mut Means, limit: f64) -> Result<f64, DdpError> {
        let mut norm = gradients::norm(
            means,
            &Whole {
                group: &self.group,
                plan: &self.plan,
                shares: self.shares.as_deref(),
                parts: self.parts.as_ref(),
            },
        )?;
        if matches!(means, Means::Device(_)) {
            // Devices of different kinds could round differently.
            let own = norm.to_le_bytes();
            let all = self.with_recovery(|ddp| {
                let all = ddp.group.all_gather_bytes(&own).map_err(DdpError::from);
                all.map(|all| all.concat())
            })?;
            norm = all
                .first_chunk()
                .map_or(norm, |first| f64::from_le_bytes(*first));
        }
        gradients::clip(means, norm, limit);
        Ok(norm)
    }

    /// Whether any rank's slice or any part of the model shows it; where every rank has whole gradients they all see the same.
    fn any_rank(&self, here: bool) -> Result<bool, DdpError> {
        let mut any = [i32::from(here)];
        if self.shares.is_some() {
            self.group.all_reduce(&mut any, ReduceOp::Max)?;
        }
        let any = any[0] > 0;
        self.parts.as_ref().map_or(Ok(any), |parts| parts.any(any))
    }

    /// Aborts the groups if this rank's device failed or its memory is used up: the other ranks wait for gradients that it can
    /// no longer send.
    pub(super) fn abandon(&self, error: &DdpError) {
        use paceline_collective::Error::Memory;
        let is_own = matches!(error, DdpError::Device(_))
            || matches!(error.collective(), Some(Memory { .. }));
        match &self.sharded {
            Some(sharded) if is_own => sharded.give_up(&error.to_string()),
            None if is_own && self.group.world() > 1 => self.group.abort(&error.to_string()),
            _ => {}
        }
    }

    pub(super) fn check_device(&self) -> Result<(), DdpError> {
        self.device_threads
            .as_ref()
            .map_or(Ok(()), DeviceThreads::check)
    }

    /// Waits for the device's submitted work if passes are timed.
    fn await_device(&self) -> Result<(), DdpError> {
        if !self.is_timed {
            return Ok(());
        }
        let done = self.device.sync();
        done.map_err(|error| DdpError::Device(format!("it failed: {error:?}")))
            .inspect_err(|error| self.abandon(error))
    }

    pub(super) fn read_buffers<M: Module>(&self, model: &M) -> Result<Vec<Vec<f32>>, DdpError> {
        let mut values = vec![Vec::new(); self.buffers.len()];
        if !self.buffers.is_empty() {
            let read = buffer::read_buffers(model, &self.buffer_index, |at, data| {
                values[at] = data.to_vec()
            });
            read.inspect_err(|error| self.abandon(error))?;
        }
        Ok(values)
    }

    pub(super) fn write_buffers<M: Module>(&self, model: &M, values: &[Vec<f32>]) {
        if self.buffers.is_empty() {
            return;
        }
        let ids = self.buffers.iter().map(|entry| entry.id);
        buffer::write_buffers(model, ids.zip(values.iter().cloned()).collect());
    }
}

/// The state before a step, to which an error returns.
pub(super) struct Before {
    /// Running statistics, from which every shard starts.
    pub(super) statistics: Vec<Vec<f32>>,
    rounds: Option<RoundPhase>,
    stop: Option<StopSignal>,
    /// Whether the step is the first, whose order of uses is learnt.
    learns: bool,
    /// Read once, so that all shards of a step see the same.
    pub(super) wishes: Option<Wishes>,
    pub(super) said: Said,
}

/// What a rank wants all ranks to do after a step, or what they agreed on.
#[derive(Clone, Copy, Default)]
pub(super) struct Wishes {
    /// To stop, because of this signal.
    stop: Option<StopSignal>,
    /// To admit replacements of lost ranks.
    admit: bool,
}

/// Where a shard runs, and where its events and gradients go.
pub(super) struct Seat<'a> {
    pub(super) shard: usize,
    /// What the shard tells the other ranks.
    pub(super) wishes: Option<Wishes>,
    pub(super) said: Said,
    pub(super) device: &'a Device,
    pub(super) tokens: &'a Tokens,
    pub(super) sink: &'a Arc<dyn GradientSink>,
    pub(super) apply: &'a dyn Fn(Event),
    /// Whether other threads run shards at the same time.
    pub(super) takes_turns: bool,
    /// Where the rank's shards normalise together, one running at a time.
    pub(super) meeting: Option<&'a Arc<Meeting>>,
}

/// Tells this host's launcher which rank caused an error that all ranks get. Otherwise the launcher would report the rank
/// that happens to exit first.
pub(super) fn blame(group: &ProcessGroup, error: &DdpError) {
    let others = error.culprit().filter(|culprit| *culprit != group.rank());
    if let Some(culprit) = others {
        group.blame(culprit);
    }
}
