//! `ShardStep`: one shard's turn within a step, its forward and backward passes.

use std::time::Instant;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use paceline_nn::{Pass, Turn, mix};
use paceline_rendezvous::page::Phase;

use super::super::Ddp;
use super::{Seat, extra};
use crate::error::DdpError;
use crate::hook::hook_model;
use crate::reducer::{Event, Micro};
use crate::sync_batch_norm::set_weight;
use crate::timeline::{Activity, Span, Timeline};
use crate::zero::Sharded;

/// A part of a micro-batch's backward pass, see [`ShardStep::backward_part`].
#[derive(Clone, Copy, Debug)]
pub struct BackwardPart {
    /// Units (samples, tokens) of the micro-batch: the weight of its gradients.
    pub weight: f32,
    /// Whether it is the micro-batch's first part; its weight counts once.
    pub is_first: bool,
    /// Whether the shard's later parts give no gradient to the parameters that this one gives a gradient to. Their buckets may
    /// then leave.
    pub is_last: bool,
    /// The stage of a pipeline that it goes through, see [`Placement::stage`](crate::Placement::stage); 0 without one.
    pub stage: usize,
    /// Whether it runs blocks. At stage 3 of ZeRO the replicas then gather the parameters of its stage.
    pub runs_blocks: bool,
    /// Whether no other part of the shard that runs blocks follows, on any replica of the rank's stages.
    pub ends_shard: bool,
}

/// One shard's turn within a step.
pub struct ShardStep<'a, M> {
    pub(super) ddp: &'a Ddp,
    pub(super) model: &'a M,
    pub(super) seat: Seat<'a>,
    pub(super) step: u64,
    pub(super) pass: Pass,
    pub(super) seed: u64,
    /// Held until the shard's last backward pass.
    pub(super) random_numbers: Option<Turn>,
    /// Micro-batches announced and run.
    pub(super) announced: usize,
    pub(super) done: usize,
    pub(super) timeline: &'a mut Timeline,
    pub(super) forward_start: Option<Instant>,
}

