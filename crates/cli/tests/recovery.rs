//! Ranks that are killed, crash, stop and leave in jobs with `--recovery live`: the others go on in the same processes.
//!
//! Each test starts the launcher with this test program as its ranks. A rank counts steps together with the others, strikes
//! itself where its environment says so, and goes on with the next generation when others are lost.

use std::process::{Command, Output};
use std::time::Duration;

use paceline_collective::{GroupOptions, ProcessGroup, ReduceOp};
use rustix::process::{Signal, getpid, kill_process};
use rustix::time::{ClockId, clock_gettime};

const ROLE: &str = "PACELINE_TEST_RECOVERY";
/// Steps of a job.
const STEPS: i64 = 40;

/// Strikes this process itself.
fn strike(how: &str) {
    say(&format!("struck at {}", now_us()));
    match how {
        "kill" => kill_process(getpid(), Signal::KILL).expect("a signal to itself"),
        "stop" => kill_process(getpid(), Signal::STOP).expect("a signal to itself"),
        "abort" => std::process::abort(),
        "panic" => panic!("struck"),
        "leave" => std::process::exit(0),
        code => std::process::exit(code.parse().expect("an exit code")),
    }
}

fn now_us() -> u128 {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::try_from(now).expect("a time").as_micros()
}

/// A line of its own, whatever the test harness has printed before.
fn say(line: &str) {
    println!("\n{line}");
}

/// The part of a rank; true when this process is one. `PACELINE_TEST_RECOVERY` has words such as `2@10:kill` (rank 2 at
/// step 10) and `1@forming:kill` (rank 1 a moment after it has lost a group).
fn played() -> bool {
    let Ok(faults) = std::env::var(ROLE) else {
        return false;
    };
    let own = std::env::var("RANK").expect("a rank");
    let fault = |at: &str| {
        let place = format!("{own}@{at}:");
        faults.split(' ').find_map(|word| word.strip_prefix(&place))
    };
    let options = GroupOptions {
        timeout: Duration::from_secs(if faults.contains(":stop") { 2 } else { 60 }),
        arena_bytes: Some(1 << 20),
        ..GroupOptions::default()
    };
    let mut group = ProcessGroup::init(&options).expect("the first group");
    if !faults.contains("undeclared") || own != "1" {
        group.declare_recovery();
    }
    let mut done = 0_i64;
    let mut has_lost = false;
    while done < STEPS {
        if let Some(how) = fault(&done.to_string()) {
            strike(how);
        }
        match step(&group, done) {
            Ok(()) if std::mem::take(&mut has_lost) => {
                say(&format!("goes on at {} as rank {}", now_us(), group.rank()));
                done += 1;
            }
            Ok(()) => done += 1,
            Err(error) => {
                if let Some(how) = fault("forming").map(str::to_owned) {
                    // A different moment for each process: before, while and after the group forms.
                    let after = Duration::from_micros(u64::from(std::process::id()) * 7919 % 6000);
                    std::thread::spawn(move || {
                        std::thread::sleep(after);
                        strike(&how);
                    });
                }
                let next = group.next_generation();
                group = next.unwrap_or_else(|again| panic!("{again} after {error}"));
                has_lost = true;
                let mut furthest = [done];
                // A rank that is lost now shows at the next step.
                if group.all_reduce(&mut furthest, ReduceOp::Max).is_ok() {
                    done = furthest[0];
                }
            }
        }
    }
    let (world, generation) = (group.world(), group.generation());
    say(&format!(
        "done with {world} ranks in generation {generation}"
    ));
    true
}

/// All ranks bring the step and a one.
fn step(group: &ProcessGroup, done: i64) -> Result<(), paceline_collective::Error> {
    let mut data = vec![1.0; 10_000];
    group.all_reduce(&mut data, ReduceOp::Sum)?;
    assert!(data.iter().all(|value| *value == group.world() as f32));
    let mut steps = [done];
    group.all_reduce(&mut steps, ReduceOp::Max)?;
    assert_eq!(steps, [done], "all ranks are at the same step");
    Ok(())
}

