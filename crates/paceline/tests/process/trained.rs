//! A trained model is evaluated and used: the run's own figures, other files, and every file that does not fit.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::{TempDir, tempdir};

use super::support::{metrics, paceline, text_folder};

/// Two kinds of flowers that are easy to tell apart by their length.
fn flowers(rows: usize) -> String {
    let mut text = "width,length,kind\n".to_owned();
    for row in 0..rows {
        let (kind, length) = match row % 2 {
            0 => ("tulip", 40),
            _ => ("a \"wild\", small one", 10),
        };
        let kind = kind.replace('"', "\"\"");
        let _ = writeln!(text, "{},{},\"{kind}\"", row % 7, length + row % 5);
    }
    text
}

/// A folder with a run on flowers.
fn trained() -> TempDir {
    let folder = tempdir().expect("a folder");
    fs::write(folder.path().join("flowers.csv"), flowers(100)).expect("a file");
    let line = "train --data flowers.csv --label-column kind --run-dir run --model tiny --epochs 12 --lr 0.01 --global-batch 8 --shards 4";
    paceline(folder.path(), line).is_well();
    folder
}

/// The object that `line` prints.
fn json(folder: &Path, line: &str) -> Value {
    let ended = paceline(folder, line);
    ended.check(0, &[]);
    serde_json::from_str(&ended.out).expect("an object")
}

/// The last evaluation that the run itself has printed.
fn of_run(run: &Path) -> Value {
    let records = metrics(run).into_iter();
    let mut epochs = records.filter(|record| record["kind"] == "epoch");
    epochs.next_back().expect("an epoch")
}

#[test]
fn the_held_out_data_gives_the_figures_of_the_run_itself() {
    for (task, ranks) in [
        ("--task digits --model tiny", 2),
        ("--task digits --model tiny", 1),
    ] {
        let folder = tempdir().expect("a folder");
        let line =
            format!("train {task} --run-dir run --epochs 1 --shards 4 --nproc-per-node {ranks}");
        paceline(folder.path(), &line).is_well();
        let (found, own) = (
            json(folder.path(), "eval run --json"),
            of_run(&folder.path().join("run")),
        );
        assert_eq!(found["loss"], own["held_out_loss"]);
        assert_eq!(found["accuracy"], own["accuracy"]);
        let counts = found["confusion"].as_array().expect("pairs").iter();
        let counted: u64 = counts.filter_map(|pair| pair["count"].as_u64()).sum();
        assert_eq!((counted, found["predictions"].as_u64()), (360, Some(360)));
    }
    let folder = text_folder();
    let line = "train --task lm --data text.txt --layers 1 --heads 1 --width 16 --context 32 --shards 4 --global-batch 8 --epochs 1 --run-dir run";
    paceline(folder.path(), line).is_well();
    let (found, own) = (
        json(folder.path(), "eval run --json"),
        of_run(&folder.path().join("run")),
    );
    assert_eq!(found["loss"], own["held_out_loss"]);
    assert_eq!(found["accuracy"], own["accuracy"]);
    let perplexity = |of: &Value| of["perplexity"].as_f64().expect("a number");
    assert!(
        (perplexity(&found) / perplexity(&own) - 1.0).abs() < 1e-9,
        "{found}"
    );
    let other = json(folder.path(), "eval run --data text.txt --json");
    assert!(
        other["predictions"].as_u64() > found["predictions"].as_u64(),
        "{other}"
    );
}

