//! Notices that ranks hang: a thread looks at what each rank prints and how much processor time it uses, and says which
//! ones have done neither for a while and what the others do.
//!
//! It looks at this node's ranks only; each node's launcher speaks for its own. Ranks that use Paceline's library have a
//! deadline for every operation and are left to it.

mod judge;
mod sample;
mod stacks;

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_words::Text;
use rustix::pipe::PipeFlags;

use crate::error::LaunchError;
use crate::output::is_at_end;
use crate::worker::wait_readable;
use judge::Watched;
pub(crate) use sample::Subject;

/// Least and greatest time between two looks.
const PACE: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(5)];
/// So many looks fit into the time after which a rank is called stalled.
const LOOKS: u32 = 10;
/// A look is followed by a pause of so many times what it took: a thousandth of a core at most.
const PAUSE_PER_COST: u32 = 1000;
/// Ranks whose threads are listed; hundreds that hang wait for the same few.
const STACKS_OF_RANKS_MAX: usize = 8;
/// At the end the thread has this long. Only a console that takes nothing holds it up.
const ENDS_WITHIN: Duration = Duration::from_secs(1);

/// What is done about ranks that neither print nor compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StallOptions {
    /// How long they have done neither before it is said; `None` never looks.
    pub after: Option<Duration>,
    /// Whether the threads of stalled ranks are listed with where they wait.
    pub stacks: bool,
    /// What follows.
    pub on_stall: OnStall,
}

/// What follows when ranks are stalled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnStall {
    /// One line on standard error.
    #[default]
    Warn,
    /// The job fails, with exit code 4.
    Abort,
}

impl Default for StallOptions {
    /// A line after a minute, without stacks.
    fn default() -> Self {
        Self {
            after: Some(Duration::from_secs(60)),
            stacks: false,
            on_stall: OnStall::Warn,
        }
    }
}

/// Ranks that have stalled, for the report of a job that ends because of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stalled {
    /// The one to blame.
    pub(crate) local_rank: usize,
    /// What all of them have not done, and what the others did.
    pub(crate) why: Text,
}

/// The thread that looks. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Monitor {
    to_abort: Arc<OnceLock<Stalled>>,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    thread: JoinHandle<()>,
    /// Dropped, it tells the thread to end.
    stop: OwnedFd,
    /// At its end when the thread has ended.
    ended: OwnedFd,
}

impl Monitor {
    /// Begins to look at these ranks, of which the first has the number `first_rank` in the job. `launcher_id` is what the
    /// launcher puts into the environment of its children.
    pub(crate) fn start(
        options: StallOptions,
        ranks: Vec<Subject>,
        first_rank: usize,
        launcher_id: &str,
    ) -> Result<Self, LaunchError> {
        let to_abort = Arc::<OnceLock<Stalled>>::default();
        let Some(after) = options.after.filter(|_| !ranks.is_empty()) else {
            return Ok(Self {
                to_abort,
                running: None,
            });
        };
        let pipe =
            || rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(LaunchError::system("pipe"));
        let ((stopped, stop), (ended, alive)) = (pipe()?, pipe()?);
        let look = Look {
            options,
            after,
            ranks,
            first_rank,
            launcher_id: launcher_id.to_owned(),
            to_abort: Arc::clone(&to_abort),
            stopped,
        };
        let run = move || {
            look.run();
            drop(alive);
        };
        let thread = std::thread::Builder::new()
            .name("paceline/stall".to_owned())
            .stack_size(256 * 1024)
            .spawn(run)
            .map_err(LaunchError::system("starting a thread"))?;
        Ok(Self {
            to_abort,
            running: Some(Running {
                thread,
                stop,
                ended,
            }),
        })
    }

    /// The ranks because of which the job is to end, if there are any.
    pub(crate) fn to_abort(&self) -> Option<&Stalled> {
        self.to_abort.get()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let Some(Running {
            thread,
            stop,
            ended,
        }) = self.running.take()
        else {
            return;
        };
        drop(stop);
        wait_readable(&[ended.as_fd()], ENDS_WITHIN);
        // A thread that hangs in a write to a blocked console ends with the process or with the console.
        if thread.is_finished() {
            let _ = thread.join();
        }
    }
}

/// What the thread works on.
struct Look {
    options: StallOptions,
    after: Duration,
    ranks: Vec<Subject>,
    first_rank: usize,
    launcher_id: String,
    to_abort: Arc<OnceLock<Stalled>>,
    stopped: OwnedFd,
}

impl Look {
    fn run(self) {
        let begun = Instant::now();
        let mut watched = Watched::new(self.after, self.ranks.len());
        let pace = (self.after / LOOKS).clamp(PACE[0], PACE[1]);
        let mut wait = Duration::ZERO;
        while !self.is_stopped_within(wait) {
            let (at, used) = (begun.elapsed(), processor_time());
            let depths = watched.depths(at);
            let sample = sample::take(&self.ranks, &depths, at);
            let verdict = watched.judge(sample);
            let cost = processor_time().saturating_sub(used);
            if let Some(stall) = verdict {
                self.tell(&stall);
            }
            let due = watched.due().map(|due| due.saturating_sub(begun.elapsed()));
            let pace = due.map_or(pace, |due| pace.min(due.max(PACE[0])));
            wait = pace.max(cost * PAUSE_PER_COST);
        }
    }

    fn is_stopped_within(&self, wait: Duration) -> bool {
        let until = Instant::now() + wait;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            wait_readable(&[self.stopped.as_fd()], left);
            if is_at_end(&self.stopped) || left.is_zero() {
                return is_at_end(&self.stopped);
            }
        }
    }

    fn tell(&self, stall: &judge::Stall) {
        let why = Text::new(|lang| stall.words(self.first_rank, lang));
        let since = crate::time::utc_before_now(stall.longest());
        let advice = if self.options.stacks {
            ""
        } else {
            "; --stall-after SECONDS shows where they wait"
        };
        write(&format!("stalled since {since}: {why}{advice}\n"));
        if self.options.stacks {
            let tools = stacks::Tools::new(&self.launcher_id, &self.stopped);
            for local_rank in stall.suspects().take(STACKS_OF_RANKS_MAX) {
                let rank = self.first_rank + local_rank;
                write(&stacks::of(rank, self.ranks[local_rank].pid, &tools));
            }
            write(&tools.advice());
        }
        if self.options.on_stall == OnStall::Abort
            && let Some(local_rank) = stall.culprit()
        {
            let _ = self.to_abort.set(Stalled { local_rank, why });
        }
    }
}

/// What this thread has used.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// At once, so that nothing comes between its lines. A closed standard error is no reason to end.
fn write(text: &str) {
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}