/// A job of this test program on `ranks` ranks with these faults.
fn job(test: &str, transport: &str, ranks: usize, more: &[&str], faults: &str) -> Output {
    let own = std::env::current_exe().expect("this program has a file");
    let mut launcher = Command::new(env!("CARGO_BIN_EXE_paceline-launcher"));
    paceline_testing::outside_of_jobs(&mut launcher)
        .args(["run", "--nproc-per-node", &ranks.to_string()])
        .args(["--recovery", "live", "--log-dir", "/dev/null", "--no-fold"])
        .args(more)
        .arg(own)
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, faults)
        .env("PACELINE_TRANSPORT", transport)
        .output()
        .expect("the launcher runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What each of `ranks` ranks says at the end where `left` of them are left, in any order.
fn all_go_on(output: &Output, left: usize, generations: std::ops::RangeInclusive<u64>) {
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    let done: Vec<&str> = out
        .lines()
        .filter(|line| line.contains("] done with"))
        .collect();
    assert_eq!(done.len(), left, "{out}\n{err}");
    let says = generations.map(|number| format!("done with {left} ranks in generation {number}"));
    let says: Vec<String> = says.collect();
    let last = |line: &&str| says.iter().any(|says| line.ends_with(says.as_str()));
    assert!(done.iter().all(last), "{out}\n{err}");
}

const TRANSPORTS: [&str; 2] = ["shm", "tcp"];

#[test]
fn the_others_go_on_after_a_rank_is_lost_in_any_way() {
    const NAME: &str = "the_others_go_on_after_a_rank_is_lost_in_any_way";
    if played() {
        return;
    }
    for (transport, fault, says) in [
        (
            "shm",
            "2@10:kill",
            "was killed by signal 9 (SIGKILL) after ",
        ),
        (
            "tcp",
            "2@10:kill",
            "was killed by signal 9 (SIGKILL) after ",
        ),
        ("shm", "2@10:abort", "was killed by signal 6 (SIGABRT"),
        ("tcp", "2@10:7", "exited with code 7 after "),
        ("shm", "2@10:panic", "exited with code 101 after "),
    ] {
        let output = job(NAME, transport, 4, &[], fault);
        all_go_on(&output, 3, 1..=1);
        let err = text(&output.stderr);
        let incident = err.lines().find(|line| line.ends_with("; 3 ranks go on"));
        let incident = incident.unwrap_or_else(|| panic!("{err}"));
        assert!(
            incident.starts_with("rank 2 (pid ") && incident.contains(says),
            "{incident}"
        );
        assert_eq!(
            err.matches(incident).count(),
            2,
            "when it happens and at the end: {err}"
        );
    }
}

#[test]
fn rank_0_and_several_at_once_and_one_after_the_other_may_be_lost() {
    const NAME: &str = "rank_0_and_several_at_once_and_one_after_the_other_may_be_lost";
    if played() {
        return;
    }
    for transport in TRANSPORTS {
        all_go_on(&job(NAME, transport, 3, &[], "0@5:kill"), 2, 1..=1);
        all_go_on(&job(NAME, transport, 4, &[], "0@5:kill 3@5:kill"), 2, 1..=2);
        let each = "0@5:kill 3@11:abort 1@20:9";
        all_go_on(&job(NAME, transport, 4, &[], each), 1, 3..=3);
    }
}

#[test]
fn a_rank_may_be_lost_while_the_next_generation_forms() {
    const NAME: &str = "a_rank_may_be_lost_while_the_next_generation_forms";
    if played() {
        return;
    }
    for transport in TRANSPORTS {
        for _ in 0..4 {
            let output = job(NAME, transport, 4, &[], "3@7:kill 0@forming:kill");
            all_go_on(&output, 2, 1..=2);
        }
    }
}

#[test]
fn a_stopped_rank_is_killed_and_one_that_leaves_early_is_left_behind() {
    const NAME: &str = "a_stopped_rank_is_killed_and_one_that_leaves_early_is_left_behind";
    if played() {
        return;
    }
    for transport in TRANSPORTS {
        let output = job(NAME, transport, 3, &[], "1@6:stop");
        all_go_on(&output, 2, 1..=1);
        let err = text(&output.stderr);
        assert!(
            err.contains("rank 1 (pid ") && err.contains(" stalled after "),
            "{err}"
        );
        let output = job(NAME, transport, 3, &[], "1@6:leave");
        all_go_on(&output, 2, 1..=1);
        assert!(text(&output.stderr).contains(" left early after "));
    }
}

#[test]
fn without_all_ranks_word_or_after_a_usage_error_the_job_fails_or_is_started_again() {
    const NAME: &str =
        "without_all_ranks_word_or_after_a_usage_error_the_job_fails_or_is_started_again";
    if played() {
        return;
    }
    let output = job(NAME, "shm", 3, &[], "2@5:kill undeclared");
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(137), "{err}");
    assert!(err.contains("rank 1 does not recover live"), "{err}");
    let output = job(NAME, "shm", 2, &["--max-restarts", "1"], "1@5:2");
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{err}");
    let output = job(
        NAME,
        "shm",
        3,
        &["--max-restarts", "1"],
        "2@5:kill undeclared",
    );
    let err = text(&output.stderr);
    assert!(err.contains("; restart 1 of 1 took "), "{err}");
}
