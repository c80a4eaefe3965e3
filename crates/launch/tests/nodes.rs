//! Several nodes as several launchers: killed, stopped, late, too many, and what the others make of it.

mod support;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::Watched;
use support::node::{Fleet, Node, SOON, STAY, up_in_any_order};

fn up(nodes: &mut [Node], world: usize) {
    for (rank, node) in nodes.iter_mut().enumerate() {
        node.expect(&format!("up {rank} of {world}"), SOON);
    }
}

#[test]
fn every_rank_gets_its_place_among_the_nodes() {
    let fleet = Fleet::new("2");
    let script = "echo at $RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $WORLD_SIZE \
                  $ROLE_RANK $ROLE_WORLD_SIZE $TORCHELASTIC_RUN_ID meet $MASTER_ADDR $MASTER_PORT $PACELINE_STORE";
    let mut a = fleet.node("a", &["--nproc", "1"], script);
    a.waits_for_others();
    let mut b = fleet.node("b", &["--nproc", "2"], script);
    let first = a.expect("at 0 0 1 0 2 3 0 3 none meet 127.0.0.1", SOON);
    let (_, place) = first.split_once(" meet ").expect("it says where");
    let mut others = [b.expect(" at ", SOON), b.expect(" at ", SOON)];
    others.sort();
    for (line, expect) in others
        .iter()
        .zip(["at 1 0 2 1 2 3 1 3 none", "at 2 1 2 1 2 3 2 3 none"])
    {
        assert!(
            line.contains(expect) && line.ends_with(place),
            "{line} and {first}"
        );
    }
    assert_eq!((a.end(SOON).0, b.end(SOON).0), (Some(0), Some(0)));
}

#[test]
fn the_first_failure_is_the_cause_on_all_nodes() {
    let fleet = Fleet::new("2");
    let script = "[ $RANK = 2 ] || exec sleep 100; echo out of disk >&2; exit 7";
    let mut nodes = fleet.nodes(&["a", "b"], &["--nproc", "2"], script);
    for node in &mut nodes {
        let (code, err) = node.end(SOON);
        assert_eq!(code, Some(7), "{err}");
        assert!(
            err.contains("failure: rank 2 (node 1, host b, pid "),
            "{err}"
        );
        assert!(err.contains("exited with code 7 after "), "{err}");
        assert_eq!(
            err.matches("out of disk").count(),
            1,
            "its last lines are everywhere, and nowhere twice: {err}"
        );
        assert!(
            err.contains("ranks 0, 1 and 3 were stopped because of it"),
            "{err}"
        );
    }
}

#[test]
fn a_restart_is_the_whole_jobs_and_one_line() {
    let fleet = Fleet::new("2");
    let script = "[ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0
        [ $RANK = $TORCHELASTIC_RESTART_COUNT ] && exit 5
        sleep 100";
    let mut nodes = fleet.nodes(&["a", "b"], &["--max-restarts", "2"], script);
    for node in &mut nodes {
        let (code, err) = node.end(SOON);
        assert_eq!(code, Some(0), "{err}");
        for (k, host) in [(1, "a"), (2, "b")] {
            let took = format!("; restart {k} of 2 took ");
            let line = err
                .lines()
                .find(|line| line.contains(&took))
                .expect("one line");
            let who = format!("rank {} (node {}, host {host}, pid ", k - 1, k - 1);
            assert!(
                line.starts_with(&who) && line.contains("exited with code 5"),
                "{line}"
            );
        }
    }
}

#[test]
fn a_node_whose_ranks_leave_something_slow_behind_is_not_given_up() {
    let fleet = Fleet::new("2");
    let folder = tempfile::tempdir().unwrap();
    let there = folder.path().join("there").display().to_string();
    // It outlives its rank for longer than a lease: it has two seconds until it is killed.
    let script = format!(
        "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0
        [ $RANK = 1 ] || exec sleep 100
        setsid sh -c 'trap \"\" TERM; touch {there}; while :; do sleep 0.1; done' &
        until [ -e {there} ]; do sleep 0.02; done; exit 5"
    );
    let mut nodes = fleet.nodes(&["a", "b"], &["--max-restarts", "1"], &script);
    for node in &mut nodes {
        let (code, err) = node.end(SOON);
        assert_eq!(code, Some(0), "{err}");
        assert!(err.contains("; restart 1 of 1 took "), "{err}");
        assert!(
            !err.contains("sign of life") && !err.contains("lease"),
            "{err}"
        );
    }
}

