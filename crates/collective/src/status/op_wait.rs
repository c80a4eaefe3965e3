//! What every wait of an operation looks at: the latch, who left, and the deadline.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::Status;
use super::culprits::{Missing, answer_timeout};
use crate::error::{Error, Operation, Ranks, Seconds};

/// A rank that cannot tell which rank is to blame waits this many times [`answer_timeout`] for the others' verdict, whose
/// deadlines are over at about the same time: they ask for that time and then tell, and machines are busy.
const VERDICT: u32 = 4;
/// The same for a rank that knows more than those whom it keeps waiting: its word has to be there before theirs.
const FIRST_VERDICT: u32 = 2;
/// How often the page hears that bytes move, at most.
const MOVED_EVERY: Duration = Duration::from_millis(500);

/// Looked at in every wait of one operation.
#[derive(Debug)]
pub(crate) struct OpWait<'a> {
    pub(crate) status: &'a Status,
    pub(crate) operation: Operation,
    pub(crate) started: Instant,
    pub(crate) timeout: Duration,
    /// Whether the page says that this rank waits here.
    published: Cell<bool>,
    /// When bytes have moved last, within [`MOVED_EVERY`].
    moved: Cell<Instant>,
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
            moved: Cell::new(started),
        }
    }

    /// Says on the page and to asking peers that this rank waits in the operation. Called by a thread that is about to
    /// wait for longer than a few microseconds: any other operation is over before a peer could ask.
    pub(crate) fn publish(&self) {
        if !self.published.replace(true) {
            self.status.set_operation(Some(self.operation));
        }
    }

    /// Bytes have moved after a wait. Says so on the page, where an operation that has not moved for long counts as one that waits
    /// for a rank, however slow the network is.
    pub(crate) fn moved(&self, now: Instant) {
        if now.saturating_duration_since(self.moved.get()) >= MOVED_EVERY {
            self.moved.set(now);
            if self.published.get() {
                self.status.set_operation(Some(self.operation));
            }
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

    /// Why a peer's data connection ended: what is latched or arrives within [`answer_timeout`], else that nothing else of the
    /// peer did: a process that dies ends all its connections. One that lives says so when it is asked, and why it leaves before
    /// that.
    ///
    /// *Blocks*: for at most that time.
    pub(crate) fn cause_of_end(&self, peer: usize) -> Error {
        let status = self.status;
        status.ask_one(peer);
        let unknown = |latch: &mut Option<Error>| {
            latch.is_none() && status.left_after(peer).is_none() && !status.has_answered(peer)
        };
        let mut latch = status.latch.lock();
        status
            .changed
            .wait_while_for(&mut latch, unknown, answer_timeout(self.timeout));
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
    pub(crate) fn check(&self, missing: impl FnOnce() -> Missing) -> Result<(), Error> {
        let status = self.status;
        status.health()?;
        let missing = missing();
        for rank in missing.ranks.iter().copied() {
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
        match missing.ranks.is_empty() {
            true => Ok(()),
            false => self.check_time(&missing, false),
        }
    }

    /// Whether waiting for the `missing` ranks still makes sense, where the others do not wait too and where a rank that
    /// has left may have sent what is waited for.
    pub(crate) fn check_alone(&self, missing: &[usize]) -> Result<(), Error> {
        self.status.health()?;
        let word = self.check_time(&Missing::not_come(missing.to_vec()), true);
        word.map_err(|mut error| {
            if let Error::Deadline { waiting, .. } = &mut error {
                *waiting = "".into();
            }
            error
        })
    }

    /// `is_alone`: the others do not wait too.
    fn check_time(&self, missing: &Missing, is_alone: bool) -> Result<(), Error> {
        let status = self.status;
        let waited = self.started.elapsed();
        if waited < self.timeout {
            return Ok(());
        }
        let limit = answer_timeout(self.timeout);
        let (culprits, missing, certain) =
            status.find_culprits(missing, self.operation.seq, is_alone, limit);
        if !certain {
            // What has come and does not arrive is known to those alone who receive it.
            let verdict = match is_alone || culprits.is_empty() {
                true => FIRST_VERDICT,
                false => VERDICT,
            };
            status.wait_for_word(limit * verdict);
        }
        // Another rank's deadline may have been over a little earlier; its report is then everybody's.
        status.health()?;
        if culprits.is_empty() {
            let missing = format!(
                "all ranks have come, and data last moved here {} ago: the network between them is too slow or has stalled",
                Seconds(self.moved.get().elapsed())
            );
            return Err(Error::Deadline {
                rank: status.rank,
                operation: self.operation,
                waited,
                missing: missing.into(),
                waiting: "".into(),
                culprits,
            });
        }
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
