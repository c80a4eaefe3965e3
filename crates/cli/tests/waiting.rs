//! Several nodes as people start them: by the environment's address, told what they wait for, and stopped meanwhile.

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use support::{LAUNCHER, TOKEN, free_port};

/// A launcher of one of two nodes, with torchrun's spelling.
fn node(rank: usize, port: u16, program: &[&str]) -> Child {
    Command::new(LAUNCHER)
        .args([
            "run",
            "--nnodes=2",
            &format!("--node_rank={rank}"),
            "--log-dir=/dev/null",
            "--usage=on",
        ])
        .args(program)
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        .env("PACELINE_JOB_TOKEN", TOKEN)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts")
}

#[test]
fn the_environments_address_brings_nodes_together() {
    let port = free_port();
    let show = ["sh", "-c", "echo $RANK of $WORLD_SIZE at $MASTER_PORT"];
    let nodes = [1, 0].map(|rank| (rank, node(rank, port, &show)));
    for (rank, node) in nodes {
        let ended = node.wait_with_output().expect("it ends");
        let expect = format!("[rank {rank}] {rank} of 2 at {port}\n");
        let err = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(String::from_utf8_lossy(&ended.stdout), expect, "{err}");
        assert_eq!(ended.status.code(), Some(0), "{err}");
    }
}

#[test]
fn a_wait_names_the_missing_node_and_a_signal_ends_it() {
    let mut node = node(0, free_port(), &["true"]);
    let mut lines = BufReader::new(node.stderr.take().expect("a pipe")).lines();
    let mut next = |text: &str| {
        let line = lines
            .by_ref()
            .map_while(Result::ok)
            .find(|line| line.contains(text));
        line.unwrap_or_else(|| panic!("no line with {text:?}"))
    };
    let line = next("missing: node 1");
    assert!(
        line.starts_with("waiting: 1 of 2 nodes has joined (node 0 on "),
        "{line}"
    );
    assert!(
        line.contains("; the launchers meet at 127.0.0.1:")
            && line.ends_with(" (one above --master-port)"),
        "{line}"
    );
    let pid = rustix::process::Pid::from_child(&node);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it lives");
    next("SIGTERM: stopped while it waited for the other nodes");
    let rest: Vec<_> = lines.map_while(Result::ok).collect();
    assert!(
        rest.is_empty(),
        "no rank ran, so nothing is summed up: {rest:?}"
    );
    assert_eq!(node.wait().expect("it ends").code(), Some(128 + 15));
}
