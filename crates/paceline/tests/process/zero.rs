//! ZeRO together with stages and parts: the replicas of what a rank has share its state, with the bits of the layout without it.

use std::fs;
use std::path::Path;

use rustix::process::Signal;
use tempfile::{TempDir, tempdir};

use super::support::{LIMIT, checkpoints, paceline, start};

/// 80 sequences of 32 tokens to train on: the last of the 4 steps of an epoch has 8 of them, so its shards have 3, 3 and 2
/// micro-batches.
const JOB: &str = "--task lm --data text.txt --layers 4 --heads 4 --width 16 --context 32 --dropout 0.1 --shards 3 \
                   --global-batch 24 --micro-batches 4 --clip-norm 0.5 --epochs 2 --threads-per-rank 1";
const STEPS: usize = 8;

fn folder() -> TempDir {
    let folder = tempdir().expect("a folder");
    let line = "the quick brown fox jumps over the lazy dog, naïvely\n";
    fs::write(folder.path().join("text.txt"), line.repeat(52)).expect("a file");
    folder
}

fn hash(folder: &Path, line: &str) -> String {
    paceline(folder, line).is_well().hash().to_owned()
}

/// Trains in each layout from the start.
fn same_hash(folder: &Path, expected: &str, layouts: &[&str]) {
    for (at, layout) in layouts.iter().enumerate() {
        let line = format!("train --run-dir run-{at} {JOB} {layout}");
        assert_eq!(hash(folder, &line), expected, "{layout}");
    }
}

/// Trains in the first layout, then in each of the others from a step that the one before saved.
fn same_hash_resumed(folder: &Path, expected: &str, layouts: &[&str]) {
    let line = format!(
        "train --run-dir resumed {JOB} --save-every 1 --keep 9 {}",
        layouts[0]
    );
    assert_eq!(hash(folder, &line), expected);
    let run = folder.join("resumed");
    for (step, layout) in (1..STEPS).zip(&layouts[1..]) {
        for _ in step..STEPS {
            let newest = checkpoints(&run).pop().expect("a checkpoint");
            fs::remove_dir_all(newest).expect("removed");
        }
        let line = format!("train --resume resumed {layout}");
        assert_eq!(hash(folder, &line), expected, "{layout} from step {step}");
    }
}

#[test]
fn replicas_of_stages_share_their_state_with_the_bits_of_one_rank() {
    let folder = folder();
    let folder = folder.path();
    let alone = format!("train --run-dir alone {JOB} --nproc-per-node 1");
    let alone = hash(folder, &alone);
    same_hash(
        folder,
        &alone,
        &[
            "--nproc-per-node 4 --pp 2 --zero 1",
            "--nproc-per-node 6 --pp 2 --zero 2 --schedule gpipe",
            "--nproc-per-node 4 --pp 2 --zero 3 --schedule gpipe",
            "--nproc-per-node 4 --pp 2 --zero 3 --schedule interleaved --transport tcp",
            "--nproc-per-node 2 --pp 2 --zero 3",
        ],
    );
    same_hash_resumed(
        folder,
        &alone,
        &[
            "--nproc-per-node 4 --pp 2 --zero 3",
            "--nproc-per-node 3 --pp 1 --zero 0",
            "--nproc-per-node 6 --pp 2 --zero 1",
            "--nproc-per-node 2 --pp 1 --zero 3",
            "--nproc-per-node 4 --pp 4 --zero 2 --schedule gpipe",
            "--nproc-per-node 4 --pp 2 --zero 3 --schedule interleaved",
            "--nproc-per-node 1 --pp 1 --zero 0",
        ],
    );
    let written = paceline(folder, "generate resumed the --tokens 3");
    written.check(0, &[]);
}

#[test]
fn replicas_of_parts_share_their_state_with_the_bits_of_the_parts() {
    let folder = folder();
    let folder = folder.path();
    let alone = format!("train --run-dir alone {JOB} --tp 2 --nproc-per-node 1");
    let alone = hash(folder, &alone);
    same_hash(
        folder,
        &alone,
        &[
            "--nproc-per-node 4 --tp 2 --zero 1",
            "--nproc-per-node 6 --tp 2 --zero 2",
            "--nproc-per-node 4 --tp 2 --zero 3",
            "--nproc-per-node 1 --tp 2 --zero 3",
            "--nproc-per-node 8 --tp 2 --pp 2 --zero 3",
        ],
    );
    same_hash_resumed(
        folder,
        &alone,
        &[
            "--nproc-per-node 4 --tp 2 --zero 3",
            "--nproc-per-node 1 --zero 0",
            "--nproc-per-node 4 --zero 1",
            "--nproc-per-node 2 --zero 3",
            "--nproc-per-node 8 --pp 2 --zero 3",
            "--nproc-per-node 6 --pp 1 --zero 2",
            "--nproc-per-node 8 --pp 2 --zero 1 --schedule interleaved",
        ],
    );
}

#[test]
fn a_killed_rank_ends_the_job_and_is_named() {
    let folder = folder();
    for (layout, run) in [("--pp 2", "stages"), ("--tp 2", "parts")] {
        let line = format!(
            "train --run-dir {run} {JOB} --nproc-per-node 4 --zero 3 {layout} --epochs 2000"
        );
        let job = start(folder.path(), &line.replace("--epochs 2 ", ""));
        job.has_printed("epoch    1/2000");
        rustix::process::kill_process(job.rank(3), Signal::KILL).expect("it runs");
        let ended = job.ended(LIMIT);
        ended.check(137, &["rank 3", "was killed by signal 9 (SIGKILL)"]);
    }
}
