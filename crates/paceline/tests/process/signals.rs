//! Ctrl-C, SIGTERM and SIGUSR1 save and stop, a second signal stops at once, and a killed launcher leaves nothing behind.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
use tempfile::tempdir;

use super::support::{LIMIT, PACELINE, checkpoints, command, paceline, probe, start};

/// Long enough that it never ends within a test.
const JOB: &str = "train --run-dir run --model tiny --shards 4 --global-batch 16 --epochs 1000";

/// A process that waits for nothing ends within this time, even on a busy machine; one that waits for a rank takes a minute.
const AT_ONCE: Duration = Duration::from_secs(15);

fn saves_and_stops(signal: Signal, name: &str) {
    let folder = tempdir().expect("a folder");
    let job = start(folder.path(), &format!("{JOB} --nproc-per-node 2"));
    job.has_printed("epoch    1/1000");
    job.signal(signal);
    let ended = job.ended(LIMIT);
    ended.check(
        128 + signal.as_raw(),
        &[&format!("{name}: stopping after this step")],
    );
    let stopped = ended.out.lines().last().expect("a line");
    assert!(
        stopped.starts_with(&format!("stopped by {name} after step "))
            && stopped.contains("continue with --resume run"),
        "{stopped}"
    );
    // Printed once, by rank 0 and not by the launcher.
    assert!(!ended.err.contains("after step"), "{}", ended.err);

    let words: Vec<&str> = stopped.split_whitespace().collect();
    let step: u64 = words[5].parse().unwrap_or_else(|_| panic!("{stopped}"));
    let newest = checkpoints(&folder.path().join("run"))
        .pop()
        .expect("a checkpoint");
    assert!(
        newest.ends_with(format!("step-{step:010}")),
        "{stopped}, but {}",
        newest.display()
    );

    let again = start(folder.path(), "train --resume run --nproc-per-node 3");
    again.has_printed(&format!("resumed   after step {step}, from"));
    again.has_printed("epoch");
}

#[test]
fn ctrl_c_saves_at_the_next_step_and_the_run_can_go_on() {
    saves_and_stops(Signal::INT, "SIGINT");
}

#[test]
fn sigterm_saves_at_the_next_step_and_the_run_can_go_on() {
    saves_and_stops(Signal::TERM, "SIGTERM");
}

#[test]
fn a_schedulers_notice_saves_at_the_next_step_and_the_run_can_go_on() {
    saves_and_stops(Signal::USR1, "SIGUSR1");
}

#[test]
fn a_second_signal_stops_at_once() {
    let folder = tempdir().expect("a folder");
    let job = start(folder.path(), &format!("{JOB} --nproc-per-node 2"));
    job.has_printed("epoch    1/1000");
    // With one rank stopped, the others cannot finish their step, so the first signal has to wait.
    rustix::process::kill_process(job.rank(1), Signal::STOP).expect("it runs");
    // Two pending signals of one kind merge into one, and the kernel chooses the order of two kinds.
    job.signal(Signal::INT);
    job.signal(Signal::TERM);
    let asked = Instant::now();
    let ended = job.ended(LIMIT);
    assert!([Some(130), Some(143)].contains(&ended.code), "{ended:?}");
    assert!(asked.elapsed() < AT_ONCE, "{:?}", asked.elapsed());
    paceline(
        folder.path(),
        "train --resume run --nproc-per-node 1 --explain",
    )
    .check(0, &[]);
}

#[test]
fn a_signal_to_a_rank_alone_stops_all_ranks_in_the_same_step() {
    for (signal, name) in [(Signal::TERM, "SIGTERM"), (Signal::USR1, "SIGUSR1")] {
        let folder = tempdir().expect("a folder");
        let job = start(folder.path(), &format!("{JOB} --nproc-per-node 3"));
        job.has_printed("epoch    1/1000");
        rustix::process::kill_process(job.rank(2), signal).expect("it runs");
        let ended = job.ended(LIMIT);
        ended.check(128 + signal.as_raw(), &[]);
        assert!(!ended.err.contains("error"), "{}", ended.err);
        let stopped = format!("stopped by {name} after step ");
        assert!(ended.out.contains(&stopped), "{}", ended.out);
    }
}

/// As when a connection over SSH breaks: nothing can be printed any more, and the launcher gets SIGHUP.
#[test]
fn a_terminal_that_is_gone_saves_and_stops() {
    let folder = tempdir().expect("a folder");
    let terminal =
        openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a terminal");
    unlockpt(&terminal).expect("a terminal");
    let name = ptsname(&terminal, Vec::new()).expect("a terminal");
    let end = || {
        let name = Path::new(OsStr::from_bytes(name.as_bytes()));
        File::options()
            .read(true)
            .write(true)
            .open(name)
            .expect("its other end")
    };
    let line = format!("--ctty {} {JOB} --nproc-per-node 2", PACELINE);
    let mut command = command(folder.path(), "setsid", line.split_whitespace());
    let mut job = command
        .stdin(end())
        .stdout(end())
        .stderr(end())
        .spawn()
        .expect("util-linux");
    drop(command); // it holds the other end
    let mut shown = BufReader::new(File::from(terminal)).lines();
    assert!(shown.any(|line| line.is_ok_and(|line| line.contains("epoch    1/1000"))));
    drop(shown);
    let asked = Instant::now();
    let status = loop {
        match job.try_wait().expect("our child") {
            Some(status) => break status,
            None if asked.elapsed() > LIMIT => panic!("it does not stop: {:?}", job.kill()),
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    assert_eq!(status.code(), Some(128 + Signal::HUP.as_raw()));
    let metrics = std::fs::read_to_string(folder.path().join("run/metrics.jsonl")).expect("a file");
    let last = metrics.lines().last().expect("a record");
    assert!(
        last.contains(r#""kind":"stopped""#) && last.contains("SIGHUP"),
        "{last}"
    );
}

#[test]
fn a_killed_launcher_leaves_nothing() {
    let folder = tempdir().expect("a folder");
    let job = start(folder.path(), &format!("{JOB} --nproc-per-node 4"));
    job.has_printed("epoch    1/1000");
    job.signal(Signal::KILL);
    // Every command checks that all processes of the job are gone.
    assert_eq!(job.ended(LIMIT).code, None);
}

#[test]
fn a_killed_launcher_leaves_no_stopped_rank_either() {
    let folder = tempdir().expect("a folder");
    let probe = probe("fault");
    let line = format!("run --nproc-per-node 2 {} --fault stopped --dir .", probe);
    let job = start(folder.path(), &line);
    job.has_printed("[rank 1] meets its fault");
    job.signal(Signal::KILL);
    assert_eq!(job.ended(LIMIT).code, None);
}
