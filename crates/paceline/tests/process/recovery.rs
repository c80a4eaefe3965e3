//! Ranks are lost, the others go on and admit replacements, and the weights end with the same bits.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Signal, kill_process, pidfd_getfd, pidfd_open,
};
use tempfile::tempdir;

use super::support::{
    LIMIT, PACELINE, Running, checkpoints, example, hash_of, in_time, metrics, paceline, start,
    steps,
};

/// 1437 samples in batches of 16: 90 steps an epoch. The number of epochs follows.
const JOB: &str = "--model tiny --global-batch 16 --shards 8 --epochs";
const EPOCHS: u64 = 3;
/// Replicas on the CPU recover live without being asked to.
const LIVE: &str = "--nproc-per-node 4";
const STEPS: u64 = 270;
/// Has the job run for long enough that replacements join, with the same steps.
const LONG: &str = "--evaluate-every 1";

fn undisturbed(folder: &Path) -> String {
    hash_after(folder, EPOCHS)
}

/// The hash of a job of so many epochs without a loss.
fn hash_after(folder: &Path, epochs: u64) -> String {
    let line = format!("train --run-dir whole {JOB} {epochs} --nproc-per-node 1");
    hash_of(folder, &line)
}

/// Starts the job in `run`, and waits until it trains.
fn training(folder: &Path, more: &str) -> Running {
    let line = format!("train --run-dir run {JOB} {EPOCHS} {LIVE} {more}");
    let job = start(folder, &line);
    job.has_printed("epoch 1/3");
    job
}

#[track_caller]
fn lose(job: &Running, ranks: &[usize], signal: Signal) {
    assert!(job.hits(ranks, signal), "the ranks run");
}

/// The job has ended well with these weights, and has a record of each step.
#[track_caller]
fn assert_whole(folder: &Path, job: Running, says: &[&str], hash: &str, case: &str) {
    job.ended(LIMIT).check(0, says);
    assert_recorded(folder, EPOCHS, hash, case);
}

#[track_caller]
fn assert_recorded(folder: &Path, epochs: u64, hash: &str, case: &str) {
    let records = metrics(&folder.join("run"));
    let all: Vec<u64> = (1..=90 * epochs).collect();
    assert_eq!(steps(&records, "step"), all, "{case}");
    let ends: Vec<u64> = (1..=epochs).map(|epoch| 90 * epoch).collect();
    assert_eq!(steps(&records, "epoch"), ends, "{case}");
    let end = records.last().map(|record| &record["weights_sha256"]);
    assert_eq!(end, Some(&hash.into()), "{case}");
    assert_proved(folder, epochs);
}

/// Every sample of every epoch was used once.
#[track_caller]
fn assert_proved(folder: &Path, epochs: u64) {
    let proof = format!("epochs    1 to {epochs}: each of 1437 samples was used exactly once");
    let told = paceline(folder, "ledger verify run");
    assert!(told.is_well().out.contains(&proof), "{}", told.out);
}

#[test]
fn the_ranks_that_are_left_end_with_the_same_bits() {
    let folder = tempdir().expect("a folder");
    let hash = undisturbed(folder.path());
    for (transport, lost, left) in [
        ("shm", &[2][..], "3 ranks go on"),
        ("shm", &[0, 1, 2], "1 rank goes on"),
        ("tcp", &[0], "3 ranks go on"),
        ("tcp", &[0, 3], "2 ranks go on"),
    ] {
        let folder = tempdir().expect("a folder");
        let job = training(folder.path(), &format!("--transport {transport}"));
        lose(&job, lost, Signal::KILL);
        let case = format!("{transport} {lost:?}");
        assert_whole(folder.path(), job, &["SIGKILL", left], &hash, &case);
    }
}

#[test]
fn a_stopped_rank_is_given_up() {
    let folder = tempdir().expect("a folder");
    let hash = undisturbed(folder.path());
    let job = training(folder.path(), "--timeout-seconds 6");
    lose(&job, &[1], Signal::STOP);
    assert_whole(folder.path(), job, &["3 ranks go on"], &hash, "stopped");
}

#[test]
fn the_first_rank_may_be_lost_again_and_again() {
    let folder = tempdir().expect("a folder");
    let hash = undisturbed(folder.path());
    let job = training(folder.path(), "");
    lose(&job, &[0], Signal::KILL);
    // The console shows the new rank 0.
    job.has_printed("epoch 2/3");
    lose(&job, &[1], Signal::KILL);
    let says = ["3 ranks go on", "2 ranks go on"];
    assert_whole(folder.path(), job, &says, &hash, "twice");
}

