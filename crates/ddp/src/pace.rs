//! How fast the ranks are: a deadline that follows the job's steps, and ranks that are slower than the others. Pure decisions.
//!
//! The times travel with the sums of the next step, so nothing is sent for them, and all ranks hear the same numbers in the same
//! order. They draw the same conclusions, and a replacement gets the intervals with the job's state.
//!
//! Nothing depends on that agreement. A deadline decides only when a rank stops waiting and names the one that is missing, never which
//! step holds (`recovery`). If ranks had different deadlines, the shortest would fail the group a little earlier, as the
//! first to pass does today. And a straggler leaves by itself: for the others it is a lost rank like any other.

use std::fmt;
use std::time::Duration;

use paceline_collective::Tree;
use serde::{Deserialize, Serialize};

/// Lengths of intervals are told apart by powers of two, up to this many milliseconds.
const BINS: usize = 22;
/// A job forgets an interval after so many times its length. An evaluation that takes a thousandth of the time is remembered.
const REMEMBERED_TIMES: f64 = 1000.0;
/// Intervals after which the deadline follows, in the beginning and after the ranks have changed: the first steps of a process
/// compile kernels and fill caches.
const INTERVALS_MIN: u32 = 10;
/// The deadline is this many times the longest interval. A rank waits for less than one interval if the others only are as
/// slow as they were before.
const TIMEOUT_INTERVALS: u32 = 4;
/// Bounds of the deadline. A shorter one would take a pause of a file system or of a busy machine for a hang.
const TIMEOUT: [Duration; 2] = [Duration::from_secs(20), Duration::from_secs(1800)];

/// A rank is slow if it needs this many times as long for a shard as the median of the others,
const SLOW_TIMES: f64 = 1.5;
/// and this many seconds longer, because in very small steps little things count,
const SLOW_SECONDS: f64 = 1e-3;
/// in this many windows in a row. It is slow no more after as many windows in which it was not.
const WINDOWS: i32 = 3;
/// A window has at least this many steps,
const WINDOW_STEPS: u64 = 10;
/// and at least this many seconds of computing, so that a short disturbance is not in several windows.
const WINDOW_SECONDS: f64 = 1.0;
/// A straggler is named again if its factor changes by this one.
const NEWS_TIMES: f64 = 2.0;
/// A straggler leaves if steps take at most this part of the time without it.
const WORTH_LEAVING: f64 = 0.8;

/// What a rank knows of the pace.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    pub(crate) intervals: Intervals,
    pub(crate) stragglers: Stragglers,
}

impl Pace {
    /// The ranks have changed.
    pub(crate) fn restart(&mut self) {
        self.intervals.since_restart = 0;
        self.stragglers.window = Window::default();
        self.stragglers.streaks.clear();
    }
}

/// How long steps took, from the end of one to the end of the next.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Intervals {
    /// Sum of all intervals, in seconds.
    clock: f64,
    /// When an interval of each bin was seen last, by `clock`.
    seen: [Option<f64>; BINS],
    since_restart: u32,
    /// The deadline that was told last.
    told: Option<Duration>,
}

impl Intervals {
    /// Hears the last interval in seconds; 0 stands for none.
    pub(crate) fn hear(&mut self, seconds: f32) {
        if !(seconds.is_finite() && seconds > 0.0) {
            return;
        }
        self.clock += f64::from(seconds);
        self.since_restart = self.since_restart.saturating_add(1);
        let bin = (0..BINS).find(|bin| seconds <= bound(*bin).as_secs_f32());
        self.seen[bin.unwrap_or(BINS - 1)] = Some(self.clock);
    }

    /// The longest of the recent intervals, rounded up to a power of two of milliseconds.
    fn longest(&self) -> Option<Duration> {
        let is_recent = |bin: &usize| {
            let remembered = bound(*bin).as_secs_f64() * REMEMBERED_TIMES;
            self.seen[*bin].is_some_and(|at| self.clock - at <= remembered)
        };
        (0..BINS).rev().find(is_recent).map(bound)
    }

