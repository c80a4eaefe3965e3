//! The ranks of a running job: starts them, signals them, and never lets one outlive the job.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_rendezvous::env::{SOMETIMES_SET, WORKER_DEFAULTS, WorkerEnv, worker_vars};
use paceline_rendezvous::page::JobPage;
use paceline_rendezvous::process::Stat;
use rustix::process::Signal;

use crate::LAUNCHER_VARIABLE;
use crate::command;
use crate::error::LaunchError;
use crate::job::Job;
use crate::judge::{Ending, Exit, WorkerState};
use crate::output::Output;
use crate::plan::{Plan, THREAD_VARIABLES, Threads};
use crate::round::NodePlace;
use crate::stall::{Monitor, StallOptions, Subject};
use crate::watch::{RankEvent, RankWatch};
use crate::watchdog::Watchdog;
use crate::worker::{Input, KILLED_ENDS_WITHIN, Worker};

/// What all ranks of a round share.
#[derive(Debug)]
pub(crate) struct Shared<'a> {
    pub(crate) page: &'a JobPage,
    pub(crate) place: &'a NodePlace,
    /// The value of `PACELINE_LAUNCHER`.
    pub(crate) launcher_id: &'a str,
    pub(crate) memory_folder: Option<&'a str>,
    pub(crate) watchdog: &'a Watchdog,
}

/// The ranks, in order. Dropping it kills those that still run.
#[derive(Debug)]
pub(crate) struct Workers {
    processes: Vec<Worker>,
    /// The judge's view; `exit` is set once no thread of the worker can run any more.
    pub(crate) states: Vec<WorkerState>,
    /// The ranks with an `exit` whose processes are still to be reaped.
    leaving: Vec<usize>,
    watch: Option<RankWatch>,
    first_rank: usize,
}

impl Workers {
    /// Starts all ranks, or none.
    pub(crate) fn start(
        job: &Job,
        plan: &Plan,
        shared: &Shared<'_>,
        output: &mut Output,
    ) -> Result<Self, LaunchError> {
        let mut workers = Self {
            processes: Vec::new(),
            states: Vec::new(),
            leaving: Vec::new(),
            watch: job.watch.clone(),
            first_rank: shared.place.first_rank,
        };
        for rank in 0..job.nproc {
            let joins = shared.place.joins;
            let worker = workers.spawn(job, plan, shared, output, (rank, joins.into()))?;
            workers.processes.push(worker);
            workers.states.push(WorkerState {
                is_out: joins,
                is_new: joins,
                ..WorkerState::default()
            });
            workers.tell(rank, true);
        }
        Ok(workers)
    }

    /// Starts a process in the place of a rank that was lost and reaped; `number` tells it from other replacements.
    pub(crate) fn replace(
        &mut self,
        job: &Job,
        plan: &Plan,
        shared: &Shared<'_>,
        output: &mut Output,
        (rank, number): (usize, u32),
    ) -> Result<(), LaunchError> {
        shared.page.clear_slot(rank);
        output.reopen(rank)?;
        self.processes[rank] = self.spawn(job, plan, shared, output, (rank, number))?;
        self.states[rank] = WorkerState {
            is_out: true,
            is_new: true,
            ..WorkerState::default()
        };
        self.tell(rank, true);
        Ok(())
    }

    fn spawn(
        &self,
        job: &Job,
        plan: &Plan,
        shared: &Shared<'_>,
        output: &mut Output,
        (rank, replacement): (usize, u32),
    ) -> Result<Worker, LaunchError> {
        let mut env = worker_env(job, rank, shared);
        env.replacement = replacement;
        env.local_cores = plan.bound.as_ref().map(|bound| bound.cores.min(plan.cores));
        env.error_file = output
            .error_file(rank)
            .and_then(|path| path.into_os_string().into_string().ok());
        let mut command = process(job, plan, &env);
        command.env(LAUNCHER_VARIABLE, shared.launcher_id);
        command.envs(plan.visible.get(rank).into_iter().flatten().cloned());
        let cpus = plan.bound.as_ref().map(|bound| bound.cpus[rank].mask());
        let stdin = match job.stdin == Some(shared.place.first_rank + rank) {
            true => Input::of_launcher(),
            false => Input::Null,
        };
        let (worker, pipes) =
            Worker::spawn(&mut command, shared.page, cpus, stdin).map_err(|source| {
                let rank = shared.place.first_rank + rank;
                let program = plan.program.display();
                let missing = source.kind() == io::ErrorKind::NotFound;
                LaunchError::Machine {
                    message: format!("rank {rank} could not be started as `{program}`"),
                    hint: missing.then(|| {
                        "the interpreter named in the file's first line does not exist".into()
                    }),
                    source: Some(source),
                }
            })?;
        shared.watchdog.guard_group(worker.pid());
        if let Err(error) = output.attach(&env, pipes) {
            worker.signal_group(Signal::KILL);
            worker.wait_and_reap(KILLED_ENDS_WITHIN);
            return Err(error);
        }
        Ok(worker)
    }

