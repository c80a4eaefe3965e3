//! A running operation's receipt.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::buffer::Buffer;
use crate::element::Element;
use crate::error::Error;
use crate::memory::Region;

/// When the stages of an operation were reached on this rank.
///
/// `peers_ready - started` is time lost to slower ranks, `finished - peers_ready` is the transport's own time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpTiming {
    /// The caller handed it over.
    pub submitted: Instant,
    /// The communication thread took it up; the deadline counts from here.
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

/// An operation on its way. It runs whether or not anybody waits; dropping the ticket drops the result.
pub struct Ticket<T: Element> {
    outcome: Arc<Outcome>,
    len: usize,
    element: std::marker::PhantomData<T>,
}

impl<T: Element> Ticket<T> {
    pub(crate) fn new(outcome: Arc<Outcome>, len: usize) -> Self {
        Self {
            outcome,
            len,
            element: std::marker::PhantomData,
        }
    }

    /// Waits for the result.
    ///
    /// *Blocks* until the operation has finished or failed: each operation has the group's timeout from the moment it
    /// starts, and operations start in the order of their submission.
    ///
    /// *Errors*: the group's first failure, whichever operation met it.
    pub fn wait(self) -> Result<Done<T>, Error> {
        let settled = self
            .outcome
            .take(None)
            .expect("without a limit the result has come");
        self.done(settled)
    }

    /// Waits for the result, but at most `limit`; gives the ticket back when the operation is still on its way.
    pub fn wait_timeout(self, limit: Duration) -> Result<Result<Done<T>, Error>, Self> {
        match self.outcome.take(Some(limit)) {
            Some(settled) => Ok(self.done(settled)),
            None => Err(self),
        }
    }

    /// Whether waiting would return at once.
    pub fn is_done(&self) -> bool {
        self.outcome.is_settled()
    }

    fn done(&self, settled: Settled) -> Result<Done<T>, Error> {
        settled.map(|(region, timing)| Done {
            buffer: Buffer::new(region.expect("tickets are for owned memory"), self.len),
            timing,
        })
    }
}

impl<T: Element> fmt::Debug for Ticket<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket")
            .field("dtype", &T::DTYPE)
            .field("is_done", &self.is_done())
            .finish_non_exhaustive()
    }
}

/// How an operation ended: its memory back, if it owned some, and when; or the group's first failure.
pub(crate) type Settled = Result<(Option<Region>, OpTiming), Error>;

/// Where the result of an operation is left for whoever holds the ticket.
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
        *self.settled.lock().unwrap_or_else(PoisonError::into_inner) = Some(settled);
        self.came.notify_all();
    }

    fn is_settled(&self) -> bool {
        self.settled
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }

    /// Takes the result out; `None` when `limit` was over first. A [`Promise`] always settles, even when dropped, so
    /// waiting without a limit ends.
    pub(crate) fn take(&self, limit: Option<Duration>) -> Option<Settled> {
        let settled = self.settled.lock().unwrap_or_else(PoisonError::into_inner);
        let mut settled = match limit {
            None => self
                .came
                .wait_while(settled, |settled| settled.is_none())
                .unwrap_or_else(PoisonError::into_inner),
            Some(limit) => {
                let waited = self
                    .came
                    .wait_timeout_while(settled, limit, |settled| settled.is_none());
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
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
        let ticket = Ticket::<f32>::new(outcome, 0);
        let ticket = ticket.wait_timeout(Duration::ZERO).unwrap_err();
        drop(promise);
        assert!(matches!(
            ticket.wait().unwrap_err(),
            Error::ThreadGone { rank: 4 }
        ));
    }
}
