//! What a run has written so far, as far as it is shown.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use paceline_words::Lang;

use crate::curve::Curve;
use crate::error::ReportError;
use crate::failure::JobFailure;
use crate::gantt::Spans;
use crate::incident::Incident;
use crate::records::{End, Line, Start};
use crate::tail::{METRICS, Tail};
use crate::words;

/// Longest text of a line that is kept, such as the name of a signal.
const TEXT_MAX: usize = 64;

/// Longest reason for a change of ranks that is kept.
const WHY_MAX: usize = 400;

/// Most bytes of a file of settings.
const SETTINGS_BYTES_MAX: u64 = 1 << 20;

/// Most incidents kept, the last ones; the others are counted.
const INCIDENTS_MAX: usize = 200;

/// Most metrics of held-out data kept; a task has a few.
const METRICS_MAX: usize = 16;

/// Weight of a step in the pace: steps older than some thirty do not count any more.
const PACE_WEIGHT: f64 = 1.0 / 16.0;

/// Figures of an evaluation that are no metrics.
const NO_METRICS: [&str; 8] = [
    "kind",
    "step",
    "epoch",
    "train_loss",
    "held_out_loss",
    "samples_per_second",
    "tokens_per_second",
    "skipped_steps",
];

/// One run, followed while it trains.
///
/// ```no_run
/// let mut run = paceline_report::Run::read("runs/wine".as_ref())?;
/// println!("{} steps", run.seen.steps);
/// run.update()?; // what was written since
/// # Ok::<(), paceline_report::ReportError>(())
/// ```
pub struct Run {
    /// The name of its folder.
    pub name: String,
    /// Key, value and source of each setting that has a value.
    pub settings: Vec<[String; 3]>,
    /// What its metrics say.
    pub seen: Seen,
    /// Why its job has failed, if its launcher has said so.
    pub failure: Option<JobFailure>,
    tail: Tail,
}

/// What the metrics of a run say, in bounded memory.
#[derive(Default)]
pub struct Seen {
    /// How it began, or was started again last.
    pub start: Option<Start>,
    /// Loss of each step.
    pub loss: Curve,
    /// The last epoch's mean.
    pub train_loss: Option<f64>,
    /// Loss on held-out data.
    pub held_out_loss: Curve,
    /// Metrics of held-out data by name.
    pub metrics: Vec<(String, Curve)>,
    /// Predictions per second of each step, of all ranks.
    pub rate: Curve,
    /// Milliseconds of each step, of a run that does not say how many predictions these have.
    pub step_time: Curve,
    /// Share of a step, in percent, in which rank 0 waited for others.
    pub waited: Curve,
    /// Learning rate of each step.
    pub learning_rate: Curve,
    /// Norm of the gradients of each step, if they are clipped.
    pub gradient_norm: Curve,
    /// Whether predictions are tokens.
    pub has_tokens: bool,
    /// Steps done.
    pub steps: u64,
    /// Epochs done.
    pub epochs: u64,
    /// Ranks now, if that is known.
    pub ranks: Option<u64>,
    /// Time in steps, in seconds.
    pub seconds: f64,
    /// Mean time of the last steps, in seconds.
    pub step_seconds: Option<f64>,
    /// What does not belong to an undisturbed run.
    pub incidents: Vec<Incident>,
    /// Earlier incidents.
    pub incidents_left_out: u64,
    /// Lines that are no records.
    pub unread: u64,
    /// What the ranks did in the last step that is known and had neither evaluation nor checkpoint.
    pub plain_step: Option<Spans>,
    /// In the last one that had.
    pub saved_step: Option<Spans>,
    /// The signal that has stopped it, if it has not begun again.
    pub stopped: Option<String>,
    /// How it ended; nothing while it trains, and of a run that was cut off.
    pub end: Option<End>,
}

