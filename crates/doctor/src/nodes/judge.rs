//! Judges the nodes: which are missing, which do not reach which and why, and what differs. Does no I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use paceline_rendezvous::token::TOKEN_VARIABLE;

use super::meet::is_reached;
use super::{Card, Miss, MissKind, Nodes, Outcome, Reach};
use crate::finding::{Notes, Severity, Sheet, count, size};

/// Clocks further apart than this are worth a word; time servers keep them within milliseconds.
const CLOCK_US: u64 = 1_000_000;
/// A connection so much slower than the usual one of the job stands out of what a short sample may be wrong by.
const SLOWER_TIMES: u64 = 4;
/// About a gigabit: below, gradients of any size take longer than their computation.
const SLOW_BYTES_PER_SECOND: u64 = 100 << 20;
/// Round trips within one building are below this.
const FAR_US: u64 = 5_000;
/// Differences of memory below a tenth are those of firmware.
const MEMORY_TENTHS: u64 = 9;

/// Everything that can be said about nodes that met.
pub(crate) fn judge(nodes: &Nodes, seconds: u64, notes: &mut Notes) {
    missing(nodes, seconds, notes);
    reached(nodes, notes);
    addresses(nodes, notes);
    clocks(nodes, notes);
    speeds(nodes, notes);
    differences(nodes, notes);
}

fn missing(nodes: &Nodes, seconds: u64, notes: &mut Notes) {
    let mut sheet = notes.sheet("nodes");
    let here: Vec<usize> = nodes.cards.keys().copied().collect();
    sheet.fact(format!("{} of {} came", here.len(), nodes.expected));
    let missing = (0..nodes.expected).filter(|node| !nodes.cards.contains_key(node));
    let missing: Vec<String> = missing.map(|node| node.to_string()).collect();
    if !missing.is_empty() {
        let severity = match here.len() < nodes.min {
            true => Severity::Error,
            false => Severity::Warning,
        };
        let (noun, verb) = match missing.len() {
            1 => ("node", "has"),
            _ => ("nodes", "have"),
        };
        let shown = missing.len().min(20);
        sheet.add(
            severity,
            format!(
                "{noun} {} of {} {verb} not come within {seconds} s; here: {}",
                missing[..shown].join(", "),
                nodes.expected,
                nodes.names(&here)
            ),
            "the command does not run there, looks for another endpoint, or cannot reach this one: then it says so there".to_owned(),
            "start the same command on every node, and look at what it prints on the missing ones; more time: --timeout SECONDS".to_owned(),
        );
    }
    if nodes.turned_away > 0 {
        let connections = count(
            usize::try_from(nodes.turned_away).unwrap_or(usize::MAX),
            "connection",
        );
        sheet.warning(
            format!("{connections} to the meeting did not prove the job's token"),
            format!("a node with another {TOKEN_VARIABLE} or PACELINE_TLS has tried, or a program that scans ports"),
            format!("if a node is missing, compare {TOKEN_VARIABLE} there with the one here"),
        );
    }
}

/// The nodes that fail to reach a node in one way.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Gap {
    to: usize,
    addr: String,
    kind: MissKind,
    text: String,
    back: Back,
}

/// What works in the other direction.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Back {
    Works,
    Fails,
    Unknown,
}

fn reached(nodes: &Nodes, notes: &mut Notes) {
    let mut sheet = notes.sheet("reachability");
    let mut gaps: BTreeMap<Gap, Vec<usize>> = BTreeMap::new();
    for from in nodes.cards.keys() {
        let Some(row) = nodes.rows.get(from) else {
            // Beyond a number of nodes only node 0 has all rows.
            if nodes.me == 0 {
                sheet.error(
                    format!("{} did not say whom it reaches", nodes.name(*from)),
                    "it came, and then it stalled or ended, or its connection to the meeting broke",
                    "look at what the command prints there, and start it again",
                );
            }
            continue;
        };
        for to in nodes.cards.keys().filter(|to| *to != from) {
            let attempts: Vec<(&Reach, &Miss)> = row
                .to(*to)
                .filter_map(|reach| match &reach.outcome {
                    Outcome::Failed(miss) => Some((reach, miss)),
                    Outcome::Reached(_) => None,
                })
                .collect();
            if is_reached(row, *to) {
                continue;
            }
            let back = match nodes.rows.get(to) {
                Some(row) if is_reached(row, *from) => Back::Works,
                Some(_) => Back::Fails,
                None => Back::Unknown,
            };
            let gap = match attempts.first() {
                Some((reach, miss)) => Gap {
                    to: *to,
                    addr: place(reach, &nodes.cards[to]),
                    kind: miss.kind,
                    text: miss.text.clone(),
                    back,
                },
                None => Gap {
                    to: *to,
                    addr: "any address".to_owned(),
                    kind: MissKind::Untried,
                    text: "it was not tried".to_owned(),
                    back,
                },
            };
            gaps.entry(gap).or_default().push(*from);
        }
    }
    for (gap, from) in &gaps {
        gap_finding(nodes, gap, from, &mut sheet);
    }
}

