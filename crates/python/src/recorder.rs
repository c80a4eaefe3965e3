//! What the ranks do, in a run directory: each notes it by itself, and rank 0 writes the lines that `paceline watch` and `paceline report` read.
//!
//! The program's threads only note times. A thread of this process, `rank3/notes`, does the rest: it sends the notes of a few steps to rank 0
//! through the store in which the group formed, or there gathers and writes them. Nothing waits for it but the end of the group, for a bounded time.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_collective::ProcessGroup;
use paceline_collective::flight::Record;
use paceline_rendezvous::monotonic_ns;
use paceline_rendezvous::page::Phase;
use paceline_rendezvous::store::{Client, Store};
use paceline_usage::environment::Environment;
use paceline_usage::spans::{Bucket, Notes, Spans, records};
use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::steps::{Step, Steps};

/// How often the thread looks for steps to write.
const PERIOD: Duration = Duration::from_millis(500);
/// How long rank 0 waits for the notes of the others.
const GATHER_TIMEOUT: Duration = Duration::from_secs(10);
/// The same at the end of the group.
const LAST_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a request to the store may take.
const STORE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a new rank 0 waits for the end of a lost one, which has the file.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// Steps that may wait for the thread; further ones are left out.
const STEPS_MAX: usize = 1 << 16;
/// Most steps between two whose spans are kept.
const STRIDE_MAX: u64 = 1024;
/// Steps whose notes a rank leaves in the store: more than it keeps of 8,192 steps, which no rank 0 is late for.
const LEFT_MAX: usize = 64;
/// Longest line of an earlier job that is read.
const LINE_BYTES_MAX: u64 = 16 << 20;

/// Whether the spans of this step are kept, by its number alone, so that all ranks keep the same: the first eight, then four each time that their
/// number doubles, and later every 1,024th.
fn is_kept(step: u64) -> bool {
    let stride = (step.max(4).ilog2() - 2).min(STRIDE_MAX.ilog2());
    step.is_multiple_of(1 << stride)
}

/// Records what this process does in a group.
pub(crate) struct Recorder {
    /// The number of the group.
    pub(crate) group: u64,
    pub(crate) world: usize,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    came: Condvar,
}

#[derive(Debug)]
struct State {
    steps: Steps,
    done: VecDeque<Step>,
    /// A step is to be noted before later operations take its place in the flight recorder.
    is_urgent: bool,
    end: Option<End>,
}

/// How the group ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The program has left it.
    Left,
    /// It has failed, or goes on as another one.
    CutOff,
}

impl Recorder {
    /// Begins after `over` steps. Rank 0 opens the metrics in `folder`. `before` has the number of ranks of the group that this one follows.
    ///
    /// *Blocks*: for a few seconds where another process has the metrics open. *Errors*: they cannot be written.
    pub(crate) fn start(
        number: u64,
        group: ProcessGroup,
        folder: &Path,
        over: u64,
        before: Option<usize>,
    ) -> Result<Self, Failure> {
        let cannot = |source: io::Error| {
            let folder = folder.display();
            let message = format!("cannot write the metrics of this run in {folder}: {source}");
            Failure::new("configuration", message)
                .hint("the run directory, PACELINE_RUN_DIR, is a folder that rank 0 can write to, one for each job")
        };
        let lines = match group.rank() {
            0 => Some(Lines::open(folder, over, before, group.world()).map_err(cannot)?),
            _ => None,
        };
        let (name, world) = (group.thread_name("notes"), group.world());
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                steps: Steps::new(over, Instant::now()),
                done: VecDeque::new(),
                is_urgent: false,
                end: None,
            }),
            came: Condvar::new(),
        });
        let writer = Writer {
            group,
            lines,
            store: None,
            is_cut_off: false,
            pending: VecDeque::new(),
            left: VecDeque::new(),
        };
        let own = shared.clone();
        let builder = std::thread::Builder::new().name(name);
        let thread = builder.spawn(move || writer.serve(&own)).map_err(cannot)?;
        Ok(Self {
            group: number,
            world,
            shared,
            thread: Some(thread),
        })
    }

    /// The program enters a phase, in its own code after `step` steps.
    pub(crate) fn enter(&self, phase: Phase, step: u64) {
        let mut state = self.shared.state.lock();
        let Some(mut step) = state.steps.enter(phase, step, Instant::now()) else {
            return;
        };
        let is_urgent = is_kept(step.step);
        if !is_urgent {
            step.spans = Vec::new();
        }
        if state.done.len() < STEPS_MAX {
            state.done.push_back(step);
        }
        state.is_urgent |= is_urgent;
        drop(state);
        if is_urgent {
            self.shared.came.notify_one();
        }
    }

    /// An operation is done meanwhile.
    pub(crate) fn handed_over(&self) {
        self.shared.state.lock().steps.handed_over(Instant::now());
    }

    /// An operation has ended.
    pub(crate) fn landed(&self) {
        self.shared.state.lock().steps.landed(Instant::now());
    }

    /// The program has waited for an operation.
    pub(crate) fn waited(&self, since: Instant) {
        self.shared.state.lock().steps.waited(since, Instant::now());
    }

    /// Ends the thread, which writes what it has.
    ///
    /// *Blocks*: for a few seconds at most, where the store does not answer or other ranks are late.
    pub(crate) fn end(mut self, how: End) {
        self.shared.state.lock().end = Some(how);
        self.shared.came.notify_one();
        if let Some(thread) = self.thread.take() {
            // It may have panicked, which has been printed; nobody needs it.
            let _ = thread.join();
        }
    }
}

