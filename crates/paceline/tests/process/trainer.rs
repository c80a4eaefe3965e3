//! The trainer's example: a user's own task has what `paceline train` has.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::tempdir;

use super::support::{Ended, LIMIT, Running, command, example, hash_of, metrics, paceline};

#[test]
fn a_task_of_ones_own_has_one_hash_on_any_ranks_evaluates_resumes_and_refuses_built_in_settings() {
    let folder = tempdir().expect("a folder");
    let (folder, program) = (folder.path(), example("trainer"));
    let run = |line: &str| {
        let words = line.split_whitespace();
        Running::start(command(folder, &program, words)).ended(LIMIT)
    };
    let all = "--epochs 3 --shards 2 --evaluate-every 10 --run-dir";
    let one = run(&format!("{all} one --nproc-per-node 1"));
    let expected = one.is_well().hash();
    let evaluated = "   held-out loss 0.";
    assert_eq!(one.out.matches(evaluated).count(), 7, "{}", one.out);
    assert_eq!(one.out.matches("   mae 0.").count(), 7, "{}", one.out);

    let two = run(&format!("{all} two --nproc-per-node 2"));
    assert_eq!(two.is_well().hash(), expected);
    let launched = format!(
        "run --nproc-per-node 2 {} {all} launched",
        program.display()
    );
    assert_eq!(hash_of(folder, &launched), expected);

    // Evaluations have the same bits too, and a run goes on from an earlier checkpoint on another number of ranks.
    let evaluations = |name: &str| {
        let lines = fs::read_to_string(folder.join(name).join("metrics.jsonl")).expect("metrics");
        let lines = lines
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"));
        let figures = lines.filter_map(|line: serde_json::Value| {
            Some((line["held_out_loss"].as_f64()?, line["mae"].as_f64()?))
        });
        figures.collect::<Vec<_>>()
    };
    assert_eq!(evaluations("one"), evaluations("two"));
    fs::remove_dir_all(folder.join("two/checkpoints/step-0000000048"))
        .expect("the last checkpoint");
    let resumed = run("--resume two --nproc-per-node 1");
    assert!(
        resumed.out.contains("resumed   after step 32"),
        "{}",
        resumed.out
    );
    assert_eq!(resumed.is_well().hash(), expected);

    run("--explain").is_well();
    let refused = run("--task lm");
    assert_eq!(refused.code, Some(2), "{}", refused.err);
    let other = paceline(folder, "train --resume two");
    other.check(
        2,
        &["two is a run of `trainer`, which `paceline train` cannot resume"],
    );
    paceline(folder, "eval two").check(2, &["two is a run of `trainer`"]);
    paceline(folder, "report two").is_well();
}

#[test]
fn a_network_of_ones_own_has_the_data_and_the_losses_of_paceline_train() {
    let folder = tempdir().expect("a folder");
    let (folder, program) = (folder.path(), example("network"));
    let run = |line: &str| {
        let words = line.split_whitespace();
        Running::start(command(folder, &program, words)).ended(LIMIT)
    };
    let all = "--epochs 2 --shards 2 --mixup 0.2 --label-smoothing 0.1 --run-dir";
    let one = run(&format!("{all} one --nproc-per-node 1"));
    let two = run(&format!("{all} two --nproc-per-node 2"));
    assert_eq!(one.is_well().hash(), two.is_well().hash());
    assert!(
        one.out.contains("residual: 13,130 parameters"),
        "{}",
        one.out
    );
    assert!(one.out.contains("confused most often"), "{}", one.out);
    let plain = run("--epochs 2 --shards 2 --run-dir plain --nproc-per-node 1");
    assert_ne!(plain.is_well().hash(), one.hash());

    // A table of a line: the number is the double of the first column.
    let rows = (0..200).map(|row| {
        let a = row * 37 % 200;
        format!("{a},{},{}\n", row % 7, 2 * a)
    });
    let table = std::iter::once("a,b,label\n".to_owned()).chain(rows);
    fs::write(folder.join("line.csv"), table.collect::<String>()).expect("a table");
    let line = "--data line.csv --objective regression --epochs 30 --run-dir";
    let line = run(&format!("{line} line --nproc-per-node 1"));
    line.is_well();
    let last = metrics(&folder.join("line"))
        .iter()
        .rev()
        .find_map(|record| record["r2"].as_f64());
    assert!(last.is_some_and(|r2| r2 > 0.9), "{last:?}");

    a_trained_network_is_evaluated_and_applied(folder, &run);

    let resumed = run("--resume one --nproc-per-node 1 --mixup 0.3");
    let why = "cannot resume one with other settings";
    assert!(resumed.err.contains(why), "{}", resumed.err);
    let text = run("--task lm --data line.csv");
    let why = "the model of network is of labelled samples";
    assert!(text.err.contains(why), "{}", text.err);
    let large = run("--model resnet18");
    assert!(large.err.contains("for built-in models"), "{}", large.err);
}

