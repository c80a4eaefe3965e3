//! A running operation's receipt.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::buffer::Buffer;
use crate::element::Element;
use crate::error::Error;
use crate::executor::Executor;
use crate::memory::Region;

/// When the stages of an operation were reached on this rank.
///
/// `peers_ready - started` is time lost to slower ranks, `finished - peers_ready` is the transport's own time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpTiming {
    /// The caller handed it over.
    pub submitted: Instant,
    /// It was begun, by its caller or the communication thread; the deadline counts from here.
    pub started: Instant,
    /// The last rank had arrived.
    pub peers_ready: Instant,
    /// The result was complete here.
    pub finished: Instant,
}

/// A finished operation.
#[derive(Debug)]
pub struct Done<T: Element> {
    /// The caller's buffer, with the result.
    pub buffer: Buffer<T>,
    /// When the stages were reached.
    pub timing: OpTiming,
}

impl<T: Element> Done<T> {
    /// Of an operation on a buffer of `len` elements.
    pub(crate) fn of(settled: Settled, len: usize) -> Result<Self, Error> {
        settled.map(|(region, timing)| Self {
            buffer: Buffer::new(region.expect("the operation owned its memory"), len),
            timing,
        })
    }
}

/// An operation on its way. It runs whether or not anybody waits; dropping the ticket drops the result.
#[derive(Debug)]
pub struct Ticket<T: Element> {
    outcome: Arc<Outcome>,
    /// Who executes it, unless it was over from the start, and its number.
    source: Option<(Weak<Executor>, u64)>,
    len: usize,
    element: std::marker::PhantomData<T>,
}

impl<T: Element> Ticket<T> {
    /// An operation that is over.
    pub(crate) fn over(settled: Settled, len: usize) -> Self {
        Self {
            outcome: Outcome::of(settled),
            source: None,
            len,
            element: std::marker::PhantomData,
        }
    }

    /// Operation `seq` of an executor that leaves its result in `outcome`.
    pub(crate) fn on_its_way(
        executor: &Arc<Executor>,
        (seq, outcome): (u64, Arc<Outcome>),
        len: usize,
    ) -> Self {
        Self {
            outcome,
            // A ticket may outlive its group, whose connections end with it.
            source: Some((Arc::downgrade(executor), seq)),
            len,
            element: std::marker::PhantomData,
        }
    }

    /// Waits for the result, or works for it: what the communication thread has not taken up yet, this operation and
    /// those in front of it, runs on the waiting thread.
    ///
    /// *Blocks*: until the operation has finished or failed: each operation has the group's timeout from the moment it
    /// starts, and operations start in the order of their submission.
    ///
    /// *Errors*: the group's first failure, whichever operation met it.
    pub fn wait(self) -> Result<Done<T>, Error> {
        let settled = match self.executor() {
            Some((executor, seq)) => executor.settle(seq, &self.outcome),
            None => self.outcome.wait(),
        };
        Done::of(settled, self.len)
    }

    /// Waits for the result, but at most `limit`; gives the ticket back when the operation is still on its way.
    pub fn wait_timeout(self, limit: Duration) -> Result<Result<Done<T>, Error>, Self> {
        self.advance();
        match self.outcome.wait_for(limit) {
            Some(settled) => Ok(Done::of(settled, self.len)),
            None => Err(self),
        }
    }

    /// Whether waiting would return at once.
    pub fn is_done(&self) -> bool {
        self.advance();
        self.outcome.is_settled()
    }

    /// Does what waits for nobody.
    fn advance(&self) {
        if !self.outcome.is_settled()
            && let Some((executor, _)) = self.executor()
        {
            executor.finish_met();
        }
    }

    fn executor(&self) -> Option<(Arc<Executor>, u64)> {
        let (executor, seq) = self.source.as_ref()?;
        Some((executor.upgrade()?, *seq))
    }
}

/// How an operation ended: its memory back, if it owned some, and when; or the group's first failure.
pub(crate) type Settled = Result<(Option<Region>, OpTiming), Error>;

/// Where the result of an operation is left for the holder of the ticket.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    settled: Mutex<Option<Settled>>,
    came: Condvar,
}

impl Outcome {
    /// Settled from the start.
    pub(crate) fn of(settled: Settled) -> Arc<Self> {
        Arc::new(Self {
            settled: Mutex::new(Some(settled)),
            came: Condvar::new(),
        })
    }

    fn settle(&self, settled: Settled) {
        *self.settled.lock() = Some(settled);
        self.came.notify_all();
    }

    fn is_settled(&self) -> bool {
        self.settled.lock().is_some()
    }

    /// Takes the result out, if it is there.
    pub(crate) fn take_now(&self) -> Option<Settled> {
        self.settled.lock().take()
    }

    /// Waits for the result and takes it out. A [`Promise`] always settles, even when dropped, so this ends.
    pub(crate) fn wait(&self) -> Settled {
        let mut settled = self.settled.lock();
        self.came
            .wait_while(&mut settled, |settled| settled.is_none());
        settled.take().expect("the wait ends with a result")
    }

    /// As [`wait`](Self::wait), but none when `limit` was over first.
    pub(crate) fn wait_for(&self, limit: Duration) -> Option<Settled> {
        let mut settled = self.settled.lock();
        self.came
            .wait_while_for(&mut settled, |settled| settled.is_none(), limit);
        settled.take()
    }
}

/// The other end of an [`Outcome`]: settles it, with an error when it is dropped instead.
#[derive(Debug)]
pub(crate) struct Promise {
    outcome: Option<Arc<Outcome>>,
    rank: usize,
}

impl Promise {
    pub(crate) fn new(rank: usize) -> (Self, Arc<Outcome>) {
        let outcome = Arc::new(Outcome::default());
        (
            Self {
                outcome: Some(outcome.clone()),
                rank,
            },
            outcome,
        )
    }

    pub(crate) fn keep(mut self, settled: Settled) {
        if let Some(outcome) = self.outcome.take() {
            outcome.settle(settled);
        }
    }

    /// The waiting thread has the result already.
    pub(crate) fn forget(mut self) {
        self.outcome = None;
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if let Some(outcome) = self.outcome.take() {
            outcome.settle(Err(Error::ThreadGone { rank: self.rank }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_promise_is_an_error_and_not_a_hang() {
        let (promise, outcome) = Promise::new(4);
        assert!(outcome.wait_for(Duration::ZERO).is_none());
        drop(promise);
        assert!(matches!(
            outcome.wait().unwrap_err(),
            Error::ThreadGone { rank: 4 }
        ));
    }
}
