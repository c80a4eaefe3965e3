//! Judges the nodes: which are missing, which do not reach which and why, and what differs. Does no I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use paceline_rendezvous::token::TOKEN_VARIABLE;
use paceline_words::{Lang, count, say};

use super::meet::is_reached;
use super::{Card, Miss, MissKind, Nodes, Outcome, Reach};
use crate::checks;
use crate::finding::{Notes, Severity, Sheet, size};

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
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::NODES);
    let here: Vec<usize> = nodes.cards.keys().copied().collect();
    let (come, all) = (here.len(), nodes.expected);
    sheet.fact(say!(
        lang,
        "{come} of {all} came",
        "{all}개 중 {come}개가 옴"
    ));
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
        let shown = missing[..missing.len().min(20)].join(", ");
        let here = nodes.names(&here, lang);
        sheet.add(
            severity,
            say!(
                lang,
                "{noun} {shown} of {all} {verb} not come within {seconds} s; here: {here}",
                "노드 {all}개 중 {seconds}초 안에 오지 않은 노드: {shown}; 온 노드: {here}"
            ),
            say!(
                lang,
                "the command does not run there, looks for another endpoint, or cannot reach this one: then it says so there",
                "그 노드에서 명령을 실행하지 않았거나, 다른 엔드포인트를 찾고 있거나, 여기에 연결하지 못합니다. 연결하지 못한 경우에는 그 노드에 이유가 나옵니다"
            ),
            say!(
                lang,
                "start the same command on every node, and look at what it prints on the missing ones; more time: --timeout SECONDS",
                "모든 노드에서 같은 명령을 시작하고, 오지 않은 노드의 출력을 확인하세요. 시간이 더 필요하면 --timeout SECONDS를 주세요"
            ),
        );
    }
    if nodes.turned_away > 0 {
        let number = usize::try_from(nodes.turned_away).unwrap_or(usize::MAX);
        let connections = count(lang, number, "connection", "연결");
        sheet.warning(
            say!(
                lang,
                "{connections} to the meeting did not prove the job's token",
                "작업의 토큰을 증명하지 못한 {connections}"
            ),
            say!(
                lang,
                "a node with another {TOKEN_VARIABLE} or PACELINE_TLS has tried, or a program that scans ports",
                "{TOKEN_VARIABLE}이나 PACELINE_TLS가 다른 노드, 또는 포트를 훑는 프로그램이 연결을 시도했습니다"
            ),
            say!(
                lang,
                "if a node is missing, compare {TOKEN_VARIABLE} there with the one here",
                "오지 않은 노드가 있다면 그곳의 {TOKEN_VARIABLE} 값을 여기와 비교하세요"
            ),
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
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::REACHABILITY);
    let mut gaps: BTreeMap<Gap, Vec<usize>> = BTreeMap::new();
    for from in nodes.cards.keys() {
        let Some(row) = nodes.rows.get(from) else {
            // Beyond a number of nodes only node 0 has all rows.
            if nodes.me == 0 {
                let who = nodes.name(*from, lang);
                sheet.error(
                    say!(
                        lang,
                        "{who} did not say whom it reaches",
                        "{who}: 어느 노드에 연결되는지 알리지 않음"
                    ),
                    say!(
                        lang,
                        "it came, and then it stalled or ended, or its connection to the meeting broke",
                        "왔다가 멈추거나 종료되었거나, 연결이 끊겼습니다"
                    ),
                    say!(
                        lang,
                        "look at what the command prints there, and start it again",
                        "그 노드의 출력을 확인하고 다시 시작하세요"
                    ),
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
                    addr: say!(lang, "any address", "모든 주소"),
                    kind: MissKind::Untried,
                    text: say!(lang, "it was not tried", "결과 없음"),
                    back,
                },
            };
            gaps.entry(gap).or_default().push(*from);
        }
    }
    for (gap, from) in &gaps {
        gap_finding(nodes, gap, from, lang, &mut sheet);
    }
}

