//! Invariants that hold at every moment, whatever happens.

use super::{Running, World};
use crate::elastic::decide::Ranks;
use crate::elastic::record::{Phase, Record};

/// When a node starts its ranks.
pub(super) fn check_start(world: &World, node: usize, record: &Record) {
    let rules = &world.rules;
    let size = record.members.len();
    let least = match record.continues {
        Some(_) => 1,
        None => rules.nodes_min,
    };
    assert!(
        (least..=rules.nodes_max).contains(&size),
        "a round of {size} nodes"
    );
    assert!(matches!(record.phase, Phase::Running(_)));
    assert!(
        record.restarts <= rules.max_restarts,
        "the budget is overdrawn"
    );
    let id = world.nodes[node].agent.id();
    assert!(record.position(id).is_some(), "node {node} is no member");
    if let Some(same) = world.started.get(&record.id.number) {
        assert_eq!(same.record, *record, "two rounds with one number");
    }
    let mut ranks: Vec<usize> = Vec::new();
    for place in 0..size {
        let first = record.first_rank(place);
        ranks.extend(first..first + record.members[place].slots.len());
    }
    assert!(
        ranks.iter().copied().eq(0..record.world()),
        "ranks are not 0..world once each"
    );
    let mut ids = record.ids();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), size, "an agent is in the round twice");
    check_hosts(record);
    for (number, other) in &world.started {
        if *number < record.id.number {
            check_order(&other.record, record);
        }
    }
}

/// Ranks go on in a round that continues theirs, and nowhere else.
pub(super) fn check_going_on(node: usize, before: Option<&Running>, record: &Record) {
    match (before, record.continues) {
        (None, None) => {}
        (Some(before), Some(started)) => {
            let same = before.record.since();
            assert_eq!(same, started, "node {node} has ranks of other processes");
            // An invitation ends nothing.
            let expected = (!record.is_invitation()).then_some(record.id);
            assert_eq!(
                before.waits_for, expected,
                "the generation before on node {node}"
            );
        }
        _ => panic!("node {node} has ranks already"),
    }
}

/// Agents of one host are neighbours.
fn check_hosts(record: &Record) {
    let mut seen: Vec<&str> = Vec::new();
    for member in &record.members {
        if seen.last() != Some(&member.host.as_str()) {
            assert!(
                !seen.contains(&member.host.as_str()),
                "the ranks of {} lie apart",
                member.host
            );
            seen.push(&member.host);
        }
    }
}

/// Agents that are in both rounds are in the same order, as long as they were in all rounds between.
fn check_order(before: &Record, after: &Record) {
    if before.id.number + 1 < after.id.number {
        return;
    }
    let places: Vec<_> = after
        .members
        .iter()
        .filter_map(|member| before.position(member.id))
        .collect();
    assert!(places.is_sorted(), "the order has changed: {places:?}");
}

/// After every step.
pub(super) fn check(world: &World) {
    for (place, node) in world.nodes.iter().enumerate() {
        if !node.alive || node.exit.is_some() {
            continue;
        }
        // The agent knows what runs.
        match (node.agent.ranks(), &node.ranks) {
            (Ranks::Live(round), Some(running)) => assert_eq!(round, running.record.id),
            (Ranks::None, None) | (Ranks::Ending, _) => {}
            // Between the command and its execution.
            (Ranks::Live(_), None) => {}
            (Ranks::None, Some(_)) => panic!("node {place} has forgotten its ranks"),
        }
    }
    // A round whose generation has ended somewhere commits no step.
    let is_whole = |record: &Record| {
        record.members.iter().all(|member| {
            world.nodes.iter().any(|node| {
                let same = |running: &Running| {
                    running.record.id == record.id && running.waits_for.is_none()
                };
                node.agent.id() == member.id && node.ranks.as_ref().is_some_and(same)
            })
        })
    };
    let live: Vec<_> = world
        .nodes
        .iter()
        .filter_map(|node| node.ranks.as_ref())
        .map(|running| running.record.id)
        .collect();
    if live.windows(2).all(|pair| pair[0] == pair[1]) {
        return;
    }
    let whole = world
        .started
        .values()
        .filter(|started| live.contains(&started.record.id) && is_whole(&started.record));
    assert!(whole.count() <= 1, "two rounds run at the same time");
}