/// The thread.
struct Writer {
    group: ProcessGroup,
    /// On rank 0.
    lines: Option<Lines>,
    store: Option<(Client, String)>,
    /// No more notes come from other ranks: the store went with the launcher or rank that hosts it, or a world of one has none.
    is_cut_off: bool,
    pending: VecDeque<Gathered>,
    /// Steps whose notes this rank has left in the store.
    left: VecDeque<u64>,
}

/// The notes of a step on rank 0.
struct Gathered {
    step: u64,
    since: Instant,
    ranks: Vec<Option<Spans>>,
}

impl Writer {
    fn serve(mut self, shared: &Shared) {
        loop {
            let mut state = shared.state.lock();
            let quiet = |state: &mut State| !state.is_urgent && state.end.is_none();
            shared.came.wait_while_for(&mut state, quiet, PERIOD);
            let done = std::mem::take(&mut state.done);
            state.is_urgent = false;
            let end = state.end;
            drop(state);
            for step in done {
                self.take(step);
            }
            self.gather(end);
            if let Some(lines) = &mut self.lines {
                if end == Some(End::Left) {
                    lines.end();
                }
                lines.flush();
            }
            if end.is_some() {
                return;
            }
        }
    }

    fn take(&mut self, step: Step) {
        let number = step.step;
        if let Some(lines) = &mut self.lines {
            lines.step(&step);
        }
        if !is_kept(number) {
            return;
        }
        let spans = self.noted(step);
        if self.lines.is_none() {
            self.leave(number, &spans);
            return;
        }
        let mut ranks = vec![None; self.group.world()];
        ranks[0] = Some(spans);
        self.pending.push_back(Gathered {
            step: number,
            since: Instant::now(),
            ranks,
        });
    }

    /// The notes of a step with its operations, which the flight recorder has.
    fn noted(&self, step: Step) -> Spans {
        let mut notes = Notes::new();
        notes.reduced(step.reduced);
        for (kind, start, end) in step.spans {
            notes.add(kind, start, end);
        }
        let dump = self.group.dump_flight();
        // A moment's difference between clocks would move an operation out of its step.
        let origin = self.group.flight_origin();
        let at = |ns: u64| origin + Duration::from_nanos(ns);
        let bucket = |record: &Record| {
            let started = at(record.started_ns?);
            let finished = at(record.ended_ns?);
            let is_of_step = step.began <= started && finished <= step.ended;
            (is_of_step && record.bytes > 0).then(|| Bucket {
                bytes: record.bytes,
                started,
                peers_ready: record.arrived_ns.map_or(started, at),
                finished,
            })
        };
        let groups = dump.groups.iter();
        let mut buckets: Vec<Bucket> = groups
            .flat_map(|group| group.records.iter().filter_map(bucket))
            .collect();
        buckets.sort_by_key(|bucket| bucket.started);
        for bucket in buckets {
            notes.add_bucket(bucket);
        }
        notes.done(step.step, self.group.env().node_rank, monotonic_ns())
    }

