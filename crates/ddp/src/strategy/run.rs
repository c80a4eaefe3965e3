//! The loop over epochs and steps, on one rank.

use std::time::Instant;

use burn::data::dataloader::Progress;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::train::metric::store::{Aggregate, Split};
use burn::train::{
    EventProcessorTraining, InferenceStep, Learner, LearnerEvent, LearnerModel, TrainLoader,
    TrainStep, TrainingComponents, TrainingItem, ValidLoader,
};
use paceline_rendezvous::page::Phase;

use super::feed::{Portion, Slices};
use super::meeting::{Verdict, Word, meet};
use super::{DdpStrategy, worker_failures};
use crate::comm_hook::CommHook;
use crate::ddp::{Ddp, DdpOptions};
use crate::error::DdpError;
use crate::recovery::Recovery;

/// Sums reduced with the gradients of each step, so that the end of an epoch needs no extra operation.
enum Sum {
    /// Shards that have a batch for the next step.
    More,
    /// Ranks that were asked to stop.
    Stops,
    /// Micro-batches of this step.
    MicroBatches,
    /// Shards that had a micro-batch.
    BusyShards,
}

/// Number of [`Sum`]s.
const SUMS: usize = 4;

/// One training on one rank.
pub(super) struct Run<'a, M: LearnerModel> {
    ddp: Ddp,
    learner: &'a mut Learner<M>,
    components: &'a mut TrainingComponents<M>,
    /// Batches per shard and step.
    accumulate: usize,
}

impl<'a, M: LearnerModel> Run<'a, M> {
    /// Creates the replica with rank 0's weights and takes this rank's slices of the loader.
    pub(super) fn open(
        strategy: &DdpStrategy,
        components: &'a mut TrainingComponents<M>,
        learner: &'a mut Learner<M>,
        train: &TrainLoader<M>,
        first_epoch: usize,
    ) -> Result<(Self, Slices<<M as TrainStep>::Input>), DdpError> {
        if strategy.options.scaler.is_some() {
            return Err(DdpError::Scaler {
                what: "burn-train's steps run the backward pass themselves, so their losses cannot be scaled"
                    .into(),
            });
        }
        let accumulate = components
            .grad_accumulation
            .unwrap_or(strategy.options.accumulate);
        let mut settings = strategy.options.settings.clone();
        settings.extend([
            ("training items".into(), train.num_items().to_string()),
            ("epochs".into(), components.num_epochs.to_string()),
            ("first epoch".into(), first_epoch.to_string()),
            (
                "grads_accumulation".into(),
                format!("{:?}", components.grad_accumulation),
            ),
        ]);
        let options = DdpOptions {
            sums: SUMS,
            accumulate,
            settings,
            ..strategy.options.clone()
        };
        if let Some(device) = learner.model().devices().into_iter().next() {
            learner.fork(&if device.is_autodiff() {
                device
            } else {
                device.autodiff()
            });
        }
        if let hook @ CommHook::LocalSgd(_) = options.comm_hook {
            return Err(DdpError::CommHook {
                hook,
                what: "burn-train's learner",
                why: "it cannot average the weights",
                instead: "take another hook, or call Ddp::step and Ddp::average in a loop of your own",
            });
        }
        if options.recovery == Recovery::Live {
            let what =
                "burn-train's learner, whose own operations between ranks cannot be repeated";
            return Err(DdpError::Recovery { what });
        }
        let (ddp, model) = Ddp::new(strategy.group.clone(), learner.model(), options)?;
        if ddp.group().world() > 1 {
            learner.load_model(model.into_record());
        }
        let slices = Slices::new(train, ddp.shard_count(), ddp.shards(), ddp.device());
        let run = Self {
            ddp,
            learner,
            components,
            accumulate,
        };
        Ok((run, slices))
    }

    pub(super) fn epochs(
        &mut self,
        train: &Slices<<M as TrainStep>::Input>,
        valid: &ValidLoader<M>,
        first_epoch: usize,
    ) -> Result<(), DdpError> {
        let valid = valid.to_device(&self.ddp.device().clone().inner());
        for epoch in first_epoch..=self.components.num_epochs {
            self.train_event(LearnerEvent::StartSplit {
                epoch_number: epoch,
                total_items: train.items(),
            });
            let stopped = self.train_split(train)?;
            self.train_event(LearnerEvent::EndSplit(epoch));

            let verdict = if stopped {
                self.settle(Word::Ready)?
            } else if self.ddp.group().rank() == 0 {
                self.lead(&valid, epoch)?
            } else {
                self.ddp
                    .group()
                    .set_phase(Phase::Communication, self.ddp.next_step());
                self.settle(Word::Ready)?
            };
            let goes_on = verdict == Verdict::Continue && !stopped;
            self.obey(verdict);
            if !goes_on {
                break;
            }
        }
        Ok(())
    }

