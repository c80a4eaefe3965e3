//! The jobs that run on this machine: finds the pages that processes hold open, and reads them without a way to write.
//!
//! ```text
//! /proc/<pid>/fd/<n> -> "/memfd:paceline-page (deleted)"      any process that this user may look at
//!        | held without being opened: which file is it?       one page = one round of one job on this machine
//!        | opened for reading, checked like an inherited one  page, mapped read-only and kept
//!        +-> its holders: launcher, ranks, their children   told apart by environment, parents and the page's slots
//! ```
//!
//! Any process may have written a page or named a file: every size is bounded, and a page can neither shrink while it is
//! read nor be changed by being read. Holding a page does not make a process a rank.

mod process;

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use self::process::Process;
use super::{Activity, Differences, JobPage, REVOKED, Revocation, Stopped};
use crate::os::{self, Found};
use crate::process::numbers;

/// The target of every link to a page.
const LINK: &str = "/memfd:paceline-page (deleted)";

/// Most pages that are kept; a machine with more rounds at once shows the first ones.
const PAGES_MAX: usize = 256;
/// Most processes of one page; ranks and what they have started.
const HOLDERS_MAX: usize = 65_536;
/// Most processes that are looked at.
const PROCESSES_MAX: usize = 131_072;
/// Most descriptors of one process that are looked at. Ranks inherit a low one.
const DESCRIPTORS_MAX: usize = 1024;
/// Looking through all processes takes at most this part of the time; between two such looks, pages already found are read.
const SEARCH_SHARE: u32 = 50;

/// Finds running jobs and follows them.
///
/// ```
/// use std::path::Path;
/// use std::time::Instant;
/// use paceline_rendezvous::page::Running;
///
/// let mut running = Running::new(Path::new("/"));
/// for job in running.look(Instant::now()) {
///     println!("{}: {} ranks here", job.command, job.ranks.len());
/// }
/// ```
#[derive(Debug)]
pub struct Running {
    proc: PathBuf,
    pages: Vec<Known>,
    search_again_at: Option<Instant>,
}

/// A job's part on this machine.
#[derive(Debug, Clone, PartialEq)]
pub struct RunningJob {
    /// Which page it is: equal as long as the job is not started again, and never that of another page.
    pub page: (u64, u64),
    /// Its launcher; `None` if ranks were started otherwise.
    pub launcher: Option<u32>,
    /// Its name (`--rdzv-id`), if it has one.
    pub name: Option<String>,
    /// The command line of a rank, cut.
    pub command: String,
    /// Ranks of the job on all machines, if its ranks have been told.
    pub world: Option<usize>,
    /// How often it was started again.
    pub restarts: u32,
    /// The newest generation that its ranks have begun: it grows when ranks are lost and the others go on.
    pub generation: u32,
    /// The signal because of which its ranks were asked to stop.
    pub stopping: Option<i32>,
    /// Why it is over, once it is.
    pub revocation: Option<Revocation>,
    /// Its ranks here, by local rank.
    pub ranks: Vec<RunningRank>,
}

/// One rank.
#[derive(Debug, Clone, PartialEq)]
pub struct RunningRank {
    /// Global rank, if it is known.
    pub rank: Option<usize>,
    /// Its process as seen from here; `None` before its start, after its end, and where it cannot be told.
    pub pid: Option<u32>,
    /// Its activity, and since when; `None` for programs that do not report it.
    pub activity: Option<(Activity, Duration)>,
    /// The rank that it blames for its failure.
    pub victim_of: Option<usize>,
    /// Why and where it has stopped, if it was asked to.
    pub stopped: Option<Stopped>,
    /// Addresses of some of its weights in its memory, while it shows them.
    pub weights: Option<Range<u64>>,
    /// The differences between the ranks' weights that it has found.
    pub differences: Differences,
}

#[derive(Debug)]
struct Known {
    identity: (u64, u64),
    page: JobPage,
    holders: Vec<Process>,
}

impl Running {
    /// Looks under `root`, which is `/` unless another machine's or the host's `/proc` lies elsewhere.
    pub fn new(root: &Path) -> Self {
        Self {
            proc: root.join("proc"),
            pages: Vec::new(),
            search_again_at: None,
        }
    }

    /// The jobs now, in the order in which they were found. Only root sees processes of other users.
    ///
    /// *Cost*: some 2 us for every descriptor of every process of this user while it searches, which it does for at most a
    /// 50th of the time; a few microseconds for each rank otherwise.
    pub fn look(&mut self, now: Instant) -> Vec<RunningJob> {
        let proc = self.proc.clone();
        self.look_among(now, || numbers(&proc, PROCESSES_MAX))
    }

    /// The same for the jobs of some processes only. `pids` says which, whenever it searches.
    pub fn look_among(&mut self, now: Instant, pids: impl FnOnce() -> Vec<u32>) -> Vec<RunningJob> {
        if self.search_again_at.is_none_or(|at| now >= at) {
            // On a busy machine a search may take long and cost little.
            let began = os::thread_time();
            self.search(&pids());
            let cost = os::thread_time().saturating_sub(began);
            self.search_again_at = Some(now + cost * SEARCH_SHARE);
        }
        for known in &mut self.pages {
            known.holders.retain(|process| process.lives(&self.proc));
        }
        self.pages.retain(|known| !known.holders.is_empty());
        current(self.pages.iter().filter_map(Known::job).collect())
    }

    /// The activity and the [weights](RunningRank::weights) of a rank at this moment, by its page and its place there.
    pub fn weights_now(&self, page: (u64, u64), slot: usize) -> Option<(Activity, Range<u64>)> {
        let known = self.pages.iter().find(|known| known.identity == page)?;
        let slot = (slot < known.page.slots()).then(|| known.page.slot(slot))?;
        Some((slot.activity()?.0, slot.weights()?))
    }

