//! `paceline train`, and programs with a task of their own: settings, run directory, and the ranks that it starts or the rank that this process is.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};

use paceline_checkpoint::{CheckpointError, Remote};
use paceline_ddp::Backend;
use paceline_ddp::device::{self, DeviceError, DeviceKind};
use paceline_launch::Console;
use paceline_rendezvous::env::WorkerEnv;
use paceline_train::config::{
    self, BadSamples, FileText, Given, Inputs, Recovery, Resolved, ResumeTarget, SavedRun,
    Surroundings, Task, TrainConfig, UserProgram,
};
use paceline_train::run_dir::{RunDir, checkpoints, has_checkpoint};
use paceline_train::{COLUMNS_VARIABLE, Output, TrainError};
use paceline_words::{Lang, counted, say};

use super::mlflow::{self, Tracking, tracked};
use super::{Program, allocator_settings, failed, rank, wrong_settings};
use crate::cli::TrainArgs;
use paceline_cli::exit::{Exit, Failure, hint_in, note, warn};
use paceline_cli::flags::finish;
use paceline_cli::gpu::p2p;
use paceline_cli::job;
use paceline_cli::usage::{Summary, UsageArgs, lang};

/// Folder for runs without `--run-dir`.
const RUNS: &str = "runs";
/// File of resolved settings in a run directory.
const SETTINGS: &str = "config.toml";

/// Trains, or only explains the settings. A process that is a rank of a job trains as that rank; any other process starts
/// ranks.
///
/// *Errors*: unusable settings, data, devices or run directory; then nothing is started.
pub(crate) fn train(program: &Program, args: &TrainArgs) -> Result<Exit, Failure> {
    let given = read_settings(program, args)?;
    let place = rank::place()?;
    if args.explain {
        let is_silent = place.as_ref().is_some_and(|place| place.rank != 0);
        let surroundings = Surroundings {
            job: place.as_ref().map(|place| rank::shape(place, &given)),
            ..Surroundings::of_process()
        };
        let (resolved, _) = resolve(given, &surroundings)?;
        return if is_silent {
            Ok(Exit::Done)
        } else {
            explain(&resolved, args.json)
        };
    }
    match place {
        Some(place) => {
            rank::train(program, given, place, Output::of(args.json)).or_else(rank::leave)
        }
        None => {
            let prepared = prepare(program, given, &Surroundings::of_process(), None)?;
            prepared.load()?;
            let Prepared {
                resolved,
                run,
                tracking,
                ..
            } = prepared;
            tracked(tracking, || start(resolved.config(), &run, args))
        }
    }
}

pub(super) fn read_settings(program: &Program, args: &TrainArgs) -> Result<Given, Failure> {
    let file = args.config.as_deref().map(FileText::read).transpose();
    let inputs = Inputs {
        flags: args.settings.clone(),
        environment: config::environment(std::env::vars_os()),
        file: file.map_err(wrong_settings)?,
        program: program.user.clone(),
    };
    Given::read(&inputs).map_err(wrong_settings)
}

/// A job ready to begin, once its checkpoints are [loaded](Prepared::load).
pub(super) struct Prepared {
    pub(super) resolved: Resolved,
    pub(super) run: RunDir,
    pub(super) origin: Origin,
    pub(super) tracking: Option<Tracking>,
}

/// The run to resume.
#[derive(Default)]
pub(super) struct Origin {
    pub(super) saved: Option<SavedRun>,
    /// The URL that may have a newer checkpoint than its folder.
    remote: Option<Remote>,
}

/// Resolves the settings, checks devices, data, object store and tracking server, and creates or opens the run directory, for the launcher or the first rank.
///
/// *Errors*: any obstacle to training; then nothing is left behind.
pub(super) fn prepare(
    program: &Program,
    given: Given,
    surroundings: &Surroundings,
    place: Option<&WorkerEnv>,
) -> Result<Prepared, Failure> {
    let (mut resolved, origin) = resolve(given, surroundings)?;
    let config = resolved.config();
    check_devices(config)?;
    let looks_at_all = config.task == Task::Images && config.bad_samples == BadSamples::Skip;
    if looks_at_all && !config.resume {
        note("every image is decoded once before the job begins, because of --bad-samples skip");
    }
    let foreseen = (program.foresee)(config).map_err(|error| failed(None, &error))?;
    for warning in &foreseen.warnings {
        warn(warning);
    }
    let copies = copies(config, &origin)?;
    let server = mlflow::find(config)?;
    let run = if resolved.makes_up_run_dir() {
        RunDir::create(&config.run_dir)
    } else {
        RunDir::open(&config.run_dir, config.resume, place)
    };
    let run = run.map_err(|error| failed(None, &error))?;
    resolved.set_run_dir(run.path());
    let settings = resolved.to_toml();
    let files = foreseen.files.iter().map(|(name, text)| (*name, text));
    for (name, text) in files.chain([(SETTINGS, &settings)]) {
        run.write(name, text)
            .map_err(|error| failed(None, &error))?;
    }
    if let Some(copies) = copies {
        // The only file that a run on another machine needs besides its checkpoint.
        match copies.write(SETTINGS, &settings) {
            Err(error) if resolved.config().resume => warn(&error.to_string()),
            written => written.map_err(failed_checkpoint)?,
        }
    }
    let tracking = match server {
        Some(server) => server.follow(program, &resolved, &run)?,
        None => None,
    };
    Ok(Prepared {
        resolved,
        run,
        origin,
        tracking,
    })
}

