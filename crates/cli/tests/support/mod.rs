//! What the tests of the launcher's command line share: free ports, and processes with an end.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The launcher.
pub const LAUNCHER: &str = env!("CARGO_BIN_EXE_paceline-launcher");
/// What `torchrun` is in Python.
pub const TORCHRUN: &[&str] = &["torch.distributed.run"];
/// Longer than torchrun needs to import torch a few times on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(300);
/// All nodes of a job share it.
pub const TOKEN: &str = "0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f";

/// A port that is free now. The next one is too: launchers meet there.
pub fn free_port() -> u16 {
    paceline_testing::free_ports(2)
}

/// A process and what it says; killed when dropped.
pub struct Run {
    process: Child,
    out: Option<JoinHandle<String>>,
    err: Option<JoinHandle<String>>,
}

/// How a process ended.
#[derive(Debug)]
pub struct End {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Run {
    pub fn start(command: &mut Command) -> Self {
        let mut process = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let out = read(process.stdout.take());
        let err = read(process.stderr.take());
        Self { process, out, err }
    }

    /// Waits for the end, however the process came to it.
    pub fn end(mut self, within: Duration) -> End {
        let deadline = Instant::now() + within;
        let code = loop {
            if let Some(status) = self.process.try_wait().expect("a child") {
                break status.code();
            }
            if Instant::now() >= deadline {
                let _ = self.process.kill();
                let (out, err) = self.said();
                panic!("it lives after {within:?}: {out}{err}");
            }
            std::thread::park_timeout(Duration::from_millis(10));
        };
        let (out, err) = self.said();
        End { code, out, err }
    }

    fn said(&mut self) -> (String, String) {
        let text = |thread: Option<JoinHandle<String>>| {
            thread
                .and_then(|thread| thread.join().ok())
                .unwrap_or_default()
        };
        (text(self.out.take()), text(self.err.take()))
    }
}

fn read(pipe: Option<impl Read + Send + 'static>) -> Option<JoinHandle<String>> {
    let mut pipe = pipe?;
    Some(std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    }))
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
