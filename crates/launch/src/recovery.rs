//! Live recovery: which ranks form the next generation after a failure, and who takes the places of the lost ones. Pure decisions.
//!
//! A failure belongs to one generation. No thread of its culprit may run any more when the next one is published, so that it can change
//! nothing. All other living ranks are members, if each of them has said that it goes on. If only a connection failed, no rank is the
//! culprit, and all are members ([`Mended`]).
//!
//! A lost rank's place gets a new process, as often as the job may. The others go on meanwhile. When the process is ready, they
//! are invited to a generation with it, and follow when they have agreed among themselves. Until it has the job's state it counts
//! as new: a generation that follows a failure leaves it out, because the others may be within a step then, and an invitation comes
//! again. So every generation that has begun has a rank with the state, or the job starts again from a checkpoint.
//!
//! Replacements get the highest ranks: rank 0 is always the one that has been there for the longest time.

use std::str::FromStr;
use std::time::Duration;

use paceline_words::{Lang, say};

use crate::judge::WorkerState;

/// What becomes of a job whose ranks are lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Recovery {
    /// [`Live`](Self::Live) if all ranks say that they go on, else [`Restart`](Self::Restart).
    #[default]
    Auto,
    /// The ranks that are left go on, where all of them can; else as [`Restart`](Self::Restart). Lost ranks
    /// are replaced, where the others can admit them, as often as [`Job::max_restarts`](crate::Job::max_restarts) says.
    Live,
    /// All ranks are started again, as often as [`Job::max_restarts`](crate::Job::max_restarts) says.
    Restart,
    /// The job ends.
    None,
}

/// A word that names no recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected auto, live, restart or none")]
pub struct NotARecovery;

impl FromStr for Recovery {
    type Err = NotARecovery;

    fn from_str(text: &str) -> Result<Self, NotARecovery> {
        match text {
            "auto" => Ok(Self::Auto),
            "live" => Ok(Self::Live),
            "restart" => Ok(Self::Restart),
            "none" => Ok(Self::None),
            _ => Err(NotARecovery),
        }
    }
}

/// What follows a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Next {
    /// The culprit lives: it is killed first.
    Kill,
    /// The next generation.
    GoOn {
        members: Vec<usize>,
        /// The ranks that failed: the culprit, and others that ended with an error since the last generation.
        lost: Vec<usize>,
    },
}

/// Why the ranks that are left cannot go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Impossible {
    NobodyLeft,
    NotAble(usize),
}

impl Impossible {
    pub(crate) fn text(self, lang: Lang) -> String {
        match self {
            Self::NobodyLeft => say!(lang, "no rank is left", "남은 랭크가 없음"),
            Self::NotAble(rank) => say!(
                lang,
                "rank {rank} does not recover live, or not before it has begun to train",
                "랭크 {rank}: 실시간 복구를 지원하지 않거나 아직 학습을 시작하지 않음"
            ),
        }
    }
}

/// What is due while no member has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Due {
    /// A replacement has ended before it was admitted. `is_invited`: the members form a generation without it.
    Lost { rank: usize, is_invited: bool },
    /// The end of a replacement that does not get ready.
    Kill(usize),
    /// A process for a lost rank's place.
    Start(usize),
    /// An invitation to these, in the order of their ranks.
    Invite(Vec<usize>),
}

/// What the launcher sees of the ranks.
pub(crate) struct Seen<'a> {
    pub(crate) states: &'a [WorkerState],
    /// Whether a rank takes in replacements.
    pub(crate) admits: &'a dyn Fn(usize) -> bool,
    /// Whether a replacement is ready.
    pub(crate) is_ready: &'a dyn Fn(usize) -> bool,
    /// Whether lost processes have left their memory and devices to new ones.
    pub(crate) has_room: bool,
    /// Since the job's start.
    pub(crate) now: Duration,
    /// How long a replacement may take until it is ready.
    pub(crate) ready_within: Duration,
}

