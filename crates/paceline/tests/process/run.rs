//! The output of a run and the files in its directory.

use std::collections::BTreeMap;
use std::fs;

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::tempdir;

use super::support::{
    LIMIT, PACELINE, Running, checkpoints, command, metrics, paceline, start, steps,
};

#[test]
fn rank_0_alone_prints_and_every_rank_has_a_log() {
    let folder = tempdir().expect("a folder");
    let line = "train --run-dir run --model tiny --epochs 2 --shards 3 --nproc-per-node 3";
    let ended = paceline(folder.path(), line);
    let out = &ended.is_well().out;
    let lines: Vec<&str> = out.lines().collect();
    let begins = [
        "data      digits: 1,437 samples to train on, 360 held out, 10 classes",
        "ranks     3 on CPU, ",
        "model     tiny convolutional network: ",
        "batch     64 = 21 to 22 per rank, 3 shards",
        "job       2 epochs, 46 steps",
        "run       run",
        "epoch 1/2   train loss ",
        "epoch 2/2   train loss ",
        "best epoch ",
        "samples  precision ",
        // A line for each of the digits.
        "  ",
        "  ",
        "  ",
        "  ",
        "  ",
        "  ",
        "  ",
        "  ",
        "  ",
        "  ",
        "confused most often: ",
        "total time ",
        "all 3 ranks computing ",
        "rank 0   computing ",
        "rank 1   computing ",
        "rank 2   computing ",
        "weights sha256: ",
    ];
    assert_eq!(lines.len(), begins.len(), "{out}");
    for (line, begin) in lines.iter().zip(begins) {
        assert!(
            line.starts_with(begin),
            "{line:?} does not begin with {begin:?}"
        );
    }
    let log = |rank| {
        fs::read_to_string(
            folder
                .path()
                .join(format!("run/logs/attempt_0/{rank}/stdout.log")),
        )
    };
    assert_eq!(&log(0).expect("a log"), out);
    assert_eq!([log(1).expect("a log"), log(2).expect("a log")], ["", ""]);
    assert!(log(3).is_err());
}

#[test]
fn on_processors_usage_is_that_of_the_ranks() {
    let folder = tempdir().expect("a folder");
    // Long enough for several samples, which are taken ten times a second, on a fast machine too.
    let line = "train --run-dir run --model small --epochs 8 --nproc-per-node 2 --usage on --lang ko --usage-json u.json \
                --usage-svg u.svg";
    let ended = paceline(folder.path(), line);
    ended
        .is_well()
        .check(0, &["⏱️ 실행 시간 요약\n• 전체 실행 시간 : 0시간 0분 "]);
    let file = |name| fs::read_to_string(folder.path().join(name)).expect(name);
    let report: Value = serde_json::from_str(&file("u.json")).expect("JSON");
    assert_eq!(report["gpus"], Value::Array(vec![]));
    for rank in [0, 1] {
        let used = report["ranks"][rank]["cpu_s"].as_f64();
        assert!(used.is_some_and(|seconds| seconds > 0.0), "{report}");
    }
    assert!(file("u.svg").starts_with("<svg "));
}

#[test]
fn metrics_have_a_record_for_every_step_and_epoch_and_one_at_the_end() {
    let folder = tempdir().expect("a folder");
    let ended = paceline(
        folder.path(),
        "train --run-dir run --model tiny --epochs 2 --shards 2",
    );
    let records = metrics(&folder.path().join("run"));
    assert_eq!(steps(&records, "step"), (1..=46).collect::<Vec<u64>>());
    assert_eq!(steps(&records, "epoch"), [23, 46]);
    assert_eq!(
        steps(&records, "spans"),
        [6, 12, 18, 23, 29, 35, 41, 46],
        "a few steps of each epoch"
    );
    let spans = records.iter().rfind(|record| record["kind"] == "spans");
    let spans = &spans.expect("spans of the last step")["ranks"][0];
    for kind in ["forward", "backward", "optimizer", "evaluation", "save"] {
        let mut known = spans.as_array().expect("spans").iter();
        assert!(known.any(|span| span[0] == kind), "{kind}: {spans}");
    }
    let end = records.last().expect("a record");
    assert_eq!(end["kind"], "end");
    assert_eq!(end["weights_sha256"], ended.is_well().hash());
    let samples: f64 = records
        .iter()
        .filter_map(|record| record["samples"].as_f64())
        .sum();
    assert_eq!(
        samples,
        2.0 * 1437.0,
        "every sample is trained on once in each epoch"
    );
    let finite = |record: &Value| record["loss"].as_f64().is_some_and(f64::is_finite);
    assert!(
        records
            .iter()
            .filter(|record| record["kind"] == "step")
            .all(finite)
    );
}

