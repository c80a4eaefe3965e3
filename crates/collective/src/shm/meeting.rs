//! Waits until all ranks have published that they are at least so far.
//!
//! Each rank's progress lies in its own cache line and is polled by the others: with a core for every rank nothing is
//! faster. A rank that has polled long enough sleeps on one word for the whole group, the bell in rank 0's segment.
//! Whoever publishes last sees that all are there, and rings; so a rank sleeps at most once for each meeting, however
//! many ranks there are and however few cores.
//!
//! No wake-up is lost: a sleeper registers, reads the bell and then looks once more for all ranks' progress; the last
//! rank publishes, looks for all and then for sleepers. In the total order of these (sequentially consistent) accesses
//! either the sleeper sees the last rank's progress, or the last rank sees the sleeper and the bell changes after the
//! sleeper has read it. Sleep is cut into slices all the same: a rank may be killed before it rings.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::futex;

use crate::engine::Runner;
use crate::error::Error;
use crate::memory::Segment;
use crate::status::Vigil;

/// Longest sleep between two looks at the latch, the launcher's page and the deadline.
const SLICE: Duration = Duration::from_millis(5);
/// Looks at the peers between two looks at the clock.
const LOOKS: u32 = 32;
/// How long to look without offering the core to anybody else; a peer that runs answers within it.
const ALONE: Duration = Duration::from_micros(4);
/// Turns that a rank without a core of its own gives to others before it sleeps; enough for a peer that is already on
/// its way, too few to be seen in the process's time.
const YIELDS: u32 = 2;

/// One rank's part in the group's meetings.
#[derive(Debug)]
pub(crate) struct Meeting {
    rank: usize,
    /// Whether every rank has a core, so that spinning does not keep a peer from running.
    cores_for_all: bool,
}

/// Whether `progress` is at or beyond `target`, over the wrap.
pub(super) fn reached(progress: u32, target: u32) -> bool {
    progress.wrapping_sub(target) < 1 << 31
}

impl Meeting {
    pub(crate) fn new(rank: usize, world: usize) -> Self {
        // Counts the cores this process may use, which is what matters in a container.
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        Self {
            rank,
            cores_for_all: cores >= world,
        }
    }

    /// Publishes `target` as this rank's progress and waits until all ranks have reached it.
    pub(crate) fn meet(
        &self,
        all: &[Arc<Segment>],
        target: u32,
        vigil: &Vigil<'_>,
        runner: Runner,
    ) -> Result<(), Error> {
        let control = all[0].control();
        all[self.rank]
            .control()
            .progress
            .store(target, Ordering::SeqCst);
        if complete(all, target) {
            if control.sleepers.load(Ordering::SeqCst) > 0 {
                control.bell.fetch_add(1, Ordering::SeqCst);
                // A failure to wake is not an error: sleepers look again after a slice.
                let _ = futex::wake(&control.bell, futex::Flags::empty(), i32::MAX as u32);
            }
            return Ok(());
        }
        if self.poll(all, target, runner) {
            return Ok(());
        }
        let _asleep = Asleep::register(&control.sleepers);
        loop {
            let bell = control.bell.load(Ordering::SeqCst);
            if complete(all, target) {
                return Ok(());
            }
            vigil.check(|| missing(all, target))?;
            sleep(&control.bell, bell, SLICE.min(vigil.timeout));
        }
    }

    /// Looks for the others without sleeping; whether all came.
    fn poll(&self, all: &[Arc<Segment>], target: u32, runner: Runner) -> bool {
        if !self.cores_for_all {
            return (0..YIELDS).any(|_| {
                std::thread::yield_now();
                complete(all, target)
            });
        }
        let started = Instant::now();
        loop {
            for _ in 0..LOOKS {
                if complete(all, target) {
                    return true;
                }
                std::hint::spin_loop();
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

fn complete(all: &[Arc<Segment>], target: u32) -> bool {
    all.iter()
        .all(|segment| reached(segment.control().progress.load(Ordering::SeqCst), target))
}

fn missing(all: &[Arc<Segment>], target: u32) -> Vec<usize> {
    let late =
        |rank: &usize| !reached(all[*rank].control().progress.load(Ordering::SeqCst), target);
    (0..all.len()).filter(late).collect()
}

/// Sleeps while the word is `seen`, at most `limit`; may wake early. Not private to the process: that is the point.
fn sleep(word: &AtomicU32, seen: u32, limit: Duration) {
    let limit = rustix::time::Timespec {
        tv_sec: limit.as_secs() as i64,
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    // Woken, timed out, interrupted or too late: the caller looks again in every case.
    let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&limit));
}

/// A registration as sleeper, given back on every way out.
struct Asleep<'a>(&'a AtomicU32);

impl<'a> Asleep<'a> {
    fn register(sleepers: &'a AtomicU32) -> Self {
        sleepers.fetch_add(1, Ordering::SeqCst);
        Self(sleepers)
    }
}

impl Drop for Asleep<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