impl Prepared {
    /// Downloads the checkpoint to resume from, if the URL has the newest one, and reads it once before ranks start, so that an error in it
    /// is reported once and immediately.
    ///
    /// *Errors*: no checkpoint that can be used.
    pub(super) fn load(&self) -> Result<(), Failure> {
        let folder = checkpoints(self.run.path());
        // A download is verified before it is published.
        if let Some(remote) = &self.origin.remote
            && remote.download(&folder).map_err(failed_checkpoint)?
        {
            return Ok(());
        }
        if !self.resolved.config().resume {
            return Ok(());
        }
        match paceline_checkpoint::has_valid(&folder) {
            Ok(true) => Ok(()),
            Ok(false) => Err(failed(None, &TrainError::NoCheckpoint { path: folder })),
            Err(error) => Err(failed_checkpoint(error)),
        }
    }
}

/// Where the run's checkpoints are copied to.
///
/// *Errors*: the object store's; another run has its checkpoints there.
fn copies(config: &TrainConfig, origin: &Origin) -> Result<Option<Remote>, Failure> {
    let Some(url) = &config.checkpoint_dir else {
        return Ok(None);
    };
    let remote = Remote::open(url).map_err(failed_checkpoint)?;
    let comes_from = origin.remote.as_ref().map(Remote::url);
    let is_its_own = comes_from == Some(remote.url())
        || match &origin.saved {
            Some(saved) => is_copied_to(&saved.settings, remote.url())?,
            None => false,
        };
    if is_its_own || newest_step(&remote)?.is_none() {
        return Ok(Some(remote));
    }
    let message = format!("{} already holds the checkpoints of a run", remote.url());
    let advice = format!(
        "continue it with --resume {}, or choose another --checkpoint-dir",
        remote.url()
    );
    Err(Failure::new(Exit::Usage, message, Some(advice)))
}

/// Whether a run with these settings copies its checkpoints to `url`.
fn is_copied_to(settings: &FileText, url: &str) -> Result<bool, Failure> {
    let saved = Resolved::from_saved(settings).map_err(wrong_settings)?;
    let own = saved.config().checkpoint_dir.as_deref();
    Ok(own.is_some_and(|own| own.trim_end_matches('/') == url))
}

fn newest_step(remote: &Remote) -> Result<Option<u64>, Failure> {
    remote.newest_step().map_err(failed_checkpoint)
}

fn failed_checkpoint(error: CheckpointError) -> Failure {
    failed(None, &error.into())
}

/// The effective settings and the run to resume. Prints warnings about settings without effect.
fn resolve(given: Given, surroundings: &Surroundings) -> Result<(Resolved, Origin), Failure> {
    let origin = match given.resume() {
        ResumeTarget::No => Origin::default(),
        ResumeTarget::Run(folder) => Origin::here(folder)?,
        ResumeTarget::Newest => Origin::here(newest_run(Path::new(RUNS))?)?,
        ResumeTarget::At(url, folder) => {
            let name = url.trim_end_matches('/').rsplit('/').next();
            let folder = folder.unwrap_or_else(|| Path::new(RUNS).join(name.unwrap_or_default()));
            let found = Origin::newer(folder, &url)?;
            found.ok_or_else(|| failed(None, &TrainError::NoCheckpoint { path: url.into() }))?
        }
        ResumeTarget::Auto(folder, Some(url)) => Origin::newer(folder, &url)?.unwrap_or_default(),
        ResumeTarget::Auto(folder, None) if has_checkpoint(&folder) => Origin::here(folder)?,
        ResumeTarget::Auto(_, None) => Origin::default(),
    };
    let resolved = given.resolve(origin.saved.as_ref(), surroundings);
    let resolved = resolved.map_err(wrong_settings)?;
    for warning in resolved.warnings() {
        warn(warning);
    }
    Ok((resolved, origin))
}

