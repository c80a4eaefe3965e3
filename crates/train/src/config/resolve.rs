//! From written to effective settings: merged layers, derived settings, checks.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use paceline_ddp::device::{self, DeviceError, DeviceKind, Survey};
use paceline_rendezvous::env::{Listed, Timeout};
use serde::{Deserialize, Serialize};

use super::UserProgram;
use super::advice::advice;
use super::check::{check, unused_settings};
use super::derive;
use super::error::ConfigError;
use super::layers::{self, FileOf, FileText};
use super::resume::conflicts;
use super::settings::Settings;
use super::table::{Fallback, OPTIONS};
use super::value::{Setting, Source, Value};
use super::{Resolved, TrainConfig};
use crate::data::idx::is_idx_folder;
use crate::data::images::is_image_folder;

/// The user's settings as written.
#[derive(Clone, Debug, Default)]
pub struct Inputs {
    /// Flags: key and value, as text.
    pub flags: Vec<(String, String)>,
    /// Environment variables: name and value.
    pub environment: Vec<(String, String)>,
    /// The file of settings.
    pub file: Option<FileText>,
    /// The user's program with a task of its own; `None` for `paceline train`.
    pub program: Option<UserProgram>,
}

/// Other inputs for resolving settings.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// Cores that the job may use.
    pub cores: usize,
    /// Base folder of relative paths.
    pub folder: PathBuf,
    /// Start time of the job.
    pub now: SystemTime,
    /// Looks at a path.
    pub path_kind: fn(&Path) -> PathKind,
    /// Looks for devices of a kind; called only for GPUs.
    pub survey: fn(DeviceKind) -> Result<Survey, DeviceError>,
    /// The job that this process is a rank of; `None` if it starts the ranks itself.
    pub job: Option<JobShape>,
}

/// The ranks of a job started by a launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobShape {
    /// Ranks of the job.
    pub world: usize,
    /// Ranks on this machine.
    pub local_world: usize,
    /// Whether the launcher has the other ranks go on when one is lost, and starts no ranks again.
    pub recovers_live: bool,
}

impl Surroundings {
    /// The current surroundings of this process.
    #[must_use]
    pub fn of_process() -> Self {
        Self {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            folder: std::env::current_dir().unwrap_or_default(),
            now: SystemTime::now(),
            path_kind: PathKind::of,
            survey: device::survey,
            job: None,
        }
    }
}

/// The kind of entry at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathKind {
    /// A folder of images for each class.
    ImageFolder,
    /// Any other folder.
    Folder,
    /// A file, or anything else that can be opened.
    File,
    /// Nothing visible to this process.
    Missing,
}

impl PathKind {
    fn of(path: &Path) -> Self {
        match std::fs::metadata(path) {
            // An IDX folder may hold a picture too.
            Ok(found) if found.is_dir() && !is_idx_folder(path) && is_image_folder(path) => {
                Self::ImageFolder
            }
            Ok(found) if found.is_dir() => Self::Folder,
            Ok(_) => Self::File,
            Err(_) => Self::Missing,
        }
    }
}

/// The run to resume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResumeTarget {
    /// None: a new run.
    No,
    /// The run in this folder.
    Run(PathBuf),
    /// The newest run below `runs/`.
    Newest,
    /// The run whose checkpoints are at a URL, in a folder; `None`: in one named after it.
    At(String, Option<PathBuf>),
    /// The run in this folder if it has a checkpoint or the URL has, otherwise a new run there.
    Auto(PathBuf, Option<String>),
}

/// A run to resume, with its saved settings.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SavedRun {
    /// Its folder.
    pub folder: PathBuf,
    /// Its saved settings.
    pub settings: FileText,
}

/// The user's settings, read and merged, before defaults and derived settings.
///
/// Resolving takes two steps, because the second starts from the settings of the run that the first names: call
/// [`Given::read`], then [`Given::resume`] to find the [`SavedRun`] to load, then [`Given::resolve`].
#[derive(Clone, Debug)]
pub struct Given {
    settings: Settings,
    /// Variables of ranks and tools, for `--explain`.
    variables: Vec<Listed>,
    warnings: Vec<String>,
}

