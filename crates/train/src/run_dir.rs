//! The run directory: one job's files, and the lock that keeps a second job out.
//!
//! ```text
//! runs/digits-20261121-113000/
//!   config.toml      resolved settings, each with its source
//!   tokenizer.json   of a language model whose tokens are not bytes
//!   metrics.jsonl    one JSON object per step, per evaluation and per epoch
//!   events.out.*     the same for TensorBoard
//!   mlflow.json      where the run is on a tracking server, with `--mlflow`
//!   logs/            output of every rank
//!   checkpoints/     see `paceline_checkpoint`
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, BufWriter, Error, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use paceline_checkpoint::{FolderLock, LockError};
use paceline_rendezvous::env::WorkerEnv;
use serde::Serialize;

use crate::error::TrainError;
use crate::records::StepRecord;
use crate::tensorboard::Events;

/// Figures are seen by others at most so much later, if no evaluation comes between.
const FLUSH_EVERY: Duration = Duration::from_secs(1);
/// Steps after which rank 0 hands its lines to the system in any case, so that the others know which they still have to keep.
const HAND_OVER_EVERY: u64 = 16;

/// A run directory locked by this process, at most until the process ends.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    _lock: FolderLock,
}

impl RunDir {
    /// Creates and locks a directory for this job alone: `path`, or `path-2` and so on if that exists.
    ///
    /// *Errors*: the system's.
    pub fn create(path: &Path) -> Result<Self, TrainError> {
        let parent = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(parent).map_err(|source| cannot_create(path, source))?;
        let mut made = path.to_path_buf();
        for number in 2.. {
            match fs::create_dir(&made) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                    let mut name = path.as_os_str().to_owned();
                    name.push(format!("-{number}"));
                    made = name.into();
                }
                created => {
                    created.map_err(|source| cannot_create(&made, source))?;
                    break;
                }
            }
        }
        Self::open(&made, false, None)
    }

    /// Opens and locks the directory `path` for a rank of the job `env`, or for its launcher; creates it if missing.
    ///
    /// *Blocks*: for two minutes at most, while a lost rank of the same job has it.
    ///
    /// *Errors*: another job has it; it holds a run and `resume` is false; I/O errors.
    pub fn open(path: &Path, resume: bool, env: Option<&WorkerEnv>) -> Result<Self, TrainError> {
        let file_error = |source| cannot_create(path, source);
        if path.is_file() {
            return Err(file_error(Error::other("it is a file, not a directory")));
        }
        let mut lock = FolderLock::new(path, env);
        lock.hold().map_err(|error| match error {
            LockError::InUse { waited } if waited.is_zero() => TrainError::usage(
                format!("run directory {} {error}", path.display()),
                "choose another --run-dir, or wait for the other job to end",
            ),
            LockError::InUse { .. } => {
                TrainError::file("lock run directory", path)(Error::other(error))
            }
            LockError::File(source) => file_error(source),
        })?;
        if has_checkpoint(path) && !resume {
            return Err(TrainError::usage(
                format!("run directory {} already holds a run", path.display()),
                "add --resume to continue it, or choose another --run-dir; --resume auto does either",
            ));
        }
        Ok(Self {
            path: path.to_path_buf(),
            _lock: lock,
        })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder for the ranks' logs.
    pub fn logs(&self) -> PathBuf {
        self.path.join("logs")
    }

    /// Writes a file of the run atomically, through a temporary file and a rename.
    ///
    /// *Errors*: the system's.
    pub fn write(&self, name: &str, contents: &str) -> Result<(), TrainError> {
        let path = self.path.join(name);
        replace(&path, contents.as_bytes()).map_err(TrainError::file("write", &path))
    }
}

fn cannot_create(path: &Path, source: std::io::Error) -> TrainError {
    TrainError::file("create run directory", path)(source)
}

/// Replaces the file at `path` atomically.
fn replace(path: &Path, contents: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut beside = tempfile::NamedTempFile::new_in(folder)?;
    beside.write_all(contents)?;
    beside.as_file().sync_all()?;
    beside.persist(path)?;
    Ok(())
}

