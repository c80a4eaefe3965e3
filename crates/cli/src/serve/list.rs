//! The list of runs: how far each is, its last figures, and a box to choose it for a comparison.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use paceline_report::{
    ACCURACY, Curve, FAILURE, METRICS, Run, State, escaped, number, table, words,
};
use paceline_usage::figures::clock;
use paceline_words::{Lang, Word};

use super::kept::{Kept, lock};
use super::pages::encoded;
use crate::jobs::Jobs;

/// How long a look may take that reads runs for the first time. The others are read in the next ones.
const LOOK_TIME_MAX: Duration = Duration::from_millis(500);

/// The list, and what is known of its runs.
pub(super) struct List {
    kept: Arc<Kept>,
    lang: Lang,
    known: Mutex<HashMap<PathBuf, Known>>,
    jobs: Mutex<Jobs>,
}

/// A run as its files were when they had this stamp.
struct Known {
    stamp: Stamp,
    summary: Summary,
}

/// When its metrics and the report of its failure were written, and how long the metrics are: another stamp, another run.
#[derive(Clone, Copy, PartialEq)]
struct Stamp {
    written: SystemTime,
    bytes: u64,
    failed: Option<SystemTime>,
}

impl Stamp {
    fn of(run: &Path) -> Option<Self> {
        let metrics = fs::metadata(run.join(METRICS)).ok()?;
        let failed = fs::metadata(run.join(FAILURE));
        Some(Self {
            written: metrics.modified().ok()?,
            bytes: metrics.len(),
            failed: failed.and_then(|file| file.modified()).ok(),
        })
    }
}

/// What the list tells of a run.
#[derive(Clone)]
struct Summary {
    state: State,
    train_loss: Option<f64>,
    held_out_loss: Option<f64>,
    accuracy: Option<f64>,
    time: Duration,
}

impl Summary {
    fn of(run: &Run) -> Self {
        let seen = &run.seen;
        Self {
            state: run.state(),
            train_loss: seen.loss.last(),
            held_out_loss: seen.held_out_loss.last(),
            accuracy: seen.metric(ACCURACY).and_then(Curve::last),
            time: seen.time(),
        }
    }
}

impl List {
    pub(super) fn new(kept: Arc<Kept>, lang: Lang) -> Self {
        Self {
            kept,
            lang,
            known: Mutex::new(HashMap::new()),
            jobs: Mutex::new(Jobs::new()),
        }
    }

    fn word(&self, word: Word) -> &'static str {
        word.of(self.lang)
    }

    /// The list as a section of a page.
    pub(super) fn section(&self) -> (&'static str, String) {
        let runs = self.kept.folders();
        let html = match runs.is_empty() {
            true => format!("<p>{}</p>\n", self.word(words::NO_RUN)),
            false => self.table(&runs),
        };
        ("runs", html)
    }

    fn table(&self, runs: &[(String, PathBuf)]) -> String {
        let head = [
            words::RUN,
            words::STATE,
            words::TRAIN_LOSS,
            words::HELD_OUT_LOSS,
            words::ACCURACY_SHORT,
            words::TOTAL,
            words::WRITTEN,
        ];
        let stamps: Vec<Option<Stamp>> = runs.iter().map(|(_, run)| Stamp::of(run)).collect();
        let summaries = self.summaries(runs, &stamps);
        let mut jobs = lock(&self.jobs);
        let is_open = |summary: &Option<Summary>| {
            (summary.as_ref()).is_some_and(|summary| summary.state == State::Open)
        };
        if summaries.iter().any(is_open) {
            jobs.look();
        }
        let all = runs.iter().zip(summaries).zip(stamps);
        let row = all.map(|(((name, folder), summary), stamp)| {
            let trains = is_open(&summary) && jobs.of(folder).is_some();
            self.row(name, stamp, summary, trains)
        });
        let rows: Vec<Vec<String>> = row.collect();
        let mut names = vec![self.word(words::CHOOSE)];
        names.extend(head.map(|word| self.word(word)));
        table(&names, &rows)
    }

    fn row(
        &self,
        name: &str,
        stamp: Option<Stamp>,
        summary: Option<Summary>,
        trains: bool,
    ) -> Vec<String> {
        let (value, shown) = (escaped(name), escaped(name));
        let choice = format!(
            "<input type=\"checkbox\" name=\"run\" form=\"compare\" value=\"{value}\" aria-label=\"{value}\">"
        );
        let link = format!("<a href=\"/runs/{}/\">{shown}</a>", encoded(name));
        let figure = |value: Option<f64>| value.map_or("–".to_owned(), number);
        let mut row = vec![choice, link];
        match summary {
            Some(summary) => {
                let accuracy = summary.accuracy;
                row.extend([
                    match trains {
                        true => self.word(words::TRAINING).to_owned(),
                        false => escaped(&summary.state.text(self.lang)),
                    },
                    figure(summary.train_loss),
                    figure(summary.held_out_loss),
                    accuracy.map_or("–".into(), |share| format!("{:.2} %", share * 100.0)),
                    clock(summary.time),
                ]);
            }
            None => row.extend(std::array::from_fn::<String, 5, _>(|_| "…".to_owned())),
        }
        row.push(stamp.map_or(String::new(), |stamp| self.age(stamp)));
        row
    }

    /// What is known of each run. Files that have not changed are not read again.
    fn summaries(
        &self,
        runs: &[(String, PathBuf)],
        stamps: &[Option<Stamp>],
    ) -> Vec<Option<Summary>> {
        let began = Instant::now();
        let mut known = lock(&self.known);
        known.retain(|folder, _| runs.iter().any(|(_, there)| there == folder));
        let mut look = |folder: &PathBuf, stamp: Stamp| {
            let before = known.get(folder);
            if let Some(before) = before
                && (before.stamp == stamp || began.elapsed() > LOOK_TIME_MAX)
            {
                return Some(before.summary.clone());
            }
            if began.elapsed() > LOOK_TIME_MAX {
                return None;
            }
            // One that cannot be read has a page that says why.
            let run = self.kept.run(folder.clone()).ok()?;
            let summary = Summary::of(&lock(&run));
            let now = Known {
                stamp,
                summary: summary.clone(),
            };
            known.insert(folder.clone(), now);
            Some(summary)
        };
        let all = runs.iter().zip(stamps);
        all.map(|((_, folder), stamp)| look(folder, (*stamp)?))
            .collect()
    }

    /// How long ago a run has written its metrics, in whole minutes, so that the list does not change each second.
    fn age(&self, stamp: Stamp) -> String {
        let written = stamp.written;
        let age = SystemTime::now()
            .duration_since(written)
            .unwrap_or_default();
        let minutes = age.as_secs() / 60;
        let (days, hours) = (minutes / (24 * 60), minutes / 60);
        let text = |word: Word, count: u64| word.filled(self.lang, &[&count.to_string()]);
        match (days, hours) {
            (0, 0) if minutes == 0 => self.word(words::JUST_NOW).to_owned(),
            (0, 0) => text(words::MINUTES_AGO, minutes),
            (0, _) => text(words::HOURS_AGO, hours),
            _ => text(words::DAYS_AGO, days),
        }
    }
}
