//! Evaluations, and what is told at the end of an epoch.

use std::time::Instant;

use paceline_ddp::sampler::StepPlan;
use paceline_rendezvous::page::Phase;
use paceline_usage::spans::Kind;

use super::Trainer;
use crate::classes::check_classes;
use crate::error::TrainError;
use crate::evaluate::evaluate;
use crate::records::{EpochRecord, EvaluationRecord, Figure, HELD_OUT_LOSS, HeldOut};
use crate::report;
use crate::task::{Part, TrainTask};

/// The figure that epochs are compared by.
///
/// *Errors*: there is none of that name.
pub(crate) fn monitored(held_out: &HeldOut, monitor: &str) -> Result<Figure, TrainError> {
    held_out.figure(monitor).ok_or_else(|| {
        let names = held_out.metrics.iter().map(|metric| metric.name);
        let names: Vec<&str> = [HELD_OUT_LOSS].into_iter().chain(names).collect();
        TrainError::usage(
            format!("`monitor` is {monitor}, which is no figure of the held-out data"),
            format!("choose --monitor from {}", names.join(", ")),
        )
    })
}

impl<T: TrainTask> Trainer<'_, T> {
    pub(super) fn end_epoch(&mut self, plan: &StepPlan) -> Result<(), TrainError> {
        let seconds = self.epoch_start.elapsed().as_secs_f64();
        let held_out = self.evaluate()?;
        if let Some(held_out) = &held_out {
            let figure = monitored(held_out, &self.config.monitor)?;
            (self.progress.best).take_in(plan.epoch + 1, self.step, figure);
        }
        let per_second = self.epoch_predictions / seconds;
        let epoch = report::Epoch {
            epoch: plan.epoch as usize + 1,
            epochs: self.config.epochs,
            train_loss: match self.progress.epoch_sums {
                [sum, weight] if weight > 0.0 => sum / weight,
                _ => 0.0,
            },
            held_out: held_out.clone(),
            per_second,
            unit: T::UNIT.name(),
        };
        self.console.print(&epoch.render());
        let [samples_per_second, tokens_per_second] = T::UNIT.split(per_second);
        let record = EpochRecord {
            kind: "epoch",
            step: self.step,
            epoch: epoch.epoch,
            train_loss: epoch.train_loss,
            held_out,
            samples_per_second,
            tokens_per_second,
            skipped_steps: self.may_skip().then_some(self.epoch_skipped),
        };
        self.console.emit(&record);
        if let Some(metrics) = &mut self.metrics {
            metrics.write(&record)?;
        }
        self.close_window()?;
        self.progress.epoch_sums = [0.0; 2];
        self.epoch_predictions = 0.0;
        self.epoch_skipped = 0;
        self.epoch_start = Instant::now();
        Ok(())
    }

    /// Tells rank 0 what all ranks have done since the last time.
    pub(super) fn close_window(&mut self) -> Result<(), TrainError> {
        let keeps = self.group.rank() == 0 || self.metrics.is_some();
        let observer = &mut self.observer;
        let spans = observer.close_window(&mut self.ddp, &self.group, keeps)?;
        self.follow()?;
        match &mut self.metrics {
            Some(metrics) => spans.iter().try_for_each(|record| metrics.write(record)),
            None => Ok(()),
        }
    }

    /// Nothing, if no data is held out.
    fn evaluate(&mut self) -> Result<Option<HeldOut>, TrainError> {
        let start = Instant::now();
        self.group.set_phase(Phase::Evaluation, self.step);
        // It may take long, and others look at the steps so far.
        if let Some(metrics) = &mut self.metrics {
            metrics.flush_if_late()?;
        }
        self.end_round()?;
        self.ddp.synchronize()?;
        if self.task.len(Part::HeldOut) == 0 {
            self.follow()?;
            return Ok(None);
        }
        let net = self.net.as_ref().expect("the model is always put back");
        let averaged = self.optimizer.averaged(self.config, net)?;
        let net = averaged.as_ref().unwrap_or(net);
        let stages = self.stages.as_deref_mut();
        let (ddp, group) = (&mut self.ddp, &self.group);
        let sums = evaluate(
            ddp,
            &self.task,
            net,
            &self.device,
            self.config,
            stages,
            group,
        )?;
        self.follow()?;
        self.observer.did(Kind::Evaluation, start, Instant::now());
        check_classes(&sums.confusion, self.task.classes().len())?;
        let held_out = HeldOut::new(sums.mean_loss(), self.task.metrics(&sums))?;
        self.confusion = sums.confusion;
        Ok(Some(held_out))
    }

    pub(super) fn evaluate_within_epoch(&mut self) -> Result<(), TrainError> {
        let Some(held_out) = self.evaluate()? else {
            return Ok(());
        };
        let step = self.step;
        self.console
            .print(&format!("step {step}   {}", held_out.render()));
        let record = EvaluationRecord {
            kind: "evaluation",
            step,
            held_out,
        };
        self.console.emit(&record);
        if let Some(metrics) = &mut self.metrics {
            metrics.write(&record)?;
        }
        // A long epoch shows its first spans before it ends.
        self.close_window()
    }
}