    /// Trains one epoch and returns whether a rank was asked to stop.
    fn train_split(&mut self, train: &Slices<<M as TrainStep>::Input>) -> Result<bool, DdpError> {
        if train.items() == 0 {
            return Ok(false);
        }
        let mut feeds = train.open(&self.components.interrupter);
        let (mut processed, mut iteration) = (0.0, 0);
        loop {
            self.ddp
                .group()
                .set_phase(Phase::DataLoader, self.ddp.next_step());
            let portions = feeds.take(self.accumulate, &self.components.interrupter);
            let step = self.step(portions)?;
            processed += step.items;
            let progress = progress(processed as usize, train.items());
            for output in step.outputs {
                iteration += 1;
                self.train_event(LearnerEvent::ProcessedItem(TrainingItem::new(
                    output,
                    progress.clone(),
                    Some(iteration),
                    Some(self.learner.lr_current()),
                )));
            }
            let signal = self.ddp.stop_requested();
            if let Some(signal) = signal {
                let reason = format!("the job was asked to stop by {signal}");
                self.components.interrupter.stop(Some(&reason));
            }
            if step.stops || signal.is_some() || !step.more {
                return Ok(step.stops || signal.is_some());
            }
        }
    }

    fn step(
        &mut self,
        mut portions: Vec<Portion<<M as TrainStep>::Input>>,
    ) -> Result<Step<<M as TrainStep>::Output>, DdpError> {
        let model = self.learner.model();
        let first = self.ddp.shards().start;
        let stops = self.components.interrupter.should_stop();
        let mut outputs = Vec::new();
        let reduced = self.ddp.step(&model, |shard| {
            let at = shard.shard() - first;
            let portion = std::mem::take(&mut portions[at]);
            let count = portion.batches.len();
            shard.micro_batches(count);
            shard.add(Sum::MicroBatches as usize, count as f32);
            shard.add(Sum::BusyShards as usize, f32::from(count > 0));
            shard.add(Sum::More as usize, f32::from(portion.more));
            shard.add(Sum::Stops as usize, f32::from(stops && at == 0));
            for batch in portion.batches {
                let hooked = shard.model()?;
                shard.backward_with(batch.items as f32, || {
                    outputs.push(TrainStep::step(&hooked, batch.input).item);
                })?;
            }
            Ok::<(), DdpError>(())
        })?;
        let sum = |sum: Sum| reduced.sums[sum as usize];
        let (more, stops) = (sum(Sum::More) > 0.0, sum(Sum::Stops) > 0.0);
        if reduced.weight > 0.0 {
            let grads = match self.components.grad_accumulation {
                Some(_) => scale(
                    &model,
                    reduced.grads,
                    sum(Sum::MicroBatches) / sum(Sum::BusyShards),
                ),
                None => reduced.grads,
            };
            self.learner.lr_step();
            self.learner.optimizer_step(grads);
        }
        Ok(Step {
            outputs,
            items: reduced.weight,
            more,
            stops,
        })
    }

    /// Rank 0 between epochs: validates, saves, and sends the verdict to the others.
    fn lead(&mut self, valid: &ValidLoader<M>, epoch: usize) -> Result<Verdict, DdpError> {
        self.valid_event(LearnerEvent::StartSplit {
            epoch_number: epoch,
            total_items: valid.num_items(),
        });
        let verdict = self.valid_split(valid)?;
        self.valid_event(LearnerEvent::EndSplit(epoch));
        self.train_event(LearnerEvent::EndEpoch(epoch));
        if verdict != Verdict::Wait {
            return Ok(verdict);
        }
        let components = &mut *self.components;
        // Checkpoints, early stopping and the summary need the metrics of this epoch, which another thread computes.
        let flushed = components.event_processor.flush();
        components.interrupter.fail_on_error(flushed);
        if components.summary.is_some() {
            // The summary reads files that the store's own thread still writes. The thread handles requests in order, so any
            // answer means that the files are complete. Every store knows this metric, because Burn's default checkpointing
            // uses it.
            let store = &components.event_store;
            let _ = store.find_metric("Loss", epoch, Aggregate::Mean, &Split::Valid);
        }
        let mut word = Word::Ready;
        if !components.interrupter.should_stop() {
            let store = &components.event_store;
            if let Some(checkpointer) = &mut components.checkpointer {
                self.ddp
                    .group()
                    .set_phase(Phase::Checkpoint, self.ddp.next_step());
                checkpointer.checkpoint(self.learner, epoch, store);
            }
            if let Some(early_stopping) = &mut components.early_stopping
                && early_stopping.should_stop(epoch, store)
            {
                word = Word::Finished;
            }
        }
        self.settle(word)
    }

