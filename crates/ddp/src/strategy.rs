//! `DdpStrategy`: burn-train's training loop on a process group.

mod feed;
mod meeting;
mod run;
mod silent;

use burn::train::train::WorkerFailure;
use burn::train::{
    Learner, LearnerModel, LearningResult, SupervisedLearningStrategy,
    SupervisedTrainingEventProcessor, TrainLoader, TrainingComponents, TrainingError, ValidLoader,
};
use paceline_collective::ProcessGroup;

use crate::ddp::DdpOptions;
use crate::error::DdpError;
use run::Run;
use silent::silence;

/// Makes a burn-train training data-parallel: `TrainingStrategy::Custom(Arc::new(DdpStrategy::new(group, options)))`.
///
/// Every rank runs the same program. The training loader is cut into one slice of consecutive items per shard, equal to
/// within one item; its batch size is that of a shard. A shuffling loader shuffles within each slice. If a slice has fewer
/// batches than another, its last steps are empty. Rank 0 validates, computes metrics, renders, saves checkpoints and decides
/// about early stopping; the others print nothing. A resumed training reads its checkpoint on every rank.
///
/// *Numerics*: as [`Ddp`](crate::Ddp): a batch's weight is its number of items by the loader's progress. With
/// [`DdpOptions::shards`] set, the result does not depend on the number of ranks. One shard on one rank gives the bits of
/// Burn's single-device strategy. Burn's `grads_accumulation(n)` adds the gradients of `n` batches, while
/// [`DdpOptions::accumulate`] averages them; a step with fewer batches uses their average number per shard. Training metrics
/// are those of rank 0's shards, validation metrics those of all data.
///
/// *Memory*: holds the batches of one step and one more.
///
/// *Blocks*: every step waits for all ranks, at most the group's timeout. Validation may last longer if each of its batches
/// takes less than three quarters of the timeout.
///
/// *Errors*: `LearningResult::error` on every rank: an error on one rank stops all of them after the same step or validation.
/// A failed collective, a difference between the ranks, or another rank's error is a `TrainingError::Workers` with the rank
/// as its device. A stop through any rank's `Interrupter` is `LearningResult::interrupted` on every rank, and so is a signal
/// with [`DdpOptions::stop_on_signal`]; save the returned model then, since burn-train writes checkpoints at the ends of
/// epochs only. A `scaler` is refused, because a `TrainStep` runs its backward pass itself. The option `sums` is ignored, and
/// so is `accumulate` if `grads_accumulation` is set. burn-train ignores `gradient_checkpointing` with any custom strategy:
/// create the model on `device.autodiff().gradient_checkpointing()` instead.
///
/// *Example*:
/// ```
/// use std::sync::Arc;
///
/// use burn::optim::AdamWConfig;
/// use burn::train::{Learner, SupervisedTraining, TrainingStrategy};
/// # use burn::data::dataloader::{DataLoaderBuilder, batcher::Batcher};
/// # use burn::data::dataset::InMemDataset;
/// # use burn::module::Module;
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn::tensor::{Device, Tensor, TensorData};
/// # use burn::train::{InferenceStep, RegressionOutput, TrainOutput, TrainStep, logger::InMemoryMetricLogger};
/// use paceline_collective::{GroupOptions, ProcessGroup};
/// use paceline_ddp::{DdpOptions, DdpStrategy};
/// # #[derive(Module, Debug)]
/// # struct Net { linear: Linear }
/// # #[derive(Clone)]
/// # struct Batches;
/// # impl Batcher<f32, Tensor<2>> for Batches {
/// #     fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<2> {
/// #         let rows = items.len();
/// #         Tensor::from_data(TensorData::new(items, [rows, 1]), device)
/// #     }
/// # }
/// # impl Net {
/// #     fn output(&self, x: Tensor<2>) -> RegressionOutput {
/// #         let y = self.linear.forward(x.clone());
/// #         RegressionOutput::new((y.clone() - x.clone()).powf_scalar(2.0).mean(), y, x)
/// #     }
/// # }
/// # impl TrainStep for Net {
/// #     type Input = Tensor<2>;
/// #     type Output = RegressionOutput;
/// #     fn step(&self, x: Tensor<2>) -> TrainOutput<RegressionOutput> {
/// #         let output = self.output(x);
/// #         TrainOutput::new(self, output.loss.backward(), output)
/// #     }
/// # }
/// # impl InferenceStep for Net {
/// #     type Input = Tensor<2>;
/// #     type Output = RegressionOutput;
/// #     fn step(&self, x: Tensor<2>) -> RegressionOutput { self.output(x) }
/// # }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let loader = || DataLoaderBuilder::new(Batches).batch_size(4)
/// #     .build(InMemDataset::new((0..16).map(|i| i as f32 / 16.0).collect()));
/// # let (train, valid) = (loader(), loader());
/// # let model = Net { linear: LinearConfig::new(1, 1).init(&Device::flex().autodiff()) };
///
/// let group = ProcessGroup::init(&GroupOptions::default())?; // one rank when not started by a launcher
/// let strategy = DdpStrategy::new(group, DdpOptions::default());
/// let result = SupervisedTraining::new("runs", train, valid)
///     .with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)))
/// #   .with_metric_logger(InMemoryMetricLogger::new())
/// #   .with_application_logger(None)
///     .num_epochs(2)
///     .launch(Learner::new(model, AdamWConfig::new().init(), 1e-2));
/// assert!(result.error.is_none());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct DdpStrategy {
    group: ProcessGroup,
    options: DdpOptions,
}

