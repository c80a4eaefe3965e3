//! Live recovery: which step holds after ranks were lost.
//!
//! All ranks run the same *commits* in the same order: the steps, and each call of [`Ddp::with_recovery`](crate::Ddp::with_recovery).
//! The last operation of a commit needs something of every rank (an all-reduce, an all-gather, a barrier), and its result is the
//! same bytes on all ranks. In a step it is the all-reduce of the tail bucket. Every rank keeps the last commit's result.
//!
//! When ranks are lost, the others form the next generation of the group, compare how many commits each has completed, and
//! [settle](paceline_collective::settle): a rank that is one commit behind borrows the result of that commit, and the others repeat
//! the one that they are in.
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

use serde::{Deserialize, Serialize};

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

#[cfg(test)]
pub(crate) mod faults;
#[cfg(test)]
mod tests;
