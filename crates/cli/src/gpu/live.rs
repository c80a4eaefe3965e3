//! What devices and jobs do, read again and again on two threads, for `gpu top` and `gpu serve`.
//!
//! A driver that fails keeps whoever asks it, sometimes for ever, and that is when people look. So nobody waits for a look: the
//! newest one is there to be taken, with how long the next one has been under way.

mod devices;
mod jobs;
#[cfg(test)]
pub(crate) mod tests;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use paceline_gpu::places::Places;
use paceline_gpu::sample::DeviceSample;
use paceline_gpu::snapshot::Reading;
use paceline_rendezvous::page::RunningJob;
use paceline_usage::idle::Idleness;
use serde::Serialize;

use self::devices::DeviceWatch;
use self::jobs::JobWatch;

/// How long to wait for the end of a look that is not needed any more.
const END_TIMEOUT: Duration = Duration::from_millis(300);

/// The devices at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Devices {
    /// Time since looking began.
    pub(crate) at: Duration,
    /// Name of the machine.
    pub(crate) host: String,
    /// Version of the driver.
    pub(crate) driver: Option<String>,
    /// Why there is nothing to see.
    pub(crate) trouble: Option<String>,
    /// The devices in the driver's order.
    pub(crate) devices: Vec<Device>,
}

/// A device: what it is called, and what it does.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Device {
    pub(crate) name: Reading<String>,
    pub(crate) uuid: Reading<String>,
    /// Whether it does nothing, where that can be told.
    #[serde(flatten)]
    pub(crate) idleness: Option<Idleness>,
    #[serde(flatten)]
    pub(crate) now: DeviceSample,
}

/// The jobs of this machine at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Jobs {
    /// Time since looking began.
    pub(crate) at: Duration,
    pub(crate) jobs: Vec<Job>,
}

/// A job, and what its ranks use.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Job {
    /// What it is called; no two jobs are called the same.
    pub(crate) label: String,
    pub(crate) running: RunningJob,
    /// In the order of its ranks.
    pub(crate) uses: Vec<RankUse>,
}

/// What a rank uses.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct RankUse {
    /// Processor time since it began, of all that it started too.
    pub(crate) cpu: Reading<Duration>,
    /// Resident memory of the same.
    pub(crate) resident_bytes: Reading<u64>,
    /// The driver's numbers of the devices that they hold.
    pub(crate) devices: Vec<u32>,
}

/// Two threads that look; they end when it is dropped, or when the driver lets them.
#[derive(Debug)]
pub(crate) struct Feed {
    began: Instant,
    devices: Arc<Board<Devices>>,
    jobs: Arc<Board<Jobs>>,
    threads: Vec<JoinHandle<()>>,
}

/// The newest of what one thread has seen.
#[derive(Debug)]
struct Board<T> {
    state: Mutex<BoardState<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct BoardState<T> {
    latest: Option<Arc<T>>,
    looking_since: Option<Instant>,
    is_wanted: bool,
    has_ended: bool,
}

/// The newest look, and for how long the next one has been under way.
#[derive(Debug)]
pub(crate) struct Newest<T> {
    pub(crate) latest: Option<Arc<T>>,
    pub(crate) looking_for: Option<Duration>,
}

impl Feed {
    /// Begins to look, every `interval`.
    ///
    /// *Errors*: the system starts no thread.
    pub(crate) fn start(places: &Places, interval: Duration) -> std::io::Result<Self> {
        let began = Instant::now();
        let (devices, jobs) = (Arc::new(Board::new()), Arc::new(Board::new()));
        let (device_places, device_board) = (places.clone(), devices.clone());
        let watch_devices = move || {
            let mut watch = DeviceWatch::new(device_places, interval);
            device_board.fill(interval, || watch.look(began.elapsed()));
        };
        let (root, held, job_board) = (places.root.clone(), devices.clone(), jobs.clone());
        let watch_jobs = move || {
            let mut watch = JobWatch::new(&root);
            job_board.fill(interval, || {
                watch.look(began.elapsed(), held.newest().latest.as_deref())
            });
        };
        let start = |name: &str, run: Box<dyn FnOnce() + Send>| {
            thread::Builder::new().name(name.to_owned()).spawn(run)
        };
        Ok(Self {
            threads: vec![
                start("gpu/devices", Box::new(watch_devices))?,
                start("gpu/jobs", Box::new(watch_jobs))?,
            ],
            began,
            devices,
            jobs,
        })
    }

    /// Time since looking began.
    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    pub(crate) fn devices(&self) -> Newest<Devices> {
        self.devices.newest()
    }

    pub(crate) fn jobs(&self) -> Newest<Jobs> {
        self.jobs.newest()
    }

    /// Waits until both have looked later than `at`, for `timeout` at most.
    pub(crate) fn wait_later_than(&self, at: Duration, timeout: Duration) {
        let until = Instant::now() + timeout;
        self.devices.wait(until, |state| {
            state.latest.as_ref().is_some_and(|look| look.at > at)
        });
        self.jobs.wait(until, |state| {
            state.latest.as_ref().is_some_and(|look| look.at > at)
        });
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.devices.unwant();
        self.jobs.unwant();
        let until = Instant::now() + END_TIMEOUT;
        let ended = [
            self.devices.wait(until, |state| state.has_ended),
            self.jobs.wait(until, |state| state.has_ended),
        ];
        for (thread, has_ended) in self.threads.drain(..).zip(ended) {
            // One that the driver keeps is left behind; it holds nothing that others need.
            if has_ended {
                let _ = thread.join();
            }
        }
    }
}

impl<T> Board<T> {
    fn new() -> Self {
        let state = BoardState {
            latest: None,
            looking_since: None,
            is_wanted: true,
            has_ended: false,
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// Looks every `interval` until it is dropped. A look that takes longer is followed by the next at once.
    fn fill(&self, interval: Duration, mut look: impl FnMut() -> T) {
        // Even if a look panics: nothing may wait for this thread then.
        let _end = End(self);
        loop {
            let began = Instant::now();
            self.lock().looking_since = Some(began);
            let seen = Arc::new(look());
            let mut state = self.lock();
            state.latest = Some(seen);
            state.looking_since = None;
            drop(state);
            self.changed.notify_all();
            if self.wait(began + interval, |state| !state.is_wanted) {
                return;
            }
        }
    }

    fn newest(&self) -> Newest<T> {
        let state = self.lock();
        Newest {
            latest: state.latest.clone(),
            looking_for: state.looking_since.map(|since| since.elapsed()),
        }
    }

    fn unwant(&self) {
        self.lock().is_wanted = false;
        self.changed.notify_all();
    }

    /// Whether this came true before `until`.
    fn wait(&self, until: Instant, is_so: impl Fn(&BoardState<T>) -> bool) -> bool {
        let left = until.saturating_duration_since(Instant::now());
        let waited = (self.changed).wait_timeout_while(self.lock(), left, |state| !is_so(state));
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        is_so(&state)
    }

    fn lock(&self) -> MutexGuard<'_, BoardState<T>> {
        // Nothing in there can be left half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct End<'a, T>(&'a Board<T>);

impl<T> Drop for End<'_, T> {
    fn drop(&mut self) {
        self.0.lock().has_ended = true;
        self.0.changed.notify_all();
    }
}
