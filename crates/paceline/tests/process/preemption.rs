//! Stop requests to a user's own program: all ranks stop after the same step, whichever process gets the request.

use std::path::Path;

use rustix::process::{Signal, kill_process};
use tempfile::tempdir;

use super::support::{Ended, LIMIT, PACELINE, Running, command, probe, start};

fn running(folder: &Path, way: &str, flags: &str) -> Running {
    let probe = probe("stop");
    let line = format!("run --nproc-per-node 3 {flags} {probe} {way}");
    let job = start(folder, &line);
    for rank in 0..3 {
        job.has_printed(&format!("[rank {rank}] runs"));
    }
    job
}

/// Checks that all ranks have stopped after the same step, and that the launcher reports it.
fn is_stopped(ended: &Ended, signal: &str, code: i32) {
    let lines = ended
        .out
        .lines()
        .filter_map(|line| line.split_once(" stopped after "));
    let mut said: Vec<_> = lines.map(|(_, said)| said.to_owned()).collect();
    said.sort();
    said.dedup();
    let [said] = said.as_slice() else {
        panic!("{said:?} in {ended:?}");
    };
    assert!(
        said.starts_with("step ") && said.ends_with(&format!(" by {signal}")),
        "{said}"
    );
    ended.check(code, &[&format!("stopped after {said}")]);
}

#[test]
fn a_signal_to_the_launcher_stops_all_ranks_of_a_users_loop_after_one_step() {
    for way in ["ddp", "group"] {
        for (signal, name) in [(Signal::TERM, "SIGTERM"), (Signal::USR1, "SIGUSR1")] {
            let folder = tempdir().expect("a folder");
            let job = running(folder.path(), way, "--no-fold --max-restarts 3");
            job.signal(signal);
            let ended = job.ended(LIMIT);
            is_stopped(&ended, name, 128 + signal.as_raw());
            assert!(
                ended
                    .err
                    .contains(&format!("{name}: stopping after this step"))
            );
            assert!(!ended.err.contains("restart"), "{}", ended.err);
        }
    }
}

#[test]
fn a_signal_to_one_rank_stops_all_and_one_to_every_process_is_one_request() {
    for way in ["ddp", "group"] {
        let folder = tempdir().expect("a folder");
        let job = running(folder.path(), way, "--no-fold");
        kill_process(job.rank(2), Signal::USR1).expect("it runs");
        is_stopped(&job.ended(LIMIT), "SIGUSR1", 138);
    }
    let folder = tempdir().expect("a folder");
    let job = running(folder.path(), "ddp", "--no-fold");
    // Like a scheduler that signals every process in the job's control group.
    let ranks = [0, 1, 2].map(|rank| job.rank(rank));
    job.signal(Signal::TERM);
    for rank in ranks.into_iter().chain(ranks) {
        // It may have stopped already.
        let _ = kill_process(rank, Signal::TERM);
    }
    is_stopped(&job.ended(LIMIT), "SIGTERM", 143);
}

#[test]
fn a_notice_to_one_of_two_nodes_stops_the_ranks_of_both_after_one_step() {
    let folder = tempdir().expect("a folder");
    let endpoint = format!("127.0.0.1:{}", paceline_testing::free_ports(2));
    let nodes = ["a", "b"].map(|host| {
        let probe = probe("stop");
        let line = format!(
            "run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint {endpoint} --local-addr 127.0.0.1 \
             --nproc-per-node 2 --no-fold --max-restarts 3 {} ddp",
            probe
        );
        let mut node = command(folder.path(), PACELINE, line.split_whitespace());
        node.env("PACELINE_HOST_ID", host);
        node.env("PACELINE_JOB_TOKEN", "0f".repeat(32));
        Running::start(node)
    });
    for node in &nodes {
        node.has_printed("[rank ");
    }
    nodes[1].signal(Signal::USR1);
    let [a, mut b] = nodes.map(|node| node.ended(LIMIT));
    is_stopped(&a, "SIGUSR1", 138);
    b.out.push_str(&a.out);
    is_stopped(&b, "SIGUSR1", 138);
    let ranks = b.out.matches(" stopped after ").count();
    assert_eq!(ranks, 4, "{}", b.out);
}
