//! A real etcd of one member, on loopback, in a folder of its own; gone when dropped.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A machine under load takes its time.
const UP_WITHIN: Duration = Duration::from_secs(30);

pub struct Etcd {
    folder: PathBuf,
    port: u16,
    process: Option<Child>,
}

impl Etcd {
    /// `None` where no etcd is installed.
    pub fn start() -> Option<Self> {
        let found = Command::new("etcd").arg("--version").output();
        if !found.is_ok_and(|output| output.status.success()) {
            paceline_testing::skipped("no `etcd` in PATH: apt-get install etcd-server");
            return None;
        }
        let port = paceline_testing::free_ports(2);
        let folder =
            std::env::temp_dir().join(format!("paceline-etcd-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let mut etcd = Self {
            folder,
            port,
            process: None,
        };
        etcd.start_again();
        Some(etcd)
    }

    /// With the keys that it had.
    pub fn start_again(&mut self) {
        let client = format!("http://127.0.0.1:{}", self.port);
        let peer = format!("http://127.0.0.1:{}", self.port + 1);
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.folder.join("log"))
            .expect("a log");
        let mut command = Command::new("etcd");
        command
            .arg("--data-dir")
            .arg(self.folder.join("data"))
            .args([
                "--listen-client-urls",
                &client,
                "--advertise-client-urls",
                &client,
            ])
            .args([
                "--listen-peer-urls",
                &peer,
                "--initial-advertise-peer-urls",
                &peer,
            ])
            .args(["--initial-cluster", &format!("default={peer}")])
            // The disk of a test machine is slow, and nothing here is to last.
            .args([
                "--unsafe-no-fsync",
                "--heartbeat-interval",
                "50",
                "--election-timeout",
                "500",
            ])
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a descriptor"))
            .stderr(log);
        for name in ["ETCD_USERNAME", "ETCD_PASSWORD"] {
            command.env_remove(name);
        }
        // Some machines have an etcd that refuses them otherwise.
        command.env(
            "ETCD_UNSUPPORTED_ARCH",
            std::env::consts::ARCH.replace("aarch64", "arm64"),
        );
        self.process = Some(command.spawn().expect("etcd starts"));
        let deadline = Instant::now() + UP_WITHIN;
        while !self.is_up() {
            assert!(Instant::now() < deadline, "etcd is not up: {}", self.log());
            std::thread::yield_now();
        }
    }

    fn is_up(&self) -> bool {
        TcpStream::connect(("127.0.0.1", self.port)).is_ok()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    /// Has a request of the JSON gateway done.
    pub fn post(&self, path: &str, body: &str) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("etcd is there");
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    }

    /// As a machine does that loses its power.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// With none of the keys that it had.
    pub fn start_empty(&mut self) {
        self.kill();
        std::fs::remove_dir_all(self.folder.join("data")).expect("its data");
        self.start_again();
    }

    pub fn endpoint(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
