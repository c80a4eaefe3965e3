//! Ranks that are killed, crash, stop and leave in jobs with `--recovery live`: the others go on in the same processes, and admit
//! the processes that the launcher starts in their places.
//!
//! Each test starts the launcher with this test program as its ranks. A rank counts steps together with the others, strikes
//! itself where its environment says so, and goes on with the next generation when others are lost or replaced.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

use paceline_collective::{Error, GroupOptions, ProcessGroup, ReduceOp};
use paceline_rendezvous::page::{JobPage, Phase};
use rustix::net::sockopt::socket_domain;
use rustix::net::{AddressFamily, Shutdown, getpeername, shutdown};
use rustix::process::{
    PidfdFlags, PidfdGetfdFlags, Signal, getpid, kill_process, pidfd_getfd, pidfd_open,
};
use rustix::time::{ClockId, clock_gettime};

const ROLE: &str = "PACELINE_TEST_RECOVERY";
/// Has the start of the paths of files that show which replacements were struck.
const STRUCK: &str = "PACELINE_TEST_STRUCK";
/// Steps of a job.
const STEPS: i64 = 40;
/// Steps of a job that waits for replacements.
const STEPS_MAX: i64 = 20_000;
/// Steps after the last replacement was struck, in which the launcher learns of it.
const STEPS_AFTER: i64 = 1_000;

/// The file that shows that a replacement was struck.
fn struck(replacement: &str) -> PathBuf {
    let start = std::env::var(STRUCK).expect("a path");
    format!("{start}{replacement}").into()
}

/// Strikes this process itself.
fn strike(how: &str) {
    say(&format!("struck at {}", now_us()));
    if let Ok(replacement) = std::env::var("PACELINE_REPLACEMENT") {
        std::fs::write(struck(&replacement), "").expect("a folder for it");
    }
    match how {
        "kill" => kill_process(getpid(), Signal::KILL).expect("a signal to itself"),
        "stop" => {
            kill_process(getpid(), Signal::STOP).expect("a signal to itself");
            // Another thread may take the signal, and this one would do all other steps before it stops.
            std::thread::sleep(Duration::from_secs(1));
        }
        "abort" => std::process::abort(),
        "panic" => panic!("struck"),
        "leave" => std::process::exit(0),
        cut if cut.starts_with("cut") => cut_connections(cut["cut".len()..].parse().ok()),
        code => {
            if let Some(file) = std::env::var_os("TORCHELASTIC_ERROR_FILE") {
                let error = r#"{"message": "struck\nhint: strike no more"}"#;
                std::fs::write(file, error).expect("a folder for it");
            }
            std::process::exit(code.parse().expect("an exit code"))
        }
    }
}

