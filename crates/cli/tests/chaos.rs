//! `paceline chaos` on jobs of shells, which report nothing but their processes.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const LAUNCHER: &str = env!("CARGO_BIN_EXE_paceline-launcher");
/// No process takes so long to end.
const LIMIT: Duration = Duration::from_secs(30);

fn command(folder: &Path, options: &[&str], program: &str) -> Command {
    let mut command = Command::new(LAUNCHER);
    paceline_testing::outside_of_jobs(&mut command)
        .current_dir(folder)
        .args(["chaos", "--log-dir", "logs", "--json"])
        .args(options)
        .args(["--", "sh", "-c", program])
        .stdin(Stdio::null());
    command
}

/// How it ended, and what it says. Its notes are in the file `notes`, where the program can read them.
fn chaos(options: &[&str], program: &str) -> (Option<i32>, Value) {
    let folder = tempfile::tempdir().expect("a folder");
    let notes = folder.path().join("notes");
    let output: Output = command(folder.path(), options, program)
        .stderr(File::create(&notes).expect("a file"))
        .output()
        .expect("it runs");
    let json = serde_json::from_slice(&output.stdout);
    let notes = fs::read_to_string(notes);
    let json = json.unwrap_or_else(|error| panic!("{error}: {output:?} {notes:?}"));
    (output.status.code(), json)
}

/// A job of two ranks that run a script without single quotes.
fn job(options: &str, script: &str) -> String {
    format!(
        "{LAUNCHER} run --nproc-per-node 2 --log-dir /dev/null {options} --no-python sh -c '{script}'"
    )
}

fn column<'a>(json: &'a Value, name: &str) -> Vec<&'a str> {
    let dealt = json["dealt"].as_array().expect("a list").iter();
    dealt.map(|one| one[name].as_str().unwrap_or("-")).collect()
}

/// Ends some seconds after the job was started again.
const UNTIL_RESTARTED: &str =
    "while [ $TORCHELASTIC_RESTART_COUNT = 0 ]; do sleep 0.01; done; sleep 3; echo the result";

/// Ends some time after so many faults were dealt.
fn until_dealt(faults: usize) -> String {
    format!(
        r#"until [ "$(grep -c "(pid [0-9]" notes)" -ge {faults} ]; do sleep 0.1; done; sleep 2"#
    )
}

#[test]
fn a_job_that_is_started_again_survives_if_its_result_is_the_same() {
    let program = job("--max-restarts 1", UNTIL_RESTARTED);
    let run = |reference: &str| {
        let reference = format!("--reference=echo {reference}");
        let faults = [
            "--faults",
            "kill,abort",
            "--kills",
            "1",
            "--seed",
            "3",
            "--every-seconds",
            "0.1",
        ];
        let compare = [&*reference, "--compare", "the (.*)"];
        chaos(&[&faults[..], &compare].concat(), &program)
    };
    let (code, json) = run("the result");
    assert_eq!(code, Some(0), "{json}");
    assert_eq!(column(&json, "fate"), ["restarted"]);
    assert_eq!(json["missed"], Value::Array(Vec::new()));
    assert_eq!(json["left_behind"], Value::Array(Vec::new()));
    assert_eq!(json["compared"]["result"][0]["value"], "result");
    let (code, other) = run("the other");
    assert_eq!(code, Some(1), "{other}");
    assert_eq!(other["compared"]["same_bits"], false);
    let faults = [&json, &other].map(|json| column(json, "fault"));
    assert_eq!(faults[0], faults[1], "a seed has one plan");
}

#[test]
fn a_job_that_is_not_started_again_does_not_survive() {
    let options = ["--faults", "kill", "--kills", "3", "--every-seconds", "0.1"];
    let (code, json) = chaos(&options, &job("", "sleep 600"));
    assert_eq!(code, Some(1), "{json}");
    assert_eq!(json["survived"], false);
    assert_eq!(column(&json, "fate")[0], "failed");
    let ranks = json["dealt"].as_array().expect("a list").len();
    let missed = json["missed"].as_array().expect("a list").len();
    assert_eq!(ranks + missed, 3);
}

