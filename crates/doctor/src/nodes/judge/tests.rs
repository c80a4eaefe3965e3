//! Tables of what is said about nodes.

use std::net::SocketAddr;

use super::*;
use crate::local::tests::{found, noted};
use crate::nodes::Measured;
use crate::nodes::card::tests::card;

const FINE: Measured = Measured {
    round_trip_us: 100,
    clock_offset_us: 3,
    clock_error_us: 50,
    bytes_per_second: Some(1 << 30),
};

/// A node reached, or the kind of failure, at each of its addresses.
type Told<'a> = (usize, &'a [Result<Measured, MissKind>]);

fn cluster(nodes: usize) -> Nodes {
    let name = |node: usize| ["a", "b", "c", "d"][node];
    let address = |node: usize| format!("10.0.0.{}", node + 1);
    let mut cluster = Nodes {
        min: nodes,
        expected: nodes,
        ..Nodes::default()
    };
    for node in 0..nodes {
        cluster.cards.insert(node, card(name(node), &address(node)));
        let others: Vec<Told<'_>> = (0..nodes)
            .filter(|to| *to != node)
            .map(|to| (to, &[Ok(FINE)][..]))
            .collect();
        tell(&mut cluster, node, &others);
    }
    cluster
}

/// Replaces what a node says about others.
fn tell(cluster: &mut Nodes, from: usize, told: &[Told<'_>]) {
    let row = cluster.rows.entry(from).or_default();
    for (to, outcomes) in told {
        row.reaches.retain(|reach| reach.to != *to);
        let card = &cluster.cards.get(to);
        for (position, outcome) in outcomes.iter().enumerate() {
            let addr = match position {
                0 => format!("10.0.0.{}", to + 1),
                other => format!("172.17.{other}.1"),
            };
            let port = card.map_or(4711, |card| card.port);
            let at: SocketAddr = format!("{addr}:{port}").parse().expect("an address");
            let outcome = match outcome {
                Ok(measured) => Outcome::Reached(*measured),
                Err(kind) => Outcome::Failed(Miss {
                    kind: *kind,
                    text: format!("{kind:?}").to_lowercase(),
                }),
            };
            row.reaches.push(Reach {
                to: *to,
                addr,
                at: Some(at),
                outcome,
            });
        }
    }
}

fn said_about(cluster: &Nodes) -> Notes {
    noted(|notes| judge(cluster, 60, notes))
}

fn check(cluster: &Nodes, expect: &[&str]) {
    let notes = said_about(cluster);
    let whats: Vec<&str> = notes
        .findings
        .iter()
        .map(|found| found.what.as_str())
        .collect();
    assert_eq!(whats.len(), expect.len(), "{whats:#?}");
    for (what, expect) in whats.iter().zip(expect) {
        assert!(what.starts_with(expect), "{what}\nexpected: {expect}");
    }
}

#[test]
fn nodes_that_all_reach_each_other_are_sound() {
    check(&cluster(3), &[]);
    let facts = said_about(&cluster(3)).facts;
    assert!(
        facts.iter().any(|fact| fact.value == "3 of 3 came"),
        "{facts:?}"
    );
}

#[test]
fn a_node_that_has_not_come_is_named_by_its_number() {
    let mut nodes = cluster(2);
    nodes.expected = 3;
    nodes.turned_away = 1;
    check(
        &nodes,
        &[
            "node 2 of 3 has not come within 60 s; here: node 0 (a) and node 1 (b)",
            "1 connection to the meeting did not prove the job's token",
        ],
    );
    let severities = |nodes: &Nodes| said_about(nodes).findings[0].severity;
    assert_eq!(severities(&nodes), Severity::Warning, "two are enough");
    nodes.min = 3;
    assert_eq!(severities(&nodes), Severity::Error);
}

#[test]
fn one_direction_that_fails_is_told_from_both() {
    let mut nodes = cluster(3);
    tell(&mut nodes, 0, &[(1, &[Err(MissKind::Silent)])]);
    check(
        &nodes,
        &[
            "node 0 (a) does not reach node 1 (b) at 10.0.0.2:4711: silent; the other way, from node 1 (b), works",
        ],
    );
    tell(&mut nodes, 1, &[(0, &[Err(MissKind::Silent)])]);
    check(
        &nodes,
        &[
            "node 1 (b) does not reach node 0 (a) at 10.0.0.1:4711: silent; nor the other way",
            "node 0 (a) does not reach node 1 (b) at 10.0.0.2:4711: silent; nor the other way",
        ],
    );
}

#[test]
fn nodes_that_miss_one_in_the_same_way_are_named_together() {
    let mut nodes = cluster(4);
    for from in [0, 1, 3] {
        tell(&mut nodes, from, &[(2, &[Err(MissKind::Refused)])]);
    }
    check(
        &nodes,
        &[
            "node 0 (a), node 1 (b) and node 3 (d) do not reach node 2 (c) at 10.0.0.3:4711: refused",
        ],
    );
}

#[test]
fn each_kind_of_not_reaching_has_its_advice() {
    for (kind, fix) in [
        (
            MissKind::Silent,
            "let node 1 (b) accept TCP ports 32768 to 60999",
        ),
        (
            MissKind::Refused,
            "name the address by which the others reach it",
        ),
        (
            MissKind::NoRoute,
            "name an address of a network that all nodes share",
        ),
        (MissKind::Unresolved, "name its address there: --local-addr"),
        (
            MissKind::Stranger,
            "name an address that only node 1 (b) has",
        ),
        (MissKind::Untried, "mend the others first"),
        (MissKind::Broken, "look for a middle box"),
    ] {
        let mut nodes = cluster(2);
        tell(&mut nodes, 0, &[(1, &[Err(kind)])]);
        let expect = format!("error: reachability: {fix}");
        assert_eq!(found(&said_about(&nodes)), [expect.as_str()]);
    }
}

#[test]
fn an_address_that_fails_beside_one_that_works_matters_by_its_place_and_kind() {
    let check = |told: &[Result<Measured, MissKind>], expect: &[&str]| {
        let mut nodes = cluster(2);
        let card = nodes.cards.get_mut(&1).expect("there");
        card.addrs.push("172.17.1.1".into());
        tell(&mut nodes, 0, &[(1, told)]);
        assert_eq!(found(&said_about(&nodes)), expect, "{told:?}");
    };
    check(&[Ok(FINE), Ok(FINE)], &[]);
    check(
        &[Err(MissKind::Silent), Ok(FINE)],
        &["error: addresses: on node 1 (b): --local-addr 172.17.1.1"],
    );
    check(
        &[Ok(FINE), Err(MissKind::Silent)],
        &["warning: addresses: have ranks use the interface that works"],
    );
    check(
        &[Ok(FINE), Err(MissKind::Stranger)],
        &["note: addresses: nothing"],
    );
}

#[test]
fn a_node_that_stalls_after_it_came_is_named() {
    let mut nodes = cluster(2);
    nodes.rows.remove(&1);
    check(&nodes, &["node 1 (b) did not say whom it reaches"]);
    nodes.me = 1;
    nodes.rows = cluster(2).rows;
    nodes.rows.remove(&0);
    check(&nodes, &[]);
}

#[test]
fn clocks_speeds_and_distances_are_held_against_what_is_usual() {
    let with = |measured: Measured| {
        let mut nodes = cluster(3);
        tell(&mut nodes, 0, &[(1, &[Ok(measured)])]);
        nodes
    };
    check(
        &with(Measured {
            clock_offset_us: 12_000_000,
            ..FINE
        }),
        &["the clock of node 1 (b) is 12.0 s ahead of that of node 0 (a) (within 0.1 ms)"],
    );
    check(
        &with(Measured {
            clock_offset_us: i64::MIN,
            clock_error_us: u64::MAX,
            ..FINE
        }),
        &[],
    );
    check(
        &with(Measured {
            bytes_per_second: Some(5 << 20),
            ..FINE
        }),
        &["from node 0 (a) to node 1 (b) a short sample went at 5 MiB/s, where 1 GiB/s are usual"],
    );
    let slow = Measured {
        bytes_per_second: Some(10 << 20),
        round_trip_us: 40_000,
        ..FINE
    };
    let mut nodes = cluster(2);
    tell(&mut nodes, 0, &[(1, &[Ok(slow)])]);
    tell(&mut nodes, 1, &[(0, &[Ok(slow)])]);
    check(
        &nodes,
        &[
            "the nodes are connected at about 10 MiB/s",
            "a round trip between nodes takes 40.0 ms",
        ],
    );
}

#[test]
fn what_differs_between_nodes_is_said_by_how_much_it_matters() {
    let check = |change: fn(&mut Card), expect: &[&str]| {
        let mut nodes = cluster(3);
        change(nodes.cards.get_mut(&2).expect("there"));
        assert_eq!(found(&said_about(&nodes)), expect);
    };
    check(
        |card| card.version = "0.2.0".into(),
        &["error: versions: install the same"],
    );
    check(
        |card| card.arch = "aarch64".into(),
        &["warning: machines: use machines"],
    );
    check(
        |card| card.ranks = 4,
        &["note: machines: nothing, if that is meant; else"],
    );
    check(
        |card| card.cores = 4,
        &["note: machines: nothing, if that is meant; else"],
    );
    check(
        |card| card.kernel = "5.4".into(),
        &["note: machines: nothing"],
    );
    check(|card| card.memory_bytes /= 2, &["note: machines: nothing"]);
    check(|card| card.memory_bytes -= 1, &[]);
    check(
        |card| card.host = "a".into(),
        &["warning: machines: `sudo hostnamectl"],
    );
    check(
        |card| card.boot = "boot of a".into(),
        &["note: machines: nothing"],
    );
}
