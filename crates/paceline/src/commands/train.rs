//! `paceline train`: settings, run directory, ranks.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use paceline_ddp::Backend;
use paceline_ddp::device::{self, DeviceError, DeviceKind};
use paceline_launch::Console;
use paceline_train::config::{
    self, FileText, Given, Inputs, Resolved, ResumeTarget, SavedRun, Surroundings, Task,
    TrainConfig, TransportChoice,
};
use paceline_train::run_dir::{RunDir, checkpoints};
use paceline_train::{FailureClass, TrainError, checkpoint, console, data};

use super::wrong_settings;
use crate::cli::TrainArgs;
use paceline_cli::exit::{Exit, Failure, warn};
use paceline_cli::gpu::p2p;
use paceline_cli::job;
use paceline_cli::usage::UsageArgs;

/// Folder of runs whose directory the user does not name.
const RUNS: &str = "runs";
/// Resolved settings in a run directory.
const SETTINGS: &str = "config.toml";

/// Resolves the settings and trains, or only explains them.
///
/// *Errors*: settings, data, devices or run directory that cannot be used; nothing is started then.
pub(crate) fn train(args: &TrainArgs) -> Result<Exit, Failure> {
    let resolved = resolve(args)?;
    for warning in resolved.warnings() {
        warn(warning);
    }
    if args.explain {
        return explain(&resolved, args.json);
    }
    let config = resolved.config();
    check_devices(config)?;
    check_data(config)?;
    let run = RunDir::open(&config.run_dir, config.resume).map_err(|error| refused(&error))?;
    run.write(SETTINGS, &resolved.to_toml())
        .map_err(|error| refused(&error))?;
    let usage = UsageArgs {
        is_cpu_only: config.device == DeviceKind::Cpu,
        ..args.usage.clone()
    };
    start(config, &run, &usage)
}

fn resolve(args: &TrainArgs) -> Result<Resolved, Failure> {
    let inputs = Inputs {
        flags: args.settings.clone(),
        environment: config::environment(std::env::vars_os()),
        file: args
            .config
            .as_deref()
            .map(FileText::read)
            .transpose()
            .map_err(wrong_settings)?,
    };
    let given = Given::read(&inputs).map_err(wrong_settings)?;
    let folder = match given.resume() {
        ResumeTarget::No => None,
        ResumeTarget::Run(folder) => Some(folder),
        ResumeTarget::Newest => Some(newest_run(Path::new(RUNS))?),
    };
    let saved = folder.map(saved_run).transpose()?;
    given
        .resolve(saved.as_ref(), &Surroundings::of_process())
        .map_err(wrong_settings)
}

fn saved_run(folder: PathBuf) -> Result<SavedRun, Failure> {
    let path = folder.join(SETTINGS);
    if !path.exists() {
        let message = format!("{} holds no run: it has no {SETTINGS}", folder.display());
        let hint = "--resume takes the run directory of an earlier run";
        return Err(Failure::new(Exit::Usage, message, Some(hint.into())));
    }
    let settings = FileText::read(&path).map_err(wrong_settings)?;
    Ok(SavedRun { folder, settings })
}

/// The run whose newest checkpoint is the newest of all.
fn newest_run(runs: &Path) -> Result<PathBuf, Failure> {
    let written = |run: &PathBuf| {
        let newest = checkpoint::list(&checkpoints(run)).pop()?;
        std::fs::metadata(newest).ok()?.modified().ok()
    };
    let folders = std::fs::read_dir(runs).into_iter().flatten().flatten();
    folders
        .map(|entry| entry.path())
        .filter_map(|run| written(&run).map(|at| (at, run)))
        .max()
        .map(|(_, run)| run)
        .ok_or_else(|| {
            let message = format!("there is no run with a checkpoint below {}", runs.display());
            let hint = "name the run: --resume DIR";
            Failure::new(Exit::Usage, message, Some(hint.into()))
        })
}

fn explain(resolved: &Resolved, json: bool) -> Result<Exit, Failure> {
    let text = if json {
        resolved.explain_json()
    } else {
        resolved.explain()
    };
    match writeln!(io::stdout().lock(), "{}", text.trim_end()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            let message = format!("cannot write to stdout: {error}");
            Err(Failure::new(Exit::Environment, message, None))
        }
        _ => Ok(Exit::Done),
    }
}