#[test]
fn a_rank_that_stood_still_is_let_go() {
    let options = [
        "--faults",
        "stop,slow",
        "--kills",
        "4",
        "--every-seconds",
        "0.1",
    ];
    let options = [&options[..], &["--hold-seconds", "0.1"]].concat();
    let (code, json) = chaos(&options, &job("", &until_dealt(4)));
    assert_eq!(code, Some(0), "{json}");
    assert_eq!(column(&json, "fate"), ["continued"; 4]);
}

#[test]
fn a_launcher_is_killed_only_if_there_are_others_or_the_job_is_resumed() {
    let options = [
        "--faults",
        "agent",
        "--kills",
        "1",
        "--every-seconds",
        "0.1",
    ];
    let (code, json) = chaos(&options, &job("", "sleep 1"));
    assert_eq!(code, Some(0), "{json}");
    assert!(column(&json, "fault").is_empty(), "{json}");
    // Killed, it is started again, if chaos may do that.
    let resumed = [
        &options[..],
        &[
            "--resume=echo the end",
            "--compare",
            "the (.*)",
            "--reference=echo the end",
        ],
    ]
    .concat();
    let (code, json) = chaos(&resumed, &job("", "sleep 600"));
    assert_eq!(
        (code, &json["resumed"]),
        (Some(0), &Value::from(1)),
        "{json}"
    );
    assert_eq!(column(&json, "fault"), ["agent"]);
    let own = job("", &until_dealt(1));
    let (code, json) = chaos(&options, &format!("{own} & {own}; wait"));
    // The shell's `wait` succeeds whatever its children do.
    assert_eq!(code, Some(0), "{json}");
    assert_eq!(column(&json, "fault"), ["agent"]);
    assert_eq!(json["left_behind"], Value::Array(Vec::new()));
}

#[test]
fn a_job_that_hangs_or_leaves_a_process_does_not_survive() {
    let hangs = [
        "--faults",
        "stop",
        "--hold-seconds",
        "0.02",
        "--hang-seconds",
        "0.5",
    ];
    let (code, json) = chaos(&hangs, "sleep 600");
    assert_eq!((code, &json["has_hung"]), (Some(1), &Value::Bool(true)));
    assert_eq!(json["saw_ranks"], false);
    let (code, json) = chaos(&[], "sleep 600 & exit 0");
    assert_eq!(code, Some(1), "{json}");
    let left = json["left_behind"][0].as_str().expect("a process");
    assert!(left.ends_with("(sleep)"), "{left}");
    let pid = left.split(' ').nth(1).expect("its number");
    assert!(!Path::new("/proc").join(pid).exists(), "it was ended");
}

#[test]
fn nothing_outlives_it_however_it_ends() {
    for (signal, code) in [(Signal::TERM, Some(143)), (Signal::KILL, None)] {
        let folder = tempfile::tempdir().expect("a folder");
        let script = job("", "echo $$ >> pids; setsid sleep 600");
        let mut started = command(folder.path(), &["--every-seconds", "600"], &script)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it runs");
        let pids = || fs::read_to_string(folder.path().join("pids")).unwrap_or_default();
        wait_until("both ranks run", || pids().lines().count() == 2);
        kill_process(Pid::from_child(&started), signal).expect("it runs");
        let status = started.wait().expect("a child");
        assert_eq!(status.code(), code);
        let lives = |pid: &str| Path::new("/proc").join(pid).exists();
        wait_until("the ranks are gone", || !pids().lines().any(lives));
    }
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < until, "not within {LIMIT:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_command_line_without_a_program_or_with_nothing_to_compare_is_wrong() {
    for (line, says) in [
        ("chaos --kills 3", "<PROGRAM>..."),
        ("chaos --kills 0 -- true", "--kills"),
        (
            "chaos --faults sing -- true",
            "kill, abort, exit, memory, stop, slow, cut, stall, agent",
        ),
        ("chaos --compare x -- true", "need --reference"),
        ("chaos --reference --compare ( -- true", "--compare"),
    ] {
        let mut command = Command::new(LAUNCHER);
        let output = paceline_testing::outside_of_jobs(&mut command)
            .args(line.split(' '))
            .output()
            .expect("it runs");
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{line}: {err}");
        assert!(err.contains(says), "{line}: {err}");
    }
}
