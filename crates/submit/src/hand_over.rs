//! Writes the file and passes it to the scheduler's program.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use paceline_rendezvous::wait::wait_for;
use rustix::event::PollFlags;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::error::SubmitError;

/// Writes the file beside its place and renames it, readable by its owner only: it may carry the job's token or
/// what the person put into variables.
///
/// *Errors*: it cannot be written.
pub fn save(path: &Path, text: &str) -> Result<(), SubmitError> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let write = || -> io::Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    };
    write().map_err(SubmitError::system(format!(
        "cannot write {}",
        path.display()
    )))
}

/// Runs the scheduler's program on the file; what it prints goes where ours does.
///
/// *Blocks*: until it ends, at most until the deadline; then it is killed.
///
/// *Errors*: it is not there, refuses the job, or does not answer.
pub fn hand_over(
    program: &'static str,
    args: &[&str],
    file: &Path,
    deadline: Duration,
) -> Result<(), SubmitError> {
    let mut command = Command::new(program);
    command.args(args).arg(file).stdin(Stdio::null());
    let failed = |source| SubmitError::system(format!("`{program}` could not be run"))(source);
    let mut child = command.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            let path = file.to_string_lossy();
            let command = [&[program], args, &[&path]].concat().join(" ");
            let hint =
                format!("the file is written; where the scheduler's programs are, run `{command}`");
            SubmitError::failed(format!("`{program}` is not in PATH"), Some(hint))
        }
        _ => failed(error),
    })?;
    let ended = wait(&mut child, deadline);
    let Some(status) = ended.map_err(failed)? else {
        let seconds = deadline.as_secs();
        return Err(SubmitError::Deadline { program, seconds });
    };
    if status.success() {
        return Ok(());
    }
    let status = match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, signal) => format!("signal {}", signal.unwrap_or(0)),
    };
    let file = file.display();
    Err(SubmitError::failed(
        format!("`{program}` ended with {status}"),
        Some(format!(
            "it was given {file}, which stays for you to look at"
        )),
    ))
}

/// How the child ended; `None` if it had to be killed.
fn wait(child: &mut Child, deadline: Duration) -> io::Result<Option<ExitStatus>> {
    let in_time = ends_within(child, deadline);
    if !matches!(in_time, Ok(true)) {
        // It may have ended meanwhile, so an error here means nothing.
        let _ = child.kill();
    }
    let status = child.wait()?;
    Ok(in_time?.then_some(status))
}

fn ends_within(child: &Child, deadline: Duration) -> io::Result<bool> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pidfd = pidfd_open(pid.ok_or(io::ErrorKind::NotFound)?, PidfdFlags::empty())?;
    wait_for(pidfd.as_fd(), PollFlags::IN, Instant::now() + deadline)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_saved_file_replaces_the_one_before_and_is_its_owners_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("job.yaml");
        fs::write(&path, "old").expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("a mode");
        save(&path, "new").expect("saved");
        assert_eq!(fs::read_to_string(&path).expect("read"), "new");
        let mode = fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).expect("read").count(), 1);
    }

    #[test]
    fn a_file_that_cannot_be_written_is_named() {
        let error = save(Path::new("/nowhere/job.yaml"), "").expect_err("no folder");
        assert_eq!(error.to_string(), "cannot write /nowhere/job.yaml");
    }

    #[test]
    fn the_schedulers_answer_decides() {
        let minute = Duration::from_secs(60);
        let file = Path::new("job");
        hand_over("true", &[], file, minute).expect("taken");
        let error = hand_over("false", &[], file, minute).expect_err("refused");
        assert_eq!(error.to_string(), "`false` ended with exit code 1");
        let error = hand_over("no-such-scheduler", &["-f"], file, minute).expect_err("not there");
        let hint = error.hint().expect("a hint");
        assert!(hint.ends_with("run `no-such-scheduler -f job`"), "{hint}");
    }

    #[test]
    fn a_scheduler_that_does_not_answer_is_given_up() {
        let error = hand_over("sleep", &[], Path::new("600"), Duration::from_millis(1));
        assert!(
            matches!(error, Err(SubmitError::Deadline { .. })),
            "{error:?}"
        );
    }
}
