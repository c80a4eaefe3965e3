//! The trainer's optimizer: the whole state on every rank, or dealt to the ranks.

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Bytes;
use paceline_checkpoint::{LoadOptimizer, OptimizerRef};
use paceline_ddp::{Ddp, DdpError, Slice, ZeroRedundancyOptimizer};

use crate::config::TrainConfig;
use crate::task::TrainTask;

pub(crate) enum Optimizer {
    Whole(ModuleOptimizer),
    Sharded(ZeroRedundancyOptimizer),
}

impl Optimizer {
    /// The model may have placeholders from now on.
    pub(crate) fn new<T: TrainTask>(
        config: &TrainConfig,
        task: &T,
        ddp: &mut Ddp,
        model: T::Model,
    ) -> Result<(Self, T::Model), DdpError> {
        let whole = task.optimizer(config);
        let Some(stage) = config.zero_stage() else {
            return Ok((Self::Whole(whole), model));
        };
        let (sharded, model) = ZeroRedundancyOptimizer::at_stage(ddp, model, whole, stage)?;
        Ok((Self::Sharded(sharded), model))
    }

    pub(crate) fn step<M: Module>(
        &mut self,
        rate: impl Into<ModuleLearningRate>,
        model: M,
        grads: GradientsParams,
    ) -> Result<M, DdpError> {
        match self {
            Self::Whole(optimizer) => Ok(optimizer.step(rate, model, grads)),
            Self::Sharded(optimizer) => optimizer.step(rate, model, grads),
        }
    }
}

impl<'a> From<&'a Optimizer> for OptimizerRef<'a> {
    fn from(optimizer: &'a Optimizer) -> Self {
        match optimizer {
            Optimizer::Whole(optimizer) => optimizer.into(),
            Optimizer::Sharded(optimizer) => optimizer.into(),
        }
    }
}

impl LoadOptimizer for Optimizer {
    fn slices(&self) -> Option<Vec<Slice>> {
        match self {
            Self::Whole(_) => None,
            Self::Sharded(optimizer) => LoadOptimizer::slices(optimizer),
        }
    }

    fn load(self, state: Bytes) -> Result<Self, String> {
        Ok(match self {
            Self::Whole(optimizer) => Self::Whole(LoadOptimizer::load(optimizer, state)?),
            Self::Sharded(optimizer) => Self::Sharded(LoadOptimizer::load(optimizer, state)?),
        })
    }
}
