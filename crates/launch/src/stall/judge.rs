//! Which ranks are stalled: a pure decision over samples.
//!
//! A rank makes progress when it prints, reads or writes, waits for somebody to type, or uses more processor time than threads
//! that only look at their clocks. One thread that spins is progress too: a long computation looks the same. It is only
//! described where another rank has stalled, since it may be what that one waits for.

use std::time::Duration;

use paceline_words::{Lang, Word, say};

use super::sample::{Depth, RankSample, Sample, Tree};
use crate::report::Ranks;

/// Below this share of a core threads do no more than look at their clocks: NCCL's and torch's watchdogs need less.
const IDLE_SHARE: f64 = 0.02;
/// Three ticks of the kernel's clock, by which it accounts processor time.
const IDLE_SLACK: Duration = Duration::from_millis(30);
/// Threads that wake each other write a few bytes to a pipe; programs read and write more.
const IDLE_BYTES: u64 = 64 * 1024;
/// A thread that spins never sleeps: it uses a core, or waits for one that others use.
const SPIN_SHARE: f64 = 0.9;

/// What is remembered of the ranks.
#[derive(Debug)]
pub(crate) struct Watched {
    after: Duration,
    ranks: Vec<Track>,
    /// A sample with threads from the first half of the time, for what the others do.
    base: Option<Sample>,
    at: Duration,
    is_told: bool,
}

/// One rank since its last progress.
#[derive(Debug, Clone, Default)]
struct Track {
    since: Duration,
    own_cpu: Duration,
    printed: u64,
    /// What its processes had done when they were first looked at after that.
    tree: Option<(Duration, u64, Duration)>,
    /// It runs, and nothing else watches its progress.
    is_ours: bool,
}

/// Ranks that have stalled.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Stall {
    /// The local rank and how long it has been quiet, the longest first.
    pub(crate) quiet: Vec<(usize, Duration)>,
    /// What the others do.
    pub(crate) others: Vec<(usize, Doing)>,
}

/// The activity of a rank that has not stalled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Doing {
    /// It uses processor time, or reads, writes or prints.
    Works,
    /// One thread uses a core without output, reading or writing.
    Spins,
    /// It waits for somebody to type.
    WaitsForInput,
    /// It has ended.
    Ended,
    /// It uses Paceline's library, whose operations have deadlines.
    HasDeadlines,
}

impl Watched {
    pub(crate) fn new(after: Duration, ranks: usize) -> Self {
        Self {
            after,
            ranks: vec![Track::default(); ranks],
            base: None,
            at: Duration::ZERO,
            is_told: false,
        }
    }

    /// How closely each rank is to be looked at next: at one that works, not very.
    pub(crate) fn depths(&self, now: Duration) -> Vec<Depth> {
        let longest = self.longest(now);
        let needs_threads = (longest >= self.after / 2 && self.base.is_none())
            || (longest >= self.after && !self.is_told);
        let depth = |track: &Track| {
            if needs_threads {
                Depth::Threads
            } else if track.since < self.at {
                Depth::Processes
            } else {
                Depth::Own
            }
        };
        self.ranks.iter().map(depth).collect()
    }

    /// When the next decision is due if nothing changes, by the samples' clock.
    pub(crate) fn due(&self) -> Option<Duration> {
        let since = self.ours().map(|track| track.since).min()?;
        let half = since + self.after / 2;
        let due = if self.at < half {
            half
        } else {
            since + self.after
        };
        (self.at < due).then_some(due)
    }

    /// Decides, once for each time that ranks stall. The samples come in the order of their times.
    pub(crate) fn judge(&mut self, sample: Sample) -> Option<Stall> {
        self.at = sample.at;
        for (track, rank) in self.ranks.iter_mut().zip(&sample.ranks) {
            track.observe(sample.at, rank);
        }
        let longest = self.longest(sample.at);
        if longest < self.after {
            self.is_told = false;
            if longest < self.after / 2 {
                self.base = None;
            } else if self.base.is_none() {
                self.base = Some(sample);
            }
            return None;
        }
        if std::mem::replace(&mut self.is_told, true) {
            return None;
        }
        // Ranks that stall for one reason do not stall at one moment.
        let is_quiet = |track: &Track| track.is_ours && sample.at - track.since >= self.after / 2;
        let mut stall = Stall {
            quiet: Vec::new(),
            others: Vec::new(),
        };
        for (rank, track) in self.ranks.iter().enumerate() {
            if is_quiet(track) {
                stall.quiet.push((rank, sample.at - track.since));
            } else {
                let before = self.base.as_ref().map(|base| (base.at, &base.ranks[rank]));
                let doing = doing(before, (sample.at, &sample.ranks[rank]));
                stall.others.push((rank, doing));
            }
        }
        stall
            .quiet
            .sort_by_key(|(rank, quiet)| (std::cmp::Reverse(*quiet), *rank));
        Some(stall)
    }