/// How far a run is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// It has done all of its steps.
    Ended,
    /// Its job has failed.
    Failed,
    /// This signal has asked it to stop, after a step.
    Stopped(String),
    /// It trains, or has been cut off without a word.
    Open,
}

impl State {
    /// The state in a word or two.
    #[must_use]
    pub fn text(&self, lang: Lang) -> String {
        match self {
            Self::Ended => words::ENDED.of(lang).to_owned(),
            Self::Failed => words::FAILED.of(lang).to_owned(),
            Self::Stopped(signal) => words::STOPPED.filled(lang, &[signal]),
            Self::Open => words::NOT_ENDED.of(lang).to_owned(),
        }
    }
}

impl Run {
    /// Reads a run directory, even while the job runs. Lines that cannot be read are counted.
    ///
    /// *Cost*: a pass over `metrics.jsonl`; memory does not grow with it.
    ///
    /// *Errors*: no metrics; the system's.
    pub fn read(folder: &Path) -> Result<Self, ReportError> {
        let tail = Tail::open(folder)?;
        let full = fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
        let name = full.file_name().unwrap_or_default().to_string_lossy();
        let mut run = Self {
            name: name.into_owned(),
            settings: settings(&folder.join("config.toml"))?,
            seen: Seen::default(),
            failure: None,
            tail,
        };
        run.update()?;
        Ok(run)
    }

    /// The run directory.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.tail.folder()
    }

    /// Takes in what the job has written since, and returns whether that is anything. A job that is resumed replaces its metrics; they are
    /// read anew then.
    ///
    /// *Errors*: the metrics are gone; the system's.
    pub fn update(&mut self) -> Result<bool, ReportError> {
        let is_new = self.tail.reopen()?;
        if is_new {
            self.seen = Seen::default();
            // A job that is resumed writes its settings anew too.
            self.settings = settings(&self.folder().join("config.toml"))?;
        }
        let mut has_more = is_new;
        while let Some(line) = self.tail.next_line()? {
            self.seen.add(line);
            has_more = true;
        }
        let failure = JobFailure::read(self.folder());
        has_more |= failure != self.failure;
        self.failure = failure;
        Ok(has_more)
    }

    /// How far it is, as its files say.
    #[must_use]
    pub fn state(&self) -> State {
        match &self.seen.stopped {
            _ if self.seen.end.is_some() => State::Ended,
            _ if self.failure.is_some() => State::Failed,
            Some(signal) => State::Stopped(signal.clone()),
            None => State::Open,
        }
    }

    /// The last incidents in sentences, at most so many; the failure of its job is the last one.
    #[must_use]
    pub fn incidents(&self, most: usize, lang: Lang) -> Vec<String> {
        let seen = self.seen.incidents.iter();
        let mut texts: Vec<String> = seen.map(|incident| incident.text(lang)).collect();
        texts.extend(self.failure.as_ref().map(|failure| failure.text(lang)));
        texts.split_off(texts.len().saturating_sub(most))
    }
}

impl Seen {
    fn add(&mut self, line: &[u8]) {
        let Ok(record) = serde_json::from_slice::<Line>(line) else {
            self.unread += u64::from(!line.trim_ascii().is_empty());
            return;
        };
        self.steps = self.steps.max(record.step);
        match record.kind.as_str() {
            "step" => self.step(&record),
            "start" => self.start(line),
            "spans" => self.spans(line),
            "end" => self.end(line),
            "ranks" => {
                let (before, now) = (record.before, record.now);
                self.ranks = now;
                self.note(Incident::Ranks {
                    step: record.step,
                    before: before.unwrap_or_default(),
                    now: now.unwrap_or_default(),
                    why: record.why.as_deref().map(|why| cut(why, WHY_MAX)),
                });
            }
            "stopped" => {
                let signal = cut(record.signal.as_deref().unwrap_or_default(), TEXT_MAX);
                self.stopped = Some(signal.clone());
                let step = record.step;
                self.note(Incident::Stopped { step, signal });
            }
            "epoch" => {
                self.epochs = self.epochs.max(record.epoch);
                self.train_loss = record.train_loss.or(self.train_loss);
                self.held_out(&record, line);
            }
            "evaluation" => self.held_out(&record, line),
            // Of a later version.
            _ => {}
        }
    }

