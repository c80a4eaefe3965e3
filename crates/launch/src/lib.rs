//! Starts the ranks of a job, on this machine or together with the launchers of other nodes, watches them, starts them
//! again, and says which one failed first and why.
//!
//! [`run`] starts `nproc` processes of one program with torchrun's environment, hosts their store and their job page,
//! and returns when nothing of the job is left:
//!
//! - each rank leads its own session, as under torchrun, and dies with the launcher, even when that is killed with SIGKILL; what the
//!   ranks have started is found and ended too (`orphans.rs`, `watchdog.rs` say exactly what is covered);
//! - the launcher sees a rank's end at once (pidfd) and tells the others through the job page, so that a collective
//!   fails in milliseconds instead of at its deadline;
//! - one cause is reported: the first failure in time, never a rank that failed because of another (`judge.rs`);
//! - ranks that neither print nor compute for a while are named, with where their threads wait (`stall.rs`);
//! - SIGINT, SIGTERM, SIGHUP and SIGQUIT stop the job in an orderly way, a second one at once; SIGUSR1 asks it to stop,
//!   without a deadline; ranks that look at the job page save and stop in the same step (`stop.rs`);
//! - after a failure the whole job is started again as often as [`Job::max_restarts`] says (`solo.rs`);
//! - with [`Recovery::Live`] the ranks that are left go on in place of that, in the same processes (`recovery.rs`);
//! - with [`Job::cluster`] it is one node's agent of a job on several (`elastic.rs`, `cluster.rs`);
//! - [`Remotes`] starts the launchers of other hosts through ssh, from one terminal (`remote.rs`);
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

#![warn(clippy::print_stderr)] // it panics where the terminal is gone

#[cfg(not(target_os = "linux"))]
compile_error!("paceline-launch needs Linux: pidfd, child subreaper, parent death signal");

mod bell;
mod binding;
mod cluster;
mod command;
mod contained;
mod devices;
mod elastic;
mod error;
mod error_file;
mod job;
pub mod judge;
mod memory;
mod memory_folder;
mod notice;
mod orphans;
mod output;
mod plan;
mod recovery;
mod remote;
mod report;
mod round;
mod signals;
mod solo;
mod stall;
mod stop;
mod supervise;
mod sweep;
mod time;
mod watch;
mod watchdog;
mod worker;
mod workers;

use std::sync::atomic::{AtomicBool, Ordering};

use paceline_rendezvous::env;
use paceline_rendezvous::process::Stat;
use paceline_words::say;

pub use binding::{BindError, Binding, Bound, Cpus, NotABinding, NotCpus};
pub use cluster::is_job_at;
pub use command::find as find_program;
pub use contained::Contained;
pub use error::LaunchError;
pub use job::{Cluster, Console, Job, NPROC_MAX, RunAs, StaticPlace, StoreKind, shared_token};
pub use memory_folder::is_memory_in_use;
pub use notice::{mark_lines, marked};
pub use output::{
    DEFAULT_FILE_BYTES_MAX, FOLD_WINDOW, LineFilter, LogFormat, LogOptions, OptionError,
    PrefixTemplate, RankFilter, RunFolder, StreamMap,
};
pub use plan::{Plan, THREAD_VARIABLES, Threads};
pub use recovery::{NotARecovery, Recovery};
pub use remote::{Answer, ENDS, READY, Remote, RemoteEnd, Remotes};
pub use report::{AlsoFailed, Failure, FailureKind, Lost, Node, Outcome, RankError};
pub use stall::{OnStall, StallOptions};
pub use stop::{HandledSignals, SignalNameError};
pub use watch::{RankEvent, RankWatch};

use memory_folder::MemoryFolder;
use orphans::Orphans;
use round::Launcher;
use signals::Signals;
use watchdog::Watchdog;

/// The environment variable by which the job's processes can be recognised: the launcher's pid and start time.
pub const LAUNCHER_VARIABLE: &str = "PACELINE_LAUNCHER";

/// A dozen launchers one inside the other; a longer value is not one of ours.
const OUTER_ID_BYTES_MAX: usize = 256;

/// Runs a job and returns when nothing of it is left.
///
/// While it runs, this process handles [`Job::signals`] and is a child subreaper; both are put back. It runs
/// one job at a time and must not start other children from other threads meanwhile: a child that appears during
/// the job is taken for the job's and ended with it.
///
/// *Errors*: only what keeps a job from starting; then nothing is left running. A job that fails is an [`Outcome`].
pub fn run(mut job: Job) -> Result<Outcome, LaunchError> {
    if job.recovery == Recovery::None {
        job.max_restarts = 0;
    }
    let _only_job = OnlyJob::begin()?;
    let plan = job.plan()?;
    let tls = env::asks_for_tls(&|name| job.variable(name))?;
    let signals = Signals::catch(&job.signals).map_err(LaunchError::system("sigaction"))?;
    let id = launcher_id();
    let memory = MemoryFolder::of_this_job();
    let folder = memory.as_ref().map(MemoryFolder::path);
    let watchdog = Watchdog::start(&format!("{LAUNCHER_VARIABLE}={id}"), folder)?;
    // After the watchdog, so that it counts as a child that is not the job's.
    let orphans = Orphans::adopt()?;
    let launcher = Launcher {
        job: &job,
        plan: &plan,
        tls,
        id: &id,
        memory_folder: folder.and_then(|path| path.to_str().ok()),
        signals: &signals,
        watchdog: &watchdog,
        orphans: &orphans,
    };
    let mut outcome = match &job.cluster {
        None => solo::run(&launcher)?,
        Some(cluster) => cluster::run(&launcher, cluster)?,
    };
    // While the watchdog lives.
    drop(memory);
    if let Some(failure) = &outcome.failure
        && let Some(why) = failure.is_for_good()
        && outcome.restarts < job.max_restarts
    {
        let (lang, why) = (job.lang, why.of(job.lang));
        let note = say!(
            lang,
            "{why}, so the job is not started again",
            "{why}: 작업을 다시 시작하지 않음"
        );
        outcome.notes.push(note);
    }
    let attempt = job.restart_count + outcome.restarts;
    outcome
        .notes
        .extend(error_file::write(&job, attempt, &outcome));
    // Where rank 0 has the console to itself, it says so itself.
    if let (None, Some(stop), Console::Prefixed) = (&outcome.failure, outcome.stop(), job.console) {
        notice::line(stop.text(job.lang));
    }
    Ok(outcome)
}

/// Names this process for good: no other has had the same number since the same tick of the clock. A launcher that
/// runs inside another's job puts its name behind the other's, so that its ranks belong to both.
fn launcher_id() -> String {
    let pid = std::process::id();
    let own = format!("{pid}:{}", Stat::read(pid).map_or(0, |stat| stat.started));
    match std::env::var(LAUNCHER_VARIABLE) {
        Ok(outer) if !outer.is_empty() && outer.len() < OUTER_ID_BYTES_MAX => {
            format!("{outer},{own}")
        }
        _ => own,
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