#[test]
fn the_budget_is_spent_once_for_all_nodes() {
    let fleet = Fleet::new("2");
    let script = "[ $RANK = 1 ] && exit 5; exec sleep 100";
    let mut nodes = fleet.nodes(&["a", "b"], &["--max-restarts", "1"], script);
    for node in &mut nodes {
        let (code, err) = node.end(SOON);
        assert_eq!(code, Some(5), "{err}");
        assert_eq!(err.matches("; restart ").count(), 1, "{err}");
    }
}

#[test]
fn a_killed_agent_is_left_out_and_its_ranks_are_gone() {
    let fleet = Fleet::new("1:3");
    let script = "echo pid $$; echo up $RANK of $WORLD_SIZE; exec sleep 100";
    let mut nodes = fleet.nodes(&["a", "b", "c"], &[], script);
    let pid = nodes[2].expect("pid ", SOON);
    up(&mut nodes, 3);
    let rank = Watched::new(support::numbers(&pid).pop().expect("a number"));
    nodes[2].signal(Signal::KILL);
    let killed = Instant::now();
    assert!(rank.ends_within(SOON));
    up(&mut nodes[..2], 2);
    let took = killed.elapsed();
    assert!(took < SOON, "{took:?}");
    nodes[0].expect_err("host c has given no sign of life for ", SOON);
}

#[test]
fn the_store_survives_its_agent() {
    let fleet = Fleet::new("1:3");
    let mut nodes = fleet.nodes(&["a", "b", "c"], &[], STAY);
    up(&mut nodes, 3);
    nodes[0].signal(Signal::KILL);
    up(&mut nodes[1..], 2);
    nodes[1].expect_err("the node with the job's store was lost", SOON);
    // And the store's second home is as good as the first.
    nodes[2].signal(Signal::KILL);
    up(&mut nodes[1..2], 1);
}

#[test]
fn a_launcher_started_again_at_the_endpoint_finds_the_job_elsewhere() {
    let fleet = Fleet::new("1:3");
    let flags = ["--last-call-ms", "3000"];
    let mut nodes = fleet.nodes(&["a", "b", "c"], &flags, STAY);
    up(&mut nodes, 3);
    nodes[0].signal(Signal::KILL);
    up(&mut nodes[1..], 2);
    nodes[0] = fleet.node("a", &flags, STAY);
    let [a, b, c] = &mut nodes[..] else {
        unreachable!("three nodes");
    };
    up_in_any_order(&mut [a, b, c], 3);
}

#[test]
fn of_two_nodes_the_other_goes_on_when_the_stores_agent_is_killed() {
    let fleet = Fleet::new("1:2");
    let mut nodes = fleet.nodes(&["a", "b"], &[], STAY);
    up(&mut nodes, 2);
    nodes[0].signal(Signal::KILL);
    up(&mut nodes[1..], 1);
}

#[test]
fn a_stopped_agent_is_left_out_and_comes_back() {
    let fleet = Fleet::new("1:3");
    let mut nodes = fleet.nodes(&["a", "b", "c"], &[], STAY);
    up(&mut nodes, 3);
    nodes[1].signal(Signal::STOP);
    let [a, b, c] = &mut nodes[..] else {
        unreachable!("three nodes");
    };
    up_in_any_order(&mut [a, c], 2);
    b.signal(Signal::CONT);
    up_in_any_order(&mut [a, b, c], 3);
    b.expect_err("this node was stopped for longer than its lease", SOON);
}