fn gap_finding(nodes: &Nodes, gap: &Gap, from: &[usize], sheet: &mut Sheet<'_>) {
    let (who, whom) = (nodes.names(from), nodes.name(gap.to));
    let card = &nodes.cards[&gap.to];
    let verb = match from.len() {
        1 => "does not reach",
        _ => "do not reach",
    };
    let others = match card.addrs.len() {
        0 | 1 => String::new(),
        count => format!(", nor at its {} other addresses", count - 1),
    };
    let direction = match gap.back {
        Back::Works => format!("; the other way, from {whom}, works"),
        Back::Fails => "; nor the other way".to_owned(),
        Back::Unknown => String::new(),
    };
    let what = format!(
        "{who} {verb} {whom} at {}: {}{others}{direction}",
        gap.addr, gap.text
    );
    let range = match card.ports {
        Some((first, last)) => format!("{first} to {last}"),
        None => "above 1024".to_owned(),
    };
    let firewall = match &card.firewall {
        Some(firewall) => format!(" ({firewall} is turned on there)"),
        None => String::new(),
    };
    let needed = "ranks connect to one another at ports that the system chooses, and a job forms only when all reach all";
    let (why, fix) = match gap.kind {
        MissKind::Silent => (
            format!("{needed}; when nothing at all comes back, a firewall drops it{firewall}, or the address leads elsewhere"),
            format!(
                "let {whom} accept TCP ports {range} from the other nodes (firewall, or a cloud's security group); or name another \
                 address of it there: --local-addr ADDRESS"
            ),
        ),
        MissKind::Refused => (
            format!("{needed}; the machine at that address answers, but not {whom}: the address is another machine's, or a firewall rejects{firewall}"),
            format!(
                "name the address by which the others reach it, there: --local-addr ADDRESS; or let {whom} accept TCP ports {range}"
            ),
        ),
        MissKind::NoRoute => (
            format!("{needed}; no network of {who} leads to that address"),
            "name an address of a network that all nodes share, there: --local-addr ADDRESS, or by interface: PACELINE_SOCKET_IFNAME"
                .to_owned(),
        ),
        MissKind::Unresolved => (
            format!("{whom} goes by a name that means nothing on {who}"),
            "name its address there: --local-addr ADDRESS, or add a line to /etc/hosts on the others".to_owned(),
        ),
        MissKind::Stranger => (
            "another machine answers there: addresses that several machines have, such as a container's 172.17.0.1 or \
             127.0.1.1, lead elsewhere"
                .to_owned(),
            format!("name an address that only {whom} has, there: --local-addr ADDRESS"),
        ),
        MissKind::Untried => (
            "so many connections failed before that no time was left".to_owned(),
            "mend the others first, then look again".to_owned(),
        ),
        MissKind::Broken => (
            needed.to_owned(),
            "look for a middle box that ends connections, and for limits of open files on both ends".to_owned(),
        ),
    };
    sheet.error(what, why, fix);
}

/// "10.0.0.2:41231", or "node2 (10.0.0.2:41231)".
fn place(reach: &Reach, card: &Card) -> String {
    match reach.at {
        Some(at) if reach.addr.parse::<IpAddr>().is_ok() => at.to_string(),
        Some(at) => format!("{} ({at})", reach.addr),
        None => format!("{}:{}", reach.addr, card.port),
    }
}

/// Addresses that do not work although others of the node do.
fn addresses(nodes: &Nodes, notes: &mut Notes) {
    let mut sheet = notes.sheet("addresses");
    for (to, card) in &nodes.cards {
        for (position, addr) in card.addrs.iter().enumerate() {
            let mut failing: BTreeMap<(MissKind, String), Vec<usize>> = BTreeMap::new();
            for (from, row) in nodes.rows.iter().filter(|(_, row)| is_reached(row, *to)) {
                for reach in row.to(*to).filter(|reach| reach.addr == *addr) {
                    if let Outcome::Failed(miss) = &reach.outcome {
                        let key = (miss.kind, format!("{}: {}", place(reach, card), miss.text));
                        failing.entry(key).or_default().push(*from);
                    }
                }
            }
            for ((kind, text), from) in failing {
                let works = nodes.rows[&from[0]].to(*to).find_map(|reach| {
                    matches!(reach.outcome, Outcome::Reached(_)).then(|| reach.addr.clone())
                });
                let works = works.unwrap_or_default();
                let what = format!(
                    "{} reaches {} at {works}, but not at {text}",
                    nodes.names(&from),
                    nodes.name(*to)
                )
                .replace("reaches", if from.len() == 1 { "reaches" } else { "reach" });
                address_finding(
                    &mut sheet,
                    position == 0,
                    kind,
                    what,
                    &works,
                    nodes.name(*to),
                );
            }
        }
    }
}