    fn ours(&self) -> impl Iterator<Item = &Track> {
        self.ranks.iter().filter(|track| track.is_ours)
    }

    fn longest(&self, now: Duration) -> Duration {
        let quiet = self.ours().map(|track| now.saturating_sub(track.since));
        quiet.max().unwrap_or_default()
    }
}

impl Track {
    fn observe(&mut self, at: Duration, rank: &RankSample) {
        self.is_ours = rank.is_running && !rank.is_paceline;
        let tree = rank.tree.as_ref().map(|tree| (tree.cpu, tree.io_bytes, at));
        let tree_works = || match (self.tree, tree) {
            (Some((cpu, bytes, from)), Some((now, bytes_now, _))) => {
                is_work(now.saturating_sub(cpu), at - from)
                    || bytes_now.saturating_sub(bytes) > IDLE_BYTES
            }
            _ => false,
        };
        let works = !self.is_ours
            || rank.is_held_up
            || rank.waits_for_input()
            || rank.printed != self.printed
            || is_work(rank.own_cpu.saturating_sub(self.own_cpu), at - self.since)
            || tree_works();
        if works {
            *self = Self {
                since: at,
                own_cpu: rank.own_cpu,
                printed: rank.printed,
                tree,
                is_ours: self.is_ours,
            };
        } else if self.tree.is_none() {
            self.tree = tree;
        }
    }
}

fn is_work(used: Duration, over: Duration) -> bool {
    used > over.mul_f64(IDLE_SHARE) + IDLE_SLACK
}

/// What a rank did between two samples.
fn doing(before: Option<(Duration, &RankSample)>, (at, now): (Duration, &RankSample)) -> Doing {
    match (now.is_running, now.is_paceline) {
        (false, _) => return Doing::Ended,
        (_, true) => return Doing::HasDeadlines,
        _ if now.waits_for_input() => return Doing::WaitsForInput,
        _ => {}
    }
    let Some((from, before)) = before else {
        return Doing::Works;
    };
    match (&before.tree, &now.tree) {
        (Some(tree), Some(tree_now)) if before.printed == now.printed => {
            match spins(tree, tree_now, at.saturating_sub(from)) {
                true => Doing::Spins,
                false => Doing::Works,
            }
        }
        _ => Doing::Works,
    }
}

/// Whether one thread used a core, the others none, and nothing was read, written or waited for.
fn spins(before: &Tree, now: &Tree, over: Duration) -> bool {
    let (mut busy, mut idle) = (0, Duration::ZERO);
    for (id, thread) in &now.threads {
        let Some(was) = before.threads.get(id) else {
            continue;
        };
        let runnable = thread.runnable.saturating_sub(was.runnable);
        if runnable >= over.mul_f64(SPIN_SHARE) {
            busy += 1;
        } else {
            idle += thread.cpu.saturating_sub(was.cpu);
        }
    }
    busy == 1 && !is_work(idle, over) && now.io_bytes.saturating_sub(before.io_bytes) <= IDLE_BYTES
}

impl Stall {
    /// How long the first one has been quiet.
    pub(crate) fn longest(&self) -> Duration {
        self.quiet
            .first()
            .map_or(Duration::ZERO, |(_, quiet)| *quiet)
    }

    /// The local ranks that may show the reason: those that are quiet, and those that spin while these wait for them.
    pub(crate) fn suspects(&self) -> impl Iterator<Item = usize> {
        let spin = self
            .others
            .iter()
            .filter(|(_, doing)| *doing == Doing::Spins);
        let quiet = self.quiet.iter().map(|(rank, _)| *rank);
        spin.map(|(rank, _)| *rank).chain(quiet)
    }

