//! Errors as files: what a failed rank wrote for torch's `@record` convention, and what became of the whole job.

use std::fs::{self, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use paceline_rendezvous::net::nodename;
use paceline_words::Lang;
use serde_json::{Value, json};

use crate::job::Job;
use crate::report::{Failure, FailureKind, Lost, Outcome, RankError};
use crate::time;

/// The variable by which torchrun tells a process where its error belongs.
const VARIABLE: &str = "TORCHELASTIC_ERROR_FILE";
/// A longer file is not read: a traceback with its message is a few kilobytes.
const FILE_BYTES_MAX: u64 = 1024 * 1024;
/// Longer messages are cut.
const MESSAGE_CHARS_MAX: usize = 4000;
/// Lines of a traceback that are kept, the newest.
const TRACEBACK_LINES_MAX: usize = 60;
/// Longer lines are cut.
const LINE_CHARS_MAX: usize = 500;

/// The error that a rank left in its file. Whatever else the file is, it is no error.
pub(crate) fn read(path: &Path) -> Option<RankError> {
    // A rank may have put a pipe there: opening it must not wait.
    let mut options = OpenOptions::new();
    options
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW);
    let file = options.open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).ok()?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return None;
    }
    parse(&bytes)
}

/// `{"message": {"message": "Type: text", "extraInfo": {"py_callstack": "..."}}}`, or `{"message": "text"}`.
fn parse(bytes: &[u8]) -> Option<RankError> {
    let value: Value = serde_json::from_slice(bytes).ok()?;
    let message = value.get("message")?;
    let text = match message {
        Value::String(text) => text,
        other => other.get("message")?.as_str()?,
    };
    let text = plain(text, MESSAGE_CHARS_MAX);
    let text = text.trim();
    if text.is_empty() {
        return None;
    }
    let callstack = message
        .pointer("/extraInfo/py_callstack")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let mut traceback: Vec<_> = callstack
        .lines()
        .rev()
        .filter(|line| !line.trim().is_empty())
        .take(TRACEBACK_LINES_MAX)
        .map(|line| plain(line, LINE_CHARS_MAX))
        .collect();
    traceback.reverse();
    Some(RankError {
        message: text.to_owned(),
        traceback,
    })
}

/// Text that a terminal can be given.
fn plain(text: &str, chars_max: usize) -> String {
    let is_kept = |c: &char| !c.is_control() || matches!(c, '\n' | '\t');
    text.chars().filter(is_kept).take(chars_max).collect()
}

/// Where the file about a job is, in its log folder.
pub(crate) fn of_job(log_dir: &Path) -> PathBuf {
    log_dir.join("error.json")
}

/// Removes what an earlier job in the same folder left.
pub(crate) fn forget(log_dir: &Path) {
    // If it cannot be removed, it cannot be written either, and then that is told.
    let _ = fs::remove_file(of_job(log_dir));
}

/// Writes what became of a failed job into its log folder, and to where the launcher's own environment says. Returns
/// what went wrong with that, for people.
pub(crate) fn write(job: &Job, attempt: u32, outcome: &Outcome) -> Vec<String> {
    let mut report = match (&outcome.failure, &outcome.lost) {
        (Some(failure), _) => of_failure(failure, outcome),
        (None, Some(lost)) => of_loss(job, lost, outcome),
        (None, None) => return Vec::new(),
    };
    report["run_id"] = json!(job.run_id);
    report["attempt"] = json!(attempt);
    report["job_exit_code"] = json!(outcome.exit_code());
    let text = format!("{report:#}\n");
    let asked = std::env::var_os(VARIABLE).filter(|path| !path.is_empty());
    let paths = [job.log_dir.as_deref().map(of_job), asked.map(PathBuf::from)];
    let write = |path: PathBuf| {
        let error = overwrite(&path, &text).err()?;
        Some(format!("`{}` cannot be written: {error}", path.display()))
    };
    paths.into_iter().flatten().filter_map(write).collect()
}

/// In place, not beside and renamed: an orchestrator may have mounted this very file. Opening must not wait for the
/// other end of a pipe.
fn overwrite(path: &Path, text: &str) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(libc::O_NONBLOCK);
    io::Write::write_all(&mut options.open(path)?, text.as_bytes())
}

