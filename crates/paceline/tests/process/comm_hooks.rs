//! The built-in digits and language model with compressed gradients: they converge, and the ranks may change.

use std::fs;
use std::path::Path;

use tempfile::tempdir;

use super::support::{Ended, checkpoints, hash_of, metrics, paceline, write_text};

const JOB: &str = "--model tiny --shards 3 --lr 0.01";

/// Accuracy on the held-out digits after the last epoch.
fn accuracy(run: &Path) -> f64 {
    last(run, "accuracy")
}

/// A figure of the last epoch.
fn last(run: &Path, figure: &str) -> f64 {
    let mut records = metrics(run).into_iter().rev();
    let last = records.find(|record| record["kind"] == "epoch");
    let last = last.expect("an epoch");
    last[figure].as_f64().expect("a number")
}

fn train(folder: &Path, run: &str, ranks: usize, options: &str) -> Ended {
    let line = format!("train --run-dir {run} {JOB} --nproc-per-node {ranks} {options}");
    paceline(folder, &line)
}

#[test]
fn the_digits_are_learnt_with_every_hook() {
    let folder = tempdir().expect("a folder");
    train(folder.path(), "none", 3, "--epochs 6").is_well();
    let whole = accuracy(&folder.path().join("none"));
    assert!(whole > 0.9, "{whole}");
    for hook in [
        "bf16",
        "fp16",
        "int8",
        "topk:0.05",
        "powersgd:2",
        "localsgd:5",
        "diloco:20:0:0.7:0.5",
    ] {
        let options = format!("--epochs 6 --comm-hook {hook}");
        train(folder.path(), hook, 3, &options).is_well();
        let found = accuracy(&folder.path().join(hook));
        assert!(found > whole - 0.03, "{hook}: {found}, without {whole}");
    }
}

#[test]
fn compressed_shards_give_one_hash_on_one_rank_and_on_two() {
    let folder = tempdir().expect("a folder");
    let hook = "--comm-hook powersgd:2 --epochs 1";
    let one = train(folder.path(), "one", 1, hook);
    let two = train(folder.path(), "two", 2, hook);
    assert_eq!(one.is_well().hash(), two.is_well().hash());
}

#[test]
fn a_resumed_run_goes_on_with_the_state_of_its_hook() {
    let folder = tempdir().expect("a folder");
    for hook in ["topk:0.05", "powersgd:2:3", "localsgd:5", "diloco:4"] {
        let options = format!("--epochs 1 --save-every 7 --keep 9 --comm-hook {hook}");
        let whole = train(folder.path(), hook, 3, &options);
        let run = folder.path().join(hook);
        // Steps 7, 14, 21 and the last one were saved; the job goes on from the second.
        let saved = checkpoints(&run);
        assert_eq!(saved.len(), 4, "{saved:?}");
        for lost in &saved[2..] {
            fs::remove_dir_all(lost).expect("removed");
        }
        let resumed = format!("train --resume {hook} --nproc-per-node 3");
        let resumed = hash_of(folder.path(), &resumed);
        assert_eq!(resumed, whole.is_well().hash(), "{hook}");
    }
}

/// Two replicas of two stages, or of two parts.
const MESH: &str = "--task lm --data text.txt --layers 2 --heads 2 --width 16 --context 32 --global-batch 64 --clip-norm 0.5 --shards 2 \
                    --micro-batches 2 --threads-per-rank 1 --lr 0.01 --nproc-per-node 4";

#[test]
fn replicas_of_stages_and_of_parts_learn_with_every_hook() {
    let folder = tempdir().expect("a folder");
    // 33 steps.
    write_text(folder.path(), 1520);
    for (layout, hooks) in [
        ("--pp 2", &["int8", "topk:0.1", "localsgd:5"][..]),
        ("--tp 2", &["powersgd:2", "diloco:10:0:0.7:0.5"]),
    ] {
        let loss = |hook: &str| {
            let run = format!("{hook}{}", &layout[2..4]);
            let line =
                format!("train --run-dir {run} {MESH} {layout} --epochs 1 --comm-hook {hook}");
            paceline(folder.path(), &line).is_well();
            last(&folder.path().join(run), "held_out_loss")
        };
        let whole = loss("none");
        // Uniform scores of 256 bytes have a loss of 5.55.
        assert!(whole < 3.0, "{whole}");
        for hook in hooks {
            let found = loss(hook);
            assert!(
                found < whole + 1.0,
                "{layout} {hook}: {found}, without {whole}"
            );
        }
    }
}

/// The state of the hook, and each replica's optimizer, are those of stages and parts too; stages may change.
#[test]
fn a_resumed_mesh_goes_on_with_the_state_of_its_hook() {
    let folder = tempdir().expect("a folder");
    // 17 steps.
    write_text(folder.path(), 780);
    let check = |hook: &str, first: &str, then: &str| {
        let run = format!("{hook}{first}").replace([' ', '-', ':'], "");
        let line = format!(
            "train --run-dir {run} {MESH} {first} --epochs 1 --save-every 7 --keep 9 --comm-hook {hook}"
        );
        let whole = paceline(folder.path(), &line);
        let saved = checkpoints(&folder.path().join(&run));
        // Steps 7, 14 and the last one were saved; the job goes on from the first.
        assert_eq!(saved.len(), 3, "{saved:?}");
        for lost in &saved[1..] {
            fs::remove_dir_all(lost).expect("removed");
        }
        let resumed = hash_of(folder.path(), &format!("train --resume {run} {then}"));
        assert_eq!(resumed, whole.is_well().hash(), "{hook} {first} {then}");
    };
    let on = "--nproc-per-node 4";
    let elsewhere = "--nproc-per-node 2 --pp 1";
    check("topk:0.1", "--pp 2", on);
    check("powersgd:2:3", "--tp 2", on);
    check("powersgd:2:3", "--pp 2 --schedule gpipe", elsewhere);
    check("diloco:6:0:0.7:0.5", "--tp 2", on);
    check("diloco:6:0:0.7:0.5", "--pp 2", on);
}
