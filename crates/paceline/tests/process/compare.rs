//! `paceline compare` of the strategies that `paceline train` has.

use serde_json::Value;
use tempfile::tempdir;

use super::support::paceline;

#[test]
fn strategies_are_compared_by_their_own_records_and_end_with_the_same_weights() {
    let folder = tempdir().expect("a folder");
    let line = "compare --strategy single,dp,ddp,model --rounds 1 --json --model tiny --epochs 2";
    let ended = paceline(folder.path(), line);
    let told: Value = serde_json::from_str(&ended.is_well().out).expect("JSON");
    let rows = told["rows"].as_array().expect("rows");
    let names: Vec<_> = rows.iter().map(|row| &row["name"]).collect();
    assert_eq!(
        names,
        [
            "single",
            "dp on 2 devices",
            "ddp on 2 ranks",
            "model on 2 devices"
        ]
    );
    for row in rows {
        assert_eq!(row["busy"], "computing", "{row}");
        assert!(row["samples_per_second"].as_f64() > Some(0.0), "{row}");
        assert_eq!(row["weights_sha256"], rows[0]["weights_sha256"], "{row}");
    }
    let verdict = told["verdict"].as_array().expect("sentences");
    let same = verdict.last().and_then(Value::as_str).expect("a sentence");
    assert!(
        same.starts_with("All runs ended with the same weights"),
        "{same}"
    );
}

#[test]
fn a_setting_that_cannot_be_used_ends_the_comparison_with_its_reason() {
    let folder = tempdir().expect("a folder");
    let line = "compare --strategy ddp --epochs none";
    let reason = "invalid value `none` for `epochs`";
    paceline(folder.path(), line).check(2, &[reason]);
}
