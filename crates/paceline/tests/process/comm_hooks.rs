//! The built-in digits with compressed gradients: they converge, and the ranks may change.

use std::path::Path;

use tempfile::tempdir;

use super::support::{Ended, metrics, paceline};

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
