//! `paceline indices` prints what PyTorch's `DistributedSampler` yields; the expected numbers were printed by PyTorch.

use tempfile::tempdir;

use super::support::paceline;

#[track_caller]
fn check(line: &str, expect: &[usize]) {
    let folder = tempdir().expect("a folder");
    let ended = paceline(folder.path(), &format!("indices {line}"));
    let numbers = ended
        .is_well()
        .out
        .lines()
        .map(|line| line.parse().expect("a number"));
    assert_eq!(numbers.collect::<Vec<usize>>(), expect, "{line}");
}

#[test]
fn one_rank_reads_pytorchs_permutation() {
    check(
        "--len 10 --world 1 --rank 0",
        &[4, 1, 7, 5, 3, 9, 0, 8, 6, 2],
    );
    check(
        "--len 10 --world 1 --rank 0 --seed 1",
        &[5, 6, 1, 2, 0, 8, 9, 3, 7, 4],
    );
    check(
        "--len 10 --world 1 --rank 0 --seed 42",
        &[2, 6, 1, 8, 4, 5, 0, 9, 3, 7],
    );
    // PyTorch seeds with seed + epoch.
    check(
        "--len 10 --world 1 --rank 0 --seed 40 --epoch 2",
        &[2, 6, 1, 8, 4, 5, 0, 9, 3, 7],
    );
}

#[test]
fn ranks_read_strides_padded_from_the_front() {
    let expect: [&[usize]; 4] = [&[9, 10, 7], &[5, 2, 1], &[0, 3, 4], &[8, 6, 9]];
    for (rank, expect) in expect.into_iter().enumerate() {
        check(
            &format!("--len 11 --world 4 --rank {rank} --seed 3 --epoch 2"),
            expect,
        );
    }
}

#[test]
fn without_the_last_and_without_a_shuffle_they_are_cut() {
    let expect: [&[usize]; 4] = [&[0, 4], &[1, 5], &[2, 6], &[3, 7]];
    for (rank, expect) in expect.into_iter().enumerate() {
        check(
            &format!("--len 11 --world 4 --rank {rank} --drop-last --no-shuffle"),
            expect,
        );
    }
}

#[test]
fn json_holds_the_same() {
    let folder = tempdir().expect("a folder");
    let line = "indices --len 11 --world 4 --rank 1 --seed 3 --epoch 2 --json";
    let ended = paceline(folder.path(), line);
    let value: serde_json::Value = serde_json::from_str(&ended.is_well().out).expect("JSON");
    assert_eq!(value["indices"], serde_json::json!([5, 2, 1]));
    assert_eq!(value["world"], 4);
}

#[test]
fn a_rank_outside_the_world_is_wrong_usage() {
    let folder = tempdir().expect("a folder");
    paceline(folder.path(), "indices --len 11 --world 4 --rank 4")
        .check(2, &["a world of 4 has the ranks 0 to 3"]);
}
