//! Follows the metrics of a run, and sends them to its server.

use std::collections::BTreeMap;
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use paceline_cli::exit::{hint, note, warn};
use paceline_report::{ReportError, Tail};
use paceline_train::scalars;
use paceline_words::counted;
use serde_json::{Map, Value};

use super::client::{Client, METRICS_MAX, Metric, Refused, Status, metric_name, now, pairs};

/// Between two looks at the metrics.
const PAUSE: Duration = Duration::from_secs(1);
/// Longest pause before a server that does not answer is tried again.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Failures in a row of which people are told. One may be a connection that the server has just closed.
const TOLD_AFTER: u32 = 2;
/// For the last metrics, after the end of the job. A server that takes those of a finished job gets as long for each further request.
const LAST_ATTEMPT: Duration = Duration::from_secs(10);

/// Reads what a run writes, and sends what the server does not have.
pub(super) struct Follower {
    client: Client,
    run_id: String,
    folder: PathBuf,
    /// The command that resumes the run.
    command: String,
    tail: Option<Tail>,
    /// Step and value of the last value of each metric that is sent or waits.
    last: BTreeMap<String, (u64, f64)>,
    /// Whether the server knows that the job runs, and `last` what the server has.
    is_known: bool,
    /// Values that are to be sent, enough for one request.
    waiting: Vec<Metric>,
    /// Tags that are to be set.
    tags: Vec<Value>,
    failures: u32,
}

impl Follower {
    pub(super) fn new(client: Client, run_id: String, run: &Path, command: &str) -> Self {
        Self {
            client,
            run_id,
            folder: run.to_owned(),
            command: command.to_owned(),
            tail: None,
            last: BTreeMap::new(),
            is_known: false,
            waiting: Vec::new(),
            tags: Vec::new(),
            failures: 0,
        }
    }

    /// Leaves out the metrics of a job that ended in this folder before its first checkpoint: the new one replaces them.
    pub(super) fn skip_old(&mut self) {
        self.tail = Tail::open(&self.folder).ok();
        while let Some(Ok(Some(_))) = self.tail.as_mut().map(Tail::next_line) {}
    }

    /// Sends until the job has ended.
    pub(super) fn run(&mut self, ended: &Receiver<(Status, Instant)>) {
        let mut pause = Duration::ZERO;
        loop {
            match ended.recv_timeout(pause) {
                Ok((status, at)) => return self.finish(status, at),
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => pause = self.turn(),
            }
        }
    }

    /// Sends what is new, and returns the time until the next turn.
    fn turn(&mut self) -> Duration {
        match self.send() {
            Ok(has_more) => {
                if self.failures >= TOLD_AFTER {
                    note(&format!("MLflow at {} answers again", self.client.url()));
                }
                self.failures = 0;
                if has_more { Duration::ZERO } else { PAUSE }
            }
            Err(refused) => {
                self.failures += 1;
                if self.failures == TOLD_AFTER {
                    warn(&format!(
                        "{refused}; the job goes on, and its metrics are sent as soon as the server takes them"
                    ));
                }
                PAUSE_MAX.min(PAUSE * 2_u32.pow(self.failures.min(6)))
            }
        }
    }

    /// Sends one request of new values, and returns whether there may be more.
    fn send(&mut self) -> Result<bool, Refused> {
        if !self.is_known {
            self.client.update(&self.run_id, Status::Running)?;
            self.last = self.client.latest(&self.run_id)?;
            let waiting = mem::take(&mut self.waiting);
            waiting.into_iter().for_each(|metric| self.add(metric));
        }
        let has_more = self
            .read()
            .map_err(|error| Refused::new(error.to_string(), None))?;
        // If a request fails, it may have arrived.
        self.is_known = false;
        self.client.log(&self.run_id, "metrics", &self.waiting)?;
        self.waiting.clear();
        self.client.log(&self.run_id, "tags", &self.tags)?;
        self.tags.clear();
        self.is_known = true;
        Ok(has_more)
    }

    /// Takes in lines until there is enough for a request, and returns whether there may be more.
    fn read(&mut self) -> Result<bool, ReportError> {
        let opened = match &mut self.tail {
            Some(tail) => tail.reopen().map(drop),
            None => Tail::open(&self.folder).map(|tail| self.tail = Some(tail)),
        };
        match opened {
            // Rank 0 has not begun.
            Err(ReportError::NoRun { .. }) => return Ok(false),
            opened => opened?,
        }
        while self.waiting.len() < METRICS_MAX {
            let Some(tail) = &mut self.tail else {
                return Ok(false);
            };
            let Some(line) = tail.next_line()? else {
                return Ok(false);
            };
            let Ok(record) = serde_json::from_slice::<Map<String, Value>>(line) else {
                continue;
            };
            let step = record.get("step").and_then(Value::as_u64).unwrap_or(0);
            for (tag, value) in scalars(&record) {
                self.add(Metric {
                    key: metric_name(&tag),
                    value,
                    step,
                    timestamp: now(),
                });
            }
            if let Some(Value::String(hash)) = record.get("weights_sha256") {
                self.tags = pairs([("weights_sha256", hash.clone())]);
            }
        }
        Ok(true)
    }

    /// Has a value sent, unless the server has it.
    fn add(&mut self, metric: Metric) {
        let (step, value) = (metric.step, metric.value);
        let is_new = self.last.get(&metric.key).is_none_or(|(at, last)| {
            // The ranks may change twice at a step.
            *at < step || metric.key == "train/ranks" && *at == step && *last != value
        });
        if is_new && value.is_finite() {
            self.last.insert(metric.key.clone(), (step, value));
            self.waiting.push(metric);
        }
    }

    /// Sends the rest and the end of the job, if the server takes it in time.
    fn finish(&mut self, status: Status, at: Instant) {
        let deadline = at + LAST_ATTEMPT;
        self.client.deadline = Some(deadline);
        let mut is_told = false;
        let sent = loop {
            match self.send() {
                // What stopped the job may not wait.
                Ok(true) if status == Status::Finished => {
                    let now = Instant::now();
                    self.client.deadline = Some(now + LAST_ATTEMPT);
                    if now > deadline && !mem::replace(&mut is_told, true) {
                        note(
                            "the server still takes metrics of this run; Ctrl-C leaves the rest out",
                        );
                    }
                }
                Ok(true) => {}
                Ok(false) => break self.client.update(&self.run_id, status),
                Err(refused) => break Err(refused),
            }
        };
        let Err(refused) = sent else {
            return;
        };
        let values = counted(self.unsent(), "value");
        warn(&format!(
            "{refused}; it lacks the end of this run and up to {values}"
        ));
        let (command, run) = (&self.command, self.folder.display());
        hint(&format!("`{command} --resume {run}` sends them later"));
    }

    /// Values that were not sent, as far as the server has said what it has.
    fn unsent(&mut self) -> usize {
        let mut count = self.waiting.len();
        loop {
            self.waiting.clear();
            // What cannot be read cannot be counted.
            let has_more = self.read().unwrap_or(false);
            count += self.waiting.len();
            if !has_more {
                return count;
            }
        }
    }
}

#[cfg(test)]
mod tests;
