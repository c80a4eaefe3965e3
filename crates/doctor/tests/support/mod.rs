//! Nodes as processes, with names of their own.
#![allow(dead_code, reason = "each test file uses its part")]

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use paceline_rendezvous::store::Client;
use paceline_rendezvous::token::Token;

pub(crate) const PROBE: &str = env!("CARGO_BIN_EXE_doctor_probe");
/// Two digits of the token, which is 32 times the same.
pub(crate) const TOKEN: &str = "0f";

/// Nodes of one job.
pub(crate) struct Fleet {
    pub(crate) nodes: usize,
    pub(crate) endpoint: String,
    pub(crate) token: String,
    pub(crate) tls: &'static str,
    pub(crate) seconds: u64,
}

/// What a node came to.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) code: u8,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// One node; killed when dropped.
pub(crate) struct Node {
    process: Option<Child>,
}

impl Fleet {
    pub(crate) fn new(nodes: usize) -> Self {
        let endpoint = format!("127.0.0.1:{}", paceline_testing::free_ports(2));
        Self {
            nodes,
            endpoint,
            token: TOKEN.repeat(32),
            tls: "off",
            seconds: 60,
        }
    }

    pub(crate) fn node(&self, host: &str, words: &[&str]) -> Node {
        self.node_under(Command::new(PROBE), host, words)
    }

    /// As what `command` runs, such as `ip netns exec NAME`.
    pub(crate) fn node_under(&self, mut command: Command, host: &str, words: &[&str]) -> Node {
        command
            .args([&self.nodes.to_string(), &self.endpoint, host])
            .arg(self.seconds.to_string())
            .args(words)
            .env("PACELINE_JOB_TOKEN", &self.token)
            .env("PACELINE_TLS", self.tls)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        for name in ["PACELINE", "NCCL", "GLOO"] {
            command.env_remove(format!("{name}_SOCKET_IFNAME"));
        }
        let process = Some(command.spawn().expect("started"));
        Node { process }
    }

    pub(crate) fn secret(&self) -> Token {
        Token::from_hex(&self.token).expect("a token")
    }

    /// A connection to the meeting, as soon as there is one.
    pub(crate) fn client(&self) -> Client {
        let soon = Duration::from_secs(20);
        Client::connect(&self.endpoint, &self.secret(), soon).expect("joined")
    }

    /// All of them at one time.
    pub(crate) fn run(&self, hosts: &[&str]) -> Vec<Answer> {
        let nodes: Vec<Node> = hosts.iter().map(|host| self.node(host, &[])).collect();
        nodes.into_iter().map(Node::end).collect()
    }
}

impl Node {
    /// Waits for its end, which all of its own deadlines bring about.
    pub(crate) fn end(mut self) -> Answer {
        let process = self.process.take().expect("it runs");
        let output = process.wait_with_output().expect("it ends");
        Answer {
            code: output.status.code().map_or(255, |code| code as u8),
            out: String::from_utf8(output.stdout).expect("text"),
            err: String::from_utf8(output.stderr).expect("text"),
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}
