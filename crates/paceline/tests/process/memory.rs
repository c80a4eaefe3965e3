//! Checkpoints in memory: ranks that are started again go on from them in every layout, and they end with the job.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

use super::support::{
    LIMIT, PACELINE, Running, checkpoints, command, free_port, hash_of, metrics, paceline, start,
    steps, text_folder,
};

/// 40 steps in one epoch, with a file only at its end.
const JOB: &str = "train --task lm --data text.txt --layers 2 --heads 2 --width 8 --context 16 --global-batch 4 --dropout 0.2 \
                   --shards 4 --epochs 1 --threads-per-rank 1 --usage off";
const IN_MEMORY: &str = "--memory-checkpoint 3 --max-restarts 2";

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < until, "{what}: not within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until a file has not grown for a while.
fn rests(path: &Path) {
    let length = || std::fs::metadata(path).map_or(0, |file| file.len());
    let last = Cell::new((length(), Instant::now()));
    wait_until("no more steps", || {
        let (before, since) = last.get();
        let now = length();
        if now != before {
            last.set((now, Instant::now()));
        }
        now == before && since.elapsed() > Duration::from_millis(200)
    });
}

/// 160 steps, so that a rank can be stopped before the file at the end.
fn long_text_folder() -> TempDir {
    let folder = text_folder();
    let path = folder.path().join("text.txt");
    let text = std::fs::read_to_string(&path).expect("a text");
    std::fs::write(&path, text.repeat(4)).expect("a longer text");
    folder
}

