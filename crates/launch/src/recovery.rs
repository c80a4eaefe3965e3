//! Live recovery: which ranks form the next generation after a failure, and what has to happen first. Pure decisions.
//!
//! A failure belongs to one generation. Its culprit has to be dead before the next one is published, so that it can change
//! nothing. All other living ranks are members, if each of them has said that it goes on. So generations only get smaller,
//! and a job with `n` ranks has at most `n` of them.

use std::str::FromStr;

use crate::judge::WorkerState;

/// What becomes of a job whose ranks are lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Recovery {
    /// The ranks that are left go on, where all of them can; else as [`Restart`](Self::Restart). On one node only.
    Live,
    /// All ranks are started again, as often as [`Job::max_restarts`](crate::Job::max_restarts) says.
    #[default]
    Restart,
    /// The job ends.
    None,
}

/// A word that names no recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected live, restart or none")]
pub struct NotARecovery;

impl FromStr for Recovery {
    type Err = NotARecovery;

    fn from_str(text: &str) -> Result<Self, NotARecovery> {
        match text {
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Impossible {
    #[error("no rank is left")]
    NobodyLeft,
    #[error("rank {0} does not recover live")]
    NotAble(usize),
}

/// What follows the failure of `culprit`; `recovers` are the ranks that have said they go on.
pub(crate) fn next(
    states: &[WorkerState],
    recovers: impl Fn(usize) -> bool,
    culprit: usize,
) -> Result<Next, Impossible> {
    let ranks = 0..states.len();
    let lives = |rank: &usize| !states[*rank].is_out && states[*rank].exit.is_none();
    let members: Vec<usize> = (ranks.clone())
        .filter(|rank| lives(rank) && *rank != culprit)
        .collect();
    if members.is_empty() {
        return Err(Impossible::NobodyLeft);
    }
    if let Some(unable) = members.iter().find(|rank| !recovers(**rank)) {
        return Err(Impossible::NotAble(*unable));
    }
    if lives(&culprit) {
        return Ok(Next::Kill);
    }
    let failed = |rank: &usize| {
        let state = &states[*rank];
        !state.is_out && (*rank == culprit || state.exit.is_some_and(|exit| exit.is_failure()))
    };
    let lost = ranks.filter(failed).collect();
    Ok(Next::GoOn { members, lost })
}

#[cfg(test)]
mod tests;
