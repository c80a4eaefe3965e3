//! Loads batches ahead of training on named threads, hands them out in order, and measures how long training waited.

mod worker;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io;
use std::iter::FusedIterator;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use worker::{Outcome, Source, message};

/// How a [`Loader`] works ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Threads that load; with 0, `next` loads on the caller's thread.
    pub workers: usize,
    /// Loaded batches that may wait, besides the one that each worker is loading.
    pub queue: usize,
    /// The longest wait for one batch; not limited without workers.
    pub timeout: Duration,
}

impl Default for LoaderOptions {
    /// Two workers, two waiting batches, five minutes: longer than any reasonable batch takes, short enough not to lose a
    /// night.
    fn default() -> Self {
        Self {
            workers: 2,
            queue: 2,
            timeout: Duration::from_secs(300),
        }
    }
}

/// Why there is no further batch.
///
/// `index` counts the jobs of this loader from 0. The message includes the loading function's own error, which only needs
/// [`Display`].
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum LoaderError<E: Display> {
    /// The loading function returned an error.
    #[error("batch {index} could not be loaded: {cause}")]
    Load {
        /// The job.
        index: u64,
        /// The loading function's error.
        cause: E,
    },
    /// The loading function, or the iterator of jobs, panicked.
    #[error("loading batch {index} panicked: {message}")]
    Panicked {
        /// The job.
        index: u64,
        /// The panic's message.
        message: String,
    },
    /// The batch was not ready in time.
    #[error("batch {index} was not loaded within {timeout:?}")]
    Deadline {
        /// The job.
        index: u64,
        /// The time limit.
        timeout: Duration,
    },
    /// A worker thread could not be started.
    #[error("thread {name} could not be started: {source}")]
    Spawn {
        /// Its name.
        name: String,
        /// The system's reason.
        source: io::Error,
    },
}

impl<E: Display> LoaderError<E> {
    /// Advice, if there is any.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Load { .. } => None,
            Self::Panicked { .. } => {
                Some("the thread's own panic message and backtrace are on stderr".to_owned())
            }
            Self::Deadline { .. } => {
                Some("check that the storage responds, or raise the loader's timeout".to_owned())
            }
            Self::Spawn { .. } => {
                Some("use fewer workers, or raise the limit on threads (ulimit -u)".to_owned())
            }
        }
    }
}

paceline_rendezvous::debug_with_hint!(LoaderError<E: Display>);

/// An iterator of loaded batches: `(job, batch)` in job order, then the first error, if any.
///
/// No job starts after one has failed, but earlier batches are still handed out. Dropping the loader lets the workers finish
/// their current batch and joins them.
///
/// *Cost*: memory for at most `workers + queue` batches besides the one handed out.
/// *Errors*: `Load`, `Panicked`, `Deadline`; each ends the iteration.
///
/// ```
/// # use paceline_ddp::loader::{Loader, LoaderOptions};
/// let load = |path: &&str| path.parse::<u32>();
/// let loader = Loader::new(LoaderOptions::default(), ["1", "2", "x"].into_iter(), load)?;
/// let texts: Vec<_> = loader
///     .map(|item| match item {
///         Ok((job, batch)) => format!("{job} is {batch}"),
///         Err(error) => error.to_string(),
///     })
///     .collect();
/// let error = "batch 2 could not be loaded: invalid digit found in string";
/// assert_eq!(texts, ["1 is 1", "2 is 2", error]);
/// # Ok::<(), paceline_ddp::loader::LoaderError<std::num::ParseIntError>>(())
/// ```
pub struct Loader<J, B, E: Display> {
    source: Arc<Source<J, B, E>>,
    /// One message per job that a worker may take; `None` once no more may start.
    room: Option<Sender<()>>,
    /// Disconnects once all workers have ended.
    outcomes: Receiver<(u64, Outcome<J, B, E>)>,
    /// Outcomes that arrived before their turn.
    early: BTreeMap<u64, Outcome<J, B, E>>,
    /// The index of the next batch.
    next: u64,
    workers: Vec<JoinHandle<()>>,
    options: LoaderOptions,
    waited: Duration,
    /// The iteration is over.
    ended: bool,
    /// The wait for a batch has timed out.
    overdue: bool,
}

