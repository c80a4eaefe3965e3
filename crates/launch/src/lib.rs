//! Starts the ranks of a job on this machine, watches them, and says which one failed first and why.
//!
//! [`run`] starts `nproc` processes of one program with torchrun's environment, hosts their store and their job page,
//! and returns when nothing of the job is left:
//!
//! - each rank leads its own process group and dies with the launcher, even when that is killed with SIGKILL; what the
//!   ranks have started is found and ended too (`orphans.rs`, `watchdog.rs` say exactly what is covered);
//! - the launcher sees a rank's end at once (pidfd) and tells the others through the job page, so that a collective
//!   fails in milliseconds instead of at its deadline;
//! - one cause is reported: the first failure in time, never a rank that failed because of another (`judge.rs`);
//! - SIGINT, SIGTERM, SIGHUP and SIGQUIT stop the job in an orderly way, a second one at once;
//! - every rank's output goes to its own files and, as whole lines, to the console, through bounded memory.
//!
//! ```no_run
//! use paceline_launch::{Job, run};
//! use paceline_rendezvous::token::Token;
//!
//! let mut job = Job::new("./train", 4, Token::generate()?);
//! job.log_dir = Some("logs".into());
//! eprintln!("{}", job.plan()?);
//! let outcome = run(job)?;
//! if let Some(failure) = &outcome.failure {
//!     eprintln!("{failure}");
//! }
//! std::process::exit(outcome.exit_code().into());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(not(target_os = "linux"))]
compile_error!("paceline-launch needs Linux: pidfd, child subreaper, parent death signal");

mod command;
mod crew;
mod error;
mod error_file;
mod job;
pub mod judge;
mod marked;
mod orphans;
mod output;
mod plan;
mod process;
mod report;
mod signals;
mod supervise;
mod time;
mod watchdog;
mod worker;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use paceline_rendezvous::env;
use paceline_rendezvous::page::JobPage;
use paceline_rendezvous::store::{Server, ServerOptions};

pub use error::LaunchError;
pub use job::{Console, Job, NPROC_MAX, StopMode};
pub use output::{
    DEFAULT_FILE_BYTES_MAX, FOLD_WINDOW, LineFilter, LogFormat, LogOptions, OptionError,
    PrefixTemplate, RankFilter, RunFolder, StreamMap,
};
pub use plan::{Plan, THREAD_VARIABLES, Threads};
pub use report::{Failure, FailureKind, Outcome, RankError};

use crew::{Crew, Shared};
use orphans::Orphans;
use output::Output;
use signals::Signals;
use supervise::{Seen, Supervisor};
use watchdog::Watchdog;

/// The environment variable by which the job's processes can be recognised: the launcher's pid and start time.
pub const MARK_VARIABLE: &str = "PACELINE_LAUNCHER";

/// A dozen launchers one inside the other; a longer value is not one of ours.
const OUTER_MARK_BYTES_MAX: usize = 256;

/// What the ranks have left behind has this long between SIGTERM and SIGKILL.
const ORPHAN_GRACE: Duration = Duration::from_secs(2);

/// Runs a job and returns when nothing of it is left.
///
/// While it runs, this process handles the four stopping signals and is a child subreaper; both are put back. It runs
/// one job at a time and must not start other children from other threads meanwhile: a child that appears during
/// the job is taken for the job's and ended with it.
///
/// *Errors* - only what keeps a job from starting; then nothing is left running. A job that fails is an [`Outcome`].
pub fn run(job: Job) -> Result<Outcome, LaunchError> {
    let _only_job = OnlyJob::begin()?;
    let plan = job.plan()?;
    let mut output = Output::open(&job, job.restart_count)?;
    let page = JobPage::create_memfd(job.nproc)?;
    let options = ServerOptions {
        tls: env::asks_for_tls(&|name| job.variable(name))?,
        ..ServerOptions::default()
    };
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let store = Server::bind_with(addr, &job.token, options)?;
    let signals = Signals::catch().map_err(LaunchError::system("sigaction"))?;
    let mark = mark();
    let watchdog = Watchdog::start(&format!("{MARK_VARIABLE}={mark}"))?;
    // After the watchdog, so that it counts as a child that is not the job's.
    let orphans = Orphans::adopt()?;

    let started = Instant::now();
    let shared = Shared {
        page: &page,
        store: store.addr(),
        mark: &mark,
        watchdog: &watchdog,
    };
    let mut crew = match Crew::start(&job, &plan, &shared, &mut output) {
        Ok(crew) => crew,
        Err(error) => {
            orphans.end(Duration::ZERO);
            return Err(error);
        }
    };
    let mut supervisor = Supervisor {
        job: &job,
        crew: &mut crew,
        page: &page,
        signals: &signals,
        watchdog: &watchdog,
        orphans: &orphans,
        started,
        seen: Seen::default(),
    };
    supervisor.run();
    let seen = supervisor.seen;

    let orphan_grace = if seen.killed {
        Duration::ZERO
    } else {
        job.grace.min(ORPHAN_GRACE)
    };
    let left_behind = orphans.end(orphan_grace);
    // One that hung in the kernel may have ended by now.
    crew.reap(started.elapsed(), &watchdog, |_| true);
    let finished = output.finish(&signals);
    let failure = seen
        .failure
        .map(|failure| complete(failure, &crew, &finished));
    let mut notes = seen.notes;
    notes.extend(finished.notes);
    let mut outcome = Outcome {
        failure,
        stopped_by: seen.stopped_by,
        elapsed: started.elapsed(),
        plan,
        left_behind,
        notes,
    };
    outcome
        .notes
        .extend(error_file::write(&job, job.restart_count, &outcome));
    Ok(outcome)
}

/// Names this process for good: no other has had the same number since the same tick of the clock. A launcher that
/// runs inside another's job puts its name behind the other's, so that its ranks belong to both.
fn mark() -> String {
    let pid = std::process::id();
    let own = format!(
        "{pid}:{}",
        process::Stat::read(pid).map_or(0, |stat| stat.started)
    );
    match std::env::var(MARK_VARIABLE) {
        Ok(outer) if !outer.is_empty() && outer.len() < OUTER_MARK_BYTES_MAX => {
            format!("{outer},{own}")
        }
        _ => own,
    }
}

/// Adds what is known only when all is over.
fn complete(failure: Failure, crew: &Crew, finished: &output::Finished) -> Failure {
    let rank = failure.rank;
    let suffered = |other: &usize| {
        *other != rank
            && !crew.states[*other]
                .exit
                .is_some_and(|exit| exit.how.is_success())
    };
    let said = finished.last_words(failure.local_rank);
    Failure {
        error: said.error,
        last_lines: said.lines,
        log: said.log,
        victims: (0..crew.states.len()).filter(suffered).collect(),
        ..failure
    }
}

/// Signal handling and orphans belong to the whole process, so it runs one job at a time.
#[derive(Debug)]
struct OnlyJob;

static IS_RUNNING: AtomicBool = AtomicBool::new(false);

impl OnlyJob {
    fn begin() -> Result<Self, LaunchError> {
        if IS_RUNNING.swap(true, Ordering::AcqRel) {
            Err(LaunchError::Busy)
        } else {
            Ok(Self)
        }
    }
}

impl Drop for OnlyJob {
    fn drop(&mut self) {
        IS_RUNNING.store(false, Ordering::Release);
    }
}
