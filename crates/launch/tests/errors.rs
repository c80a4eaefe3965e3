//! The one cause of a failed job, in the rank's own words and as a file.

mod support;

use std::process::Command;

use paceline_words::Lang;
use serde_json::Value;
use support::launcher::{Launcher, PROMPTLY};
use support::{PROBE, job, log, run, turn};

/// As torch's `@record` leaves it.
const OF_TORCH: &str = r#"{"message": {"message": "ValueError: no data", "extraInfo": {"py_callstack": "Traceback (most recent call last):\n  File \"a.py\", line 1\nValueError: no data\n", "timestamp": "1700000000"}}}"#;

fn json(file: &std::path::Path) -> Value {
    let text = std::fs::read(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    serde_json::from_slice(&text).expect("JSON")
}

#[test]
fn what_a_rank_writes_into_its_error_file_is_the_cause() {
    let logs = tempfile::tempdir().unwrap();
    let script = format!(
        "[ $RANK = 1 ] || exec sleep 60; echo noise >&2; cat > $TORCHELASTIC_ERROR_FILE <<'END'\n{OF_TORCH}\nEND\nexit 3"
    );
    let mut job = job(&script, 3);
    job.log_dir = Some(logs.path().into());
    job.run_id = "my-job".to_owned();
    let outcome = run(job);
    let failure = outcome.failure.as_ref().expect("the job failed");
    let error = failure.error.as_ref().expect("its own words");
    assert_eq!(error.message, "ValueError: no data");
    assert_eq!(error.traceback.len(), 3);
    assert!(
        failure
            .to_string()
            .contains("\n  its error: ValueError: no data\n"),
        "{failure}"
    );

    let told = json(&logs.path().join("error.json"));
    assert_eq!(told["message"]["message"], "ValueError: no data");
    assert_eq!(told["message"]["errorCode"], 3);
    let expect = [
        ("rank", Value::from(1)),
        ("local_rank", 1.into()),
        ("pid", failure.pid.into()),
        ("kind", "exit_code".into()),
        ("exit_code", 3.into()),
        ("signal", Value::Null),
        ("error", "ValueError: no data".into()),
        ("last_lines", serde_json::json!(["noise"])),
        ("victims", serde_json::json!([0, 2])),
        ("hint", failure.hint(Lang::En).into()),
        ("run_id", "my-job".into()),
        ("attempt", 0.into()),
        ("job_exit_code", 3.into()),
    ];
    for (key, value) in expect {
        assert_eq!(told[key], value, "{key} in {told:#}");
    }
    assert!(
        told["time"]
            .as_str()
            .is_some_and(|time| time.starts_with("20") && time.ends_with('Z'))
    );
}

#[test]
fn a_job_that_does_well_leaves_no_error_not_even_an_old_one() {
    let logs = tempfile::tempdir().unwrap();
    for (script, is_told) in [("exit $RANK", true), ("true", false)] {
        let mut job = job(script, 2);
        job.log_dir = Some(logs.path().into());
        run(job);
        assert_eq!(logs.path().join("error.json").exists(), is_told, "{script}");
    }
}

#[test]
fn an_old_error_of_a_rank_is_not_taken_for_a_new_one() {
    let logs = tempfile::tempdir().unwrap();
    let folder = log(logs.path(), 0).with_file_name("");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("error.json"), OF_TORCH).unwrap();
    let mut job = job("exit 1", 1);
    job.log_dir = Some(logs.path().into());
    assert_eq!(run(job).failure.expect("the job failed").error, None);
}

#[test]
fn nonsense_in_an_error_file_is_no_cause_and_no_accident() {
    let logs = tempfile::tempdir().unwrap();
    for nonsense in [
        "head -c 3000000 /dev/zero > $TORCHELASTIC_ERROR_FILE",
        "echo '{\"message\": [' > $TORCHELASTIC_ERROR_FILE",
        "mkfifo $TORCHELASTIC_ERROR_FILE",
        "ln -s /dev/zero $TORCHELASTIC_ERROR_FILE",
    ] {
        let mut job = job(&format!("{nonsense}; echo last words >&2; exit 5"), 1);
        job.log_dir = Some(logs.path().into());
        let outcome = run(job);
        let failure = outcome.failure.as_ref().expect("the job failed");
        assert_eq!(
            (&failure.error, outcome.exit_code()),
            (&None, 5),
            "{nonsense}"
        );
        assert_eq!(failure.last_lines, ["last words"]);
    }
}

#[test]
fn a_panic_or_a_traceback_is_the_cause_whatever_is_printed_after_it() {
    for (words, message) in [
        (
            r"thread '\''main'\'' (7) panicked at src/main.rs:7:5:\nno more samples\n",
            "no more samples",
        ),
        (
            r#"Traceback (most recent call last):\n  File "a.py", line 1\nKeyError: 5\n"#,
            "KeyError: 5",
        ),
    ] {
        let script = format!(
            "printf '{words}' >&2; i=0; while [ $i -lt 50 ]; do echo warning $i >&2; i=$((i+1)); done; exit 101"
        );
        let outcome = run(job(&script, 1));
        let failure = outcome.failure.expect("the job failed");
        assert_eq!(
            failure.error.as_ref().map(|error| &*error.message),
            Some(message),
            "{failure}"
        );
        assert!(
            failure
                .to_string()
                .contains(&format!("its error: {message}")),
            "{failure}"
        );
        assert_eq!(
            failure.last_lines.last().map(String::as_str),
            Some("warning 49")
        );
    }
}

#[test]
fn the_launchers_own_error_file_is_written_and_its_ranks_have_others() {
    // A job in this process would take the launcher for its own child.
    let _turn = turn();
    let folder = tempfile::tempdir().unwrap();
    let own = folder.path().join("own.json");
    let logs = folder.path().join("logs");
    let mut command = Command::new("env");
    command
        .arg(format!("TORCHELASTIC_ERROR_FILE={}", own.display()))
        .args([PROBE, "launch", "--log-dir"])
        .arg(&logs);
    let script = "echo $TORCHELASTIC_ERROR_FILE; kill -9 $$";
    let mut launcher = Launcher::start_command(command, &[], script);
    let (_, out, err) = launcher.end(PROMPTLY);
    assert_eq!(
        out,
        format!("[rank 0] {}/attempt_0/0/error.json\n", logs.display()),
        "{err}"
    );
    let told = json(&own);
    assert_eq!(told, json(&logs.join("error.json")));
    assert_eq!(
        (&told["signal"], &told["signal_name"]),
        (&9.into(), &"SIGKILL".into())
    );
    assert_eq!(told["message"]["errorCode"], 137);
    assert_eq!(told["message"]["message"], told["cause"]);
}