    /// The connection to the store, and the prefix of the group's keys.
    fn store(&mut self) -> Option<(&Client, &str)> {
        if self.store.is_none() && !self.is_cut_off {
            let reached = self.group.store(STORE_TIMEOUT).ok().flatten();
            self.is_cut_off = reached.is_none();
            self.store =
                reached.map(|(client, prefix)| (client.with_answer_timeout(STORE_TIMEOUT), prefix));
        }
        let (client, prefix) = self.store.as_ref().filter(|_| !self.is_cut_off)?;
        Some((client, prefix))
    }

    /// Leaves this rank's notes for rank 0. The store is not filled if that does not take them.
    fn leave(&mut self, step: u64, spans: &Spans) {
        let rank = self.group.rank();
        let old = match self.left.len() {
            LEFT_MAX => self.left.pop_front(),
            _ => None,
        };
        self.left.push_back(step);
        let Some((store, prefix)) = self.store() else {
            return;
        };
        let value = serde_json::to_vec(spans).expect("numbers always encode");
        let mut sent = store.set(&key(prefix, step, rank), &value).map(|()| true);
        if let Some(old) = old {
            sent = sent.and(store.delete(&key(prefix, old, rank)));
        }
        if sent.is_err() {
            self.is_cut_off = true;
        }
    }

    /// Takes what other ranks have left, and writes steps of which all is there, or whose time is over.
    fn gather(&mut self, end: Option<End>) {
        let started = Instant::now();
        for mut gathered in std::mem::take(&mut self.pending) {
            // Recovery waits for the end of a group that goes on as another one.
            if end != Some(End::CutOff) {
                let wait = match end {
                    Some(_) => LAST_TIMEOUT,
                    None => Duration::ZERO,
                };
                self.fetch(&mut gathered, started + wait);
            }
            let is_whole = gathered.ranks.iter().all(Option::is_some);
            let is_over = end.is_some() || gathered.since.elapsed() >= GATHER_TIMEOUT;
            // In the order of steps.
            let is_next = self.pending.is_empty();
            if is_next && (is_whole || is_over || self.is_cut_off) {
                self.write(gathered);
            } else {
                self.pending.push_back(gathered);
            }
        }
    }

    fn fetch(&mut self, gathered: &mut Gathered, deadline: Instant) {
        let step = gathered.step;
        let missing = gathered.ranks.iter_mut().enumerate();
        for (rank, place) in missing.filter(|(_, spans)| spans.is_none()) {
            let Some((store, prefix)) = self.store() else {
                return;
            };
            let key = key(prefix, step, rank);
            let left = deadline.saturating_duration_since(Instant::now());
            // What is not there yet is an error too.
            if let Ok(value) = store.get(&key, left) {
                *place = serde_json::from_slice(&value).ok();
                let _ = store.delete(&key);
            }
        }
    }

    fn write(&mut self, gathered: Gathered) {
        let ranks: Vec<Vec<Spans>> = gathered.ranks.into_iter().map(Vec::from_iter).collect();
        if let Some(lines) = &mut self.lines {
            for mut record in records(&ranks) {
                record.step += lines.before;
                lines.put(&record);
            }
        }
    }
}

fn key(prefix: &str, step: u64, rank: usize) -> String {
    format!("{prefix}/notes/{step}/{rank}")
}

/// The metrics of a run.
struct Lines {
    file: BufWriter<File>,
    /// Steps of earlier jobs and starts in this run directory.
    before: u64,
    last: u64,
    /// Whether it has been said that lines cannot be written.
    is_broken: bool,
}

#[derive(Serialize)]
struct StartLine {
    kind: &'static str,
    step: u64,
    world: usize,
    environment: Environment,
}

#[derive(Serialize)]
struct RanksLine {
    kind: &'static str,
    step: u64,
    before: usize,
    now: usize,
}

#[derive(Serialize)]
struct StepLine {
    kind: &'static str,
    step: u64,
    seconds: f64,
    waited_seconds: f64,
}

#[derive(Serialize)]
struct EndLine {
    kind: &'static str,
    step: u64,
}