/// The folder for checkpoints of the run in `path`.
pub fn checkpoints(path: &Path) -> PathBuf {
    path.join("checkpoints")
}

/// Whether the run in `path` has a checkpoint, whole or not.
pub fn has_checkpoint(path: &Path) -> bool {
    !paceline_checkpoint::list(&checkpoints(path)).is_empty()
}

/// Metrics as JSON lines and for TensorBoard; written by rank 0 alone.
pub struct Metrics {
    path: PathBuf,
    to: Lines,
    /// The last steps, whose lines are made together: in each step that would take several times as long, because code and data of the last line
    /// have left the caches.
    steps: Vec<StepRecord>,
    /// What a lost rank 0 had written after its last step, which this rank has still to write itself.
    written: Vec<(String, u64)>,
}

/// Where lines go.
enum Lines {
    Files(Files),
    /// On a rank that goes on if rank 0 is lost.
    Kept {
        /// The last ones, which rank 0 may not have written.
        lines: Vec<u8>,
        /// Whether another rank has become rank 0 since the last step.
        has_new_writer: bool,
    },
}

/// The files of rank 0.
struct Files {
    lines: BufWriter<File>,
    events: Events,
    flushed_at: Instant,
}

impl Files {
    fn add(&mut self, line: &[u8]) -> std::io::Result<()> {
        self.events.add(line);
        self.lines.write_all(line)
    }

    fn is_late(&self) -> bool {
        self.flushed_at.elapsed() >= FLUSH_EVERY
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.flushed_at = Instant::now();
        self.events.flush()?;
        self.lines.flush()
    }
}

impl Metrics {
    /// Opens the metrics of the run in `run`, drops the lines of steps after `resumed_step`, which will run again, and adds those that
    /// a lost rank 0 has left `unwritten`.
    ///
    /// *Errors*: the system's.
    pub fn open(
        run: &Path,
        resumed_step: Option<u64>,
        unwritten: &[u8],
    ) -> Result<Self, TrainError> {
        let path = run.join("metrics.jsonl");
        let file_error = |source| TrainError::file("open metrics", &path)(source);
        let kept = match (resumed_step, File::open(&path)) {
            (Some(step), Ok(file)) => kept_lines(BufReader::new(file), step),
            _ => Vec::new(),
        };
        let written: Vec<_> = kept.split(|byte| *byte == b'\n').map(key).collect();
        let unwritten = unwritten.split_inclusive(|byte| *byte == b'\n');
        let missing: Vec<_> = (unwritten.filter(|line| !written.contains(&key(line)))).collect();
        let kept = [&kept[..], &missing.concat()].concat();
        replace(&path, &kept).map_err(file_error)?;
        let file = OpenOptions::new()
            .append(true)
            .open(&path)
            .map_err(file_error)?;
        // The events of steps from which on something was missing are written again.
        let first_missing = missing.iter().filter_map(|line| Some(key(line)?.1)).min();
        let resumed_at = resumed_step.map_or(0, |step| step + 1);
        let from = first_missing.map_or(resumed_at, |step| step.min(resumed_at));
        let events = Events::create(run, from, &kept);
        Ok(Self {
            to: Lines::Files(Files {
                lines: BufWriter::new(file),
                events: events.map_err(TrainError::file("write TensorBoard events in", run))?,
                flushed_at: Instant::now(),
            }),
            path,
            steps: Vec::new(),
            written: Vec::new(),
        })
    }

    /// Writes nothing, but keeps the last lines for the case that this rank [becomes](Self::take_over) rank 0.
    pub fn understudy(run: &Path) -> Self {
        Self {
            path: run.join("metrics.jsonl"),
            to: Lines::Kept {
                lines: Vec::new(),
                has_new_writer: false,
            },
            steps: Vec::new(),
            written: Vec::new(),
        }
    }

    /// Another rank has become rank 0: it may be lost too before it has written what the last one had not.
    pub fn has_new_writer(&mut self) {
        if let Lines::Kept { has_new_writer, .. } = &mut self.to {
            *has_new_writer = true;
        }
    }