    /// The deadline that follows; `None` until there are enough intervals.
    pub(crate) fn timeout(&self) -> Option<Duration> {
        let longest = self.longest()?;
        let timeout = (longest * TIMEOUT_INTERVALS).clamp(TIMEOUT[0], TIMEOUT[1]);
        (self.since_restart >= INTERVALS_MIN).then_some(timeout)
    }

    /// One sentence when the deadline is set, and whenever it changes.
    pub(crate) fn news(&mut self) -> Option<String> {
        let timeout = self.timeout()?;
        if self.told.replace(timeout) == Some(timeout) {
            return None;
        }
        Some(format!(
            "ranks wait {} s for one another from now on, because the longest of the recent steps took {}, evaluation and saving \
             included",
            timeout.as_secs_f32().round(),
            match self.longest()? {
                longest if longest.as_secs() > 0 => format!("up to {:.1} s", longest.as_secs_f32()),
                longest => format!("up to {} ms", longest.as_millis()),
            }
        ))
    }
}

/// The longest interval of a bin.
fn bound(bin: usize) -> Duration {
    Duration::from_millis(1 << bin)
}

/// A rank that was slower than the others.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Straggler {
    /// The number that it was started with.
    pub rank: usize,
    /// Its mean time for a shard. *Units*: seconds.
    pub seconds: f64,
    /// The median of the other ranks' means. *Units*: seconds.
    pub others_seconds: f64,
    /// The last steps over which it is so.
    pub steps: u64,
    /// What became of it.
    pub fate: Fate,
}

/// What became of a straggler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// It is slow.
    Slow,
    /// It is as fast as the others again.
    Recovered,
    /// It left the job.
    Left,
}

impl Straggler {
    /// How many times as long as the others it needs for a shard.
    pub fn times(&self) -> f64 {
        self.seconds / self.others_seconds
    }
}

impl fmt::Display for Straggler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.fate {
            Fate::Slow => "is slow",
            Fate::Recovered => "is no longer slow",
            Fate::Left => "was slow and left",
        };
        write!(
            f,
            "rank {} {state}: {:.1} ms for a shard, {:.1} times the others' median of {:.1} ms, over {} steps",
            self.rank,
            self.seconds * 1e3,
            self.times(),
            self.others_seconds * 1e3,
            self.steps
        )
    }
}

/// Finds slow ranks.
#[derive(Debug, Default)]
pub(crate) struct Stragglers {
    window: Window,
    /// Each rank's last mean, in seconds for a shard.
    means: Vec<f64>,
    /// Windows in a row in which a rank was slow; below 0, in which it was not.
    streaks: Vec<i32>,
    /// By the numbers that ranks were started with.
    named: Vec<Straggler>,
}

#[derive(Debug, Default)]
struct Window {
    steps: u64,
    /// Of the slowest rank in each step.
    seconds: f64,
    /// Each rank's seconds for a shard, by rank.
    sums: Vec<f64>,
}

impl Stragglers {
    /// The ranks that are or were slow, by when they were named first.
    pub(crate) fn named(&self) -> &[Straggler] {
        &self.named
    }

