//! `paceline plan`: figures of this machine, layouts from arithmetic, and layouts that are run to check it.

use serde_json::Value;
use tempfile::tempdir;

use super::support::paceline;

const SMALL: &str = "--task lm --layers 3 --heads 2 --width 32 --context 32 --global-batch 16";

fn told(line: &str) -> Value {
    let folder = tempdir().expect("a folder");
    let ended = paceline(folder.path(), line);
    let found = serde_json::from_str(&ended.is_well().out).expect("JSON");
    let left: Vec<_> = std::fs::read_dir(folder.path())
        .expect("a folder")
        .collect();
    assert!(left.is_empty(), "a plan leaves nothing behind: {left:?}");
    found
}

#[test]
fn a_language_model_has_every_layout_and_a_small_memory_decides() {
    let line = format!("plan {SMALL} --nproc-per-node 2 --json");
    let plan = told(&line);
    let rows = plan["rows"].as_array().expect("rows");
    let has = |key: &str, least: u64| {
        rows.iter()
            .any(|row| row["parts"][key].as_u64() >= Some(least))
    };
    assert!(has("dp", 2) && has("pp", 2) && has("tp", 2) && has("zero", 3));
    for row in rows {
        let peak = row["memory"]["peak"].as_f64().expect("bytes");
        assert!(
            peak > 4.0 * row["memory"]["weights"].as_f64().expect("bytes"),
            "{row}"
        );
        assert!(row["seconds"]["step"].as_f64() > Some(0.0), "{row}");
    }
    assert!(plan["choice"].is_u64(), "{plan}");
    let check = |more: &str, expect: &str| {
        let plan = told(&format!("{line} {more}"));
        assert!(plan["choice"].is_null());
        let reason = plan["reasons"][0].as_str().expect("a sentence");
        assert!(reason.starts_with(expect), "{reason}");
    };
    check(
        "--nodes 4 --memory-gb 0.001",
        "Nothing fits into 1.00 MB for each rank",
    );
    check("--nodes 1000", "No layout is possible");
}

#[test]
fn layouts_run_with_the_commands_beside_them() {
    let folder = tempdir().expect("a folder");
    let text = folder.path().join("text");
    std::fs::write(&text, "To be, or not to be. ".repeat(200)).expect("a file");
    let data = text.display();
    let plan = told(&format!(
        "plan {SMALL} --data {data} --nproc-per-node 2 --json"
    ));
    let rows = plan["rows"].as_array().expect("rows");
    for name in ["dp 2, zero 1", "pp 2 1f1b", "pp 2 interleaved", "tp 2"] {
        let row = rows.iter().find(|row| row["layout"] == name);
        let command = row.and_then(|row| row["command"].as_str());
        let command = command.unwrap_or_else(|| panic!("{name} has no command: {rows:?}"));
        let line = command.strip_prefix("paceline ").expect("the program");
        let ended = paceline(folder.path(), &format!("{line} --epochs 1"));
        assert!(ended.is_well().out.contains("weights sha256"), "{command}");
    }
}

#[test]
fn layouts_that_were_run_are_compared_with_their_predictions() {
    let checked = told(&format!("plan {SMALL} --check 1,2 --json"));
    let rows = checked["rows"].as_array().expect("rows");
    let names: Vec<_> = rows
        .iter()
        .map(|row| row["layout"].as_str().unwrap_or_default())
        .collect();
    assert_eq!(names[..2], ["single", "single, recompute"]);
    for name in [
        "dp 2, zero 2",
        "dp 2, zero 3, recompute",
        "pp 2 1f1b",
        "tp 2",
    ] {
        assert!(names.contains(&name), "{names:?}");
    }
    for row in rows {
        for figure in ["seconds", "bytes", "predicted_seconds", "predicted_bytes"] {
            assert!(row[figure].as_f64() > Some(0.0), "{figure}: {row}");
        }
        let [predicted, sent] =
            ["predicted_sent", "sent"].map(|name| row[name].as_f64().expect("bytes"));
        assert!((predicted - sent).abs() <= 0.1 * sent, "{row}");
    }
}

#[test]
fn a_network_without_layers_and_settings_that_cannot_be_used() {
    let folder = tempdir().expect("a folder");
    let line = "plan --model tiny --nproc-per-node 2 --memory-gb 4";
    let ended = paceline(folder.path(), line);
    let text = &ended.is_well().out;
    assert!(
        text.contains("dp 2, zero 1") && !text.contains("pp 2"),
        "{text}"
    );
    let line = "plan --global-batch 1 --shards 2";
    paceline(folder.path(), line).check(2, &["every shard needs a sample"]);
    let line = "plan --comm-hook topk";
    paceline(folder.path(), line).check(2, &["whose bytes a plan does not count"]);
    let line = "plan --device cuda --nproc-per-node 2 --memory-gb 4";
    paceline(folder.path(), line).check(2, &["which a plan measures on the CPU only"]);
}
