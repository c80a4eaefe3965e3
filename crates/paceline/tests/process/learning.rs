//! What a job learns with and when it stops: the same on any number of ranks, and after a resume.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use burn::tensor::TensorData;
use paceline_checkpoint::read_safetensors;
use serde_json::Value;
use tempfile::tempdir;

use super::support::{checkpoints, hash_of, metrics, paceline, text_folder};

/// The object that `line` prints.
fn json(folder: &Path, line: &str) -> Value {
    let ended = paceline(folder, line);
    ended.check(0, &[]);
    serde_json::from_str(&ended.out).expect("an object")
}

/// A rate too high to learn on for long.
const JOB: &str =
    "--model tiny --shards 4 --epochs 40 --lr 0.1 --lr-schedule constant --patience 2";

#[test]
fn a_job_stops_at_the_same_epoch_on_any_ranks_and_resumed_and_keeps_the_best() {
    let folder = tempdir().expect("a folder");
    let folder = folder.path();
    let alone = paceline(
        folder,
        &format!("train --run-dir alone {JOB} --nproc-per-node 1 --keep 1"),
    );
    let hash = alone.is_well().hash();
    assert!(
        alone.out.contains("stopped early after step "),
        "{}",
        alone.out
    );
    let records = metrics(&folder.join("alone"));
    let end = records.last().expect("an end");
    assert_eq!(end["stopped_early"], true);
    let epochs = records.iter().filter(|record| record["kind"] == "epoch");
    let epochs: Vec<&Value> = epochs.collect();
    let best = end["best"]["epoch"].as_u64().expect("an epoch") as usize;
    assert_eq!(best + 2, epochs.len(), "two epochs without a better one");
    assert!(epochs.len() < 40);
    assert_eq!(
        checkpoints(&folder.join("alone")).len(),
        2,
        "the newest and the best"
    );
    for (which, epoch) in [("", epochs.len()), ("--best", best)] {
        let found = json(folder, &format!("eval alone {which} --json"));
        assert_eq!(found["loss"], epochs[epoch - 1]["held_out_loss"], "{which}");
    }

    let line = format!("train --run-dir run {JOB} --nproc-per-node 2 --keep 40");
    assert_eq!(hash_of(folder, &line), hash);
    // It goes on after the first of the epochs that were not better.
    let last = checkpoints(&folder.join("run"))
        .pop()
        .expect("a checkpoint");
    fs::remove_dir_all(last).expect("removed");
    let resumed = paceline(folder, "train --resume run --nproc-per-node 1");
    assert_eq!(resumed.is_well().hash(), hash);
    let records = metrics(&folder.join("run"));
    assert_eq!(records.last().expect("an end")["best"], end["best"]);
    // More patience trains on.
    let longer = paceline(folder, "train --resume run --nproc-per-node 2 --patience 3");
    assert_ne!(longer.is_well().hash(), hash);
}

/// The tensors of a run's newest checkpoint.
fn weights(run: &Path) -> BTreeMap<String, TensorData> {
    let newest = checkpoints(run).pop().expect("a checkpoint");
    let read = read_safetensors(&newest.join("model.safetensors"));
    read.expect("whole").into_iter().collect()
}

#[test]
fn a_run_begins_with_the_weights_of_another_one_and_changes_only_what_is_not_frozen() {
    let folder = tempdir().expect("a folder");
    let folder = folder.path();
    const JOB: &str = "--model tiny --shards 2 --epochs 1 --global-batch 256";
    paceline(folder, &format!("train --run-dir first {JOB}")).is_well();
    let first = checkpoints(&folder.join("first"))
        .pop()
        .expect("a checkpoint");
    let file = first.join("model.safetensors");
    let begin = format!("--init {} --freeze *.conv?.*,norm1.*", file.display());
    let line = format!("train --run-dir alone {JOB} {begin} --nproc-per-node 1");
    let hash = hash_of(folder, &line);
    let line = format!("train --run-dir run {JOB} {begin} --nproc-per-node 2 --zero 1");
    assert_eq!(hash_of(folder, &line), hash);
    let (before, after) = (weights(&folder.join("first")), weights(&folder.join("run")));
    let kept = |path: &str| before[path] == after[path];
    for path in [
        "conv1.weight",
        "conv2.weight",
        "norm1.gamma",
        "norm1.running_mean",
    ] {
        assert!(kept(&format!("Conv.{path}")), "{path}");
    }
    for path in [
        "norm2.gamma",
        "norm2.running_mean",
        "hidden.weight",
        "output.bias",
    ] {
        assert!(!kept(&format!("Conv.{path}")), "{path}");
    }
    let line = format!(
        "train --run-dir other --model base --init {}",
        file.display()
    );
    paceline(folder, &line).check(
        2,
        &["Conv.conv1.weight is [4, 1, 3, 3] F32, which does not make the model's [32, 1, 3, 3]"],
    );
    paceline(
        folder,
        &format!("train --run-dir no {JOB} --freeze layer9.*"),
    )
    .check(2, &["\"layer9.*\" matches no parameter", "conv1.weight"]);
}

