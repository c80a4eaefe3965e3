//! Programs under a deadline: started in their own process group, read while they run, killed with all their children.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};
use serde_json::Value;
use tempfile::TempDir;

/// The program.
pub(crate) const PACELINE: &str = env!("CARGO_BIN_EXE_paceline");
/// No command of these tests takes this long, even on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(180);
/// A job's processes are gone this long after its end, even on a busy machine.
const GONE_WITHIN: Duration = Duration::from_secs(15);
/// Jobs that [`in_time`] starts.
const TRIES: usize = 20;
/// A variable that every process of one command inherits.
const MARK: &str = "PROCESS_TEST_MARK";

/// An example of this package.
pub(crate) fn example(name: &str) -> PathBuf {
    paceline_testing::example("paceline", name)
}

/// The command line of one of the programs that tests start as ranks.
pub(crate) fn probe(name: &str) -> String {
    format!("{} {name}", example("probe").display())
}

/// Runs `paceline` with words that contain no blanks, in `folder`.
pub(crate) fn paceline(folder: &Path, line: &str) -> Ended {
    start(folder, line).ended(LIMIT)
}

/// Starts `paceline` with words that contain no blanks, in `folder`.
pub(crate) fn start(folder: &Path, line: &str) -> Running {
    Running::start(command(folder, PACELINE, line.split_whitespace()))
}

/// A folder with a text of 2,808 bytes, `text.txt`.
pub(crate) fn text_folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    write_text(folder.path(), 52);
    folder
}

/// Writes `text.txt` of so many lines of 54 bytes.
pub(crate) fn write_text(folder: &Path, lines: usize) {
    let line = "the quick brown fox jumps over the lazy dog, naïvely\n";
    fs::write(folder.join("text.txt"), line.repeat(lines)).expect("a file");
}

/// The hash of the weights that a training ends with.
pub(crate) fn hash_of(folder: &Path, line: &str) -> String {
    paceline(folder, line).is_well().hash().to_owned()
}

/// Disturbs a job in a new folder; returns the folder and what `disturb` returns. That is an error with the job's end if it was done before,
/// and then `disturb` is called again.
#[track_caller]
pub(crate) fn in_time<T>(mut disturb: impl FnMut(&Path) -> Result<T, Ended>) -> (TempDir, T) {
    let mut last = None;
    for _ in 0..TRIES {
        let folder = tempfile::tempdir().expect("a folder");
        match disturb(folder.path()) {
            Ok(found) => return (folder, found),
            Err(done) => last = Some(done),
        }
    }
    panic!("the job was always done before it was disturbed: {last:?}");
}

/// A command in `folder`, without job variables from the tests' environment and with a shell's default signal handling.
pub(crate) fn command<A: AsRef<OsStr>>(
    folder: &Path,
    program: impl AsRef<OsStr>,
    args: impl IntoIterator<Item = A>,
) -> Command {
    let mut command = Command::new("env");
    // A test runner in the background may ignore signals, and children inherit that.
    command
        .arg("--default-signal=INT,QUIT,HUP,TERM,USR1,USR2")
        .arg(program)
        .args(args);
    paceline_testing::outside_of_jobs(&mut command).current_dir(folder);
    // Default folder for logs.
    command.env("XDG_STATE_HOME", folder.join(".state"));
    command
}

/// A port that is free now.
pub(crate) fn free_port() -> String {
    paceline_testing::free_ports(1).to_string()
}

/// The output of a stream so far.
#[derive(Default)]
struct Heard {
    state: Mutex<(String, bool)>,
    changed: Condvar,
}

impl Heard {
    fn listen(stream: impl Read + Send + 'static, name: &str) -> Arc<Self> {
        let heard = Arc::<Self>::default();
        let copy = heard.clone();
        let listen = move || {
            let mut stream = BufReader::new(stream);
            let mut line = Vec::new();
            while stream
                .read_until(b'\n', &mut line)
                .is_ok_and(|count| count > 0)
            {
                copy.lock().0.push_str(&String::from_utf8_lossy(&line));
                copy.changed.notify_all();
                line.clear();
            }
            copy.lock().1 = true;
            copy.changed.notify_all();
        };
        std::thread::Builder::new()
            .name(name.into())
            .spawn(listen)
            .expect("a thread");
        heard
    }

