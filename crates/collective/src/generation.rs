//! Generations: a group that has lost ranks is followed by one of the ranks that are left.

use crate::error::Error;
use crate::group::ProcessGroup;

impl ProcessGroup {
    /// How many groups came before this one: 0 for a group that the job began with, and one more for each successor.
    pub fn generation(&self) -> u64 {
        0
    }

    /// Says that this program goes on with [`next_generation`](Self::next_generation) when other ranks are lost, and returns
    /// whether the launcher does its part. Without this word from every rank, the launcher ends the job after a failure, or
    /// restarts it.
    ///
    /// *Blocks*: no.
    pub fn declare_recovery(&self) -> bool {
        false
    }

    /// The group of the ranks that are left, after this one has failed. Ranks keep their order and are numbered anew from 0,
    /// and so are local ranks.
    ///
    /// A group that has not failed is given up first, as by [`abort`](Self::abort). If another rank is lost while the next
    /// generation forms, the one after it is returned. This group stays failed; drop it, with all its buffers, tickets and
    /// sub-groups, to free its memory.
    ///
    /// *Blocks*: until the launcher has published a generation after this one and its ranks have connected.
    ///
    /// *Errors*: nothing recovers this job; the launcher has ended the job; this rank was given up; the deadline.
    pub fn next_generation(&self) -> Result<Self, Error> {
        Err(Error::NoRecovery {
            reason: "no launcher with live recovery started it",
        })
    }
}
