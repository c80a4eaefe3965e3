//! An MLflow tracking server with the calls that runs make, over HTTP on loopback.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::TcpStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use crate::http::{Answer, Request, serve};

/// Chooses from a call, such as `runs/log-batch`, and its body whether the server fails.
pub type Failing = dyn FnMut(&str, &Value) -> bool + Send;

/// The server; it answers until the process ends.
pub struct TrackingServer {
    contents: Arc<Mutex<Contents>>,
    url: String,
}

/// What a run has left.
#[derive(Clone, Debug, Default)]
pub struct TrackedRun {
    /// The name of its experiment.
    pub experiment: String,
    /// Its name.
    pub name: String,
    /// What it does, by MLflow's names.
    pub status: String,
    /// Its settings.
    pub params: BTreeMap<String, String>,
    /// Its tags.
    pub tags: BTreeMap<String, String>,
    /// Name, step and value of each value of a metric, in the order in which they came.
    pub metrics: Vec<(String, u64, f64)>,
}

#[derive(Default)]
struct Contents {
    experiments: Vec<String>,
    runs: Vec<TrackedRun>,
    calls: Vec<String>,
    authorization: Option<String>,
    failing: Option<Box<Failing>>,
}

impl TrackingServer {
    /// Starts a server.
    ///
    /// *Panics*: if loopback cannot be used.
    pub fn start() -> Self {
        let contents = Arc::<Mutex<Contents>>::default();
        let shared = contents.clone();
        Self {
            contents,
            url: serve(move |stream| answer_one(&shared, stream)),
        }
    }

    /// Its URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Chooses the calls that fail from now on.
    pub fn fail(&self, failing: impl FnMut(&str, &Value) -> bool + Send + 'static) {
        lock(&self.contents).failing = Some(Box::new(failing));
    }

    /// The runs, in the order in which they were made.
    pub fn runs(&self) -> Vec<TrackedRun> {
        lock(&self.contents).runs.clone()
    }

    /// The calls so far.
    pub fn calls(&self) -> Vec<String> {
        lock(&self.contents).calls.clone()
    }

    /// The header `Authorization` of the last request.
    pub fn authorization(&self) -> Option<String> {
        lock(&self.contents).authorization.clone()
    }
}

fn lock(contents: &Mutex<Contents>) -> MutexGuard<'_, Contents> {
    contents.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers one request of a connection; `None` once it has ended.
fn answer_one(contents: &Mutex<Contents>, mut stream: &TcpStream) -> Option<()> {
    let request = Request::read(stream)?;
    let call = request.path.strip_prefix("api/2.0/mlflow/").unwrap_or("");
    let body: Value = serde_json::from_slice(&request.body).unwrap_or_default();
    let mut contents = lock(contents);
    contents.calls.push(call.to_owned());
    contents.authorization = request.headers.get("authorization").cloned();
    let fails = (contents.failing.as_mut()).is_some_and(|failing| failing(call, &body));
    let answered = match fails {
        true => Err(("503 Service Unavailable", "TEMPORARILY_UNAVAILABLE")),
        false => contents.answer(call, &request, &body),
    };
    let (status, said) = match answered {
        Ok(said) => ("200 OK", said),
        Err((status, code)) => (
            status,
            json!({ "error_code": code, "message": "says the test" }),
        ),
    };
    let answer = Answer {
        status,
        headers: Vec::new(),
        body: said.to_string().into(),
    };
    drop(contents);
    stream.write_all(&answer.encode(false)).ok()
}

impl Contents {
    fn answer(
        &mut self,
        call: &str,
        request: &Request,
        body: &Value,
    ) -> Result<Value, (&'static str, &'static str)> {
        let absent = ("404 Not Found", "RESOURCE_DOES_NOT_EXIST");
        let text = |key: &str| body[key].as_str().unwrap_or_default().to_owned();
        let run_id = request.query("run_id").or(body["run_id"].as_str());
        let run = match run_id.and_then(|id| id.parse::<usize>().ok()) {
            Some(id) => self.runs.get_mut(id),
            None => None,
        };
        match (call, run) {
            ("experiments/get-by-name", _) => {
                let name = request.query("experiment_name").unwrap_or_default();
                let found = self.experiments.iter().position(|other| other == name);
                let id = found.ok_or(absent)?.to_string();
                Ok(json!({ "experiment": { "experiment_id": id } }))
            }
            ("experiments/create", _) => {
                self.experiments.push(text("name"));
                Ok(json!({ "experiment_id": (self.experiments.len() - 1).to_string() }))
            }
            ("runs/create", _) => {
                let experiment = text("experiment_id").parse::<usize>();
                let experiment = experiment.ok().and_then(|id| self.experiments.get(id));
                self.runs.push(TrackedRun {
                    experiment: experiment.ok_or(absent)?.clone(),
                    name: text("run_name"),
                    status: "RUNNING".to_owned(),
                    tags: pairs(&body["tags"]).collect(),
                    ..TrackedRun::default()
                });
                let id = (self.runs.len() - 1).to_string();
                Ok(json!({ "run": { "info": { "run_id": id } } }))
            }
            ("runs/update", Some(run)) => {
                run.status = text("status");
                Ok(json!({}))
            }
            ("runs/log-batch", Some(run)) => {
                let of = |key: &str| body[key].as_array().cloned().unwrap_or_default();
                let (metrics, params) = (of("metrics"), of("params"));
                if metrics.len() > 1000 || params.len() > 100 || request.body.len() > 1_000_000 {
                    return Err(("400 Bad Request", "INVALID_PARAMETER_VALUE"));
                }
                run.params.extend(pairs(&params.into()));
                run.tags.extend(pairs(&body["tags"]));
                run.metrics.extend(metrics.iter().filter_map(|metric| {
                    let key = metric["key"].as_str()?.to_owned();
                    Some((key, metric["step"].as_u64()?, metric["value"].as_f64()?))
                }));
                Ok(json!({}))
            }
            ("runs/get", Some(run)) => {
                let mut last = BTreeMap::new();
                for (key, step, value) in &run.metrics {
                    let newest = last.entry(key).or_insert((*step, *value));
                    if *step >= newest.0 {
                        *newest = (*step, *value);
                    }
                }
                let metric =
                    |(key, (step, value))| json!({ "key": key, "step": step, "value": value });
                let metrics: Value = last.into_iter().map(metric).collect();
                Ok(json!({ "run": { "data": { "metrics": metrics } } }))
            }
            _ => Err(absent),
        }
    }
}

/// Params or tags.
fn pairs(list: &Value) -> impl Iterator<Item = (String, String)> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let pair = move |pair: &Value| Some((text(&pair["key"])?, text(&pair["value"])?));
    list.as_array().into_iter().flatten().filter_map(pair)
}