/// The runs `plain` and `line` of a folder.
fn a_trained_network_is_evaluated_and_applied(folder: &Path, run: &impl Fn(&str) -> Ended) {
    let last = |run: &str, name: &str| {
        let records = metrics(&folder.join(run));
        records
            .iter()
            .rev()
            .find_map(|record| record[name].as_f64())
    };
    for (trained, figures) in [
        ("plain", &["loss", "accuracy"][..]),
        ("line", &["loss", "mae", "rmse", "r2"]),
    ] {
        let found = run(&format!("eval {trained} --json"));
        let found: Value = serde_json::from_str(&found.is_well().out).expect("JSON");
        for name in figures {
            let own = match *name {
                "loss" => last(trained, "held_out_loss"),
                name => last(trained, name),
            };
            assert!(own.is_some(), "{trained} has no {name}");
            assert_eq!(found[name].as_f64(), own, "{name} of {trained}");
        }
    }

    fs::write(folder.join("new.csv"), "b,a\n3,50\n1,150\n").expect("a table");
    let predicted = run("predict line new.csv");
    let lines: Vec<&str> = predicted.is_well().out.lines().collect();
    let number = |line: &str| line.parse::<f64>().expect("a number");
    assert_eq!((lines.len(), lines[0]), (3, "prediction"));
    assert!((number(lines[1]) - 100.0).abs() < 40.0, "{lines:?}");
    assert!((number(lines[2]) - 300.0).abs() < 40.0, "{lines:?}");

    let whose = "line is a run of `network`, whose model only that program knows";
    paceline(folder, "eval line").check(2, &[whose, "`network eval line` evaluates it"]);
}

#[test]
fn ranks_share_the_blocks_of_a_model_of_ones_own_with_the_bits_of_one_rank() {
    let folder = tempdir().expect("a folder");
    let folder = folder.path();
    let run = |name: &str, line: &str| {
        let line = format!("--epochs 2 --shards 2 --micro-batches 4 {line}");
        let command = command(folder, example(name), line.split_whitespace());
        Running::start(command).ended(LIMIT)
    };
    let one = run("blocks", "--run-dir one --nproc-per-node 1");
    let one = one.is_well().hash();
    for (name, line) in [
        ("even", "--nproc-per-node 2 --pp 2"),
        (
            "measured",
            "--nproc-per-node 4 --pp 2 --schedule zb-h1 --pp-cuts cost",
        ),
    ] {
        let ended = run("blocks", &format!("--run-dir {name} {line}"));
        assert_eq!(ended.is_well().hash(), one, "{line}");
        assert!(ended.out.contains("pipeline  "), "{}", ended.out);
    }
    // Evaluations too.
    let held_out = |name: &str| {
        let records = metrics(&folder.join(name));
        let losses = records.iter().map(|record| record["held_out_loss"].clone());
        losses.collect::<Vec<_>>()
    };
    assert_eq!(held_out("one"), held_out("even"));

    let many = run("blocks", "--run-dir many --nproc-per-node 8 --pp 8");
    assert!(many.err.contains("8 stages for 6 blocks"), "{}", many.err);
    let whole = run("trainer", "--run-dir whole --nproc-per-node 2 --pp 2");
    let why = "`pp` is 2, but this model does not let ranks share its blocks";
    assert!(whole.err.contains(why), "{}", whole.err);
    assert_eq!(whole.code, Some(2));
    let parts = run("blocks", "--run-dir parts --nproc-per-node 2 --tp 2");
    let why = "`tp` is 2, but this model does not let ranks share its matrices";
    assert!(parts.err.contains(why), "{}", parts.err);
}