    fn lock(&self) -> MutexGuard<'_, (String, bool)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the text, and whether it is complete, satisfy `wanted`; `None` if they do not within `limit`.
    fn wait_until(&self, limit: Duration, wanted: impl Fn(&str, bool) -> bool) -> Option<String> {
        let state = self.lock();
        let (state, _) = self
            .changed
            .wait_timeout_while(state, limit, |(text, all)| !wanted(text, *all))
            .unwrap_or_else(PoisonError::into_inner);
        wanted(&state.0, state.1).then(|| state.0.clone())
    }
}

/// A running command; killed with all its children when dropped.
pub(crate) struct Running {
    child: Child,
    mark: String,
    started: Instant,
    out: Arc<Heard>,
    err: Arc<Heard>,
}

impl Running {
    pub(crate) fn start(command: Command) -> Self {
        let mut running = Self::begin(command, Stdio::null());
        let out = running.child.stdout.take().expect("a pipe");
        running.out = Heard::listen(out, "test/stdout");
        running
    }

    /// Starts a command whose standard input and output the caller has.
    pub(crate) fn spoken_with(command: Command) -> (Self, ChildStdin, ChildStdout) {
        let mut running = Self::begin(command, Stdio::piped());
        running.out.lock().1 = true;
        let (input, out) = (running.child.stdin.take(), running.child.stdout.take());
        (running, input.expect("a pipe"), out.expect("a pipe"))
    }

    fn begin(mut command: Command, stdin: Stdio) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let mark = format!(
            "{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        command
            .env(MARK, &mark)
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        let mut child = command.spawn().expect("the command starts");
        Self {
            out: Arc::default(),
            err: Heard::listen(child.stderr.take().expect("a pipe"), "test/stderr"),
            child,
            mark,
            started: Instant::now(),
        }
    }

    /// Waits until standard output has a line that begins with `start`.
    pub(crate) fn has_printed(&self, start: &str) {
        let found = |text: &str, _| text.lines().any(|line| line.starts_with(start));
        if self.out.wait_until(LIMIT, found).is_none() {
            panic!(
                "no line {start:?} within {LIMIT:?}:\n{}{}",
                self.out.lock().0,
                self.err.lock().0
            );
        }
    }

    /// Waits until standard error has a line that begins with `start`.
    pub(crate) fn has_complained(&self, start: &str) {
        let found = |text: &str, _| text.lines().any(|line| line.starts_with(start));
        if self.err.wait_until(LIMIT, found).is_none() {
            panic!("no line {start:?} within {LIMIT:?}:\n{}", self.err.lock().0);
        }
    }

    /// Waits until standard error has so many lines with `part`.
    pub(crate) fn has_complained_of(&self, part: &str, lines: usize) {
        if !self.complains_of(part, lines) {
            let err = &self.err.lock().0;
            panic!("fewer than {lines} lines with {part:?}:\n{err}");
        }
    }

    /// Waits until standard error has so many lines with `part`; `false` if it ends before.
    pub(crate) fn complains_of(&self, part: &str, lines: usize) -> bool {
        let has = |text: &str| text.lines().filter(|line| line.contains(part)).count() >= lines;
        let heard = self.err.wait_until(LIMIT, |text, all| all || has(text));
        let Some(text) = heard else {
            let err = &self.err.lock().0;
            panic!("fewer than {lines} lines with {part:?} within {LIMIT:?}:\n{err}");
        };
        has(&text)
    }

