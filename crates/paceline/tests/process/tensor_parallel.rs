//! A language model cut into parts trains with the same bits wherever the parts are, and refuses what does not fit.

use std::fs;

use super::support::{checkpoints, hash_of, paceline, text_folder};

/// 80 sequences of 32 tokens to train on, in batches of 8: 10 steps an epoch.
const JOB: &str = "--task lm --data text.txt --layers 2 --heads 4 --width 16 --context 32 --dropout 0.1 --shards 2 --global-batch 8 \
                   --clip-norm 0.5 --epochs 1";

#[test]
fn the_bits_depend_on_the_parts_and_not_on_the_ranks_that_have_them() {
    let folder = text_folder();
    let mut seen = Vec::new();
    for (options, worlds) in [
        ("--tp 2", &[1, 2, 4][..]),
        ("--tp 4", &[1, 2, 4]),
        ("--tp 4 --sequence-parallel on", &[1, 2, 4]),
        ("--tp 2 --precision bf16 --recompute blocks", &[1, 2]),
    ] {
        let mut alone = None;
        for ranks in worlds {
            let dir = format!("{}-{ranks}", seen.len());
            let line = format!("train --run-dir {dir} {JOB} {options} --nproc-per-node {ranks}");
            let hash = hash_of(folder.path(), &line);
            let alone = alone.get_or_insert_with(|| hash.clone());
            assert_eq!(hash, *alone, "{options}, {ranks} ranks");
        }
        let hash = alone.expect("a run");
        assert!(!seen.contains(&hash), "other parts, other bits: {options}");
        seen.push(hash);
    }
}

#[test]
fn a_run_resumes_with_its_parts_elsewhere_and_writes_text() {
    let folder = text_folder();
    let line =
        format!("train --run-dir run {JOB} --tp 2 --nproc-per-node 2 --save-every 4 --keep 9");
    let expected = hash_of(folder.path(), &line);
    let run = folder.path().join("run");
    fs::remove_dir_all(checkpoints(&run).pop().expect("a checkpoint")).expect("removed");
    assert_eq!(
        hash_of(folder.path(), "train --resume run --nproc-per-node 1"),
        expected
    );
    fs::remove_dir_all(checkpoints(&run).pop().expect("a checkpoint")).expect("removed");
    assert_eq!(
        hash_of(folder.path(), "train --resume run --nproc-per-node 4"),
        expected
    );
    let written = paceline(folder.path(), "generate run the --tokens 20");
    written.check(0, &[]);
    assert!(written.out.starts_with("the"), "{}", written.out);
    let line = "train --resume run --tp 4";
    paceline(folder.path(), line).check(2, &["`tp` was 2 and is now 4", "the order of additions"]);
}

#[test]
fn parts_that_do_not_fit_are_refused_before_any_rank_starts() {
    let folder = text_folder();
    let check = |line: &str, expect: &[&str]| {
        let ended = paceline(folder.path(), &format!("train --run-dir run {line}"));
        ended.check(2, expect);
        assert!(!folder.path().join("run").exists(), "{line}");
    };
    check("--tp 2", &["`tp` is 2 (flag --tp), but task digits"]);
    let lm = |options: &str| format!("{JOB} {options}");
    check(
        &lm("--tp 3"),
        &[
            "3 parts do not divide 4 attention heads",
            "choose --tp from 1, 2, 4",
        ],
    );
    check(
        &lm("--tp 2 --nproc-per-node 3"),
        &[
            "the job has 3 (flag --nproc-per-node) ranks: neither divides the other",
            "start 1, 2, or a multiple of 2 ranks",
        ],
    );
    check(
        &lm("--tp 2 --nproc-per-node 8"),
        &["shards 2 (flag --shards) are fewer than the 4 replicas"],
    );
    check(
        &lm("--tp 2 --strategy dp"),
        &["does not go with strategy dp"],
    );
    check(
        &lm("--tp 4 --sequence-parallel on").replace("--context 32", "--context 30"),
        &["4 parts do not divide 30 tokens of a sequence"],
    );
}
