//! Pipelines of processes: the bits of one rank, in every layout and after every resume, and lost ranks.

use tempfile::tempdir;

use super::support::{metrics, paceline, resumes_elsewhere, write_text};

/// Dropout and clipping included; the last step of an epoch has fewer samples.
const JOB: &str = "--task lm --layers 4 --heads 2 --width 16 --context 32 --global-batch 64 --dropout 0.2 --clip-norm 0.5 \
                   --shards 2 --micro-batches 4 --threads-per-rank 1";

#[test]
fn every_schedule_on_two_and_four_ranks_has_the_bits_of_one() {
    let folder = tempdir().expect("a folder");
    // 10 steps.
    write_text(folder.path(), 380);
    let train = |line: &str| {
        let line = format!("train {JOB} --data text.txt --epochs 1 {line}");
        paceline(folder.path(), &line)
    };
    let alone = train("--run-dir alone --nproc-per-node 1");
    let alone = alone.is_well().hash().to_owned();
    for (run, line) in [
        ("gpipe", "--nproc-per-node 2 --pp 2 --schedule gpipe"),
        ("four", "--nproc-per-node 4 --pp 4 --pp-cuts cost"),
        ("beside", "--nproc-per-node 4 --pp 2 --schedule interleaved"),
        (
            "zero-bubble",
            "--nproc-per-node 4 --pp 4 --schedule zb-h1 --trace 1",
        ),
        (
            "split",
            "--nproc-per-node 2 --pp 2 --schedule zb-h1 --precision f32 --recompute 2",
        ),
        (
            "cut",
            "--nproc-per-node 2 --pp 2 --pp-cuts 5 --precision f32 --recompute blocks --trace 1",
        ),
    ] {
        let ended = train(&format!("--run-dir {run} {line}"));
        assert_eq!(ended.is_well().hash(), alone, "{line}");
        let report = "pipeline  ";
        assert!(ended.out.contains(report), "{}", ended.out);
    }
    let records = |run: &str| metrics(&folder.path().join(run));
    let figures = |run: &str| {
        let mut all = records(run);
        let figure = |record: &serde_json::Value| {
            ["loss", "grad_norm", "held_out_loss", "accuracy"].map(|key| record[key].clone())
        };
        all.retain(|record| record["kind"] != "end");
        all.iter().map(figure).collect::<Vec<_>>()
    };
    assert_eq!(figures("beside"), figures("alone"), "losses and norms too");
    let end = records("four").pop().expect("records");
    let shares = end["pipeline"]["idle_shares"].as_array().expect("shares");
    assert_eq!(shares.len(), 4, "{end}");
    for run in ["cut", "zero-bubble"] {
        let picture = folder.path().join(run).join("pipeline.svg");
        let picture = std::fs::read_to_string(picture).expect("a picture");
        assert!(picture.contains("rank 1: idle "), "{picture}");
        // The head alone leaves no gradients for later.
        let has_weights = picture.contains("backward: weights");
        assert_eq!(has_weights, run == "zero-bubble", "{picture}");
    }
}

#[test]
fn a_pipelines_checkpoint_resumes_without_one_and_the_reverse() {
    resumes_elsewhere(
        JOB,
        "--nproc-per-node 2 --pp 2",
        "--nproc-per-node 4 --pp 4",
    );
}