fn address_finding(
    sheet: &mut Sheet<'_>,
    is_first: bool,
    kind: MissKind,
    what: String,
    works: &str,
    whom: String,
) {
    if is_first {
        sheet.error(
            what,
            "that is the address which its launcher tells the others, and the ranks' store is looked for there",
            format!("on {whom}: --local-addr {works}"),
        );
    } else if matches!(kind, MissKind::Silent) {
        sheet.warning(
            what,
            "ranks try the addresses of a peer one after the other, and wait 3 s for one that does not answer",
            format!("have ranks use the interface that works, on {whom}: export PACELINE_SOCKET_IFNAME=NAME"),
        );
    } else {
        sheet.note(
            what,
            "ranks go on to its next address at once; usual for networks of containers and virtual machines",
            format!("nothing; to leave it out, on {whom}: export PACELINE_SOCKET_IFNAME=NAME of the interface that works"),
        );
    }
}

fn clocks(nodes: &Nodes, notes: &mut Notes) {
    let Some(row) = nodes.rows.get(&nodes.me) else {
        return;
    };
    let mut sheet = notes.sheet("clocks");
    let mut largest = 0;
    for to in nodes.cards.keys().filter(|to| **to != nodes.me) {
        let Some(measured) = row.measured(*to) else {
            continue;
        };
        let apart = measured.clock_offset_us.unsigned_abs();
        largest = largest.max(apart);
        if apart <= CLOCK_US.saturating_add(measured.clock_error_us) {
            continue;
        }
        let way = match measured.clock_offset_us > 0 {
            true => "ahead of",
            false => "behind",
        };
        sheet.warning(
            format!(
                "the clock of {} is {:.1} s {way} that of {} (within {:.1} ms)",
                nodes.name(*to),
                apart as f64 / 1e6,
                nodes.name(nodes.me),
                measured.clock_error_us as f64 / 1e3
            ),
            "leases and deadlines do not depend on it; the times in the logs of the two do not fit together",
            "`timedatectl set-ntp true`, or chrony on every node",
        );
    }
    if nodes.cards.len() > 1 {
        sheet.fact(format!(
            "at most {:.1} ms from this node's",
            largest as f64 / 1e3
        ));
    }
}

fn speeds(nodes: &Nodes, notes: &mut Notes) {
    let mut sheet = notes.sheet("network");
    let mut measured = Vec::new();
    for (from, row) in &nodes.rows {
        for to in nodes.cards.keys().filter(|to| *to != from) {
            if let Some(found) = row.measured(*to) {
                measured.push((*from, *to, found));
            }
        }
    }
    let all = measured.iter().map(|(_, _, found)| found);
    let mut speeds: Vec<u64> = all
        .clone()
        .filter_map(|found| found.bytes_per_second)
        .collect();
    speeds.sort_unstable();
    let mut trips: Vec<u64> = all.map(|found| found.round_trip_us).collect();
    trips.sort_unstable();
    let (Some(usual), Some(trip)) = (
        speeds.get(speeds.len() / 2).copied(),
        trips.get(trips.len() / 2).copied(),
    ) else {
        return;
    };
    sheet.fact(format!(
        "median round trip {:.2} ms, median speed of a short sample {}/s",
        trip as f64 / 1e3,
        size(usual)
    ));
    if usual < SLOW_BYTES_PER_SECOND {
        sheet.note(
            format!("the nodes are connected at about {}/s", size(usual)),
            format!(
                "a step that averages gradients of 100 MiB needs {:.1} s for that alone",
                2.0 * (100_u64 << 20) as f64 / usual.max(1) as f64
            ),
            "see whether ranks use the fast network: PACELINE_SOCKET_IFNAME=NAME, or --local-addr of its address",
        );
    }
    if trip > FAR_US {
        let ms = trip as f64 / 1e3;
        sheet.note(
            format!("a round trip between nodes takes {ms:.1} ms"),
            "every operation takes several of them, so small ones are slow",
            "place the nodes nearer to each other if steps are short",
        );
    }
    for (from, to, found) in measured {
        if let Some(speed) = found.bytes_per_second
            && speed < SLOW_BYTES_PER_SECOND
            && speed.saturating_mul(SLOWER_TIMES) < usual
        {
            sheet.warning(
                format!(
                    "from {} to {} a short sample went at {}/s, where {}/s are usual between these nodes",
                    nodes.name(from),
                    nodes.name(to),
                    size(speed),
                    size(usual)
                ),
                "all ranks wait for the slowest connection in every step",
                "look at the link of these two nodes (`ethtool INTERFACE`, a cable, a busy neighbour), then look again",
            );
        }
    }
}

