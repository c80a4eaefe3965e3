//! `paceline train --mlflow URL`: the run on an MLflow tracking server.
//!
//! A thread of the process that prepares the job follows `metrics.jsonl` and sends what is new, so the ranks do not wait for the server, and a lost
//! rank 0 changes nothing. The server says what it has: no step is sent twice, after a resume or a request without an answer.

mod client;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use paceline_gpu::words;
use paceline_report::{ReportError, Tail};
use paceline_train::config::{Resolved, TrainConfig, Value as SettingValue};
use paceline_train::run_dir::RunDir;
use paceline_train::scalars;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use self::client::{Client, METRICS_MAX, Metric, Refused, Status, metric_name, now};
use super::{Program, failed};
use paceline_cli::exit::{Exit, Failure, hint, note, warn};

/// The file of a run that says where its metrics are on a server.
const PLACE: &str = "mlflow.json";
/// The experiment, unless MLflow's own variable names one.
const EXPERIMENT: &str = "paceline";

/// Between two looks at the metrics.
const PAUSE: Duration = Duration::from_secs(1);
/// Longest pause before a server that does not answer is tried again.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Failures in a row of which people are told. One may be a connection that the server has just closed.
const TOLD_AFTER: u32 = 2;
/// For the last metrics, after the end of the job.
const LAST_ATTEMPT: Duration = Duration::from_secs(10);

/// A server, and the run there that a job goes on with.
pub(super) struct Server {
    client: Client,
    experiment_id: String,
    /// `None` if the run is still to be made.
    run_id: Option<String>,
}

/// Where a run is.
#[derive(Deserialize)]
struct Place {
    url: String,
    experiment_id: String,
    run_id: String,
}

/// Finds the run of a resumed job, or the experiment of a new one.
///
/// *Errors*: no server there, or it refuses. A resumed job only warns.
pub(super) fn find(config: &TrainConfig) -> Result<Option<Server>, Failure> {
    let Some(url) = &config.mlflow else {
        return Ok(None);
    };
    let found = Client::new(url, |name| env::var(name).ok()).and_then(|client| {
        let place = fs::read(config.run_dir.join(PLACE)).ok();
        let place = place.and_then(|text| serde_json::from_slice::<Place>(&text).ok());
        let own = place.filter(|place| config.resume && place.url == client.url());
        let (experiment_id, run_id) = match own {
            Some(place) => (place.experiment_id, Some(place.run_id)),
            None => {
                let named = env::var("MLFLOW_EXPERIMENT_NAME").ok();
                let named = named.filter(|name| !name.is_empty());
                let name = named.as_deref().unwrap_or(EXPERIMENT);
                (client.experiment(name)?, None)
            }
        };
        Ok(Server {
            client,
            experiment_id,
            run_id,
        })
    });
    unless_resumed(config, found)
}

fn unless_resumed<T>(config: &TrainConfig, done: Result<T, Refused>) -> Result<Option<T>, Failure> {
    match done {
        Ok(done) => Ok(Some(done)),
        Err(refused) if config.resume => {
            warn(&format!("{refused}; the job goes on without it"));
            Ok(None)
        }
        Err(refused) => {
            let hint = refused.hint.map(str::to_owned);
            Err(Failure::new(Exit::Usage, refused, hint))
        }
    }
}

impl Server {
    /// Makes the run, if there is none, and sends what the job writes from now on.
    ///
    /// *Errors*: the server refuses; the system's.
    pub(super) fn follow(
        self,
        program: &Program,
        resolved: &Resolved,
        run: &RunDir,
    ) -> Result<Option<Tracking>, Failure> {
        let config = resolved.config();
        let run_id = match &self.run_id {
            Some(run_id) => run_id.clone(),
            None => {
                let Some(run_id) = unless_resumed(config, self.create(resolved, run))? else {
                    return Ok(None);
                };
                let place = json!({
                    "url": self.client.url(),
                    "experiment_id": self.experiment_id,
                    "run_id": run_id,
                });
                run.write(PLACE, &format!("{place:#}\n"))
                    .map_err(|error| failed(None, &error))?;
                run_id
            }
        };
        let command = program.command();
        let mut follower = Follower::new(self.client, run_id, run.path(), command);
        if !config.resume {
            follower.skip_old();
        }
        Tracking::start(follower).map(Some)
    }