fn gap_finding(nodes: &Nodes, gap: &Gap, from: &[usize], lang: Lang, sheet: &mut Sheet<'_>) {
    let (who, whom) = (nodes.names(from, lang), nodes.name(gap.to, lang));
    let card = &nodes.cards[&gap.to];
    let verb = match from.len() {
        1 => "does not reach",
        _ => "do not reach",
    };
    let others = match card.addrs.len() {
        0 | 1 => String::new(),
        count => say!(
            lang,
            ", nor at its {} other addresses",
            ", 다른 주소 {}개도 마찬가지",
            count - 1
        ),
    };
    let direction = match gap.back {
        Back::Works => say!(
            lang,
            "; the other way, from {whom}, works",
            "; 반대 방향({whom}에서 출발)은 됨"
        ),
        Back::Fails => say!(lang, "; nor the other way", "; 반대 방향도 안 됨"),
        Back::Unknown => String::new(),
    };
    let (addr, text, cause) = (&gap.addr, &gap.text, gap.kind.word().of(lang));
    let what = say!(
        lang,
        "{who} {verb} {whom} at {addr}: {text}{others}{direction}",
        "{who} → {whom} 연결 안 됨: {addr}, {cause}({text}){others}{direction}"
    );
    let range = match card.ports {
        Some((first, last)) => say!(lang, "{first} to {last}", "{first}~{last}번"),
        None => say!(lang, "above 1024", "1024번 위"),
    };
    let firewall = match &card.firewall {
        Some(firewall) => say!(
            lang,
            " ({firewall} is turned on there)",
            "(그 노드에 {firewall} 방화벽이 켜져 있습니다)"
        ),
        None => String::new(),
    };
    let needed = say!(
        lang,
        "ranks connect to one another at ports that the system chooses, and a job forms only when all reach all",
        "랭크는 시스템이 고른 포트로 서로 연결하며, 모두가 모두에게 연결되어야 작업이 시작됩니다"
    );
    let (why, fix) = match gap.kind {
        MissKind::Silent => (
            say!(
                lang,
                "{needed}; when nothing at all comes back, a firewall drops it{firewall}, or the address leads elsewhere",
                "{needed}. 아무 응답도 없다면 방화벽이 패킷을 버리거나{firewall} 주소가 다른 곳을 가리킵니다"
            ),
            say!(
                lang,
                "let {whom} accept TCP ports {range} from the other nodes (firewall, or a cloud's security group); or name another \
                 address of it there: --local-addr ADDRESS",
                "{whom}에서 다른 노드의 TCP 포트 {range} 연결을 허용하세요(방화벽, 클라우드의 보안 그룹). 또는 {whom}에서 다른 주소를 지정하세요: \
                 --local-addr ADDRESS"
            ),
        ),
        MissKind::Refused => (
            say!(
                lang,
                "{needed}; the machine at that address answers, but not {whom}: the address is another machine's, or a firewall rejects{firewall}",
                "{needed}. 그 주소의 머신은 응답하지만 {whom}의 응답이 아닙니다. 다른 머신의 주소이거나 방화벽이 거부합니다{firewall}"
            ),
            say!(
                lang,
                "name the address by which the others reach it, there: --local-addr ADDRESS; or let {whom} accept TCP ports {range}",
                "{whom}에서 다른 노드가 연결할 수 있는 주소를 지정하거나(--local-addr ADDRESS), TCP 포트 {range} 연결을 허용하세요"
            ),
        ),
        MissKind::NoRoute => (
            say!(
                lang,
                "{needed}; no network of {who} leads to that address",
                "{needed}. {who}의 네트워크에는 그 주소로 가는 경로가 없습니다"
            ),
            say!(
                lang,
                "name an address of a network that all nodes share, there: --local-addr ADDRESS, or by interface: PACELINE_SOCKET_IFNAME",
                "{whom}에서 모든 노드가 함께 쓰는 네트워크의 주소를 지정하세요: --local-addr ADDRESS, 또는 인터페이스로 PACELINE_SOCKET_IFNAME"
            ),
        ),
        MissKind::Unresolved => (
            say!(
                lang,
                "{whom} goes by a name that means nothing on {who}",
                "{who}에서 {whom}의 이름을 주소로 바꿀 수 없습니다"
            ),
            say!(
                lang,
                "name its address there: --local-addr ADDRESS, or add a line to /etc/hosts on the others",
                "{whom}에서 주소를 지정하거나(--local-addr ADDRESS), 다른 노드의 /etc/hosts에 추가하세요"
            ),
        ),
        MissKind::Stranger => (
            say!(
                lang,
                "another machine answers there: addresses that several machines have, such as a container's 172.17.0.1 or \
                 127.0.1.1, lead elsewhere",
                "그 주소에서 다른 머신이 응답합니다. 컨테이너의 172.17.0.1이나 127.0.1.1처럼 여러 머신에 있는 주소는 다른 곳을 가리킵니다"
            ),
            say!(
                lang,
                "name an address that only {whom} has, there: --local-addr ADDRESS",
                "{whom}에서 그 노드에만 있는 주소를 지정하세요: --local-addr ADDRESS"
            ),
        ),
        MissKind::Untried => (
            say!(
                lang,
                "so many connections failed before that no time was left",
                "앞선 연결이 너무 많이 실패해 시도할 시간이 남지 않았습니다"
            ),
            say!(
                lang,
                "mend the others first, then look again",
                "다른 연결을 먼저 고치고 다시 점검하세요"
            ),
        ),
        MissKind::Broken => (
            needed,
            say!(
                lang,
                "look for a middle box that ends connections, and for limits of open files on both ends",
                "연결을 끊는 중간 장비가 있는지, 양쪽의 열린 파일 한도가 충분한지 확인하세요"
            ),
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
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::ADDRESSES);
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
                let (who, whom) = (nodes.names(&from, lang), nodes.name(*to, lang));
                let reach = if from.len() == 1 { "reaches" } else { "reach" };
                let cause = kind.word().of(lang);
                let what = say!(
                    lang,
                    "{who} {reach} {whom} at {works}, but not at {text}",
                    "{who} → {whom}: {works}에는 연결되지만 다음은 안 됨: {text}({cause})"
                );
                let is_first = position == 0;
                address_finding(&mut sheet, is_first, kind, what, &works, &whom, lang);
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
    whom: &str,
    lang: Lang,
) {
    if is_first {
        sheet.error(
            what,
            say!(
                lang,
                "that is the address which its launcher tells the others, and the ranks' store is looked for there",
                "런처가 다른 노드에 알려 주는 주소이고, 랭크도 여기서 스토어를 찾습니다"
            ),
            say!(
                lang,
                "on {whom}: --local-addr {works}",
                "{whom}에서 다음 옵션을 주세요: --local-addr {works}"
            ),
        );
    } else if matches!(kind, MissKind::Silent) {
        sheet.warning(
            what,
            say!(
                lang,
                "ranks try the addresses of a peer one after the other, and wait 3 s for one that does not answer",
                "랭크는 상대의 주소를 차례로 시도하며, 응답이 없는 주소마다 3초를 기다립니다"
            ),
            say!(
                lang,
                "have ranks use the interface that works, on {whom}: export PACELINE_SOCKET_IFNAME=NAME",
                "랭크가 연결되는 인터페이스를 쓰도록 {whom}에서 `export PACELINE_SOCKET_IFNAME=NAME`을 실행하세요"
            ),
        );
    } else {
        sheet.note(
            what,
            say!(
                lang,
                "ranks go on to its next address at once; usual for networks of containers and virtual machines",
                "랭크는 곧바로 다음 주소로 넘어갑니다. 컨테이너나 가상 머신의 네트워크에서는 흔한 일입니다"
            ),
            say!(
                lang,
                "nothing; to leave it out, on {whom}: export PACELINE_SOCKET_IFNAME=NAME of the interface that works",
                "할 일이 없습니다. 이 주소를 빼려면 {whom}에서 연결되는 인터페이스로 `export PACELINE_SOCKET_IFNAME=NAME`을 실행하세요"
            ),
        );
    }
}

fn clocks(nodes: &Nodes, notes: &mut Notes) {
    let Some(row) = nodes.rows.get(&nodes.me) else {
        return;
    };
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::NODE_CLOCKS);
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
            true => say!(lang, "ahead of", "빠름"),
            false => say!(lang, "behind", "느림"),
        };
        let (whom, me) = (nodes.name(*to, lang), nodes.name(nodes.me, lang));
        let (apart, error) = (apart as f64 / 1e6, measured.clock_error_us as f64 / 1e3);
        sheet.warning(
            say!(
                lang,
                "the clock of {whom} is {apart:.1} s {way} that of {me} (within {error:.1} ms)",
                "{whom}의 시계가 {me}의 시계보다 {apart:.1}초 {way}(오차 {error:.1} ms 이내)"
            ),
            say!(
                lang,
                "leases and deadlines do not depend on it; the times in the logs of the two do not fit together",
                "리스와 제한 시간은 시계에 의존하지 않습니다. 다만 두 노드의 로그 시간이 서로 맞지 않습니다"
            ),
            say!(
                lang,
                "`timedatectl set-ntp true`, or chrony on every node",
                "모든 노드에서 `timedatectl set-ntp true`를 실행하거나 chrony를 쓰세요"
            ),
        );
    }
    if nodes.cards.len() > 1 {
        sheet.fact(say!(
            lang,
            "at most {:.1} ms from this node's",
            "이 노드의 시계와 최대 {:.1} ms 차이",
            largest as f64 / 1e3
        ));
    }
}

