//! The request to stop, agreed among the ranks of a group.

use std::io;

use paceline_rendezvous::page::Stopped;
use paceline_rendezvous::stop::{self, StopSignal};

use crate::element::ReduceOp;
use crate::error::Error;
use crate::group::ProcessGroup;

impl ProcessGroup {
    /// From now on SIGTERM, SIGINT and SIGUSR1 no longer end this process: they ask the job to stop, and so does the
    /// launcher of `paceline run`, which from now on leaves this rank's processes alone until the grace is over.
    ///
    /// For programs that ask at their step boundaries whether to stop; call it on all ranks. Started without `paceline run`,
    /// a second SIGTERM or SIGINT ends this process at once.
    ///
    /// *Errors*: the system refuses a handler.
    pub fn stop_on_signal(&self) -> io::Result<()> {
        let page = self.page();
        stop::listen(page.has_launcher())?;
        self.slot().set_polls_stop();
        Ok(())
    }

    /// Whether this rank has been asked to stop. Other ranks may not have heard of it: do not act on it alone.
    pub fn stop_wish(&self) -> Option<StopSignal> {
        stop::wish(self.page())
    }

    /// Whether any rank has been asked to stop since [`stop_on_signal`](Self::stop_on_signal): the same answer on all
    /// ranks, which must all ask, in the same place. `step` is the number of steps done, for the launcher to report.
    ///
    /// A `Ddp` has a `stop_requested` of its own, which costs no operation.
    ///
    /// *Cost*: an all-reduce of 4 bytes.
    ///
    /// *Blocks*: and *Errors*: as [`all_reduce`](Self::all_reduce).
    ///
    /// ```
    /// use paceline_collective::{GroupOptions, ProcessGroup};
    ///
    /// let group = ProcessGroup::init(&GroupOptions::default())?;
    /// group.stop_on_signal()?;
    /// for step in 1..=3 {
    ///     // ... the step's work ...
    ///     if let Some(signal) = group.stop_requested(step)? {
    ///         // ... save ...
    ///         println!("stopped after step {step} by {signal}");
    ///         break;
    ///     }
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn stop_requested(&self, step: u64) -> Result<Option<StopSignal>, Error> {
        let mut number = [self.stop_wish().map_or(0, StopSignal::number)];
        self.all_reduce(&mut number, ReduceOp::Max)?;
        let signal = StopSignal::new(number[0]);
        if let Some(signal) = signal {
            self.set_stopped(signal, step);
        }
        Ok(signal)
    }

    /// Tells the launcher that this rank, as all others, stops after `step` steps because of `signal`.
    pub fn set_stopped(&self, signal: StopSignal, step: u64) {
        self.slot().set_stopped(Stopped { signal, step });
    }
}

#[cfg(test)]
mod tests {
    use crate::options::GroupOptions;

    use super::*;

    #[test]
    fn one_rank_that_was_asked_stops_all_in_the_same_step() {
        let groups = ProcessGroup::local(3, &GroupOptions::default()).expect("a group");
        let asked = |group: &ProcessGroup, step| {
            if (group.rank(), step) == (1, 2) {
                group.page().request_stop(10);
            }
            group.stop_requested(step).expect("all ask")
        };
        let steps = std::thread::scope(|scope| {
            let ranks = groups.iter().map(|group| {
                scope.spawn(move || (0..9).find_map(|step| Some((step, asked(group, step)?))))
            });
            let ranks: Vec<_> = ranks.collect();
            let ends = ranks.into_iter().map(|rank| rank.join().expect("no panic"));
            ends.collect::<Vec<_>>()
        });
        let signal = StopSignal::new(10).expect("a signal");
        assert_eq!(steps, [Some((2, signal)); 3]);
        let slot = groups[0].page().slot(0);
        assert_eq!(slot.stopped(), Some(Stopped { signal, step: 2 }));
    }
}
