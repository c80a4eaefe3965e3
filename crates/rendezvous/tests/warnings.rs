//! Warnings of real processes: on stderr where no subscriber is set, else in the subscriber only.

use std::fmt::Debug;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use paceline_testing::free_ports;
use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, Subscriber, span};

/// No test takes as long, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
/// Tells this program that it is to be the process with a subscriber.
const ROLE: &str = "PACELINE_TEST_ROLE";

/// A process whose lines are read; killed when dropped.
struct Rank {
    child: Child,
    errors: Receiver<String>,
}

impl Rank {
    /// Starts `program` as a rank of a world of two that meets at `master`.
    fn start(program: &Path, rank: usize, (host, port): (&str, u16), token: Option<&str>) -> Self {
        let mut command = Command::new(program);
        paceline_testing::outside_of_jobs(&mut command)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", "2")
            .env("MASTER_ADDR", host)
            .env("MASTER_PORT", port.to_string())
            .envs(token.map(|token| ("PACELINE_JOB_TOKEN", token)))
            .stdout(Stdio::null());
        Self::spawn(command)
    }

    fn spawn(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let stream = BufReader::new(child.stderr.take().expect("a pipe"));
        let (send, errors) = channel();
        std::thread::spawn(move || {
            for line in stream.lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        Self { child, errors }
    }

    /// The first line that starts so.
    #[track_caller]
    fn says(&self, start: &str) -> String {
        let deadline = Instant::now() + LIMIT;
        let mut said = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.errors.recv_timeout(left) {
                Ok(line) if line.starts_with(start) => return line,
                Ok(line) => said.push(line),
                Err(error) => panic!("no line {start:?} ({error}): {said:#?}"),
            }
        }
    }

    /// All lines until its end, which has to be a good one.
    #[track_caller]
    fn ends_well(mut self) -> Vec<String> {
        let deadline = Instant::now() + LIMIT;
        let mut lines = Vec::new();
        // The stream ends with the process.
        while let Ok(line) = self
            .errors
            .recv_timeout(deadline.saturating_duration_since(Instant::now()))
        {
            lines.push(line);
        }
        assert!(Instant::now() < deadline, "it runs on: {lines:#?}");
        let status = self.child.wait().expect("its end");
        assert!(status.success(), "{status}: {lines:#?}");
        lines
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn meet() -> PathBuf {
    paceline_testing::example("paceline-rendezvous", "meet")
}

#[test]
fn rank_0_of_a_program_without_a_subscriber_warns_once_that_the_token_is_missing() {
    // Not the loopback address, although Linux dials it as such.
    let master = ("0.0.0.0", free_ports(1));
    let ranks = [0, 1].map(|rank| Rank::start(&meet(), rank, master, None));
    let [first, second] = ranks.map(Rank::ends_well);
    assert_eq!(first.len(), 1, "{first:#?}");
    let expected = format!(
        "warning: PACELINE_JOB_TOKEN is not set, so anyone who can reach 0.0.0.0:{} can join this job",
        master.1
    );
    assert!(first[0].starts_with(&expected), "{first:#?}");
    // Rank 1 may say that rank 0 starts late, as on a busy machine.
    let late = format!("warning: rank 1 waits for rank 0 at 0.0.0.0:{} (", master.1);
    let says_late = second.iter().all(|line| line.starts_with(&late));
    assert!(second.len() <= 1 && says_late, "{second:#?}");
}

#[test]
fn a_rank_that_was_started_by_hand_says_that_it_waits_for_rank_0() {
    let master = ("127.0.0.1", free_ports(1));
    let token = "1".repeat(64);
    let second = Rank::start(&meet(), 1, master, Some(&token));
    let line = second.says("warning: ");
    let expected = format!(
        "warning: rank 1 waits for rank 0 at 127.0.0.1:{} (",
        master.1
    );
    assert!(
        line.starts_with(&expected) && line.contains("refused"),
        "{line}"
    );
    let first = Rank::start(&meet(), 0, master, Some(&token));
    for rank in [first, second] {
        assert_eq!(rank.ends_well(), [""; 0]);
    }
}

#[test]
fn rank_0_says_who_came_with_a_wrong_token() {
    let master = ("127.0.0.1", free_ports(1));
    let tokens = ["1".repeat(64), "2".repeat(64)];
    let first = Rank::start(&meet(), 0, master, Some(&tokens[0]));
    let second = Rank::start(&meet(), 1, master, Some(&tokens[1]));
    let line = first.says("warning: ");
    let expected = "warning: the job's store refused a connection from 127.0.0.1: ";
    assert!(line.starts_with(expected), "{line}");
    assert!(line.contains("PACELINE_JOB_TOKEN"), "{line}");
    second.says("error: ");
    let hint = second.says("hint: ");
    assert!(hint.contains("PACELINE_JOB_TOKEN"), "{hint}");
}

#[test]
fn ranks_say_that_an_http_server_has_the_port() {
    let server = TcpListener::bind("127.0.0.1:0").expect("a port");
    let master = (
        "127.0.0.1",
        server.local_addr().expect("its address").port(),
    );
    std::thread::spawn(move || {
        for mut stream in server.incoming().map_while(Result::ok) {
            // As real ones do, it waits for an empty line.
            let mut request = Vec::new();
            let mut byte = [0];
            while !request.ends_with(b"\r\n\r\n") && matches!(stream.read(&mut byte), Ok(1)) {
                request.push(byte[0]);
            }
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
        }
    });
    let token = "1".repeat(64);
    let second = Rank::start(&meet(), 1, master, Some(&token));
    let expected = format!(
        "error: the store at 127.0.0.1:{}: the peer seems to be an HTTP server, not a process of this job",
        master.1
    );
    second.says(&expected);
    assert!(second.says("hint: ").contains("MASTER_PORT"));
    let first = Rank::start(&meet(), 0, master, Some(&token));
    first.says("error: the store cannot listen at 127.0.0.1:");
    assert!(first.says("hint: ").contains("MASTER_PORT"));
}

#[test]
fn with_a_subscriber_it_gets_the_event_and_stderr_gets_nothing() {
    if std::env::var_os(ROLE).is_some() {
        return warn_with_a_subscriber();
    }
    let test = std::thread::current();
    let ended = Command::new(std::env::current_exe().expect("this program has a file"))
        .args([
            "--exact",
            test.name().expect("the test's name"),
            "--nocapture",
        ])
        .env(ROLE, "subscriber")
        .stdin(Stdio::null())
        .output()
        .expect("this program starts");
    let [out, err] =
        [ended.stdout, ended.stderr].map(|text| String::from_utf8(text).expect("UTF-8"));
    assert!(
        ended.status.success() && out.contains("1 passed"),
        "{out}{err}"
    );
    assert_eq!(err, "");
}

fn warn_with_a_subscriber() {
    let (send, events) = channel();
    tracing::subscriber::set_global_default(Events(send)).expect("the first subscriber");
    let speed = 3;
    paceline_rendezvous::notice!(WARN, "only {speed} GB/s");
    let event = events.try_recv().expect("an event");
    assert_eq!(
        event,
        ("WARN".into(), "warnings".into(), "only 3 GB/s".into())
    );
}

/// Hands on the level, target and message of each event.
struct Events(std::sync::mpsc::Sender<(String, String, String)>);

impl Subscriber for Events {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        struct Message(String);
        impl Visit for Message {
            fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        let mut message = Message(String::new());
        event.record(&mut message);
        let meta = event.metadata();
        let _ = self.0.send((
            meta.level().to_string(),
            meta.target().to_owned(),
            message.0,
        ));
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}
