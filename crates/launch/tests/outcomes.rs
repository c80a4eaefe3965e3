//! How jobs of real processes end: what is reported, how fast, and what is left.

mod support;

use std::process::Command;
use std::time::{Duration, Instant};

use paceline_launch::{Failure, FailureKind, LaunchError, Outcome};
use paceline_words::{Lang, Text};
use support::{Watched, job, lines, numbers, run, turn};

fn failure(outcome: &Outcome) -> &Failure {
    outcome.failure.as_ref().expect("the job failed")
}

/// Runs the script on three ranks and checks the failed rank, its kind, the victims and the job's exit code.
fn check(
    script: &str,
    rank: usize,
    kind: FailureKind,
    victims: &[usize],
    exit_code: u8,
) -> Outcome {
    let outcome = run(job(script, 3));
    let failed = failure(&outcome);
    assert_eq!((failed.rank, &failed.kind), (rank, &kind), "{failed}");
    assert_eq!(failed.victims, victims, "{failed}");
    assert_eq!(outcome.exit_code(), exit_code);
    assert_eq!(outcome.left_behind, [0_u32; 0]);
    outcome
}

#[test]
fn ranks_that_all_do_well_make_a_job_that_does_well() {
    let outcome = run(job("true", 2));
    assert!(outcome.failure.is_none());
    assert_eq!(outcome.exit_code(), 0);
    assert_eq!(outcome.notes, [""; 0]);
    // It does not take the grace.
    assert!(
        outcome.elapsed < Duration::from_secs(8),
        "{:?}",
        outcome.elapsed
    );
}

#[test]
fn a_rank_that_ends_early_with_success_is_fine() {
    let outcome = run(job("[ $RANK = 0 ] || sleep 0.5", 3));
    assert!(outcome.failure.is_none());
    assert!(outcome.elapsed >= Duration::from_millis(500));
}

#[test]
fn sixty_four_ranks_start_and_end() {
    let outcome = run(job("true", 64));
    assert!(outcome.failure.is_none(), "{:?}", outcome.failure);
    assert!(
        outcome.elapsed < Duration::from_secs(30),
        "{:?}",
        outcome.elapsed
    );
}

#[test]
fn an_exit_code_is_the_jobs_exit_code() {
    check(
        "[ $RANK = 1 ] && exit 7; sleep 60",
        1,
        FailureKind::ExitCode(7),
        &[0, 2],
        7,
    );
}

#[test]
fn a_signal_is_reported_by_name_and_as_128_plus_its_number() {
    for (number, name) in [(9, "SIGKILL"), (11, "SIGSEGV"), (6, "SIGABRT")] {
        let script = format!("ulimit -c 0; [ $RANK = 2 ] && kill -{number} $$; sleep 60");
        let kind = FailureKind::Signal {
            number,
            name: name.to_owned(),
            core: false,
        };
        check(&script, 2, kind, &[0, 1], 128 + number as u8);
    }
}

#[test]
fn the_first_failure_in_time_is_the_cause() {
    let script = "case $RANK in 0) sleep 60; exit 4;; 1) exit 3;; 2) sleep 30; exit 5;; esac";
    let outcome = check(script, 1, FailureKind::ExitCode(3), &[0, 2], 3);
    assert!(
        outcome.elapsed < Duration::from_secs(8),
        "{:?}",
        outcome.elapsed
    );
}

#[test]
fn a_rank_that_ignores_sigterm_is_killed_after_the_grace() {
    let mut job = job(
        "[ $RANK = 0 ] && { sleep 0.1; exit 1; }; trap '' TERM; while :; do sleep 0.1; done",
        2,
    );
    job.grace = Duration::from_millis(400);
    let outcome = run(job);
    assert_eq!(failure(&outcome).victims, [1]);
    assert!(
        outcome
            .notes
            .iter()
            .any(|note| note.contains("rank 1") && note.contains("was killed")),
        "{outcome:?}"
    );
    let expected = Duration::from_millis(800)..Duration::from_secs(15);
    assert!(expected.contains(&outcome.elapsed), "{:?}", outcome.elapsed);
}

#[test]
fn a_stopped_rank_is_ended_with_the_others() {
    let outcome = run(job(
        "[ $RANK = 0 ] && { sleep 0.1; exit 1; }; kill -STOP $$; sleep 60",
        2,
    ));
    assert_eq!(failure(&outcome).rank, 0);
    // It does not take the grace.
    assert!(
        outcome.elapsed < Duration::from_secs(8),
        "{:?}",
        outcome.elapsed
    );
}

#[test]
fn the_others_hear_of_a_failure_at_once() {
    let logs = tempfile::tempdir().unwrap();
    let mut job = job(
        "[ $RANK = 1 ] && exec $PROBE worker until-revoked; sleep 0.2; kill -9 $$",
        2,
    );
    job.log_dir = Some(logs.path().into());
    job.report_time = Duration::from_secs(30);
    let outcome = run(job);
    assert_eq!(failure(&outcome).rank, 0);
    let told = lines(&support::log(logs.path(), 1)).join("\n");
    assert!(
        told.contains("rank: Some(0)") && told.contains("was killed by signal 9 (SIGKILL)"),
        "{told}"
    );
    let heard_after = outcome.elapsed - failure(&outcome).after;
    assert!(
        heard_after < Duration::from_secs(5),
        "rank 1 ended {heard_after:?} after rank 0"
    );
}

