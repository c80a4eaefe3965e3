//! The calls of MLflow's REST interface that a run needs.
//!
//! *Source*: `mlflow/protos/service.proto`, `mlflow/utils/validation.py` and `mlflow/utils/rest_utils.py`.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant, SystemTime};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use paceline_train::printable;
use serde::Serialize;
use serde_json::{Value, json};
use ureq::http::Response;
use ureq::{Agent, Body, Error, RequestBuilder};

/// Most metrics in a request.
pub(super) const METRICS_MAX: usize = 1000;
/// Most params or tags in a request.
const PAIRS_MAX: usize = 100;
/// Longest value of a param or tag, in characters; longer ones are cut.
const VALUE_CHARS_MAX: usize = 6000;
/// Longest name of a metric, in characters.
const NAME_CHARS_MAX: usize = 250;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A request may be in flight when the job ends, so this bounds the wait for it.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The system takes no timeout of 0.
const TIMEOUT_MIN: Duration = Duration::from_millis(1);
/// Largest answer: a run with its params, tags and last metrics.
const ANSWER_BYTES_MAX: u64 = 4 << 20;
/// The part of an answer that an error quotes.
const SAID_CHARS_MAX: usize = 300;

const ADDRESS: &str =
    "start `mlflow server`, and name its address, such as --mlflow http://127.0.0.1:5000";
const CREDENTIALS: &str =
    "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN";

/// A tracking server.
pub(super) struct Client {
    agent: Agent,
    url: String,
    authorization: Option<String>,
    /// When requests must be done, besides their own time limit.
    pub(super) deadline: Option<Instant>,
}

/// A value of a metric.
#[derive(Serialize)]
pub(super) struct Metric {
    pub(super) key: String,
    pub(super) value: f64,
    pub(super) step: u64,
    /// In milliseconds since 1970.
    pub(super) timestamp: u64,
}

/// What a run does, by MLflow's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum Status {
    Running,
    Finished,
    Failed,
    Killed,
}

/// Why a server did not do what it was asked.
#[derive(Debug)]
pub(super) struct Refused {
    what: String,
    pub(super) hint: Option<&'static str>,
    /// MLflow's name of the error.
    code: String,
}

impl Refused {
    pub(super) fn new(what: String, hint: Option<&'static str>) -> Self {
        let code = String::new();
        Self { what, hint, code }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.what)
    }
}