#[test]
fn the_weights_are_safetensors_with_the_hash_that_is_reported() {
    let folder = tempdir().expect("a folder");
    let ended = paceline(
        folder.path(),
        "train --run-dir run --model tiny --epochs 1 --shards 2",
    );
    let newest = checkpoints(&folder.path().join("run"))
        .pop()
        .expect("a checkpoint");
    let bytes = fs::read(newest.join("model.safetensors")).expect("weights");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let tensors: BTreeMap<String, TensorView<'_>> = file.tensors().into_iter().collect();
    for ending in ["output.weight", "running_mean"] {
        assert!(
            tensors.keys().any(|name| name.ends_with(ending)),
            "no {ending}"
        );
    }

    let state = fs::read(newest.join("state.json")).expect("a state");
    let state: Value = serde_json::from_slice(&state).expect("JSON");
    assert_eq!(state["weights_sha256"], ended.is_well().hash());
    assert_eq!(hash_of(&tensors), ended.hash());
    for (name, sum) in state["files"].as_object().expect("files") {
        let digest = Sha256::digest(fs::read(newest.join(name)).expect("a file"));
        assert_eq!(sum, &hex(&digest), "{name}");
    }
}

/// The hash as documented at `paceline::weights::sha256`, computed from the file alone.
fn hash_of(tensors: &BTreeMap<String, TensorView<'_>>) -> String {
    let mut hash = Sha256::new();
    for (name, tensor) in tensors {
        for text in [name.clone(), format!("{:?}", tensor.dtype())] {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        }
        hash.update((tensor.shape().len() as u64).to_le_bytes());
        for dimension in tensor.shape() {
            hash.update((*dimension as u64).to_le_bytes());
        }
        hash.update(tensor.data());
    }
    hex(&hash.finalize())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `--explain --json` with these words, variables and file.
fn explained(words: &str, variables: &[(&str, &str)], file: &str) -> Value {
    let folder = tempdir().expect("a folder");
    fs::write(folder.path().join("my.toml"), file).expect("a file");
    let line = format!("train --config my.toml --explain --json {words}");
    let mut command = command(folder.path(), PACELINE, line.split_whitespace());
    command.envs(variables.iter().copied());
    let ended = Running::start(command).ended(LIMIT);
    let value = serde_json::from_str(&ended.is_well().out).expect("JSON");
    assert!(
        !folder.path().join("runs").exists(),
        "explaining starts nothing"
    );
    value
}

#[test]
fn a_flag_wins_over_a_variable_and_a_variable_over_the_file() {
    let file = "epochs = 5\nlr = 0.5\nseed = 5\n";
    let variables = [("PACELINE_EPOCHS", "4"), ("PACELINE_LR", "0.25")];
    let explained = explained("--epochs 3", &variables, file);
    let check = |key: &str, value: Value, from: &str| {
        assert_eq!(explained[key]["value"], value, "{key}");
        let origin = explained[key]["from"].as_str().expect("an origin");
        assert!(origin.contains(from), "{key} is from {origin}");
    };
    check("epochs", 3.into(), "flag --epochs");
    check("lr", 0.25.into(), "PACELINE_LR");
    check("seed", 5.into(), "my.toml:3");
    check("global_batch", 64.into(), "default");
}

#[test]
fn the_resolved_settings_are_saved_with_where_each_came_from() {
    let folder = tempdir().expect("a folder");
    paceline(
        folder.path(),
        "train --run-dir run --model tiny --epochs 1 --lr 0.01",
    )
    .is_well();
    let saved = fs::read_to_string(folder.path().join("run/config.toml")).expect("settings");
    assert!(saved.contains("lr = 0.01 # flag --lr\n"), "{saved}");
    assert!(saved.contains("global_batch = 64 # default\n"), "{saved}");
    let explained = paceline(folder.path(), "train --lr 0.01 --explain");
    let line = explained
        .is_well()
        .out
        .lines()
        .find(|line| line.starts_with("lr "));
    assert_eq!(
        line.map(|line| line.split_whitespace().collect()),
        Some(vec!["lr", "0.01", "flag", "--lr"])
    );
}

/// Events of a rank's track whose name starts with `name`, as (start, end) in microseconds.
fn events(trace: &Value, rank: usize, track: u64, name: &str) -> Vec<(f64, f64)> {
    let all = trace["traceEvents"].as_array().expect("events");
    let wanted = |event: &&Value| {
        event["pid"] == rank
            && event["tid"] == track
            && event["ph"] == "X"
            && event["name"]
                .as_str()
                .is_some_and(|found| found.starts_with(name))
    };
    let time = |event: &Value| {
        let start = event["ts"].as_f64().expect("a time");
        (start, start + event["dur"].as_f64().expect("a duration"))
    };
    all.iter().filter(wanted).map(time).collect()
}

/// The bucket is handed to a thread of its own, which a loaded machine may leave waiting until the backward pass is over: so the
/// order has to be seen in one of several runs.
#[test]
fn a_trace_shows_the_first_bucket_leaving_before_the_backward_pass_ends() {
    let late: Vec<String> = (0..5).map_while(|_| late_bucket()).collect();
    assert!(late.len() < 5, "{late:?}");
}

/// Looks at the trace of one step. The rank whose first bucket left after its backward pass, if there is one.
fn late_bucket() -> Option<String> {
    let mut late = None;
    let folder = tempdir().expect("a folder");
    let line = "train --run-dir run --model base --epochs 1 --nproc-per-node 2 --trace 5 --bucket-cap-mb 0.02";
    let ended = paceline(folder.path(), line);
    assert!(
        ended
            .is_well()
            .out
            .contains("trace of step 5 in run/trace.json"),
        "{}",
        ended.out
    );
    let text = fs::read(folder.path().join("run/trace.json")).expect("a trace");
    let trace: Value = serde_json::from_slice(&text).expect("JSON");
    for event in trace["traceEvents"].as_array().expect("events") {
        let kind = event["ph"].as_str().expect("a kind");
        assert!(["X", "M", "i"].contains(&kind), "{event}");
        assert!(
            event["name"].is_string() && event["pid"].is_u64() && event["tid"].is_u64(),
            "{event}"
        );
        assert!(
            kind == "M" || event["ts"].as_f64().is_some_and(|at| at >= 0.0),
            "{event}"
        );
        assert!(
            kind != "X" || event["dur"].as_f64().is_some_and(|time| time >= 0.0),
            "{event}"
        );
    }
    for rank in 0..2 {
        let [(_, backward_ends)] = events(&trace, rank, 0, "backward")[..] else {
            panic!("one shard, so one backward pass: {trace}");
        };
        // The comm track's span begins when the rank sends its gradients and first waits for its peers'.
        let sent = events(&trace, rank, 1, "wait for peers");
        assert!(sent.len() > 2, "{} buckets", sent.len());
        let first = sent
            .iter()
            .map(|(start, _)| *start)
            .fold(f64::INFINITY, f64::min);
        if first >= backward_ends {
            late = Some(format!(
                "rank {rank}: {first} is not before {backward_ends}"
            ));
        }
        assert_eq!(events(&trace, rank, 0, "forward").len(), 1);
        assert_eq!(events(&trace, rank, 0, "optimizer").len(), 1);
        assert_eq!(events(&trace, rank, 1, "all_reduce").len(), sent.len());
    }
    late
}

#[test]
fn json_comes_a_line_at_a_time_while_the_job_runs() {
    let folder = tempdir().expect("a folder");
    let line = "train --json --run-dir run --model tiny --epochs 1000 --global-batch 16 --nproc-per-node 2";
    let job = start(folder.path(), line);
    job.has_printed("{\"kind\":\"start\"");
    job.has_printed("{\"kind\":\"epoch\"");
    job.signal(rustix::process::Signal::TERM);
    let ended = job.ended(LIMIT);
    ended.check(143, &[]);
    let records: Vec<Value> = (ended.out.lines())
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}")))
        .collect();
    let (first, last) = (&records[0], &records[records.len() - 1]);
    assert_eq!(
        (&first["world"], &first["steps"]),
        (&2.into(), &90_000.into())
    );
    assert_eq!(first["run_dir"], "run");
    assert_eq!(
        (&last["kind"], &last["signal"]),
        (&"stopped".into(), &"SIGTERM".into())
    );
    assert_eq!(
        last["step"],
        *steps(&metrics(&folder.path().join("run")), "step")
            .last()
            .expect("a step")
    );

    let line = "train --json --model tiny --epochs 2 --nproc-per-node 2";
    let ended = paceline(folder.path(), line);
    let end: Value =
        serde_json::from_str(ended.is_well().out.lines().last().expect("a line")).expect("JSON");
    assert_eq!(end["weights_sha256"].as_str().map(str::len), Some(64));
    assert_eq!(ended.out.matches("\"kind\":\"epoch\"").count(), 2);
}

#[test]
fn jobs_that_start_at_once_have_run_directories_of_their_own() {
    let folder = tempdir().expect("a folder");
    let jobs: Vec<_> = (0..3)
        .map(|_| {
            start(
                folder.path(),
                "train --model tiny --epochs 1 --nproc-per-node 1",
            )
        })
        .collect();
    for job in jobs {
        job.ended(LIMIT).is_well();
    }
    let runs = fs::read_dir(folder.path().join("runs")).expect("runs");
    assert_eq!(runs.count(), 3);
}