    fn step(&mut self, record: &Line) {
        let step = record.step;
        let seconds = record.seconds.filter(|seconds| *seconds > 0.0);
        self.seconds += seconds.unwrap_or(0.0);
        self.step_seconds = match (self.step_seconds, seconds) {
            (Some(mean), Some(now)) => Some(mean + (now - mean) * PACE_WEIGHT),
            (mean, now) => now.or(mean),
        };
        self.has_tokens |= record.tokens.is_some();
        let per_second = |count: Option<f64>| Some(count? / seconds?);
        let milliseconds = seconds.map(|seconds| seconds * 1e3);
        let has_rate = record.samples.or(record.tokens).is_some();
        let waited = || Some(record.waited_seconds? / seconds? * 100.0);
        for (curve, value) in [
            (&mut self.loss, record.loss),
            (&mut self.rate, per_second(record.tokens.or(record.samples))),
            (&mut self.step_time, milliseconds.filter(|_| !has_rate)),
            (&mut self.waited, waited()),
            (&mut self.learning_rate, record.lr),
            (&mut self.gradient_norm, record.grad_norm),
        ] {
            value.into_iter().for_each(|value| curve.push(step, value));
        }
        if let Some(to) = record.back_to {
            self.note(Incident::WentBack { step, to });
        } else if record.skipped == Some(true) {
            self.note(Incident::Skipped { step });
        }
    }

    fn held_out(&mut self, record: &Line, line: &[u8]) {
        let step = record.step;
        let loss = record.held_out_loss.into_iter();
        loss.for_each(|loss| self.held_out_loss.push(step, loss));
        let figures = serde_json::from_slice::<serde_json::Map<_, _>>(line);
        for (name, value) in figures.unwrap_or_default() {
            let is_metric = !NO_METRICS.contains(&name.as_str());
            let Some(value) = value.as_f64().filter(|_| is_metric) else {
                continue;
            };
            let name = cut(&name, TEXT_MAX);
            let known = self.metrics.iter().position(|(other, _)| *other == name);
            match known {
                Some(place) => self.metrics[place].1.push(step, value),
                None if self.metrics.len() < METRICS_MAX => {
                    let mut curve = Curve::default();
                    curve.push(step, value);
                    self.metrics.push((name, curve));
                }
                None => {}
            }
        }
    }

    fn start(&mut self, line: &[u8]) {
        let Ok(start) = serde_json::from_slice::<Start>(line) else {
            self.unread += 1;
            return;
        };
        let (step, ranks) = (start.step, start.world);
        if self.start.is_some() || step > 0 {
            self.note(Incident::Resumed { step, ranks });
        }
        self.ranks = Some(ranks);
        // The job trains again.
        (self.end, self.stopped) = (None, None);
        self.start = Some(start);
    }

    fn spans(&mut self, line: &[u8]) {
        let spans = serde_json::from_slice::<Spans>(line).ok();
        let Some(spans) = spans.filter(Spans::is_sound) else {
            self.unread += 1;
            return;
        };
        match spans.is_plain() {
            true => self.plain_step = Some(spans),
            false => self.saved_step = Some(spans),
        }
    }

    fn end(&mut self, line: &[u8]) {
        let end = serde_json::from_slice::<End>(line).ok();
        let Some(end) = end.filter(End::is_sound) else {
            self.unread += 1;
            return;
        };
        for straggler in &end.stragglers {
            self.note(Incident::Slow(*straggler));
        }
        self.end = Some(end);
    }

    fn note(&mut self, incident: Incident) {
        if self.incidents.len() == INCIDENTS_MAX {
            self.incidents.remove(0);
            self.incidents_left_out += 1;
        }
        self.incidents.push(incident);
    }

