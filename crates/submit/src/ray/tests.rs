//! The driver of a Ray job: what it is told, and that Python takes it.

use std::process::Command;

use serde_json::json;

use super::*;
use crate::submission::Nodes;

fn job() -> Submission {
    let mut job = Submission::new("train", "./prog");
    job.nodes = Nodes::new(2, 2).expect("a range");
    job.ranks = Ranks::Count(8);
    job
}

/// What the driver is told.
fn told(change: impl FnOnce(&mut Submission, &mut Options)) -> Value {
    let (mut job, mut options) = (job(), Options::default());
    change(&mut job, &mut options);
    let text = render(&job, &options).expect("a driver");
    let (_, rest) = text.split_once("\nJOB = ").expect("a job");
    let (told, _) = rest.split_once("\n}\n").expect("its end");
    serde_json::from_str(&format!("{told}\n}}")).expect("JSON")
}

fn refused(change: impl FnOnce(&mut Submission)) -> String {
    let mut job = job();
    change(&mut job);
    let error = render(&job, &Options::default()).expect_err("refused");
    assert!(matches!(error, SubmitError::Usage { .. }), "{error}");
    error.to_string()
}

#[test]
fn a_job_asks_for_a_cpu_for_each_rank_and_keeps_its_threads_to_them() {
    let told = told(|_, _| {});
    let expect = json!({
        "name": "train",
        "nodes": [2, 2],
        "bundle": { "CPU": 8 },
        "env": {},
        "launcher": "paceline",
        "options": ["--nproc-per-node", "8", "--threads-per-rank", "1"],
        "command": ["./prog"],
        "join_timeout": 600.0,
        "grace": 30,
    });
    assert_eq!(told, expect);
}

#[test]
fn what_ray_can_be_told_is_told() {
    let told = told(|job, options| {
        job.nodes = Nodes::new(1, 4).expect("a range");
        job.cpus_per_rank = Some(2);
        job.gpus_per_node = Some(8);
        job.memory = Some("1G".parse().expect("a size"));
        job.time_limit = Some("90".parse().expect("a time"));
        job.env = vec![("ODD".into(), "it's \"\u{1f600}\"\n".into())];
        job.shutdown_timeout = Some(60);
        job.run_options = vec!["--threads-per-rank".into(), "4".into()];
        job.program = "-p".into();
        options.address = Some("http://head:8265".into());
        options.working_dir = Some(".".into());
        options.chdir = Some("/data".into());
        options.runtime_env_json = object(r#"{"pip": null}"#).ok();
        options.join_timeout = Some(Duration::from_secs(5));
    });
    let options = [
        "--nproc-per-node",
        "8",
        "--shutdown-timeout",
        "60",
        "--threads-per-rank",
        "4",
    ];
    let expect = json!({
        "name": "train",
        "address": "http://head:8265",
        "working_dir": ".",
        "runtime_env": "{\"pip\":null}",
        "nodes": [1, 4],
        "bundle": { "CPU": 16, "GPU": 8, "memory": 1 << 30 },
        "env": { "ODD": "it's \"\u{1f600}\"\n" },
        "chdir": "/data",
        "launcher": "paceline",
        "options": options,
        "command": ["--", "-p"],
        "join_timeout": 5.0,
        "grace": 60,
        "time_limit": 5400,
    });
    assert_eq!(told, expect);
}

#[test]
fn ray_must_know_how_many_ranks_a_node_has() {
    let told = told(|job, _| {
        job.ranks = Ranks::Named("gpu".to_owned());
        job.gpus_per_node = Some(4);
    });
    assert_eq!(told["bundle"], json!({ "CPU": 4, "GPU": 4 }));
    for word in ["auto", "cpu", "gpu"] {
        let error = refused(|job| job.ranks = Ranks::Named(word.to_owned()));
        assert!(
            error.contains(word) && error.contains("a number"),
            "{error}"
        );
    }
    refused(|job| job.env.push(("A B".into(), String::new())));
    assert!(object("[]").is_err() && object("{").is_err());
}

#[test]
fn python_takes_the_driver_and_one_without_ray_says_what_is_missing() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("train.ray.py");
    let text = render(&job(), &Options::default()).expect("a driver");
    std::fs::write(&file, text).expect("written");
    // -S: without the packages that are installed, and so without Ray.
    let Ok(ended) = Command::new("python3")
        .args(["-I", "-S"])
        .arg(&file)
        .output()
    else {
        return paceline_testing::skipped("there is no python3");
    };
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(3), "{said}");
    assert!(
        said.contains("has no Ray") && said.contains("pip install"),
        "{said}"
    );
}