fn speeds(nodes: &Nodes, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::NETWORK);
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
    let (trip_ms, usual_speed) = (trip as f64 / 1e3, size(usual));
    sheet.fact(say!(
        lang,
        "median round trip {trip_ms:.2} ms, median speed of a short sample {usual_speed}/s",
        "왕복 시간 중앙값 {trip_ms:.2} ms, 짧게 잰 속도의 중앙값 {usual_speed}/s"
    ));
    if usual < SLOW_BYTES_PER_SECOND {
        sheet.note(
            say!(
                lang,
                "the nodes are connected at about {usual_speed}/s",
                "노드 사이의 속도가 약 {usual_speed}/s"
            ),
            say!(
                lang,
                "a step that averages gradients of 100 MiB needs {:.1} s for that alone",
                "100 MiB의 그래디언트를 평균하는 스텝은 그것만으로 {:.1}초가 걸립니다",
                2.0 * (100_u64 << 20) as f64 / usual.max(1) as f64
            ),
            say!(
                lang,
                "see whether ranks use the fast network: PACELINE_SOCKET_IFNAME=NAME, or --local-addr of its address",
                "랭크가 빠른 네트워크를 쓰는지 확인하세요: PACELINE_SOCKET_IFNAME=NAME, 또는 --local-addr로 그 네트워크의 주소 지정"
            ),
        );
    }
    if trip > FAR_US {
        sheet.note(
            say!(
                lang,
                "a round trip between nodes takes {trip_ms:.1} ms",
                "노드 사이의 왕복 시간이 {trip_ms:.1} ms"
            ),
            say!(
                lang,
                "every operation takes several of them, so small ones are slow",
                "연산마다 여러 번 왕복하므로 작은 연산이 느려집니다"
            ),
            say!(
                lang,
                "place the nodes nearer to each other if steps are short",
                "스텝이 짧다면 노드를 더 가까이 두세요"
            ),
        );
    }
    for (from, to, found) in measured {
        if let Some(speed) = found.bytes_per_second
            && speed < SLOW_BYTES_PER_SECOND
            && speed.saturating_mul(SLOWER_TIMES) < usual
        {
            let (speed, usual) = (size(speed), &usual_speed);
            let (from, to) = (nodes.name(from, lang), nodes.name(to, lang));
            sheet.warning(
                say!(
                    lang,
                    "from {from} to {to} a short sample went at {speed}/s, where {usual}/s are usual between these nodes",
                    "{from} → {to}의 속도가 {speed}/s, 노드 사이의 보통 속도는 {usual}/s"
                ),
                say!(
                    lang,
                    "all ranks wait for the slowest connection in every step",
                    "스텝마다 모든 랭크가 가장 느린 연결을 기다립니다"
                ),
                say!(
                    lang,
                    "look at the link of these two nodes (`ethtool INTERFACE`, a cable, a busy neighbour), then look again",
                    "두 노드의 링크를 확인하고(`ethtool INTERFACE`, 케이블, 대역폭을 쓰는 다른 작업) 다시 점검하세요"
                ),
            );
        }
    }
}