impl Lines {
    /// Opens the metrics in a run directory, in which this job has done `over` steps, and says that it begins, or goes on with other ranks. What is
    /// there already stays.
    fn open(folder: &Path, over: u64, ranks_before: Option<usize>, now: usize) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let path = folder.join("metrics.jsonl");
        let mut file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(path)?;
        lock(&file)?;
        let (last, is_torn) = last_step(&file)?;
        let before = last.saturating_sub(over);
        if is_torn {
            file.write_all(b"\n")?;
        }
        let mut lines = Self {
            file: BufWriter::new(file),
            before,
            last: before + over,
            is_broken: false,
        };
        let step = before + over;
        match ranks_before {
            None => lines.put(&StartLine {
                kind: "start",
                step,
                world: now,
                environment: Environment::here(),
            }),
            Some(before) => lines.put(&RanksLine {
                kind: "ranks",
                step,
                before,
                now,
            }),
        }
        lines.file.flush()?;
        Ok(lines)
    }

    fn step(&mut self, step: &Step) {
        self.last = self.before + step.step;
        self.put(&StepLine {
            kind: "step",
            step: self.last,
            seconds: (step.ended - step.began).as_secs_f64(),
            waited_seconds: step.waited.as_secs_f64(),
        });
    }

    fn end(&mut self) {
        self.put(&EndLine {
            kind: "end",
            step: self.last,
        });
    }

    fn put(&mut self, line: &impl Serialize) {
        let mut bytes = serde_json::to_vec(line).expect("numbers and names always encode");
        bytes.push(b'\n');
        let written = self.file.write_all(&bytes);
        self.tell(written);
    }

    fn flush(&mut self) {
        let flushed = self.file.flush();
        self.tell(flushed);
    }

    /// Training goes on without lines.
    fn tell(&mut self, outcome: io::Result<()>) {
        if let Err(error) = outcome
            && !std::mem::replace(&mut self.is_broken, true)
        {
            paceline_rendezvous::notice!(WARN, "the metrics of this run are not complete: {error}");
        }
    }
}

/// Keeps another job out. A lost rank 0 of this one may take a moment to be gone.
fn lock(file: &File) -> io::Result<()> {
    let started = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            // Not every file system of several machines has locks.
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
                return Ok(());
            }
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) if started.elapsed() < LOCK_TIMEOUT => {
                std::thread::sleep(Duration::from_millis(50));
            }
            Err(TryLockError::WouldBlock) => {
                return Err(io::Error::other("another job writes there"));
            }
        }
    }
}

/// The last step that lines speak of, and whether the last line lacks its end.
fn last_step(file: &File) -> io::Result<(u64, bool)> {
    #[derive(Deserialize)]
    struct Line {
        step: u64,
    }
    let (mut reader, mut line, mut last) = (BufReader::new(file), Vec::new(), 0);
    let mut is_torn = false;
    loop {
        line.clear();
        let read = (&mut reader)
            .take(LINE_BYTES_MAX)
            .read_until(b'\n', &mut line)?;
        if read == 0 {
            return Ok((last, is_torn));
        }
        is_torn = !line.ends_with(b"\n");
        if let Ok(line) = serde_json::from_slice::<Line>(&line) {
            last = last.max(line.step);
        }
    }
}

#[cfg(test)]
mod tests {
    use paceline_collective::ReduceOp;
    use paceline_testing::on_threads;
    use serde_json::{Value, json};

    use super::*;
    use crate::settings::Settings;

    #[test]
    fn spans_are_kept_four_times_while_their_number_doubles() {
        let kept = |to: u64| (1..=to).filter(|step| is_kept(*step)).collect::<Vec<_>>();
        assert_eq!(
            kept(32),
            [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32]
        );
        assert_eq!(kept(8_192).len(), 8 + 4 * 10);
        assert_eq!(kept(1 << 20).len(), 8 + 4 * 10 + (1 << 10) - 8);
    }

    fn settings(rank: usize, world: usize, meeting: &Value) -> Settings {
        let variables = json!({
            "RANK": rank.to_string(), "WORLD_SIZE": world.to_string(), "LOCAL_RANK": "", "LOCAL_WORLD_SIZE": "", "GROUP_RANK": "",
            "GROUP_WORLD_SIZE": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "PACELINE_STORE": "", "PACELINE_PAGE_FD": "",
            "PACELINE_JOB_TOKEN": "",
        });
        let settings =
            json!({ "variables": variables, "timeout_ms": 20_000, "meeting": meeting }).to_string();
        Settings::parse(settings.as_bytes()).unwrap()
    }