impl DdpStrategy {
    /// A strategy for `group`. Sends nothing before training starts.
    pub fn new(group: ProcessGroup, options: DdpOptions) -> Self {
        Self { group, options }
    }

    /// Reports the error to the caller, and to the other ranks if they do not know it.
    fn give_up<M: LearnerModel>(&self, error: &DdpError, components: &TrainingComponents<M>) {
        // A mismatch or a failed collective reaches all ranks. These two errors do not: the others would only time out.
        if matches!(
            error,
            DdpError::MicroBatches { .. } | DdpError::ModelChanged { .. }
        ) {
            self.group.abort(&error.to_string());
        }
        let rank = error.culprit().unwrap_or(self.group.rank());
        components
            .interrupter
            .fail(worker_failures([(rank, error.to_string())]));
    }
}

impl<M: LearnerModel> SupervisedLearningStrategy<M> for DdpStrategy {
    fn train(
        &self,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        mut components: TrainingComponents<M>,
    ) -> LearningResult<M> {
        if self.group.rank() > 0 {
            components = silence(components);
        }
        // Burn's default start and end of a training, which a type that overrides `train` cannot call.
        struct Inner<'a>(&'a DdpStrategy);
        impl<M: LearnerModel> SupervisedLearningStrategy<M> for Inner<'_> {
            fn fit(
                &self,
                components: TrainingComponents<M>,
                learner: Learner<M>,
                train: TrainLoader<M>,
                valid: ValidLoader<M>,
                first_epoch: usize,
            ) -> (M, SupervisedTrainingEventProcessor<M>) {
                self.0.fit(components, learner, train, valid, first_epoch)
            }
        }
        Inner(self).train(learner, train, valid, components)
    }

    fn fit(
        &self,
        mut components: TrainingComponents<M>,
        mut learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        first_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        let outcome = Run::open(self, &mut components, &mut learner, &train, first_epoch)
            .and_then(|(mut run, slices)| run.epochs(&slices, &valid, first_epoch));
        if let Err(error) = outcome {
            self.give_up(&error, &components);
        }
        (learner.model(), components.event_processor)
    }
}

fn worker_failures(failures: impl IntoIterator<Item = (usize, String)>) -> TrainingError {
    let failures = failures.into_iter();
    TrainingError::Workers(
        failures
            .map(|(rank, message)| WorkerFailure {
                device_id: rank,
                message,
            })
            .collect(),
    )
}