#[test]
fn a_stopped_store_is_replaced_and_its_agent_comes_back() {
    let fleet = Fleet::new("1:3");
    let mut nodes = fleet.nodes(&["a", "b", "c"], &[], STAY);
    up(&mut nodes, 3);
    nodes[0].signal(Signal::STOP);
    up(&mut nodes[1..], 2);
    nodes[0].signal(Signal::CONT);
    let [a, b, c] = &mut nodes[..] else {
        unreachable!("three nodes");
    };
    up_in_any_order(&mut [a, b, c], 3);
}

#[test]
fn a_late_node_joins_and_one_too_many_waits_until_it_is_needed() {
    let fleet = Fleet::new("1:2");
    let mut a = fleet.node("a", &[], STAY);
    a.expect("up 0 of 1", SOON);
    let mut b = fleet.node("b", &[], STAY);
    a.expect("up 0 of 2", SOON);
    b.expect("up 1 of 2", SOON);
    a.expect_err("a node has joined", SOON);
    let mut c = fleet.node("c", &[], STAY);
    c.expect_err("waiting: the job runs on 2 of at most 2 nodes", SOON);
    b.signal(Signal::KILL);
    a.expect("up 0 of 2", SOON);
    c.expect("up 1 of 2", SOON);
}

#[test]
fn two_nodes_that_die_together_are_left_out_together() {
    let fleet = Fleet::new("1:4");
    let mut nodes = fleet.nodes(&["a", "b", "c", "d"], &[], STAY);
    up(&mut nodes, 4);
    for node in &nodes[..2] {
        node.signal(Signal::KILL);
    }
    up(&mut nodes[2..], 2);
}

#[test]
fn a_node_that_dies_before_the_job_begins_is_left_out() {
    let fleet = Fleet::new("2:4");
    let mut nodes = fleet.nodes(&["a", "b", "c"], &[], STAY);
    nodes[2].signal(Signal::KILL);
    up(&mut nodes[..2], 2);
}

#[test]
fn a_static_job_says_which_node_it_lost() {
    let fleet = Fleet::new("2");
    let folder = tempfile::tempdir().unwrap();
    let logs = folder.path().to_str().unwrap();
    let mut a = fleet.node("a", &["--node-rank", "0", "--log-dir", logs], STAY);
    let mut b = fleet.node("b", &["--node-rank", "1"], STAY);
    a.expect("up 0 of 2", SOON);
    b.expect("up 1 of 2", SOON);
    b.signal(Signal::KILL);
    let (code, err) = a.end(SOON);
    assert_eq!(code, Some(1), "{err}");
    assert!(
        err.contains("lost: host b has given no sign of life for "),
        "{err}"
    );
    let text = std::fs::read(folder.path().join("error.json")).expect("an error file");
    let told: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    let fields = ["kind", "host", "job_exit_code", "run_id", "attempt"];
    assert_eq!(
        serde_json::Value::from_iter(fields.map(|field| told[field].clone())),
        serde_json::json!(["lost", "a", 1, "none", 0])
    );
    let cause = told["cause"].as_str().expect("text");
    assert!(
        cause.starts_with("host b has given no sign of life"),
        "{cause}"
    );
    assert_eq!(told["message"]["message"], cause);
}

#[test]
fn two_nodes_with_one_place_are_named() {
    let fleet = Fleet::new("3");
    let mut nodes = fleet.nodes(&["a"], &["--node-rank", "0"], STAY);
    for host in ["b", "c"] {
        nodes.push(fleet.node(host, &["--node-rank", "1"], STAY));
    }
    for node in &mut nodes {
        let (code, err) = node.end(SOON);
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains("both have --node-rank 1"), "{err}");
    }
}