    fn create(&self, resolved: &Resolved, run: &RunDir) -> Result<String, Refused> {
        let user = ["LOGNAME", "USER"]
            .into_iter()
            .find_map(|name| env::var(name).ok());
        let host = rustix::system::uname();
        let source = env::args_os().next();
        let tags = [
            (
                "mlflow.source.name",
                source.map(|name| name.to_string_lossy().into_owned()),
            ),
            ("mlflow.source.type", Some("LOCAL".to_owned())),
            ("mlflow.user", user),
            ("host", Some(host.nodename().to_string_lossy().into_owned())),
            (
                "paceline.version",
                Some(env!("CARGO_PKG_VERSION").to_owned()),
            ),
        ];
        let tags = tags
            .into_iter()
            .filter_map(|(key, value)| Some((key, value?)));
        let name = run.path().file_name().unwrap_or_default().to_string_lossy();
        let tags: Vec<_> = tags.collect();
        let run_id = self.client.create_run(&self.experiment_id, &name, &tags)?;
        let set = resolved
            .settings()
            .filter(|(_, setting)| setting.value != SettingValue::Unset);
        let params: Vec<_> = set
            .map(|(row, setting)| (row.key, setting.value.to_string()))
            .collect();
        self.client.log_params(&run_id, &params)?;
        Ok(run_id)
    }
}

/// Sends metrics until it is dropped, and then how the job has ended.
pub(super) struct Tracking {
    status: Status,
    end: Sender<(Status, Instant)>,
    thread: Option<JoinHandle<()>>,
}

/// Does a job whose metrics may be sent.
pub(super) fn tracked(
    tracking: Option<Tracking>,
    job: impl FnOnce() -> Result<Exit, Failure>,
) -> Result<Exit, Failure> {
    let ended = job();
    if let Some(mut tracking) = tracking {
        tracking.status = match &ended {
            Ok(Exit::Done) => Status::Finished,
            Ok(Exit::Signal(_)) => Status::Killed,
            _ => Status::Failed,
        };
    }
    ended
}

impl Tracking {
    fn start(mut follower: Follower) -> Result<Self, Failure> {
        let (end, ended) = mpsc::channel();
        let thread = thread::Builder::new().name("mlflow".to_owned());
        let thread = thread.spawn(move || follower.run(&ended));
        let thread = thread
            .map_err(|error| Failure::environment(format!("no thread can be started: {error}")))?;
        Ok(Self {
            status: Status::Failed,
            end,
            thread: Some(thread),
        })
    }
}

impl Drop for Tracking {
    fn drop(&mut self) {
        let _ = self.end.send((self.status, Instant::now()));
        // After a panic the metrics are still in the run directory.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Reads what a run writes, and sends what the server does not have.
struct Follower {
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
    weights_sha256: Option<String>,
    failures: u32,
}

impl Follower {
    fn new(client: Client, run_id: String, run: &Path, command: &str) -> Self {
        Self {
            client,
            run_id,
            folder: run.to_owned(),
            command: command.to_owned(),
            tail: None,
            last: BTreeMap::new(),
            is_known: false,
            waiting: Vec::new(),
            weights_sha256: None,
            failures: 0,
        }
    }

    /// Leaves out the metrics of a job that ended in this folder before its first checkpoint: the new one replaces them.
    fn skip_old(&mut self) {
        self.tail = Tail::open(&self.folder).ok();
        while let Some(Ok(Some(_))) = self.tail.as_mut().map(Tail::next_line) {}
    }

    /// Sends until the job has ended.
    fn run(&mut self, ended: &Receiver<(Status, Instant)>) {
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
                        "{refused}; the job goes on, and its metrics are sent once the server takes them"
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
        self.client.log_metrics(&self.run_id, &self.waiting)?;
        self.waiting.clear();
        if let Some(hash) = &self.weights_sha256 {
            self.client.set_tag(&self.run_id, "weights_sha256", hash)?;
            self.weights_sha256 = None;
        }
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
            let Some(line) = self
                .tail
                .as_mut()
                .map(Tail::next_line)
                .transpose()?
                .flatten()
            else {
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
            let hash = record.get("weights_sha256").and_then(Value::as_str);
            self.weights_sha256 = hash.map(str::to_owned).or(self.weights_sha256.take());
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
        self.client.deadline = Some(at + LAST_ATTEMPT);
        let sent = loop {
            match self.send() {
                Ok(true) => {}
                Ok(false) => break self.client.update(&self.run_id, status),
                Err(refused) => break Err(refused),
            }
        };
        let Err(refused) = sent else {
            return;
        };
        let values = words::count(self.unsent(), "value");
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