impl Given {
    /// Reads all settings, including those that a stronger source overrides.
    ///
    /// *Errors*: a file that is not TOML, a setting that does not exist, an invalid value.
    pub fn read(inputs: &Inputs) -> Result<Self, ConfigError> {
        let program = inputs.program.as_ref();
        let mut settings = match &inputs.file {
            Some(file) => layers::from_file(file, FileOf::User, program)?,
            None => Settings::default(),
        };
        settings.overlay(layers::from_environment(&inputs.environment, program)?);
        settings.overlay(layers::from_flags(&inputs.flags, program)?);
        settings.program.clone_from(&inputs.program);
        if settings.word("resume").is_some() && settings.path("run_dir").is_none() {
            return Err(ConfigError::new(
                format!(
                    "`resume` {} needs `run_dir`",
                    settings.need("resume").cite()
                ),
                "name the folder of the new or resumed run: --run-dir DIR",
            ));
        }
        // A run that resumes from a URL goes on saving there.
        if let (Some(url), None) = (url(&settings), settings.get("checkpoint_dir")) {
            let source = settings.need("resume").source.clone();
            settings.set("checkpoint_dir", Setting::new(Value::Text(url), source));
        }
        Ok(Self {
            settings,
            variables: layers::of_contract(&inputs.environment, program),
            warnings: layers::unused_variables(&inputs.environment, program),
        })
    }

    /// The transport and the timeout for joining the group, which happens before settings are resolved.
    #[must_use]
    pub fn joining(&self) -> (String, Timeout) {
        let mut settings = Settings::defaults();
        settings.overlay(self.settings.clone());
        let seconds = settings.count("timeout_seconds");
        let timeout = seconds.map_or(Timeout::Auto, |seconds| {
            Timeout::After(Duration::from_secs(seconds))
        });
        let transport = settings.word("transport").unwrap_or_default();
        (transport.to_owned(), timeout)
    }

    /// The run directory, if it is named.
    #[must_use]
    pub fn run_dir(&self) -> Option<&Path> {
        self.settings.path("run_dir")
    }

    /// Sets the folder of a new run instead of a generated one.
    pub fn use_run_dir(&mut self, folder: &Path) {
        let setting = Setting::new(Value::Path(folder.to_owned()), Source::Launcher);
        self.settings.set("run_dir", setting);
    }

    /// Resumes the run in the named directory if it holds a checkpoint. For a restarted job it is its own run.
    pub fn resume_own_run(&mut self) {
        if self.resume() == ResumeTarget::No && self.run_dir().is_some() {
            let setting = Setting::new("auto".into(), Source::Launcher);
            self.settings.set("resume", setting);
        }
    }

    /// The run to resume.
    #[must_use]
    pub fn resume(&self) -> ResumeTarget {
        let run_dir = || self.run_dir();
        if let Some(url) = url(&self.settings) {
            return ResumeTarget::At(url, run_dir().map(Path::to_owned));
        }
        match self.settings.get("resume").map(|resume| &resume.value) {
            Some(Value::Path(run)) => ResumeTarget::Run(run.clone()),
            Some(Value::Switch(true)) => match run_dir() {
                Some(run) => ResumeTarget::Run(run.to_owned()),
                None => ResumeTarget::Newest,
            },
            Some(Value::Text(_)) => ResumeTarget::Auto(
                run_dir().unwrap_or(Path::new("")).to_owned(),
                self.settings.word("checkpoint_dir").map(str::to_owned),
            ),
            _ => ResumeTarget::No,
        }
    }