    /// Hears each rank's seconds for a shard in the last step; `started` are the numbers that they were started with. Returns
    /// those to name, and the slowest one if it is slow.
    pub(crate) fn hear(
        &mut self,
        busy: &[f32],
        started: &[usize],
    ) -> (Vec<Straggler>, Option<usize>) {
        let nothing = (Vec::new(), None);
        let is_heard = |seconds: &f32| seconds.is_finite() && *seconds > 0.0;
        if busy.len() < 2 || busy.len() != started.len() || !busy.iter().all(is_heard) {
            return nothing;
        }
        let window = &mut self.window;
        window.sums.resize(busy.len(), 0.0);
        window.steps += 1;
        window.seconds += f64::from(busy.iter().copied().fold(0.0, f32::max));
        for (sum, seconds) in window.sums.iter_mut().zip(busy) {
            *sum += f64::from(*seconds);
        }
        if window.steps < WINDOW_STEPS || window.seconds < WINDOW_SECONDS {
            return nothing;
        }
        let Window { steps, sums, .. } = std::mem::take(window);
        self.means = sums.into_iter().map(|sum| sum / steps as f64).collect();
        self.streaks.resize(busy.len(), 0);
        let mut news = Vec::new();
        let mut slowest: Option<usize> = None;
        for (rank, started) in started.iter().enumerate() {
            let (seconds, others_seconds) = (self.means[rank], self.others(rank));
            let is_slow =
                seconds > others_seconds * SLOW_TIMES && seconds > others_seconds + SLOW_SECONDS;
            let streak = &mut self.streaks[rank];
            *streak = match is_slow {
                true => (*streak).max(0).saturating_add(1),
                false => (*streak).min(0).saturating_sub(1),
            };
            let straggler = Straggler {
                rank: *started,
                seconds,
                others_seconds,
                steps: steps * WINDOWS as u64,
                fate: match is_slow {
                    true => Fate::Slow,
                    false => Fate::Recovered,
                },
            };
            if streak.abs() < WINDOWS {
                continue;
            }
            if is_slow && slowest.is_none_or(|other| seconds > self.means[other]) {
                slowest = Some(rank);
            }
            if self.is_news(&straggler) {
                self.named.retain(|named| named.rank != straggler.rank);
                self.named.push(straggler.clone());
                news.push(straggler);
            }
        }
        (news, slowest)
    }

    fn is_news(&self, straggler: &Straggler) -> bool {
        let named = self.named.iter().find(|named| named.rank == straggler.rank);
        let before = named.filter(|named| named.fate == Fate::Slow);
        match (before, straggler.fate) {
            (None, Fate::Slow) => true,
            (None, _) => false,
            (Some(before), Fate::Slow) => {
                let change = straggler.times() / before.times();
                change.max(1.0 / change) >= NEWS_TIMES
            }
            (Some(_), _) => true,
        }
    }

    /// The median of the other ranks' means.
    fn others(&self, rank: usize) -> f64 {
        let others = self.means.iter().enumerate();
        let others = others.filter(|(other, _)| *other != rank);
        let mut others: Vec<f64> = others.map(|(_, mean)| *mean).collect();
        others.sort_by(f64::total_cmp);
        (others[(others.len() - 1) / 2] + others[others.len() / 2]) / 2.0
    }

    /// Whether a job of `shards` shards is faster without its slowest rank, and has `least` ranks left then.
    ///
    /// The others compute its shards too, so with few shards for each rank only a rank that is clearly slow should leave. Of two
    /// ranks one leaves only if the other is faster alone.
    pub(crate) fn should_leave(&self, shards: usize, least: usize) -> bool {
        let mut others = self.means.clone();
        let slowest = (0..others.len()).max_by(|a, b| others[*a].total_cmp(&others[*b]));
        let now = step_seconds(&others, shards);
        others.remove(slowest.unwrap_or_default());
        let then = step_seconds(&others, shards);
        let faster = now.zip(then).map(|(now, then)| then <= now * WORTH_LEAVING);
        others.len() >= least.max(1) && faster == Some(true)
    }

    /// Notes that the rank that was started with this number leaves.
    pub(crate) fn has_left(&mut self, started: usize) -> Option<Straggler> {
        let mut named = self.named.iter_mut();
        let straggler = named.find(|named| named.rank == started)?;
        straggler.fate = Fate::Left;
        Some(straggler.clone())
    }
}

/// How long the slowest of ranks with these means computes in a step.
fn step_seconds(means: &[f64], shards: usize) -> Option<f64> {
    let tree = Tree::split(shards, means.len()).ok()?;
    let times = means.iter().enumerate();
    let times = times.map(|(rank, mean)| mean * tree.range(rank).len() as f64);
    times.reduce(f64::max)
}

#[cfg(test)]
mod tests;
