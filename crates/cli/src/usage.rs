//! How long devices and ranks really worked at the same time: the usage tracker beside a job, for `run` and `train`.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use paceline_gpu::places::Places;
use paceline_launch::{Job, RankWatch};
use paceline_usage::files::has_folder;
use paceline_usage::report::Note;
use paceline_usage::{Machine, Options, RankPids, Tracker};
use paceline_words::Lang;

use crate::exit::{Failure, warn};

/// A job that ends sooner is not summed up unasked: there is little to see, and its own output matters more.
const TELLING_AFTER: Duration = Duration::from_secs(10);

/// The usage report: when, and into which files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Usage")]
pub struct UsageArgs {
    /// Say at the end on stderr how long devices and ranks worked at the same time: on, off, or auto for jobs of 10 s and more
    #[arg(id = "usage", long = "usage", value_name = "WHEN")]
    #[arg(default_value = "auto")]
    #[arg(value_parser = PossibleValuesParser::new(["auto", "on", "off"]).map(|name| Summary::named(&name)))]
    pub summary: Summary,
    /// Write the same and more as JSON
    #[arg(id = "usage_json", long = "usage-json", value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write every sample as CSV, ten a second: some 0.1 GB a day for each device
    #[arg(id = "usage_csv", long = "usage-csv", value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Draw utilisation over time as SVG
    #[arg(id = "usage_svg", long = "usage-svg", value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Language of the summary, the picture, notices and the report of a failure [default: the locale's, else en]
    #[arg(long, value_name = "LANG", value_parser = langs())]
    pub lang: Option<Lang>,
    /// Whether the job computes on processors only: the devices of other jobs do not concern it.
    #[arg(skip)]
    pub is_cpu_only: bool,
}

/// When the summary is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Summary {
    /// After jobs of ten seconds and more.
    #[default]
    Auto,
    /// After every job.
    On,
    /// Never.
    Off,
}

impl Summary {
    /// The one with this name, else `Auto`.
    #[must_use]
    pub fn named(name: &str) -> Self {
        match name {
            "on" => Self::On,
            "off" => Self::Off,
            _ => Self::Auto,
        }
    }
}

impl UsageArgs {
    /// Nothing is measured.
    #[must_use]
    pub fn off() -> Self {
        Self {
            summary: Summary::Off,
            ..Self::default()
        }
    }
}

/// A language by its name.
pub(crate) fn langs() -> impl TypedValueParser<Value = Lang> {
    PossibleValuesParser::new(Lang::NAMES).try_map(|name| Lang::named(&name).ok_or("no language"))
}

/// The language to use: the one asked for, else the locale's.
pub fn lang(asked: Option<Lang>) -> Lang {
    asked.unwrap_or_else(|| Lang::from_env(|name| std::env::var(name).ok()))
}

/// The language of a report. Machines, which read JSON, are told English.
pub(crate) fn report_lang(asked: Option<Lang>, json: bool) -> Lang {
    match json {
        true => Lang::En,
        false => lang(asked),
    }
}

/// A tracker beside a job.
#[derive(Debug)]
pub(crate) struct Usage {
    tracker: Tracker,
    /// When the first rank began; a job that waited for other nodes in vain has none.
    begun: Arc<OnceLock<Instant>>,
    summary: Summary,
    has_files: bool,
    lang: Lang,
}

impl Usage {
    /// Begins to sample, and lets the job's launcher tell which processes are its ranks; `None` if nothing was asked for.
    ///
    /// *Errors*: a file that was asked for would have no folder to be in.
    pub(crate) fn start(args: &UsageArgs, job: &mut Job) -> Result<Option<Self>, Failure> {
        let files = [&args.json, &args.csv, &args.svg];
        let has_files = files.iter().any(|file| file.is_some());
        if args.summary == Summary::Off && !has_files {
            return Ok(None);
        }
        require_folders(files)?;
        let lang = lang(args.lang);
        let ranks = RankPids::default();
        let (told, begun) = (ranks.clone(), Arc::<OnceLock<Instant>>::default());
        let first = Arc::clone(&begun);
        // Only the part of the job's environment that decides which devices it sees.
        let own: Vec<_> = (job.env.iter())
            .filter(|(name, _)| name.starts_with("CUDA_"))
            .cloned()
            .collect();
        let is_cpu_only = args.is_cpu_only;
        job.watch = Some(RankWatch::new(move |event| {
            let Ok(rank) = u32::try_from(event.rank) else {
                return;
            };
            match event.is_running {
                true => {
                    first.get_or_init(Instant::now);
                    told.started(rank, event.pid);
                }
                false => told.ended(rank),
            }
        }));
        let options = Options {
            json: args.json.clone(),
            csv: args.csv.clone(),
            svg: args.svg.clone(),
            lang,
            ..Options::default()
        };
        Ok(Some(Self {
            tracker: Tracker::watch(options, ranks, move |ranks| match is_cpu_only {
                true => Machine::without_devices(&Places::from_env(), ranks),
                false => Machine::visible(&Places::from_env(), ranks, &|name| {
                    let set = own.iter().rev().find(|(key, _)| key == name);
                    set.map(|(_, value)| value.clone())
                        .or_else(|| std::env::var(name).ok())
                }),
            }),
            begun,
            summary: args.summary,
            has_files,
            lang,
        }))
    }

    /// Ends it, writes the files, and returns what is to be printed.
    pub(crate) fn finish(self) -> Option<String> {
        let is_told = match self.summary {
            Summary::On => self.begun.get().is_some(),
            Summary::Auto => (self.begun.get()).is_some_and(|at| at.elapsed() >= TELLING_AFTER),
            Summary::Off => false,
        };
        // A driver whose answer is not needed is not waited for.
        if !is_told && !self.has_files {
            return None;
        }
        let report = self.tracker.finish();
        for note in &report.notes {
            if let (false, Note::File { path, why }) = (is_told, note) {
                warn(&format!("{path} is not what was asked for: {why}"));
            }
        }
        is_told.then(|| report.text(self.lang))
    }
}

/// Checks before a job that the files it is to write have folders to be in.
///
/// *Errors*: one has none.
pub(crate) fn require_folders<const N: usize>(files: [&Option<PathBuf>; N]) -> Result<(), Failure> {
    let mut files = files.into_iter().flatten();
    files.find(|file| !has_folder(file)).map_or(Ok(()), |file| {
        Err(Failure::usage(format!(
            "{} cannot be written: its folder is not there",
            file.display()
        )))
    })
}
