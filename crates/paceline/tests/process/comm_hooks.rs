//! The built-in digits with compressed gradients: they converge, and the ranks may change.

use std::fs;
use std::path::Path;

use tempfile::tempdir;

use super::support::{Ended, checkpoints, hash_of, metrics, paceline};

const JOB: &str = "--model tiny --shards 3 --lr 0.01";

/// Accuracy on the held-out digits after the last epoch.
fn accuracy(run: &Path) -> f64 {
    let mut records = metrics(run).into_iter().rev();
    let last = records.find(|record| record["kind"] == "epoch");
    let last = last.expect("an epoch");
    last["accuracy"].as_f64().expect("an accuracy")
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
