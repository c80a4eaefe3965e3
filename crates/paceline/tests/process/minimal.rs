//! The minimal example: one hash on any number of ranks, with or without a kill and a restart.

use std::path::Path;

use rustix::process::Signal;
use tempfile::{TempDir, tempdir};

use super::support::{
    Ended, LIMIT, Running, command, example, free_port, in_time, paceline, start,
};

fn line(ranks: usize) -> String {
    format!(
        "run --nproc-per-node {ranks} {}",
        example("minimal").display()
    )
}

/// The common hash that all ranks printed.
#[track_caller]
fn hash(ended: &Ended) -> String {
    let hash = ended.is_well().hash();
    let lines = ended.out.lines();
    let others = lines.filter(|line| line.contains("sha256") && !line.ends_with(hash));
    assert_eq!(others.count(), 0, "{}", ended.out);
    hash.to_owned()
}

fn whole(folder: &Path, ranks: usize) -> String {
    hash(&paceline(folder, &line(ranks)))
}

#[test]
fn it_prints_one_hash_on_one_to_four_ranks() {
    let hashes = [1, 2, 3, 4].map(|ranks| whole(tempdir().expect("a folder").path(), ranks));
    assert_eq!(hashes, [0; 4].map(|_| hashes[0].clone()));
}

#[test]
fn ranks_that_were_started_by_hand_say_who_is_missing_and_which_variables_nobody_reads() {
    let folder = tempdir().expect("a folder");
    let none: [&str; 0] = [];
    let rank = |rank: &str, port: &str| {
        let mut command = command(folder.path(), example("minimal"), none);
        command
            .envs([("RANK", rank), ("WORLD_SIZE", "2")])
            .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)])
            .env("PACELINE_TIMEOUT_SECOND", "30");
        Running::start(command)
    };
    let port = free_port();
    let first = rank("0", &port);
    first.has_complained("warning: rank 0 waits for rank 1: 1 of 2 ranks have joined");
    let ranks = [first, rank("1", &port)].map(|rank| rank.ended(LIMIT));
    let unknown = "warning: environment variable PACELINE_TIMEOUT_SECOND has no effect in this program (did you mean \
                   PACELINE_TIMEOUT_SECONDS?)\n";
    for (ended, count) in ranks.iter().zip([1, 0]) {
        assert_eq!(ended.code, Some(0), "{}", ended.err);
        assert_eq!(ended.err.matches(unknown).count(), count, "{}", ended.err);
    }
}

/// A folder with an interrupted job.
fn interrupted(ranks: usize, signal: Signal, code: Option<i32>) -> TempDir {
    let line = line(ranks).replacen("run", "run --no-fold", 1);
    let (folder, ()) = in_time(|folder| {
        let job = start(folder, &line);
        job.has_printed("[rank 0] epoch 3 ");
        job.signal(signal);
        let ended = job.ended(LIMIT);
        if ended.out.contains("sha256") {
            return Err(ended);
        }
        assert_eq!(ended.code, code, "{}{}", ended.out, ended.err);
        Ok(())
    });
    folder
}

#[test]
fn killed_or_stopped_it_goes_on_with_another_number_of_ranks_to_the_same_hash() {
    let expected = whole(tempdir().expect("a folder").path(), 1);
    for (signal, code) in [(Signal::KILL, None), (Signal::TERM, Some(143))] {
        for (first, second) in [(1, 4), (4, 2)] {
            let folder = interrupted(first, signal, code);
            let resumed = paceline(folder.path(), &line(second));
            assert!(!resumed.out.contains("epoch 1 "), "{}", resumed.out);
            assert_eq!(
                hash(&resumed),
                expected,
                "{signal:?}, {first} then {second}"
            );
        }
    }
}

#[test]
fn no_rank_is_blamed_for_checkpoints_that_are_damaged() {
    let folder = tempdir().expect("a folder");
    whole(folder.path(), 2);
    let checkpoints = folder.path().join("runs/minimal");
    for checkpoint in std::fs::read_dir(&checkpoints).expect("a folder") {
        let state = checkpoint.expect("an entry").path().join("state.json");
        let _ = std::fs::remove_file(state);
    }
    let refused = paceline(folder.path(), &line(2));
    refused.check(
        1,
        &[
            "Error: no valid checkpoint in runs/minimal",
            "hint: to start over, move runs/minimal away",
            "error: all ranks exited with code 1 with the same error",
        ],
    );
    assert!(!refused.err.contains("rank 0 failed"), "{}", refused.err);

    std::fs::rename(&checkpoints, folder.path().join("away")).expect("renamed");
    whole(folder.path(), 2);
}
