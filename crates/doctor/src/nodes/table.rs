//! The tables of nodes: their names, and which reaches which.

use paceline_gpu::columns::aligned;
use paceline_words::{Lang, say};

use super::meet::is_reached;
use super::{MissKind, Nodes, Outcome, Row};
use crate::finding::size;

/// Nodes whose connections are shown all; of more, those with a failure.
const MATRIX_MAX: usize = 12;
/// Lines of connections at most.
const PAIRS_MAX: usize = 64;

/// Who came.
pub(crate) fn who(nodes: &Nodes, lang: Lang) -> String {
    let header = match lang {
        Lang::En => [
            "node", "host", "address", "ranks", "cores", "memory", "kernel",
        ],
        Lang::Ko => ["노드", "호스트", "주소", "랭크", "코어", "메모리", "커널"],
    };
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
        text += &more(nodes.cards.len() - PAIRS_MAX, lang);
    }
    text
}

fn more(number: usize, lang: Lang) -> String {
    say!(
        lang,
        "and {number} more, all of them with --json\n",
        "외 {number}개, 전체는 --json으로 볼 수 있음\n"
    )
}

/// Which node reaches which: the whole matrix on node 0, its own connections on any other.
pub(crate) fn pairs(nodes: &Nodes, lang: Lang) -> String {
    if nodes.cards.len() < 2 {
        return String::new();
    }
    if nodes.me == 0 && nodes.cards.len() <= MATRIX_MAX {
        return matrix(nodes, lang);
    }
    let header = match lang {
        Lang::En => ["from", "to", "it"],
        Lang::Ko => ["출발", "도착", "상태"],
    };
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
            nodes.name(from, lang),
            nodes.name(to, lang),
            cell(nodes.rows.get(&from), to, lang),
        ]);
    }
    match rows.len() - 1 {
        0 => say!(
            lang,
            "all nodes reach all others; every connection with --json\n",
            "모든 노드가 서로 연결됨; 각 연결은 --json으로 볼 수 있음\n"
        ),
        lines => {
            rows.truncate(PAIRS_MAX + 1);
            let mut text = aligned(&rows);
            if lines > PAIRS_MAX {
                text += &more(lines - PAIRS_MAX, lang);
            }
            text
        }
    }
}

fn matrix(nodes: &Nodes, lang: Lang) -> String {
    let mut header = vec![say!(lang, "from \\ to", "출발 \\ 도착")];
    header.extend(nodes.cards.keys().map(|to| nodes.name(*to, lang)));
    let mut rows = vec![header];
    for from in nodes.cards.keys() {
        let mut row = vec![nodes.name(*from, lang)];
        row.extend(nodes.cards.keys().map(|to| match from == to {
            true => "-".to_owned(),
            false => cell(nodes.rows.get(from), *to, lang),
        }));
        rows.push(row);
    }
    aligned(&rows)
}

fn cell(row: Option<&Row>, to: usize, lang: Lang) -> String {
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
    let word = first.unwrap_or(MissKind::Untried).word().of(lang);
    say!(lang, "FAILS: {word}", "실패: {word}")
}
