//! How ranks that share memory wait for each other: the order of stores and loads, and nothing else.
//!
//! Each rank's progress lies in its own cache line and is looked at by the others. A rank that has looked long enough
//! sleeps on one word for all, the bell. The last rank to publish sees that all are there, and rings; so a rank sleeps at
//! most once for each meeting, however many ranks there are and however few cores.
//!
//! No wake-up is lost: a sleeper registers, reads the bell and then looks once more for all ranks' progress; the last
//! rank publishes, looks for all and then for sleepers. In the total order of these (sequentially consistent) accesses
//! either the sleeper sees the last rank's progress, or the last rank sees the sleeper and the bell changes after the
//! sleeper has read it.
//!
//! The words come from `super::sync`, so that `tests/meeting_model.rs` can run this file under a model checker.

use std::time::Duration;

use super::sync::{AtomicU32, Ordering, wait, wake_all};

/// Where the words of a group lie.
pub(crate) trait Board {
    fn members(&self) -> usize;
    fn progress(&self, member: usize) -> &AtomicU32;
    fn bell(&self) -> &AtomicU32;
    /// Members that sleep, or are about to.
    fn sleepers(&self) -> &AtomicU32;
}

/// Whether `progress` is at or beyond `target`, over the wrap.
pub(crate) fn reached(progress: u32, target: u32) -> bool {
    progress.wrapping_sub(target) < 1 << 31
}

/// Whether all members have reached `target`.
pub(crate) fn complete(board: &impl Board, target: u32) -> bool {
    (0..board.members())
        .all(|member| reached(board.progress(member).load(Ordering::SeqCst), target))
}

/// How a member has come to a meeting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// Others are missing.
    Early,
    /// As the last, and nobody slept.
    Last,
    /// As the last, and it woke those who slept.
    Rang,
}

/// Publishes that this member has come. The last one rings.
pub(crate) fn arrive(board: &impl Board, me: usize, target: u32) -> Arrival {
    board.progress(me).store(target, Ordering::SeqCst);
    if !complete(board, target) {
        return Arrival::Early;
    }
    if board.sleepers().load(Ordering::SeqCst) == 0 {
        return Arrival::Last;
    }
    board.bell().fetch_add(1, Ordering::SeqCst);
    wake_all(board.bell());
    Arrival::Rang
}

/// A registration as sleeper, given back on every way out.
pub(crate) struct Asleep<'a, B: Board>(&'a B);

impl<'a, B: Board> Asleep<'a, B> {
    pub(crate) fn register(board: &'a B) -> Self {
        board.sleepers().fetch_add(1, Ordering::SeqCst);
        Self(board)
    }

    /// Sleeps until the bell rings, unless all have come; whether they have. May return early. `limit` says for how long, once
    /// the bell has been read.
    pub(crate) fn sleep(&self, target: u32, limit: impl FnOnce() -> Duration) -> bool {
        let bell = self.0.bell().load(Ordering::SeqCst);
        if complete(self.0, target) {
            return true;
        }
        let limit = limit();
        if !limit.is_zero() {
            wait(self.0.bell(), bell, limit);
        }
        // Checked once more: the rank that came last may have gone on and failed since, which is not this meeting's concern.
        complete(self.0, target)
    }
}

impl<B: Board> Drop for Asleep<'_, B> {
    fn drop(&mut self) {
        self.0.sleepers().fetch_sub(1, Ordering::SeqCst);
    }
}