    /// The one to blame: a rank that spins while all others wait, else the one that has been quiet longest.
    pub(crate) fn culprit(&self) -> Option<usize> {
        let spins = match self.others.as_slice() {
            [(rank, Doing::Spins)] => Some(*rank),
            _ => None,
        };
        spins.or(self.quiet.first().map(|(rank, _)| *rank))
    }

    /// The verdict in words, with the numbers that the ranks have in the job.
    pub(crate) fn words(&self, first_rank: usize, lang: Lang) -> String {
        let quiet: Vec<_> = self.quiet.iter().map(|(rank, _)| *rank).collect();
        let (who, is_one) = named(quiet, first_rank, lang).unwrap_or_default();
        let (has, shortest) = (
            if is_one { "has" } else { "have" },
            self.quiet.last().map_or(0, |(_, quiet)| quiet.as_secs()),
        );
        let longest = self.longest().as_secs();
        let time = match shortest == longest {
            true => say!(lang, "{longest} s", "{longest}초"),
            false => say!(lang, "{shortest} to {longest} s", "{shortest}~{longest}초"),
        };
        let quiet = match lang {
            Lang::En => {
                format!("{who} {has} printed nothing and used no processor time for {time}")
            }
            Lang::Ko => format!("{who}: {time} 동안 출력이 없고 CPU 시간을 쓰지 않음"),
        };
        let those = |doing: Doing| {
            let others = self.others.iter().filter(|(_, other)| *other == doing);
            let others: Vec<_> = others.map(|(rank, _)| *rank).collect();
            let (who, is_one) = named(others, first_rank, lang)?;
            let doing = doing.words(is_one).of(lang);
            Some(match lang {
                Lang::En => format!("{who} {doing}"),
                Lang::Ko => format!("{who}: {doing}"),
            })
        };
        let rest = [
            Doing::Works,
            Doing::WaitsForInput,
            Doing::Ended,
            Doing::HasDeadlines,
        ];
        // The likely reason first.
        let parts = [those(Doing::Spins), Some(quiet)];
        let parts = parts.into_iter().chain(rest.map(those)).flatten();
        parts.collect::<Vec<_>>().join("; ")
    }
}

impl Doing {
    /// Of one rank or of several; in Korean these are the same.
    fn words(self, is_one: bool) -> Word {
        const fn both(one: &'static str, several: &'static str, ko: &'static str) -> [Word; 2] {
            [Word::new(one, ko), Word::new(several, ko)]
        }
        let [one, several] = match self {
            Self::Works => const { both("works", "work", "작업 중") },
            Self::Spins => {
                const {
                    both(
                        "spins: one thread uses a whole core and reads, writes and prints nothing",
                        "spin: in each, one thread uses a whole core and reads, writes and prints nothing",
                        "스레드 하나가 코어 하나를 모두 쓰면서 읽기, 쓰기, 출력이 없음",
                    )
                }
            }
            Self::WaitsForInput => {
                const { both("waits for input", "wait for input", "입력 대기 중") }
            }
            Self::Ended => const { both("has ended", "have ended", "종료됨") },
            Self::HasDeadlines => {
                const {
                    both(
                        "uses Paceline, whose operations have deadlines",
                        "use Paceline, whose operations have deadlines",
                        "Paceline 사용 중(연산마다 제한 시간이 있음)",
                    )
                }
            }
        };
        if is_one { one } else { several }
    }
}

/// `rank 3` or `ranks 3 and 4`, and whether it is one.
fn named(mut local_ranks: Vec<usize>, first_rank: usize, lang: Lang) -> Option<(String, bool)> {
    local_ranks.sort_unstable();
    let ranks: Vec<_> = local_ranks.iter().map(|rank| first_rank + rank).collect();
    match ranks.as_slice() {
        [] => None,
        [one] => Some((say!(lang, "rank {one}", "랭크 {one}"), true)),
        many => {
            let ranks = Ranks(many).text(lang);
            Some((say!(lang, "ranks {ranks}", "랭크 {ranks}"), false))
        }
    }
}

#[cfg(test)]
mod tests;
