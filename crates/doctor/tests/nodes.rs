//! The checks of several nodes as processes on the loopback address.

mod support;

use std::time::Duration;

use paceline_rendezvous::store::{Server, Store as _};
use support::{Answer, Fleet, TOKEN};

#[test]
fn three_nodes_meet_and_node_0_shows_who_reaches_whom() {
    for tls in ["off", "on"] {
        let mut fleet = Fleet::new(3);
        fleet.tls = tls;
        let answers = fleet.run(&["a", "b", "c"]);
        for answer in &answers {
            assert_eq!(answer.code, 0, "{answer:?}");
            assert!(answer.out.contains("3 of 3 came"), "{answer:?}");
            assert!(answer.out.contains("0 errors"), "{answer:?}");
        }
        let matrices: Vec<&Answer> = answers
            .iter()
            .filter(|answer| answer.out.contains("from \\ to"))
            .collect();
        let [first] = matrices[..] else {
            panic!("{answers:?}");
        };
        // Six connections, and the median.
        assert_eq!(first.out.matches(" ms, ").count(), 6 + 1, "{first:?}");
        assert!(!first.out.contains("FAILS"), "{first:?}");
    }
}

#[test]
fn nodes_may_be_numbered_beforehand() {
    let fleet = Fleet::new(2);
    let (zero, one) = (
        fleet.node("a", &["0", "json"]),
        fleet.node("b", &["1", "json"]),
    );
    for (number, node) in [zero, one].into_iter().enumerate() {
        let answer = node.end();
        assert_eq!(answer.code, 0, "{answer:?}");
        let json: serde_json::Value = serde_json::from_str(&answer.out).expect("JSON");
        assert_eq!(json["nodes"]["me"], number);
        assert_eq!(json["nodes"]["cards"]["1"]["host"], "b");
        let reach = &json["nodes"]["rows"]["0"]["reaches"][0];
        assert!(reach["reached"]["round_trip_us"].is_u64(), "{reach}");
    }
}

#[test]
fn a_node_with_another_token_is_told_so_and_the_others_hear_of_it() {
    let mut fleet = Fleet::new(2);
    let first = fleet.node("a", &["0"]);
    fleet.token = "ee".repeat(32);
    let wrong = fleet.node("b", &["1"]).end();
    assert_eq!(wrong.code, 1, "{wrong:?}");
    for words in [
        "refused this process: it has another job token",
        "fix: export PACELINE_JOB_TOKEN",
    ] {
        assert!(wrong.out.contains(words), "{words}: {wrong:?}");
    }
    fleet.token = TOKEN.repeat(32);
    let right = fleet.node("b", &["1"]).end();
    let first = first.end();
    assert_eq!((first.code, right.code), (0, 0), "{first:?} {right:?}");
    let words = "1 connection to the meeting did not prove the job's token";
    assert!(first.out.contains(words), "{first:?}");
}

#[test]
fn a_node_that_does_not_come_is_named_when_time_is_up() {
    let mut fleet = Fleet::new(2);
    fleet.seconds = 1;
    let answer = fleet.node("a", &["0"]).end();
    assert_eq!(answer.code, 4, "{answer:?}");
    let words = "error: node 1 of 2 has not come within 1 s; here: node 0 (a)";
    assert!(answer.out.contains(words), "{answer:?}");
}

#[test]
fn a_node_that_speaks_tls_alone_is_told_so() {
    let mut fleet = Fleet::new(2);
    let _plain = fleet.node("a", &["0"]);
    fleet.tls = "on";
    let tls = fleet.node("b", &["1"]).end();
    assert_eq!(tls.code, 1, "{tls:?}");
    let words = "fix: set PACELINE_TLS to the same value";
    assert!(tls.out.contains(words), "{tls:?}");
}

#[test]
fn a_node_alone_says_that_nobody_is_at_the_endpoint() {
    let mut fleet = Fleet::new(2);
    fleet.seconds = 1;
    let answer = fleet.node("b", &["1"]).end();
    assert_eq!(answer.code, 4, "{answer:?}");
    assert!(
        answer.out.contains("error: cannot meet the other nodes at"),
        "{answer:?}"
    );
    assert!(
        answer
            .out
            .contains("fix: start the same command on the endpoint's host"),
        "{answer:?}"
    );
}

#[test]
fn one_node_too_many_and_one_number_twice_are_refused() {
    let fleet = Fleet::new(2);
    let _first = fleet.node("a", &[]);
    let client = fleet.client();
    let meeting = ["doctor/1/host"];
    client
        .wait(&meeting, Duration::from_secs(20))
        .expect("it is there");
    client.add("doctor/1/come", 1).expect("added");
    let answer = fleet.node("c", &[]).end();
    assert_eq!(answer.code, 1, "{answer:?}");
    assert!(answer.out.contains("this one is too many"), "{answer:?}");

    client.set("doctor/1/owner/1", b"another").expect("set");
    let answer = fleet.node("c", &["1"]).end();
    assert_eq!(answer.code, 1, "{answer:?}");
    assert!(answer.out.contains("with --node-rank 1 too"), "{answer:?}");
}

#[test]
fn a_store_of_a_job_is_not_taken_for_a_meeting() {
    let fleet = Fleet::new(2);
    let addr = fleet.endpoint.parse().expect("an address");
    let _job = Server::bind(addr, &fleet.secret()).expect("bound");
    let answer = fleet.node("a", &[]).end();
    assert_eq!(answer.code, 1, "{answer:?}");
    assert!(
        answer.out.contains("that belongs to a running job"),
        "{answer:?}"
    );
}

#[test]
fn a_peer_that_writes_nonsense_does_not_bring_the_others_down() {
    let fleet = Fleet::new(2);
    let node = fleet.node("a", &["0"]);
    let client = fleet.client();
    client
        .set("doctor/1/card/1", b"{\"id\": \"\x1b[2J\"")
        .expect("set");
    let answer = node.end();
    assert_eq!(answer.code, 1, "{answer:?}");
    assert!(
        answer.out.contains("node 1: what it sent cannot be read"),
        "{answer:?}"
    );
    assert!(!answer.out.contains('\u{1b}'), "{answer:?}");
}