fn differences(nodes: &Nodes, notes: &mut Notes) {
    let mut sheet = notes.sheet("versions");
    let versions = groups(nodes, |card| card.version.clone());
    sheet.fact(said(nodes, &versions, |version| {
        format!("Paceline {version}")
    }));
    if versions.len() > 1 {
        sheet.error(
            said(nodes, &versions, |version| format!("Paceline {version}")),
            "versions may speak differently to each other",
            "install the same version on every node",
        );
    }
    let mut sheet = notes.sheet("machines");
    let archs = groups(nodes, |card| card.arch.clone());
    if archs.len() > 1 {
        sheet.warning(
            said(nodes, &archs, String::clone),
            "the program must be built for each; results are the same in every bit only if its own arithmetic is",
            "use machines of one kind where that matters",
        );
    }
    for (groups, say) in [
        (
            groups(nodes, |card| card.ranks as u64),
            &(|ranks: &u64| count(*ranks as usize, "rank")) as &dyn Fn(&u64) -> String,
        ),
        (groups(nodes, |card| card.cores as u64), &|cores: &u64| {
            count(*cores as usize, "core")
        }),
    ] {
        if groups.len() > 1 {
            sheet.note(
                said(nodes, &groups, say),
                "every step is as slow as the slowest rank",
                "nothing, if that is meant; else give the same --nproc-per-node, or use machines of one kind",
            );
        }
    }
    let kernels = groups(nodes, |card| card.kernel.clone());
    if kernels.len() > 1 {
        sheet.note(
            said(nodes, &kernels, |kernel| format!("Linux {kernel}")),
            "harmless, but worth knowing when only one of them misbehaves",
            "nothing, if that is meant",
        );
    }
    let memory = nodes.cards.values().map(|card| card.memory_bytes);
    if let (Some(least), Some(most)) = (memory.clone().min(), memory.max())
        && least < most / 10 * MEMORY_TENTHS
    {
        sheet.note(
            format!("memory from {} to {}", size(least), size(most)),
            "the node with the least runs out first",
            "nothing, if that is meant",
        );
    }
    let hosts = groups(nodes, |card| card.host.clone());
    for (host, named) in &hosts {
        let boots = named.iter().map(|node| nodes.cards[node].boot.as_str());
        let boots: BTreeSet<&str> = boots.collect();
        if boots.len() > 1 {
            sheet.warning(
                format!("{} machines call themselves {host}", boots.len()),
                "logs and reports do not tell them apart, and launchers take them for one host when they order the ranks",
                "`sudo hostnamectl set-hostname NAME`, or PACELINE_HOST_ID, different on each",
            );
        }
    }
    let boots = groups(nodes, |card| card.boot.clone());
    for (_, named) in boots
        .iter()
        .filter(|(boot, named)| !boot.is_empty() && named.len() > 1)
    {
        sheet.note(
            format!("{} are on one machine", nodes.names(named)),
            "they share its cores and memory",
            "nothing, if that is meant",
        );
    }
}

fn groups<K: Ord>(nodes: &Nodes, key: impl Fn(&Card) -> K) -> BTreeMap<K, Vec<usize>> {
    let mut groups: BTreeMap<K, Vec<usize>> = BTreeMap::new();
    for (node, card) in &nodes.cards {
        groups.entry(key(card)).or_default().push(*node);
    }
    groups
}

/// "Paceline 0.1.0 on all nodes", or who has which.
fn said<K: Ord>(
    nodes: &Nodes,
    groups: &BTreeMap<K, Vec<usize>>,
    say: impl Fn(&K) -> String,
) -> String {
    match groups.first_key_value() {
        Some((key, _)) if groups.len() == 1 => format!("{} on all nodes", say(key)),
        _ => {
            let each =
                |(key, named): (&K, &Vec<usize>)| format!("{} on {}", say(key), nodes.names(named));
            let each: Vec<String> = groups.iter().map(each).collect();
            each.join("; ")
        }
    }
}

#[cfg(test)]
mod tests;
