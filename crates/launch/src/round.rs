//! One round of this node's ranks, from their start to the end of everything they leave behind. It borrows whatever
//! outlives the round.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use paceline_rendezvous::page::JobPage;
use paceline_rendezvous::store::{Server, ServerOptions, StoreError};

use crate::error::LaunchError;
use crate::job::Job;
use crate::memory;
use crate::orphans::Orphans;
use crate::output::{self, Output};
use crate::plan::Plan;
use crate::recovery::Roster;
use crate::report::{Failure, Node};
use crate::signals::Signals;
use crate::stop::{Asked, Stop, is_well, stop_of};
use crate::supervise::{Coordinator, Seen, Stage, Supervisor};
use crate::watchdog::Watchdog;
use crate::workers::{Shared, Workers};

/// Processes that the ranks have left behind have this long between SIGTERM and SIGKILL.
const ORPHAN_GRACE: Duration = Duration::from_secs(2);

/// What lives as long as the launcher.
#[derive(Debug)]
pub(crate) struct Launcher<'a> {
    pub(crate) job: &'a Job,
    pub(crate) plan: &'a Plan,
    /// Whether ranks and launchers speak TLS with one another and with their stores.
    pub(crate) tls: bool,
    /// The value of `PACELINE_LAUNCHER`.
    pub(crate) id: &'a str,
    /// The job's folder in this host's memory, if the host has such files.
    pub(crate) memory_folder: Option<&'a str>,
    pub(crate) signals: &'a Signals,
    pub(crate) watchdog: &'a Watchdog,
    pub(crate) orphans: &'a Orphans,
}

impl Launcher<'_> {
    /// A store that is spoken to as the ranks are asked to speak.
    pub(crate) fn serve(&self, addr: SocketAddr) -> Result<Server, StoreError> {
        let options = ServerOptions {
            tls: self.tls,
            ..ServerOptions::default()
        };
        Server::bind_with(addr, &self.job.token, options)
    }
}

/// Where this node's ranks stand in the round, and where they meet the others.
#[derive(Debug, Clone)]
pub(crate) struct NodePlace {
    pub(crate) first_rank: usize,
    pub(crate) world: usize,
    pub(crate) node_rank: usize,
    pub(crate) node_count: usize,
    /// This host, in a job of several nodes.
    pub(crate) host: Option<String>,
    pub(crate) master_addr: String,
    pub(crate) master_port: u16,
    /// `host:port` of the ranks' store.
    pub(crate) store: String,
    /// Restarts of the job so far.
    pub(crate) restarts: u32,
    /// How many lost ranks may be replaced.
    pub(crate) replacements_max: u32,
    /// Whether these ranks are to join others that train.
    pub(crate) joins: bool,
}

impl NodePlace {
    pub(crate) fn node(&self) -> Option<Node> {
        Some(Node {
            rank: self.node_rank,
            host: self.host.clone()?,
        })
    }
}

/// How a round ended on this node.
#[derive(Debug)]
pub(crate) struct RoundEnd {
    /// When its first rank was started.
    pub(crate) started: Instant,
    pub(crate) failure: Option<Failure>,
    /// What the job was asked for meanwhile.
    pub(crate) asked: Option<Asked>,
    /// Whether it was stopped by request.
    pub(crate) stop: Option<Stop>,
    /// Whether all ranks ended well by themselves.
    pub(crate) is_well: bool,
    pub(crate) left_behind: Vec<u32>,
    /// How many lost ranks were replaced.
    pub(crate) replaced: u32,
    pub(crate) notes: Vec<String>,
}

