//! The usage tracker beside a program that nothing launched: one in a process at a time.

use std::path::PathBuf;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use paceline_gpu::places::Places;
use paceline_rendezvous::env::WorkerEnv;
use paceline_usage::files::has_folder;
use paceline_usage::{Lang, Machine, Options, RankPids, Report, Tracker};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::handles::tables;

/// The process that has a tracker, or 0. A forked child keeps its parent's number.
static TRACKED: AtomicU32 = AtomicU32::new(0);

/// How a program is tracked; what is left out is as in [`Options`].
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Settings {
    period_s: Option<f64>,
    busy_percent: Option<u32>,
    rank_busy_percent: Option<u32>,
    csv: Option<PathBuf>,
    json: Option<PathBuf>,
    svg: Option<PathBuf>,
    /// The locale's if not given.
    lang: Option<String>,
}

/// A tracker of this process.
pub(crate) struct Tracked {
    tracker: Tracker,
    lang: Lang,
}

/// What it has to tell.
#[derive(Serialize)]
pub(crate) struct Told {
    report: Report,
    /// The report as people read it.
    text: String,
}

impl Settings {
    pub(crate) fn parse(json: &[u8]) -> Result<Self, Failure> {
        serde_json::from_slice(json)
            .map_err(|error| Failure::new("call", format!("the settings of a tracker: {error}")))
    }

    fn options(self) -> Result<Options, Failure> {
        let mut options = Options {
            lang: self.lang()?,
            ..Options::default()
        };
        if let Some(seconds) = self.period_s {
            let period = Duration::try_from_secs_f64(seconds).ok();
            options.period = period
                .filter(|period| !period.is_zero())
                .ok_or_else(|| wrong(format!("samples cannot be taken every {seconds} seconds")))?;
        }
        let rules = &mut options.rules;
        for (own, percent) in [
            (&mut rules.busy_percent, self.busy_percent),
            (&mut rules.rank_busy_percent, self.rank_busy_percent),
        ] {
            *own = percent.unwrap_or(*own);
        }
        for file in [&self.csv, &self.json, &self.svg].into_iter().flatten() {
            if !has_folder(file) {
                let file = file.display();
                return Err(wrong(format!(
                    "{file} cannot be written: its folder is not there"
                )));
            }
        }
        Ok(Options {
            csv: self.csv,
            json: self.json,
            svg: self.svg,
            ..options
        })
    }

    fn lang(&self) -> Result<Lang, Failure> {
        match &self.lang {
            None => Ok(Lang::from_env(variable)),
            Some(name) => Lang::named(name).ok_or_else(|| {
                let known = Lang::NAMES.join(", ");
                wrong(format!(
                    "{name:?} is no language that Paceline speaks; it speaks {known}"
                ))
            }),
        }
    }
}

/// Begins to track this process.
///
/// *Errors*: it is tracked already, by a tracker, by that of the process which it was forked from, or by its launcher.
pub(crate) fn start(settings: Settings) -> Result<(), Failure> {
    let env = WorkerEnv::from_lookup(&variable).unwrap_or_else(|_| WorkerEnv::alone());
    if env.page_fd.is_some() {
        return Err(
            wrong("this process runs under `paceline run`, which tracks it already").hint(
                "leave track() out here: `paceline run` sums up at the end, and its --usage-json, --usage-csv and --usage-svg write files",
            ),
        );
    }
    let options = settings.options()?;
    let own = process::id();
    match TRACKED.compare_exchange(0, own, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {}
        Err(pid) if pid == own => {
            return Err(wrong("this process is tracked already")
                .hint("end the first tracker before the next one begins"));
        }
        Err(pid) => return Err(wrong(of_parent(pid)).hint(
            "its figures include those of the processes that it starts; track either it or this one",
        )),
    }
    let lang = options.lang;
    let ranks = RankPids::default();
    ranks.started(u32::try_from(env.rank).unwrap_or(0), own);
    let tracker = Tracker::watch(options, ranks, |ranks| {
        Machine::visible(&Places::from_env(), ranks, &variable)
    });
    *tables().tracked.lock() = Some(Tracked { tracker, lang });
    Ok(())
}

/// What the tracker has to tell so far.
pub(crate) fn report() -> Result<Told, Failure> {
    let tracked = tables().tracked.lock();
    let tracked = tracked.as_ref().ok_or_else(nothing)?;
    Ok(Told::new(tracked.tracker.report(), tracked.lang))
}

/// Ends the tracker, which writes its files.
///
/// *Blocks*: for [`Options::finish_wait`] at most.
pub(crate) fn finish() -> Result<Told, Failure> {
    let tracked = tables().tracked.lock().take().ok_or_else(nothing)?;
    let Tracked { tracker, lang } = tracked;
    let report = tracker.finish();
    TRACKED.store(0, Ordering::Release);
    Ok(Told::new(report, lang))
}

impl Told {
    fn new(report: Report, lang: Lang) -> Self {
        let text = report.text(lang);
        Self { report, text }
    }
}

/// Why there is no tracker here.
fn nothing() -> Failure {
    match TRACKED.load(Ordering::Acquire) {
        pid if pid == 0 || pid == process::id() => {
            Failure::new("handle", "this process is not tracked, or no longer")
        }
        pid => {
            Failure::new("handle", of_parent(pid)).hint("only that process can ask for its figures")
        }
    }
}

fn of_parent(pid: u32) -> String {
    let own = process::id();
    format!(
        "the tracker belongs to process {pid}, and this is process {own}, which was forked from it"
    )
}

fn wrong(message: impl Into<String>) -> Failure {
    Failure::new("call", message)
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(json: &str) -> Result<Options, String> {
        let options = Settings::parse(json.as_bytes()).and_then(Settings::options);
        options.map_err(|failure| {
            assert_eq!(failure.kind, "call");
            failure.message.into()
        })
    }

    #[test]
    fn settings_are_the_trackers() {
        let expected = Options {
            lang: Lang::Ko,
            period: Duration::from_millis(20),
            csv: Some("samples.csv".into()),
            svg: Some("/a picture.svg".into()),
            ..Options::default()
        };
        let json = r#"{"lang": "ko", "period_s": 0.02, "csv": "samples.csv", "json": null, "svg": "/a picture.svg"}"#;
        assert_eq!(options(json).unwrap(), expected);
        let busy = options(r#"{"busy_percent": 30, "rank_busy_percent": 80}"#)
            .unwrap()
            .rules;
        assert_eq!((busy.busy_percent, busy.rank_busy_percent), (30, 80));
    }

    #[test]
    fn settings_that_make_no_sense_are_refused_in_words() {
        let check = |json, expected: &str| {
            let refused = options(json).unwrap_err();
            assert!(refused.contains(expected), "{json}: {refused}");
        };
        check(
            r#"{"period_s": 0}"#,
            "samples cannot be taken every 0 seconds",
        );
        check(r#"{"period_s": -1}"#, "every -1 seconds");
        check(r#"{"period_s": 1e300}"#, "every 1000000");
        check(
            r#"{"lang": "fr"}"#,
            r#""fr" is no language that Paceline speaks; it speaks en, ko"#,
        );
        check(
            r#"{"json": "/no such folder/usage.json"}"#,
            "/no such folder/usage.json cannot be written: its folder is not there",
        );
        check(
            r#"{"busy_percent": -5}"#,
            "the settings of a tracker: invalid value",
        );
        check(r#"{"pace": 1}"#, "unknown field `pace`");
    }
}