    /// What it has written to standard error.
    pub(crate) fn complaints(&self) -> String {
        self.err.lock().0.clone()
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid(), signal).expect("the command runs");
    }

    /// The process of a rank.
    pub(crate) fn rank(&self, rank: usize) -> Pid {
        self.running(rank)
            .unwrap_or_else(|| panic!("no process has RANK={rank}"))
    }

    /// The process of a rank, if it has not ended.
    fn running(&self, rank: usize) -> Option<Pid> {
        let variable = format!("RANK={rank}");
        let mut processes = marked(&self.mark).into_iter();
        Some(processes.find(|process| process.has(&variable))?.pid)
    }

    /// Sends a signal to these ranks; `false` if one of them has ended.
    pub(crate) fn hits(&self, ranks: &[usize], signal: Signal) -> bool {
        let pids: Option<Vec<Pid>> = ranks.iter().map(|rank| self.running(*rank)).collect();
        let hit = |pid: Pid| rustix::process::kill_process(pid, signal).is_ok();
        pids.is_some_and(|pids| pids.into_iter().all(hit))
    }

    /// Waits until the command and all its children have ended.
    pub(crate) fn ended(mut self, limit: Duration) -> Ended {
        let ended = Watched::new(Pid::from_child(&self.child)).ends_within(limit);
        let took = self.started.elapsed();
        if !ended {
            panic!(
                "it runs for {took:?}:\n{}{}",
                self.out.lock().0,
                self.err.lock().0
            );
        }
        let status = self.child.wait().expect("its end");
        let closed = |stream: &Heard| {
            let text = stream.wait_until(GONE_WITHIN, |_, all| all);
            text.unwrap_or_else(|| {
                panic!("something holds its output open: {:?}", marked(&self.mark))
            })
        };
        let (out, err) = (closed(&self.out), closed(&self.err));
        self.leaves_nothing();
        Ended {
            code: status.code(),
            out,
            err,
            took,
        }
    }

    fn leaves_nothing(&self) {
        let deadline = Instant::now() + GONE_WITHIN;
        loop {
            let left = marked(&self.mark);
            let Some(first) = left.first() else { return };
            let time = deadline.saturating_duration_since(Instant::now());
            assert!(
                Watched::new(first.pid).ends_within(time),
                "left behind: {left:?}"
            );
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for process in marked(&self.mark) {
            let _ = rustix::process::kill_process(process.pid, Signal::KILL);
        }
    }
}

/// The result of a command.
#[derive(Debug)]
pub(crate) struct Ended {
    /// `None` if a signal ended it.
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
    pub(crate) took: Duration,
}

impl Ended {
    /// Checks the exit code and that standard error contains all of `says`.
    #[track_caller]
    pub(crate) fn check(&self, code: i32, says: &[&str]) -> &Self {
        assert_eq!(self.code, Some(code), "{}{}", self.out, self.err);
        for text in says {
            assert!(self.err.contains(text), "{text:?} is not in\n{}", self.err);
        }
        self
    }

    /// For [`in_time`]: checks how the job ended, unless it was done before it was disturbed.
    #[track_caller]
    pub(crate) fn ended_with(self, code: Option<i32>) -> Result<Self, Self> {
        if self.code == Some(0) {
            return Err(self);
        }
        assert_eq!(self.code, code, "{}{}", self.out, self.err);
        Ok(self)
    }

    /// For [`in_time`]: checks that the job has said `text`, unless it was done before it was disturbed.
    #[track_caller]
    pub(crate) fn says(self, text: &str) -> Result<Self, Self> {
        if self.err.contains(text) {
            return Ok(self);
        }
        self.check(0, &[]);
        Err(self)
    }

    /// Checks for success without errors or warnings. Allows the launcher's notes, the usage summary that a slow job prints at its
    /// end, and the warnings that a machine has few cores, that a rank without a launcher waits for another one, and that ZeRO has
    /// nothing to deal out.
    #[track_caller]
    pub(crate) fn is_well(&self) -> &Self {
        let said = self.err.split("⏱️").next().unwrap_or_default();
        let is_allowed = |line: &&str| {
            let waits = line.starts_with("warning: rank ") && line.contains(" waits for rank");
            let is_alone = line.contains("but there is one replica: ");
            waits || is_alone || line.starts_with("note: ") || line.contains("; they take turns, ")
        };
        let mut complaints = said.lines().filter(|line| !is_allowed(line));
        assert_eq!(
            (self.code, complaints.next()),
            (Some(0), None),
            "{}{}",
            self.out,
            self.err
        );
        self
    }

    /// The printed hash of the weights.
    #[track_caller]
    pub(crate) fn hash(&self) -> &str {
        let line = self
            .out
            .lines()
            .find_map(|line| line.split_once("weights sha256: "));
        let (_, hash) = line.unwrap_or_else(|| panic!("no hash in\n{}{}", self.out, self.err));
        assert_eq!(hash.len(), 64, "{hash}");
        hash
    }
}