impl Origin {
    fn here(folder: PathBuf) -> Result<Self, Failure> {
        Ok(Self {
            saved: Some(saved_run(folder)?),
            remote: None,
        })
    }

    /// The run whose checkpoints are in a folder, at a URL, or both; `None` if neither has any.
    fn newer(folder: PathBuf, url: &str) -> Result<Option<Self>, Failure> {
        let remote = Remote::open(url).map_err(failed_checkpoint)?;
        let is_here = has_checkpoint(&folder);
        let newest = match remote.newest_step() {
            Err(error) if is_here => {
                warn(&format!(
                    "{error}; the run goes on from {}",
                    folder.display()
                ));
                None
            }
            newest => newest.map_err(failed_checkpoint)?,
        };
        if newest.is_none() {
            return is_here.then(|| Self::here(folder)).transpose();
        }
        if is_here {
            let saved = saved_run(folder)?;
            if !is_copied_to(&saved.settings, remote.url())? {
                let (folder, url) = (saved.folder.display(), remote.url());
                let message = format!("run directory {folder} holds another run than {url}");
                let advice = "choose another --run-dir, or another --checkpoint-dir";
                return Err(Failure::new(Exit::Usage, message, Some(advice.into())));
            }
            return Ok(Some(Self {
                saved: Some(saved),
                remote: Some(remote),
            }));
        }
        let text = remote.read(SETTINGS).map_err(failed_checkpoint)?;
        let Some(text) = text else {
            let message = format!("{} holds no run: it has no {SETTINGS}", remote.url());
            let advice = "name the --checkpoint-dir of an earlier run";
            return Err(Failure::new(Exit::Usage, message, Some(advice.into())));
        };
        let path = format!("{}/{SETTINGS}", remote.url()).into();
        Ok(Some(Self {
            saved: Some(SavedRun {
                folder,
                settings: FileText { path, text },
            }),
            remote: Some(remote),
        }))
    }
}

pub(super) fn saved_run(folder: PathBuf) -> Result<SavedRun, Failure> {
    let path = folder.join(SETTINGS);
    if !path.exists() {
        let message = format!("{} holds no run: it has no {SETTINGS}", folder.display());
        let advice = "name the run directory of an earlier run";
        return Err(Failure::new(Exit::Usage, message, Some(advice.into())));
    }
    let settings = FileText::read(&path).map_err(wrong_settings)?;
    Ok(SavedRun { folder, settings })
}

/// The settings of a run of `program`, for a command that uses it again where it is now.
pub(super) fn settings_of(program: &Program, run: SavedRun) -> Result<TrainConfig, Failure> {
    let resolved = Resolved::from_saved(&run.settings).map_err(wrong_settings)?;
    if resolved.program() != program.user.as_ref() {
        let run = run.folder.display();
        let (name, advice) = match resolved.program() {
            Some(UserProgram {
                name,
                reads_data: true,
            }) => (
                name.as_str(),
                format!(
                    "`{name} eval {run}` evaluates it, `{name} predict {run} INPUT` applies it, and `paceline report {run}` shows its metrics"
                ),
            ),
            Some(UserProgram { name, .. }) => (
                name.as_str(),
                format!("`paceline report {run}` shows its metrics"),
            ),
            None => (
                "paceline train",
                format!(
                    "`paceline eval {run}` evaluates it, and `paceline predict {run} INPUT` applies it"
                ),
            ),
        };
        let message = format!("{run} is a run of `{name}`, whose model only that program knows");
        return Err(Failure::new(Exit::Usage, message, Some(advice)));
    }
    let mut config = resolved.config().clone();
    config.run_dir = run.folder;
    Ok(config)
}

/// The run in a folder, or the newest one.
pub(super) fn run_or_newest(folder: Option<&Path>) -> Result<SavedRun, Failure> {
    match folder {
        Some(folder) => saved_run(folder.to_owned()),
        None => saved_run(newest_run(Path::new(RUNS))?),
    }
}

/// The run with the newest checkpoint of all.
fn newest_run(runs: &Path) -> Result<PathBuf, Failure> {
    let written = |run: &PathBuf| {
        let newest = paceline_checkpoint::list(&checkpoints(run)).pop()?;
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
            let advice = "name the run, or train one first";
            Failure::new(Exit::Usage, message, Some(advice.into()))
        })
}

