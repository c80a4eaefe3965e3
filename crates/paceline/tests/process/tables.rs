//! Tables as people have them: words, missing values, bad lines, numbers to predict; one hash on any ranks, and a trained model's use.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::{TempDir, tempdir};

use super::support::{checkpoints, metrics, paceline};

const JOB: &str = "--model tiny --global-batch 8 --shards 4 --lr 0.01";

/// Flats whose rent follows from their size and district, in a table with semicolons, two cells without a value and a broken line.
fn flats() -> TempDir {
    let mut text = "id;district;size;rent;kind\n".to_owned();
    for row in 0..120 {
        let (district, factor) = [("north", 9), ("old town", 14), ("port", 20)][row % 3];
        let size = 20 + row * 7 % 60;
        let rent = factor * size + 100;
        let kind = match row % 10 {
            0 => "shared",
            _ => "whole",
        };
        let (district, size) = match row {
            50 => (String::new(), size.to_string()),
            70 => (district.to_owned(), "NA".to_owned()),
            _ => (district.to_owned(), size.to_string()),
        };
        let _ = writeln!(text, "flat {row};{district};{size};{rent};{kind}");
    }
    text += "flat 120;port\n";
    let folder = tempdir().expect("a folder");
    fs::write(folder.path().join("flats.csv"), text).expect("a file");
    folder
}

/// The hash of a job that says which line it leaves out.
fn hash_of(folder: &Path, line: &str) -> String {
    let says = "1 bad line is left out: line 122: 2 cells, but the header names 5 columns";
    let ended = paceline(folder, line);
    ended.check(0, &[says]).hash().to_owned()
}

fn last_epoch(run: &Path) -> Value {
    let records = metrics(run).into_iter();
    let mut epochs = records.filter(|record| record["kind"] == "epoch");
    epochs.next_back().expect("an epoch")
}

#[test]
fn a_number_is_predicted_from_words_and_numbers_with_one_hash_on_any_ranks_and_after_a_resume() {
    let folder = flats();
    let table = "--data flats.csv --objective regression --label-column rent --drop-columns id,kind \
                 --missing-values fill --bad-samples skip --epochs 40";
    let run = |run: &str, ranks: usize| {
        let line = format!("train {table} {JOB} --run-dir {run} --nproc-per-node {ranks}");
        hash_of(folder.path(), &line)
    };
    let whole = run("one", 1);
    assert_eq!(run("two", 2), whole);
    let newest = checkpoints(&folder.path().join("one")).pop().expect("one");
    fs::remove_dir_all(newest).expect("removed");
    let line = "train --resume one --nproc-per-node 2";
    assert_eq!(hash_of(folder.path(), line), whole);

    let own = last_epoch(&folder.path().join("one"));
    let ended = paceline(folder.path(), "eval one --json");
    ended.check(0, &[]);
    let found: Value = serde_json::from_str(&ended.out).expect("an object");
    for (figure, of_run) in [
        ("loss", "held_out_loss"),
        ("mae", "mae"),
        ("rmse", "rmse"),
        ("r2", "r2"),
    ] {
        assert_eq!(found[figure], own[of_run], "{figure}");
    }
    assert!(found["r2"].as_f64() > Some(0.8), "{found}");
    assert_eq!(found.get("accuracy"), None);
    let ended = paceline(folder.path(), "eval one");
    assert!(ended.out.contains("   rmse "), "{}", ended.out);

    // Another format, another order, and a district that no row had.
    let new = "{\"size\": 40, \"district\": \"port\"}\n{\"district\": \"moon\"}\n";
    fs::write(folder.path().join("new.jsonl"), new).expect("a file");
    let ended = paceline(folder.path(), "predict one new.jsonl");
    ended.check(
        0,
        &["1 row with a word in column \"district\" that no training row has, such as \"moon\""],
    );
    let lines: Vec<&str> = ended.out.lines().collect();
    assert_eq!((lines[0], lines.len()), ("prediction", 3));
    let rent: f64 = lines[1].parse().expect("a number");
    assert!((600.0..1200.0).contains(&rent), "{rent}, expected 900");
}

#[test]
fn rare_classes_weigh_as_much_as_frequent_ones_on_any_ranks() {
    let folder = flats();
    let run = |run: &str, more: &str| {
        let table = "--data flats.csv --label-column kind --drop-columns id,rent --missing-values fill --bad-samples skip";
        let line = format!("train {table} {JOB} --epochs 1 --run-dir {run} {more}");
        hash_of(folder.path(), &line)
    };
    let weighted = run("one", "--class-weights balanced --nproc-per-node 1");
    assert_eq!(
        run("three", "--class-weights balanced --nproc-per-node 3"),
        weighted
    );
    assert_ne!(run("plain", "--nproc-per-node 1"), weighted);
    let steps = metrics(&folder.path().join("one")).into_iter();
    let samples = steps.filter_map(|record| record["samples"].as_f64());
    assert_eq!(
        samples.sum::<f64>(),
        96.0,
        "samples are counted, not their weights"
    );
}

#[test]
fn options_that_do_not_fit_the_table_are_refused_before_anything_is_created() {
    let folder = flats();
    for (more, says) in [
        ("--drop-columns ids", "did you mean \"id\"?"),
        ("--separator ,", "name it with --separator"),
        ("", "line 52: no value in column \"district\""),
        (
            "--objective regression",
            "\"shared\" in column \"kind\" is no finite",
        ),
    ] {
        let line = format!("train --data flats.csv --label-column kind --run-dir run {more}");
        paceline(folder.path(), &line).check(2, &["flats.csv", says]);
        assert!(!folder.path().join("run").exists());
    }
}
