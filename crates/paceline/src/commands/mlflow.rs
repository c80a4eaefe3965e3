//! `paceline train --mlflow URL`: the run on an MLflow tracking server.
//!
//! A thread of the process that prepares the job follows `metrics.jsonl` and sends what is new, so the ranks do not wait for the server, and a lost
//! rank 0 changes nothing. The server says what it has: no step is sent twice, after a resume or a request without an answer.

mod client;
mod follower;

use std::env;
use std::fs;
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use paceline_rendezvous::net::nodename;
use paceline_train::config::{Resolved, TrainConfig, Value};
use paceline_train::run_dir::RunDir;
use serde::Deserialize;
use serde_json::json;

use self::client::{Client, Refused, Status, pairs};
use self::follower::Follower;
use super::{Program, failed};
use paceline_cli::exit::{Exit, Failure, note, warn};

/// The file of a run that says where its metrics are on a server.
const PLACE: &str = "mlflow.json";
/// The experiment, unless MLflow's own variable names one.
const EXPERIMENT: &str = "paceline";

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
        let Self {
            client,
            experiment_id,
            run_id,
        } = self;
        let run_id = match run_id {
            Some(run_id) => run_id,
            None => {
                let made = create(&client, &experiment_id, resolved, run);
                let Some(run_id) = unless_resumed(config, made)? else {
                    return Ok(None);
                };
                let place = json!({
                    "url": client.url(),
                    "experiment_id": experiment_id,
                    "run_id": run_id,
                });
                run.write(PLACE, &format!("{place:#}\n"))
                    .map_err(|error| failed(None, &error))?;
                run_id
            }
        };
        let url = client.url();
        note(&format!(
            "this run on MLflow: {url}/#/experiments/{experiment_id}/runs/{run_id}"
        ));
        let mut follower = Follower::new(client, run_id, run.path(), program.command());
        if !config.resume {
            follower.skip_old();
        }
        Tracking::start(follower).map(Some)
    }
}

/// Makes a run with the settings of the job and the tags of MLflow's own client.
fn create(
    client: &Client,
    experiment_id: &str,
    resolved: &Resolved,
    run: &RunDir,
) -> Result<String, Refused> {
    let source = env::args_os().next().unwrap_or_default();
    let mut tags = pairs([
        ("mlflow.source.name", source.to_string_lossy().into_owned()),
        ("mlflow.source.type", "LOCAL".to_owned()),
        ("host", nodename()),
        ("paceline.version", env!("CARGO_PKG_VERSION").to_owned()),
    ]);
    let user = env::var("LOGNAME").or(env::var("USER"));
    tags.extend(pairs(user.ok().map(|user| ("mlflow.user", user))));
    let name = run.path().file_name().unwrap_or_default().to_string_lossy();
    let run_id = client.create_run(experiment_id, &name, &tags)?;
    let set = resolved.settings();
    let set = set.filter(|(_, setting)| setting.value != Value::Unset);
    let params = pairs(set.map(|(row, setting)| (row.key, setting.value.to_string())));
    client.log(&run_id, "params", &params)?;
    Ok(run_id)
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