#[test]
fn ranks_may_be_lost_at_any_moment() {
    let folder = tempdir().expect("a folder");
    let hash = undisturbed(folder.path());
    // After each step the ranks evaluate and save too.
    for (lost, micros) in [(3, 0), (0, 13_000), (1, 31_000)] {
        let folder = tempdir().expect("a folder");
        let job = training(folder.path(), "--evaluate-every 1 --save-every 1");
        std::thread::sleep(Duration::from_micros(micros));
        lose(&job, &[lost], Signal::KILL);
        let case = format!("rank {lost} after {micros} us");
        assert_whole(folder.path(), job, &["3 ranks go on"], &hash, &case);
    }
}

#[test]
fn the_first_rank_may_be_lost_after_the_last_step() {
    let folder = tempdir().expect("a folder");
    let hash = undisturbed(folder.path());
    for micros in [0, 1_000, 3_000] {
        let folder = tempdir().expect("a folder");
        let job = training(folder.path(), "");
        let first = job.rank(0);
        job.has_printed("epoch 3/3");
        std::thread::sleep(Duration::from_micros(micros));
        // It may have ended.
        let _ = kill_process(first, Signal::KILL);
        let case = format!("after {micros} us");
        assert_whole(folder.path(), job, &[], &hash, &case);
    }
}

/// The file with this end that the process has open, which stays open here when the process is gone.
fn kept_open(pid: Pid, end: &str) -> OwnedFd {
    let files = fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())).expect("it runs");
    let of_end = |path: &Path| fs::read_link(path).is_ok_and(|file| file.ends_with(end));
    let mut paths = files.flatten().map(|entry| entry.path());
    let path = paths.find(|path| of_end(path)).expect("it has the file");
    let name = path.file_name().expect("a number").to_string_lossy();
    let process = pidfd_open(pid, PidfdFlags::empty()).expect("it runs");
    let number = name.parse().expect("a number");
    pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).expect("a child's file")
}

#[test]
fn the_next_first_rank_trains_on_until_the_lost_one_has_left_its_lock() {
    let folder = tempdir().expect("a folder");
    let hash = undisturbed(folder.path());
    let job = training(folder.path(), "--save-every 20");
    // As a file server does for a machine that is cut off.
    let lock = kept_open(job.rank(0), "checkpoints/.lock");
    lose(&job, &[0], Signal::KILL);
    job.has_complained_of("is locked by a lost process of this job", 1);
    let saved = || checkpoints(&folder.path().join("run"));
    let before = saved();
    job.has_printed("epoch 2/3");
    assert_eq!(saved(), before, "nothing is written without the lock");
    drop(lock);
    assert_whole(folder.path(), job, &["3 ranks go on"], &hash, "locked");
}

#[test]
fn a_job_that_lost_all_ranks_goes_on_from_its_newest_checkpoint_by_itself() {
    let folder = tempdir().expect("a folder");
    let hash = undisturbed(folder.path());
    for (signal, more) in [
        (Signal::KILL, "--transport tcp"),
        (Signal::STOP, "--timeout-seconds 6"),
    ] {
        let folder = tempdir().expect("a folder");
        let more = format!("--save-every 20 --max-restarts 8 {more}");
        let job = training(folder.path(), &more);
        lose(&job, &[0, 1, 2, 3], signal);
        let case = format!("{signal:?}");
        assert_whole(folder.path(), job, &["; restart "], &hash, &case);
    }
}

/// What the launcher says of a replacement that the others have admitted.
const JOINS: &str = " joins as a replacement; ";

/// Disturbs the job of this line, which ends with the bits of an undisturbed one. `disturb` says whether it came to its end before the job
/// did; if not, a longer job is tried.
#[track_caller]
fn assert_replaced(line: &str, says: &[&str], disturb: impl Fn(&Running) -> bool) {
    let mut epochs = 0;
    in_time(|folder| {
        epochs += EPOCHS;
        let job = start(folder, &format!("{line} {JOB} {epochs}"));
        let is_disturbed = disturb(&job);
        let ended = job.ended(LIMIT);
        ended.check(0, &[]);
        if !is_disturbed {
            return Err(ended);
        }
        ended.check(0, says);
        assert_recorded(folder, epochs, &hash_after(folder, epochs), line);
        Ok(())
    });
}

