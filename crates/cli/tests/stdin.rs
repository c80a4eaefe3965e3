//! Standard input of a job: one rank reads it, from a pipe or from a terminal, in whose foreground the launcher is.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};

const LAUNCHER: &str = env!("CARGO_BIN_EXE_paceline-launcher");
const PATIENCE: Duration = Duration::from_secs(60);

/// What two ranks print that show their input, of which the launcher has two lines.
fn shown(options: &[&str]) -> String {
    let mut launcher = Command::new(LAUNCHER)
        .args(["run", "--nproc-per-node=2", "--log-dir=/dev/null"])
        .args(options)
        .args(["sh", "-c", "cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let mut stdin = launcher.stdin.take().expect("a pipe");
    // Nobody reads it where no rank does.
    let _ = stdin.write_all(b"one\ntwo\n");
    drop(stdin);
    let ended = launcher.wait_with_output().expect("it ends");
    assert!(ended.status.success());
    String::from_utf8(ended.stdout).expect("text")
}

#[test]
fn one_rank_reads_a_pipe_and_the_others_nothing() {
    assert_eq!(shown(&[]), "[rank 0] one\n[rank 0] two\n");
    assert_eq!(shown(&["--stdin", "1"]), "[rank 1] one\n[rank 1] two\n");
    assert_eq!(shown(&["--stdin=none"]), "");
}

#[test]
fn a_rank_that_the_job_does_not_have_cannot_read() {
    let refused = |ranks: &str, hint: &str| {
        let ended = Command::new(LAUNCHER)
            .args(["run", ranks, "--stdin=7", "--log-dir=/dev/null", "true"])
            .stdin(Stdio::null())
            .output()
            .expect("it ends");
        let err = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(2), "{err}");
        let expect = format!("error: the job has no rank 7\nhint: {hint}");
        assert!(err.contains(&expect), "{err}");
    };
    refused("--nproc-per-node=1", "its only rank is 0");
    refused("--nproc-per-node=4", "its ranks are 0 to 3");
}

/// A program whose controlling terminal is a new one, and the terminal's other end.
struct OnTerminal {
    program: Child,
    keyboard: File,
    screen: Arc<Mutex<String>>,
}

impl OnTerminal {
    fn start(words: &[&str]) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let keyboard = openpt(flags).expect("a terminal");
        grantpt(&keyboard).expect("granted");
        unlockpt(&keyboard).expect("unlocked");
        let terminal = File::from(ioctl_tiocgptpeer(&keyboard, flags).expect("its other end"));
        // A test runner in the background may ignore signals, and children inherit that.
        let program = Command::new("env")
            .args(["--default-signal=INT,QUIT", "setsid", "--ctty", "--wait"])
            .args(words)
            .stdin(terminal.try_clone().expect("a copy"))
            .stdout(terminal.try_clone().expect("a copy"))
            .stderr(terminal)
            .spawn()
            .expect("setsid of util-linux");
        let keyboard = File::from(keyboard);
        let screen = Arc::<Mutex<String>>::default();
        let (mut reads, shows) = (keyboard.try_clone().expect("a copy"), Arc::clone(&screen));
        // It ends when the last process has closed the terminal.
        std::thread::spawn(move || {
            let mut bytes = [0; 1024];
            while let Ok(count @ 1..) = reads.read(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..count]);
                shows.lock().expect("no panic").push_str(&text);
            }
        });
        Self {
            program,
            keyboard,
            screen,
        }
    }

    fn text(&self) -> String {
        self.screen.lock().expect("no panic").clone()
    }

    #[track_caller]
    fn shows(&self, expect: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.text().contains(expect) {
            assert!(Instant::now() < deadline, "{expect:?} in {:?}", self.text());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn types(&mut self, keys: &[u8]) {
        self.keyboard.write_all(keys).expect("typed");
    }

    #[track_caller]
    fn end(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.program.try_wait().expect("a child") {
                return status;
            }
            assert!(
                Instant::now() < deadline,
                "{:?}\n{}",
                self.text(),
                self.signals()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The kernel's view of the program: its state, and the signals that wait, are blocked, ignored and caught.
    fn signals(&self) -> String {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.program.id()));
        let status = status.unwrap_or_default();
        let lines = status.lines();
        let shown = lines.filter(|line| line.starts_with("State") || line.contains("Sig"));
        shown.collect::<Vec<_>>().join("\n")
    }
}

impl Drop for OnTerminal {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

const RUN: [&str; 4] = [LAUNCHER, "run", "--nproc-per-node=2", "--log-dir=/dev/null"];
#[test]
fn a_question_without_a_newline_is_shown_and_answered_at_a_terminal() {
    let ask = r#"[ $RANK = 1 ] && exit; printf 'name? '; read -r name; echo "hello $name""#;
    let mut terminal = OnTerminal::start(&[&RUN[..], &["sh", "-c", ask]].concat());
    terminal.shows("[rank 0] name? ");
    terminal.types(b"Ada\n");
    terminal.shows("[rank 0] hello Ada");
    assert!(terminal.end().success(), "{}", terminal.text());
}

#[test]
fn a_rank_that_waits_for_input_is_not_called_stalled() {
    let ask = "[ $RANK = 1 ] && exec sleep 5; printf 'name? '; read -r name; echo hello $name";
    let words = [&RUN[..], &["--stall-after=1", "sh", "-c", ask]].concat();
    let mut terminal = OnTerminal::start(&words);
    // The time is longer on a busy machine.
    terminal.shows("Z: rank 1 has printed nothing and used no processor time for ");
    terminal.shows(" s; rank 0 waits for input");
    terminal.types(b"Ada\n");
    terminal.shows("[rank 0] hello Ada");
    assert!(terminal.end().success(), "{}", terminal.text());
}

#[test]
fn ctrl_c_reaches_the_launcher_while_a_rank_waits_for_input() {
    let ask = "[ $RANK = 1 ] && exec sleep 100; printf 'name? '; read -r name";
    let mut terminal = OnTerminal::start(&[&RUN[..], &["sh", "-c", ask]].concat());
    terminal.shows("[rank 0] name? ");
    terminal.types(b"\x03");
    assert_eq!(terminal.end().code(), Some(130), "{}", terminal.text());
}

#[test]
fn a_launcher_in_the_background_leaves_the_terminal_alone() {
    let ask = "read -r line || echo nothing to read";
    let launcher = format!("set -m; {} sh -c '{ask}' & wait $!", RUN.join(" "));
    let mut terminal = OnTerminal::start(&["bash", "-c", &launcher]);
    terminal.shows("nothing to read");
    assert!(terminal.end().success(), "{}", terminal.text());
}
