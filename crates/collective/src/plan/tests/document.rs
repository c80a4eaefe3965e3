//! What `docs/algorithms.md` says in numbers, counted from the plans themselves.

use std::collections::HashSet;
use std::fmt::Write;
use std::sync::Arc;

use crate::plan::choose::fit;
use crate::plan::{Algorithm, Hosts, Kind, Pattern, Plan, Share, Situation, Spec, choose};
use crate::tree::Tree;

/// What an operation costs where every rank is on a host of its own.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cost {
    rounds: usize,
    /// Sent by the rank that sends most messages.
    messages: usize,
    /// Out of the rank that sends most, in parts of `n`.
    out: f64,
    /// Into the rank that receives most, in parts of `n`.
    into: f64,
}

/// Elements that are cut evenly for all worlds and shapes of hosts in the tables.
const EVEN: usize = 192;

const WORLDS: [usize; 6] = [2, 3, 4, 8, 16, 64];

/// Hosts, and ranks on each.
const SHAPES: [(usize, usize); 5] = [(2, 2), (2, 4), (2, 8), (4, 8), (8, 8)];

/// An operation, and its `n`: elements of one rank's buffer, of all slots where there are slots.
fn example(kind: Kind, world: usize) -> (Pattern, usize) {
    let whole = matches!(kind, Kind::AllReduce | Kind::Reduce | Kind::Broadcast);
    let pattern = Pattern::new(kind, EVEN);
    (pattern, if whole { EVEN } else { EVEN * world })
}

fn plans(kind: Kind, algorithm: Algorithm, hosts: &Hosts, world: usize) -> Option<Vec<Plan>> {
    let tree = Tree::per_rank(world);
    fit(algorithm, kind, &tree, hosts).ok()?;
    let spec = Spec {
        pattern: example(kind, world).0,
        algorithm,
        tree,
        hosts: Arc::new(hosts.clone()),
        line: 1,
    };
    Some(Plan::all(&spec))
}

/// Calls `note(message, from, to, elements)` for all that crosses a stream, were all ranks apart; shares with equal
/// `message` travel together.
fn for_each_transfer(plans: &[Plan], mut note: impl FnMut((usize, bool), usize, usize, usize)) {
    let each = |by_round: &[Vec<Share>], note: &mut dyn FnMut(usize, &Share)| {
        for (round, shares) in by_round.iter().enumerate() {
            shares.iter().for_each(|share| note(round, share));
        }
    };
    for (rank, plan) in plans.iter().enumerate() {
        each(&plan.lends, &mut |round, share| {
            note((round, false), rank, share.peer, share.len);
        });
        each(&plan.gets, &mut |round, share| {
            note((round, true), share.peer, rank, share.len);
        });
    }
}

fn cost(kind: Kind, algorithm: Algorithm, world: usize) -> Option<Cost> {
    let plans = plans(kind, algorithm, &Hosts::apart(world), world)?;
    let n = example(kind, world).1 as f64;
    let (mut out, mut into) = (vec![0; world], vec![0; world]);
    let (mut sent, mut seen) = (vec![0; world], HashSet::new());
    for_each_transfer(&plans, |message, from, to, elements| {
        out[from] += elements;
        into[to] += elements;
        sent[from] += usize::from(seen.insert((message, from, to)));
    });
    let most = |counts: Vec<usize>| counts.into_iter().max().unwrap_or(0);
    Some(Cost {
        rounds: plans[0].rounds.len(),
        messages: most(sent),
        out: most(out) as f64 / n,
        into: most(into) as f64 / n,
    })
}

/// Out of the host that sends most, in parts of `n`.
fn between_hosts(kind: Kind, algorithm: Algorithm, count: usize, each: usize) -> Option<f64> {
    let world = count * each;
    let hosts = Hosts::new((0..world).map(|rank| rank / each).collect());
    let plans = plans(kind, algorithm, &hosts, world)?;
    let mut out = vec![0; count];
    for_each_transfer(&plans, |_, from, to, elements| {
        if hosts.host(from) != hosts.host(to) {
            out[hosts.host(from)] += elements;
        }
    });
    let most = out.into_iter().max().unwrap_or(0);
    Some(most as f64 / example(kind, world).1 as f64)
}

/// At most two digits after the point, none that says nothing.
fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').into()
}

fn row(cells: impl IntoIterator<Item = String>) -> String {
    let cells: Vec<String> = cells.into_iter().collect();
    format!("| {} |\n", cells.join(" | "))
}