fn differences(nodes: &Nodes, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::VERSIONS);
    let versions = groups(nodes, |card| card.version.clone());
    let words = said(nodes, &versions, lang, |version| {
        format!("Paceline {version}")
    });
    sheet.fact(words.as_str());
    if versions.len() > 1 {
        sheet.error(
            differ(words, "Paceline 버전이 다름", lang),
            say!(
                lang,
                "versions may speak differently to each other",
                "버전이 다르면 서로의 메시지를 이해하지 못할 수 있습니다"
            ),
            say!(
                lang,
                "install the same version on every node",
                "모든 노드에 같은 버전을 설치하세요"
            ),
        );
    }
    let mut sheet = notes.sheet(checks::MACHINES);
    let archs = groups(nodes, |card| card.arch.clone());
    if archs.len() > 1 {
        let words = said(nodes, &archs, lang, String::clone);
        sheet.warning(
            differ(words, "프로세서 종류가 다름", lang),
            say!(
                lang,
                "the program must be built for each; results are the same in every bit only if its own arithmetic is",
                "프로세서마다 프로그램을 따로 빌드해야 합니다. 프로그램 자체의 연산 결과가 같아야만 결과가 비트 단위로 같습니다"
            ),
            say!(
                lang,
                "use machines of one kind where that matters",
                "결과가 똑같아야 한다면 같은 종류의 머신을 쓰세요"
            ),
        );
    }
    let ranks = |ranks: &usize| count(lang, *ranks, "rank", "랭크");
    let cores = |cores: &usize| count(lang, *cores, "core", "코어");
    for (groups, say, korean) in [
        (
            groups(nodes, |card| card.ranks),
            &ranks as &dyn Fn(&usize) -> String,
            "랭크 수가 다름",
        ),
        (groups(nodes, |card| card.cores), &cores, "코어 수가 다름"),
    ] {
        if groups.len() > 1 {
            sheet.note(
                differ(said(nodes, &groups, lang, say), korean, lang),
                say!(
                    lang,
                    "every step is as slow as the slowest rank",
                    "모든 스텝이 가장 느린 랭크만큼 느려집니다"
                ),
                say!(
                    lang,
                    "nothing, if that is meant; else give the same --nproc-per-node, or use machines of one kind",
                    "의도한 것이라면 할 일이 없습니다. 아니라면 --nproc-per-node를 같게 주거나 같은 종류의 머신을 쓰세요"
                ),
            );
        }
    }
    let is_meant = || {
        say!(
            lang,
            "nothing, if that is meant",
            "의도한 것이라면 할 일이 없습니다"
        )
    };
    let kernels = groups(nodes, |card| card.kernel.clone());
    if kernels.len() > 1 {
        let words = said(nodes, &kernels, lang, |kernel| format!("Linux {kernel}"));
        sheet.note(
            differ(words, "커널 버전이 다름", lang),
            say!(
                lang,
                "harmless, but worth knowing when only one of them misbehaves",
                "문제는 없지만, 한 노드만 이상할 때 알아 두면 좋습니다"
            ),
            is_meant(),
        );
    }
    let memory = nodes.cards.values().map(|card| card.memory_bytes);
    if let (Some(least), Some(most)) = (memory.clone().min(), memory.max())
        && least < most / 10 * MEMORY_TENTHS
    {
        let (least, most) = (size(least), size(most));
        sheet.note(
            say!(
                lang,
                "memory from {least} to {most}",
                "메모리 크기가 다름: {least}~{most}"
            ),
            say!(
                lang,
                "the node with the least runs out first",
                "메모리가 가장 적은 노드가 먼저 모자라게 됩니다"
            ),
            is_meant(),
        );
    }
    let hosts = groups(nodes, |card| card.host.clone());
    for (host, named) in &hosts {
        let boots = named.iter().map(|node| nodes.cards[node].boot.as_str());
        let number = boots.collect::<BTreeSet<&str>>().len();
        if number > 1 {
            sheet.warning(
                say!(
                    lang,
                    "{number} machines call themselves {host}",
                    "호스트 이름이 같은 머신 {number}대: {host}"
                ),
                say!(
                    lang,
                    "logs and reports do not tell them apart, and launchers take them for one host when they order the ranks",
                    "로그와 보고서에서 구별되지 않고, 런처가 랭크 순서를 정할 때 한 호스트로 여깁니다"
                ),
                say!(
                    lang,
                    "`sudo hostnamectl set-hostname NAME`, or PACELINE_HOST_ID, different on each",
                    "머신마다 다른 이름을 주세요: `sudo hostnamectl set-hostname NAME`, 또는 PACELINE_HOST_ID"
                ),
            );
        }
    }
    let boots = groups(nodes, |card| card.boot.clone());
    for (_, named) in boots
        .iter()
        .filter(|(boot, named)| !boot.is_empty() && named.len() > 1)
    {
        let names = nodes.names(named, lang);
        sheet.note(
            say!(
                lang,
                "{names} are on one machine",
                "한 머신에 있는 노드: {names}"
            ),
            say!(
                lang,
                "they share its cores and memory",
                "코어와 메모리를 나눠 씁니다"
            ),
            is_meant(),
        );
    }
}

/// In Korean, names what differs in front of the list; the English list speaks for itself.
fn differ(words: String, korean: &str, lang: Lang) -> String {
    match lang {
        Lang::En => words,
        Lang::Ko => format!("{korean}: {words}"),
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
    lang: Lang,
    say: impl Fn(&K) -> String,
) -> String {
    match groups.first_key_value() {
        Some((key, _)) if groups.len() == 1 => {
            let all = say(key);
            say!(lang, "{all} on all nodes", "모든 노드가 {all}")
        }
        _ => {
            let each = |(key, named): (&K, &Vec<usize>)| {
                let (key, named) = (say(key), nodes.names(named, lang));
                match lang {
                    Lang::En => format!("{key} on {named}"),
                    Lang::Ko => format!("{named}: {key}"),
                }
            };
            let each: Vec<String> = groups.iter().map(each).collect();
            each.join("; ")
        }
    }
}

#[cfg(test)]
mod tests;