/// How long a replacement may take until it is ready: twice as long as the first ranks took until they had done a step, while
/// nothing else ran on the machine, and at least as long as a rank waits for another one.
pub(crate) fn ready_within(timeout: Duration, first_step_after: Duration) -> Duration {
    timeout.max(2 * first_step_after)
}

/// The last times that all ranks went on after their group had failed without a lost rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mended {
    step: u64,
    /// In this step, since the job's start.
    first: Duration,
    last: Duration,
}

/// A group that has not worked for so long within one step has more than a broken connection.
const MENDS_WITHIN: Duration = Duration::from_secs(5);
/// Between two attempts in one step: a rank may lack memory for a while.
const MEND_PAUSE: Duration = Duration::from_millis(100);

impl Mended {
    /// Whether all ranks may go on once more. A group that works does steps; else a rank is to blame as for any other failure.
    pub(crate) fn may_again(before: Option<Self>, step: u64, now: Duration) -> bool {
        before.is_none_or(|before| {
            let is_soon = now.saturating_sub(before.first) < MENDS_WITHIN;
            let has_paused = now.saturating_sub(before.last) >= MEND_PAUSE;
            step > before.step || (is_soon && has_paused)
        })
    }

    pub(crate) fn again(before: Option<Self>, step: u64, now: Duration) -> Self {
        let before = before.filter(|before| step <= before.step);
        Self {
            step: before.map_or(step, |before| before.step),
            first: before.map_or(now, |before| before.first),
            last: now,
        }
    }
}

/// Which ranks are in the generation that has begun, and who is to take the other places.
#[derive(Debug, Clone)]
pub(crate) struct Roster {
    /// In the order of their ranks.
    members: Vec<usize>,
    invited: Vec<usize>,
    /// Replacements that start or wait.
    starting: Vec<usize>,
    /// Those of them that were killed, because they did not get ready.
    late: Vec<usize>,
    /// Places of lost ranks.
    empty: Vec<usize>,
    /// How many replacements may still be started.
    left: u32,
    started: u32,
    /// No more are started: they would fail the same way.
    is_closed: bool,
}

impl Roster {
    pub(crate) fn new(ranks: usize, replacements_max: u32) -> Self {
        Self {
            members: (0..ranks).collect(),
            invited: Vec::new(),
            starting: Vec::new(),
            late: Vec::new(),
            empty: Vec::new(),
            left: replacements_max,
            started: 0,
            is_closed: false,
        }
    }

    /// Of a node all of whose ranks are to join a job that runs.
    pub(crate) fn joining(ranks: usize) -> Self {
        Self {
            starting: (0..ranks).collect(),
            ..Self::new(0, 0)
        }
    }

    pub(crate) fn members(&self) -> &[usize] {
        &self.members
    }

    /// How many replacements have been started.
    pub(crate) fn started(&self) -> u32 {
        self.started
    }

    /// How many more may be.
    pub(crate) fn left(&self) -> u32 {
        self.left
    }

    /// So many may have been started by now, as the launchers of several nodes have agreed.
    pub(crate) fn allow(&mut self, replacements: u32) {
        if !self.is_closed {
            self.left = replacements.saturating_sub(self.started);
        }
    }

    /// How many it would start beside those that it may.
    pub(crate) fn wanted(&self, seen: &Seen<'_>) -> u32 {
        let places = u32::try_from(self.empty.len()).unwrap_or(u32::MAX);
        match self.may_start(seen) && !self.is_closed {
            true => places.saturating_sub(self.left),
            false => 0,
        }
    }

    /// The replacements that are invited, or wait for an invitation to all nodes.
    pub(crate) fn invited(&self) -> &[usize] {
        &self.invited
    }

    /// Whether a replacement is on its way.
    pub(crate) fn is_changing(&self) -> bool {
        !self.starting.is_empty() || !self.invited.is_empty()
    }

    /// Starts no more replacements: they would fail the same way.
    pub(crate) fn start_no_more(&mut self) {
        self.left = 0;
        self.is_closed = true;
    }

    /// Whether the members train and can admit replacements.
    fn may_start(&self, seen: &Seen<'_>) -> bool {
        (self.members.iter()).all(|rank| {
            let state = &seen.states[*rank];
            // The job ends, or a failure is being looked into.
            state.exit.is_none() && ((seen.admits)(*rank) || state.is_new)
        })
    }