    /// The effective settings. `saved` is the run that [`Given::resume`] asks for.
    ///
    /// *Errors*: conflicts between settings.
    ///
    /// # Panics
    ///
    /// If `saved` is given without a run to resume, or missing with one.
    pub fn resolve(
        mut self,
        saved: Option<&SavedRun>,
        surroundings: &Surroundings,
    ) -> Result<Resolved, ConfigError> {
        let is_expected = match self.resume() {
            ResumeTarget::No => saved.is_none(),
            ResumeTarget::Run(_) | ResumeTarget::Newest | ResumeTarget::At(..) => saved.is_some(),
            ResumeTarget::Auto(..) => true,
        };
        assert!(
            is_expected,
            "a saved run is required if and only if one is resumed"
        );
        make_absolute(&mut self.settings, "data", &surroundings.folder);
        make_absolute(&mut self.settings, "init", &surroundings.folder);
        make_absolute(&mut self.settings, "test_data", &surroundings.folder);
        make_absolute(&mut self.settings, "tokenizer", &surroundings.folder);
        let (mut settings, run_device) = match saved {
            Some(run) => self.over_saved(run)?,
            None => (self.over_defaults(), None),
        };
        if settings.word("resume").is_some() {
            settings.choose("resume", Value::Switch(false), "auto: no checkpoint yet");
        }
        derive::of_program(&mut settings);
        derive::task(&mut settings, surroundings.path_kind)?;
        derive::of_task(&mut settings);
        derive::of_optimizer(&mut settings);
        derive::device(&mut settings, surroundings);
        self.warnings.extend(device_changed(run_device, &settings));
        let is_rank = surroundings.job.is_some();
        self.warnings.extend(unused_settings(&settings, is_rank));
        let ranks = match surroundings.job {
            Some(job) => {
                self.warnings.extend(derive::place(&mut settings, job));
                Some(job.world as u64)
            }
            None => None,
        };
        derive::numbers_and_names(&mut settings, surroundings, ranks);
        derive::recovery(&mut settings, surroundings.job, ranks);
        derive::snapshots(&mut settings);
        check(&settings, ranks)?;
        self.warnings.extend(advice(&settings));
        Ok(Resolved {
            variables: self.variables,
            ..Resolved::new(settings, self.warnings)
        })
    }

    fn over_defaults(&mut self) -> Settings {
        let mut settings = Settings::defaults();
        settings.overlay(std::mem::take(&mut self.settings));
        settings
    }

    /// Also returns the run's previous device.
    fn over_saved(&mut self, run: &SavedRun) -> Result<(Settings, Option<Setting>), ConfigError> {
        let mut saved = read_saved(&run.settings)?;
        if saved.program != self.settings.program {
            let name = |program: &Option<UserProgram>| match program {
                Some(program) => program.name.clone(),
                None => "paceline train".to_owned(),
            };
            let (own, other) = (name(&self.settings.program), name(&saved.program));
            let run = run.folder.display();
            return Err(ConfigError::new(
                format!("{run} is a run of `{other}`, which `{own}` cannot resume"),
                format!("resume it with `{other}`, or name a run of `{own}`"),
            ));
        }
        let conflicts = conflicts(&saved, &self.settings);
        if !conflicts.is_empty() {
            let run = run.folder.display();
            let conflicts: String = conflicts.iter().map(|one| format!("\n  {one}")).collect();
            return Err(ConfigError::new(
                format!("cannot resume {run} with other settings{conflicts}"),
                "omit them to keep the run's settings, or start a new run without --resume",
            ));
        }
        self.resume_in_place(run)?;
        let before = saved.get("device").cloned();
        self.resume_on_device(&saved);
        saved.overlay(std::mem::take(&mut self.settings));
        Ok((saved, before))
    }

    /// A resumed run keeps its kind of device unless the user names another or changes `use_gpu`.
    fn resume_on_device(&mut self, saved: &Settings) {
        if self.settings.word("device") == Some("auto") {
            self.settings.remove("device");
        }
        let has_gpu = derive::kind(saved).is_some_and(DeviceKind::is_gpu);
        let wants_gpu = self.settings.count("use_gpu").map(|gpus| gpus > 0);
        if self.settings.get("device").is_none() && wants_gpu.is_some_and(|wants| wants != has_gpu)
        {
            let source = self.settings.need("use_gpu").source.clone();
            self.settings
                .set("device", Setting::new("auto".into(), source));
        }
    }

    /// Replaces `run_dir` and `resume` by their resolved values, ignoring those in the run's saved settings.
    fn resume_in_place(&mut self, run: &SavedRun) -> Result<(), ConfigError> {
        let resume = self.settings.need("resume").clone();
        let elsewhere = |path: &Path| tidy(path) != tidy(&run.folder);
        if self.settings.path("run_dir").is_some_and(elsewhere) {
            let (run, cited) = (run.folder.display(), self.settings.need("run_dir").cite());
            return Err(ConfigError::new(
                format!("cannot resume {run} in another folder: `run_dir` is {cited}"),
                "omit `run_dir`: a run resumes in its own folder",
            ));
        }
        let folder = Value::Path(run.folder.clone());
        self.settings
            .set("run_dir", Setting::new(folder, resume.source.clone()));
        self.settings
            .set("resume", Setting::new(Value::Switch(true), resume.source));
        Ok(())
    }
}

