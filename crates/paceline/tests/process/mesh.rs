//! Replicas, stages and parts at the same time: the bits of the same parts on one rank, and resumes elsewhere.

use tempfile::tempdir;

use super::support::{metrics, paceline, resumes_elsewhere, write_text};

/// Dropout and clipping included; the last step of an epoch has fewer samples.
const JOB: &str = "--task lm --layers 3 --heads 4 --width 16 --context 32 --global-batch 64 --dropout 0.2 --clip-norm 0.5 \
                   --shards 2 --micro-batches 4 --threads-per-rank 1";

#[test]
fn stages_cut_into_parts_have_the_bits_of_the_parts_on_one_rank() {
    let folder = tempdir().expect("a folder");
    // 10 steps.
    write_text(folder.path(), 380);
    let train = |line: &str| {
        let line = format!("train {JOB} --data text.txt --epochs 1 {line}");
        paceline(folder.path(), &line)
    };
    let sequence = "--tp 4 --sequence-parallel on";
    let half = "--tp 2 --precision fp16";
    let mut printed = String::new();
    for (alone, parts, meshes) in [
        (
            "parts",
            "--tp 2",
            &[
                ("four", "--nproc-per-node 4 --pp 2"),
                (
                    "two",
                    "--nproc-per-node 2 --pp 2 --schedule gpipe --trace 1",
                ),
                ("eight", "--nproc-per-node 8 --pp 2 --schedule interleaved"),
                (
                    "cut",
                    "--nproc-per-node 4 --pp 2 --pp-cuts 1 --recompute blocks",
                ),
            ][..],
        ),
        (
            "sequence",
            sequence,
            &[
                ("sequence-4", "--nproc-per-node 4 --pp 2 --pp-cuts cost"),
                ("sequence-2", "--nproc-per-node 2 --pp 2"),
            ],
        ),
        ("half", half, &[("half-4", "--nproc-per-node 4 --pp 2")]),
    ] {
        let ended = train(&format!("--run-dir {alone} {parts} --nproc-per-node 1"));
        let hash = ended.is_well().hash().to_owned();
        for (run, mesh) in meshes {
            let ended = train(&format!("--run-dir {run} {parts} {mesh}"));
            assert_eq!(ended.is_well().hash(), hash, "{parts} {mesh}");
            printed += &ended.out;
        }
    }
    let mesh = "dp 2, pp 2 with 4 stages, schedule interleaved, tp 2 with 2 parts";
    assert!(printed.contains(mesh), "{printed}");
    let figures = |run: &str| {
        let mut all = metrics(&folder.path().join(run));
        let figure = |record: &serde_json::Value| {
            ["loss", "grad_norm", "held_out_loss", "accuracy", "scale"]
                .map(|key| record[key].clone())
        };
        all.retain(|record| record["kind"] != "end");
        all.iter().map(figure).collect::<Vec<_>>()
    };
    for (run, alone) in [
        ("eight", "parts"),
        ("sequence-4", "sequence"),
        ("half-4", "half"),
    ] {
        assert_eq!(figures(run), figures(alone), "losses and norms too");
    }
    let picture = folder.path().join("two/pipeline.svg");
    let picture = std::fs::read_to_string(picture).expect("a picture");
    assert!(picture.contains("rank 1: idle "), "{picture}");
}

#[test]
fn a_run_of_stages_and_parts_resumes_on_one_rank_and_the_reverse() {
    let line = format!("{JOB} --tp 2");
    resumes_elsewhere(
        &line,
        "--nproc-per-node 4 --pp 2",
        "--nproc-per-node 8 --pp 2",
    );
}

#[test]
fn ranks_that_make_no_mesh_are_refused_before_any_of_them_starts() {
    let folder = tempdir().expect("a folder");
    let check = |line: &str, expect: &[&str]| {
        let ended = paceline(folder.path(), &format!("train --run-dir run {JOB} {line}"));
        ended.check(2, expect);
        assert!(!folder.path().join("run").exists(), "{line}");
    };
    check(
        "--pp 2 --tp 4 --nproc-per-node 6",
        &[
            "6 (flag --nproc-per-node) ranks are 3 for each stage of `pp` 2 (flag --pp): neither divides the other",
            "start 8 ranks or a multiple of them, or 2 with all parts of a stage on one",
        ],
    );
    check(
        "--pp 4 --tp 2 --nproc-per-node 6",
        &["`pp` is 4 (flag --pp), but the job has 6 (flag --nproc-per-node) ranks"],
    );
    check(
        "--pp 2 --tp 3 --nproc-per-node 6",
        &["3 parts do not divide 4 attention heads"],
    );
    check(
        "--pp 6 --tp 2 --nproc-per-node 12",
        &["pipeline: 6 stages for 5 blocks", "use at most 5 stages"],
    );
    check(
        "--pp 2 --tp 2 --nproc-per-node 16",
        &["shards 2 (flag --shards) are fewer than the 4 replicas"],
    );
}