impl<M: Module> ShardStep<'_, M> {
    /// The shard to compute, `0..shards`.
    pub fn shard(&self) -> usize {
        self.seat.shard
    }

    /// The device of the model.
    pub fn device(&self) -> &Device {
        self.seat.device
    }

    /// Number of the step.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Sets this shard's number of micro-batches in this step (0 is allowed) if it differs from
    /// [`DdpOptions::accumulate`](crate::DdpOptions::accumulate). Call it before the first micro-batch.
    pub fn micro_batches(&mut self, count: usize) {
        self.announced = count;
    }

    /// The model for the forward pass. Its parameters pass the hooks and are cast to
    /// [`DdpOptions::precision`](crate::DdpOptions::precision). Take a new one for every micro-batch, since Burn consumes the
    /// tape in the backward pass.
    ///
    /// *Errors*: the model lacks parameters that it had in [`Ddp::new`]; with live recovery, a rank was lost: return the error, and
    /// the step is repeated.
    pub fn model(&mut self) -> Result<M, DdpError> {
        self.require_ranks()?;
        self.ddp.group.set_phase(Phase::Forward, self.step);
        self.forward_start = Some(Instant::now());
        let ddp = self.ddp;
        let is_first = self.seat.shard == 0 && self.done == 0 && !self.seat.takes_turns;
        let (hooked, count) = hook_model(
            self.model.clone(),
            &ddp.index,
            self.seat.tokens,
            self.seat.sink,
            ddp.uses.as_ref().filter(|_| is_first),
        );
        if count != ddp.index.len() {
            return Err(DdpError::ModelChanged {
                step: self.step,
                what: format!("{count} of {} parameters found", ddp.index.len()),
            });
        }
        Ok(ddp.casts.apply(hooked))
    }

    /// Runs `forward` on the model of one of this shard's micro-batches, `0..announced`: several may be on their way before
    /// the first backward pass. Blocks get the random numbers of that micro-batch; randomness outside of blocks is not
    /// repeatable here.
    ///
    /// *Errors*: like [`model`](Self::model).
    pub fn forward_of<R>(
        &mut self,
        micro_batch: usize,
        forward: impl FnOnce(M) -> R,
    ) -> Result<R, DdpError> {
        self.pass.restart(mix(self.seed, micro_batch as u64, 0));
        let result = forward(self.model()?);
        self.ddp.await_device()?;
        if let Some(start) = self.forward_start.take() {
            self.push_span(Activity::Forward, start, Instant::now());
        }
        Ok(result)
    }

    /// `loss` times the loss scale, for [`backward_with`](Self::backward_with); unchanged without a scaler.
    pub fn scale(&self, loss: Tensor<1>) -> Tensor<1> {
        match &self.ddp.scaler {
            Some(scaler) => scaler.scale(loss),
            None => loss,
        }
    }

    /// Runs the backward pass of a micro-batch whose loss is a mean over `weight` units (samples, tokens).
    ///
    /// *Errors*: more calls than micro-batches announced; in mixed precision, a loss that is not f32; a lost rank, as
    /// [`model`](Self::model).
    pub fn backward(&mut self, loss: Tensor<1>, weight: f32) -> Result<(), DdpError> {
        self.ddp.casts.check_loss(self.step, &loss)?;
        let loss = self.scale(loss);
        // Other threads may have other tokens, and what they recorded is played when they have ended.
        let is_ordered = !self.seat.takes_turns;
        self.backward_in(is_ordered, weight, || drop(loss.backward()))
    }

    /// Like [`backward`](Self::backward), for code that runs the backward pass itself. With a scaler, run it on
    /// [`scale(loss)`](Self::scale).
    pub fn backward_with(&mut self, weight: f32, pass: impl FnOnce()) -> Result<(), DdpError> {
        // It may be several passes, one after the other.
        self.backward_in(false, weight, pass)
    }

    fn backward_in(
        &mut self,
        is_ordered: bool,
        weight: f32,
        pass: impl FnOnce(),
    ) -> Result<(), DdpError> {
        let is_last = self.done + 1 == self.announced;
        let part = BackwardPart {
            weight,
            is_first: true,
            is_last,
            stage: 0,
            runs_blocks: true,
            ends_shard: is_last,
        };
        self.run_part(part, is_ordered, pass)?;
        let seed = mix(self.seed, self.done as u64, 0);
        self.pass.restart(seed);
        let has_moved_on = self.pass.has_run_blocks() || self.seat.meeting.is_some();
        if has_moved_on && !is_last {
            self.seat.device.seed(seed);
        }
        Ok(())
    }

    /// Like [`backward_with`](Self::backward_with), for a part of a micro-batch's backward pass, or for one of several
    /// micro-batches that are on their way.
    ///
    /// *Numerics*: a parameter's gradients are added in the order of these calls.
    pub fn backward_part(
        &mut self,
        part: BackwardPart,
        pass: impl FnOnce(),
    ) -> Result<(), DdpError> {
        self.run_part(part, false, pass)
    }

    /// `is_ordered`: it is a single pass from one loss; see [`Micro::is_ordered`], for which it must also be the shard's last.
    fn run_part(
        &mut self,
        part: BackwardPart,
        is_ordered: bool,
        pass: impl FnOnce(),
    ) -> Result<(), DdpError> {
        let BackwardPart {
            weight,
            is_first,
            is_last,
            stage,
            runs_blocks,
            ends_shard,
        } = part;
        if is_first && self.done >= self.announced {
            return Err(self.miscounted(self.done + 1));
        }
        self.require_ranks()?;
        let ddp = self.ddp;
        ddp.group.set_phase(Phase::Backward, self.step);
        ddp.await_device()?;
        // With one shard and one micro-batch the gradient is the result. Passing it on untouched gives the same bits as a
        // program without data parallelism.
        let is_alone = ddp.tree.leaves() == 1 && self.announced == 1;
        set_weight(weight);
        (self.seat.apply)(Event::Micro(Micro {
            weight,
            factor: if is_alone { 1.0 } else { weight },
            is_first,
            is_last,
            is_ordered: is_ordered && is_last,
        }));
        if is_last {
            self.random_numbers = None;
        }
        let start = Instant::now();
        let gathers = || runs_blocks && !self.pass.failure().has_failed();
        if gathers() {
            let is_last = ends_shard && self.is_last_shard();
            ddp.gather(|sharded| sharded.begin_backward(stage, is_last))?;
        }
        pass();
        if gathers() {
            ddp.gather(Sharded::end_backward)?;
        }
        ddp.await_device()?;
        self.done += usize::from(is_first);
        (self.seat.apply)(Event::MicroEnd);
        if let Some(forward) = self.forward_start.take() {
            self.push_span(Activity::Forward, forward, start);
        }
        self.push_span(Activity::Backward, start, Instant::now());
        Ok(())
    }

    /// *Errors*: the step has to be repeated, because a rank was lost. Ending it here saves the time until its next collective.
    fn require_ranks(&self) -> Result<(), DdpError> {
        match self.ddp.is_live() {
            true => Ok(self.ddp.group.health()?),
            false => Ok(()),
        }
    }

    fn is_last_shard(&self) -> bool {
        self.seat.shard + 1 == self.ddp.shards().end
    }

    /// The number of micro-batches to plan the shard of a pipeline for, if this rank's has `count`. At stage 3 of ZeRO the
    /// replicas of a stage gather its parameters together, so all plan for the one with the most, and call
    /// [`skip_forward`](Self::skip_forward) and [`skip_backward`](Self::skip_backward) in the places of passes that they lack.
    /// Otherwise it is `count`.
    ///
    /// *Blocks*: at stage 3, until all replicas have begun their shards.
    pub fn planned_micro_batches(&self, count: usize) -> Result<usize, DdpError> {
        let mut planned = count;
        self.ddp.gather(|sharded| {
            planned = sharded.begin_shard(count)?;
            Ok(())
        })?;
        Ok(planned)
    }

    /// Takes part in another replica's forward pass through a stage.
    pub fn skip_forward(&self, stage: usize) -> Result<(), DdpError> {
        self.ddp.gather(|sharded| sharded.skip_forward(stage))
    }

    /// Takes part in another replica's backward pass through a stage. `ends_shard` is that of [`BackwardPart`].
    pub fn skip_backward(&self, stage: usize, ends_shard: bool) -> Result<(), DdpError> {
        let is_last = ends_shard && self.is_last_shard();
        self.ddp
            .gather(|sharded| sharded.skip_backward(stage, is_last))
    }

    /// Notes that the compute thread waited for a message since `start`.
    pub fn waited_since(&mut self, start: Instant) {
        self.timeline.messages.push((start, Instant::now()));
    }

    fn push_span(&mut self, activity: Activity, start: Instant, end: Instant) {
        self.timeline.spans.push(Span {
            activity,
            shard: self.seat.shard,
            start,
            end,
        });
    }

    /// Adds the mean loss of a micro-batch times its weight, for [`Reduced::loss`](crate::Reduced::loss).
    pub fn add_loss(&mut self, value: f32) {
        self.add_extra(extra::LOSS, value);
    }

    /// Adds `value` to user sum `slot` (`0..DdpOptions::sums`). [`Reduced::sums`](crate::Reduced::sums) has the totals over all ranks.
    ///
    /// # Panics
    ///
    /// If there is no such sum.
    pub fn add(&mut self, slot: usize, value: f32) {
        let sums = self.ddp.options.sums;
        assert!(slot < sums, "sum {slot} of {sums}");
        self.add_extra(extra::USER + slot, value);
    }

    fn add_extra(&self, slot: usize, value: f32) {
        (self.seat.apply)(Event::Extra { slot, value });
    }

    pub(super) fn miscounted(&self, done: usize) -> DdpError {
        DdpError::MicroBatches {
            step: self.step,
            shard: self.seat.shard,
            announced: self.announced,
            done,
        }
    }
}