fn head(cells: impl IntoIterator<Item = String>) -> String {
    let cells: Vec<String> = cells.into_iter().collect();
    let rule = "|---".repeat(cells.len());
    format!("{}{rule}|\n", row(cells))
}

/// Algorithms, the operations that have them, and what they do to the order of additions.
fn overview() -> String {
    let mut text = head(["algorithm", "operations", "order of additions"].map(String::from));
    let hosts = Hosts::new(vec![0, 0, 1, 1]);
    let tree = Tree::per_rank(4);
    for algorithm in Algorithm::ALL {
        let known = |kind: &Kind| {
            [&hosts, &Hosts::apart(4)]
                .iter()
                .any(|hosts| fit(algorithm, *kind, &tree, hosts).is_ok())
        };
        let kinds: Vec<Kind> = Kind::ALL.into_iter().filter(known).collect();
        let names: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
        let order = match (algorithm.keeps_order(), algorithm.rounds_once()) {
            (false, _) => "its own",
            (true, false) => "the fixed tree's",
            (true, true) => "the fixed tree's, for 16-bit numbers too",
        };
        let operations = match kinds.len() == Kind::ALL.len() {
            true => "all".into(),
            false => names.join(", "),
        };
        text += &row([format!("`{algorithm}`"), operations, order.into()]);
    }
    text
}

/// "`one-shot` up to 1 KiB, then `direct`".
fn choices(kind: Kind, hosts: &Hosts, world: usize) -> String {
    let tree = Tree::per_rank(world);
    let pick = |bytes: usize| choose(&Situation::plain(kind, bytes, &tree, hosts)).algorithm;
    let size = |bytes: usize| match bytes.ilog2() {
        ..10 => format!("{bytes} B"),
        10..20 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    };
    let (mut text, mut now) = (String::new(), pick(0));
    for limit in (3..40).map(|power| 1_usize << power) {
        for (bytes, word) in [(limit, "below"), (limit + 1, "up to")] {
            if pick(bytes) != now {
                write!(text, "`{now}` {word} {}, then ", size(limit)).expect("strings grow");
                now = pick(bytes);
            }
        }
    }
    format!("{text}`{now}`")
}

/// What the table picks for numbers of 32 or 64 bits.
fn table() -> String {
    let places = [
        ("one host", Hosts::one(8), 8),
        ("2 hosts of 1", Hosts::apart(2), 2),
        ("8 hosts of 1", Hosts::apart(8), 8),
        ("16 hosts of 1", Hosts::apart(16), 16),
        ("128 hosts of 1", Hosts::apart(128), 128),
        (
            "2 hosts of 4",
            Hosts::new((0..8).map(|rank| rank / 4).collect()),
            8,
        ),
        (
            "8 hosts of 8",
            Hosts::new((0..64).map(|rank| rank / 8).collect()),
            64,
        ),
    ];
    let mut text = head(["operation", "where", "algorithm"].map(String::from));
    for kind in Kind::ALL {
        let mut groups: Vec<(String, Vec<&str>)> = Vec::new();
        for (name, hosts, world) in &places {
            let choice = choices(kind, hosts, *world);
            match groups.iter_mut().find(|(known, _)| *known == choice) {
                Some((_, names)) => names.push(name),
                None => groups.push((choice, vec![name])),
            }
        }
        for (choice, names) in groups {
            let names = match names.len() == places.len() {
                true => "everywhere".into(),
                false => names.join("; "),
            };
            text += &row([kind.name().into(), names, choice]);
        }
    }
    text
}

fn costs() -> String {
    let mut text = String::new();
    for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Barrier) {
        write!(text, "### {}\n\n", kind.name()).expect("strings grow");
        let worlds = WORLDS.iter().map(|world| format!("{world} ranks"));
        text += &head(std::iter::once("algorithm".into()).chain(worlds));
        for algorithm in Algorithm::ALL {
            let cells = WORLDS.map(|world| cost(kind, algorithm, world));
            if cells.iter().all(Option::is_none) {
                continue;
            }
            let cell = |cost: Option<Cost>| {
                cost.map_or("-".into(), |cost| {
                    let Cost {
                        rounds, messages, ..
                    } = cost;
                    let (out, into) = (number(cost.out), number(cost.into));
                    format!("{rounds}, {messages}, {out}, {into}")
                })
            };
            let cells = cells.into_iter().map(cell);
            text += &row(std::iter::once(format!("`{algorithm}`")).chain(cells));
        }
        text.push('\n');
    }
    text.trim_end().to_string() + "\n"
}

