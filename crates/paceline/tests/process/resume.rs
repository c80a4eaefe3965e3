//! An interrupted run ends with the same bits as an uninterrupted one, whichever ranks resume it.

use std::fs;
use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;
use tempfile::{TempDir, tempdir};

use super::support::{
    Ended, LIMIT, PACELINE, checkpoints, in_time, metrics, paceline, start, steps,
};

/// 1437 samples in batches of 16: 90 steps an epoch.
const JOB: &str = "--model tiny --global-batch 16 --shards 8 --epochs 3";
const STEPS_PER_EPOCH: u64 = 90;

/// The hash of the job without interruption.
fn undisturbed(folder: &Path) -> String {
    let ended = paceline(
        folder,
        &format!("train --run-dir whole {JOB} --nproc-per-node 2"),
    );
    ended.is_well().hash().to_owned()
}

/// Stops a job in the middle of its second epoch; returns the step.
fn stopped(folder: &Path, job: &str) -> Result<u64, Ended> {
    let first = start(folder, &format!("train --run-dir run {job}"));
    first.has_printed("epoch 1/");
    first.signal(Signal::USR1);
    let ended = first.ended(LIMIT).ended_with(Some(138))?;
    let stopped_at = newest_state(&folder.join("run"))["step"].as_u64();
    let stopped_at = stopped_at.expect("a step");
    match (STEPS_PER_EPOCH + 1..2 * STEPS_PER_EPOCH).contains(&stopped_at) {
        true => Ok(stopped_at),
        false => Err(ended),
    }
}

fn newest_state(run: &Path) -> Value {
    let newest = checkpoints(run).pop().expect("a checkpoint");
    let text = fs::read(newest.join("state.json")).expect("a state");
    serde_json::from_slice(&text).expect("JSON")
}

#[test]
fn a_run_interrupted_twice_and_resumed_with_other_ranks_and_transports_ends_with_the_same_bits() {
    let whole = undisturbed(tempdir().expect("a folder").path());
    let (folder, _) = in_time(|folder| {
        stopped(folder, &format!("{JOB} --nproc-per-node 3 --transport shm"))?;
        let second = start(
            folder,
            "train --resume run --nproc-per-node 2 --transport tcp --save-every 7 --zero 1",
        );
        second.has_printed("epoch 2/3");
        second.signal(Signal::KILL);
        second.ended(LIMIT).ended_with(None)
    });
    let run = folder.path().join("run");

    let third = paceline(
        folder.path(),
        "train --resume run --nproc-per-node 8 --transport shm --zero 2",
    );
    assert_eq!(third.is_well().hash(), whole);
    assert!(third.out.contains("resumed   after step "), "{}", third.out);

    let records = metrics(&run);
    let all: Vec<u64> = (1..=3 * STEPS_PER_EPOCH).collect();
    assert_eq!(steps(&records, "step"), all, "every step is recorded once");
    assert_eq!(steps(&records, "epoch"), [90, 180, 270]);
}

#[test]
fn the_whole_job_killed_between_checkpoints_goes_on_from_the_last_one() {
    let whole = undisturbed(tempdir().expect("a folder").path());
    let (folder, ended) = in_time(|folder| {
        let job = start(
            folder,
            &format!("train --run-dir run {JOB} --nproc-per-node 2 --save-every 1000"),
        );
        job.has_printed("epoch 2/3");
        job.hits(&[0, 1], Signal::KILL);
        job.ended(LIMIT).ended_with(Some(137))
    });
    ended.check(137, &["was killed by signal 9 (SIGKILL)"]);
    let resumed = paceline(folder.path(), "train --resume run --nproc-per-node 1");
    assert_eq!(resumed.is_well().hash(), whole);
}

#[test]
fn a_damaged_newest_checkpoint_is_passed_over_for_the_one_before() {
    let folder = tempdir().expect("a folder");
    let first = paceline(
        folder.path(),
        "train --run-dir run --model tiny --epochs 2 --shards 2 --save-every 10",
    );
    let hash = first.is_well().hash().to_owned();
    let saved = checkpoints(&folder.path().join("run"));
    let [.., before, newest] = saved.as_slice() else {
        panic!("{saved:?}");
    };
    let file = fs::OpenOptions::new()
        .write(true)
        .open(newest.join("model.safetensors"));
    file.and_then(|file| file.set_len(100)).expect("cut short");

    let resumed = paceline(folder.path(), "train --resume run");
    assert_eq!((resumed.code, resumed.hash()), (Some(0), hash.as_str()));
    let skipped = "warning: skipped a damaged checkpoint: ";
    let line = resumed
        .err
        .lines()
        .find_map(|line| line.split_once(skipped));
    let (_, reason) = line.unwrap_or_else(|| panic!("{}", resumed.err));
    assert!(
        reason.contains("step-0000000046: model.safetensors"),
        "{reason}"
    );
    let before = before
        .file_name()
        .and_then(|name| name.to_str())
        .expect("a name");
    assert!(
        resumed.out.contains(&format!("checkpoints/{before}")),
        "{}",
        resumed.out
    );
}

