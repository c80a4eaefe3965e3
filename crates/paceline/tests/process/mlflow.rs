//! Runs on an MLflow tracking server: every value once, whatever becomes of the server, and the same weights.

use std::fs;
use std::path::Path;

use paceline_testing::tracking::TrackingServer;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::tempdir;

use super::support::{
    Ended, LIMIT, PACELINE, Running, command, free_port, hash_of, metrics, paceline,
};

/// 1437 samples in batches of 64: 23 steps an epoch.
const JOB: &str = "--model tiny --shards 8 --epochs 2";

/// Starts `paceline` as a user of a server with passwords.
fn start(folder: &Path, line: &str) -> Running {
    let mut command = command(folder, PACELINE, line.split_whitespace());
    command.env("MLFLOW_TRACKING_USERNAME", "me");
    command.env("MLFLOW_TRACKING_PASSWORD", "secret");
    Running::start(command)
}

fn run(folder: &Path, line: &str) -> Ended {
    start(folder, line).ended(LIMIT)
}

/// Tag, step and value of what a run has written, sorted.
fn written(run: &Path) -> Vec<(String, u64, f64)> {
    let values = metrics(run).into_iter().flat_map(|record| {
        let step = record["step"].as_u64().expect("a step");
        let record = record.as_object().expect("a record");
        let scalars = paceline_train::scalars(record).into_iter();
        scalars.map(move |(tag, value)| (tag.into_owned(), step, value))
    });
    sorted(values.collect())
}

fn sorted(mut values: Vec<(String, u64, f64)>) -> Vec<(String, u64, f64)> {
    values.sort_by(|one, other| one.partial_cmp(other).expect("numbers"));
    values
}

#[test]
fn a_server_that_fails_changes_no_bit_and_gets_every_value_once_when_the_run_is_resumed() {
    let folder = tempdir().expect("a folder");
    let folder = folder.path();
    let train = |name: &str, url: &str| {
        format!("train --run-dir {name} {JOB} --nproc-per-node 2 --mlflow {url}")
    };
    let whole = hash_of(folder, &train("whole", "none"));
    let server = TrackingServer::start();
    let url = server.url();
    server.fail(|_, body| !body["metrics"].is_null());
    let failed = run(folder, &train("run", &format!("{url}/")));
    let lacks =
        "refuses (TEMPORARILY_UNAVAILABLE): says the test; it lacks the end of this run and up to";
    let hint = "hint: `paceline train --resume run` sends them later";
    failed.check(0, &[&format!("MLflow at {url} {lacks}"), hint]);
    assert_eq!(failed.hash(), whole);
    let tracked = server.runs().remove(0);
    assert_eq!((&*tracked.status, tracked.metrics.len()), ("RUNNING", 0));

    server.fail(|_, _| false);
    run(folder, "train --resume run").is_well();
    let runs = server.runs();
    let [tracked] = &runs[..] else {
        panic!("not one run: {runs:?}");
    };
    assert_eq!(
        sorted(tracked.metrics.clone()),
        written(&folder.join("run"))
    );
    assert_eq!(tracked.tags["weights_sha256"], whole);
    assert_eq!(
        [&*tracked.experiment, &tracked.name, &tracked.status],
        ["paceline", "run", "FINISHED"]
    );
    assert_eq!(
        [
            &*tracked.params["epochs"],
            &tracked.params["nproc_per_node"]
        ],
        ["2", "2"]
    );
    assert_eq!(
        server.authorization().as_deref(),
        Some("Basic bWU6c2VjcmV0")
    );
    for file in ["mlflow.json", "config.toml"] {
        let text = fs::read_to_string(folder.join("run").join(file)).expect("a file");
        assert!(text.contains(url) && !text.contains("secret"), "{text}");
    }

    let nothing = format!("http://127.0.0.1:{}", free_port());
    run(folder, &train("wrong", &nothing)).check(
        2,
        &[
            &format!("error: no MLflow server answers at {nothing}: connection refused"),
            "hint: start `mlflow server`",
        ],
    );
    assert!(!folder.join("wrong").exists(), "nothing is left behind");
}

#[test]
fn the_first_rank_of_another_launcher_sends_metrics_and_how_its_job_was_stopped() {
    let folder = tempdir().expect("a folder");
    let server = TrackingServer::start();
    let line = format!(
        "run --nproc-per-node 2 {PACELINE} train --run-dir run {JOB}00 --mlflow {}",
        server.url()
    );
    let stopped = start(folder.path(), &line);
    stopped.has_printed("[rank 0] epoch ");
    stopped.signal(Signal::INT);
    assert_eq!(stopped.ended(LIMIT).code, Some(130));
    let tracked = server.runs().remove(0);
    assert_eq!((server.runs().len(), &*tracked.status), (1, "KILLED"));
    assert_eq!(sorted(tracked.metrics), written(&folder.path().join("run")));
}

/// Prints what MLflow's own client finds of the only run.
const READ_BACK: &str = "
import sys, mlflow
client = mlflow.MlflowClient(sys.argv[1])
[run] = client.search_runs([client.get_experiment_by_name('paceline').experiment_id])
print(run.info.status, run.info.run_name, run.data.tags['weights_sha256'], run.data.params['epochs'])
for tag in run.data.metrics:
    for metric in client.get_metric_history(run.info.run_id, tag):
        print(tag, metric.step, metric.value)
";

#[test]
fn mlflow_reads_back_what_a_resumed_run_has_written() {
    let Some(python) = paceline_testing::python_with(&["mlflow"]) else {
        return;
    };
    let folder = tempdir().expect("a folder");
    let folder = folder.path();
    let port = free_port();
    let server = "-m mlflow server --workers 1 --backend-store-uri sqlite:///mlflow.db --port";
    let server = server.split(' ').chain([&*port]);
    let mut server = command(folder, &python, server);
    // It starts in half the time without the processes for what it is not asked here.
    server.env("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false");
    let server = Running::start(server);
    server.has_complained_of("Uvicorn running on", 1);
    let url = format!("http://127.0.0.1:{port}");
    let stopped = start(
        folder,
        &format!("train --run-dir run {JOB}0 --mlflow {url}"),
    );
    stopped.has_printed("epoch ");
    stopped.signal(Signal::INT);
    assert_eq!(stopped.ended(LIMIT).code, Some(130));
    let ended = paceline(folder, "train --resume run --nproc-per-node 1");
    let hash = ended.is_well().hash();
    let read = command(folder, &python, ["-c", READ_BACK, &url]);
    let read = Running::start(read).ended(LIMIT);
    read.check(0, &[]);
    let (run, values) = read.out.split_once('\n').expect("lines");
    assert_eq!(run, format!("FINISHED run {hash} 20"));
    let value = |line: &str| {
        let mut words = line.rsplitn(3, ' ');
        let value: Value = words.next().expect("a value").parse().expect("a number");
        let step = words.next().expect("a step").parse().expect("a step");
        let tag = words.next().expect("a tag").to_owned();
        (tag, step, value.as_f64().expect("a number"))
    };
    assert_eq!(
        sorted(values.lines().map(value).collect()),
        written(&folder.join("run"))
    );
}
