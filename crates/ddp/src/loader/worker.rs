//! State shared by the workers: the list of jobs, the loading function and the stop flag.

use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Mutex, PoisonError};

use super::LoaderError;
use crate::panic_text::panic_text;

/// The result of a job.
pub(super) type Outcome<J, B, E> = Result<(J, B), LoaderError<E>>;

type Load<J, B, E> = dyn Fn(&J) -> Result<B, E> + Send + Sync;

/// The source of the workers' jobs.
pub(super) struct Source<J, B, E: Display> {
    /// Locked by the worker that takes the next job, even while it waits for room.
    list: Mutex<List<J>>,
    load: Box<Load<J, B, E>>,
    /// Whether to start no further job.
    is_stopped: AtomicBool,
}

struct List<J> {
    jobs: Box<dyn Iterator<Item = J> + Send>,
    /// The index of the next job.
    next: u64,
    /// One message per job that may be taken; bounds the memory.
    room: Receiver<()>,
}

impl<J, B, E: Display> Source<J, B, E> {
    pub(super) fn new(
        jobs: Box<dyn Iterator<Item = J> + Send>,
        load: Box<Load<J, B, E>>,
        room: Receiver<()>,
    ) -> Self {
        let next = 0;
        Self {
            list: Mutex::new(List { jobs, next, room }),
            load,
            is_stopped: AtomicBool::new(false),
        }
    }

    /// A worker's loop: wait for room, load the next job, send the outcome. The wait has no deadline; it ends with the loader
    /// at the latest.
    pub(super) fn work(&self, outcomes: &Sender<(u64, Outcome<J, B, E>)>) {
        while let Some((index, outcome)) = self.load_with(|list| list.room.recv().is_ok()) {
            // A loader that has given up no longer receives.
            let _ = outcomes.send((index, outcome));
        }
    }

    /// Loads the next job on the caller's thread.
    pub(super) fn load_next(&self) -> Option<(u64, Outcome<J, B, E>)> {
        self.load_with(|_| true)
    }

    /// Starts no further job.
    pub(super) fn stop(&self) {
        self.is_stopped.store(true, Ordering::SeqCst);
    }

    fn load_with(
        &self,
        has_room: impl FnOnce(&List<J>) -> bool,
    ) -> Option<(u64, Outcome<J, B, E>)> {
        let (index, job) = self.take(has_room)?;
        let outcome = job.and_then(|job| {
            // The closure also drops a failed job, because its `drop` may panic too.
            catch(move || (self.load)(&job).map(|batch| (job, batch)))
        });
        let outcome = match outcome {
            Ok(Ok(loaded)) => Ok(loaded),
            Ok(Err(cause)) => Err(LoaderError::Load { index, cause }),
            Err(message) => Err(LoaderError::Panicked { index, message }),
        };
        if outcome.is_err() {
            self.stop();
        }
        Some((index, outcome))
    }

    fn take(&self, has_room: impl FnOnce(&List<J>) -> bool) -> Option<(u64, Result<J, String>)> {
        // The lock cannot be poisoned: user code runs under it, but its panics are caught.
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        if !has_room(&list) || self.is_stopped.load(Ordering::SeqCst) {
            return None;
        }
        let job = catch(|| list.jobs.next()).transpose();
        // No job after the last one, nor after an iterator that panicked.
        if !matches!(job, Some(Ok(_))) {
            self.stop();
        }
        let index = list.next;
        list.next += 1;
        job.map(|job| (index, job))
    }
}

/// Runs user code and returns a panic as text.
fn catch<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    // Half-updated state stays behind the user code's own locks, and no job starts after a panic.
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| message(&*panic))
}

/// The message of a panic.
pub(super) fn message(panic: &(dyn Any + Send)) -> String {
    panic_text(panic)
        .unwrap_or("a panic without a text")
        .to_owned()
}