    /// Goes on in place of a lost rank 0 after `step` steps: drops a torn line, and adds those that it did not write.
    ///
    /// *Errors*: the system's.
    pub fn take_over(&mut self, step: u64) -> Result<(), TrainError> {
        self.settle()?;
        let Lines::Kept { lines, .. } = &mut self.to else {
            return Ok(());
        };
        let kept = std::mem::take(lines);
        let run = self.path.parent().unwrap_or(Path::new("."));
        let written = File::open(&self.path).map_err(|source| self.error(source))?;
        let written = kept_lines(BufReader::new(written), step);
        let written: Vec<_> = written.split(|byte| *byte == b'\n').map(key).collect();
        *self = Self::open(run, Some(step), &kept)?;
        let lines = written.into_iter().flatten();
        let of_step = lines.filter(|(kind, at)| kind != "step" && *at == step);
        self.written = of_step.collect();
        Ok(())
    }

    /// The last lines, on a rank that goes on or leaves its state if rank 0 is lost.
    pub fn unwritten(&self) -> String {
        let Lines::Kept { lines, .. } = &self.to else {
            return String::new();
        };
        let steps = self.steps.iter().filter_map(|step| line(step).ok());
        let lines = [lines.clone()].into_iter().chain(steps);
        String::from_utf8_lossy(&lines.collect::<Vec<_>>().concat()).into_owned()
    }

    /// Drops the lines of steps after `step`, which will run again.
    ///
    /// *Errors*: the system's.
    pub fn go_back(&mut self, step: u64) -> Result<(), TrainError> {
        match &mut self.to {
            Lines::Kept { lines, .. } => {
                lines.clear();
                self.steps.clear();
            }
            Lines::Files(_) => {
                self.flush()?;
                let run = self.path.parent().unwrap_or(Path::new("."));
                *self = Self::open(run, Some(step), &[])?;
            }
        }
        Ok(())
    }

    /// Adds the line of a step.
    ///
    /// *Errors*: the system's.
    pub(crate) fn write_step(&mut self, record: StepRecord) -> Result<(), TrainError> {
        let step = record.step;
        let is_late = match &mut self.to {
            Lines::Files(files) => files.is_late(),
            Lines::Kept {
                lines,
                has_new_writer,
            } => {
                // Rank 0 has taken part in this step, so it has handed over the lines before it.
                if step % HAND_OVER_EVERY == 1 && !std::mem::take(has_new_writer) {
                    lines.clear();
                    self.steps.clear();
                }
                false
            }
        };
        // Later steps have no such records.
        self.written.retain(|(_, of)| *of >= step);
        self.steps.push(record);
        if is_late {
            return self.flush();
        }
        match step.is_multiple_of(HAND_OVER_EVERY) {
            true => self.hand_over_lines(),
            false => Ok(()),
        }
    }

    /// Adds another line.
    ///
    /// *Errors*: the system's.
    pub fn write(&mut self, record: &impl Serialize) -> Result<(), TrainError> {
        self.settle()?;
        self.put(record)
    }

    /// Makes the lines of the last steps.
    fn settle(&mut self) -> Result<(), TrainError> {
        let steps = std::mem::take(&mut self.steps);
        steps.iter().try_for_each(|record| self.put(record))
    }

    fn put(&mut self, record: &impl Serialize) -> Result<(), TrainError> {
        let line = line(record).map_err(|error| self.error(error.into()))?;
        if !self.written.is_empty() && key(&line).is_some_and(|key| self.written.contains(&key)) {
            return Ok(());
        }
        let written = match &mut self.to {
            Lines::Files(files) => files.add(&line),
            Lines::Kept { lines, .. } => {
                lines.extend_from_slice(&line);
                Ok(())
            }
        };
        written.map_err(|source| self.error(source))
    }

    /// Hands all that is buffered to the system.
    ///
    /// *Errors*: the system's.
    pub fn flush(&mut self) -> Result<(), TrainError> {
        self.hand_over(Files::flush)
    }

