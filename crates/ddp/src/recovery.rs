//! Live recovery: which step holds after ranks were lost.
//!
//! All ranks run the same *commits* in the same order: the steps, and each call of [`Ddp::with_recovery`](crate::Ddp::with_recovery).
//! The last operation of a commit needs something of every rank (an all-reduce, an all-gather, a barrier), and its result is the
//! same bytes on all ranks. In a step it is the all-reduce of the tail bucket. Every rank keeps the last commit's result.
//!
//! When ranks are lost, the others form the next generation of the group, compare how many commits each has completed, and
//! [settle]: a rank that is one commit behind borrows the result of that commit, and the others repeat the one that they are in.
//!
//! Why a rank lacks at most one result:
//!
//! 1. A rank executes operations one after another, in the order of submission, and takes part in none before it has the
//!    results of all earlier ones (`collective/src/executor.rs`; a small operation that its caller begins early has nothing in
//!    front of it).
//! 2. No rank has the result of an all-reduce, all-gather or barrier before all ranks have taken part: each needs a part of
//!    every rank. (A broadcast's root needs nothing of the others, so no commit ends with one.)
//! 3. So if a rank has the result of a commit's last operation, all ranks have the results of its earlier ones. A rank that
//!    fails in step `k` while another has returned from it has all gradients of step `k`, and lacks the tail at most.
//! 4. A second commit cannot end anywhere before all ranks have taken part in it, which they do with the first one's result. So
//!    no two ranks of a group differ by more than one commit. The next generation runs no commit before all its ranks have
//!    settled, and its ranks are some of the previous one's, so this holds in every generation, even if ranks are lost while
//!    one forms.
//!
//! If only lost ranks had completed a commit, the others repeat it. That gives the same bits: the shards, their seeds and the tree
//! of sums do not depend on the ranks. A step that fails leaves running statistics, scaler and counters as they were before it.
//!
//! Without a failure, no message is added. A step costs one copy of the tail bucket.

use paceline_collective::Error;
use serde::{Deserialize, Serialize};

use crate::error::DdpError;

/// What happens to a job that loses a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recovery {
    /// The step fails on all ranks.
    #[default]
    None,
    /// The other ranks go on: they take over the lost rank's shards and repeat the step, if the launcher does its part.
    Live,
}

/// The commits that this rank has completed.
#[derive(Debug, Default)]
pub(crate) struct Commits {
    pub(crate) completed: u64,
    /// The last one's result.
    pub(crate) result: Vec<u8>,
}

impl Commits {
    pub(crate) fn complete(&mut self, result: Vec<u8>) {
        self.completed += 1;
        self.result = result;
    }
}

/// Whether the ranks that are left can go on after this failure. After any other one they would fail the same way again.
pub(crate) fn is_loss(error: &Error) -> bool {
    matches!(
        error,
        Error::PeerLost { .. }
            | Error::PeerLeft { .. }
            | Error::Deadline { .. }
            | Error::Absent { .. }
            | Error::Aborted { .. }
            | Error::Revoked { .. }
    )
}

/// The rank that lends the last commit's result to those that lack it; `None` if all have it. `completed` is by rank.
///
/// *Errors*: ranks that are further apart than one commit, which only a program causes whose ranks run different commits.
pub(crate) fn settle(completed: &[u64]) -> Result<Option<usize>, DdpError> {
    let most = completed.iter().copied().max().unwrap_or(0);
    if let Some(rank) = completed.iter().position(|count| count + 1 < most) {
        return Err(DdpError::Apart {
            rank,
            completed: completed[rank],
            most,
        });
    }
    let is_behind = completed.iter().any(|count| *count < most);
    let lender = completed.iter().position(|count| *count == most);
    Ok(lender.filter(|_| is_behind))
}

#[cfg(test)]
pub(crate) mod faults;
#[cfg(test)]
mod tests;