    /// What follows the failure of `culprit`, or of the group if no rank is to blame; `recovers` are the ranks that have said they
    /// go on.
    pub(crate) fn after_failure(
        &self,
        states: &[WorkerState],
        recovers: impl Fn(usize) -> bool,
        culprit: Option<usize>,
    ) -> Result<Next, Impossible> {
        let lives = |rank: &usize| states[*rank].exit.is_none();
        let is_culprit = |rank: &usize| culprit == Some(*rank);
        let can_go_on = |rank: &usize| lives(rank) && !is_culprit(rank) && !states[*rank].is_new;
        let members = self.members.iter().copied().filter(can_go_on);
        let members: Vec<usize> = members.collect();
        if members.is_empty() {
            return Err(Impossible::NobodyLeft);
        }
        if let Some(unable) = members.iter().find(|rank| !recovers(**rank)) {
            return Err(Impossible::NotAble(*unable));
        }
        if culprit.as_ref().is_some_and(lives) {
            return Ok(Next::Kill);
        }
        let failed = |rank: &usize| {
            is_culprit(rank) || states[*rank].exit.is_some_and(|exit| exit.is_failure())
        };
        let lost = self.members.iter().copied().filter(failed).collect();
        Ok(Next::GoOn { members, lost })
    }

    /// The members form a generation by themselves.
    pub(crate) fn go_on(&mut self, members: &[usize], states: &[WorkerState]) {
        for rank in std::mem::replace(&mut self.members, members.to_vec()) {
            match states[rank].exit {
                _ if members.contains(&rank) => {}
                None => self.starting.push(rank),
                Some(exit) if exit.is_failure() => self.empty.push(rank),
                // It left by itself, and another process would do the same.
                Some(_) => {}
            }
        }
        self.starting.append(&mut self.invited);
    }

    /// The members have followed the invitation. Returns the replacements that they have admitted.
    pub(crate) fn admit(&mut self) -> Vec<usize> {
        self.members.extend(&self.invited);
        std::mem::take(&mut self.invited)
    }

    /// The next thing to do about the places of lost ranks, which counts as done.
    pub(crate) fn due(&mut self, seen: &Seen<'_>) -> Option<Due> {
        let has_ended = |rank: &usize| seen.states[*rank].exit.is_some();
        for (ranks, is_invited) in [(&mut self.invited, true), (&mut self.starting, false)] {
            if let Some(at) = ranks.iter().position(has_ended) {
                let rank = ranks.remove(at);
                self.empty.push(rank);
                self.late.retain(|late| *late != rank);
                return Some(Due::Lost { rank, is_invited });
            }
        }
        let is_late = |rank: &usize| {
            let age = seen.now.saturating_sub(seen.states[*rank].started);
            !(seen.is_ready)(*rank) && age >= seen.ready_within
        };
        let mut starting = self.starting.iter().copied();
        if let Some(rank) = starting.find(|rank| is_late(rank) && !self.late.contains(rank)) {
            self.late.push(rank);
            return Some(Due::Kill(rank));
        }
        if self.members.iter().any(has_ended) {
            return None;
        }
        if self.left > 0 && seen.has_room && self.may_start(seen) && !self.empty.is_empty() {
            let rank = self.empty.remove(0);
            (self.left, self.started) = (self.left - 1, self.started + 1);
            self.starting.push(rank);
            return Some(Due::Start(rank));
        }
        if !self.invited.is_empty() {
            return None;
        }
        // A node joins with all its ranks at once.
        if self.members.is_empty() && !self.starting.iter().all(|rank| (seen.is_ready)(*rank)) {
            return None;
        }
        let ready = |rank: &mut usize| (seen.is_ready)(*rank);
        self.invited = self.starting.extract_if(.., ready).collect();
        let all = self.members.iter().chain(&self.invited).copied();
        (!self.invited.is_empty()).then(|| Due::Invite(all.collect()))
    }
}

#[cfg(test)]
mod tests;
