//! Several launchers that meet in a real etcd: what they do when nodes come and go, and when etcd does.

#[path = "../../rendezvous/tests/support/etcd.rs"]
mod server;
mod support;

use std::time::Duration;

use paceline_rendezvous::store::{Etcd, Store};
use paceline_rendezvous::token::Token;
use rustix::process::Signal;
use support::Watched;
use support::node::{Fleet, Node, STAY, up_in_any_order};

/// Several leases, on a busy machine.
const SOON: Duration = Duration::from_secs(30);
const ETCD: [&str; 2] = ["--backend", "etcd"];

fn fleet(server: &server::Etcd, nodes: &str) -> Fleet {
    let mut fleet = Fleet::new(nodes);
    fleet.endpoint = server.endpoint();
    // etcd shares the machine's few cores.
    fleet.lease_ms = 3000;
    fleet
}

fn flags<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&ETCD[..], more].concat()
}

fn up(nodes: &mut [Node], world: usize) {
    let mut nodes: Vec<&mut Node> = nodes.iter_mut().collect();
    up_in_any_order(&mut nodes, world);
}

/// Ends nodes that stay, and looks whether they have left something in etcd.
fn stop(server: &server::Etcd, nodes: &mut [Node]) {
    for node in nodes.iter() {
        node.signal(Signal::TERM);
    }
    for node in nodes {
        let (code, err) = node.end(SOON);
        assert_eq!(code, Some(143), "{err}");
    }
    nothing_is_left(server);
}

fn nothing_is_left(server: &server::Etcd) {
    let token = Token::derived("looks at names only");
    let etcd = Etcd::new(&server.endpoint(), "none", &token, SOON).unwrap();
    let left = etcd.connect(SOON).unwrap().list("", 100).unwrap().keys;
    assert_eq!(left, Vec::<String>::new());
}

#[test]
fn launchers_meet_in_etcd() {
    let Some(server) = server::Etcd::start() else {
        return;
    };
    every_rank_gets_its_place_among_the_nodes(&server);
    a_restart_is_the_whole_jobs(&server);
    the_first_failure_is_the_cause_on_all_nodes(&server);
    a_killed_agent_is_left_out_within_the_lease(&server);
    a_late_node_joins_and_one_too_many_waits_until_it_is_needed(&server);
    a_node_with_another_token_is_told_and_not_let_in(&server);
}

/// One job after the other has the same name: what is left of one would be in the way of the next.
fn every_rank_gets_its_place_among_the_nodes(server: &server::Etcd) {
    let fleet = fleet(server, "3");
    let script = "echo at $RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $WORLD_SIZE \
                  meet $MASTER_ADDR $MASTER_PORT $PACELINE_STORE";
    let mut nodes = Vec::new();
    for (host, nproc) in [("a", "1"), ("b", "2"), ("c", "1")] {
        if let Some(before) = nodes.last() {
            Node::waits_for_others(before);
        }
        nodes.push(fleet.node(host, &flags(&["--nproc", nproc]), script));
    }
    let first = nodes[0].expect("at 0 0 1 0 3 4 meet 127.0.0.1", SOON);
    let (_, place) = first.split_once(" meet ").expect("it says where");
    let mut others: Vec<String> = [1, 1, 2]
        .into_iter()
        .map(|node: usize| nodes[node].expect("at ", SOON))
        .collect();
    others.sort();
    for (line, expect) in others
        .iter()
        .zip(["at 1 0 2 1 3 4", "at 2 1 2 1 3 4", "at 3 0 1 2 3 4"])
    {
        assert!(line.contains(expect) && line.ends_with(place), "{line}");
    }
    for node in &mut nodes {
        let (code, err) = node.end(SOON);
        assert_eq!(code, Some(0), "{err}");
    }
    nothing_is_left(server);
}

fn a_restart_is_the_whole_jobs(server: &server::Etcd) {
    let script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0
        [ $RANK = 1 ] && exit 5
        sleep 100";
    let fleet = fleet(server, "2");
    let mut nodes = fleet.nodes(&["a", "b"], &flags(&["--max-restarts", "2"]), script);
    for node in &mut nodes {
        let (code, err) = node.end(SOON);
        assert_eq!(code, Some(0), "{err}");
        assert!(err.contains("rank 1 (node 1, host b, pid "), "{err}");
        assert_eq!(err.matches("; restart 1 of 2 took ").count(), 1, "{err}");
    }
    nothing_is_left(server);
}

fn the_first_failure_is_the_cause_on_all_nodes(server: &server::Etcd) {
    let script = "[ $RANK = 1 ] || exec sleep 100; echo out of disk >&2; exit 7";
    let mut nodes = fleet(server, "2").nodes(&["a", "b"], &ETCD, script);
    for node in &mut nodes {
        let (code, err) = node.end(SOON);
        assert_eq!(code, Some(7), "{err}");
        assert!(
            err.contains("failure: rank 1 (node 1, host b, pid ")
                && err.matches("out of disk").count() == 1,
            "{err}"
        );
    }
    nothing_is_left(server);
}

fn a_killed_agent_is_left_out_within_the_lease(server: &server::Etcd) {
    let script = "echo pid $$; echo up $RANK of $WORLD_SIZE; exec sleep 100";
    let mut nodes = fleet(server, "1:3").nodes(&["a", "b", "c"], &ETCD, script);
    // The one that would host the store if an agent did.
    let pid = nodes[0].expect("pid ", SOON);
    up(&mut nodes, 3);
    let rank = Watched::new(support::numbers(&pid).pop().expect("a number"));
    nodes[0].signal(Signal::KILL);
    assert!(rank.ends_within(SOON));
    up(&mut nodes[1..], 2);
    nodes[1].expect_err("host a has given no sign of life for ", SOON);
    stop(server, &mut nodes[1..]);
}