    /// Begins to look for ranks that hang.
    pub(crate) fn monitor(
        &self,
        options: StallOptions,
        shared: &Shared<'_>,
        output: &Output,
    ) -> Result<Monitor, LaunchError> {
        let ranks = self.processes.iter().zip(output.traffic()).enumerate();
        let subject = |(rank, (worker, traffic)): (usize, (&Worker, &Arc<_>))| Subject {
            pid: worker.pid(),
            started: Stat::read(worker.pid()).map(|stat| stat.started),
            slot: shared.page.slot(rank),
            traffic: Arc::clone(traffic),
        };
        Monitor::start(
            options,
            ranks.map(subject).collect(),
            self.first_rank,
            shared.launcher_id,
        )
    }

    pub(crate) fn pid(&self, rank: usize) -> u32 {
        self.processes[rank].pid()
    }

    pub(crate) fn pids(&self) -> HashSet<u32> {
        self.processes.iter().map(Worker::pid).collect()
    }

    /// The ranks that have not ended.
    pub(crate) fn alive(&self) -> impl Iterator<Item = (usize, &Worker)> {
        self.processes
            .iter()
            .enumerate()
            .filter(|(rank, _)| self.states[*rank].exit.is_none())
    }

    /// Whether the system still takes a process apart.
    pub(crate) fn is_one_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }

    /// Those that are alive, and those that the system still takes apart.
    pub(crate) fn unreaped(&self) -> impl Iterator<Item = &Worker> {
        let leaving = self.leaving.iter().map(|rank| &self.processes[*rank]);
        self.alive().map(|(_, worker)| worker).chain(leaving)
    }

    /// Takes note of the ranks that have ended since the last call, when and how, and reaps them.
    pub(crate) fn reap(
        &mut self,
        at: Duration,
        shared: &Shared<'_>,
        excused: impl Fn(usize, Ending) -> bool,
    ) {
        let mut ended = Vec::new();
        let forget = |worker: &Worker| {
            if !worker.group_has_members() {
                shared.watchdog.forget_group(worker.pid());
            }
        };
        let processes = &self.processes;
        self.leaving.retain(|rank| {
            let is_left = matches!(processes[*rank].try_reap(), Ok(None));
            if !is_left {
                forget(&processes[*rank]);
            }
            is_left
        });
        let ranks = self.processes.iter().zip(&mut self.states).enumerate();
        for (rank, (worker, state)) in ranks.filter(|(_, (_, state))| state.exit.is_none()) {
            // A child that cannot be waited for has been reaped behind our back; how it ended is lost.
            let reaped = worker.try_reap().unwrap_or(Some(Ending::Code(1)));
            let lets_go = || shared.page.slot(rank).has_let_go();
            let how = reaped.or_else(|| lets_go().then(|| worker.ending())?);
            if let Some(how) = how {
                state.exit = Some(Exit {
                    at,
                    how,
                    excused: excused(rank, how),
                    is_early: how.is_success() && shared.page.slot(rank).is_unfinished(),
                });
                match reaped {
                    Some(_) => forget(worker),
                    None => self.leaving.push(rank),
                }
                ended.push(rank);
            }
        }
        for rank in ended {
            self.tell(rank, false);
        }
    }

    /// Kills a rank and what it has started.
    pub(crate) fn kill(&self, rank: usize) {
        if self.states[rank].exit.is_none() {
            self.processes[rank].signal_group(Signal::KILL);
        }
    }

    fn tell(&self, local_rank: usize, is_running: bool) {
        if let Some(watch) = &self.watch {
            watch.tell(RankEvent {
                rank: self.first_rank + local_rank,
                pid: self.pid(local_rank),
                is_running,
            });
        }
    }

    /// Signals the process groups of all ranks that have not ended.
    pub(crate) fn signal_groups(&self, signal: Signal) {
        for (_, worker) in self.alive() {
            worker.signal_group(signal);
            if signal != Signal::KILL {
                // A stopped process sees other signals only when it goes on.
                worker.signal_group(Signal::CONT);
            }
        }
    }

    /// Signals the ranks' own processes only.
    pub(crate) fn signal(&self, signal: Signal) {
        for (_, worker) in self.alive() {
            worker.signal(signal);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.signal_groups(Signal::KILL);
        let give_up_at = Instant::now() + KILLED_ENDS_WITHIN;
        for worker in self.unreaped() {
            worker.wait_and_reap(give_up_at.saturating_duration_since(Instant::now()));
        }
    }
}

