//! Restarts on one machine: the budget, the time they take, and what the new ranks are told.

mod support;

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use paceline_launch::{RankEvent, RankWatch};
use support::launcher::{Launcher, PROMPTLY};
use support::{PROBE, job, lines, run, turn};

#[test]
fn a_failed_rank_starts_the_whole_job_again_within_the_budget() {
    let logs = tempfile::tempdir().unwrap();
    let said = logs.path().join("said").display().to_string();
    // The one that fails lets the other one speak first.
    let script = format!(
        "echo rank $RANK round $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS
        [ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0
        if [ $RANK = 0 ]; then touch {said}$TORCHELASTIC_RESTART_COUNT; exec sleep 60; fi
        until [ -e {said}$TORCHELASTIC_RESTART_COUNT ]; do sleep 0.02; done; exit 7"
    );
    let mut job = job(&script, 2);
    job.max_restarts = 3;
    job.log_dir = Some(logs.path().into());
    let outcome = run(job);
    assert!(outcome.failure.is_none(), "{:?}", outcome.failure);
    assert_eq!((outcome.restarts, outcome.exit_code()), (2, 0));
    for rank in 0..2 {
        for round in 0..3 {
            let log = logs
                .path()
                .join(format!("attempt_{round}/{rank}/stdout.log"));
            assert_eq!(lines(&log), [format!("rank {rank} round {round} of 3")]);
        }
    }
}

#[test]
fn whoever_watches_is_told_of_every_process_that_begins_and_ends() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let to = Arc::clone(&told);
    let mut job = job("[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 5", 2);
    job.max_restarts = 1;
    job.watch = Some(RankWatch::new(move |event| to.lock().unwrap().push(event)));
    assert_eq!(run(job).exit_code(), 0);
    let told = told.lock().unwrap();
    let of = |rank, is_running| {
        let events = told
            .iter()
            .filter(move |event: &&RankEvent| (event.rank, event.is_running) == (rank, is_running));
        events.map(|event| event.pid).collect::<Vec<_>>()
    };
    for rank in 0..2 {
        let (begun, ended) = (of(rank, true), of(rank, false));
        assert_eq!(begun.len(), 2, "{told:?}");
        assert_ne!(begun[0], begun[1], "{told:?}");
        assert_eq!(begun, ended);
    }
}

#[test]
fn a_rank_that_says_its_configuration_is_wrong_is_not_started_again() {
    let outcome = |words: &str| {
        let mut job = job(&format!("{PROBE} worker {words} exit=1"), 1);
        job.max_restarts = 2;
        run(job)
    };
    let wrong = outcome("misconfigured=1");
    assert_eq!((wrong.restarts, wrong.exit_code()), (0, 1));
    let says = "a setting of its program is wrong, so the job is not started again";
    assert!(
        wrong.notes.iter().any(|note| note.contains(says)),
        "{:?}",
        wrong.notes
    );
    let right = outcome("misconfigured=1 misconfigured=0");
    assert_eq!((right.restarts, right.exit_code()), (2, 1));
}

#[test]
fn the_last_failure_is_reported_when_the_budget_is_spent() {
    let mut job = job(
        "echo round $TORCHELASTIC_RESTART_COUNT >&2; exit $((5 + RANK))",
        1,
    );
    job.max_restarts = 2;
    let outcome = run(job);
    let failure = outcome.failure.as_ref().expect("it fails each time");
    assert_eq!((outcome.restarts, outcome.exit_code()), (2, 5));
    assert_eq!(failure.last_lines, ["round 2"]);
}

#[test]
fn the_time_of_a_failure_counts_from_its_own_round() {
    let logs = tempfile::tempdir().unwrap();
    let mut job = job("[ $TORCHELASTIC_RESTART_COUNT = 1 ] || sleep 1; exit 5", 1);
    job.max_restarts = 1;
    job.log_dir = Some(logs.path().into());
    let begun = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    assert_eq!(run(job).exit_code(), 5);
    let text = std::fs::read(logs.path().join("error.json")).unwrap();
    let told: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let at = told["message"]["extraInfo"]["timestamp"].as_str().unwrap();
    let at: u64 = at.parse().unwrap();
    assert!(at > begun.as_secs(), "{at} and {begun:?}");
    assert_eq!(told["attempt"], 1);
}

#[test]
fn a_replacement_runs_within_200_ms_of_the_crash() {
    let _turn = turn();
    // The other rank has a helper, and neither would end by itself.
    let script = "echo up $TORCHELASTIC_RESTART_COUNT $RANK
        [ $RANK$TORCHELASTIC_RESTART_COUNT = 10 ] && kill -9 $$
        [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0
        sleep 60 & wait";
    let limit = Duration::from_millis(200);
    let mut best = Duration::MAX;
    for _ in 0..50 {
        if best < limit {
            break;
        }
        let mut launcher = Launcher::start(&["--nproc", "2", "--max-restarts", "1"], script);
        let (status, _, err) = launcher.end(PROMPTLY);
        assert_eq!(status.code(), Some(0), "{err}");
        let notice = err
            .lines()
            .find(|line| line.contains("; restart 1 of 1 took "));
        let seconds = notice.and_then(|line| {
            assert!(line.contains("was killed by signal 9 (SIGKILL)"), "{line}");
            line.rsplit_once("took ")?
                .1
                .strip_suffix(" s")?
                .parse()
                .ok()
        });
        best = best.min(Duration::from_secs_f64(seconds.expect("one line")));
    }
    eprintln!("from the crash to the replacement: {best:?}");
    assert!(best < limit, "{best:?}");
}

#[test]
fn a_signal_ends_the_job_and_no_restart_follows() {
    let _turn = turn();
    let script = "echo ready; trap 'exit 9' TERM; while :; do sleep 0.05; done";
    let mut launcher = Launcher::start(&["--max-restarts", "5"], script);
    assert_eq!(launcher.line(), "[rank 0] ready");
    launcher.signal(rustix::process::Signal::TERM);
    let (status, _, err) = launcher.end(PROMPTLY);
    assert_eq!(status.code(), Some(143), "{err}");
    assert!(!err.contains("restart"), "{err}");
}