fn a_late_node_joins_and_one_too_many_waits_until_it_is_needed(server: &server::Etcd) {
    let fleet = fleet(server, "1:2");
    let mut a = fleet.node("a", &ETCD, STAY);
    a.expect("up 0 of 1", SOON);
    let mut b = fleet.node("b", &ETCD, STAY);
    a.expect("up 0 of 2", SOON);
    b.expect("up 1 of 2", SOON);
    a.expect_err("a node has joined", SOON);
    let mut c = fleet.node("c", &ETCD, STAY);
    c.expect_err("waiting: the job runs on 2 of at most 2 nodes", SOON);
    b.signal(Signal::KILL);
    a.expect("up 0 of 2", SOON);
    c.expect("up 1 of 2", SOON);
    stop(server, &mut [a, c]);
}

fn a_node_with_another_token_is_told_and_not_let_in(server: &server::Etcd) {
    let mut fleet = fleet(server, "2");
    let a = fleet.node("a", &ETCD, STAY);
    a.waits_for_others();
    fleet.token = Some("1e".repeat(32));
    let mut b = fleet.node("b", &flags(&["--join-ms", "1500"]), STAY);
    b.expect_err("is PACELINE_JOB_TOKEN the same on every node", SOON);
    let (code, err) = b.end(SOON);
    assert_eq!(code, Some(4), "{err}");
    assert!(
        err.contains("lost: no store was reached within 2 s"),
        "{err}"
    );
    stop(server, &mut [a]);
}

#[test]
fn a_job_outlives_etcd() {
    let Some(mut server) = server::Etcd::start() else {
        return;
    };
    ranks_run_on_while_etcd_is_away(&mut server);
    ranks_are_ended_when_etcd_is_away_for_too_long_and_the_job_goes_on_when_it_is_back(&mut server);
    an_etcd_that_has_forgotten_everything_is_told_again(&mut server);
}

fn ranks_run_on_while_etcd_is_away(server: &mut server::Etcd) {
    let folder = tempfile::tempdir().unwrap();
    let go = folder.path().join("go");
    let script = format!(
        "echo pid $$; echo up $RANK of $WORLD_SIZE; until [ -e {} ]; do sleep 0.05; done",
        go.display()
    );
    let fleet = fleet(server, "1:2");
    let mut nodes = fleet.nodes(&["a", "b"], &ETCD, &script);
    let pids = [0, 1].map(|node: usize| nodes[node].expect("pid ", SOON));
    let ranks = pids.map(|pid| Watched::new(support::numbers(&pid).pop().expect("a number")));
    up(&mut nodes, 2);
    server.kill();
    for node in &nodes {
        node.expect_err("the ranks run on without it for 60 s", SOON);
    }
    let longer_than_a_lease = Duration::from_millis(fleet.lease_ms * 3 / 2);
    assert!(!ranks[0].ends_within(longer_than_a_lease));
    server.start_again();
    for node in &nodes {
        node.expect_err("etcd is back after ", SOON);
    }
    assert!(!ranks[1].ends_within(longer_than_a_lease));
    std::fs::write(&go, "").unwrap();
    for node in &mut nodes {
        let (code, err) = node.end(SOON);
        assert_eq!(code, Some(0), "{err}");
        assert!(
            !err.contains("; round 2") && !err.contains("sign of life"),
            "{err}"
        );
    }
    nothing_is_left(server);
}

fn ranks_are_ended_when_etcd_is_away_for_too_long_and_the_job_goes_on_when_it_is_back(
    server: &mut server::Etcd,
) {
    let fleet = fleet(server, "2");
    let mut nodes = fleet.nodes(&["a", "b"], &flags(&["--outage-ms", "4000"]), STAY);
    up(&mut nodes, 2);
    server.kill();
    for node in &nodes {
        node.expect_err(
            "etcd was not reached for too long: its ranks are ended",
            SOON,
        );
    }
    server.start_again();
    up(&mut nodes, 2);
    stop(server, &mut nodes);
}

fn an_etcd_that_has_forgotten_everything_is_told_again(server: &mut server::Etcd) {
    let fleet = fleet(server, "2");
    let mut nodes = fleet.nodes(&["a", "b"], &ETCD, STAY);
    up(&mut nodes, 2);
    server.start_empty();
    up(&mut nodes, 2);
    nodes[0].expect_err("the job's record in etcd was lost", SOON);
    stop(server, &mut nodes);
}

#[test]
fn a_launcher_without_etcd_says_what_it_tries() {
    let mut fleet = Fleet::new("2");
    fleet.endpoint = format!("{0},{0}", fleet.endpoint);
    let (code, err) = fleet
        .node("a", &flags(&["--join-ms", "1000"]), STAY)
        .end(SOON);
    assert_eq!(code, Some(4), "{err}");
    assert!(
        err.contains("cannot be reached: connection refused; it is tried again"),
        "{err}"
    );
    fleet.endpoint = "https://node1:2379".to_owned();
    let (code, err) = fleet.node("a", &ETCD, STAY).end(SOON);
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("https is not supported"), "{err}");
}