/// Reads settings that [`Resolved::to_toml`] wrote.
///
/// A setting missing from the file is newer than the file and gets its default; derived settings must be present.
pub(super) fn read_saved(file: &FileText) -> Result<Settings, ConfigError> {
    let mut settings = Settings::defaults();
    settings.overlay(layers::from_file(file, FileOf::Run, None)?);
    derive::of_program(&mut settings);
    // The run is from a version without image folders.
    settings.set_default("random_crop", "none", None);
    // The run is from a version without this setting.
    if settings.need("device").source == Source::Default {
        let value = DeviceKind::Cpu.name().into();
        settings.set("device", Setting::new(value, Source::Default));
    }
    if settings.need("dp").source == Source::Default {
        let ranks = settings.count("nproc_per_node").unwrap_or(1);
        let replicas = (ranks / derive::replica_ranks(&settings, ranks)).max(1);
        let source = Source::Run(file.path.clone());
        settings.set("dp", Setting::new(replicas.into(), source));
    }
    let lacking = |row: &&super::OptionRow| {
        matches!(row.fallback, Fallback::Derived(_)) && settings.get(row.key).is_none()
    };
    match OPTIONS.iter().find(lacking) {
        Some(row) => Err(damaged(format!(
            "{} lacks `{}`",
            file.path.display(),
            row.key
        ))),
        None => Ok(settings),
    }
}

/// Refuses values that [`Resolved::to_toml`] never writes: `auto`, and a folder to resume.
fn refuse_unresolved(settings: &Settings, path: &Path) -> Result<(), ConfigError> {
    let open = [
        ("nproc_per_node", settings.count("nproc_per_node").is_none()),
        ("device", derive::kind(settings).is_none()),
        ("dp", settings.count("dp").is_none()),
        ("recovery", settings.word("recovery") == Some("auto")),
        ("resume", settings.path("resume").is_some()),
    ];
    match open.into_iter().find(|(_, open)| *open) {
        Some((key, _)) => {
            let (value, path) = (&settings.need(key).value, path.display());
            Err(damaged(format!(
                "`{key}` is {value} ({path}), but saved settings must be resolved"
            )))
        }
        None => Ok(()),
    }
}

fn damaged(message: String) -> ConfigError {
    ConfigError::new(
        message,
        "the file is damaged: restore it, or start a new run",
    )
}

/// A warning if a run resumes on another kind of device.
fn device_changed(before: Option<Setting>, settings: &Settings) -> Option<String> {
    let (before, now) = (before?.value, settings.need("device"));
    (before != now.value).then(|| {
        format!(
            "`device` was {before} and is now {}: it rounds differently, which changes the bits of the result",
            now.cite()
        )
    })
}

/// The URL to resume from.
fn url(settings: &Settings) -> Option<String> {
    let resume = settings.path("resume")?.to_str()?;
    resume.contains("://").then(|| resume.into())
}

/// A path without a leading `.`, which path comparison does not ignore.
fn tidy(path: &Path) -> &Path {
    path.strip_prefix(".").unwrap_or(path)
}

/// Makes a path valid for a later start in another folder.
fn make_absolute(settings: &mut Settings, key: &'static str, folder: &Path) {
    let Some(mut setting) = settings.get(key).cloned() else {
        return;
    };
    let path = match &setting.value {
        Value::Path(path) => path.as_path(),
        Value::Text(name) if !["bytes", "bpe"].contains(&name.as_str()) => Path::new(name),
        _ => return,
    };
    let absolute = folder.join(tidy(path));
    // A non-UTF-8 folder cannot be saved; the path as given can.
    if let Some(absolute) = absolute.to_str() {
        setting.value = match setting.value {
            Value::Text(_) => Value::Text(absolute.to_owned()),
            _ => Value::Path(absolute.into()),
        };
        settings.set(key, setting);
    }
}

impl Resolved {
    /// Reads settings saved by [`Resolved::to_toml`], for workers and tools.
    ///
    /// *Errors*: those of reading, a setting that is missing or not resolved, and conflicts between settings.
    pub fn from_saved(file: &FileText) -> Result<Self, ConfigError> {
        let settings = read_saved(file)?;
        refuse_unresolved(&settings, &file.path)?;
        check(&settings, derive::ranks_of_run(&settings))?;
        Ok(Self::new(settings, Vec::new()))
    }

    fn new(settings: Settings, warnings: Vec<String>) -> Self {
        let config = TrainConfig::from_settings(&settings);
        Self {
            settings,
            variables: Vec::new(),
            warnings,
            config,
        }
    }
}