/// Runs a round. `on_start` is called when all ranks have been started.
///
/// *Errors*: only what keeps ranks from starting; then none is left running.
pub(crate) fn run(
    launcher: &Launcher<'_>,
    place: &NodePlace,
    coordinator: &mut dyn Coordinator,
    on_start: impl FnOnce(),
) -> Result<RoundEnd, LaunchError> {
    let job = launcher.job;
    let mut output = Output::open(job, job.restart_count + place.restarts)?;
    // Each round has its own page, so that ranks of an older one write to nothing that is still read.
    let page = JobPage::create_memfd(job.nproc)?;
    if job.recovers_live() {
        page.set_recovers();
    }
    let shared = Shared {
        page: &page,
        place,
        launcher_id: launcher.id,
        memory_folder: launcher.memory_folder,
        watchdog: launcher.watchdog,
    };
    let (started, kills) = (Instant::now(), memory::kills());
    let mut start = || {
        let workers = Workers::start(job, launcher.plan, &shared, &mut output)?;
        let stalls = workers.monitor(job.stall, &shared, &output)?;
        Ok((workers, stalls))
    };
    let (mut workers, stalls) = match start() {
        Ok(begun) => begun,
        Err(error) => {
            launcher.orphans.end(Duration::ZERO);
            return Err(error);
        }
    };
    on_start();
    let mut supervisor = Supervisor {
        job,
        workers: &mut workers,
        page: &page,
        signals: launcher.signals,
        orphans: launcher.orphans,
        stalls: &stalls,
        plan: launcher.plan,
        shared: &shared,
        output: &mut output,
        place,
        coordinator,
        started,
        stage: Stage::Running,
        until: None,
        seen: Seen {
            started: Some(started),
            ..Seen::default()
        },
        generation: 0,
        roster: match place.joins {
            true => Roster::joining(job.nproc),
            false => Roster::new(job.nproc, place.replacements_max),
        },
        looked_at: Duration::ZERO,
        trains_since: None,
        mended: None,
        given_up: None,
        regrouping: None,
        invitation: Vec::new(),
    };
    supervisor.run();
    let seen = supervisor.seen;
    drop(stalls);

    let orphan_grace = if seen.killed {
        Duration::ZERO
    } else {
        job.grace.min(ORPHAN_GRACE)
    };
    let left_behind = launcher.orphans.end(orphan_grace);
    // One that hung in the kernel may have ended by now.
    workers.reap(started.elapsed(), &shared, |_, _| true);
    let finished = output.finish(launcher.signals);
    let members = (workers.states.iter().enumerate()).filter(|(_, state)| !state.is_out);
    let ends: Vec<_> = members
        .map(|(rank, state)| (state.exit.map(|exit| exit.how), page.slot(rank).stopped()))
        .collect();
    let is_well = (ends.iter()).all(|(how, stopped)| how.is_some_and(|how| is_well(how, *stopped)));
    // Ranks that have not joined the others have done nothing well.
    let is_well = is_well && !ends.is_empty();
    let failure = seen
        .failure
        .or(seen.lost)
        .map(|failure| complete(failure, place, &workers, &finished));
    let mut notes = seen.notes;
    notes.extend(finished.notes);
    if failure.is_some() {
        notes.extend(memory::note(kills, memory::kills()));
    }
    Ok(RoundEnd {
        started,
        failure,
        asked: seen.asked,
        stop: stop_of(seen.asked, &ends).filter(|_| !seen.is_saved || seen.asked.is_some()),
        is_well: is_well && !seen.is_ordered,
        left_behind,
        replaced: seen.replaced,
        notes,
    })
}

/// Adds what is known only when all is over.
fn complete(
    failure: Failure,
    place: &NodePlace,
    workers: &Workers,
    finished: &output::Finished,
) -> Failure {
    let suffered = |other: &usize| {
        *other != failure.local_rank
            && !workers.states[*other].is_out
            && !workers.states[*other]
                .exit
                .is_some_and(|exit| exit.how.is_success() && !exit.is_early)
    };
    let victims = (0..workers.states.len()).filter(suffered);
    let said = finished.last_words(failure.local_rank);
    let ended_alike = |rank: usize| {
        let how = |rank: usize| workers.states[rank].exit.map(|exit| exit.how);
        let first = |said: &output::LastWords| said.lines.first().cloned();
        how(rank) == how(failure.local_rank) && first(&finished.last_words(rank)) == first(&said)
    };
    let ranks = workers.states.len();
    let is_common = failure.is_common
        && failure.node.is_none()
        && !said.lines.is_empty()
        && ranks > 1
        && (0..ranks).all(ended_alike);
    let victims = victims.filter(|_| !is_common);
    Failure {
        is_common,
        victims: victims.map(|rank| place.first_rank + rank).collect(),
        error: said.error,
        last_lines: said.lines,
        are_on_console: said.are_on_console,
        log: said.log,
        ..failure
    }
}
