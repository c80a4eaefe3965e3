//! Ranks as processes: killed, stopped and ended by their launcher. Each test starts its own binary again for every rank,
//! running the same test, which then plays that rank's part.

mod common;
#[path = "processes/mpi.rs"]
mod mpi;

use std::time::{Duration, Instant};

use common::job::{Job, PATIENCE, ROLE, say};
use common::{noise, reference};
use paceline_collective::{GroupOptions, ProcessGroup, ReduceOp};
use paceline_rendezvous::page::{Phase, Revocation};
use paceline_testing::wait_until;
use rustix::process::{Resource, Rlimit, Signal, getpid, kill_process, setrlimit};

/// How late a survivor may report.
const SOON: Duration = Duration::from_secs(8);
/// Enough for an all-reduce that goes by hosts, where there are several.
const LEN: usize = 20_000;
/// Under the last one ranks 0 and 1 are on one host, rank 2 on another, as far as they say.
const TRANSPORTS: [&str; 3] = ["shm", "tcp", "hierarchical"];

/// The part of a rank: reduce until something fails, and say what. True when this process is a rank. Operations have this
/// deadline once all ranks are there.
fn played(timeout: Duration) -> bool {
    if std::env::var_os(ROLE).is_none() {
        return false;
    }
    if std::env::var(ROLE).as_deref() == Ok("tight") && std::env::var("RANK").as_deref() == Ok("1")
    {
        // Not enough address space for a segment, as under `ulimit -v`.
        let bytes = Some(2 << 30);
        setrlimit(
            Resource::As,
            Rlimit {
                current: bytes,
                maximum: bytes,
            },
        )
        .unwrap();
    }
    let options = GroupOptions {
        timeout: PATIENCE,
        arena_bytes: Some(8 << 30),
        ..GroupOptions::default()
    };
    let group = match ProcessGroup::init(&options) {
        Ok(group) => group,
        Err(error) => {
            say(&format!("no group: {error}"));
            return true;
        }
    };
    group.set_phase(Phase::BetweenSteps, 41);
    let mut step = 0;
    let error = loop {
        let mut data = noise(group.rank(), LEN);
        match group.all_reduce(&mut data, ReduceOp::Sum) {
            Ok(()) if step == 0 => {
                group.set_timeout(timeout);
                say(&format!("ready {} {}", group.transport(), checksum(&data)));
            }
            Ok(()) => {}
            Err(error) => break error,
        }
        step += 1;
        let role = std::env::var(ROLE);
        match (role.as_deref().unwrap_or_default(), group.rank()) {
            ("once", _) => return true,
            // As a program that calls exit in the middle: nothing is dropped, nobody is told.
            ("leave", 0) if step == 20 => std::process::exit(0),
            ("die", 1) if step == 20 => kill_process(getpid(), Signal::KILL).unwrap(),
            ("stall", 1) if step == 20 => wait_until("others give up", || group.health().is_err()),
            _ => {}
        }
    };
    say(&format!(
        "culprit {:?} victim of {:?}: {error}",
        error.culprit(),
        group.slot().victim_of()
    ));
    true
}

fn checksum(data: &[f32]) -> u64 {
    data.iter().fold(0xCBF2_9CE4_8422_2325, |hash, value| {
        (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0100_0000_01B3)
    })
}

#[test]
fn processes_get_the_bytes_of_the_tree() {
    if played(PATIENCE) {
        return;
    }
    for transport in TRANSPORTS {
        let job = Job::start(
            "processes_get_the_bytes_of_the_tree",
            transport,
            3,
            "forever",
            false,
        );
        let inputs: Vec<Vec<f32>> = (0..3).map(|rank| noise(rank, LEN)).collect();
        let expected = checksum(&reference(&inputs, &|left, right| left + right));
        assert_eq!(
            job.all_ready(),
            vec![format!("ready {transport} {expected}"); 3]
        );
    }
}