#[test]
fn lost_ranks_are_replaced_from_the_memory_of_the_others() {
    let cases = [("shm", &[0, 1, 2][..]), ("tcp", &[0, 3])];
    for (transport, lost) in cases {
        let line =
            format!("train --run-dir run {LIVE} --transport {transport} --max-restarts 3 {LONG}");
        assert_replaced(&line, &["SIGKILL", "; 4 ranks go on"], |job| {
            job.has_printed("epoch ");
            job.hits(lost, Signal::KILL) && job.complains_of(JOINS, lost.len())
        });
    }
}

#[test]
fn ranks_under_another_launcher_are_replaced_in_a_run_directory_that_is_named() {
    let run = "run --nproc-per-node 4 --max-restarts 2";
    let line = format!("{run} {PACELINE} train --run-dir run {LONG}");
    assert_replaced(&line, &["; 4 ranks go on"], |job| {
        job.has_printed("[rank 0] epoch ");
        job.hits(&[0, 2], Signal::KILL) && job.complains_of(JOINS, 2)
    });
}

#[test]
fn replacements_are_lost_too_until_no_restart_is_left() {
    let line = format!("train --run-dir run {LIVE} --max-restarts 2 {LONG}");
    let says = "; 2 ranks go on, no restart is left for a replacement";
    assert_replaced(&line, &[says], |job| {
        job.has_printed("epoch ");
        let lose = |ranks: &[usize]| job.hits(ranks, Signal::KILL);
        (1..=2).all(|joined| lose(&[1]) && job.complains_of(JOINS, joined))
            // Rank 0 too: the ones that were replaced go on.
            && lose(&[0, 1])
            && job.complains_of(says, 1)
    });
}

#[test]
fn a_run_that_lost_its_first_rank_resumes_from_the_checkpoints_of_the_next() {
    let hash = undisturbed(tempdir().expect("a folder").path());
    let (folder, _) = in_time(|folder| {
        let job = training(folder, "--save-every 1000");
        lose(&job, &[0], Signal::KILL);
        job.has_complained("rank 0 (");
        job.signal(Signal::INT);
        job.ended(LIMIT).ended_with(Some(130))
    });
    let resumed = paceline(
        folder.path(),
        "train --resume run --nproc-per-node 2 --recovery none",
    );
    assert_eq!(resumed.is_well().hash(), hash);
    let records = metrics(&folder.path().join("run"));
    assert_eq!(steps(&records, "step"), (1..=STEPS).collect::<Vec<_>>());
    assert_proved(folder.path(), EPOCHS);
}

#[test]
fn layouts_that_cannot_recover_are_refused() {
    let folder = tempdir().expect("a folder");
    for other in ["--zero 1", "--comm-hook bf16"] {
        let line = format!("train --nproc-per-node 2 --recovery live {other}");
        let ended = paceline(folder.path(), &line);
        ended.check(
            2,
            &[
                "`recovery` is live",
                "does not go with",
                "hint: use --recovery restart",
            ],
        );
    }
}

#[test]
fn a_program_of_ones_own_survives_kills_with_the_same_bits() {
    let folder = tempdir().expect("a folder");
    let program = example("recover").display().to_string();
    let hash = paceline(folder.path(), &format!("run --nproc-per-node 1 {program}"));
    let hash = hash.is_well().hash().to_owned();
    let line = format!("run --nproc-per-node 4 --max-restarts 2 {program}");
    let (folder, ended) = in_time(|folder| {
        let job = start(folder, &line);
        job.has_printed("[rank 0] epoch 3 ");
        let cases = [(1, 2), (2, 0)];
        let replaced = cases.into_iter().all(|(joined, lost)| {
            job.hits(&[lost], Signal::KILL) && job.complains_of(JOINS, joined)
        });
        let ended = job.ended(LIMIT);
        ended.check(0, &[]);
        match replaced {
            true => Ok(ended),
            false => Err(ended),
        }
    });
    ended.check(0, &["; 3 ranks go on", "; 4 ranks go on"]);
    let hashes = ended.out.lines().filter(|line| line.contains("sha256"));
    let mut others = hashes.filter(|line| !line.ends_with(&hash));
    assert_eq!(
        (ended.hash(), others.next()),
        (&*hash, None),
        "{}",
        ended.out
    );
    let told = paceline(folder.path(), "ledger verify runs/recover");
    let proof = "epochs    1 to 80: each of 1024 samples was used exactly once";
    assert!(told.is_well().out.contains(proof), "{}", told.out);
}
