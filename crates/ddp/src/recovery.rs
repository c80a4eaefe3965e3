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
//!    front of it). Gradients that are summed on a device are no operations of the group: a rank waits for all of them before it
//!    sends its tail (`reducer/on_device.rs`).
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
//!
//! # Replacements
//!
//! A process in a lost rank's place has completed nothing. A rank that is invited to admit it says so in the tail bucket, so all ranks
//! agree after the same step. They form the next generation with it in [`Ddp::admit`](crate::Ddp::admit), between two commits, where
//! weights, optimizer and position are those of one step. One of them hands its state over, and the new rank has completed the same
//! commits from then on. A generation that forms after a loss has no new ranks, because the others may be within a step then.

use paceline_collective::{Error, ProcessGroup};
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
            | Error::Disconnected { .. }
            | Error::Deadline { .. }
            | Error::Absent { .. }
            | Error::Aborted { .. }
            | Error::Revoked { .. }
    )
}

/// Whether a group has lost a rank without which the others can go on.
pub(crate) fn is_lost(group: &ProcessGroup) -> bool {
    group.health().is_err_and(|error| is_loss(&error))
}

/// Where a rank is in the program when a generation begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In a commit, which it repeats.
    Within,
    /// Between two commits: it can hand its state over.
    Between,
    /// It replaces a lost rank, and has no state.
    New,
}

/// How far a rank has come when a generation begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) place: Place,
    pub(crate) completed: u64,
}

impl Standing {
    pub(crate) fn encode(self) -> [u8; 9] {
        let mut bytes = [self.place as u8; 9];
        bytes[..8].copy_from_slice(&self.completed.to_le_bytes());
        bytes
    }

    /// Bytes that `encode` did not write stand for a rank that has completed nothing.
    pub(crate) fn decode(bytes: &[u8]) -> Self {
        let (completed, place) = bytes.split_first_chunk().unwrap_or((&[0; 8], &[]));
        Self {
            place: match place {
                [place] if *place == Place::Between as u8 => Place::Between,
                [place] if *place == Place::New as u8 => Place::New,
                _ => Place::Within,
            },
            completed: u64::from_le_bytes(*completed),
        }
    }
}

/// Who gives what to whom when a generation begins.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Settlement {
    /// The rank that lends the last commit's result to those that lack it; `None` if all have it.
    pub(crate) lender: Option<usize>,
    /// The rank that hands its state over to the new ones.
    pub(crate) giver: Option<usize>,
    pub(crate) new: Vec<usize>,
}

/// Settles by how far each rank has come.
///
/// *Errors*: ranks that are further apart than one commit, which only a program causes whose ranks run different commits.
pub(crate) fn settle(all: &[Standing]) -> Result<Settlement, DdpError> {
    let ranks = || all.iter().enumerate();
    let old = || ranks().filter(|(_, standing)| standing.place != Place::New);
    let most = old().map(|(_, standing)| standing.completed).max();
    let most = most.unwrap_or(0);
    if let Some((rank, standing)) = old().find(|(_, standing)| standing.completed + 1 < most) {
        return Err(DdpError::Apart {
            rank,
            completed: standing.completed,
            most,
        });
    }
    let is_behind = old().any(|(_, standing)| standing.completed < most);
    let lender = old().find(|(_, standing)| standing.completed == most);
    let giver = old().find(|(_, standing)| standing.place == Place::Between);
    let new = ranks().filter(|(_, standing)| standing.place == Place::New);
    Ok(Settlement {
        lender: lender.map(|(rank, _)| rank).filter(|_| is_behind),
        giver: giver.map(|(rank, _)| rank),
        new: new.map(|(rank, _)| rank).collect(),
    })
}

#[cfg(test)]
pub(crate) mod faults;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
