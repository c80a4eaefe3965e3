//! The tables of nodes: their names, and which reaches which.

use std::fmt::Write;

use paceline_gpu::columns::aligned;

use super::meet::is_reached;
use super::{MissKind, Nodes, Outcome, Row};
use crate::finding::size;

/// Nodes whose connections are shown all; of more, those with a failure.
const MATRIX_MAX: usize = 12;
/// Lines of connections at most.
const PAIRS_MAX: usize = 64;

/// Who came.
pub(crate) fn who(nodes: &Nodes) -> String {
    let header = [
        "node", "host", "address", "ranks", "cores", "memory", "kernel",
    ];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for (node, card) in nodes.cards.iter().take(PAIRS_MAX) {
        let mark = if *node == nodes.me { "*" } else { "" };
        rows.push(vec![
            format!("{node}{mark}"),
            card.host.clone(),
            card.addrs.first().cloned().unwrap_or_default(),
            card.ranks.to_string(),
            card.cores.to_string(),
            size(card.memory_bytes),
            format!("{} {}", card.kernel, card.arch),
        ]);
    }
    let mut text = aligned(&rows);
    if nodes.cards.len() > PAIRS_MAX {
        let _ = writeln!(
            text,
            "and {} more, all of them with --json",
            nodes.cards.len() - PAIRS_MAX
        );
    }
    text
}

/// Which node reaches which: the whole matrix on node 0, its own connections on any other.
pub(crate) fn pairs(nodes: &Nodes) -> String {
    if nodes.cards.len() < 2 {
        return String::new();
    }
    if nodes.me == 0 && nodes.cards.len() <= MATRIX_MAX {
        return matrix(nodes);
    }
    let header = ["from", "to", "it"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    let all = nodes
        .cards
        .keys()
        .flat_map(|from| nodes.cards.keys().map(move |to| (*from, *to)));
    let is_shown = |from: usize, to: usize| match nodes.me {
        0 => nodes.rows.get(&from).is_none_or(|row| !is_reached(row, to)),
        me => from == me || to == me,
    };
    for (from, to) in all.filter(|(from, to)| from != to && is_shown(*from, *to)) {
        rows.push(vec![
            nodes.name(from),
            nodes.name(to),
            cell(nodes.rows.get(&from), to),
        ]);
    }
    match rows.len() - 1 {
        0 => "all nodes reach all others; every connection with --json\n".to_owned(),
        lines => {
            rows.truncate(PAIRS_MAX + 1);
            let mut text = aligned(&rows);
            if lines > PAIRS_MAX {
                let _ = writeln!(
                    text,
                    "and {} more, all of them with --json",
                    lines - PAIRS_MAX
                );
            }
            text
        }
    }
}

fn matrix(nodes: &Nodes) -> String {
    let mut header = vec!["from \\ to".to_owned()];
    header.extend(nodes.cards.keys().map(|to| nodes.name(*to)));
    let mut rows = vec![header];
    for from in nodes.cards.keys() {
        let mut row = vec![nodes.name(*from)];
        row.extend(nodes.cards.keys().map(|to| match from == to {
            true => "-".to_owned(),
            false => cell(nodes.rows.get(from), *to),
        }));
        rows.push(row);
    }
    aligned(&rows)
}

fn cell(row: Option<&Row>, to: usize) -> String {
    let Some(row) = row else {
        return "?".to_owned();
    };
    if let Some(measured) = row.measured(to) {
        let trip = format!("{:.2} ms", measured.round_trip_us as f64 / 1e3);
        return match measured.bytes_per_second {
            Some(speed) => format!("{trip}, {}/s", size(speed)),
            None => trip,
        };
    }
    let first = row.to(to).find_map(|reach| match &reach.outcome {
        Outcome::Failed(miss) => Some(miss.kind),
        Outcome::Reached(_) => None,
    });
    let word = match first {
        Some(MissKind::Silent) => "no answer",
        Some(MissKind::Refused) => "refused",
        Some(MissKind::NoRoute) => "no route",
        Some(MissKind::Unresolved) => "unknown name",
        Some(MissKind::Stranger) => "somebody else",
        Some(MissKind::Broken) => "broken",
        Some(MissKind::Untried) | None => "not tried",
    };
    format!("FAILS: {word}")
}