#[test]
fn a_killed_rank_is_reported_by_all_others_at_once() {
    if played(PATIENCE) {
        return;
    }
    for transport in TRANSPORTS {
        for victim in [0, 1] {
            let job = Job::start(
                "a_killed_rank_is_reported_by_all_others_at_once",
                transport,
                3,
                "forever",
                false,
            );
            job.all_ready();
            job.signal(victim, Signal::KILL);
            let killed = Instant::now();
            for rank in (0..3).filter(|rank| *rank != victim) {
                let line = job.line(rank);
                assert!(
                    killed.elapsed() < SOON,
                    "rank {rank} took {:?}",
                    killed.elapsed()
                );
                let expected = format!("culprit Some({victim}) victim of Some({victim}): ");
                assert!(
                    line.starts_with(&expected) && line.contains("died"),
                    "{line}"
                );
                assert!(line.contains(&format!("pid {}", job.pid(victim))), "{line}");
            }
        }
    }
}

#[test]
fn a_rank_that_exits_in_the_middle_is_reported() {
    if played(PATIENCE) {
        return;
    }
    for transport in TRANSPORTS {
        let job = Job::start(
            "a_rank_that_exits_in_the_middle_is_reported",
            transport,
            3,
            "leave",
            false,
        );
        job.all_ready();
        for rank in [1, 2] {
            let line = job.line(rank);
            assert!(
                line.starts_with("culprit Some(0)") && line.contains("rank 0 (host"),
                "{line}"
            );
        }
    }
}

#[test]
fn a_stopped_rank_is_named_at_the_deadline() {
    let deadline = Duration::from_secs(2);
    if played(deadline) {
        return;
    }
    for transport in TRANSPORTS {
        let job = Job::start(
            "a_stopped_rank_is_named_at_the_deadline",
            transport,
            3,
            "forever",
            false,
        );
        job.all_ready();
        job.signal(2, Signal::STOP);
        let stopped = Instant::now();
        for rank in [0, 1] {
            let line = job.line(rank);
            assert!(
                line.starts_with("culprit Some(2) victim of Some(2): "),
                "{line}"
            );
            // Memory can be read of a stopped process; over TCP it cannot answer.
            let state = if transport == "shm" {
                "after step 41"
            } else {
                "does not answer"
            };
            assert!(
                line.contains("timed out after") && line.contains(state),
                "{line}"
            );
        }
        assert!(
            stopped.elapsed() < deadline + SOON,
            "{:?}",
            stopped.elapsed()
        );
        // Awake again it learns that it was given up.
        job.signal(2, Signal::CONT);
        assert!(job.line(2).contains("timed out after"));
    }
}

#[test]
fn the_launcher_ends_a_job_through_the_page() {
    if played(PATIENCE) {
        return;
    }
    for transport in TRANSPORTS {
        let job = Job::start(
            "the_launcher_ends_a_job_through_the_page",
            transport,
            3,
            "forever",
            true,
        );
        job.all_ready();
        let page = job.page.as_ref().unwrap();
        assert_eq!(
            (0..3)
                .map(|rank| page.slot(rank).rank())
                .collect::<Vec<_>>(),
            [Some(0), Some(1), Some(2)]
        );
        // A stopped rank keeps the others waiting in an operation; the word must reach them there.
        job.signal(1, Signal::STOP);
        assert!(page.revoke(&Revocation {
            rank: Some(1),
            text: "rank 1 was stopped".into()
        }));
        let revoked = Instant::now();
        for rank in [0, 2] {
            let line = job.line(rank);
            assert!(
                revoked.elapsed() < SOON,
                "rank {rank} took {:?}",
                revoked.elapsed()
            );
            assert!(
                line.starts_with("culprit Some(1)") && line.contains("rank 1 was stopped"),
                "{line}"
            );
            assert_eq!(page.slot(rank).victim_of(), Some(1));
        }
    }
}

#[test]
fn a_rank_that_cannot_share_memory_moves_all_to_tcp_unless_shm_was_asked_for() {
    if played(PATIENCE) {
        return;
    }
    let test = "a_rank_that_cannot_share_memory_moves_all_to_tcp_unless_shm_was_asked_for";
    for transport in ["auto", "auto over hosts"] {
        let job = Job::start(test, transport, 3, "tight", false);
        for line in job.all_ready() {
            assert!(line.starts_with("ready tcp"), "{line}");
        }
    }
    for transport in ["shm", "hierarchical"] {
        let job = Job::start(test, transport, 3, "tight", false);
        for line in job.all_ready() {
            let expected = format!(
                "no group: transport {transport:?} was asked for but cannot be used: rank 1 cannot create shared memory"
            );
            assert!(line.starts_with(&expected), "{line}");
        }
    }
}