#[test]
fn a_report_says_what_the_rank_was_doing_and_printed_last() {
    let logs = tempfile::tempdir().unwrap();
    let script = "[ $RANK = 0 ] && sleep 60
        echo to stdout; i=0; while [ $i -lt 30 ]; do echo line $i >&2; i=$((i+1)); done
        exec $PROBE worker backward exit=3";
    let mut job = job(script, 2);
    job.log_dir = Some(logs.path().into());
    let outcome = run(job);
    let failed = failure(&outcome);
    assert_eq!(failed.last_lines.len(), 20);
    assert_eq!(
        (&*failed.last_lines[0], &*failed.last_lines[19]),
        ("line 10", "line 29")
    );
    assert_eq!(
        failed
            .activity
            .as_ref()
            .map(|activity| activity.of(Lang::En)),
        Some("in the backward pass at step 42")
    );
    let log = support::log(logs.path(), 1);
    assert_eq!(lines(&log), ["to stdout"]);
    let log = log.with_file_name("stderr.log");
    assert_eq!(failed.log.as_deref(), Some(&*log));
    assert_eq!(lines(&log).len(), 30);
    let report = failed.to_string();
    for part in [
        "rank 1 (pid ",
        "exited with code 3 after ",
        "\n  its last lines are above, and in its log (",
        "rank 0 was stopped because of it",
    ] {
        assert!(report.contains(part), "{part} is missing in:\n{report}");
    }
}

#[test]
fn a_victim_that_ends_first_is_not_the_cause() {
    let script = "case $RANK in
        0) exec $PROBE worker blame=1 exit=1;;
        1) sleep 0.3; exit 101;;
        2) sleep 60;; esac";
    check(script, 1, FailureKind::ExitCode(101), &[0, 2], 101);
    let folder = tempfile::tempdir().unwrap();
    let revoked = folder.path().join("revoked").display().to_string();
    let script = format!(
        "case $RANK in
        0) exec $PROBE worker until-asked={revoked} exit=1;;
        1) $PROBE worker revoke=1; touch {revoked}; sleep 0.3; exit 101;;
        2) sleep 60;; esac"
    );
    check(&script, 1, FailureKind::ExitCode(101), &[0, 2], 101);
}

#[test]
fn a_stopped_rank_that_others_gave_up_on_is_reported_as_stalled() {
    let script = "case $RANK in 0) sleep 0.2; exec $PROBE worker blame=1 exit=1;;
        1) exec $PROBE worker backward stop-self;;
        2) sleep 60;; esac";
    let kind = FailureKind::Stalled {
        state: Text::new(|lang| match lang {
            Lang::En => "stopped by a signal (T)".to_owned(),
            Lang::Ko => "시그널로 정지됨 (T)".to_owned(),
        }),
    };
    let outcome = check(script, 1, kind, &[0, 2], 4);
    let activity = failure(&outcome).activity.as_ref().expect("an activity");
    let activity = activity.of(Lang::En);
    assert!(
        activity.starts_with("in the backward pass at step 42, for "),
        "{activity}"
    );
    assert_eq!(failure(&outcome).reported_by, Some(0));
}

#[test]
fn a_rank_that_leaves_while_it_is_needed_is_the_cause() {
    let script = "case $RANK in 0) sleep 0.3; exec $PROBE worker blame=1 exit=1;; 1) exit 0;; 2) sleep 60;; esac";
    check(script, 1, FailureKind::LeftEarly, &[0, 2], 1);
}

#[test]
fn a_rank_that_waits_for_one_that_has_left_is_freed_within_seconds() {
    let script = "case $RANK in 0) exec $PROBE worker collective=7 until-revoked;; 1) exit 0;; 2) sleep 60;; esac";
    let outcome = check(script, 1, FailureKind::LeftEarly, &[0, 2], 1);
    assert_eq!(failure(&outcome).reported_by, Some(0));
    assert!(
        outcome.elapsed < Duration::from_secs(15),
        "{:?}",
        outcome.elapsed
    );
}