/// Lines of the text of [`resumes_elsewhere`]: 33 steps of 64 contexts of 32 bytes in an epoch.
const RESUMED_LINES: usize = 1520;

/// Checks that a job of two epochs ends with the bits of one rank if it is killed in the layout `first`, stopped on one rank, and
/// ended in the layout `last`, and that its model writes text.
#[track_caller]
pub(crate) fn resumes_elsewhere(job: &str, first: &str, last: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    write_text(folder.path(), RESUMED_LINES);
    let job = &format!("{job} --data text.txt --epochs 2");
    let line = format!("train {job} --run-dir whole --nproc-per-node 1");
    let whole = hash_of(folder.path(), &line);
    let (folder, ()) = in_time(|folder| {
        write_text(folder, RESUMED_LINES);
        let line = format!("train {job} --run-dir run {first} --save-every 3");
        let killed = start(folder, &line);
        killed.has_printed("epoch 1/2");
        killed.signal(Signal::KILL);
        killed.ended(LIMIT).ended_with(None)?;
        let line = "train --resume run --nproc-per-node 1 --pp 1 --save-every 3";
        let resumed = start(folder, line);
        resumed.has_printed("resumed   after step ");
        resumed.signal(Signal::INT);
        let stopped = resumed.ended(LIMIT).ended_with(Some(130))?;
        match stopped.out.contains("stopped by") {
            true => Ok(()),
            false => Err(stopped),
        }
    });
    let line = format!("train --resume run {last} --schedule gpipe");
    assert_eq!(paceline(folder.path(), &line).is_well().hash(), whole);
    let written = paceline(folder.path(), "generate run The --tokens 5 --seed 1");
    assert!(written.out.starts_with("The"), "{}", written.out);
}

/// The records of a run.
pub(crate) fn metrics(run: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    let parse = |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    text.lines().map(parse).collect()
}

/// The step numbers of all records of this kind.
pub(crate) fn steps(records: &[Value], kind: &str) -> Vec<u64> {
    let of_kind = records.iter().filter(|record| record["kind"] == kind);
    of_kind
        .map(|record| record["step"].as_u64().expect("a step"))
        .collect()
}

/// The checkpoints of a run, oldest first.
pub(crate) fn checkpoints(run: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(run.join("checkpoints")).expect("a folder of checkpoints");
    let mut found: Vec<_> = entries
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| !path.ends_with(".lock") && !path.ends_with("ledger.jsonl"))
        .collect();
    found.sort();
    found
}

/// A process whose end can be observed, even if its pid is reused.
struct Watched(Option<OwnedFd>);

impl Watched {
    /// A process that is already gone has ended.
    fn new(pid: Pid) -> Self {
        Self(rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok())
    }

    fn ends_within(&self, limit: Duration) -> bool {
        let Some(pidfd) = &self.0 else { return true };
        let limit = Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: limit.subsec_nanos().into(),
        };
        let mut polled = [PollFd::new(pidfd, PollFlags::IN)];
        rustix::event::poll(&mut polled, Some(&limit)).expect("poll") > 0
    }
}

/// A process of a command under test.
#[derive(Debug)]
struct Process {
    pid: Pid,
    #[allow(dead_code, reason = "for the message of a failing test")]
    command: String,
    environment: Vec<u8>,
}

impl Process {
    fn has(&self, variable: &str) -> bool {
        self.environment
            .split(|byte| *byte == 0)
            .any(|entry| entry == variable.as_bytes())
    }
}

/// The processes that carry the mark. An ended process has no environment.
fn marked(mark: &str) -> Vec<Process> {
    let mark = format!("{MARK}={mark}");
    let entries = fs::read_dir("/proc").expect("/proc").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let process = |pid: i32| {
        let read = |name| fs::read(format!("/proc/{pid}/{name}")).ok();
        Some(Process {
            pid: Pid::from_raw(pid)?,
            command: String::from_utf8_lossy(&read("cmdline")?).replace('\0', " "),
            environment: read("environ")?,
        })
    };
    pids.filter_map(process)
        .filter(|process| process.has(&mark))
        .collect()
}
