//! A launcher in a process of its own.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use super::{PROBE, Watched};

/// What ends within this time ended promptly, on a busy machine too. Scripts that are to be ended sleep for a minute.
pub const PROMPTLY: Duration = Duration::from_secs(15);

/// A running `launch_probe launch`; killed when dropped.
pub struct Launcher {
    pub process: Child,
    pub stdout: BufReader<ChildStdout>,
    pub started: Instant,
}

impl Launcher {
    /// Starts the launcher with `flags` and a shell script for its ranks.
    pub fn start(flags: &[&str], script: &str) -> Self {
        let mut command = Command::new("env");
        // A test runner in the background may have had its signals ignored, and that is inherited.
        command.args([
            "--default-signal=INT,QUIT,HUP,TERM,USR1,USR2",
            PROBE,
            "launch",
        ]);
        Self::start_command(command, flags, script)
    }

    pub fn start_command(mut command: Command, flags: &[&str], script: &str) -> Self {
        command
            .args(flags)
            .args(["--", "sh", "-c", script])
            .env("PROBE", PROBE);
        let mut process = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the launcher starts");
        let stdout = BufReader::new(process.stdout.take().expect("a pipe"));
        Self {
            process,
            stdout,
            started: Instant::now(),
        }
    }

    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("text");
        line.trim_end().to_owned()
    }

    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.process), signal)
            .expect("the launcher lives");
    }

    /// Waits for the end. Returns the rest of its output and errors.
    pub fn end(&mut self, limit: Duration) -> (ExitStatus, String, String) {
        assert!(
            Watched::new(self.process.id() as i32).ends_within(limit),
            "the launcher lives after {limit:?}"
        );
        let (mut out, mut err) = (String::new(), String::new());
        self.stdout.read_to_string(&mut out).expect("text");
        self.process
            .stderr
            .take()
            .expect("a pipe")
            .read_to_string(&mut err)
            .expect("text");
        (self.process.wait().expect("its end"), out, err)
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
