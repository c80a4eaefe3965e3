//! Waits until all members have published that they are at least so far: looks for a while, then sleeps.

use std::time::{Duration, Instant};

use super::protocol::{Asleep, Board, arrive, complete, reached};
use super::sync::{Ordering, SLICE};
use crate::error::Error;
use crate::runner::Runner;
use crate::status::OpWait;

/// Looks at the peers between two looks at the clock.
const LOOKS: u32 = 64;
/// How long to look without offering the core to anybody else; a peer that runs answers within it.
const ALONE: Duration = Duration::from_micros(4);
/// Turns that a rank without a core of its own gives to others before it sleeps; enough for a peer that is already on
/// its way, too few to be seen in the process's time.
const YIELDS: u32 = 2;

/// One rank's part in the meetings.
#[derive(Debug)]
pub(crate) struct Meeting {
    me: usize,
    /// Whether every member has a core, so that spinning does not keep a peer from running.
    cores_for_all: bool,
}

impl Meeting {
    pub(crate) fn new(me: usize, members: usize) -> Self {
        // Counts the cores this process may use, which is what matters in a container.
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        Self {
            me,
            cores_for_all: cores >= members,
        }
    }

    /// With this many cores for all members.
    pub(super) fn on(self, cores: usize, members: usize) -> Self {
        let cores_for_all = cores >= members;
        Self {
            cores_for_all,
            ..self
        }
    }

    /// Publishes `target` as this rank's progress; whether all members have reached it.
    pub(crate) fn come(&self, board: &impl Board, target: u32) -> bool {
        arrive(board, self.me, target)
    }

    /// Waits until all members have reached `target`, as this rank has. `name` gives a member's rank in the group, for
    /// reports.
    pub(crate) fn wait(
        &self,
        board: &impl Board,
        target: u32,
        name: impl Fn(usize) -> usize,
        wait: &OpWait<'_>,
        runner: Runner,
    ) -> Result<(), Error> {
        if self.poll(board, target, runner) {
            return Ok(());
        }
        wait.publish();
        let asleep = Asleep::register(board);
        // A failure rings after it is latched, so a sleeper that has read the bell before sees one or the other.
        let in_a_hurry = || wait.timeout < SLICE || !wait.status.is_sound();
        loop {
            if asleep.sleep(target, in_a_hurry) {
                return Ok(());
            }
            if let Err(error) = wait.check(|| missing(board, target, &name)) {
                // A peer may have come, gone on and failed since the look at the board: this meeting is over all the same.
                return match complete(board, target) {
                    true => Ok(()),
                    false => Err(error),
                };
            }
        }
    }

    /// Looks for the others without sleeping; whether all came.
    fn poll(&self, board: &impl Board, target: u32, runner: Runner) -> bool {
        if !self.cores_for_all {
            return (0..YIELDS).any(|_| {
                std::thread::yield_now();
                complete(board, target)
            });
        }
        let looks = || {
            (0..LOOKS).any(|_| {
                std::hint::spin_loop();
                complete(board, target)
            })
        };
        if looks() {
            return true;
        }
        let started = Instant::now();
        loop {
            if looks() {
                return true;
            }
            let spun = started.elapsed();
            if spun >= runner.spin() {
                return false;
            }
            // Other programs use the cores too: the peer may be waiting for this very one.
            if spun >= ALONE {
                std::thread::yield_now();
            }
        }
    }
}

fn missing(board: &impl Board, target: u32, name: &impl Fn(usize) -> usize) -> Vec<usize> {
    let late = |member: &usize| !reached(board.progress(*member).load(Ordering::SeqCst), target);
    (0..board.members()).filter(late).map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_spin_where_all_of_them_have_a_core_whatever_this_one_is_bound_to() {
        let on = |cores| Meeting::new(0, 4).on(cores, 4).cores_for_all;
        assert!(on(4) && on(64));
        assert!(!on(3));
    }
}