#[test]
fn nodes_with_different_numbers_of_nodes_are_refused_with_both() {
    let mut fleet = Fleet::new("2");
    let told = "the nodes disagree: --nnodes 2 on node 0 on a, --nnodes 3 on node";
    let a = fleet.node("a", &["--node-rank", "0"], STAY);
    a.waits_for_others();
    fleet.nodes = "3".to_owned();
    let b = fleet.node("b", &["--node-rank", "1"], STAY);
    for mut node in [a, b] {
        let (code, err) = node.end(SOON);
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains(told), "{err}");
    }
    // One that comes when the others run is told alone.
    let mut fleet = Fleet::new("2");
    let mut nodes = fleet.nodes(&["a"], &["--node-rank", "0"], STAY);
    nodes.push(fleet.node("b", &["--node-rank", "1"], STAY));
    up(&mut nodes, 2);
    fleet.nodes = "3".to_owned();
    let (code, err) = fleet.node("c", &["--node-rank", "2"], STAY).end(SOON);
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains(told), "{err}");
    for (node, name) in nodes.iter().zip(["node 0 on a", "node 1 on b"]) {
        let warning = format!(
            "warning: the nodes disagree: --nnodes 2 on {name}, --nnodes 3 on node 2 on c; "
        );
        node.expect_err(&warning, SOON);
    }
}

#[test]
fn nodes_that_come_and_go_must_have_the_same_settings() {
    let disagree = |first: (&str, &[&str]), second: (&str, &[&str]), expect: [&str; 2]| {
        let mut fleet = Fleet::new(first.0);
        let a = fleet.node("a", first.1, STAY);
        a.waits_for_others();
        fleet.nodes = second.0.to_owned();
        let b = fleet.node("b", second.1, STAY);
        let [one, other] = expect;
        let told = format!("lost: the nodes disagree: {one} on a, {other} on b");
        for mut node in [a, b] {
            let (code, err) = node.end(SOON);
            assert_eq!(code, Some(2), "{err}");
            assert_eq!(err.matches(&told).count(), 1, "{err}");
        }
    };
    for (first, second) in [("2", "3"), ("2", "1"), ("2", "1:2"), ("2:4", "2:3")] {
        let expect = [first, second].map(|nodes| format!("--nnodes {nodes}"));
        disagree(
            (first, &[]),
            (second, &[]),
            expect.each_ref().map(|text| &**text),
        );
    }
    let restarts = ["--max-restarts", "2"];
    let expect = ["--max-restarts 2", "--max-restarts 0"];
    disagree(("2", &restarts), ("2", &[]), expect);
}

#[test]
fn a_late_node_with_other_settings_is_refused_and_the_job_runs_on() {
    let mut fleet = Fleet::new("1:2");
    let mut a = fleet.node("a", &[], STAY);
    a.expect("up 0 of 1", SOON);
    fleet.nodes = "2:3".to_owned();
    let (code, err) = fleet.node("b", &[], STAY).end(SOON);
    assert_eq!(code, Some(2), "{err}");
    let told = "the nodes disagree: --nnodes 1:2 on a, --nnodes 2:3 on b";
    assert!(err.contains(&format!("lost: {told}")), "{err}");
    a.expect_err(
        &format!("warning: {told}; the job that runs keeps its settings"),
        SOON,
    );
    fleet.nodes = "1:2".to_owned();
    let mut c = fleet.node("c", &[], STAY);
    up_in_any_order(&mut [&mut a, &mut c], 2);
}

#[test]
fn a_second_node_0_is_named_as_the_likely_reason_for_a_port_in_use() {
    let fleet = Fleet::new("2");
    let flags = ["--node-rank", "0"];
    let first = fleet.node("a", &flags, STAY);
    first.waits_for_others();
    let (code, err) = fleet.node("b", &flags, STAY).end(SOON);
    assert_eq!(code, Some(3), "{err}");
    let endpoint = &fleet.endpoint;
    let message = format!("error: {endpoint}, where the launchers meet, is in use");
    assert!(err.contains(&message), "{err}");
    assert!(
        err.contains("another launcher of this job with --node-rank 0"),
        "{err}"
    );
}