impl Client {
    /// The server at a URL, with the credentials that MLflow's own client takes from these variables.
    ///
    /// *Errors*: https in a program without TLS.
    pub(super) fn new(
        url: &str,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, Refused> {
        if url.starts_with("https://") && !cfg!(feature = "object-store") {
            let what = format!("this program cannot reach {url}: it is built without TLS");
            let hint = "build it with --features object-store, or name a proxy on this machine that speaks TLS with the server";
            return Err(Refused::new(what, Some(hint)));
        }
        let config = Agent::config_builder()
            .user_agent(concat!("paceline/", env!("CARGO_PKG_VERSION")))
            .http_status_as_error(false)
            // A POST that is redirected would become a GET.
            .max_redirects(0)
            .max_redirects_will_error(false);
        #[cfg(feature = "object-store")]
        let config = config.tls_config(paceline_checkpoint::tls());
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let user = variable("MLFLOW_TRACKING_USERNAME").zip(variable("MLFLOW_TRACKING_PASSWORD"));
        let authorization = match user {
            Some((user, password)) => {
                let credentials = BASE64_STANDARD.encode(format!("{user}:{password}"));
                Some(format!("Basic {credentials}"))
            }
            None => variable("MLFLOW_TRACKING_TOKEN").map(|token| format!("Bearer {token}")),
        };
        Ok(Self {
            agent: config.build().into(),
            url: url.trim_end_matches('/').to_owned(),
            authorization,
            deadline: None,
        })
    }

    /// Its URL, without a slash at the end.
    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// The id of an experiment, which is made if there is none of this name.
    pub(super) fn experiment(&self, name: &str) -> Result<String, Refused> {
        let find = || {
            let found = self.get("experiments/get-by-name", "experiment_name", name)?;
            self.id(&found, "/experiment/experiment_id")
        };
        match find() {
            Err(error) if error.code == "RESOURCE_DOES_NOT_EXIST" => {}
            found => return found,
        }
        match self.post("experiments/create", &json!({ "name": name })) {
            // Jobs that begin at once make it together.
            Err(error) if error.code == "RESOURCE_ALREADY_EXISTS" => find(),
            made => self.id(&made?, "/experiment_id"),
        }
    }

    /// Makes a run, and returns its id.
    pub(super) fn create_run(
        &self,
        experiment_id: &str,
        name: &str,
        tags: &[Value],
    ) -> Result<String, Refused> {
        let body = json!({
            "experiment_id": experiment_id,
            "run_name": name,
            "start_time": now(),
            "tags": tags,
        });
        self.id(&self.post("runs/create", &body)?, "/run/info/run_id")
    }

    /// Says what a run does.
    pub(super) fn update(&self, run_id: &str, status: Status) -> Result<(), Refused> {
        let mut body = json!({ "run_id": run_id, "status": status });
        if status != Status::Running {
            body["end_time"] = now().into();
        }
        self.post("runs/update", &body).map(drop)
    }

    /// Step and value of the last value of each metric that the server has of a run.
    pub(super) fn latest(&self, run_id: &str) -> Result<BTreeMap<String, (u64, f64)>, Refused> {
        let run = self.get("runs/get", "run_id", run_id)?;
        let metrics = run.pointer("/run/data/metrics").and_then(Value::as_array);
        let last = |metric: &Value| {
            let key = metric["key"].as_str()?.to_owned();
            let value = metric["value"].as_f64().unwrap_or(f64::NAN);
            Some((key, (metric["step"].as_u64()?, value)))
        };
        Ok(metrics.into_iter().flatten().filter_map(last).collect())
    }

    /// Adds `metrics`, `params` or `tags` to a run. A param stays as it is from then on.
    pub(super) fn log(
        &self,
        run_id: &str,
        what: &str,
        items: &[impl Serialize],
    ) -> Result<(), Refused> {
        let most = match what {
            "metrics" => METRICS_MAX,
            _ => PAIRS_MAX,
        };
        items.chunks(most).try_for_each(|items| {
            let body = json!({ "run_id": run_id, (what): items });
            self.post("runs/log-batch", &body).map(drop)
        })
    }

    fn get(&self, call: &str, name: &str, value: &str) -> Result<Value, Refused> {
        let request = self.agent.get(self.address(call)).query(name, value);
        self.answer(self.prepared(request).call())
    }

    fn post(&self, call: &str, body: &Value) -> Result<Value, Refused> {
        let request = self.agent.post(self.address(call));
        let request = request.header("Content-Type", "application/json");
        self.answer(self.prepared(request).send(body.to_string()))
    }

    fn address(&self, call: &str) -> String {
        format!("{}/api/2.0/mlflow/{call}", self.url)
    }

    fn prepared<B>(&self, request: RequestBuilder<B>) -> RequestBuilder<B> {
        let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
        let limit = self.deadline.map_or(REQUEST_TIMEOUT, left);
        let limit = limit.clamp(TIMEOUT_MIN, REQUEST_TIMEOUT);
        let request = request
            .config()
            .timeout_connect(Some(CONNECT_TIMEOUT.min(limit)))
            .timeout_global(Some(limit))
            .build();
        match &self.authorization {
            Some(text) => request.header("Authorization", text),
            None => request,
        }
    }

    /// The answer to a request, or why it is none.
    fn answer(&self, sent: Result<Response<Body>, Error>) -> Result<Value, Refused> {
        let mut answer = sent.map_err(|error| self.unanswered(&error))?;
        let status = answer.status();
        let body = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX);
        let body = body
            .read_to_vec()
            .map_err(|error| self.unanswered(&error))?;
        let said = serde_json::from_slice::<Value>(&body).ok();
        if status.is_success() {
            return said.ok_or_else(|| self.absent("its answer is not JSON"));
        }
        let of_error = |key: &str| said.as_ref()?[key].as_str().map(short);
        let code = of_error("error_code").unwrap_or_default();
        let why = of_error("message").unwrap_or_else(|| short(&String::from_utf8_lossy(&body)));
        let (name, hint) = match status.as_u16() {
            401 | 403 => (status.to_string(), Some(CREDENTIALS)),
            _ if code.is_empty() => return Err(self.absent(&status.to_string())),
            _ => (code.clone(), None),
        };
        let what = format!("MLflow at {} refuses ({name}): {why}", self.url);
        Err(Refused { what, hint, code })
    }

    fn unanswered(&self, error: &Error) -> Refused {
        self.absent(&match error {
            Error::Timeout(_) => "timed out".to_owned(),
            Error::HostNotFound => "no such host".to_owned(),
            Error::Io(error) if error.raw_os_error().is_some() => error.kind().to_string(),
            Error::Io(error) => short(&error.to_string()),
            error => short(&error.to_string()),
        })
    }

    fn absent(&self, why: &str) -> Refused {
        let what = format!("no MLflow server answers at {}: {why}", self.url);
        Refused::new(what, Some(ADDRESS))
    }

    /// An id in an answer.
    fn id(&self, answer: &Value, pointer: &str) -> Result<String, Refused> {
        let id = answer.pointer(pointer).and_then(Value::as_str);
        let lacking = || self.absent(&format!("its answer lacks {pointer}"));
        id.map(str::to_owned).ok_or_else(lacking)
    }
}

/// Milliseconds since 1970.
pub(super) fn now() -> u64 {
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// A tag of TensorBoard's as the name of a metric: letters, digits, `_-. ` and parts of a path, of which none is empty or dots.
pub(super) fn metric_name(tag: &str) -> String {
    let known = |c: char| c.is_alphanumeric() || "_-. ".contains(c);
    let part = |part: &str| match part {
        "" | "." | ".." => "_".to_owned(),
        part => part.replace(|c| !known(c), "_"),
    };
    let parts: Vec<_> = tag.split('/').map(part).collect();
    parts.join("/").chars().take(NAME_CHARS_MAX).collect()
}

/// Params or tags.
pub(super) fn pairs<'a>(pairs: impl IntoIterator<Item = (&'a str, String)>) -> Vec<Value> {
    let pair = |(key, value): (&str, String)| {
        let value: String = value.chars().take(VALUE_CHARS_MAX).collect();
        json!({ "key": key, "value": value })
    };
    pairs.into_iter().map(pair).collect()
}

fn short(text: &str) -> String {
    printable(&text.chars().take(SAID_CHARS_MAX).collect::<String>())
}

#[cfg(test)]
mod tests;
