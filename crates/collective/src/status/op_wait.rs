//! What every wait of an operation looks at: the latch, who left, and the deadline.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::Status;
use super::culprits::ANSWER_TIMEOUT;
use crate::error::{Error, Operation, Ranks};

/// How long a rank that cannot tell which rank is to blame waits for the others' verdict, whose deadlines are over at about
/// the same time: they ask for [`ANSWER_TIMEOUT`] and then tell, and machines are busy. Half of it is still twice that time.
const VERDICT_TIMEOUT: Duration = ANSWER_TIMEOUT.saturating_mul(4);

/// Looked at in every wait of one operation.
#[derive(Debug)]
pub(crate) struct OpWait<'a> {
    pub(crate) status: &'a Status,
    pub(crate) operation: Operation,
    pub(crate) started: Instant,
    pub(crate) timeout: Duration,
    /// Whether the page says that this rank waits here.
    published: Cell<bool>,
}

impl<'a> OpWait<'a> {
    pub(crate) fn new(
        status: &'a Status,
        operation: Operation,
        started: Instant,
        timeout: Duration,
    ) -> Self {
        Self {
            status,
            operation,
            started,
            timeout,
            published: Cell::new(false),
        }
    }

    /// Says on the page and to asking peers that this rank waits in the operation. Called by a thread that is about to
    /// wait for longer than a few microseconds: any other operation is over before a peer could ask.
    pub(crate) fn publish(&self) {
        if !self.published.replace(true) {
            self.status.set_operation(Some(self.operation));
        }
    }

    /// How long it is until the deadline.
    pub(crate) fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.started.elapsed())
    }

    /// The operation is over.
    pub(crate) fn retract(&self) {
        if self.published.replace(false) {
            self.status.set_operation(None);
        }
    }

    /// Why a peer's data connection ended: what is latched or arrives within `limit`, else that nothing else of the peer
    /// did: a process that dies ends all its connections. One that lives says so when it is asked, and why it leaves before that.
    ///
    /// *Blocks*: for at most `limit`.
    pub(crate) fn cause_of_end(&self, peer: usize, limit: Duration) -> Error {
        let status = self.status;
        status.ask_one(peer);
        let unknown = |latch: &mut Option<Error>| {
            latch.is_none() && status.left_after(peer).is_none() && !status.has_answered(peer)
        };
        let mut latch = status.latch.lock();
        status.changed.wait_while_for(&mut latch, unknown, limit);
        match (&*latch, status.left_after(peer)) {
            (Some(first), _) => first.clone(),
            (None, Some(after)) => Error::PeerLeft {
                rank: peer,
                after,
                during: self.operation,
            },
            (None, None) => Error::Disconnected {
                rank: peer,
                place: status.place(peer),
                during: self.operation,
            },
        }
    }

    /// Whether waiting for the `missing` ranks still makes sense.
    pub(crate) fn check(&self, missing: impl FnOnce() -> Vec<usize>) -> Result<(), Error> {
        let status = self.status;
        status.health()?;
        let missing = missing();
        for rank in missing.iter().copied() {
            if let Some(after) = status
                .left_after(rank)
                .filter(|after| *after < self.operation.seq)
            {
                return Err(Error::PeerLeft {
                    rank,
                    after,
                    during: self.operation,
                });
            }
        }
        match missing.is_empty() {
            true => Ok(()),
            false => self.check_time(&missing, VERDICT_TIMEOUT),
        }
    }

    /// Whether waiting for the `missing` ranks still makes sense, where the others do not wait too and where a rank that
    /// has left may have sent what is waited for.
    pub(crate) fn check_alone(&self, missing: &[usize]) -> Result<(), Error> {
        self.status.health()?;
        // The others, whom this rank keeps waiting, know less: its word has to be there before theirs.
        let word = self.check_time(missing, VERDICT_TIMEOUT / 2);
        word.map_err(|mut error| {
            if let Error::Deadline { waiting, .. } = &mut error {
                *waiting = "".into();
            }
            error
        })
    }

    /// A rank that cannot tell which rank is to blame waits for `patience` for the others' verdict.
    fn check_time(&self, missing: &[usize], patience: Duration) -> Result<(), Error> {
        let status = self.status;
        let waited = self.started.elapsed();
        if waited < self.timeout {
            return Ok(());
        }
        let (culprits, missing, certain) = status.find_culprits(missing, self.operation.seq);
        if !certain {
            status.wait_for_word(patience);
        }
        // Another rank's deadline may have been over a little earlier; its report is then everybody's.
        status.health()?;
        let others: Vec<usize> = (0..status.world())
            .filter(|rank| !culprits.contains(rank))
            .collect();
        let verb = if others.len() == 1 { "waits" } else { "wait" };
        Err(Error::Deadline {
            rank: status.rank,
            operation: self.operation,
            waited,
            missing: missing.into(),
            waiting: format!("; {} {verb} in {}", Ranks(&others), self.operation).into(),
            culprits,
        })
    }
}
