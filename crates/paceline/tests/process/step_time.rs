//! The step timing example runs, and its workloads keep the library's guarantees.

use std::path::Path;

use serde_json::Value;
use tempfile::tempdir;

use super::support::{example, paceline};

/// Runs a few small steps of one workload and returns rank 0's output.
fn run(folder: &Path, workload: &str, ranks: usize, more: &str) -> Vec<Value> {
    let line = format!(
        "run --nproc-per-node {ranks} {} --workload {workload} --steps 2 --warmup 1 --batch 2 --shards 2 {more}",
        example("step_time").display()
    );
    let ended = paceline(folder, &line);
    let object = |line: &str| {
        // With several ranks the launcher prefixes each line with its rank.
        let object = line.trim_start_matches("[rank 0] ");
        serde_json::from_str(object).expect("a JSON object")
    };
    ended.is_well().out.lines().map(object).collect()
}

#[test]
fn its_workloads_have_the_same_bits_on_one_rank_and_on_two() {
    let folder = tempdir().expect("a folder");
    for workload in ["mlp", "resnet20", "gpt"] {
        let [one, two] = [1, 2].map(|ranks| {
            let lines = run(folder.path(), workload, ranks, "--losses");
            let steps: Vec<_> = lines.iter().map(|line| line["step"].as_u64()).collect();
            assert_eq!(steps, [Some(0), Some(1), Some(2), None], "{workload}");
            let hash = lines[3]["weights_sha256"].as_str().expect("a hash");
            hash.to_owned()
        });
        assert_eq!(one, two, "{workload}");
    }
}

#[test]
fn a_trace_has_every_rank_of_a_step() {
    let folder = tempdir().expect("a folder");
    let lines = run(folder.path(), "mlp", 2, "--trace trace.json");
    assert!(lines[0]["streamed_seconds"].as_f64() > Some(0.0));
    let reduced = lines[0]["reduced_seconds"].as_f64();
    assert!(reduced >= lines[0]["overlapped_seconds"].as_f64());
    let text = std::fs::read_to_string(folder.path().join("trace.json")).expect("a trace");
    let trace: Value = serde_json::from_str(&text).expect("a trace in JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    for rank in [0, 1] {
        let backward = |event: &&Value| {
            event["pid"] == rank
                && event["name"]
                    .as_str()
                    .is_some_and(|name| name.starts_with("backward"))
        };
        assert_eq!(events.iter().filter(backward).count(), 1, "rank {rank}");
    }
}