#[test]
fn each_layout_begins_with_the_same_weights_and_keeps_what_is_frozen() {
    const JOB: &str = "--task lm --data text.txt --layers 2 --heads 2 --width 16 --context 32 --shards 2 --global-batch 16 \
                       --micro-batches 2 --epochs 1 --threads-per-rank 1";
    let folder = text_folder();
    let folder = folder.path();
    paceline(folder, &format!("train --run-dir first {JOB} --seed 1")).is_well();
    let first = checkpoints(&folder.join("first"))
        .pop()
        .expect("a checkpoint");
    let file = first.join("model.safetensors");
    let begin = format!("{JOB} --init {} --freeze *embedding*", file.display());
    let before = weights(&folder.join("first"));
    for layouts in [
        &[
            "--nproc-per-node 1",
            "--nproc-per-node 2 --zero 3",
            "--nproc-per-node 2 --pp 2",
        ][..],
        &[
            "--nproc-per-node 1 --tp 2",
            "--nproc-per-node 2 --tp 2",
            "--nproc-per-node 4 --tp 2 --pp 2",
        ],
    ] {
        let mut hashes = Vec::new();
        for layout in layouts {
            let dir = layout.replace(['-', ' '], "");
            let line = format!("train --run-dir {dir} {begin} {layout}");
            hashes.push(hash_of(folder, &line));
            let after = weights(&folder.join(dir));
            for (path, values) in &before {
                let is_kept = after[path] == *values;
                assert_eq!(is_kept, path.contains("embedding"), "{path} {layout}");
            }
        }
        assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{hashes:?}");
    }
}

#[test]
fn each_optimizer_gives_the_same_bits_whole_and_dealt_to_the_ranks() {
    let folder = tempdir().expect("a folder");
    let job = "--model tiny --shards 2 --epochs 1 --global-batch 128 --lr-schedule one-cycle --label-smoothing 0.1";
    for (at, optimizer) in ["sgd --momentum 0.9", "lion", "muon"].iter().enumerate() {
        let run = |name: &str, layout: &str| {
            let line =
                format!("train --run-dir {name}-{at} {job} --optimizer {optimizer} {layout}");
            hash_of(folder.path(), &line)
        };
        assert_eq!(
            run("alone", "--nproc-per-node 1"),
            run("dealt", "--nproc-per-node 2 --zero 1"),
            "{optimizer}"
        );
    }
    let line = "train --task lm --tp 2 --optimizer muon";
    paceline(folder.path(), line).check(2, &["`optimizer` is muon", "does not go with tp 2"]);
}

/// The values of a tensor of a file.
fn tensor(file: Vec<(String, TensorData)>, name: &str) -> Vec<f32> {
    let found = file.into_iter().find(|(found, _)| found == name);
    found.expect("it is there").1.iter().collect()
}

#[test]
fn averages_mixtures_and_whole_steps_are_the_same_on_any_ranks_and_resumed() {
    let folder = tempdir().expect("a folder");
    let folder = folder.path();
    let job = "--model tiny --shards 4 --epochs 2 --global-batch 200 --drop-last --ema 0.9 --mixup 0.4 --label-smoothing 0.1";
    let hash = hash_of(
        folder,
        &format!("train --run-dir alone {job} --nproc-per-node 1"),
    );
    let dealt = format!("train --run-dir dealt {job} --nproc-per-node 2 --zero 1");
    assert_eq!(hash_of(folder, &dealt), hash);
    let run = format!("train --run-dir run {job} --nproc-per-node 2");
    assert_eq!(hash_of(folder, &run), hash);
    let last = checkpoints(&folder.join("run")).pop();
    fs::remove_dir_all(last.expect("a checkpoint")).expect("removed");
    let resumed = paceline(folder, "train --resume run --nproc-per-node 1");
    assert_eq!(resumed.is_well().hash(), hash);

    // Not the weights of the hash but their averages, which three runs have alike.
    let loss = |line: &str| json(folder, &format!("eval {line} --json"))["loss"].clone();
    let expected = loss("alone");
    for name in ["alone", "dealt", "run"] {
        let records = metrics(&folder.join(name));
        let end = records.last().expect("an end");
        assert_eq!(end["step"], 2 * (1437 / 200), "{name}");
        let epoch = records.iter().rfind(|record| record["kind"] == "epoch");
        let epoch = epoch.expect("an epoch");
        assert_eq!(epoch["held_out_loss"], expected, "{name}");
        assert_eq!(loss(name), expected, "{name}");
    }
    let plain = format!("train --run-dir plain {}", job.replace("--ema 0.9", ""));
    assert_eq!(hash_of(folder, &plain), hash);
    assert_ne!(loss("plain"), expected);

    assert_eq!(loss("run --average 1"), expected);
    let saved = checkpoints(&folder.join("plain"));
    let [one, two] = [0, 1].map(|at| {
        let read = read_safetensors(&saved[at].join("model.safetensors"));
        tensor(read.expect("whole"), "Conv.output.bias")
    });
    let mean = one.iter().zip(&two);
    let mean: Vec<f32> = mean
        .map(|(one, two)| ((f64::from(*one) + f64::from(*two)) / 2.0) as f32)
        .collect();
    paceline(folder, "export plain --average 2 --output mean.safetensors").is_well();
    let exported = read_safetensors(&folder.join("mean.safetensors"));
    assert_eq!(tensor(exported.expect("whole"), "output.bias"), mean);
    paceline(folder, "eval run --average 3").check(2, &["2 whole checkpoints, but 3"]);
    paceline(folder, "eval run --average 4").check(2, &["its newest 3 checkpoints, but 4"]);
    paceline(folder, "train --ema 0.9 --task lm --tp 2").check(2, &["does not go with tp 2"]);
}