fn of_failure(failure: &Failure, outcome: &Outcome) -> Value {
    let age = outcome.round_elapsed.saturating_sub(failure.after);
    let at = SystemTime::now().checked_sub(age);
    let at = at.unwrap_or(SystemTime::UNIX_EPOCH);
    let (kind, exit_code, signal) = match &failure.kind {
        FailureKind::ExitCode(code) => ("exit_code", Some(*code), None),
        FailureKind::Signal { number, name, .. } => ("signal", None, Some((number, name))),
        FailureKind::LeftEarly => ("left_early", Some(0), None),
        FailureKind::Stalled { .. } => ("stalled", None, None),
    };
    let headline = failure.headline(Lang::En);
    let error = failure.error.as_ref();
    let message = error.map_or(&headline, |error| &error.message);
    let traceback = error.map_or(&[][..], |error| &error.traceback);
    json!({
        "message": torch_message(message, traceback, at, outcome),
        "rank": failure.rank,
        "local_rank": failure.local_rank,
        "host": (failure.node.as_ref()).map_or_else(nodename, |node| node.host.clone()),
        "pid": failure.pid,
        "kind": kind,
        "exit_code": exit_code,
        "signal": signal.map(|(number, _)| number),
        "signal_name": signal.map(|(_, name)| name),
        "time": time::utc(at),
        "after_seconds": failure.after.as_secs_f64(),
        "cause": headline,
        "hint": failure.hint(Lang::En),
        "error": error.map(|error| &error.message),
        "traceback": traceback,
        "last_lines": failure.last_lines,
        "activity": failure.activity.as_ref().map(|activity| activity.of(Lang::En)),
        "log": failure.log.as_ref().map(|log| log.display().to_string()),
        "reported_by": failure.reported_by,
        "victims": failure.victims,
        "also": failure.also,
    })
}

/// The same for a job that could not go on though no rank had failed. The host is that of this launcher.
fn of_loss(job: &Job, lost: &Lost, outcome: &Outcome) -> Value {
    let now = SystemTime::now();
    json!({
        "message": torch_message(lost.why.of(Lang::En), &[], now, outcome),
        "host": (job.cluster.as_ref()).map_or_else(nodename, |cluster| cluster.host.clone()),
        "kind": "lost",
        "time": time::utc(now),
        "cause": lost.why.of(Lang::En),
    })
}

/// In torch's format, so that programs that read torch's files read this one. The time is whole seconds, as text.
fn torch_message(text: &str, traceback: &[String], at: SystemTime, outcome: &Outcome) -> Value {
    json!({
        "message": text,
        "errorCode": outcome.exit_code(),
        "extraInfo": {
            "py_callstack": traceback.join("\n"),
            "timestamp": time::since_epoch(at).as_secs().to_string(),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_a_rank_is_read_in_both_of_torchs_forms() {
        let check = |text: &str, expect: Option<(&str, &[&str])>| {
            let got = parse(text.as_bytes());
            let got = got.as_ref().map(|error| {
                let lines: Vec<_> = error.traceback.iter().map(String::as_str).collect();
                (&*error.message, lines)
            });
            let expect = expect.map(|(message, lines)| (message, lines.to_vec()));
            assert_eq!(got, expect, "{text}");
        };
        check(
            r#"{"message": {"message": "ValueError: no data", "extraInfo": {"py_callstack": "Traceback:\n  a\n\nValueError: no data\n", "timestamp": "1"}}}"#,
            Some((
                "ValueError: no data",
                &["Traceback:", "  a", "ValueError: no data"],
            )),
        );
        check(r#"{"message": "plain"}"#, Some(("plain", &[])));
        check(
            r#"{"message": {"message": "m", "extraInfo": 7}}"#,
            Some(("m", &[])),
        );
        check(r#"{"message": "a\u001b[2Jb\u0000"}"#, Some(("a[2Jb", &[])));
        for text in [
            "",
            "{",
            "[]",
            "7",
            "{}",
            r#"{"message": 7}"#,
            r#"{"message": {}}"#,
            r#"{"message": " "}"#,
        ] {
            check(text, None);
        }
        check(&"[".repeat(100_000), None);
    }

    #[test]
    fn long_errors_are_cut() {
        let stack = "line\n".repeat(1000);
        let text = serde_json::json!({"message": {"message": "x".repeat(100_000), "extraInfo": {"py_callstack": stack}}});
        let error = parse(text.to_string().as_bytes()).unwrap();
        assert_eq!(error.message.len(), MESSAGE_CHARS_MAX);
        assert_eq!(error.traceback.len(), TRACEBACK_LINES_MAX);
    }

    #[test]
    fn a_file_that_is_no_file_or_too_long_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("good"), r#"{"message": "m"}"#).unwrap();
        assert!(read(&path("good")).is_some());
        std::os::unix::fs::symlink(path("good"), path("link")).unwrap();
        let long = format!(
            r#"{{"message": "m", "x": "{}"}}"#,
            "y".repeat(FILE_BYTES_MAX as usize)
        );
        fs::write(path("long"), long).unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(
            rustix::fs::CWD,
            path("pipe"),
            rustix::fs::FileType::Fifo,
            mode,
            0,
        )
        .unwrap();
        for name in ["absent", "link", "long", "pipe", "."] {
            assert!(read(&path(name)).is_none(), "{name}");
        }
    }
}