    /// A metric of held-out data by name.
    #[must_use]
    pub fn metric(&self, name: &str) -> Option<&Curve> {
        let found = self.metrics.iter().find(|(other, _)| other == name);
        found.map(|(_, curve)| curve)
    }

    /// Time in steps.
    #[must_use]
    pub fn time(&self) -> Duration {
        Duration::try_from_secs_f64(self.seconds).unwrap_or(Duration::MAX)
    }

    /// About how long the steps that are left will take, if the job has not ended and has said how many it has.
    #[must_use]
    pub fn time_left(&self) -> Option<Duration> {
        let steps = self.start.as_ref()?.steps;
        let left = steps
            .checked_sub(self.steps)
            .filter(|_| self.end.is_none())?;
        Duration::try_from_secs_f64(left as f64 * self.step_seconds?).ok()
    }
}

fn cut(text: &str, chars_max: usize) -> String {
    text.chars().take(chars_max).collect()
}

/// The settings in a file that `Resolved::to_toml` wrote: `key = value # source`.
///
/// *Errors*: the system's; there may be no such file.
fn settings(path: &Path) -> Result<Vec<[String; 3]>, ReportError> {
    let mut text = String::new();
    let read =
        File::open(path).and_then(|file| file.take(SETTINGS_BYTES_MAX).read_to_string(&mut text));
    match read {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(ReportError::file(path)(error));
        }
        _ => {}
    }
    let setting = |line: &str| {
        let (setting, source) = line.rsplit_once(" # ")?;
        let (key, value) = setting.split_once(" = ")?;
        (!key.starts_with('#')).then(|| [key, value, source].map(str::to_owned))
    };
    Ok(text.lines().filter_map(setting).collect())
}

