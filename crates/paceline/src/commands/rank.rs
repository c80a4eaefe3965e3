//! One rank of a training job: started by `paceline train` as `paceline worker`, or as `paceline train` by any launcher. A user's
//! program with a task of its own is started in the same two ways.

use std::path::PathBuf;

use paceline_checkpoint::{by_rank_0, by_rank_0_slowly};
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_rendezvous::env::{self, Timeout, WorkerEnv};
use paceline_rendezvous::page::JobPage;
use paceline_train::config::{
    FileText, Given, JobShape, Resolved, SavedRun, Surroundings, TrainConfig,
};
use paceline_train::run_dir::has_checkpoint;
use paceline_train::{End, Output, TrainError};
use serde::{Deserialize, Serialize};

use super::mlflow::tracked;
use super::train::{Prepared, prepare, saved_run};
use super::{Program, failed, wrong_settings};
use crate::cli::WorkerArgs;
use paceline_cli::exit::{Exit, Failure};

/// This process's place in a job, set by a launcher, a scheduler or a user; `None` if it has none.
///
/// *Errors*: variables that do not describe a rank.
pub(crate) fn place() -> Result<Option<WorkerEnv>, Failure> {
    let get = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    env::is_rank(&get).then(read_place).transpose()
}

fn read_place() -> Result<WorkerEnv, Failure> {
    WorkerEnv::from_process().map_err(|error| Failure::new(Exit::Usage, &error, error.hint()))
}

/// The shape of the job that a rank of this place belongs to.
pub(crate) fn shape(place: &WorkerEnv, given: &Given) -> JobShape {
    let recovers_live = JobPage::for_worker(place).is_ok_and(|page| page.recovers());
    // Ranks that cannot be replaced are better started again, all of them.
    let replaces = place.max_restarts == 0 || given.run_dir().is_some();
    JobShape {
        world: place.world,
        local_world: place.local_world,
        recovers_live: recovers_live && replaces,
    }
}

/// Trains with the settings in a file, which `paceline train` has resolved for all its ranks.
///
/// *Errors*: any failure of the rank that the launcher cannot report.
pub(crate) fn worker(program: &Program, args: &WorkerArgs) -> Result<Exit, Failure> {
    work(program, args).or_else(leave)
}

/// Hands a failure to the launcher, which prints the first rank's. If every rank printed its own too, it would appear many
/// times.
///
/// *Errors*: the failure, if there is no launcher that takes it.
pub(super) fn leave(failure: Failure) -> Result<Exit, Failure> {
    let file = std::env::var_os("TORCHELASTIC_ERROR_FILE").filter(|file| !file.is_empty());
    let error = serde_json::json!({ "message": failure.in_full() }).to_string();
    match file.map(|file| std::fs::write(file, error)) {
        Some(Ok(())) => Ok(failure.exit()),
        _ => Err(failure),
    }
}

fn work(program: &Program, args: &WorkerArgs) -> Result<Exit, Failure> {
    let saved = FileText::read(&args.config).map_err(wrong_settings)?;
    let resolved = Resolved::from_saved(&saved).map_err(wrong_settings)?;
    let mut config = resolved.config().clone();
    let place = read_place()?;
    let is_restarted = place.restart_count > 0;
    let group = join(place, config.transport.clone(), config.timeout())?;
    // A replacement gets its state from the other ranks.
    if is_restarted && !config.resume && !group.is_joining() {
        let look = || Ok::<_, TrainError>(has_checkpoint(&config.run_dir));
        let found = by_rank_0(&group, look).map_err(|error| failed(None, &error.into()))?;
        config.resume = found.map_err(|error| failed(None, &error))?;
    }
    train_as_rank(program, &config, group, Output::of(args.json))
        .map_err(|error| failed(None, &error))
}

/// Rank 0's decisions, which the other ranks need to resolve their settings.
#[derive(Serialize, Deserialize)]
struct Start {
    run_dir: PathBuf,
    saved: Option<SavedRun>,
}

