//! `Cuts`: how a task's model is cut over ranks, and `SequentialTask`: what a task says of a model that is a list of blocks.

use burn::module::Module;
use burn::tensor::Device;
use paceline_checkpoint::by_rank_0;
use paceline_collective::{DeviceMesh, GroupOptions, ProcessGroup};
use paceline_ddp::{Ddp, DdpOptions, Precision};
use paceline_split::pipeline::{Pipeline, PipelineOptions, Sequential, cut, measure};
use paceline_split::tensor::TensorParallel;

use crate::config::TrainConfig;
use crate::error::TrainError;
use crate::init::begun;
use crate::layout::Layout;
use crate::plan::Shape;
use crate::stages::Stages;
use crate::task::{Compute, Loss, Part, Sums, TrainTask};

/// What the first block of a task's model takes.
pub type InputOf<T, const D: usize> = <<T as TrainTask>::Model as Sequential<D>>::Input;

/// What the last block of a task's model returns.
pub type OutputOf<T, const D: usize> = <<T as TrainTask>::Model as Sequential<D>>::Output;

/// A task whose model is a list of blocks, so that ranks can share them: with it, and [`Cuts::blocks`] as its [`cuts`](TrainTask::cuts), `--pp` cuts the
/// model into stages.
///
/// [`TrainTask::loss`] is the same in one piece: [`loss_of`](Self::loss_of) of what [`Sequential::forward_blocks`] returns.
///
/// *Shape*: between blocks flows one tensor of `D` dimensions.
pub trait SequentialTask<const D: usize>: TrainTask<Model: Sequential<D>> {
    /// The input of the first block. Only its rank calls it.
    fn input(&self, batch: &Self::Batch, device: &Device) -> InputOf<Self, D>;

    /// The weight of the batch in its step, which every stage needs: its predictions, or the weight of its [`Loss`].
    fn weight(&self, batch: &Self::Batch) -> f32;

    /// The loss, from the output of the last block. Only its rank calls it.
    fn loss_of(
        &self,
        model: &Self::Model,
        batch: &Self::Batch,
        output: OutputOf<Self, D>,
        compute: Compute<'_>,
    ) -> Loss;

    /// The sums of a batch of held-out samples, from the output of the last block; by default those of the loss.
    ///
    /// *Errors*: failed collectives of the task's own.
    fn sums_of(
        &self,
        model: &Self::Model,
        batch: &Self::Batch,
        output: OutputOf<Self, D>,
        compute: Compute<'_>,
    ) -> Result<Sums, TrainError> {
        Ok(Sums::of(self.loss_of(model, batch, output, compute)))
    }
}

/// What a model with cut matrices is made of: the whole one, and the parts of this rank.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// The settings and the mesh of a training that begins with the model.
    begins: Option<(&'a TrainConfig, &'a Layout)>,
    tp: &'a TensorParallel,
}

impl Parts<'_> {
    /// `whole`, which is random, with the weights of `--init` and the frozen parameters of `--freeze`: these name tensors of the whole model.
    ///
    /// *Errors*: a file that does not fit the model; a pattern that matches nothing.
    pub fn begin<M: Module>(&self, whole: M) -> Result<M, TrainError> {
        match self.begins {
            Some((config, layout)) => begun(config, layout, whole),
            None => Ok(whole),
        }
    }

    /// The parts, and the ranks that share them.
    #[must_use]
    pub fn tensor_parallel(&self) -> &TensorParallel {
        self.tp
    }
}