/// Looks once for what all ranks need to compute, before any is started.
fn check_devices(config: &TrainConfig) -> Result<(), Failure> {
    let (kind, ranks) = (config.device, config.nproc_per_node);
    if config.backend == Backend::Nccl && kind != DeviceKind::Cuda {
        let message =
            format!("`backend` is nccl, which works between CUDA devices, and `device` is {kind}");
        let hint = "leave out --backend, or add --device cuda";
        return Err(Failure::new(Exit::Usage, message, Some(hint.into())));
    }
    if kind == DeviceKind::Cpu {
        return Ok(());
    }
    if kind == DeviceKind::Cuda && !kind.is_built() {
        // Who has fewer GPUs than asked for need not build anything first.
        require(config.use_gpu, paceline_gpu::devices::count())?;
    }
    let unusable = |error: DeviceError| Failure::new(Exit::Environment, &error, error.hint());
    let found = device::survey(kind).map_err(unusable)?;
    require(config.use_gpu, Ok(found.count))?;
    device::check_ranks(&found, ranks).map_err(unusable)?;
    if let Some(warning) = found.warning() {
        warn(&warning);
    }
    if ranks > found.count {
        warn(&format!(
            "{ranks} ranks share one {kind} device, on which they take turns"
        ));
    }
    Ok(())
}

fn require(gpus: usize, found: Result<usize, String>) -> Result<(), Failure> {
    paceline_gpu::devices::require(gpus, found)
        .map_err(|error| Failure::new(Exit::Environment, &error, error.hint()))
}

/// Reads the user's data once before ranks are started, so that a mistake in it is told once and at once.
fn check_data(config: &TrainConfig) -> Result<(), Failure> {
    if config.task == Task::Digits {
        return Ok(());
    }
    match data::open(config) {
        Ok(_) => Ok(()),
        Err(error) => Err(refused(&error.into())),
    }
}

fn start(config: &TrainConfig, run: &RunDir, usage: &UsageArgs) -> Result<Exit, Failure> {
    let program = std::env::current_exe().map_err(|error| {
        let message = format!("cannot find this program's own file: {error}");
        Failure::new(Exit::Environment, message, None)
    })?;
    let mut job = job::new(&program, config.nproc_per_node)?;
    let settings = run.path().join(SETTINGS);
    job.args = ["worker".into(), "--config".into(), settings.into()].to_vec();
    job.log_dir = Some(run.logs());
    job.console = Console::RankZeroRaw;
    job.threads_per_rank = Some(config.threads_per_rank).filter(|threads| *threads > 0);
    // The settings already include these variables, under the flags that win over them.
    let transport = match config.transport {
        TransportChoice::Auto => "auto",
        TransportChoice::Shm => "shm",
        TransportChoice::Tcp => "tcp",
    };
    let seconds = config.timeout_seconds.to_string();
    job.env
        .push(("PACELINE_TRANSPORT".into(), transport.into()));
    job.env.push(("PACELINE_TIMEOUT_SECONDS".into(), seconds));
    job.env.extend(nccl_settings(config)?);
    if let (true, Some((width, _))) = (io::stdout().is_terminal(), terminal_size::terminal_size()) {
        job.env
            .push((console::COLUMNS_VARIABLE.into(), width.0.to_string()));
    }
    job::run(job, usage)
}

/// What NCCL has to be told on this machine, after trying the links between its devices; variables that the user has set
/// stay as they are.
fn nccl_settings(config: &TrainConfig) -> Result<Vec<(String, String)>, Failure> {
    let is_nccl = config.device == DeviceKind::Cuda && config.backend != Backend::Host;
    if !is_nccl || config.nproc_per_node == 1 {
        return Ok(Vec::new());
    }
    let choice = p2p::require_nccl().and_then(|()| p2p::choose(&Default::default()));
    let choice = choice.map_err(|error| Failure::new(Exit::Environment, &error, error.hint()))?;
    for line in &choice.lines {
        warn(line);
    }
    let unset = |(name, _): &(String, String)| std::env::var_os(name).is_none();
    Ok(choice.variables.into_iter().filter(unset).collect())
}

fn refused(error: &TrainError) -> Failure {
    let exit = match error.class() {
        FailureClass::Usage => Exit::Usage,
        FailureClass::Environment => Exit::Environment,
        FailureClass::Job | FailureClass::Deadline => Exit::JobFailed,
    };
    Failure::new(exit, error, error.hint())
}
