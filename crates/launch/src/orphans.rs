//! Finds what the workers have left behind, and ends it.
//!
//! While a job runs, this process is a child subreaper: a process whose parent dies becomes its child instead of
//! init's, whatever group or session it has moved to. So what a job leaves is exactly this process's children that
//! were not there before; ending them brings up their children, until there are none.

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use paceline_rendezvous::process::{self, Stat};
use rustix::process::Signal;

use crate::error::LaunchError;
use crate::worker::{KILLED_ENDS_WITHIN, Worker, wait_readable};

/// Subreaper until it is dropped.
#[derive(Debug)]
pub(crate) struct Orphans {
    was_subreaper: bool,
    /// Children that are the caller's own: pid and start time.
    not_ours: HashSet<(u32, u64)>,
}

impl Orphans {
    /// From now on, orphans of the job come to this process; the children it has now are not the job's.
    pub(crate) fn adopt() -> Result<Self, LaunchError> {
        let subreaper = LaunchError::system("prctl(PR_SET_CHILD_SUBREAPER)");
        let children = process::children(std::process::id())
            .map_err(LaunchError::system("reading /proc/self"))?;
        let was_subreaper = rustix::process::child_subreaper().is_ok_and(|before| before.is_some());
        rustix::process::set_child_subreaper(Some(rustix::process::getpid())).map_err(subreaper)?;
        let not_ours = children
            .into_iter()
            .filter_map(|pid| Some((pid, Stat::read(pid)?.started)))
            .collect();
        Ok(Self {
            was_subreaper,
            not_ours,
        })
    }

    /// Reaps orphans that have ended, so that a long job does not collect zombies. `workers` are left alone.
    pub(crate) fn reap(&self, workers: &HashSet<u32>) {
        for pid in self
            .found()
            .into_iter()
            .filter(|pid| !workers.contains(pid))
        {
            if Stat::read(pid).is_some_and(|stat| stat.state == 'Z')
                && let Ok(orphan) = Worker::adopt(pid)
            {
                let _ = orphan.try_reap();
            }
        }
    }

    /// Ends all orphans: SIGTERM, after `grace` SIGKILL. Call it when all workers are reaped.
    ///
    /// *Returns*: the processes that even SIGKILL did not end in time.
    pub(crate) fn end(&self, grace: Duration) -> Vec<u32> {
        let kill_at = Instant::now() + grace;
        let give_up_at = kill_at + KILLED_ENDS_WITHIN;
        let mut asked = HashSet::new();
        // Two empty looks in a row: while the tree collapses, a process can move between two reads of one look.
        let mut empty_looks = 0;
        loop {
            let orphans: Vec<_> = self
                .found()
                .into_iter()
                .filter_map(|pid| Worker::adopt(pid).ok())
                .collect();
            empty_looks = if orphans.is_empty() {
                empty_looks + 1
            } else {
                0
            };
            if empty_looks == 2 {
                return Vec::new();
            }
            let now = Instant::now();
            if now >= give_up_at {
                return orphans.iter().map(Worker::pid).collect();
            }
            for orphan in &orphans {
                if now >= kill_at {
                    orphan.signal(Signal::KILL);
                } else if asked.insert(orphan.pid()) {
                    orphan.signal(Signal::TERM);
                    orphan.signal(Signal::CONT);
                }
            }
            if !orphans.is_empty() {
                let ends: Vec<_> = orphans.iter().map(AsFd::as_fd).collect();
                let next = if now < kill_at { kill_at } else { give_up_at };
                // A short turn, because an orphan's own children only show once it has ended.
                wait_readable(&ends, (next - now).min(Duration::from_millis(50)));
            }
            for orphan in &orphans {
                let _ = orphan.try_reap();
            }
        }
    }

    /// The children of this process that are not the caller's own.
    pub(crate) fn found(&self) -> Vec<u32> {
        let children = process::children(std::process::id()).unwrap_or_default();
        let is_ours = |pid: &u32| {
            Stat::read(*pid).is_some_and(|stat| !self.not_ours.contains(&(*pid, stat.started)))
        };
        children.into_iter().filter(is_ours).collect()
    }
}

impl Drop for Orphans {
    fn drop(&mut self) {
        if !self.was_subreaper {
            let _ = rustix::process::set_child_subreaper(None);
        }
    }
}