    /// Finds the holders of each page among these processes now.
    fn search(&mut self, pids: &[u32]) {
        let mut held: HashMap<(u64, u64), Vec<(u32, i32)>> = HashMap::new();
        for &pid in pids {
            let folder = self.proc.join(format!("{pid}/fd"));
            for fd in numbers::<i32>(&folder, DESCRIPTORS_MAX) {
                let link = folder.join(fd.to_string());
                if fs::read_link(&link).is_ok_and(|target| target.as_os_str() == LINK)
                    && let Ok(found) = Found::at(&link)
                    && self.knows(&found)
                {
                    let holders = held.entry(found.identity).or_default();
                    if holders.len() < HOLDERS_MAX {
                        holders.push((pid, fd));
                    }
                }
            }
        }
        let proc = &self.proc;
        for known in &mut self.pages {
            let before = std::mem::take(&mut known.holders);
            let mut before: HashMap<u32, Process> =
                before.into_iter().map(|p| (p.pid, p)).collect();
            // A process's command line and first environment do not change, and need not be read again once it is known
            // to be a rank. Before that, it may have been seen between its fork and its program.
            let process = |(pid, fd)| match before.remove(&pid) {
                Some(process) if process.local_rank.is_some() && process.lives(proc) => {
                    Some(process)
                }
                _ => Process::read(proc, pid, fd),
            };
            let held = held.remove(&known.identity).unwrap_or_default();
            known.holders = held.into_iter().filter_map(process).collect();
        }
    }

    /// Whether this is a page that is kept, from now on if it was not.
    fn knows(&mut self, found: &Found) -> bool {
        let identity = found.identity;
        if self.pages.iter().any(|known| known.identity == identity) {
            return true;
        }
        if self.pages.len() >= PAGES_MAX {
            return false;
        }
        let opened = found.open_to_read().ok();
        let Some(Ok(page)) = opened.map(|fd| JobPage::from_fd_to_read(fd.as_raw_fd())) else {
            return false;
        };
        self.pages.push(Known {
            identity,
            page,
            holders: Vec::new(),
        });
        true
    }
}

/// Drops pages of earlier rounds: those without a living rank whose launcher has another one with ranks.
fn current(mut jobs: Vec<RunningJob>) -> Vec<RunningJob> {
    let lives = |job: &RunningJob| job.ranks.iter().any(|rank| rank.pid.is_some());
    let busy: Vec<u32> = (jobs.iter().filter(|job| lives(job)))
        .filter_map(|job| job.launcher)
        .collect();
    jobs.retain(|job| lives(job) || !job.launcher.is_some_and(|pid| busy.contains(&pid)));
    jobs
}

impl Known {
    /// The job of a page and its holders; `None` if neither its launcher nor any of its ranks lives.
    fn job(&self) -> Option<RunningJob> {
        let ranks: Vec<(RunningRank, Option<&Process>)> = (0..self.page.slots())
            .map(|local_rank| self.rank(local_rank))
            .collect();
        let processes: Vec<&Process> = ranks.iter().filter_map(|(_, process)| *process).collect();
        let launcher = self.launcher(&processes);
        let told = processes.first().copied();
        let command = told.or(launcher)?.command.clone();
        let word = self.page.revoked_word();
        let is_over = word.load(std::sync::atomic::Ordering::Acquire) == REVOKED;
        Some(RunningJob {
            page: self.identity,
            launcher: launcher.map(|process| process.pid),
            name: told.and_then(|process| process.job.clone()),
            command,
            world: told.and_then(|process| process.world),
            restarts: told.map_or(0, |process| process.restarts),
            generation: self.page.begun_generation(),
            stopping: self.page.stop_requested(),
            revocation: is_over.then(|| self.page.0.header().read_cause()),
            ranks: ranks.into_iter().map(|(rank, _)| rank).collect(),
        })
    }

    fn rank(&self, local_rank: usize) -> (RunningRank, Option<&Process>) {
        let slot = self.page.slot(local_rank);
        let process = self.process(local_rank, slot.pid());
        let rank = RunningRank {
            rank: slot.rank().or(process.and_then(|process| process.rank)),
            pid: process.map(|process| process.pid),
            activity: slot.activity(),
            victim_of: slot.victim_of(),
            stopped: slot.stopped(),
            weights: slot.weights(),
            differences: slot.differences(),
        };
        (rank, process)
    }

    /// The process of a rank: the one that says so on the page, where it holds the page too; else the oldest of those that
    /// were started as this rank, which is not one that another of them has started.
    fn process(&self, local_rank: usize, said: Option<u32>) -> Option<&Process> {
        let by_itself = |process: &&Process| said.is_some_and(|pid| process.is_called(pid));
        if let Some(process) = self.holders.iter().find(by_itself) {
            return Some(process);
        }
        let candidates = || {
            let is_it = |process: &&Process| process.local_rank == Some(local_rank);
            self.holders.iter().filter(is_it)
        };
        let is_first = |process: &&Process| candidates().all(|other| other.pid != process.parent);
        candidates()
            .filter(is_first)
            .min_by_key(|process| process.started)
    }

    /// The holder that is no rank, was not started as one, and has started one; before there are any, the only holder.
    fn launcher(&self, ranks: &[&Process]) -> Option<&Process> {
        let mut others = self.holders.iter().filter(|process| {
            process.local_rank.is_none() && ranks.iter().all(|rank| rank.pid != process.pid)
        });
        match ranks {
            [] if self.holders.len() == 1 => others.next(),
            [] => None,
            ranks => others.find(|process| ranks.iter().any(|rank| rank.parent == process.pid)),
        }
    }
}

#[cfg(test)]
mod tests;
