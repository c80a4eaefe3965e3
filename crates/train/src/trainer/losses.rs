//! Going on after a loss: with other ranks, or from a state in memory.

use paceline_ddp::sampler::SamplerState;

use super::{Trainer, checkpoint};
use crate::console::Console;
use crate::error::TrainError;
use crate::optimizer::Optimizer;
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
        let TrainError::Ddp(cause) = &error else {
            return Err(error);
        };
        let Some(mut saved) = self.checkpoints.go_back(&self.ddp, cause)? else {
            return Err(error);
        };
        self.follow()?;
        let net = self.net.take().expect("the model is always put back");
        let (optimizer, net) = Optimizer::new(self.config, &mut self.ddp, net)?;
        let (net, optimizer) = saved.restore(&mut self.ddp, net, optimizer)?;
        (self.net, self.optimizer) = (Some(net), optimizer);
        (self.step, self.progress) = (saved.step(), saved.value()?);
        // Checkpoints of later steps are gone.
        (self.last_saved, self.has_to_save) = (None, true);
        if let Some(metrics) = &mut self.metrics {
            metrics.go_back(self.step)?;
        }
        Ok(*saved.sampler()?)
    }

    /// Goes on with the ranks that are left if some were lost, or with new ones. A new rank 0 takes over the files and the console.
    pub(super) fn follow(&mut self) -> Result<(), TrainError> {
        if self.ddp.group().generation() == self.group.generation() {
            return Ok(());
        }
        let was_first = self.group.rank() == 0;
        self.group = self.ddp.group().clone();
        self.layout.follow(&self.group);
        self.observer.follow(&self.group);
        let Some(metrics) = self.metrics.as_mut().filter(|_| !was_first) else {
            return Ok(());
        };
        if self.group.rank() > 0 {
            metrics.has_new_writer();
            return Ok(());
        }
        metrics.take_over(self.step)?;
        self.has_to_save = true;
        self.console = Console::new(0, self.output, self.schedule.total_steps, self.step);
        Ok(())
    }

    /// Takes in replacements of lost ranks, if there are any.
    pub(super) fn admit(&mut self, sampler: &SamplerState) -> Result<(), TrainError> {
        let net = self.net.as_ref().expect("the model is always put back");
        let state = || checkpoint(&self.net, &self.optimizer, &self.progress, sampler);
        self.checkpoints.admit(&mut self.ddp, net, state)?;
        self.follow()
    }
}