/// Makes a task's model with cut matrices.
type CutModel<T> =
    fn(&T, &TrainConfig, &Device, Parts<'_>) -> Result<<T as TrainTask>::Model, TrainError>;

/// How ranks share the model of a task.
pub struct Cuts<T: TrainTask> {
    blocks: Option<Blocks<T>>,
    parts: Option<CutModel<T>>,
    shape: Option<fn(&T, Precision) -> Shape>,
}

/// Measures the time of each block of a model.
type BlockCosts<T> =
    fn(&T, <T as TrainTask>::Model, &TrainConfig, &Device) -> Result<Vec<f64>, TrainError>;

/// Makes this rank's stages of a model.
type MakeStages<T> = fn(
    <T as TrainTask>::Model,
    DeviceMesh,
    PipelineOptions,
    DdpOptions,
) -> Result<Staged<T>, TrainError>;

/// What is done with a model that is a list of blocks.
struct Blocks<T: TrainTask> {
    costs: BlockCosts<T>,
    pipeline: MakeStages<T>,
}

/// A rank's stages, their replicas and their model.
type Staged<T> = (Box<dyn Stages<T>>, Ddp, <T as TrainTask>::Model);

/// What a rank trains: its stages if there are some, the replicas, and its model.
pub(crate) type Replica<T> = (Option<Box<dyn Stages<T>>>, Ddp, <T as TrainTask>::Model);

impl<T: TrainTask> Cuts<T> {
    /// They do not: every rank has the whole.
    #[must_use]
    pub fn none() -> Self {
        Self {
            blocks: None,
            parts: None,
            shape: None,
        }
    }

    /// They share its blocks with `--pp`.
    #[must_use]
    pub fn blocks<const D: usize>() -> Self
    where
        T: SequentialTask<D>,
    {
        Self {
            blocks: Some(Blocks {
                costs: block_costs::<D, T>,
                pipeline: |model, mesh, options, ddp| {
                    let (pipeline, ddp, model) = Pipeline::<D>::on(mesh, model, options, ddp)?;
                    Ok((Box::new(pipeline), ddp, model))
                },
            }),
            ..Self::none()
        }
    }

    /// They share its matrices too, with `--tp`: then `model` makes it in place of [`TrainTask::model`], from layers of
    /// [`paceline_split::tensor`].
    #[must_use]
    pub fn with_parts(self, model: CutModel<T>) -> Self {
        Self {
            parts: Some(model),
            ..self
        }
    }

    /// The same with what a plan needs to know of a model that is a list of equal layers.
    pub(crate) fn with_shape(self, shape: fn(&T, Precision) -> Shape) -> Self {
        Self {
            shape: Some(shape),
            ..self
        }
    }

    pub(crate) fn shape(&self, task: &T, precision: Precision) -> Shape {
        self.shape
            .map_or_else(Shape::default, |shape| shape(task, precision))
    }

    /// Refuses settings that cut a model which is not cut.
    pub(crate) fn check(&self, config: &TrainConfig) -> Result<(), TrainError> {
        let stages = config.pipeline().map(|options| options.ranks);
        let is_refused = [
            (
                "pp",
                stages.filter(|_| self.blocks.is_none()),
                "its blocks",
                "Cuts::blocks()",
            ),
            (
                "tp",
                config.tp.filter(|_| self.parts.is_none()),
                "its matrices",
                "Cuts::with_parts",
            ),
        ];
        for (key, value, what, cuts) in is_refused {
            if let Some(value) = value {
                return Err(TrainError::usage(
                    format!("`{key}` is {value}, but this model does not let ranks share {what}"),
                    format!("omit --{key}, or have `TrainTask::cuts` return `{cuts}`"),
                ));
            }
        }
        Ok(())
    }

    /// The model that a run begins with, or this rank's parts of it.
    ///
    /// *Errors*: a layout that does not fit the model.
    pub(crate) fn model(
        &self,
        task: &T,
        config: &TrainConfig,
        device: &Device,
        layout: &Layout,
    ) -> Result<T::Model, TrainError> {
        match (layout.tensor_parallel(), self.parts) {
            (Some(tp), Some(model)) => {
                let begins = Some((config, layout));
                model(task, config, device, Parts { begins, tp })
            }
            _ => begun(config, layout, task.model(config, device)?),
        }
    }

    /// Trains what this rank has of the model together with its replicas; `starts` are the first blocks of stages that were measured. All ranks
    /// call it.
    pub(crate) fn wrap(
        &self,
        layout: &Layout,
        net: T::Model,
        starts: Option<Vec<usize>>,
        options: DdpOptions,
    ) -> Result<Replica<T>, TrainError> {
        match (layout.pipeline(), &self.blocks) {
            (Some((mesh, mut pipeline)), Some(blocks)) => {
                pipeline.cuts = starts.or(pipeline.cuts);
                let (stages, ddp, net) = (blocks.pipeline)(net, mesh, pipeline, options)?;
                Ok((Some(stages), ddp, net))
            }
            _ => {
                let (ddp, net) = layout.wrap(net, options)?;
                Ok((None, ddp, net))
            }
        }
    }

    /// Cuts by the time of each block on rank 0, which has a whole model while it measures.
    ///
    /// *Blocks*: until rank 0 has measured.
    pub(crate) fn equal_stages(
        &self,
        task: &T,
        config: &TrainConfig,
        group: &ProcessGroup,
        device: &Device,
    ) -> Result<Vec<usize>, TrainError> {
        let stages = config
            .pipeline()
            .map_or(1, |options| options.size(1).stages());
        let starts = by_rank_0(group, || {
            let Some(blocks) = &self.blocks else {
                return Ok(Vec::new());
            };
            let alone = |parts| {
                let group = ProcessGroup::local(1, &GroupOptions::default())?.remove(0);
                Ok::<_, TrainError>(TensorParallel::new(group, parts)?)
            };
            let tp = config.tp.map(alone).transpose()?;
            let model = match (&tp, self.parts) {
                (Some(tp), Some(model)) => {
                    let begins = None;
                    model(task, config, device, Parts { begins, tp })?
                }
                _ => task.model(config, device)?,
            };
            let costs = (blocks.costs)(task, model, config, device)?;
            let stages = cut(&costs, stages)?;
            let starts = stages.iter().skip(1).map(|blocks| blocks.start);
            Ok::<_, TrainError>(starts.collect())
        });
        starts?
    }
}

/// The time of each block of a model, measured on one micro-batch.
fn block_costs<const D: usize, T: SequentialTask<D>>(
    task: &T,
    model: T::Model,
    config: &TrainConfig,
    device: &Device,
) -> Result<Vec<f64>, TrainError> {
    let samples = config.global_batch / config.shards / config.accumulate;
    let samples = 0..samples.clamp(1, task.len(Part::Train));
    let batch = task.batch(Part::Train, Some(0), samples)?;
    let input = || task.input(&batch, device);
    let compute = Compute::new(device, config.precision);
    let loss = |output| task.loss_of(&model, &batch, output, compute).mean;
    Ok(measure(&model, device, input, loss))
}
