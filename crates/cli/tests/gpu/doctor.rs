//! `paceline gpu doctor` on every machine of the fixtures.

use std::fs;

use paceline_fake_nvml::{Fixture, names};

use super::support::{expect, expected, gpu, gpu_with};

#[test]
fn every_machine_is_judged_as_expected() {
    let judged = |(name, _): (String, String)| {
        let end = gpu(&Fixture::open(&name), &["doctor"]);
        (format!("doctor/{name}.txt"), end.transcript())
    };
    expect(names().into_iter().map(judged));
    let machines: Vec<String> = names().into_iter().map(|(name, _)| name).collect();
    assert_eq!(expected("doctor"), machines);
}

#[test]
fn a_snapshot_of_another_machine_has_the_same_findings() {
    let folder = tempfile::tempdir().expect("a folder");
    let elsewhere = Fixture::open("no-gpu");
    for (name, _) in names() {
        let machine = Fixture::open(&name);
        let file = folder.path().join(format!("{name}.json"));
        let file = file.to_str().expect("text");
        let there = gpu(&machine, &["doctor", "--save-snapshot", file]);
        let here = gpu(&elsewhere, &["doctor", "--snapshot", file]);
        assert_eq!(here.out, there.out, "{name}");
        assert_eq!(here.code, there.code, "{name}");
    }
}

#[test]
fn json_has_what_the_text_has() {
    let machine = Fixture::open("two-cards-ns");
    let end = gpu(&machine, &["doctor", "--json"]);
    assert_eq!(end.out.lines().count(), 1);
    let json: serde_json::Value = serde_json::from_str(&end.out).expect("JSON");
    assert_eq!(json["paceline_gpu_doctor"], 1);
    let text = gpu(&machine, &["doctor"]).out;
    let findings = json["findings"].as_array().expect("a list");
    assert!(!findings.is_empty());
    for field in ["what", "why", "fix"] {
        for finding in findings {
            let said = finding[field].as_str().expect("text");
            assert!(text.contains(said), "{said}");
        }
    }
}

#[test]
fn the_report_is_korean_where_that_is_asked_for() {
    let machine = Fixture::open("two-cards-ns");
    let korean = gpu(&machine, &["doctor", "--lang", "ko"]).out;
    let expect = "경고: P2P가 NS(GPU 0, 1): ";
    assert!(korean.starts_with(expect), "{korean}");
    assert!(korean.contains("  P2P 직접 통신 "), "{korean}");
    let by_locale = gpu_with(&machine, &["doctor"], &[("LC_ALL", "ko_KR.UTF-8")]);
    assert_eq!(by_locale.out, korean);
    let findings = |words: &[&str]| {
        let json = gpu(&machine, words).out;
        let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        json["findings"].clone()
    };
    let for_machines = findings(&["doctor", "--lang", "ko", "--json"]);
    assert_eq!(for_machines, findings(&["doctor", "--json"]));
    let unknown = gpu(&Fixture::open("no-gpu"), &["doctor", "--lang", "fr"]);
    assert_eq!(unknown.code, Some(2));
}

#[test]
fn the_exit_code_is_by_severity() {
    let code = |name: &str, words: &[&str]| {
        let words: Vec<&str> = ["doctor"].iter().chain(words).copied().collect();
        gpu(&Fixture::open(name), &words).code
    };
    assert_eq!(code("no-driver", &[]), Some(1));
    assert_eq!(code("no-gpu", &[]), Some(0));
    assert_eq!(code("no-gpu", &["--fail-on", "note"]), Some(1));
    assert_eq!(code("two-cards-ns", &[]), Some(0));
    assert_eq!(code("two-cards-ns", &["--fail-on", "warning"]), Some(1));
    assert_eq!(code("two-cards-ns", &["--fail-on", "none"]), Some(2));
}

#[test]
fn a_snapshot_keeps_to_itself_what_help_does_not_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("a.json");
    let machine = Fixture::open("orphans");
    let variables = [("SECRET_TOKEN", "hush"), ("CUDA_VISIBLE_DEVICES", "0")];
    let words = ["doctor", "--save-snapshot", file.to_str().expect("text")];
    gpu_with(&machine, &words, &variables);
    let saved = fs::read_to_string(&file).expect("saved");
    assert!(saved.contains("CUDA_VISIBLE_DEVICES"));
    assert!(!saved.contains("SECRET_TOKEN") && !saved.contains("hush"));
}

#[test]
fn a_place_that_cannot_be_written_is_named() {
    let end = gpu(
        &Fixture::open("no-gpu"),
        &["doctor", "--save-snapshot", "/nowhere/a.json"],
    );
    assert_eq!((end.code, &*end.out), (Some(3), ""));
    assert!(
        end.err
            .starts_with("error: cannot save the snapshot as /nowhere/a.json: "),
        "{}",
        end.err
    );
}