    /// The same, if the last time is long ago.
    ///
    /// *Errors*: the system's.
    pub(crate) fn flush_if_late(&mut self) -> Result<(), TrainError> {
        match &self.to {
            Lines::Files(files) if files.is_late() => self.flush(),
            Lines::Files(_) | Lines::Kept { .. } => Ok(()),
        }
    }

    /// Hands lines to the system, so that they outlive this process. Their events may follow: the next rank 0 writes those that are missing.
    ///
    /// *Errors*: the system's.
    pub(crate) fn hand_over_lines(&mut self) -> Result<(), TrainError> {
        self.hand_over(|files| files.lines.flush())
    }

    fn hand_over(
        &mut self,
        flush: impl FnOnce(&mut Files) -> std::io::Result<()>,
    ) -> Result<(), TrainError> {
        if matches!(self.to, Lines::Files(_)) {
            self.settle()?;
        }
        let handed = match &mut self.to {
            Lines::Files(files) => flush(files),
            Lines::Kept { .. } => Ok(()),
        };
        handed.map_err(|source| self.error(source))
    }

    fn error(&self, source: std::io::Error) -> TrainError {
        TrainError::file("write metrics", &self.path)(source)
    }
}

impl Drop for Metrics {
    /// A job that fails has its last steps in the file, too.
    fn drop(&mut self) {
        if matches!(self.to, Lines::Files(_)) {
            // The failure is what is told.
            let _ = self.settle();
        }
    }
}

fn line(record: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(record)?;
    line.push(b'\n');
    Ok(line)
}

/// Kind and step of a line.
pub(crate) fn key(line: &[u8]) -> Option<(String, u64)> {
    let record: serde_json::Value = serde_json::from_slice(line).ok()?;
    let kind = match record.get("kind")?.as_str()? {
        // Several losses may come in one step.
        "ranks" => String::from_utf8_lossy(line.trim_ascii_end()).into_owned(),
        kind => kind.to_owned(),
    };
    Some((kind, record.get("step")?.as_u64()?))
}

