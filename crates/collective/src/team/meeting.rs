//! Waits until all members have published that they are at least so far: looks for a while, then sleeps.

use std::cell::Cell;
use std::time::{Duration, Instant};

use paceline_rendezvous::env::own_cores;

use super::protocol::{Arrival, Asleep, Board, arrive, complete, reached};
use super::sync::{AtomicU32, Ordering};
use crate::error::Error;
use crate::pace::{Pace, slice};
use crate::runner::Runner;
use crate::status::{Missing, OpWait};

/// Looks at the peers between two looks at the clock.
const LOOKS: u32 = 64;
/// Turns that a rank without a core of its own gives to others before it sleeps; enough for several peers that take turns on a core, too few
/// to be seen in the process's time. With four ranks on two cores an all-reduce of 8 bytes takes 14 to 33 us, with 2 turns 39 to 47.
const YIELDS: u32 = 16;

/// One rank's part in the meetings.
#[derive(Debug)]
pub(crate) struct Meeting {
    me: usize,
    /// Whether every member has a core, so that spinning does not keep a peer from running.
    cores_for_all: bool,
    pace: Cell<Pace>,
    /// A peer was missing in the last wait that waited on the same core.
    shares_core: Cell<bool>,
}

/// Where the members of a group wait.
pub(crate) trait Cores {
    /// The core that a member waited on last, plus one. A hint: it may have been moved since.
    fn core(&self, member: usize) -> &AtomicU32;
}

impl Meeting {
    pub(crate) fn new(me: usize, members: usize) -> Self {
        // Counts the cores this process may use, which is what matters in a container.
        let cores = own_cores();
        Self {
            me,
            cores_for_all: cores >= members,
            pace: Cell::default(),
            shares_core: Cell::default(),
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
        let arrival = arrive(board, self.me, target);
        if arrival == Arrival::Rang {
            self.pace.set(self.pace.get().after_waking(Instant::now()));
        }
        arrival != Arrival::Early
    }

    /// Waits until all members have reached `target`, as this rank has. `name` gives a member's rank in the group, for
    /// reports.
    pub(crate) fn wait(
        &self,
        board: &(impl Board + Cores),
        target: u32,
        name: impl Fn(usize) -> usize,
        wait: &OpWait<'_>,
        runner: Runner,
    ) -> Result<(), Error> {
        let Err(began) = self.poll(board, target, runner) else {
            return Ok(());
        };
        wait.publish();
        let asleep = Asleep::register(board);
        // A failure rings after it is latched, so a sleeper that has read the bell before sees one or the other.
        let limit = || match wait.status.is_sound() {
            true => slice(began.elapsed(), wait.left()),
            false => Duration::ZERO,
        };
        loop {
            if asleep.sleep(target, limit) {
                let pace = self.pace.get();
                self.pace.set(pace.after_sleep(began, Instant::now()));
                return Ok(());
            }
            if let Err(error) = wait.check(|| Missing::not_come(missing(board, target, &name))) {
                // A peer may have come, gone on and failed since the look at the board: this meeting is over all the same.
                return match complete(board, target) {
                    true => Ok(()),
                    false => Err(error),
                };
            }
        }
    }

    /// Looks for the others without sleeping; since when, if they have not come.
    fn poll(
        &self,
        board: &(impl Board + Cores),
        target: u32,
        runner: Runner,
    ) -> Result<(), Instant> {
        if !self.cores_for_all {
            let came = (0..YIELDS).any(|_| {
                std::thread::yield_now();
                complete(board, target)
            });
            return if came { Ok(()) } else { Err(Instant::now()) };
        }
        let looks = || {
            (0..LOOKS).any(|_| {
                std::hint::spin_loop();
                complete(board, target)
            })
        };
        if !self.shares_core.get() && looks() {
            return Ok(());
        }
        let began = Instant::now();
        let limit = self.pace.get().look(began, runner);
        loop {
            let core = rustix::thread::sched_getcpu() as u32 + 1;
            self.shares_core.set(self.shares(core, board, target));
            let came = match self.shares_core.get() {
                true => {
                    std::thread::yield_now();
                    complete(board, target)
                }
                false => looks(),
            };
            if came {
                return Ok(());
            }
            if began.elapsed() >= limit {
                return Err(began);
            }
        }
    }

    /// Says that this rank waits on `core`; whether a missing member waited there last. Other programs use the cores too, so that member may
    /// wait for this very one. A core that is offered to another program instead is gone for a time slice.
    fn shares(&self, core: u32, board: &(impl Board + Cores), target: u32) -> bool {
        let of = |member: usize| board.core(member);
        if of(self.me).load(Ordering::Relaxed) != core {
            of(self.me).store(core, Ordering::Relaxed);
        }
        (0..board.members()).any(|member| {
            of(member).load(Ordering::Relaxed) == core
                && !reached(board.progress(member).load(Ordering::SeqCst), target)
        })
    }
}

fn missing(board: &impl Board, target: u32, name: &impl Fn(usize) -> usize) -> Vec<usize> {
    let late = |member: &usize| !reached(board.progress(*member).load(Ordering::SeqCst), target);
    (0..board.members()).filter(late).map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ranks' words.
    #[derive(Default)]
    struct Words {
        progress: [AtomicU32; 2],
        cores: [AtomicU32; 2],
        bell: AtomicU32,
        sleepers: AtomicU32,
    }

    impl Board for Words {
        fn members(&self) -> usize {
            2
        }

        fn progress(&self, member: usize) -> &AtomicU32 {
            &self.progress[member]
        }

        fn bell(&self) -> &AtomicU32 {
            &self.bell
        }

        fn sleepers(&self) -> &AtomicU32 {
            &self.sleepers
        }
    }

    impl Cores for Words {
        fn core(&self, member: usize) -> &AtomicU32 {
            &self.cores[member]
        }
    }

    #[test]
    fn a_core_is_shared_with_a_missing_peer_that_waited_on_it() {
        let (words, target) = (Words::default(), 7);
        let [me, peer] = [0, 1].map(|member| Meeting::new(member, 2));
        assert!(!me.come(&words, target));
        assert!(!me.shares(3, &words, target), "nobody else has waited yet");
        words.cores[1].store(4, Ordering::Relaxed);
        assert!(!me.shares(3, &words, target), "the peer waits on core 4");
        assert!(me.shares(4, &words, target));
        assert!(peer.come(&words, target));
        assert!(!me.shares(4, &words, target), "nobody is missing");
    }

    #[test]
    fn ranks_spin_where_all_of_them_have_a_core_whatever_this_one_is_bound_to() {
        let on = |cores| Meeting::new(0, 4).on(cores, 4).cores_for_all;
        assert!(on(4) && on(64));
        assert!(!on(3));
    }
}
