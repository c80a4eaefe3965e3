//! Dealing gradients, and at stage 3 of ZeRO the parameters of blocks, to the ranks; passes of a model with placeholders.

use std::sync::Arc;

use burn::module::{Module, ParamId};
use burn::tensor::Device;
use paceline_nn::{Pass, Recompute};

use super::Ddp;
use crate::buffer::{self, Entry};
use crate::error::DdpError;
use crate::fingerprint::Fingerprint;
use crate::plan::Layout;
use crate::reducer::Setup;
use crate::zero::{self, Dealt, Sharded, Shares, ZeroStage};

impl Ddp {
    /// From now on each rank gets the gradients of its shares only, and at stage 3 keeps only its shares of blocks' parameters.
    /// All ranks call it.
    ///
    /// *Errors*: no memory for the buckets.
    pub(crate) fn deal<M: Module>(
        &mut self,
        mut model: M,
        mut stage: ZeroStage,
        is_whole: impl Fn(ParamId) -> bool,
    ) -> Result<(Dealt, M), DdpError> {
        let has_blocks = self.parameters.iter().any(|entry| entry.block.is_some());
        if stage.shards_parameters() && !has_blocks {
            self.warn_of_no_block();
            stage = ZeroStage::Gradients;
        }
        if stage.shards_parameters() {
            let blocks = self.parameters.iter().map(|e| (e.block, e.len()));
            let blocks: Vec<_> = blocks.collect();
            let layout = layout(&self.device);
            self.plan = Arc::new(self.plan.by_block(&blocks, self.options.caps, layout));
        }
        let parts = self.parts.as_ref();
        // The norm adds the squares of pieces that lie between each other piece by piece, and ranks own whole chunks.
        let is_cut_up = |index| parts.is_some_and(|parts| parts.pieces(index) > 1);
        let is_whole = |index| is_cut_up(index) || is_whole(self.parameters[index].id);
        let shares = Shares::new(&self.plan, self.group.world(), is_whole);
        let shares = Arc::new(shares.at_stage(stage));
        let hook = self.options.comm_hook;
        if let Some(why) = hook.refuses_sharded_optimizer() {
            return Err(DdpError::CommHook {
                hook,
                what: "a sharded optimizer",
                why,
                instead: "take bf16, fp16 or none; stages of a pipeline divide the optimizer's state with every hook",
            });
        }
        let dtype = buffer::dtype_of_sums(&self.parameters);
        self.change_buckets(Setup {
            shares: Some(shares.clone()),
            keeps_tail: false,
            ..self.setup(self.plan.clone())
        })?;
        self.reducer.reserve()?;
        let reducer = self.reducer.clone();
        self.shares = Some(shares.clone());
        if stage.shards_parameters() {
            let gathers = self.group.split(Some(0), 0)?;
            let setup = zero::Setup {
                group: self.group.clone(),
                gathers: gathers.expect("every rank has a colour"),
                plan: self.plan.clone(),
                shares: shares.clone(),
                reducer: reducer.clone(),
                parameters: self.parameters.clone(),
                device: self.device.clone().inner(),
                dtype,
                outer: self.placement.clone(),
            };
            let (sharded, placeholders) = Sharded::new(setup, model);
            model = placeholders;
            self.keep_placeholders(sharded);
        }
        let deferred = std::mem::take(&mut self.deferred);
        let sharded = self.sharded.as_deref();
        let model = deferred.make(model, &self.group, |id, whole| {
            match sharded.is_some_and(|sharded| sharded.keep_part(id, &whole)) {
                true => None,
                false => Some(whole),
            }
        })?;
        let dealt = Dealt {
            plan: self.plan.clone(),
            shares,
            reducer,
            sharded: self.sharded.clone(),
        };
        Ok((dealt, model))
    }

    /// *Errors*: weights that no optimizer has made yet.
    pub(super) fn require_weights(&self) -> Result<(), DdpError> {
        match self.deferred.len() {
            0 => Ok(()),
            _ => Err(DdpError::Sharded(
                "the weights are not made yet: `deferred_init` needs `ZeroRedundancyOptimizer::at_stage` before steps and exports",
            )),
        }
    }

    /// A stage of a pipeline may be an embedding only, or a head.
    fn warn_of_no_block(&self) {
        if self.group.rank() == 0 && self.parts.is_none() {
            paceline_rendezvous::notice!(
                WARN,
                "the model has no Block of its own parameters: stage 3 of ZeRO is stage 2"
            );
        }
    }

    fn keep_placeholders(&mut self, sharded: Arc<Sharded>) {
        self.index.retain(|id, _| !sharded.contains(*id));
        let held = |entry: &&Entry| self.index.contains_key(&entry.id);
        let held: Vec<&Entry> = self.parameters.iter().filter(held).collect();
        self.fingerprint = Fingerprint::new(&held, self.options.fingerprint_every);
        self.placement = Some(sharded.clone());
        self.sharded = Some(sharded);
    }

    /// Runs `f` with [`valid(model)`](Self::valid). At stage 3 of ZeRO its blocks gather their parameters, so all ranks call
    /// this function, but each may run any number of forward passes.
    ///
    /// *Blocks*: at stage 3, until all ranks are done.
    ///
    /// *Errors*: failed gathers.
    ///
    /// *Example*:
    /// ```
    /// # use burn::nn::Linear;
    /// # use burn::tensor::Tensor;
    /// # use paceline_ddp::{Ddp, DdpError};
    /// # fn score(ddp: &Ddp, model: &Linear, inputs: &[Tensor<2>]) -> Result<Vec<Tensor<2>>, DdpError> {
    /// ddp.evaluate(model, |model| {
    ///     inputs.iter().map(|input| model.forward(input.clone())).collect()
    /// })
    /// # }
    /// ```
    pub fn evaluate<M: Module, R>(
        &self,
        model: &M,
        f: impl FnOnce(&M) -> R,
    ) -> Result<R, DdpError> {
        let model = self.valid(model);
        let pass = Pass::new(Recompute::None);
        let finish = |pass: Pass| {
            let failed = pass.finish();
            failed.map_err(|error| DdpError::of_pass(self.step, error))
        };
        let Some(sharded) = &self.sharded else {
            let value = pass.enter(|| f(&model));
            return finish(pass).map(|()| value);
        };
        let pass = pass.with_supply(sharded);
        let value = pass.enter(|| f(&model));
        let failed = finish(pass);
        self.gather(|sharded| failed.and_then(|()| sharded.end_evaluation()))?;
        Ok(value)
    }

    /// Runs `f` if parameters are sharded. After an error no rank waits for this one's gathers.
    pub(super) fn gather(
        &self,
        f: impl FnOnce(&Sharded) -> Result<(), DdpError>,
    ) -> Result<(), DdpError> {
        let Some(sharded) = &self.sharded else {
            return Ok(());
        };
        f(sharded).map_err(|error| {
            sharded.give_up(&error.to_string());
            self.located(error)
        })
    }
}

/// The layout of buckets for gradients of `device`.
pub(super) fn layout(device: &Device) -> Layout {
    match buffer::is_host(device) {
        true => Layout::Host,
        false => Layout::Device,
    }
}
