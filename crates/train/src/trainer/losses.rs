//! Going on after a loss of ranks or of the right numbers: with other ranks, or from a state in memory.

use paceline_checkpoint::Saved;
use paceline_ddp::sampler::{SamplerState, StepPlan};

use super::{Trainer, checkpoint};
use crate::console::Console;
use crate::error::TrainError;
use crate::optimizer::Optimizer;
use crate::records::RanksRecord;
use crate::task::TrainTask;

impl<T: TrainTask> Trainer<'_, T> {
    /// Keeps the state in memory, if that is due.
    pub(super) fn keep_snapshot(&mut self, sampler: &SamplerState) -> Result<(), TrainError> {
        let state = || checkpoint(&self.net, &self.optimizer, &self.progress, sampler);
        Ok(self.checkpoints.snapshot(&mut self.ddp, state)?)
    }

    /// Goes back to the last snapshot if the ranks' weights differ, and returns its position in the data.
    ///
    /// *Errors*: `error`, if that does not help.
    pub(super) fn go_back(&mut self, error: TrainError) -> Result<SamplerState, TrainError> {
        let (TrainError::Ddp(cause) | TrainError::Ended(cause)) = &error else {
            return Err(error);
        };
        let Some(mut saved) = self.checkpoints.go_back(&self.ddp, cause)? else {
            return Err(error);
        };
        self.follow()?;
        self.restore(&mut saved)?;
        (self.step, self.progress) = (saved.step(), saved.value()?);
        if let Some(metrics) = &mut self.metrics {
            metrics.go_back(self.step)?;
        }
        Ok(*saved.sampler()?)
    }

    /// Goes back to a snapshot after the step of `plan`, whose numbers are not finite, and goes on with the next samples. Returns the
    /// snapshot's step.
    pub(super) fn give_up(&mut self, plan: &StepPlan) -> Result<u64, TrainError> {
        let given_up = self.checkpoints.give_up(&self.ddp, plan)?;
        let (back_to, mut saved) = given_up.expect("a snapshot is due before the first step");
        self.restore(&mut saved)?;
        let row = self.progress.row;
        let is_of_epoch = back_to + plan.step_in_epoch >= self.step;
        self.progress = saved.value()?;
        if !is_of_epoch {
            self.progress.epoch_sums = [0.0; 2];
        }
        self.progress.row = row;
        let (first, last) = (back_to + 1, self.step + 1);
        self.epoch_skipped += (last - first).min(plan.step_in_epoch);
        let steps = match first == last {
            true => format!("step {last} is"),
            false => format!("steps {first} to {last} are"),
        };
        self.console.print(&format!(
            "{steps} given up: all ranks go back to the state after step {back_to}, and on with the next samples"
        ));
        Ok(back_to)
    }

    /// Checkpoints of later steps are gone.
    fn restore(&mut self, saved: &mut Saved) -> Result<(), TrainError> {
        let net = self.net.take().expect("the model is always put back");
        let (optimizer, net) = Optimizer::new(self.config, &*self.task, &mut self.ddp, net)?;
        let (net, optimizer) = saved.restore(&mut self.ddp, net, optimizer)?;
        (self.net, self.optimizer) = (Some(net), optimizer);
        (self.last_saved, self.has_to_save) = (None, true);
        Ok(())
    }

    /// After a step that failed: leaves the state before it for the job's next start, if another rank was lost.
    pub(super) fn leave(&self, error: &TrainError, sampler: &SamplerState) {
        let TrainError::Ddp(error) = error else {
            return;
        };
        // A pipeline may also fail after the step has counted.
        if self.ddp.next_step() != self.step {
            return;
        }
        let mut progress = self.progress.clone();
        if let Some(metrics) = &self.metrics {
            progress.unwritten = metrics.unwritten();
        }
        let state = || checkpoint(&self.net, &self.optimizer, &progress, sampler);
        self.checkpoints.leave(&self.ddp, error, state);
    }

    /// Goes on with the ranks that are left if some were lost, or with new ones. A new rank 0 takes over the files and the console.
    pub(super) fn follow(&mut self) -> Result<(), TrainError> {
        if self.ddp.group().generation() == self.group.generation() {
            return Ok(());
        }
        let (was_first, before) = (self.group.rank() == 0, self.group.world());
        self.group = self.ddp.group().clone();
        self.layout.follow(&self.group);
        self.observer.follow(&self.group);
        let Some(metrics) = &mut self.metrics else {
            return Ok(());
        };
        if self.group.rank() > 0 {
            metrics.has_new_writer();
        } else if !was_first {
            metrics.take_over(self.step)?;
            self.has_to_save = true;
            self.console = Console::new(0, self.output, self.schedule.total_steps, self.step);
        }
        metrics.write(&RanksRecord {
            kind: "ranks",
            step: self.step,
            before,
            now: self.group.world(),
            why: self.group.why_generation(),
        })?;
        // A rank that has just joined does not have the lines of the last steps.
        metrics.flush()
    }

    /// Takes in replacements of lost ranks, if there are any.
    pub(super) fn admit(&mut self, sampler: &SamplerState) -> Result<(), TrainError> {
        let net = self.net.as_ref().expect("the model is always put back");
        let state = || checkpoint(&self.net, &self.optimizer, &self.progress, sampler);
        self.checkpoints.admit(&mut self.ddp, net, state)?;
        self.follow()
    }
}
