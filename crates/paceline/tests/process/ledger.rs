//! The ledger of runs that are killed, and resumed on other ranks: it proves that every sample was used once, or names what is
//! wrong.

use std::fs;
use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;
use tempfile::tempdir;

use super::support::{LIMIT, checkpoints, paceline, start, text_folder};

/// 1437 samples in batches of 16: 90 steps an epoch.
const JOB: &str = "--model tiny --global-batch 16 --shards 8 --epochs 6";

fn verify(folder: &Path, run: &str) -> Value {
    let line = format!("ledger verify {run} --json");
    let ended = paceline(folder, &line);
    ended.is_well();
    serde_json::from_str(&ended.out).expect("JSON")
}

/// Starts a run, kills the launcher and with it all ranks once `printed`, and waits until nothing is left.
fn killed(folder: &Path, line: &str, printed: &str) {
    let job = start(folder, line);
    job.has_printed(printed);
    job.signal(Signal::KILL);
    assert_eq!(job.ended(LIMIT).code, None, "killed");
}

#[test]
fn a_job_killed_twice_and_resumed_on_other_ranks_used_every_sample_once() {
    let folder = tempdir().expect("a folder");
    let line = format!("train --run-dir run {JOB} --nproc-per-node 3 --save-every 50");
    killed(folder.path(), &line, "epoch 1/6");
    killed(
        folder.path(),
        "train --resume run --nproc-per-node 2 --transport tcp --zero 1",
        "epoch 2/6",
    );
    // Each rank that fails starts all of them again.
    let last = start(
        folder.path(),
        "train --resume run --nproc-per-node 4 --recovery restart --max-restarts 1",
    );
    last.has_printed("resumed   after step ");
    rustix::process::kill_process(last.rank(1), Signal::KILL).expect("it runs");
    assert_eq!(last.ended(LIMIT).code, Some(0));

    let found = verify(folder.path(), "run");
    assert_eq!(found["steps"], 540);
    let attempts = found["attempts"].as_array().expect("attempts");
    let worlds: Vec<_> = attempts.iter().map(|a| &a["begin"]["world"]).collect();
    assert_eq!(worlds[..2], [3, 2]);
    assert!(worlds.len() > 2 && worlds[2..].iter().all(|world| **world == 4));
    assert_eq!(
        attempts[1]["begin"]["owners"],
        serde_json::json!([[0, 0], [1, 4]])
    );
    let epochs = found["epochs"].as_array().expect("epochs");
    assert_eq!(epochs.len(), 6);
    assert!(
        epochs.iter().all(|epoch| epoch["once"] == 1437),
        "{epochs:?}"
    );

    let told = paceline(folder.path(), "ledger verify run/checkpoints --svg run.svg");
    told.is_well();
    for text in [
        "steps     540 committed",
        "epochs    1 to 6: each of 1437 samples was used exactly once",
        "started on 3 ranks",
        "on 2 ranks",
        "last record: step 540",
    ] {
        assert!(told.out.contains(text), "{text:?} is not in\n{}", told.out);
    }
    let picture = fs::read_to_string(folder.path().join("run.svg")).expect("a picture");
    for text in ["rank 3", "committed", "every sample used as dealt"] {
        assert!(picture.contains(text), "{text:?} is not in\n{picture}");
    }
}

#[test]
fn a_resume_that_skips_samples_and_a_record_that_is_gone_are_named() {
    let folder = tempdir().expect("a folder");
    let run = folder.path().join("run");
    let line = format!("train --run-dir run {JOB} --nproc-per-node 2 --save-every 1");
    killed(folder.path(), &line, "epoch 1/6");
    // The position in the newest checkpoint moves on by one step, as if a step had been lost. At the end of an epoch it could not.
    let (state, mut saved, consumed) = checkpoints(&run)
        .into_iter()
        .rev()
        .find_map(|checkpoint| {
            let state = checkpoint.join("state.json");
            let text = fs::read(&state).expect("a state");
            let saved: Value = serde_json::from_slice(&text).expect("JSON");
            let consumed = saved["sampler"]["consumed"].as_u64().expect("samples");
            if consumed + 32 <= 1437 {
                return Some((state, saved, consumed));
            }
            fs::remove_dir_all(checkpoint).expect("removed");
            None
        })
        .expect("a checkpoint within an epoch");
    let step = saved["step"].as_u64().expect("a step");
    saved["sampler"]["consumed"] = (consumed + 16).into();
    fs::write(&state, saved.to_string()).expect("written");
    paceline(folder.path(), "train --resume run --nproc-per-node 3").is_well();

    let ledger = run.join("checkpoints/ledger.jsonl");
    let out_of_turn = format!("step {} used samples {}..", step + 1, consumed + 16);
    let refused = paceline(folder.path(), "ledger verify run");
    refused.check(1, &["proves nothing", &out_of_turn]);

    let whole = fs::read_to_string(&ledger).expect("a ledger");
    let without: Vec<&str> = whole
        .lines()
        .enumerate()
        .filter(|(at, _)| *at != 20)
        .map(|(_, line)| line)
        .collect();
    fs::write(&ledger, without.join("\n") + "\n").expect("written");
    paceline(folder.path(), "ledger verify run").check(1, &["record 20 is missing before line 21"]);

    fs::remove_file(&ledger).expect("removed");
    paceline(folder.path(), "ledger verify run").check(2, &["has no ledger"]);
}

#[test]
fn replicas_of_a_mesh_are_the_ones_that_samples_belong_to() {
    let folder = text_folder();
    let job = "--task lm --data text.txt --layers 2 --width 16 --heads 2 --context 16 --global-batch 8 --shards 4 --micro-batches 2 \
               --epochs 2";
    let line = format!("train {job} --run-dir run --nproc-per-node 4 --pp 2 --zero 1");
    paceline(folder.path(), &line).is_well();
    let found = verify(folder.path(), "run");
    let begin = &found["attempts"][0]["begin"];
    assert_eq!(begin["world"], 4);
    let owners = begin["owners"].as_array().expect("owners");
    let shards: Vec<_> = owners.iter().map(|owner| &owner[1]).collect();
    assert_eq!(shards, [0, 2], "{owners:?}");
    let epochs = found["epochs"].as_array().expect("epochs");
    assert!(epochs.len() == 2 && epochs.iter().all(|epoch| epoch["once"] == epoch["len"]));
}