#[test]
fn a_host_that_cannot_be_resolved_is_told_once() {
    let mut fleet = Fleet::new("2");
    // `.invalid` is reserved for names that do not exist.
    fleet.endpoint = "node.invalid:29400".to_owned();
    let (code, err) = fleet.node("a", &["--join-ms", "3000"], STAY).end(2 * SOON);
    assert_eq!(code, Some(4), "{err}");
    let begins = "warning: cannot resolve node.invalid: ";
    let warnings: Vec<_> = err.lines().filter(|line| line.contains(begins)).collect();
    assert_eq!(warnings.len(), 1, "{err}");
    assert!(
        warnings[0].ends_with("; still trying (gives up after 3 s)"),
        "{err}"
    );
    // It may begin to wait before the first answer.
    let waits = err.lines().filter(|line| line.starts_with("waiting: "));
    assert!(waits.count() <= 1, "{err}");
}

#[test]
fn nodes_that_do_not_come_are_counted() {
    let fleet = Fleet::new("3");
    let mut nodes = fleet.nodes(&["a", "b"], &["--join-ms", "5000"], STAY);
    for node in &mut nodes {
        let (code, err) = node.end(SOON);
        assert_eq!(code, Some(4), "{err}");
        assert!(
            err.contains("lost: 2 of at least 3 nodes came within 5 s"),
            "{err}"
        );
    }
}

#[test]
fn a_signal_to_one_node_ends_its_part_and_the_others_go_on() {
    let fleet = Fleet::new("1:2");
    let mut nodes = fleet.nodes(&["a", "b"], &[], STAY);
    up(&mut nodes, 2);
    nodes[1].signal(Signal::TERM);
    assert_eq!(nodes[1].end(SOON).0, Some(143));
    up(&mut nodes[..1], 1);
    nodes[0].signal(Signal::TERM);
    assert_eq!(nodes[0].end(SOON).0, Some(143));
}

#[test]
fn a_node_without_the_token_is_told_what_to_do() {
    let mut fleet = Fleet::new("2");
    fleet.token = None;
    let (code, err) = fleet.node("a", &[], STAY).end(SOON);
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("PACELINE_JOB_TOKEN is not set"), "{err}");
    assert!(err.contains("openssl rand -hex 32"), "{err}");
}

#[test]
fn a_node_with_another_token_is_told_and_not_let_in() {
    let mut fleet = Fleet::new("2");
    let mut a = fleet.node("a", &[], STAY);
    a.waits_for_others();
    fleet.token = Some("1e".repeat(32));
    let mut b = fleet.node("b", &[], STAY);
    let refusal = "warning: the job's store refused a connection from 127.0.0.1: the peer has another PACELINE_JOB_TOKEN";
    a.expect_err(refusal, SOON);
    // It tries for three leases: the listener may belong to a job that is ending.
    let (code, err) = b.end(2 * SOON);
    assert_eq!(code, Some(2), "{err}");
    let differs = format!(
        "the launcher at {} refuses this node: PACELINE_JOB_TOKEN differs",
        fleet.endpoint
    );
    for text in ["warning: ", "lost: "] {
        assert!(err.contains(&format!("{text}{differs}")), "{err}");
        assert_eq!(err.matches(text).count(), 1, "{err}");
    }
    assert!(!err.contains(&format!("waiting: {differs}")), "{err}");
    a.signal(Signal::TERM);
    let (_, err) = a.end(SOON);
    assert_eq!(err.matches(refusal).count(), 1, "{err}");
}

#[test]
fn a_node_that_reaches_no_store_says_where_it_looked_and_why_there_is_none() {
    let fleet = Fleet::new("2");
    let flags = ["--node-rank", "1", "--join-ms", "1500"];
    let (code, err) = fleet.node("b", &flags, STAY).end(SOON);
    assert_eq!(code, Some(4), "{err}");
    let expected = format!(
        "lost: no store was reached within 2 s ({}: connection refused)",
        fleet.endpoint
    );
    assert!(err.contains(&expected), "{err}");
}