/// Waits for a copy in the folder of this launcher's job, and returns the folder.
fn has_copy(launcher: &Running) -> PathBuf {
    let folders = |path: &Path| {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let part = format!("-{}-", launcher.pid().as_raw_nonzero());
    let find = || {
        let mut found = folders(Path::new("/dev/shm")).into_iter();
        let folder = found.find(|path| path.to_string_lossy().contains(&part))?;
        let mut copies = folders(&folder).into_iter();
        copies.find(|copy| copy.to_string_lossy().contains("/step-"))?;
        Some(folder)
    };
    wait_until("a copy in memory", || find().is_some());
    find().expect("it was there")
}

#[test]
fn every_layout_goes_on_from_memory_with_the_same_bits() {
    let folder = long_text_folder();
    let whole = [
        hash_of(folder.path(), &format!("{JOB} --nproc-per-node 1")),
        hash_of(folder.path(), &format!("{JOB} --nproc-per-node 1 --tp 2")),
    ];
    for (layout, lost, hash) in [
        ("--nproc-per-node 3 --zero 3", &[1][..], &whole[0]),
        // Both replicas of a stage: the others do not have all of the state.
        (
            "--nproc-per-node 4 --pp 2 --micro-batches 1",
            &[0, 2],
            &whole[0],
        ),
        ("--nproc-per-node 2 --tp 2", &[1], &whole[1]),
        ("--nproc-per-node 2 --recovery restart", &[0], &whole[0]),
    ] {
        let run = tempfile::tempdir_in(&folder).expect("a folder");
        let run = run.path().join("run").display().to_string();
        let line = format!("{JOB} {IN_MEMORY} --run-dir {run} {layout}");
        let job = start(folder.path(), &line);
        let copies = has_copy(&job);
        assert!(checkpoints(Path::new(&run)).is_empty(), "{layout}: a file");
        let lost: Vec<_> = lost.iter().map(|rank| job.rank(*rank)).collect();
        for signal in [Signal::STOP, Signal::KILL] {
            for pid in &lost {
                kill_process(*pid, signal).expect("it runs");
            }
        }
        let ended = job.ended(LIMIT);
        ended.check(0, &["SIGKILL", "restart 1 of 2"]);
        assert_eq!(ended.hash(), hash, "{layout}");
        let resumed = ended.out.lines().find(|line| line.starts_with("resumed"));
        let resumed = resumed.unwrap_or_else(|| panic!("{layout}: {}", ended.out));
        assert!(resumed.ends_with(", from memory"), "{layout}: {resumed}");
        assert!(!copies.exists(), "the job's folder is gone");
        let told = paceline(folder.path(), &format!("ledger verify {run}"));
        assert!(told.is_well().out.contains("exactly once"), "{}", told.out);
    }
}

#[test]
fn split_layouts_go_on_from_what_the_surviving_ranks_had_in_memory() {
    let folder = long_text_folder();
    let whole = [
        hash_of(folder.path(), &format!("{JOB} --nproc-per-node 1")),
        hash_of(folder.path(), &format!("{JOB} --nproc-per-node 1 --tp 2")),
    ];
    for (layout, lost, hash) in [
        ("--pp 2 --micro-batches 1", 0, &whole[0]),
        ("--tp 2", 3, &whole[1]),
    ] {
        let run = tempfile::tempdir_in(&folder).expect("a folder");
        let run = run.path().join("run").display().to_string();
        let line = format!("{JOB} --max-restarts 1 --run-dir {run} --nproc-per-node 4 {layout}");
        let job = start(folder.path(), &line);
        let path = Path::new(&run).join("metrics.jsonl");
        let has_lines = || std::fs::metadata(&path).is_ok_and(|file| file.len() > 0);
        wait_until("a step", has_lines);
        // The others come to a stand as far as they get without it; they are not told until it is killed.
        kill_process(job.rank(lost), Signal::STOP).expect("it runs");
        rests(&path);
        kill_process(job.rank(lost), Signal::KILL).expect("it is there");
        let ended = job.ended(LIMIT);
        ended.check(0, &["SIGKILL", "restart 1 of 1"]);
        assert_eq!(ended.hash(), hash, "{layout}");
        let resumed = ended.out.lines().find(|line| line.starts_with("resumed"));
        let resumed = resumed.unwrap_or_else(|| panic!("{layout}: {}", ended.out));
        let source = ", from the memory of the ranks that were left";
        assert!(resumed.ends_with(source), "{layout}: {resumed}");
        let steps = steps(&metrics(Path::new(&run)), "step");
        let all = 1..=steps.len() as u64;
        assert_eq!(steps, all.collect::<Vec<_>>(), "{layout}: the metrics");
        let told = paceline(folder.path(), &format!("ledger verify {run}"));
        assert!(told.is_well().out.contains("exactly once"), "{}", told.out);
    }
}

#[test]
fn nothing_stays_in_memory_of_a_job_whose_launcher_is_killed() {
    let folder = text_folder();
    let job = start(
        folder.path(),
        &format!("{JOB} {IN_MEMORY} --epochs 100 --nproc-per-node 2").replace("--epochs 1 ", ""),
    );
    let copies = has_copy(&job);
    job.signal(Signal::KILL);
    assert_eq!(job.ended(LIMIT).code, None);
    wait_until("no copy", || !copies.exists());
}

#[test]
fn a_lost_node_with_rank_0_comes_back_from_the_memory_of_another() {
    let folders = [long_text_folder(), long_text_folder()];
    let whole = hash_of(folders[0].path(), &format!("{JOB} --nproc-per-node 1"));
    let port = free_port();
    let node = |place: usize| {
        // Hosts of their own: the second one sees no file of the first.
        let line = format!(
            "run --nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-conf last_call_timeout=30,lease=2 \
             --nproc-per-node 2 {PACELINE} {JOB} --run-dir run --memory-checkpoint 3 --zero 1"
        );
        let mut command = command(folders[place].path(), PACELINE, line.split_whitespace());
        command
            .env("PACELINE_JOB_TOKEN", "5e".repeat(32))
            .env("PACELINE_HOST_ID", format!("host-{place}"));
        Running::start(command)
    };
    let first = node(0);
    first.has_complained("waiting: ");
    let second = node(1);
    has_copy(&second);
    first.signal(Signal::KILL);
    drop(first);
    let ended = second.ended(LIMIT);
    ended.check(0, &[" with 1 node"]);
    assert_eq!(ended.hash(), whole);
    assert!(ended.out.contains(", from memory\n"), "{}", ended.out);
}