#[test]
fn resume_alone_goes_on_with_the_newest_run() {
    let folder = tempdir().expect("a folder");
    for name in ["older", "newer"] {
        let line = format!("train --run-dir runs/{name} --model tiny --epochs 1 --shards 2");
        paceline(folder.path(), &line).is_well();
    }
    let resumed = paceline(folder.path(), "train --resume");
    assert!(
        resumed
            .is_well()
            .out
            .contains("from runs/newer/checkpoints/"),
        "{}",
        resumed.out
    );
}

#[test]
fn what_a_run_keeps_for_life_cannot_be_changed() {
    let folder = tempdir().expect("a folder");
    paceline(
        folder.path(),
        "train --run-dir run --model tiny --epochs 1 --shards 2",
    )
    .is_well();
    paceline(folder.path(), "train --resume run --seed 9 --shards 4").check(
        2,
        &["`seed` was 0 and is now 9", "`shards` was 2 and is now 4"],
    );
    paceline(folder.path(), "train --resume run --nproc-per-node 3")
        .check(2, &["shards 2", "lower --nproc-per-node"]);
}

#[test]
fn a_job_in_fp16_resumed_on_fewer_ranks_ends_with_the_same_bits() {
    let folder = tempdir().expect("a folder");
    let whole = paceline(
        folder.path(),
        &format!("train --run-dir whole {HALF} --nproc-per-node 1"),
    );
    let (folder, _) = stopped_in_half();
    let second = paceline(folder.path(), "train --resume run --nproc-per-node 1");
    assert_eq!(second.is_well().hash(), whole.is_well().hash());
}

#[test]
fn the_loss_scale_is_that_of_the_checkpoint() {
    let (folder, stopped_at) = stopped_in_half();
    let run = folder.path().join("run");
    let mut state = newest_state(&run);
    assert!(state["scaler"]["_growth_tracker"].as_u64() > Some(0));
    // A scale that a new scaler would not have.
    state["scaler"]["scale"] = 1024.0.into();
    let newest = checkpoints(&run).pop().expect("a checkpoint");
    fs::write(newest.join("state.json"), state.to_string()).expect("written");

    paceline(folder.path(), "train --resume run --nproc-per-node 2").is_well();
    let records = metrics(&run);
    let step = |number: u64| {
        let of = |record: &&Value| record["kind"] == "step" && record["step"] == number;
        records.iter().find(of).expect("a step")
    };
    assert_eq!(step(1)["scale"], 65536.0);
    assert_eq!(step(stopped_at + 1)["scale"], 1024.0);
}

const HALF: &str = "--model tiny --global-batch 16 --shards 2 --epochs 2 --precision fp16";

/// A job in fp16 that was stopped in the middle of its second epoch, and its step.
fn stopped_in_half() -> (TempDir, u64) {
    in_time(|folder| stopped(folder, &format!("{HALF} --nproc-per-node 2")))
}

#[test]
fn a_run_from_before_there_were_precisions_is_resumed_in_f32() {
    let whole = undisturbed(tempdir().expect("a folder").path());
    let (folder, _) = in_time(|folder| stopped(folder, &format!("{JOB} --nproc-per-node 2")));
    let run = folder.path().join("run");
    assert_eq!(newest_state(&run)["scaler"], Value::Null, "none in f32");

    // The settings as such a run saved them.
    let settings = run.join("config.toml");
    let text = fs::read_to_string(&settings).expect("settings");
    let older: String = text
        .lines()
        .filter(|line| !line.starts_with("precision"))
        .map(|line| format!("{line}\n"))
        .collect();
    assert_ne!(older, text);
    fs::write(&settings, older).expect("written");

    let refused = paceline(folder.path(), "train --resume run --precision bf16");
    refused.check(2, &["`precision` was f32 and is now bf16"]);
    let second = paceline(folder.path(), "train --resume run --nproc-per-node 1");
    assert_eq!(second.is_well().hash(), whole);
}

#[test]
fn checkpoints_that_are_all_damaged_are_told_once_with_a_way_out_that_works() {
    let folder = tempdir().expect("a folder");
    let run = folder.path().join("run");
    let line = "train --run-dir run --model tiny --epochs 1 --nproc-per-node 2";
    let hash = paceline(folder.path(), line).is_well().hash().to_owned();
    for checkpoint in checkpoints(&run) {
        fs::remove_file(checkpoint.join("state.json")).expect("there");
    }
    for launcher in [String::new(), format!("run --nproc-per-node 2 {PACELINE} ")] {
        let refused = paceline(folder.path(), &format!("{launcher}train --resume run"));
        let says = [
            "error: no valid checkpoint in run/checkpoints\n",
            "state.json",
            "hint: start over without --resume: in another --run-dir, or here after `rm -r run/checkpoints`",
        ];
        refused.check(2, &says);
        for once in ["no valid checkpoint", "hint: "] {
            assert_eq!(refused.err.matches(once).count(), 1, "{}", refused.err);
        }
        assert!(!refused.err.contains("error: rank"), "{}", refused.err);
    }
    assert_eq!(checkpoints(&run).len(), 1, "nothing is thrown away");

    fs::remove_dir_all(run.join("checkpoints")).expect("there");
    assert_eq!(paceline(folder.path(), line).is_well().hash(), hash);
}
