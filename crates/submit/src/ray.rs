//! Ray: a driver in Python that starts one launcher on each node.
//!
//! The file submits itself and then runs on a node of the cluster, as a Ray job. It makes the job's token, asks Ray for room on the nodes, and ends with the
//! launchers' exit code. Where the number of nodes is a range, it also hosts the store at which the launchers meet, so that each of their
//! nodes may go, and starts a launcher on every node that comes.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::error::SubmitError;
use crate::submission::{Ranks, Submission, without_nul};

/// Ray's own options. Their texts are their help.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args)]
pub struct Options {
    /// Ray's dashboard, such as http://head:8265 [default: RAY_API_SERVER_ADDRESS or RAY_ADDRESS, else this machine's]
    #[arg(long, value_name = "URL")]
    pub address: Option<String>,
    /// Folder that Ray copies to every node, where the program then works
    #[arg(long, value_name = "DIR")]
    pub working_dir: Option<String>,
    /// Folder on the nodes that the program works in [default: the copy of --working-dir]
    #[arg(long, value_name = "DIR")]
    pub chdir: Option<String>,
    /// Ray's runtime environment of the job, such as '{"pip": ["numpy"]}'
    #[arg(long, value_name = "JSON", value_parser = object)]
    pub runtime_env_json: Option<Map<String, Value>>,
    /// How long Ray is given to find room, and launchers to meet; the launchers' own if not given.
    #[arg(skip)]
    pub join_timeout: Option<Duration>,
}

fn object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("expected a JSON object: {error}"))
}

/// What the driver is told. It is Python as well as JSON: it has no `null`, `true` and `false`.
#[derive(Serialize)]
struct Job<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    working_dir: Option<&'a str>,
    /// JSON in a text.
    #[serde(skip_serializing_if = "Option::is_none")]
    runtime_env: Option<String>,
    nodes: [usize; 2],
    /// What each node gives, in Ray's names; memory in bytes.
    bundle: BTreeMap<&'static str, u64>,
    env: BTreeMap<&'a str, &'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    chdir: Option<&'a str>,
    launcher: &'a str,
    options: Vec<String>,
    command: Vec<&'a str>,
    join_timeout: f64,
    /// How long ranks may take to stop.
    grace: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    time_limit: Option<u64>,
}

const DRIVER: &str = include_str!("ray/driver.py");
/// The line of the driver that the job takes.
const PLACE: &str = "JOB = {}\n";

/// The launchers' own times.
const JOIN_SECONDS: f64 = 600.0;
const SHUTDOWN_SECONDS: u64 = 30;

/// The driver.
///
/// *Errors*: something cannot be said to Ray.
pub fn render(job: &Submission, options: &Options) -> Result<String, SubmitError> {
    job.check()?;
    options.chdir.as_deref().map_or(Ok(()), without_nul)?;
    let count = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
    let mut bundle = BTreeMap::from([("CPU", count(cpus(job)?))]);
    bundle.extend(job.gpus_per_node.map(|gpus| ("GPU", count(gpus))));
    bundle.extend(job.memory.map(|size| ("memory", size.mebibytes() << 20)));
    let join_timeout = options.join_timeout.map(|limit| limit.as_secs_f64());
    let runtime_env = options.runtime_env_json.as_ref();
    let text = Job {
        name: &job.name,
        address: options.address.as_deref(),
        working_dir: options.working_dir.as_deref(),
        runtime_env: runtime_env.map(|env| Value::Object(env.clone()).to_string()),
        nodes: [job.nodes.min(), job.nodes.max()],
        bundle,
        env: job
            .env
            .iter()
            .map(|(name, value)| (&**name, &**value))
            .collect(),
        chdir: options.chdir.as_deref(),
        launcher: &job.launcher,
        options: launcher_options(job),
        command: job.command().collect(),
        join_timeout: join_timeout.unwrap_or(JOIN_SECONDS),
        grace: job.shutdown_timeout.unwrap_or(SHUTDOWN_SECONDS),
        time_limit: job.time_limit.map(|limit| limit.seconds()),
    };
    let text = serde_json::to_string_pretty(&text).map_err(|error| {
        SubmitError::failed(format!("the job cannot be written as JSON: {error}"), None)
    })?;
    Ok(DRIVER.replacen(PLACE, &format!("JOB = {text}\n"), 1))
}

/// CPUs to ask for.
///
/// *Errors*: the node itself decides the number of ranks, but Ray gives what it is asked for.
fn cpus(job: &Submission) -> Result<usize, SubmitError> {
    match (&job.ranks, job.gpus_per_node) {
        (Ranks::Named(word), Some(gpus)) if word == "gpu" && job.cpus_per_rank.is_none() => {
            Ok(gpus)
        }
        (Ranks::Named(word), _) => {
            let expected = "a number, or `gpu` with --gpus-per-node: Ray gives a job only the CPUs and GPUs that it asks for";
            Err(SubmitError::setting("--nproc-per-node", word, expected))
        }
        (Ranks::Count(ranks), _) => Ok(ranks.saturating_mul(job.cpus_per_rank.unwrap_or(1))),
    }
}

/// Ray counts CPUs but binds nothing to them: threads keep a rank to its own.
fn launcher_options(job: &Submission) -> Vec<String> {
    const THREADS: &str = "--threads-per-rank";
    let mut options = job.options(job.shutdown_timeout);
    if !options.iter().any(|word| word == THREADS) {
        let cpus = job.cpus_per_rank.unwrap_or(1).to_string();
        options.extend([THREADS.to_owned(), cpus]);
    }
    options
}

#[cfg(test)]
mod tests;
