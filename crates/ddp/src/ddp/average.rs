//! Local SGD and DiLoCo: ranks train by themselves for some steps, then their weights become one again.

use std::collections::HashMap;

use burn::module::{Module, ParamId};
use paceline_collective::{AllReduce, ReduceOp, Tree};

use super::Ddp;
use crate::buffer::{self, Value};
use crate::comm_hook::{CommHook, LocalSgdOptions, OuterOptimizer};
use crate::error::DdpError;

/// The rounds of local steps between two averages.
pub(super) struct Rounds {
    options: LocalSgdOptions,
    pub(super) phase: RoundPhase,
    /// The weights at the start of the round, by parameter; with an outer optimizer only.
    anchor: HashMap<ParamId, Vec<f32>>,
    /// The outer optimizer's momentum, by parameter.
    pub(super) momentum: HashMap<ParamId, Vec<f32>>,
}

#[derive(Clone, Copy)]
pub(super) struct RoundPhase {
    /// Whether all ranks have the same weights.
    pub(super) is_in_sync: bool,
    /// Whether the last step's weights have not been through [`Ddp::average`].
    pub(super) is_pending: bool,
}

impl Rounds {
    pub(super) fn new(hook: CommHook) -> Option<Self> {
        let CommHook::LocalSgd(options) = hook else {
            return None;
        };
        Some(Self {
            options,
            phase: RoundPhase {
                is_in_sync: true,
                is_pending: false,
            },
            anchor: HashMap::new(),
            momentum: HashMap::new(),
        })
    }

    pub(super) fn has_outer(&self) -> bool {
        self.options.outer.is_some()
    }

    fn is_local(&self, step: u64) -> bool {
        step >= self.options.start_iter
    }

    /// Whether a round ends before `step`.
    fn ends_before(&self, step: u64) -> bool {
        step > self.options.start_iter
            && (step - self.options.start_iter).is_multiple_of(self.options.period.get())
    }
}

impl Ddp {
    /// `model` after the optimizer's step. With [`CommHook::LocalSgd`], every rank's weights become one at the end of a round;
    /// otherwise, and with any other hook, the model comes back as it is. With that hook all ranks call this after each step.
    ///
    /// *Numerics*: the average has the same bits on all ranks.
    ///
    /// *Cost*: at the end of a round, an all-reduce of all weights.
    ///
    /// *Blocks*: until all ranks have ended the round. *Errors*: failed collectives.
    pub fn average<M: Module>(&mut self, model: M) -> Result<M, DdpError> {
        let step = self.step;
        let Some(rounds) = &mut self.rounds else {
            return Ok(model);
        };
        rounds.phase.is_pending = false;
        match rounds.ends_before(step) {
            true => self.end_round(model),
            false => Ok(model),
        }
    }

    /// As [`average`](Self::average), but ends a round early, for an evaluation or a checkpoint. All ranks call it after the
    /// same step.
    pub fn end_round<M: Module>(&mut self, model: M) -> Result<M, DdpError> {
        let Some(rounds) = self
            .rounds
            .as_mut()
            .filter(|rounds| !rounds.phase.is_in_sync)
        else {
            return Ok(model);
        };
        let mut values = buffer::read_parameters(model.clone(), |id| self.index.contains_key(&id))?;
        for entry in &self.parameters {
            let Some(own) = values.get_mut(&entry.id) else {
                continue;
            };
            let mut mean = self.group.buffer::<f32>(own.len())?;
            mean.copy_from_slice(own);
            let call = AllReduce {
                op: ReduceOp::Average,
                tree: Some(Tree::per_rank(self.group.world())),
                len: own.len(),
                bucket: None,
                step: self.step,
            };
            let mean = self.group.all_reduce_buffer(mean, call)?.buffer;
            own.copy_from_slice(&mean);
            if let (Some(outer), Some(anchor)) =
                (rounds.options.outer, rounds.anchor.get(&entry.id))
            {
                let momentum = rounds.momentum.entry(entry.id);
                let momentum = momentum.or_insert_with(|| vec![0.0; own.len()]);
                outer.step(anchor, own, momentum);
            }
        }
        rounds.phase.is_in_sync = true;
        let values = values.into_iter();
        let values = values.map(|(id, values)| (id, Value::Host(values)));
        Ok(buffer::write_parameters(model, values.collect()))
    }

    /// Starts a step: the first of a round keeps the weights.
    pub(super) fn begin_round<M: Module>(&mut self, model: &M, step: u64) -> Result<(), DdpError> {
        let Some(rounds) = &mut self.rounds else {
            return Ok(());
        };
        if rounds.phase.is_pending {
            return Err(DdpError::NotAveraged { step });
        }
        if !rounds.is_local(step) {
            return Ok(());
        }
        if rounds.phase.is_in_sync && rounds.options.outer.is_some() {
            let wanted = |id| self.index.contains_key(&id);
            rounds.anchor = buffer::read_parameters(model.clone(), wanted)?;
        }
        rounds.phase.is_in_sync = false;
        Ok(())
    }
}

impl OuterOptimizer {
    /// SGD with Nesterov momentum, as PyTorch's, on the difference between `anchor` and the mean. The result replaces the
    /// mean.
    fn step(self, anchor: &[f32], mean: &mut [f32], momentum: &mut [f32]) {
        let all = mean.iter_mut().zip(anchor).zip(momentum);
        for ((mean, anchor), momentum) in all {
            let gradient = anchor - *mean;
            *momentum = self.momentum * *momentum + gradient;
            *mean = anchor - self.lr * (gradient + self.momentum * *momentum);
        }
    }
}
