//! A job on this machine alone: rounds of the same ranks until one ends well, or the budget of restarts is spent.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::BorrowedFd;
use std::time::Instant;

use paceline_words::{Lang, say};

use crate::elastic::messages::{How, Order};
use crate::error::LaunchError;
use crate::notice;
use crate::report::{Failure, Outcome};
use crate::round::{self, Launcher, NodePlace};
use crate::supervise::{Coordinator, Seen};

/// Runs rounds until the job is over.
pub(crate) fn run(launcher: &Launcher<'_>) -> Result<Outcome, LaunchError> {
    let job = launcher.job;
    let begun = Instant::now();
    let (mut restarts, mut replaced, mut notes) = (0, 0, Vec::new());
    let mut failed: Option<(String, Instant)> = None;
    loop {
        // A new store for each round: no key of an older one is in it.
        let store = launcher.serve(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let place = NodePlace {
            first_rank: 0,
            world: job.nproc,
            node_rank: 0,
            node_count: 1,
            host: None,
            master_addr: (job.master_addr.clone()).unwrap_or(Ipv4Addr::LOCALHOST.to_string()),
            master_port: match job.master_port {
                Some(port) => port,
                None => free_port().map_err(LaunchError::system("finding a free port"))?,
            },
            store: store.addr().to_string(),
            restarts,
            replacements_max: job.max_restarts - restarts - replaced,
            joins: false,
        };
        let mut budget = Budget {
            left: place.replacements_max,
            failed_at: None,
        };
        let notice = || {
            if let Some((what, at)) = &failed {
                let restart = restarts + replaced;
                notice(what, (restart, job.max_restarts), *at, job.lang);
            }
        };
        let end = round::run(launcher, &place, &mut budget, notice)?;
        replaced += end.replaced;
        notes.extend(end.notes);
        match (&end.failure, budget.failed_at) {
            (Some(failure), Some(at)) if end.asked.is_none() && end.left_behind.is_empty() => {
                failed = Some((failure.headline(job.lang), at));
                restarts += 1;
            }
            _ => {
                return Ok(Outcome {
                    failure: end.failure,
                    stopped_by: end.stop.map(|stop| stop.signal),
                    stopped_after: end.stop.and_then(|stop| stop.step),
                    elapsed: begun.elapsed(),
                    round_elapsed: end.started.elapsed(),
                    plan: launcher.plan.clone(),
                    left_behind: end.left_behind,
                    restarts,
                    lost: None,
                    notes,
                });
            }
        }
    }
}

/// One line for people: what failed, which restart of how many this is, and how long it took.
pub(crate) fn notice(what: &str, (restart, of): (u32, u32), failed_at: Instant, lang: Lang) {
    let seconds = failed_at.elapsed().as_secs_f64();
    let line = say!(
        lang,
        "{what}; restart {restart} of {of} took {seconds:.3} s",
        "{what}; 재시작 {restart}/{of}에 {seconds:.3}초 걸림"
    );
    notice::line(&line);
}

/// A port that is free now. It is left for the program (a PyTorch script listens there on rank 0), so it cannot be
/// kept; the kernel hands out ephemeral ports in a random order, so a collision before then is unlikely.
pub(crate) fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
        .local_addr()?
        .port())
}

/// Ends the other ranks as soon as one has failed, if there is a restart to come.
#[derive(Debug)]
struct Budget {
    /// Restarts and replacements that were left when the round began.
    left: u32,
    failed_at: Option<Instant>,
}

impl Coordinator for Budget {
    fn news(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn turn(&mut self, seen: &Seen) -> (Option<Order>, Option<Instant>) {
        let may_restart = |failure: &Failure| failure.is_for_good().is_none();
        let is_due = seen.replaced < self.left
            && seen.failure.as_ref().is_some_and(may_restart)
            && seen.asked.is_none();
        if is_due && self.failed_at.is_none() {
            self.failed_at = Some(Instant::now());
            return (Some(Order::End(How::Next)), None);
        }
        (None, None)
    }

    fn regrouped(&mut self, _: Option<Vec<usize>>) {}
}
