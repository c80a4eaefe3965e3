//! The optimizer of the settings, and the trainer's: the whole state on every rank, or dealt to the ranks.

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleVisitor, Param, ParamGroup, ParamId};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, LionConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::{Bytes, Tensor};
use paceline_checkpoint::{LoadOptimizer, OptimizerRef, averaged};
use paceline_ddp::{Ddp, DdpError, Slice, ZeroRedundancyOptimizer};
use paceline_nn::{AdamWConfig, Ema, MuonConfig};

use crate::config::{self, TrainConfig};
use crate::error::TrainError;
use crate::task::TrainTask;
use crate::torch_names::is_of_head;

/// The optimizer of the settings, for a model that may be a stage of a pipeline.
///
/// *Errors*: it is for matrices, and the model has none.
pub(crate) fn of_settings<M: Module>(
    config: &TrainConfig,
    model: &M,
) -> Result<ModuleOptimizer, TrainError> {
    let decay = config.weight_decay as f32;
    let ema = config.ema;
    let adamw = || whole(ema, AdamWConfig::new().with_weight_decay(decay).build());
    Ok(match config.optimizer {
        config::Optimizer::AdamW => adamw(),
        config::Optimizer::Sgd => {
            let momentum = config.momentum.filter(|momentum| *momentum > 0.0);
            let momentum = momentum.map(|momentum| MomentumConfig {
                momentum,
                // Burn's default is another one than PyTorch's.
                dampening: 0.0,
                nesterov: false,
            });
            let decay = (decay > 0.0).then(|| WeightDecayConfig::new(decay));
            let sgd = SgdConfig::new().with_momentum(momentum);
            whole(ema, sgd.with_weight_decay(decay).build())
        }
        config::Optimizer::Lion => whole(ema, LionConfig::new().with_weight_decay(decay).build()),
        config::Optimizer::Muon => {
            let mut hidden = Hidden::default();
            model.visit(&mut hidden);
            if hidden.ids.is_empty() && config.pipeline().is_none() {
                return Err(TrainError::usage(
                    "`optimizer` is muon, but the model has no matrix in a hidden layer".into(),
                    "use --optimizer adamw, sgd or lion",
                ));
            }
            let muon = MuonConfig::new().with_weight_decay(decay);
            let muon = match config.momentum {
                Some(momentum) => muon.with_momentum(momentum),
                None => muon,
            };
            let (hidden, muon) = (ParamGroup::from_ids(hidden.ids), muon.build());
            match ema {
                None => adamw().with_group(hidden, muon, None),
                Some(decay) => adamw().with_group(hidden, Ema::new(muon, decay), None),
            }
        }
    })
}

/// An optimizer for all parameters, with averages of them if `ema` has a decay.
fn whole(ema: Option<f64>, optimizer: impl burn::optim::Optimizer) -> ModuleOptimizer {
    match ema {
        None => optimizer.into(),
        Some(decay) => Ema::new(optimizer, decay).into(),
    }
}

/// The matrices of hidden layers: not those of embeddings, and not the head's.
#[derive(Default)]
struct Hidden {
    path: Vec<String>,
    /// The types that have the parts of the path.
    containers: Vec<String>,
    ids: Vec<ParamId>,
}

impl ModuleVisitor for Hidden {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.push(name.to_owned());
        self.containers.push(container.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
        self.containers.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let is_embedding = (self.containers.last()).is_some_and(|of| of == "Struct:Embedding");
        let is_hidden = D == 2 && !is_embedding && !is_of_head(&self.path.join("."));
        if is_hidden && param.is_require_grad() {
            self.ids.push(param.id);
        }
    }
}

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
    ) -> Result<(Self, T::Model), TrainError> {
        let whole = task.optimizer(config, &model)?;
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

impl Optimizer {
    /// `model` with the averages that `config.ema` asks for.
    ///
    /// *Errors*: the optimizer of a user's task keeps none; failed collectives.
    pub(crate) fn averaged<M: Module>(
        &self,
        config: &TrainConfig,
        model: &M,
    ) -> Result<Option<M>, TrainError> {
        let Some(decay) = config.ema else {
            return Ok(None);
        };
        let averaged = averaged(model, self)?;
        averaged.map(Some).ok_or_else(|| {
            TrainError::usage(
                format!("`ema` is {decay}, but the task's optimizer keeps no averages"),
                "make it of `paceline::nn::Ema` in `TrainTask::optimizer`, or omit --ema",
            )
        })
    }

    /// The size of a whole state, encoded.
    pub(crate) fn bytes(&self) -> Result<f64, TrainError> {
        let Self::Whole(optimizer) = self else {
            return Ok(0.0);
        };
        let encoded = optimizer.into_bytes();
        let encoded = encoded.map_err(|error| TrainError::Usage {
            message: format!("the optimizer's state cannot be encoded: {error}"),
            hint: None,
        })?;
        Ok(encoded.len() as f64)
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