/// Whole lines whose `step` is at most `step`; a line torn by a crash is dropped.
fn kept_lines(lines: impl BufRead, step: u64) -> Vec<u8> {
    let mut kept = Vec::new();
    for line in lines.lines().map_while(Result::ok) {
        let record: Option<serde_json::Value> = serde_json::from_str(&line).ok();
        let at = record.and_then(|record| record.get("step")?.as_u64());
        if at.is_some_and(|at| at <= step) {
            kept.extend_from_slice(line.as_bytes());
            kept.push(b'\n');
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn a_second_job_is_kept_out_while_the_first_one_runs() {
        let folder = tempfile::tempdir().expect("a folder");
        let first = RunDir::open(folder.path(), false, None).expect("free");
        let error = RunDir::open(folder.path(), false, None).expect_err("in use");
        assert!(
            error.to_string().contains("in use by another job"),
            "{error}"
        );
        drop(first);
        RunDir::open(folder.path(), false, None).expect("free again");
    }

    #[test]
    fn jobs_that_begin_at_once_have_directories_of_their_own() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("runs/digits-20261121-113000");
        let start = Barrier::new(8);
        let mut made: Vec<PathBuf> = std::thread::scope(|scope| {
            let create = || {
                start.wait();
                RunDir::create(&path).expect("a directory of its own")
            };
            let jobs: Vec<_> = (0..8).map(|_| scope.spawn(create)).collect();
            // All runs are held until the last one exists.
            let runs = jobs.into_iter().map(|job| job.join().expect("no panic"));
            let runs: Vec<RunDir> = runs.collect();
            runs.iter().map(|run| run.path().to_owned()).collect()
        });
        made.sort();
        made.dedup();
        assert_eq!(made.len(), 8, "{made:?}");
        assert_eq!(made[0], path);
        assert!(made[1].ends_with("digits-20261121-113000-2"));
    }

    #[test]
    fn a_directory_with_a_run_needs_resume() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir_all(folder.path().join("checkpoints/step-0000000001"))
            .expect("a checkpoint");
        let error = RunDir::open(folder.path(), false, None).expect_err("a run");
        assert!(error.to_string().ends_with(" already holds a run"));
        RunDir::open(folder.path(), true, None).expect("resumed");
    }

    #[test]
    fn metrics_after_the_resumed_step_and_torn_lines_are_dropped() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("metrics.jsonl");
        fs::write(&path, "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"st").expect("write");
        let mut metrics = Metrics::open(folder.path(), Some(2), &[]).expect("open");
        metrics
            .write(&serde_json::json!({"step": 3, "again": true}))
            .expect("write");
        metrics.flush().expect("flush");
        assert_eq!(
            fs::read_to_string(&path).expect("read"),
            "{\"step\":1}\n{\"step\":2}\n{\"again\":true,\"step\":3}\n"
        );
    }

    #[test]
    fn a_rank_that_takes_over_adds_the_lines_that_the_lost_one_did_not_write() {
        let folder = tempfile::tempdir().expect("a folder");
        let epoch = serde_json::json!({"kind": "epoch", "step": 2});
        let mut lost = Metrics::open(folder.path(), None, &[]).expect("open");
        let mut understudy = Metrics::understudy(folder.path());
        for step in [1, 2] {
            lost.write_step(StepRecord::of(step, 1.0)).expect("write");
            understudy
                .write_step(StepRecord::of(step, 1.0))
                .expect("kept");
        }
        lost.flush().expect("flush");
        understudy.write(&epoch).expect("kept");
        let path = folder.path().join("metrics.jsonl");
        let mut text = fs::read_to_string(&path).expect("read");
        text.push_str("{\"kind\":\"epoch\",\"st");
        fs::write(&path, text).expect("write");
        // The next one is lost before it has written any line.
        understudy.has_new_writer();
        understudy.write_step(StepRecord::of(3, 1.0)).expect("kept");
        understudy.take_over(3).expect("take over");
        understudy
            .write_step(StepRecord::of(4, 1.0))
            .expect("write");
        understudy.flush().expect("flush");
        let text = fs::read_to_string(&path).expect("read");
        let keys: Vec<_> = text.lines().map(|line| key(line.as_bytes())).collect();
        let expected = [
            ("step", 1),
            ("step", 2),
            ("epoch", 2),
            ("step", 3),
            ("step", 4),
        ];
        assert_eq!(
            keys,
            expected.map(|(kind, step)| Some((kind.to_string(), step)))
        );
    }

    #[test]
    fn a_record_that_the_lost_rank_wrote_first_is_not_written_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("metrics.jsonl");
        let epoch = serde_json::json!({"kind": "epoch", "step": 1});
        let mut lost = Metrics::open(folder.path(), None, &[]).expect("open");
        let mut understudy = Metrics::understudy(folder.path());
        understudy.write_step(StepRecord::of(1, 1.0)).expect("kept");
        lost.write_step(StepRecord::of(1, 1.0)).expect("write");
        lost.write(&epoch).expect("write");
        lost.flush().expect("flush");
        understudy.take_over(1).expect("take over");
        understudy.write(&epoch).expect("write");
        understudy
            .write_step(StepRecord::of(2, 1.0))
            .expect("write");
        understudy.flush().expect("flush");
        let text = fs::read_to_string(&path).expect("read");
        let kinds: Vec<_> = text
            .lines()
            .filter_map(|line| key(line.as_bytes()))
            .collect();
        let expected = [("step", 1), ("epoch", 1), ("step", 2)];
        assert_eq!(kinds, expected.map(|(kind, step)| (kind.to_string(), step)));
    }

    #[test]
    fn a_fresh_run_starts_with_empty_metrics() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("metrics.jsonl"), "{\"step\":1}\n").expect("write");
        Metrics::open(folder.path(), None, &[]).expect("open");
        assert_eq!(
            fs::read_to_string(folder.path().join("metrics.jsonl")).expect("read"),
            ""
        );
    }
}