/// Trains as the rank of `place`. Every rank reads its own settings; only rank 0 chooses the run directory and writes there.
///
/// *Errors*: settings or data that cannot be used, and any failure of the rank.
pub(crate) fn train(
    program: &Program,
    mut given: Given,
    place: WorkerEnv,
    output: Output,
) -> Result<Exit, Failure> {
    let surroundings = Surroundings {
        job: Some(shape(&place, &given)),
        ..Surroundings::of_process()
    };
    if place.restart_count > 0 {
        given.resume_own_run();
    }
    let cores = place.cores() / place.local_world;
    let (transport, timeout) = given.joining();
    if place.replacement > 0 {
        let resolved = settings_of_run(program, &given)?;
        let group = join(place, transport, timeout)?;
        return train_on(program, &resolved, cores, group, output);
    }
    let group = join(place, transport, timeout)?;
    let rank = group.rank();
    let mut prepared = None;
    // The object store may need longer than the others' timeout.
    let start = by_rank_0_slowly(&group, || {
        let ready = prepared.insert(prepare(
            program,
            given.clone(),
            &surroundings,
            Some(group.env()),
        )?);
        ready.load()?;
        let run_dir = ready.run.path().to_owned();
        let saved = ready.origin.saved.clone();
        Ok::<_, Failure>(Start { run_dir, saved })
    });
    let start = start.map_err(|error| failed(Some(rank), &error.into()))??;
    // The lock on the run directory lives as long as its rank.
    let (resolved, _run, tracking) = match prepared {
        Some(Prepared {
            resolved,
            run,
            tracking,
            ..
        }) => (resolved, Some(run), tracking),
        None => {
            given.use_run_dir(&start.run_dir);
            let resolved = given.resolve(start.saved.as_ref(), &surroundings);
            let resolved = resolved.map_err(|error| {
                group.abort(&error.to_string());
                wrong_settings(error)
            })?;
            (resolved, None, None)
        }
    };
    tracked(tracking, || {
        train_on(program, &resolved, cores, group, output)
    })
}

/// The settings that rank 0 has resolved for the job that this process joins.
///
/// *Errors*: the run directory is not named, or not on this host.
fn settings_of_run(program: &Program, given: &Given) -> Result<Resolved, Failure> {
    let Some(run_dir) = given.run_dir() else {
        let command = program.command();
        let why = format!(
            "a rank of `{command}` under another launcher can only be replaced in a run directory that is named: this one is \
             known to rank 0 alone"
        );
        let hint = format!("add --run-dir, or start the job with `{command} --nproc-per-node N`");
        return Err(Failure::new(Exit::Usage, why, Some(hint)));
    };
    let saved = saved_run(run_dir.to_owned()).map_err(|error| {
        let hint =
            "a rank that joins reads the job's settings there: the nodes must share the folder";
        Failure::new(error.exit(), error, Some(hint.into()))
    })?;
    Resolved::from_saved(&saved.settings).map_err(wrong_settings)
}

/// Trains with `cores` for each rank of this host, unless the settings or the environment say how many threads.
fn train_on(
    program: &Program,
    resolved: &Resolved,
    cores: usize,
    group: ProcessGroup,
    output: Output,
) -> Result<Exit, Failure> {
    let (config, rank) = (resolved.config(), group.rank());
    let is_said = config.threads_per_rank > 0;
    if is_said || std::env::var_os("RAYON_NUM_THREADS").is_none() {
        let threads = if is_said {
            config.threads_per_rank
        } else {
            cores.max(1)
        };
        paceline_train::use_threads(threads);
    }
    train_as_rank(program, config, group, output).map_err(|error| failed(Some(rank), &error))
}

/// Joins the group. Passes the settings as variables; they include and override the environment's.
fn join(
    mut place: WorkerEnv,
    transport: String,
    timeout: Timeout,
) -> Result<ProcessGroup, Failure> {
    place.transport = Some(transport);
    place.timeout = Some(timeout);
    let joined = ProcessGroup::connect(place, &GroupOptions::default());
    joined.map_err(|error| failed(None, &error.into()))
}

fn train_as_rank(
    program: &Program,
    config: &TrainConfig,
    group: ProcessGroup,
    output: Output,
) -> Result<Exit, TrainError> {
    Ok(match (program.train)(config, group, output)? {
        End::Finished => Exit::Done,
        End::Stopped { signal } => Exit::Signal(signal.exit_code() - 128),
    })
}
