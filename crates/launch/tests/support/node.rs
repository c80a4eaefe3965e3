//! Launchers of several nodes, as processes with host names of their own.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use super::{PROBE, Watched};

/// Says where it stands, and stays.
pub const STAY: &str = "echo up $RANK of $WORLD_SIZE; exec sleep 100";
/// Several leases: noticing takes one, the rest is for a busy machine.
pub const SOON: Duration = Duration::from_secs(20);

/// Nodes of one job.
pub struct Fleet {
    pub nodes: String,
    pub endpoint: String,
    pub token: Option<String>,
    pub lease_ms: u64,
    /// `PACELINE_TLS` of nodes that are started from now on.
    pub tls: &'static str,
}

impl Fleet {
    /// `nodes` is what the job is told: `2`, or `1:3`.
    pub fn new(nodes: &str) -> Self {
        let endpoint = format!("127.0.0.1:{}", paceline_testing::free_ports(2));
        Self {
            nodes: nodes.to_owned(),
            endpoint,
            token: Some("0f".repeat(32)),
            lease_ms: 1500,
            tls: "off",
        }
    }

    /// Starts one after the other, each when the one before has come: their order is the order of their ranks.
    pub fn nodes(&self, hosts: &[&str], flags: &[&str], script: &str) -> Vec<Node> {
        let mut nodes: Vec<Node> = Vec::new();
        for host in hosts {
            if let Some(before) = nodes.last() {
                before.waits_for_others();
            }
            nodes.push(self.node(host, flags, script));
        }
        nodes
    }

    pub fn node(&self, host: &str, flags: &[&str], script: &str) -> Node {
        self.node_under(Command::new(PROBE), host, flags, script)
    }

    /// As what `command` runs, such as `ip netns exec NAME`.
    pub fn node_under(
        &self,
        mut command: Command,
        host: &str,
        flags: &[&str],
        script: &str,
    ) -> Node {
        command
            .args([
                "launch",
                "--nodes",
                &self.nodes,
                "--endpoint",
                &self.endpoint,
            ])
            .args(["--host", host, "--lease-ms", &self.lease_ms.to_string()])
            .args(flags)
            .args(["--", "sh", "-c", script])
            .env("PACELINE_TLS", self.tls)
            .env_remove("PACELINE_JOB_TOKEN");
        if let Some(token) = &self.token {
            command.env("PACELINE_JOB_TOKEN", token);
        }
        Node::start(command)
    }
}

/// The ranks of these nodes, whatever their order, are `0..world`.
pub fn up_in_any_order(nodes: &mut [&mut Node], world: usize) {
    let mut ranks: Vec<_> = nodes
        .iter_mut()
        .map(|node| node.expect(&format!(" of {world}"), SOON))
        .collect();
    ranks.sort();
    for (rank, line) in ranks.iter().enumerate() {
        assert!(
            line.ends_with(&format!("up {rank} of {world}")),
            "{ranks:?}"
        );
    }
}

/// One launcher; killed when dropped, and its ranks with it.
pub struct Node {
    process: Child,
    lines: Receiver<String>,
    errors: Arc<(Mutex<String>, Condvar)>,
}

impl Node {
    fn start(mut command: Command) -> Self {
        let mut process = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the launcher starts");
        let (sender, lines) = channel();
        let out = BufReader::new(process.stdout.take().expect("a pipe"));
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let errors = Arc::<(Mutex<String>, Condvar)>::default();
        let told = Arc::clone(&errors);
        let mut err = process.stderr.take().expect("a pipe");
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = err.read(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..count]).into_owned();
                told.0.lock().expect("no panic").push_str(&text);
                told.1.notify_all();
            }
        });
        Self {
            process,
            lines,
            errors,
        }
    }

    /// The next line of its ranks that contains `text`.
    pub fn expect(&mut self, text: &str, within: Duration) -> String {
        let deadline = Instant::now() + within;
        let mut before = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) if line.contains(text) => return line,
                Ok(line) => before.push(line),
                Err(_) => panic!(
                    "no {text:?} within {within:?}, but {before:?} and {:?}",
                    self.errors.0.lock().expect("no panic")
                ),
            }
        }
    }

    /// Waits until its launcher has said `text`.
    pub fn expect_err(&self, text: &str, within: Duration) {
        let (errors, told) = &*self.errors;
        let errors = errors.lock().expect("no panic");
        let (errors, timeout) = told
            .wait_timeout_while(errors, within, |errors| !errors.contains(text))
            .expect("no panic");
        assert!(
            !timeout.timed_out(),
            "no {text:?} within {within:?}: {errors}"
        );
    }

    /// Waits until the node has reached the store and prints the nodes that have joined.
    pub fn waits_for_others(&self) {
        self.expect_err(" joined (", SOON);
    }

    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.process), signal).expect("it lives");
    }

    /// Waits for the end. Returns the exit code and all that its launcher said.
    pub fn end(&mut self, limit: Duration) -> (Option<i32>, String) {
        let ended = Watched::new(self.process.id() as i32).ends_within(limit);
        let told = || self.errors.0.lock().expect("no panic").clone();
        assert!(ended, "it lives after {limit:?}: {}", told());
        let code = self.process.wait().expect("its end").code();
        // The rest of its output is in the pipe.
        let deadline = Instant::now() + Duration::from_secs(2);
        while Arc::strong_count(&self.errors) > 1 && Instant::now() < deadline {
            std::thread::yield_now();
        }
        (code, told())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