/// Ends the one of this process's TCP connections that was opened at this place in their order, or all.
fn cut_connections(place: Option<usize>) {
    let own = pidfd_open(getpid(), PidfdFlags::empty()).expect("this process");
    let copy = |number| pidfd_getfd(&own, number, PidfdGetfdFlags::empty()).ok();
    let is_connection = |socket: &OwnedFd| {
        let is_tcp = socket_domain(socket).is_ok_and(|family| family == AddressFamily::INET);
        is_tcp && getpeername(socket).is_ok()
    };
    let connections = (0..200).filter_map(copy).filter(is_connection);
    let cut = |(at, connection): (usize, OwnedFd)| {
        if place.is_none_or(|place| place == at) {
            shutdown(connection, Shutdown::Both).expect("a connection");
            say(&format!("cut {at}"));
        }
    };
    connections.enumerate().for_each(cut);
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
/// step 10), `1@forming:kill` (rank 1 a moment after it has lost a group), `1@again:cut` (before it repeats a step),
/// `+1@starting:9` (the first replacement before it is ready), `+1@joining:kill` (about when it joins) and `1@done:stop` (after
/// the last step). With `admits` the ranks take in replacements, and work on until these are there, or with `few` until all were struck
/// that are to be. With `finishes` they promise to say when they are done.
fn played() -> bool {
    let Ok(faults) = std::env::var(ROLE) else {
        return false;
    };
    let replacement = std::env::var("PACELINE_REPLACEMENT").ok();
    let own = match &replacement {
        Some(number) => format!("+{number}"),
        None => std::env::var("RANK").expect("a rank"),
    };
    let fault = |at: &str| {
        let place = format!("{own}@{at}:");
        faults.split(' ').find_map(|word| word.strip_prefix(&place))
    };
    // A different moment for each process.
    let strike_soon = |how: &str| {
        let how = how.to_owned();
        let range_us = if replacement.is_some() { 25_000 } else { 6_000 };
        let after = Duration::from_micros(u64::from(std::process::id()) * 7919 % range_us);
        std::thread::spawn(move || {
            std::thread::sleep(after);
            strike(&how);
        })
    };
    let options = GroupOptions {
        timeout: Duration::from_secs(if faults.contains(":stop") { 6 } else { 60 }),
        arena_bytes: Some(1 << 20),
        ..GroupOptions::default()
    };
    let mut group = ProcessGroup::init(&options).expect("the first group");
    if !faults.contains("undeclared") || own != "1" {
        group.declare_recovery();
    }
    if faults.contains("finishes") {
        group.declare_finish();
    }
    let admits = faults.contains("admits");
    let mut done = 0_i64;
    let mut has_lost = false;
    let mut begun = None;
    // This process is about to be struck; some process is.
    let (mut is_doomed, mut is_any_doomed) = (false, false);
    if group.is_joining() {
        assert!(group.barrier().is_err());
        fault("starting").into_iter().for_each(strike);
        is_doomed = fault("joining").map(strike_soon).is_some();
        loop {
            match group.next_generation() {
                Ok(next) => group = next,
                // All others are done.
                Err(error) => panic!("{error}"),
            }
            let mut furthest = [-1];
            if group.all_reduce(&mut furthest, ReduceOp::Max).is_ok() {
                done = furthest[0];
                group.declare_joined();
                say(&format!("joined at {} as rank {}", now_us(), group.rank()));
                break;
            }
        }
    }
    if admits {
        group.declare_admission();
    }
    let full = std::env::var("WORLD_SIZE").expect("a world size");
    let few = faults.contains("few").then(|| faults.matches('+').count());
    let last_struck = few.map(|replacements| struck(&replacements.to_string()));
    let mut most = STEPS_MAX;
    while done < STEPS
        || is_any_doomed
        || (admits && done < most && group.world().to_string() != full)
    {
        // A rank that has cut a connection goes on, and repeats the step. One that lacked the last step's result begins this one.
        let is_first = begun.replace(done) != Some(done);
        let now = fault(&done.to_string()).filter(|_| is_first);
        let again = fault("again").filter(|_| has_lost);
        now.into_iter().chain(again).for_each(strike);
        let is_last = last_struck.as_ref().is_some_and(|path| path.exists());
        let stepped = step(&group, [done, is_doomed.into(), is_last.into()]);
        is_any_doomed = is_doomed || stepped.as_ref().is_ok_and(|agreed| agreed.is_any_doomed);
        if stepped.as_ref().is_ok_and(|agreed| agreed.is_last) {
            most = most.min(done + STEPS_AFTER);
        }
        if let Ok(agreed) = &stepped {
            if std::mem::take(&mut has_lost) {
                say(&format!("goes on at {} as rank {}", now_us(), group.rank()));
            }
            done += 1;
            if !agreed.is_invited {
                if admits {
                    std::thread::sleep(Duration::from_millis(1));
                }
                continue;
            }
        } else {
            if let Some(how) = fault("forming").filter(|_| !is_doomed) {
                strike_soon(how);
                is_doomed = true;
            }
            // That of a rank that no other one can go on with.
            assert!(!matches!(stepped, Err(Error::Wire { .. })), "{stepped:?}");
            has_lost = true;
        }
        let began = now_us();
        let next = match &stepped {
            Ok(_) => group.admit(),
            Err(_) => group.next_generation(),
        };
        group = next.unwrap_or_else(|again| {
            if faults.contains("undeclared") {
                // Its own failure would come first on a busy machine.
                std::thread::sleep(Duration::from_secs(2));
            }
            panic!("{again} after {stepped:?}")
        });
        let mut furthest = [done];
        // A rank that is lost now shows at the next step.
        if group.all_reduce(&mut furthest, ReduceOp::Max).is_ok() {
            done = furthest[0];
            if stepped.is_ok() {
                say(&format!("admitted within {} us", now_us() - began));
            }
        }
    }
    let (world, generation) = (group.world(), group.generation());
    say(&format!(
        "done with {world} ranks in generation {generation}"
    ));
    if !faults.contains("unfinished") {
        group.set_phase(Phase::Finished, 0);
        let page = std::env::var("PACELINE_PAGE_FD").expect("a launcher");
        let page = JobPage::from_fd(page.parse().expect("a descriptor")).expect("a page");
        let is_done = || page.slot(0).activity().expect("it works").0.phase == Phase::Finished;
        while fault("done").is_some() && !is_done() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    fault("done").into_iter().for_each(strike);
    true
}

/// What all ranks know after a step.
#[derive(Debug)]
struct Agreed {
    is_invited: bool,
    is_any_doomed: bool,
    is_last: bool,
}

/// All ranks bring a one, the step, and whether they are invited or about to be struck, or the last replacement was struck; one of them is
/// enough.
fn step(
    group: &ProcessGroup,
    [done, is_doomed, is_last]: [i64; 3],
) -> Result<Agreed, paceline_collective::Error> {
    let mut data = vec![1.0; 10_000];
    group.all_reduce(&mut data, ReduceOp::Sum)?;
    assert!(data.iter().all(|value| *value == group.world() as f32));
    let mut all = [done, group.is_invited().into(), is_doomed, is_last];
    group.all_reduce(&mut all, ReduceOp::Max)?;
    assert_eq!(all[0], done, "all ranks are at the same step");
    Ok(Agreed {
        is_invited: all[1] > 0,
        is_any_doomed: all[2] > 0,
        is_last: all[3] > 0,
    })
}

/// A job of this test program on `ranks` ranks with these faults.
fn job(test: &str, transport: &str, ranks: usize, more: &[&str], faults: &str) -> Output {
    let own = std::env::current_exe().expect("this program has a file");
    let logs = tempfile::tempdir().expect("a folder");
    let mut launcher = Command::new(env!("CARGO_BIN_EXE_paceline-launcher"));
    paceline_testing::outside_of_jobs(&mut launcher)
        .args(["run", "--nproc-per-node", &ranks.to_string()])
        .args(["--recovery", "live", "--no-fold", "--log-dir"])
        .arg(logs.path())
        .args(more)
        .arg(own)
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, faults)
        .env(STRUCK, logs.path().join("struck"))
        .env("PACELINE_TRANSPORT", transport)
        .env("PACELINE_JOB_TOKEN", "5e".repeat(32))
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
        assert_eq!(err.matches(incident).count(), 1, "said once: {err}");
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
fn a_rank_that_exits_before_it_has_finished_as_it_promised_is_lost() {
    const NAME: &str = "a_rank_that_exits_before_it_has_finished_as_it_promised_is_lost";
    if played() {
        return;
    }
    // No other rank misses the last one.
    let output = job(NAME, "shm", 1, &[], "0@6:leave finishes");
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{err}");
    let says = "it exited with code 0 before its work was done";
    assert!(
        err.contains(" left early after ") && err.contains(says),
        "{err}"
    );
    let output = job(NAME, "shm", 1, &[], "0@6:leave");
    assert!(output.status.success(), "{}", text(&output.stderr));
    // One of several is replaced.
    let more = ["--max-restarts", "1"];
    let output = job(NAME, "shm", 2, &more, "1@6:leave finishes admits");
    all_go_on(&output, 2, 2..=2);
}

#[test]
fn a_cut_connection_costs_no_rank() {
    const NAME: &str = "a_cut_connection_costs_no_rank";
    if played() {
        return;
    }
    // Those for data, for messages, and between sends and receives.
    let again = paceline_testing::on_threads(0..5, |place| {
        let output = job(NAME, "tcp", 3, &[], &format!("1@10:cut{place}"));
        all_go_on(&output, 3, 0..=1);
        let err = text(&output.stderr);
        let mended = err.lines().filter(|line| {
            line.contains(", which lives; 3 ranks go on") && line.starts_with("rank ")
        });
        mended.count()
    });
    assert!(
        again.contains(&1) && again.iter().all(|times| *times < 2),
        "{again:?}"
    );
}

#[test]
fn a_cut_connection_between_nodes_costs_no_rank() {
    const NAME: &str = "a_cut_connection_between_nodes_costs_no_rank";
    if played() {
        return;
    }
    let mended = |place| {
        let endpoint = format!("127.0.0.1:{}", paceline_testing::free_ports(1));
        let nodes = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint";
        let more: Vec<&str> = nodes.split(' ').chain([endpoint.as_str()]).collect();
        let faults = format!("1@10:cut{place}");
        let launch = |_| job(NAME, "tcp", 2, &more, &faults);
        let mut outputs = paceline_testing::on_threads(0..2, launch).into_iter();
        let (mut all, other) = (outputs.next().expect("two"), outputs.next().expect("two"));
        assert!(other.status.success(), "{}", text(&other.stderr));
        all.stdout.extend(other.stdout);
        all.stderr.extend(other.stderr);
        all_go_on(&all, 4, 0..=1);
        let err = text(&all.stderr);
        let lines = err.lines().filter(|line| line.starts_with("rank "));
        lines
            .filter(|line| line.contains(", which lives; 4 ranks go on"))
            .count()
    };
    // Those for data, for messages, and between sends and receives, to ranks of either node. Both launchers say so.
    let again: Vec<usize> = (0..7).map(mended).collect();
    assert!(
        again.contains(&2) && again.iter().all(|times| [0, 2].contains(times)),
        "{again:?}"
    );
}

#[test]
fn a_connection_that_breaks_whenever_it_is_made_costs_a_rank() {
    const NAME: &str = "a_connection_that_breaks_whenever_it_is_made_costs_a_rank";
    if played() {
        return;
    }
    let output = job(NAME, "tcp", 2, &[], "0@10:cut 0@again:cut");
    let err = text(&output.stderr);
    assert!(output.status.success(), "{err}");
    assert!(err.contains(", which lives; 2 ranks go on"), "{err}");
    assert!(
        err.contains(" stalled after ") && err.contains("; 1 rank goes on"),
        "{err}"
    );
}

#[test]
fn a_job_whose_ranks_are_all_stopped_ends() {
    const NAME: &str = "a_job_whose_ranks_are_all_stopped_ends";
    if played() {
        return;
    }
    let output = job(NAME, "shm", 2, &[], "0@6:stop 1@6:stop");
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{err}");
    assert!(err.contains("; 1 rank goes on"), "{err}");
    assert!(err.contains("no live recovery: no rank is left"), "{err}");
}

#[test]
fn a_rank_that_is_lost_after_the_job_is_done_is_no_failure() {
    const NAME: &str = "a_rank_that_is_lost_after_the_job_is_done_is_no_failure";
    if played() {
        return;
    }
    for fault in ["1@done:stop", "1@done:kill", "0@done:abort"] {
        let output = job(NAME, "shm", 2, &[], fault);
        all_go_on(&output, 2, 0..=0);
        let err = text(&output.stderr);
        let says = "; rank 0 had said before that the job is done";
        assert_eq!(err.matches(says).count(), 1, "{fault}: {err}");
    }
    // Without rank 0's word it may not be done.
    let output = job(NAME, "shm", 2, &[], "1@done:stop unfinished");
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{err}");
    assert!(
        err.contains("rank 1 (pid ") && err.contains("stalled"),
        "{err}"
    );
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

/// With the launcher's words, where the jobs end at full strength.
fn full_again(test: &str, transport: &str, ranks: usize, restarts: &str, faults: &str) -> String {
    let more = ["--max-restarts", restarts];
    let output = job(test, transport, ranks, &more, &format!("{faults} admits"));
    all_go_on(&output, ranks, 2..=20);
    text(&output.stderr)
}

#[test]
fn lost_ranks_are_replaced() {
    const NAME: &str = "lost_ranks_are_replaced";
    if played() {
        return;
    }
    for transport in TRANSPORTS {
        let err = full_again(NAME, transport, 4, "1", "2@5:kill");
        let joins = err
            .lines()
            .find(|line| line.ends_with(" joins as a replacement; 4 ranks go on"));
        assert!(
            joins.is_some_and(|line| line.starts_with("rank 2 (pid ")),
            "{err}"
        );
        // Rank 0, two at once, one after the other, and the last one that was there from the beginning.
        full_again(NAME, transport, 3, "3", "0@5:kill");
        full_again(NAME, transport, 4, "3", "1@5:kill 2@5:kill");
        full_again(NAME, transport, 3, "4", "0@5:kill 1@11:abort");
        full_again(NAME, transport, 2, "1", "1@5:kill");
    }
}

#[test]
fn replacements_may_be_lost_and_restarts_used_up() {
    const NAME: &str = "replacements_may_be_lost_and_restarts_used_up";
    if played() {
        return;
    }
    for transport in TRANSPORTS {
        // At any moment of its joining: while it starts, while it is invited, and while the group forms.
        for _ in 0..3 {
            full_again(
                NAME,
                transport,
                3,
                "5",
                "2@5:kill +1@joining:kill +2@joining:kill",
            );
        }
        // Others are lost at that moment.
        full_again(NAME, transport, 4, "5", "3@5:kill 1@6:kill 0@7:kill");
        let faults = "2@5:kill +1@starting:9 +2@starting:9 admits few";
        let output = job(NAME, transport, 3, &["--max-restarts", "2"], faults);
        all_go_on(&output, 2, 1..=1);
        let err = text(&output.stderr);
        assert!(err.contains("replacement of rank 2 (pid "), "{err}");
        let said =
            "; no restart is left for another one\n  its error: struck\n  hint: strike no more\n";
        assert!(err.contains(said), "{err}");
        // The error of the lost rank is not its replacement's.
        let faults = "2@5:9 +1@starting:kill admits few";
        let output = job(NAME, transport, 3, &["--max-restarts", "1"], faults);
        all_go_on(&output, 2, 1..=1);
        let err = text(&output.stderr);
        assert!(!err.contains("its error"), "{err}");
    }
    // One that hangs before it is ready is killed, and replaced in turn.
    let err = full_again(NAME, "shm", 2, "2", "1@5:kill +1@starting:stop");
    assert!(
        err.contains("replacement of rank 1 (pid ") && err.contains("; it is killed"),
        "{err}"
    );
}