#[test]
fn words_are_classes_and_new_rows_are_told_apart_by_them() {
    let folder = trained();
    let ended = paceline(folder.path(), "eval");
    ended.check(2, &["there is no run with a checkpoint below runs"]);
    let ended = paceline(folder.path(), "eval run");
    ended.check(0, &[]);
    for part in ["20 samples", "accuracy 100.00 %", "recall", "tulip"] {
        assert!(ended.out.contains(part), "{part}: {}", ended.out);
    }
    // The columns in another order, one more, and no label.
    fs::write(
        folder.path().join("new.csv"),
        "id,length,width\nx,41,3\ny,11,2\n",
    )
    .expect("a file");
    let ended = paceline(folder.path(), "predict run new.csv");
    ended.check(0, &[]);
    let lines: Vec<&str> = ended.out.lines().collect();
    assert_eq!(
        lines[0],
        "class,probability,\"p(a \"\"wild\"\", small one)\",p(tulip)"
    );
    assert!(lines[1].starts_with("tulip,0.9"), "{}", ended.out);
    assert!(
        lines[2].starts_with("\"a \"\"wild\"\", small one\",0.9"),
        "{}",
        ended.out
    );
    paceline(folder.path(), "predict run new.csv --output classes.csv").check(0, &[]);
    let written = fs::read_to_string(folder.path().join("classes.csv")).expect("a file");
    assert_eq!(written, ended.out);
    for format in ["safetensors", "torch", "onnx"] {
        let ended = paceline(folder.path(), &format!("export run --format {format}"));
        ended.check(0, &[]);
        assert!(ended.out.contains("10 tensors, "), "{}", ended.out);
    }
    let of_run = |name: &str| fs::read(folder.path().join("run").join(name)).expect("a file");
    let header = String::from_utf8_lossy(&of_run("model.safetensors")).into_owned();
    assert!(header.contains(r#""second.weight":{"dtype":"F32","shape":[16,16]"#));
    assert!(of_run("model.pt").starts_with(b"PK"));
    assert!(of_run("model.onnx").len() > of_run("model.safetensors").len());
    // All rows of the file that the run was trained on.
    let all = json(folder.path(), "eval run --data flowers.csv --json");
    assert_eq!(
        (all["predictions"].as_u64(), all["accuracy"].as_f64()),
        (Some(100), Some(1.0))
    );
}

#[test]
fn files_that_do_not_fit_the_model_are_refused_and_lose_nothing() {
    let folder = trained();
    let refused = |line: &str, says: &[&str]| {
        paceline(folder.path(), line).check(2, says);
    };
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).expect("a file");
    write("short.csv", "width\n1\n");
    refused(
        "predict run short.csv",
        &["short.csv: no column \"length\", which the model was trained on; the columns are width"],
    );
    write("bad.csv", "width,length\n1,2\n1,long\n");
    write("classes.csv", "precious\n");
    refused(
        "predict run bad.csv --output classes.csv",
        &["bad.csv: line 3: column \"length\" is \"long\""],
    );
    let kept = fs::read_to_string(folder.path().join("classes.csv")).expect("a file");
    assert_eq!(kept, "precious\n");
    refused("predict run none.csv", &["none.csv: no such file"]);
    refused(
        "export run --format transformers",
        &["is for language models"],
    );
    refused("export run --output none/model", &["none/model"]);
    write("other.csv", "width,length,kind\n1,2,rose\n");
    refused(
        "eval run --data other.csv",
        &["other.csv: line 2: \"rose\" in column \"kind\" is none of the model's classes"],
    );
    write("mixed.csv", "a,label\n1,0\n2,cat\n3,1\n");
    refused(
        "train --data mixed.csv",
        &[
            "line 3: \"cat\" in column \"label\" is no class",
            "use only numbers or only words",
        ],
    );
    refused("predict nowhere new.csv", &["nowhere holds no run"]);
    fs::write(folder.path().join("flowers.csv"), flowers(60)).expect("a file");
    refused(
        "eval run",
        &[
            "flowers has other columns, classes or scaling than when the run was trained on it",
            "--data",
        ],
    );
}

#[test]
fn a_language_model_predicts_no_classes_and_images_are_read_from_an_idx_file() {
    let folder = text_folder();
    let line = "train --task lm --data text.txt --layers 1 --heads 1 --width 16 --context 32 --global-batch 8 --epochs 1 --run-dir lm";
    paceline(folder.path(), line).is_well();
    paceline(folder.path(), "predict lm text.txt")
        .check(2, &["lm holds no model of samples", "paceline generate"]);
    let line = "train --model tiny --epochs 1 --run-dir digits";
    paceline(folder.path(), line).is_well();
    paceline(folder.path(), "generate digits x")
        .check(2, &["digits holds no language model", "paceline predict"]);
    let image = |side: u32| {
        let header = [0x803, 2, side, side]
            .into_iter()
            .flat_map(u32::to_be_bytes);
        let pixels = (0..2 * side * side).map(|pixel| (pixel % 17) as u8);
        header.chain(pixels).collect::<Vec<u8>>()
    };
    fs::write(folder.path().join("images"), image(8)).expect("a file");
    let ended = paceline(folder.path(), "predict digits images");
    ended.check(0, &[]);
    assert_eq!(ended.out.lines().count(), 3, "{}", ended.out);
    fs::write(folder.path().join("images"), image(9)).expect("a file");
    let says = [
        "samples are grey images of 9 x 9 pixels",
        "trained on grey images of 8 x 8 pixels",
    ];
    paceline(folder.path(), "predict digits images").check(2, &says);
}

#[test]
fn a_page_tells_of_a_run_and_of_several() {
    let folder = trained();
    let ended = paceline(folder.path(), "report run");
    ended.check(0, &[]);
    assert_eq!(ended.out, "run/report.html\n");
    let page = |name: &str| fs::read_to_string(folder.path().join(name)).expect("a page");
    let html = page("run/report.html");
    for part in [
        "<h1>run</h1>",
        "<td>ended</td>",
        "<td>100.00 %</td>",
        "flag --lr",
        "<svg ",
    ] {
        assert!(html.contains(part), "{part}: {html}");
    }
    let line = "report run run --lang ko --output both.html";
    paceline(folder.path(), line).check(0, &[]);
    assert!(page("both.html").contains("비트까지 같은 가중치"));
    paceline(folder.path(), "report nowhere").check(2, &["nowhere holds no run"]);
}
