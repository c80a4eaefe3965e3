//! Several nodes as people start them: by the environment's address, told what they wait for, and stopped meanwhile.

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use support::{LAUNCHER, Run, TOKEN, free_port};

/// Noticing takes less than a lease; the rest is for a busy machine.
const SOON: Duration = Duration::from_secs(30);

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

/// A launcher on a host of this name.
fn launcher(host: &str, args: &[&str], env: &[(&str, &str)]) -> Command {
    let mut command = Command::new(LAUNCHER);
    command.args(["run", "--log-dir=/dev/null"]).args(args);
    command
        .args(["sh", "-c", "echo it ran"])
        .env("PACELINE_HOST_ID", host)
        .env("PACELINE_JOB_TOKEN", TOKEN)
        .env_remove("RANK")
        .envs(env.iter().copied());
    command
}

#[test]
fn one_node_that_was_told_the_address_of_a_job_on_two_ends_with_it() {
    let port = free_port().to_string();
    let endpoint = format!("--rdzv-endpoint=127.0.0.1:{port}");
    let master_port = format!("--master-port={port}");
    let elastic = ["--rdzv-backend=c10d", &endpoint];
    let numbered = ["--master-addr=127.0.0.1", &master_port];
    let variables = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &*port)];
    type Case<'a> = (&'a [&'a str], &'a [(&'a str, &'a str)], &'a str);
    let cases: [Case; 3] = [
        (&elastic, &[], "--nnodes 2 on a, --nnodes 1 on b"),
        (&numbered, &[], "--nnodes 1 on b, --nnodes 2 on node 0 on a"),
        (
            &[],
            &variables,
            "--nnodes 1 on b, --nnodes 2 on node 0 on a",
        ),
    ];
    for (args, env, expect) in cases {
        let [two, one] = ["--nnodes=2", "--nnodes=1"].map(|nodes| [&[nodes], args].concat());
        let mut first = launcher("a", &two, env);
        let mut first = first
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut told = BufReader::new(first.stderr.take().expect("a pipe")).lines();
        let mut next = |text: &str| {
            let mut lines = told.by_ref().map_while(Result::ok);
            let line = lines.find(|line| line.contains(text));
            line.unwrap_or_else(|| panic!("no line with {text:?}"))
        };
        next("missing: ");
        let other = Run::start(&mut launcher("b", &one, env)).end(SOON);
        assert_eq!(other.code, Some(2), "{}", other.err);
        let expect = format!("the nodes disagree: {expect}");
        assert!(other.err.contains(&expect), "{}", other.err);
        assert_eq!(other.out, "", "no rank was started");
        next(&expect);
        assert_eq!(first.wait().expect("it ends").code(), Some(2));
    }
}

#[test]
fn one_node_with_the_address_of_another_machine_is_refused_or_told() {
    // A documentation address, which no machine has.
    let other = Run::start(&mut launcher("b", &["--master-addr=192.0.2.1"], &[])).end(SOON);
    assert_eq!(other.code, Some(2), "{}", other.err);
    let expect = "--nnodes is 1 by default, and --master-addr names 192.0.2.1, another machine";
    assert!(other.err.contains(expect), "{}", other.err);
    let env = [("MASTER_ADDR", "192.0.2.1")];
    let other = Run::start(&mut launcher("b", &["--nnodes=1"], &env)).end(SOON);
    assert_eq!(other.code, Some(0), "{}", other.err);
    let expect = "--nnodes is 1, and MASTER_ADDR is 192.0.2.1, another machine: this node is a job of its own";
    assert!(other.err.contains(expect), "{}", other.err);
    assert_eq!(other.out, "[rank 0] it ran\n");
}
