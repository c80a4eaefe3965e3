//! A rank that is lost, in every layout of a model over ranks: the job ends at once and says which it was.

use std::time::Duration;

use rustix::process::{Signal, kill_process};
use tempfile::tempdir;

use super::support::{LIMIT, start};

/// Long enough for any moment of a step, an evaluation or a save to be the one of the loss.
const JOB: &str = "--task lm --layers 4 --heads 4 --width 16 --context 32 --global-batch 32 --dropout 0.1 --clip-norm 0.5 --shards 4 \
                   --accumulate 4 --threads-per-rank 1 --epochs 9999 --save-every 3";

/// Each with the rank that is lost: the first, the last, or one between.
const LAYOUTS: [(&str, usize); 16] = [
    ("--nproc-per-node 3", 0),
    ("--nproc-per-node 3 --zero 1", 1),
    ("--nproc-per-node 3 --zero 2", 2),
    ("--nproc-per-node 3 --zero 3", 0),
    ("--nproc-per-node 4 --pp 4 --schedule gpipe", 3),
    ("--nproc-per-node 4 --pp 4 --schedule zb-h1", 0),
    ("--nproc-per-node 4 --pp 2 --schedule 1f1b", 1),
    ("--nproc-per-node 4 --pp 2 --schedule interleaved", 3),
    ("--nproc-per-node 4 --tp 2", 1),
    ("--nproc-per-node 2 --tp 4 --sequence-parallel on", 0),
    ("--nproc-per-node 4 --pp 2 --zero 3", 2),
    ("--nproc-per-node 4 --tp 2 --zero 3", 1),
    (
        "--nproc-per-node 4 --tp 2 --pp 2 --zero 2 --schedule gpipe",
        0,
    ),
    ("--nproc-per-node 4 --pp 2 --tp 2 --transport tcp", 3),
    ("--nproc-per-node 8 --pp 2 --tp 2 --zero 3", 6),
    ("--nproc-per-node 8 --pp 2 --tp 2 --sequence-parallel on", 1),
];

/// Sends `signal` to a rank at some moment of training.
#[track_caller]
fn lose(
    (layout, rank): (&str, usize),
    options: &str,
    signal: Signal,
    after: Duration,
    code: i32,
    says: &[&str],
) {
    let folder = tempdir().expect("a folder");
    let line = format!("train --run-dir run --recovery none {JOB} {layout} {options}");
    let job = start(folder.path(), &line);
    job.has_printed("job ");
    std::thread::sleep(after);
    kill_process(job.rank(rank), signal).expect("it runs");
    let ended = job.ended(LIMIT);
    ended.check(code, &[&[&*format!("rank {rank}")], says].concat());
    assert!(!ended.err.contains("panicked"), "{layout}: {}", ended.err);
}

#[test]
fn a_killed_rank_is_named() {
    for layout in LAYOUTS {
        for after in [0, 611] {
            let says = ["was killed by signal 9 (SIGKILL)"];
            let after = Duration::from_millis(after);
            lose(layout, "", Signal::KILL, after, 137, &says);
        }
    }
}

#[test]
fn a_stopped_rank_is_named_at_the_deadline() {
    // Most of the time they wait.
    paceline_testing::on_threads(LAYOUTS.chunks(LAYOUTS.len() / 4), |layouts| {
        for layout in layouts {
            let after = Duration::from_millis(500);
            let deadline = "--timeout-seconds 6";
            lose(*layout, deadline, Signal::STOP, after, 4, &[]);
        }
    });
}