#[test]
fn a_port_that_an_http_server_holds_is_named_as_such() {
    let fleet = Fleet::new("2");
    let server = TcpListener::bind(&fleet.endpoint).expect("the endpoint's port");
    std::thread::spawn(move || {
        for mut stream in server.incoming().map_while(Result::ok) {
            // As real ones do, it waits for an empty line.
            let mut request = Vec::new();
            let mut byte = [0];
            while !request.ends_with(b"\r\n\r\n") && matches!(stream.read(&mut byte), Ok(1)) {
                request.push(byte[0]);
            }
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
        }
    });
    let (code, err) = fleet.node("a", &["--join-ms", "1500"], STAY).end(SOON);
    assert_eq!(code, Some(4), "{err}");
    let expected = format!(
        "the store at {}: the peer seems to be an HTTP server, not a process of this job",
        fleet.endpoint
    );
    for text in [
        &expected,
        "another port with MASTER_PORT, --master-port or --rdzv-endpoint",
    ] {
        assert!(err.contains(text), "{err}");
    }
}

#[test]
fn stores_of_a_job_speak_tls_and_a_node_that_does_not_is_told() {
    let mut fleet = Fleet::new("1:2");
    fleet.tls = "on";
    let script = "echo tls $PACELINE_TLS; echo up $RANK of $WORLD_SIZE; exec sleep 100";
    let mut nodes = fleet.nodes(&["a", "b"], &[], script);
    nodes[0].expect("tls on", SOON);
    up(&mut nodes, 2);
    fleet.tls = "off";
    let c = fleet.node("c", &["--join-ms", "1500"], script);
    c.expect_err("PACELINE_TLS differs", SOON);
    // The store that takes the place of a lost one is no other.
    nodes[0].signal(Signal::KILL);
    up(&mut nodes[1..], 1);
}

#[test]
fn each_node_keeps_its_ranks_logs_and_says_what_became_of_the_job() {
    let folder = tempfile::tempdir().unwrap();
    let logs = ["a", "b"].map(|host| folder.path().join(host));
    let fleet = Fleet::new("2");
    // Rank 1 fails when rank 0's line is in its log: the failure ends rank 0 at once.
    let script = r#"echo rank $RANK
        [ $RANK = 1 ] || exec sleep 100
        until [ -s "{first}/attempt_$TORCHELASTIC_RESTART_COUNT/0/stdout.log" ]; do sleep 0.01; done
        printf 'Traceback (most recent call last):\n  File "a.py"\nValueError: no data\n' >&2; exit 7"#;
    let script = &script.replace("{first}", logs[0].to_str().unwrap());
    let mut nodes: Vec<Node> = Vec::new();
    for log_dir in &logs {
        if let Some(before) = nodes.last() {
            before.waits_for_others();
        }
        let host = log_dir.file_name().unwrap().to_str().unwrap();
        let log_dir = log_dir.to_str().unwrap();
        let flags = ["--max-restarts", "1", "--log-dir", log_dir];
        nodes.push(fleet.node(host, &flags, script));
    }
    for (rank, (node, logs)) in nodes.iter_mut().zip(&logs).enumerate() {
        let (code, err) = node.end(SOON);
        assert_eq!(code, Some(7), "{err}");
        for attempt in ["attempt_0", "attempt_1"] {
            let log = logs.join(attempt).join("0/stdout.log");
            assert_eq!(support::lines(&log), [format!("rank {rank}")]);
        }
        let text = std::fs::read(logs.join("error.json")).expect("an error file");
        let told: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
        let expect = serde_json::json!(["b", 1, 0, 1, "ValueError: no data"]);
        let fields = ["host", "rank", "local_rank", "attempt", "error"];
        assert_eq!(
            serde_json::Value::from_iter(fields.map(|field| told[field].clone())),
            expect
        );
    }
}

#[test]
fn many_nodes_come_at_once() {
    const NODES: usize = 50;
    let mut fleet = Fleet::new("50");
    // Fifty launchers on a few cores have no second to spare.
    fleet.lease_ms = 10_000;
    let names: Vec<String> = (0..NODES).map(|node| format!("n{node}")).collect();
    let started = Instant::now();
    let mut nodes: Vec<_> = names
        .iter()
        .map(|name| fleet.node(name, &[], "exit 0"))
        .collect();
    for node in &mut nodes {
        let (code, err) = node.end(Duration::from_secs(60));
        assert_eq!(code, Some(0), "{err}");
    }
    eprintln!("{NODES} nodes came and went in {:?}", started.elapsed());
}
