//! What the process tests share: jobs made of shell scripts, and processes watched by pidfd.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

pub mod launcher;
pub mod node;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use paceline_launch::{Job, Outcome};
use paceline_rendezvous::token::Token;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags};

/// The helper program, see `launch_probe.rs`.
pub const PROBE: &str = env!("CARGO_BIN_EXE_launch_probe");

/// `nproc` shells that run `script`; `$PROBE` is the helper program.
pub fn job(script: &str, nproc: usize) -> Job {
    let mut job = Job::new("sh", nproc, Token::generate().expect("randomness"));
    job.args = vec!["-c".into(), script.into()];
    job.env = vec![("PROBE".to_owned(), PROBE.to_owned())];
    job.report_time = Duration::from_millis(300);
    job.grace = Duration::from_secs(10);
    job
}

/// A process has room for one job at a time, and takes its new children for the job's.
pub fn turn() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a job when it is its turn.
pub fn run(job: Job) -> Outcome {
    let _turn = turn();
    paceline_launch::run(job).expect("the job starts")
}

/// A process of which we know whether it has ended, whatever its number is used for later.
#[derive(Debug)]
pub struct Watched {
    pub pid: i32,
    pidfd: Option<OwnedFd>,
}

impl Watched {
    /// A process that is gone already is fine: it has ended.
    pub fn new(pid: i32) -> Self {
        let raw = Pid::from_raw(pid).expect("a pid");
        Self {
            pid,
            pidfd: rustix::process::pidfd_open(raw, PidfdFlags::empty()).ok(),
        }
    }

    pub fn ends_within(&self, limit: Duration) -> bool {
        let Some(pidfd) = &self.pidfd else {
            return true;
        };
        let mut polled = [PollFd::new(pidfd, PollFlags::IN)];
        let limit = Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: limit.subsec_nanos().into(),
        };
        rustix::event::poll(&mut polled, Some(&limit)).expect("poll") > 0
    }

    pub fn is_alive(&self) -> bool {
        !self.ends_within(Duration::ZERO)
    }
}

/// Where a rank's standard output goes, in a job's log folder.
pub fn log(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("attempt_0/{rank}/stdout.log"))
}

/// The file's lines.
pub fn lines(file: &Path) -> Vec<String> {
    let text =
        std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    text.lines().map(str::to_owned).collect()
}

/// The numbers in a line such as `pids 12 13`.
pub fn numbers(line: &str) -> Vec<i32> {
    line.split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect()
}
