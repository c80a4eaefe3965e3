//! Schedulers on this machine: commands under a deadline, and what they print.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

/// No test takes as long, on a busy machine neither; what still runs then is killed.
const LIMIT: &str = "120";

/// One of this package's folders, with a program for ranks.
pub(crate) struct Site {
    folder: TempDir,
}

/// What a command came to.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Site {
    /// `rank.sh` is what the ranks run.
    pub(crate) fn new(rank: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let site = Self { folder };
        site.script("rank.sh", rank);
        site
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Makes a script of the shell in the folder.
    pub(crate) fn script(&self, name: &str, text: &str) {
        use std::os::unix::fs::PermissionsExt;
        let path = self.path().join(name);
        std::fs::write(&path, format!("#!/bin/bash\n{text}\n")).expect("written");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("allowed");
    }

    /// Runs a line of the shell in the folder, behind the words of a command that runs another one; `$LAUNCHER run` is
    /// `paceline run`.
    pub(crate) fn run(&self, behind: &[&str], line: &str) -> Ended {
        let mut command = self.command();
        command.args(behind).args(["bash", "-c", line]).ended()
    }

    fn command(&self) -> Command {
        let mut command = Command::new("timeout");
        paceline_testing::outside_of_jobs(&mut command)
            .args(["--kill-after=20", LIMIT])
            .current_dir(self.path())
            .env("LAUNCHER", env!("CARGO_BIN_EXE_paceline-launcher"))
            .env("TMPDIR", self.path())
            .env("XDG_STATE_HOME", self.path().join("state"))
            .stdin(Stdio::null());
        command
    }
}

trait Run {
    fn ended(&mut self) -> Ended;
}

impl Run for Command {
    fn ended(&mut self) -> Ended {
        let Output {
            status,
            stdout,
            stderr,
        } = self.output().expect("timeout(1) starts");
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ended {
            code: status.code(),
            out: text(stdout),
            err: text(stderr),
        }
    }
}

impl Ended {
    /// The lines of stdout that ranks have written, in order.
    pub(crate) fn ranks(&self) -> Vec<&str> {
        let lines = self.out.lines();
        let mut ranks: Vec<_> = lines
            .filter_map(|line| Some(&line[line.find("at ")?..]))
            .collect();
        ranks.sort_unstable();
        ranks
    }

    #[track_caller]
    pub(crate) fn says(&self, text: &str) -> &Self {
        assert!(self.err.contains(text), "no {text:?} in {self:?}");
        self
    }

    #[track_caller]
    pub(crate) fn ends_with(&self, code: i32) -> &Self {
        assert_eq!(self.code, Some(code), "{self:?}");
        self
    }
}

/// Whether all these programs are there; says how to get them otherwise.
pub(crate) fn has(programs: &[&str], how: &str) -> bool {
    let line = programs
        .iter()
        .map(|program| format!("command -v {program}"))
        .collect::<Vec<_>>()
        .join(" && ");
    let found = Command::new("bash")
        .args(["-c", &format!("PATH=$PATH:/usr/sbin; {line}")])
        .output();
    let found = found.is_ok_and(|found| found.status.success());
    if !found {
        paceline_testing::skipped(format!("{} not installed: {how}", programs.join(", ")));
    }
    found
}
