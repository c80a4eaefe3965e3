//! `paceline run` with a usage tracker, and `paceline gpu usage` on recordings.

use std::path::Path;
use std::process::{Command, Output};

use paceline_fake_nvml::Fixture;

use super::support::LAUNCHER;

/// A published two-GPU run as the tracker would have recorded it.
const RECORDING: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../usage/src/tests/expected/two-gpus.csv"
);

fn launcher(fixture: &Fixture, folder: &Path, words: &[&str]) -> Output {
    Command::new(LAUNCHER)
        .args(words)
        .current_dir(folder)
        .env_clear()
        .envs(fixture.variables())
        .env("PATH", "/usr/bin:/bin")
        .env("HOME", folder)
        .output()
        .expect("the launcher runs")
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_job_of_any_program_is_summed_up_on_stderr_and_in_files() {
    let (fixture, folder) = (Fixture::open("two-cards-ns"), tempfile::tempdir().unwrap());
    let words = "run --nproc-per-node 2 --usage on --usage-json u.json --usage-csv u.csv --usage-svg u.svg --lang ko \
                 sh -c";
    let mut words: Vec<&str> = words.split_whitespace().collect();
    words.push("echo out; sleep 0.5");
    let end = launcher(&fixture, folder.path(), &words);
    assert_eq!(end.status.code(), Some(0), "{}", err(&end));
    assert!(
        err(&end).contains("⏱️ 실행 시간 요약\n• 전체 실행 시간 : 0시간 0분 "),
        "{}",
        err(&end)
    );
    assert!(
        err(&end).contains("• GPU 2대 동시 사용 시간 : "),
        "{}",
        err(&end)
    );
    assert!(
        err(&end).contains("GPU 0: 2340/97887MB (2.39%)"),
        "{}",
        err(&end)
    );
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).expect(name);
    let report: serde_json::Value = serde_json::from_str(&read("u.json")).expect("JSON");
    assert_eq!(report["gpus_at_once"]["counted"], serde_json::json!([0, 1]));
    assert_eq!(report["ranks"].as_array().map(Vec::len), Some(2));
    assert!(read("u.svg").starts_with("<svg "));
    // What was recorded comes to the same again.
    let again = launcher(
        &fixture,
        folder.path(),
        &["gpu", "usage", "u.csv", "--json"],
    );
    let again: serde_json::Value = serde_json::from_slice(&again.stdout).expect("JSON");
    assert_eq!(again["samples"], report["samples"]);
    assert_eq!(
        again["gpus"][0]["memory_peak_bytes"],
        report["gpus"][0]["memory_peak_bytes"]
    );
}

#[test]
fn a_short_job_is_not_summed_up_unasked_and_one_that_fails_says_why_last() {
    let (fixture, folder) = (Fixture::open("two-cards-ns"), tempfile::tempdir().unwrap());
    let end = launcher(&fixture, folder.path(), &["run", "true"]);
    assert_eq!((end.status.code(), err(&end)), (Some(0), String::new()));
    let end = launcher(
        &fixture,
        folder.path(),
        &["run", "--usage", "on", "sh", "-c", "exit 7"],
    );
    assert_eq!(end.status.code(), Some(7));
    let text = err(&end);
    let (summary, failure) = (text.find("Run time summary"), text.find("error: rank 0"));
    assert!(summary.is_some() && summary < failure, "{text}");
}

#[test]
fn devices_that_the_job_cannot_see_are_left_out() {
    let (fixture, folder) = (Fixture::open("two-cards-ns"), tempfile::tempdir().unwrap());
    let words = ["run", "--usage-csv", "u.csv", "env", "sleep", "0.3"];
    let output = Command::new(LAUNCHER)
        .args(words)
        .current_dir(folder.path())
        .envs(fixture.variables())
        .env("CUDA_VISIBLE_DEVICES", "1")
        .env("HOME", folder.path())
        .output()
        .expect("the launcher runs");
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    let samples = std::fs::read_to_string(folder.path().join("u.csv")).expect("samples");
    assert!(
        samples.contains(",gpu,1,") && !samples.contains(",gpu,0,"),
        "{samples}"
    );
}

#[test]
fn a_file_that_could_not_be_written_is_refused_before_the_job_begins() {
    let (fixture, folder) = (Fixture::open("no-gpu"), tempfile::tempdir().unwrap());
    let words = ["run", "--usage-json", "nowhere/u.json", "touch", "started"];
    let end = launcher(&fixture, folder.path(), &words);
    assert_eq!(end.status.code(), Some(2));
    assert!(
        err(&end).contains("nowhere/u.json cannot be written"),
        "{}",
        err(&end)
    );
    assert!(!folder.path().join("started").exists());
}

#[test]
fn the_published_case_is_told_as_it_was_published() {
    let (fixture, folder) = (Fixture::open("no-gpu"), tempfile::tempdir().unwrap());
    let shown = |lang: &str| {
        let words = ["gpu", "usage", RECORDING, "--lang", lang];
        let end = launcher(&fixture, folder.path(), &words);
        assert_eq!(end.status.code(), Some(0), "{}", err(&end));
        String::from_utf8(end.stdout).expect("text")
    };
    let korean = "⏱️ 실행 시간 요약\n\
                  • 전체 실행 시간 : 0시간 32분 12초\n\
                  • GPU 2대 동시 사용 시간 : 0시간 14분 55초\n\
                  • 동시 사용 비율 : 46.32%\n";
    assert!(shown("ko").starts_with(korean), "{}", shown("ko"));
    assert!(shown("en").contains("46.32%"), "{}", shown("en"));
}

#[test]
fn what_is_no_recording_is_refused_with_the_line() {
    let (fixture, folder) = (Fixture::open("no-gpu"), tempfile::tempdir().unwrap());
    std::fs::write(folder.path().join("odd.csv"), "hello\n").expect("written");
    for (file, why) in [
        ("none.csv", "none.csv: the recording cannot be read"),
        ("odd.csv", "line 1"),
    ] {
        let end = launcher(&fixture, folder.path(), &["gpu", "usage", file]);
        assert_eq!(end.status.code(), Some(2), "{file}");
        assert!(err(&end).contains(why), "{}", err(&end));
    }
}