fn explain(resolved: &Resolved, json: bool) -> Result<Exit, Failure> {
    let text = if json {
        resolved.explain_json()
    } else {
        resolved.explain()
    };
    finish(io::Write::write_all(
        &mut io::stdout(),
        format!("{}\n", text.trim_end()).as_bytes(),
    ))
}

/// Checks the devices once before any rank starts.
fn check_devices(config: &TrainConfig) -> Result<(), Failure> {
    let (kind, ranks) = (config.device, config.nproc_per_node);
    if config.backend == Backend::Nccl && kind != DeviceKind::Cuda {
        let message =
            format!("`backend` is nccl, which needs CUDA devices, but `device` is {kind}");
        let advice = "omit --backend, or add --device cuda";
        return Err(Failure::new(Exit::Usage, message, Some(advice.into())));
    }
    if kind == DeviceKind::Cpu {
        return Ok(());
    }
    if kind == DeviceKind::Cuda && !kind.is_built() {
        // Checks the number of GPUs first: with too few, building the feature would not help.
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
        warn(&format!("{ranks} ranks take turns on one {kind} device"));
    }
    Ok(())
}

fn require(gpus: usize, found: Result<usize, String>) -> Result<(), Failure> {
    paceline_gpu::devices::require(gpus, found)
        .map_err(|error| Failure::new(Exit::Environment, &error, error.hint()))
}

fn start(config: &TrainConfig, run: &RunDir, args: &TrainArgs) -> Result<Exit, Failure> {
    let program = job::own_program()?;
    let (ranks, cores) = (config.nproc_per_node, Surroundings::of_process().cores);
    if config.device == DeviceKind::Cpu && ranks > cores {
        let cores = counted(cores, "core");
        note(&format!("{ranks} ranks take turns on {cores}"));
    }
    let mut job = job::new(&program, ranks)?;
    let settings = run.path().join(SETTINGS);
    job.args = vec!["worker".into(), "--config".into(), settings.into()];
    job.args.extend(args.json.then(|| "--json".into()));
    if !args.rest.is_empty() {
        job.args.push("--".into());
        job.args.extend(args.rest.iter().cloned());
    }
    job.log_dir = Some(run.path().join("logs"));
    job.console = Console::RankZeroRaw;
    job.max_restarts = config.max_restarts;
    job.recovery = match config.recovery {
        Recovery::Live => paceline_launch::Recovery::Live,
        Recovery::Restart => paceline_launch::Recovery::Restart,
        Recovery::None => paceline_launch::Recovery::None,
    };
    job.threads_per_rank = Some(config.threads_per_rank).filter(|threads| *threads > 0);
    job.env.extend(nccl_settings(config)?);
    job.env.extend(allocator_settings());
    if let (true, Some((width, _))) = (io::stdout().is_terminal(), terminal_size::terminal_size()) {
        job.env.push((COLUMNS_VARIABLE.into(), width.0.to_string()));
    }
    let usage = usage(config);
    let exit = job::run(job, &usage)?;
    // A job that was asked to stop has said this itself, and another try with wrong settings would fail as well.
    let has_failed = matches!(exit, Exit::Child(_) | Exit::JobFailed | Exit::Deadline);
    if has_failed && exit.code() != Exit::Usage.code() && has_checkpoint(run.path()) {
        let (lang, folder) = (lang(usage.lang), run.path().display());
        let advice = say!(
            lang,
            "continue with --resume {folder}",
            "이어서 학습하려면 --resume {folder}"
        );
        hint_in(lang, &advice);
    }
    Ok(exit)
}

/// Options of the usage output.
fn usage(config: &TrainConfig) -> UsageArgs {
    UsageArgs {
        summary: Summary::named(&config.usage),
        json: config.usage_json.clone(),
        csv: config.usage_csv.clone(),
        svg: config.usage_svg.clone(),
        lang: config.lang.as_deref().and_then(Lang::named),
        is_cpu_only: config.device == DeviceKind::Cpu,
    }
}

/// NCCL's variables for this machine, after testing the links between its devices. Variables set by the user stay unchanged. One rank that
/// computes on several devices copies between them, too.
fn nccl_settings(config: &TrainConfig) -> Result<Vec<(String, String)>, Failure> {
    let is_nccl = config.nproc_per_node > 1 && config.backend != Backend::Host;
    if config.device != DeviceKind::Cuda || !(is_nccl || config.devices > 1) {
        return Ok(Vec::new());
    }
    let lang = lang(config.lang.as_deref().and_then(Lang::named));
    let needed = if is_nccl { p2p::require_nccl() } else { Ok(()) };
    let settings = needed.and_then(|()| p2p::settings(lang));
    settings.map_err(|error| Failure::new(Exit::Environment, &error, error.hint()))
}