fn hosts() -> String {
    let shapes = SHAPES.map(|(count, each)| format!("{count} hosts of {each}"));
    let mut text = head(
        ["operation".into(), "algorithm".into()]
            .into_iter()
            .chain(shapes),
    );
    let (tree, pairs) = (Tree::per_rank(4), Hosts::new(vec![0, 0, 1, 1]));
    let by_hosts = |kind: &Kind| fit(Algorithm::Hierarchical, *kind, &tree, &pairs).is_ok();
    for kind in Kind::ALL.into_iter().filter(by_hosts) {
        for algorithm in Algorithm::ALL {
            let cells = SHAPES.map(|(count, each)| between_hosts(kind, algorithm, count, each));
            if cells.iter().any(Option::is_none) {
                continue;
            }
            let cells = cells.into_iter().flatten().map(number);
            let names = [kind.name().into(), format!("`{algorithm}`")];
            text += &row(names.into_iter().chain(cells));
        }
    }
    text
}

/// The document with each part between its marks replaced; `None` where marks are missing.
fn renewed(document: &str) -> Option<String> {
    let parts = [
        ("overview", overview()),
        ("table", table()),
        ("costs", costs()),
        ("hosts", hosts()),
    ];
    let mut document = document.to_string();
    for (name, part) in parts {
        let mark = format!("<!-- counted: {name} -->\n\n");
        let start = document.find(&mark)? + mark.len();
        let end = start + document[start..].find("<!-- end -->")?;
        document.replace_range(start..end, &(part + "\n"));
    }
    Some(document)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_cost(kind: Kind, algorithm: Algorithm, world: usize, expected: (usize, usize, f64)) {
        let cost = cost(kind, algorithm, world).unwrap();
        assert_eq!((cost.rounds, cost.messages, cost.out), expected, "{kind:?}");
    }

    /// The counts that the papers give.
    #[test]
    fn plans_cost_what_the_literature_says() {
        let even = |world: f64| (world - 1.0) / world;
        for world in [2_usize, 4, 8, 16, 64] {
            let (w, log) = (world as f64, world.ilog2() as usize);
            let all_reduce = |algorithm, rounds, messages, out| {
                assert_cost(Kind::AllReduce, algorithm, world, (rounds, messages, out));
            };
            all_reduce(Algorithm::Direct, 1, 2 * (world - 1), 2.0 * even(w));
            all_reduce(Algorithm::OneShot, 1, world - 1, w - 1.0);
            all_reduce(
                Algorithm::Ring,
                2 * (world - 1),
                2 * (world - 1),
                2.0 * even(w),
            );
            assert_cost(
                Kind::Broadcast,
                Algorithm::Tree,
                world,
                (log, log, log as f64),
            );
        }
    }

    #[test]
    fn data_crosses_between_hosts_once() {
        for (count, each) in SHAPES {
            let other = (count - 1) as f64;
            let h = count as f64;
            for (kind, expected) in [
                (Kind::AllReduce, 2.0 * other / h),
                (Kind::Reduce, 1.0),
                (Kind::Broadcast, 2.0 * other / h),
                (Kind::AllGather, other / h),
                (Kind::ReduceScatter, other / h),
            ] {
                let crossed = between_hosts(kind, Algorithm::Hierarchical, count, each).unwrap();
                assert!((crossed - expected).abs() < 1e-9, "{kind:?}: {crossed}");
            }
        }
    }

    /// With `PACELINE_UPDATE_DOCS=1` writes the document instead of comparing it.
    #[test]
    fn the_document_says_what_the_plans_do() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/algorithms.md");
        let document = std::fs::read_to_string(path).unwrap();
        let renewed = renewed(&document).expect("docs/algorithms.md has all marks");
        if std::env::var_os("PACELINE_UPDATE_DOCS").is_some() {
            std::fs::write(path, renewed).unwrap();
            return;
        }
        let differs = document
            .lines()
            .zip(renewed.lines())
            .find(|(old, new)| old != new);
        assert_eq!(
            differs, None,
            "PACELINE_UPDATE_DOCS=1 cargo test -p paceline-collective document writes it anew"
        );
        assert_eq!(document.len(), renewed.len());
    }
}