#[test]
fn whatever_the_ranks_have_started_is_ended() {
    for nproc in [1, 2] {
        let logs = tempfile::tempdir().unwrap();
        // In its group, in a session of its own, with no environment, and deaf to SIGTERM.
        let script = format!(
            "sleep 60 & a=$!
            setsid sleep 60 & b=$!
            said={here}/said$RANK
            env -i setsid sh -c 'sleep 60 & echo pids $$ $!; touch $0; wait' $said.too & c=$!
            sh -c 'trap \"\" TERM; sleep 60' & d=$!
            echo pids $a $b $c $d; touch $said; sleep 0.3
            until [ $(ls {here} | grep -c said) = {all} ]; do sleep 0.05; done; exit $RANK",
            here = logs.path().display(),
            all = 2 * nproc,
        );
        let mut job = job(&script, nproc);
        job.log_dir = Some(logs.path().into());
        job.grace = Duration::from_millis(500);
        let outcome = run(job);
        assert_eq!(usize::from(outcome.exit_code()), nproc - 1);
        assert_eq!(outcome.left_behind, [0_u32; 0]);
        let output = (0..nproc).flat_map(|rank| lines(&support::log(logs.path(), rank)));
        let pids: Vec<_> = output.flat_map(|line| numbers(&line)).collect();
        assert_eq!(pids.len(), 6 * nproc);
        let alive: Vec<_> = pids
            .iter()
            .filter(|pid| Watched::new(**pid).is_alive())
            .collect();
        assert!(alive.is_empty(), "{alive:?} of {pids:?} live on");
        assert!(
            outcome.elapsed < Duration::from_secs(15),
            "{:?}",
            outcome.elapsed
        );
    }
}

#[test]
fn progress_bars_leave_one_line_in_the_log() {
    let logs = tempfile::tempdir().unwrap();
    let mut job = job(
        "printf 'start\\n10%%\\r50%%\\r100%%\\nno newline at the end'",
        1,
    );
    job.log_dir = Some(logs.path().join("new/folder"));
    run(job);
    let log = support::log(&logs.path().join("new/folder"), 0);
    assert_eq!(lines(&log), ["start", "100%", "no newline at the end"]);
}

#[test]
fn each_attempt_has_logs_of_its_own_and_a_resumed_one_continues_them() {
    let logs = tempfile::tempdir().unwrap();
    for (restart_count, expect) in [(0, vec!["0"]), (0, vec!["0", "0"]), (1, vec!["1"])] {
        let mut job = job("echo $TORCHELASTIC_RESTART_COUNT", 1);
        job.log_dir = Some(logs.path().into());
        job.restart_count = restart_count;
        run(job);
        let log = logs
            .path()
            .join(format!("attempt_{restart_count}/0/stdout.log"));
        assert_eq!(lines(&log), expect);
    }
}

#[test]
fn a_job_that_cannot_start_says_why_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();

    let mut absent = job("", 1);
    absent.program = "no-such-program".into();
    let mut nonsense = job("", 3);
    nonsense.program = file.clone();
    let mut unwritable = job("", 1);
    unwritable.log_dir = Some(file.join("logs"));
    let cases = [
        (job("", 0), "nproc is 0, expected 1 to 1024", 2),
        (absent, "program `no-such-program` not found in PATH", 2),
        (nonsense, "rank 0 could not be started as", 3),
        (unwritable, "cannot be written", 3),
    ];
    for (job, text, exit_code) in cases {
        let _turn = turn();
        let error = paceline_launch::run(job).expect_err(text);
        assert!(error.to_string().contains(text), "{error}");
        assert_eq!(error.exit_code(), exit_code, "{error}");
    }
}

#[test]
fn a_process_runs_one_job_at_a_time_and_keeps_its_own_children() {
    let _turn = turn();
    let folder = tempfile::tempdir().unwrap();
    let (begun, go) = (folder.path().join("begun"), folder.path().join("go"));
    let mut own_child = Command::new("sleep").arg("60").spawn().unwrap();
    let script = format!(
        "touch {}; until [ -e {} ]; do sleep 0.02; done",
        begun.display(),
        go.display()
    );
    let long = std::thread::spawn(move || paceline_launch::run(job(&script, 1)));
    let deadline = Instant::now() + Duration::from_secs(20);
    while !begun.exists() && Instant::now() < deadline {
        std::thread::yield_now();
    }
    let second = paceline_launch::run(job("true", 1));
    std::fs::write(&go, "").unwrap();
    let long = long.join().unwrap();
    let own_child_lives = own_child.try_wait().unwrap().is_none();
    own_child.kill().unwrap();
    own_child.wait().unwrap();
    assert!(matches!(second, Err(LaunchError::Busy)), "{second:?}");
    assert_eq!(long.unwrap().exit_code(), 0);
    assert!(own_child_lives);
}

#[test]
fn the_cores_are_shared_out_unless_the_user_has_spoken() {
    let logs = tempfile::tempdir().unwrap();
    let mut shared = job("echo $OMP_NUM_THREADS $RAYON_NUM_THREADS", 1);
    shared.log_dir = Some(logs.path().into());
    shared
        .env
        .push(("OMP_NUM_THREADS".to_owned(), "77".to_owned()));
    shared
        .env
        .push(("RAYON_NUM_THREADS".to_owned(), String::new()));
    let outcome = run(shared.clone());
    let cores = std::thread::available_parallelism().unwrap().get();
    assert_eq!(
        lines(&support::log(logs.path(), 0)),
        [format!("77 {cores}")]
    );
    assert!(
        outcome
            .plan
            .to_string()
            .contains("OMP_NUM_THREADS=77 from the environment"),
        "{}",
        outcome.plan
    );

    let logs = tempfile::tempdir().unwrap();
    shared.log_dir = Some(logs.path().into());
    shared.threads_per_rank = Some(3);
    run(shared);
    assert_eq!(lines(&support::log(logs.path(), 0)), ["3 3"]);
}