    /// Two ranks do `steps` steps, each with an operation.
    fn train(folder: &Path, steps: u64) {
        let (server, meeting) = settings(0, 2, &Value::Null).host().unwrap();
        let meeting = serde_json::to_value(meeting).unwrap();
        on_threads(0..2, |rank| {
            let group = settings(rank, 2, &meeting).join().unwrap();
            let recorder = Recorder::start(1, group.clone(), folder, 0, None).unwrap();
            for step in 1..=steps {
                recorder.enter(Phase::Backward, step);
                recorder.handed_over();
                group
                    .all_reduce(&mut [1.0_f32; 256], ReduceOp::Sum)
                    .unwrap();
                recorder.landed();
                recorder.enter(Phase::BetweenSteps, step - 1);
                recorder.enter(Phase::BetweenSteps, step);
            }
            recorder.end(End::Left);
            // The store is rank 0's.
            group.barrier().unwrap();
        });
        drop(server);
    }

    fn lines(folder: &Path) -> Vec<Value> {
        let text = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
        let lines = text.lines();
        lines
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    #[test]
    fn rank_0_writes_what_all_ranks_have_noted() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        train(&run, 10);
        let all = lines(&run);
        let of = |kind: &str| -> Vec<&Value> {
            all.iter().filter(|line| line["kind"] == kind).collect()
        };
        assert_eq!(
            (all[0]["kind"].as_str(), &all[0]["world"]),
            (Some("start"), &json!(2))
        );
        let steps: Vec<_> = of("step")
            .iter()
            .map(|line| line["step"].as_u64().unwrap())
            .collect();
        assert_eq!(steps, (1..=10).collect::<Vec<_>>());
        for line in of("step") {
            assert!(line["seconds"].as_f64().unwrap() >= line["waited_seconds"].as_f64().unwrap());
        }
        let spans = of("spans");
        let kept: Vec<_> = spans
            .iter()
            .map(|line| line["step"].as_u64().unwrap())
            .collect();
        assert_eq!(kept, [1, 2, 3, 4, 5, 6, 7, 8, 10]);
        for line in spans {
            for rank in 0..2 {
                let kinds = line["ranks"][rank].as_array().unwrap().iter();
                let kinds: Vec<_> = kinds.map(|span| span[0].as_str().unwrap()).collect();
                assert!(
                    kinds.starts_with(&["backward"]) && kinds.contains(&"optimizer"),
                    "{line}"
                );
                let buckets = line["buckets"][rank].as_array().unwrap();
                assert!(buckets.len() == 1 && buckets[0][0] == 1024, "{line}");
                let times: Vec<_> = (1..4).map(|at| buckets[0][at].as_f64().unwrap()).collect();
                assert!(times.is_sorted(), "{line}");
            }
        }
        assert_eq!(all.last().unwrap(), &json!({"kind": "end", "step": 10}));
    }

    #[test]
    fn a_job_that_begins_again_goes_on_counting_after_a_torn_line() {
        let folder = tempfile::tempdir().unwrap();
        let torn = "{\"kind\":\"step\",\"step\":41}\n{\"kind\":\"st";
        fs::write(folder.path().join("metrics.jsonl"), torn).unwrap();
        train(folder.path(), 2);
        let text = fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
        let (before, after) = text.split_at(torn.len());
        assert_eq!(before, torn);
        let after: Vec<Value> = after
            .trim()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let told: Vec<_> = after
            .iter()
            .map(|line| {
                (
                    line["kind"].as_str().unwrap(),
                    line["step"].as_u64().unwrap(),
                )
            })
            .collect();
        let step = [
            ("step", 42),
            ("step", 43),
            ("spans", 42),
            ("spans", 43),
            ("end", 43),
        ];
        assert_eq!(told[0], ("start", 41));
        assert!(
            step.iter().all(|line| told.contains(line)) && told.len() == 6,
            "{told:?}"
        );
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let group = ProcessGroup::local(1, &paceline_collective::GroupOptions::default());
        let group = group.unwrap().remove(0);
        let refused = Recorder::start(1, group, file.path(), 0, None)
            .err()
            .unwrap();
        assert_eq!(refused.kind, "configuration");
        let begin = format!(
            "cannot write the metrics of this run in {}: ",
            file.path().display()
        );
        assert!(
            refused.message.starts_with(&begin) && refused.hint.is_some(),
            "{}",
            refused.message
        );
    }
}