impl<J, B, E> Loader<J, B, E>
where
    J: Send + 'static,
    B: Send + 'static,
    E: Display + Send + 'static,
{
    /// Starts the workers, which begin loading at once.
    ///
    /// *Errors*: `Spawn`.
    pub fn new(
        options: LoaderOptions,
        jobs: impl Iterator<Item = J> + Send + 'static,
        load: impl Fn(&J) -> Result<B, E> + Send + Sync + 'static,
    ) -> Result<Self, LoaderError<E>> {
        let (room, allowed) = channel();
        for _ in 0..options.workers.saturating_add(options.queue) {
            // The receiver is in `allowed`.
            let _ = room.send(());
        }
        let (sender, outcomes) = channel();
        let mut loader = Self {
            source: Arc::new(Source::new(Box::new(jobs), Box::new(load), allowed)),
            room: Some(room),
            outcomes,
            early: BTreeMap::new(),
            next: 0,
            workers: Vec::new(),
            options,
            waited: Duration::ZERO,
            ended: false,
            overdue: false,
        };
        for index in 0..options.workers {
            let name = format!("loader/{index}");
            let (source, sender) = (loader.source.clone(), sender.clone());
            let worker = thread::Builder::new()
                .name(name.clone())
                .spawn(move || source.work(&sender));
            // On failure, dropping `loader` stops the workers already started.
            let worker = worker.map_err(|source| LoaderError::Spawn { name, source })?;
            loader.workers.push(worker);
        }
        Ok(loader)
    }

    /// The time that the caller has spent in `next` so far: the loading time that training did not hide. Without workers,
    /// that is all of it.
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// Waits for the next batch; `None` once there are no more.
    fn receive(&mut self) -> Option<Outcome<J, B, E>> {
        if self.options.workers == 0 {
            return self.source.load_next().map(|(_, outcome)| outcome);
        }
        let (asked, timeout, index) = (Instant::now(), self.options.timeout, self.next);
        while !self.early.contains_key(&index) {
            let left = timeout.saturating_sub(asked.elapsed());
            match self.outcomes.recv_timeout(left) {
                Ok((found, outcome)) => drop(self.early.insert(found, outcome)),
                Err(RecvTimeoutError::Disconnected) => {
                    let mut workers = self.workers.drain(..);
                    let panic = workers.find_map(|worker| worker.join().err())?;
                    let message = message(&*panic);
                    return Some(Err(LoaderError::Panicked { index, message }));
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.overdue = true;
                    return Some(Err(LoaderError::Deadline { index, timeout }));
                }
            }
        }
        self.next += 1;
        // Fails harmlessly once the workers have ended.
        let _ = self.room.as_ref().map(|room| room.send(()));
        self.early.remove(&index)
    }
}

impl<J, B, E> Iterator for Loader<J, B, E>
where
    J: Send + 'static,
    B: Send + 'static,
    E: Display + Send + 'static,
{
    type Item = Result<(J, B), LoaderError<E>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let asked = Instant::now();
        let outcome = self.receive();
        self.waited += asked.elapsed();
        self.ended = !matches!(outcome, Some(Ok(_)));
        outcome
    }
}

impl<J, B, E> FusedIterator for Loader<J, B, E>
where
    J: Send + 'static,
    B: Send + 'static,
    E: Display + Send + 'static,
{
}

impl<J, B, E: Display> Drop for Loader<J, B, E> {
    fn drop(&mut self) {
        self.source.stop();
        drop(self.room.take());
        // A batch being loaded may take the usual time, or none if it is already overdue.
        let patience = match self.overdue {
            true => Duration::ZERO,
            false => self.options.timeout,
        };
        let asked = Instant::now();
        loop {
            let left = patience.saturating_sub(asked.elapsed());
            match self.outcomes.recv_timeout(left) {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => break,
                // The loading function hangs, and joining its thread would hang the caller too. The thread ends when the
                // function returns.
                Err(RecvTimeoutError::Timeout) => return,
            }
        }
        for worker in self.workers.drain(..) {
            // A worker's panic was already returned as an error, or the caller never asked for that batch.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests;