/// The runs in a folder, the one that was written to last first; the folder itself if it is a run's.
///
/// *Errors*: the folder cannot be read, or holds no run.
pub fn runs_below(folder: &Path) -> Result<Vec<PathBuf>, ReportError> {
    let written = |run: &Path| fs::metadata(run.join(METRICS)).ok()?.modified().ok();
    if written(folder).is_some() {
        return Ok(vec![folder.to_owned()]);
    }
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(ReportError::file(folder)(error));
        }
        entries => entries.into_iter().flatten().flatten(),
    };
    let mut found: Vec<_> = entries
        .map(|entry| entry.path())
        .filter_map(|run| written(&run).map(|at| (at, run)))
        .collect();
    if found.is_empty() {
        let folder = folder.to_owned();
        return Err(ReportError::NoRuns { folder });
    }
    found.sort_by(|one, other| other.cmp(one));
    Ok(found.into_iter().map(|(_, run)| run).collect())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::tail::LINE_BYTES_MAX;

    fn append(path: &Path, text: &str) {
        let file = File::options().append(true).create(true).open(path);
        file.and_then(|mut file| file.write_all(text.as_bytes()))
            .expect("written");
    }

    fn step(step: u64) -> String {
        format!("{{\"kind\":\"step\",\"step\":{step},\"epoch\":1,\"loss\":0.5,\"seconds\":2.0}}\n")
    }

    #[test]
    fn a_growing_file_is_followed_line_by_line_and_read_anew_once_it_is_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(METRICS);
        let start = r#"{"kind":"start","step":0,"world":4,"epochs":2,"steps":10}"#;
        append(&path, &format!("{start}\n{}", step(1)));
        let mut run = Run::read(folder.path()).expect("a run");
        assert!(!run.update().expect("nothing new"));
        let second = step(2);
        let (first, rest) = second.split_at(20);
        append(&path, first);
        assert!(!run.update().expect("half a line"));
        append(&path, rest.trim_end());
        assert!(run.update().expect("a record without the end of its line"));
        append(&path, &format!("\n{}", step(3)));
        assert!(run.update().expect("the next line"));
        assert_eq!((run.seen.steps, run.seen.unread), (3, 0));
        assert_eq!(run.seen.loss.pieces().len(), 3);
        assert_eq!(run.seen.time_left(), Some(Duration::from_secs(14)));

        let beside = folder.path().join("new");
        let resumed = r#"{"kind":"start","step":1,"world":2,"epochs":2,"steps":10}"#;
        append(&beside, &format!("{start}\n{}{resumed}\n", step(1)));
        fs::rename(&beside, &path).expect("replaced");
        assert!(run.update().expect("read anew"));
        assert_eq!((run.seen.steps, run.seen.ranks), (1, Some(2)));
        let incident = Incident::Resumed { step: 1, ranks: 2 };
        assert_eq!(run.seen.incidents, [incident]);

        fs::remove_file(&path).expect("removed");
        let error = run.update().expect_err("gone").to_string();
        assert!(
            error.ends_with("holds no run: it has no metrics.jsonl"),
            "{error}"
        );
    }

    #[test]
    fn a_run_says_how_far_it_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(METRICS);
        append(&path, &step(1));
        let mut run = Run::read(folder.path()).expect("a run");
        let state = |run: &mut Run| {
            run.update().expect("read");
            run.state().text(Lang::En)
        };
        assert_eq!(state(&mut run), "running, or cut off");
        append(
            &path,
            "{\"kind\":\"stopped\",\"step\":1,\"signal\":\"SIGTERM\"}\n",
        );
        assert_eq!(state(&mut run), "stopped by SIGTERM");
        let start = r#"{"kind":"start","step":1,"world":4,"epochs":2,"steps":10}"#;
        append(&path, &format!("{start}\n{}", step(2)));
        assert_eq!(state(&mut run), "running, or cut off");
        fs::create_dir(folder.path().join("logs")).expect("a folder");
        let error = r#"{"cause":"rank 1 left early","rank":1,"host":"a"}"#;
        append(&folder.path().join("logs/error.json"), error);
        assert_eq!(state(&mut run), "failed");
        let incidents = run.incidents(2, Lang::En);
        assert_eq!(
            incidents,
            [
                "step 1: resumed on 4 ranks",
                "the job failed: rank 1 left early (on a)"
            ]
        );
    }

    #[test]
    fn metrics_of_ones_own_are_kept_by_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let evaluation =
            r#"{"kind":"evaluation","step":3,"held_out_loss":1.5,"mae":0.25,"name":"x"}"#;
        append(&folder.path().join(METRICS), evaluation);
        let run = Run::read(folder.path()).expect("a run");
        let names: Vec<_> = run.seen.metrics.iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["mae"]);
        assert_eq!(run.seen.metric("mae").and_then(Curve::last), Some(0.25));
    }

    #[test]
    fn a_line_without_end_is_skipped_in_bounded_memory() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(METRICS);
        append(&path, &"x".repeat(LINE_BYTES_MAX + 5));
        append(&path, &format!("\n{}", step(7)));
        let run = Run::read(folder.path()).expect("a run");
        assert_eq!((run.seen.steps, run.seen.unread), (7, 1));
    }

    #[test]
    fn the_run_that_was_written_last_comes_first() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = runs_below(folder.path()).expect_err("no run").to_string();
        assert!(error.starts_with("there is no run below "), "{error}");
        for (name, seconds) in [("new", 20), ("old", 10)] {
            let run = folder.path().join(name);
            fs::create_dir(&run).expect("a folder");
            let file = File::create(run.join(METRICS)).expect("a file");
            let at = std::time::UNIX_EPOCH + Duration::from_secs(seconds);
            file.set_modified(at).expect("a time");
        }
        let new = folder.path().join("new");
        let found = runs_below(folder.path()).expect("runs");
        assert_eq!(found, [new.clone(), folder.path().join("old")]);
        assert_eq!(runs_below(&new).expect("itself"), [new]);
    }
}
