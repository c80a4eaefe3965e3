//! What the workers and the loader share: the list of jobs, the board of finished batches, and the waits on both.
//!
//! One worker at a time holds the list of jobs and waits for room; the others load, or queue for the list. That worker
//! takes the next job only while fewer than `ahead_max` are on their way, which bounds the memory.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::LoaderError;

/// What became of a job.
pub(super) type Outcome<J, B, E> = Result<(J, B), LoaderError<E>>;

/// The list of jobs.
pub(super) type Jobs<J> = dyn Iterator<Item = J> + Send;

/// The function that loads one job.
pub(super) type Load<J, B, E> = dyn Fn(&J) -> Result<B, E> + Send + Sync;

/// What the workers and the loader share.
pub(super) struct Shared<J, B, E: Display> {
    /// Held by the one worker that takes the next job, also while it waits for room; before `board`, never after.
    jobs: Mutex<Box<Jobs<J>>>,
    load: Box<Load<J, B, E>>,
    pub(super) board: Mutex<Board<J, B, E>>,
    /// A batch has been finished, the jobs have ended, or a worker has.
    pub(super) changed: Condvar,
    /// A batch has been handed out, or no more are wanted.
    room: Condvar,
    /// Most jobs taken and not handed out.
    ahead_max: u64,
}

/// The state of the run; no user code runs while it is locked.
pub(super) struct Board<J, B, E: Display> {
    /// Jobs taken so far; the index of the next one.
    taken: u64,
    /// Batches handed out so far; the index of the one that is due.
    given: u64,
    pub(super) finished: BTreeMap<u64, Outcome<J, B, E>>,
    /// No further job is started.
    stopped: bool,
    /// The caller has given up waiting for a batch.
    overdue: bool,
    /// Workers that have not ended.
    live: usize,
}

impl<J, B, E: Display> Board<J, B, E> {
    /// Whether all batches that there will be have been handed out.
    fn is_over(&self) -> bool {
        self.stopped && self.given == self.taken
    }
}

impl<J, B, E: Display> Default for Board<J, B, E> {
    fn default() -> Self {
        Self {
            taken: 0,
            given: 0,
            finished: BTreeMap::new(),
            stopped: false,
            overdue: false,
            live: 0,
        }
    }
}

impl<J, B, E: Display> Shared<J, B, E> {
    pub(super) fn new(jobs: Box<Jobs<J>>, load: Box<Load<J, B, E>>, ahead_max: usize) -> Self {
        Self {
            jobs: Mutex::new(jobs),
            load,
            board: Mutex::new(Board::default()),
            changed: Condvar::new(),
            room: Condvar::new(),
            ahead_max: ahead_max as u64,
        }
    }

    /// A worker's life: take a job, load it, put it on the board.
    fn work(&self) {
        while let Some((index, outcome)) = self.take().map(|(index, job)| self.load(index, job)) {
            let mut board = lock(&self.board);
            board.stopped |= outcome.is_err();
            board.finished.insert(index, outcome);
            drop(board);
            self.changed.notify_all();
            // A worker that waits for room must see a failure as well.
            self.room.notify_all();
        }
    }

    /// The next job as soon as there is room for it; `None` once no more are to be started.
    fn take(&self) -> Option<(u64, Result<J, String>)> {
        let mut jobs = lock(&self.jobs);
        let index = self.wait_for_room()?;
        let job = catch(|| jobs.next()).transpose();
        let mut board = lock(&self.board);
        let refused = board.stopped;
        // No job after the last one, nor after an iterator that panicked.
        board.stopped |= !matches!(job, Some(Ok(_)));
        board.taken += u64::from(job.is_some() && !refused);
        drop(board);
        self.changed.notify_all();
        job.filter(|_| !refused).map(|job| (index, job))
    }

    /// The index of the next job. The wait has no deadline: training takes as long as it takes, and it ends with the
    /// loader at the latest.
    fn wait_for_room(&self) -> Option<u64> {
        let full = |board: &mut Board<J, B, E>| {
            !board.stopped && board.taken - board.given >= self.ahead_max
        };
        let board = self.room.wait_while(lock(&self.board), full);
        let board = board.unwrap_or_else(PoisonError::into_inner);
        (!board.stopped).then_some(board.taken)
    }

    fn load(&self, index: u64, job: Result<J, String>) -> (u64, Outcome<J, B, E>) {
        let outcome = job.and_then(|job| {
            // A failed job is dropped in here too, as its `drop` may panic as well.
            catch(move || (self.load)(&job).map(|batch| (job, batch)))
        });
        let outcome = match outcome {
            Ok(Ok(loaded)) => Ok(loaded),
            Ok(Err(cause)) => Err(LoaderError::Load { index, cause }),
            Err(message) => Err(LoaderError::Panicked { index, message }),
        };
        (index, outcome)
    }

    /// Without workers: takes and loads the next job on the caller's thread.
    pub(super) fn load_next(&self) -> Option<Outcome<J, B, E>> {
        let index = lock(&self.board).taken;
        let job = catch(|| lock(&self.jobs).next()).transpose()?;
        lock(&self.board).taken += 1;
        Some(self.load(index, job).1)
    }

    /// With workers: waits until the batch that is due is on the board.
    pub(super) fn wait_for_next(&self, timeout: Duration) -> Option<Outcome<J, B, E>> {
        let pending = |board: &mut Board<J, B, E>| {
            !board.is_over() && !board.finished.contains_key(&board.given)
        };
        let waited = self
            .changed
            .wait_timeout_while(lock(&self.board), timeout, pending);
        let (mut board, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        let index = board.given;
        if waited.timed_out() {
            board.overdue = true;
            return Some(Err(LoaderError::Deadline { index, timeout }));
        }
        // Nothing is there only where the run is over.
        let outcome = board.finished.remove(&index)?;
        board.given += 1;
        drop(board);
        self.room.notify_all();
        Some(outcome)
    }

    /// Starts no further job and waits for the workers to end; whether they all have. A batch in hand may take the usual
    /// time, or none if it is overdue already.
    pub(super) fn stop(&self, timeout: Duration) -> bool {
        let mut board = lock(&self.board);
        board.stopped = true;
        self.room.notify_all();
        let patience = if board.overdue {
            Duration::ZERO
        } else {
            timeout
        };
        let busy = |board: &mut Board<J, B, E>| board.live > 0;
        let waited = self.changed.wait_timeout_while(board, patience, busy);
        let (board, _) = waited.unwrap_or_else(PoisonError::into_inner);
        board.live == 0
    }
}

/// Counts a worker as live until it ends, however it ends.
pub(super) struct Live<J, B, E: Display> {
    shared: Arc<Shared<J, B, E>>,
}

impl<J, B, E: Display> Live<J, B, E> {
    pub(super) fn new(shared: Arc<Shared<J, B, E>>) -> Self {
        lock(&shared.board).live += 1;
        Self { shared }
    }

    pub(super) fn work(self) {
        self.shared.work();
    }
}

impl<J, B, E: Display> Drop for Live<J, B, E> {
    fn drop(&mut self) {
        lock(&self.shared.board).live -= 1;
        self.shared.changed.notify_all();
    }
}

/// A poisoned lock is taken all the same: user code runs under `jobs` only, where panics are caught.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs user code; its panic becomes a text.
fn catch<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    // What the code left half done stays behind its own locks, and no further job is started after a panic.
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| panic_text(&*panic))
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a text".to_owned())
}