    /// Validates. Returns the verdict if the other ranks stopped it, or [`Verdict::Wait`] if they still wait.
    fn valid_split(&mut self, valid: &ValidLoader<M>) -> Result<Verdict, DdpError> {
        let group = self.ddp.group().clone();
        group.set_phase(Phase::Evaluation, self.ddp.next_step());
        let model = self.learner.model().valid();
        let mut iterator = valid.iter();
        let (mut met, mut iteration) = (Instant::now(), 0);
        while let Some(input) = iterator.next() {
            let input = match input {
                Ok(input) => input,
                Err(error) => {
                    self.components.interrupter.fail(error);
                    break;
                }
            };
            let progress = iterator.progress();
            iteration += 1;
            let output = InferenceStep::step(&model, input);
            self.valid_event(LearnerEvent::ProcessedItem(TrainingItem::new(
                output,
                progress,
                Some(iteration),
                None,
            )));
            if self.components.interrupter.should_stop() {
                break;
            }
            // The others wait in a collective with the group's timeout: meet them well before it.
            if met.elapsed() > group.timeout() / 4 {
                met = Instant::now();
                let verdict = meet(&group, &self.components.interrupter, Word::Busy)?;
                if verdict != Verdict::Wait {
                    return Ok(verdict);
                }
                group.set_phase(Phase::Evaluation, self.ddp.next_step());
            }
        }
        Ok(Verdict::Wait)
    }

    /// Exchanges states until rank 0 has decided.
    fn settle(&self, word: Word) -> Result<Verdict, DdpError> {
        loop {
            let verdict = meet(self.ddp.group(), &self.components.interrupter, word.clone())?;
            if verdict != Verdict::Wait {
                return Ok(verdict);
            }
        }
    }

    /// Sets this rank's result to the reason for the stop, unless it has one already.
    fn obey(&self, verdict: Verdict) {
        let interrupter = &self.components.interrupter;
        match verdict {
            Verdict::Fail(failures) if interrupter.error().is_none() => {
                // Makes the launcher report the rank that failed, not the one that exits first.
                if let Some((culprit, _)) = failures.first() {
                    self.ddp.group().blame(*culprit);
                }
                interrupter.fail(worker_failures(failures));
            }
            Verdict::Stop { rank, reason } if !interrupter.should_stop() => {
                let reason = reason.unwrap_or_else(|| "no reason given".into());
                interrupter.stop(Some(&format!("rank {rank} was asked to stop: {reason}")));
            }
            _ => {}
        }
    }

    fn train_event(&mut self, event: LearnerEvent<<M as TrainStep>::Output>) {
        let result = self.components.event_processor.process_train(event);
        self.components.interrupter.fail_on_error(result);
    }

    fn valid_event(&mut self, event: LearnerEvent<<M as InferenceStep>::Output>) {
        let result = self.components.event_processor.process_valid(event);
        self.components.interrupter.fail_on_error(result);
    }
}

/// The result of a step, for the loop.
struct Step<O> {
    /// Outputs of this rank's batches.
    outputs: Vec<O>,
    /// Number of items on all ranks.
    items: f64,
    /// Whether any shard has a batch for another step.
    more: bool,
    /// Whether any rank was asked to stop.
    stops: bool,
}

fn progress(items_processed: usize, items_total: usize) -> Progress {
    Progress {
        items_processed,
        items_total,
        unit: Some("items".into()),
    }
}

/// Multiplies the gradients of `model`'s parameters by `factor`.
fn scale<M: Module>(model: &M, grads: GradientsParams, factor: f32) -> GradientsParams {
    struct Scale {
        grads: GradientsParams,
        factor: f32,
    }
    impl ModuleVisitor for Scale {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.grads.remove::<D>(param.id) {
                let scaled = gradient.mul_scalar(self.factor);
                self.grads.register(param.id, scaled);
            }
        }
    }
    let mut visitor = Scale { grads, factor };
    if factor != 1.0 {
        model.visit(&mut visitor);
    }
    visitor.grads
}