fn worker_env(job: &Job, local_rank: usize, shared: &Shared<'_>) -> WorkerEnv {
    let place = shared.place;
    WorkerEnv {
        rank: place.first_rank + local_rank,
        world: place.world,
        local_rank,
        local_world: job.nproc,
        node_rank: place.node_rank,
        node_count: place.node_count,
        master_addr: place.master_addr.clone(),
        master_port: place.master_port,
        store: Some(place.store.clone()),
        agent_store: false,
        token: job.token.clone(),
        token_is_secret: true,
        run_id: job.run_id.clone(),
        restart_count: job.restart_count + place.restarts,
        max_restarts: job.max_restarts,
        role: job.role.clone(),
        virtual_local_rank: job.virtual_local_rank,
        page_fd: shared.page.raw_fd(),
        memory_folder: shared.memory_folder.map(str::to_owned),
        ..WorkerEnv::alone()
    }
}

/// The launcher's environment, then the job's, then defaults for what neither has, then the contract.
fn process(job: &Job, plan: &Plan, env: &WorkerEnv) -> Command {
    let mut command = Command::new(absolute(&plan.program));
    command
        .args((plan.args.iter()).map(|arg| command::for_rank(arg, env.local_rank)))
        .envs(job.env.iter().map(|(name, value)| (name, value)));
    for (name, value) in WORKER_DEFAULTS {
        let is_set = std::env::var_os(name).is_some() || job.env.iter().any(|(key, _)| key == name);
        if !is_set {
            command.env(name, value);
        }
    }
    for (name, threads) in THREAD_VARIABLES.iter().zip(&plan.threads) {
        if let Threads::Set(count) = threads {
            command.env(name, count.to_string());
        }
    }
    // A launcher around this one may have set them for this process, and they are not set for every job.
    for name in SOMETIMES_SET {
        command.env_remove(name);
    }
    command.envs(worker_vars(env));
    command
}

/// With a slash, so that the name is not looked up a second time, in a PATH that may be another.
fn absolute(program: &Path) -> std::path::PathBuf {
    if program.components().count() == 1 {
        Path::new(".").join(program)
    } else {
        program.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use paceline_rendezvous::token::Token;

    use super::*;

    #[test]
    fn a_rank_gets_no_memory_folder_of_a_launcher_around_this_one() {
        let mut job = Job::new("true", 1, Token::generate().unwrap());
        job.env = vec![("PACELINE_MEMORY_FOLDER".into(), "/dev/shm/outer".into())];
        let plan = job.plan().unwrap();
        for own in [None, Some("/dev/shm/own")] {
            let env = WorkerEnv {
                memory_folder: own.map(str::to_owned),
                ..WorkerEnv::alone()
            };
            let command = process(&job, &plan, &env);
            let mut set = command.get_envs();
            let folder = set.find(|(name, _)| *name == "PACELINE_MEMORY_FOLDER");
            let folder = folder.expect("it is set or removed").1;
            assert_eq!(folder, own.map(OsStr::new));
        }
    }
}
