//! Ports: the range that the system chooses from, and whether the ones that the job wants are taken, and by whom.

use std::fs;
use std::path::PathBuf;

use paceline_rendezvous::endpoint::MASTER_PORT;
use paceline_words::say;

use crate::checks;
use crate::finding::{Notes, Severity, plain};
use crate::options::Options;
use paceline_gpu::host::Host;

/// What was read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Ports {
    /// From which the system chooses, first and last.
    pub(crate) range: Option<(u16, u16)>,
    /// Ports that matter and are taken, with the program that listens there where that can be seen.
    pub(crate) taken: Vec<(u16, Option<String>)>,
}

/// A port that the job will listen at on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) port: u16,
    /// Whether the job cannot do without it.
    pub(crate) is_needed: bool,
}

/// Processes whose descriptors are looked through for the owner of a port.
const PROCESSES_MAX: usize = 8192;
/// Descriptors of one process that are looked at.
const DESCRIPTORS_MAX: usize = 8192;
/// `/proc/net/tcp`'s word for a socket that listens.
const LISTENS: &str = "0A";

/// Which ports this node's part of the job listens at. The endpoint's own is not among them: meeting there tries it out.
pub(crate) fn wanted(options: &Options) -> Wanted {
    let named = options.master_port;
    let is_first = options.has_several_nodes() && options.node_rank == Some(0);
    let is_other = options.node_rank.is_some_and(|rank| rank > 0);
    Wanted {
        port: named.unwrap_or(MASTER_PORT),
        is_needed: !is_other && (named.is_some() || is_first),
    }
}

pub(crate) fn read(host: &Host<'_>, ports: &[u16]) -> Ports {
    let range = host.text("/proc/sys/net/ipv4/ip_local_port_range");
    let mut listening = Vec::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let text = host.text(table).unwrap_or_default();
        listening.extend(text.lines().filter_map(listener));
    }
    let mut taken: Vec<(u16, Option<String>)> = Vec::new();
    for (port, inode) in listening {
        if ports.contains(&port) && !taken.iter().any(|(known, _)| *known == port) {
            taken.push((port, owner(host, inode)));
        }
    }
    Ports {
        range: range.as_deref().and_then(in_range),
        taken,
    }
}

fn in_range(text: &str) -> Option<(u16, u16)> {
    let mut numbers = text.split_whitespace().map(str::parse);
    match (numbers.next()?, numbers.next()?) {
        (Ok(first), Ok(last)) if first <= last => Some((first, last)),
        _ => None,
    }
}

/// Port and inode of a line of `/proc/net/tcp` whose socket listens.
fn listener(line: &str) -> Option<(u16, u64)> {
    let mut words = line.split_whitespace();
    let (_, port) = words.nth(1)?.rsplit_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    if words.nth(1)? != LISTENS {
        return None;
    }
    let inode = words.nth(5)?.parse().ok()?;
    Some((port, inode))
}

/// "python (pid 17)", where this user may see it.
fn owner(host: &Host<'_>, inode: u64) -> Option<String> {
    let link = PathBuf::from(format!("socket:[{inode}]"));
    for pid in host.processes(PROCESSES_MAX) {
        let Ok(descriptors) = fs::read_dir(host.path(&format!("/proc/{pid}/fd"))) else {
            continue;
        };
        let mut links = descriptors
            .flatten()
            .take(DESCRIPTORS_MAX)
            .filter_map(|entry| fs::read_link(entry.path()).ok());
        if links.any(|found| found == link) {
            let name = host.text(&format!("/proc/{pid}/comm")).unwrap_or_default();
            return Some(format!("{} (pid {pid})", plain(name.trim())));
        }
    }
    None
}

pub(crate) fn judge(ports: &Ports, options: &Options, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::PORTS);
    let wanted = wanted(options);
    let taken = ports.taken.iter().find(|(port, _)| *port == wanted.port);
    let port = wanted.port;
    let range = match ports.range {
        Some((first, last)) => say!(
            lang,
            "the system chooses from {first} to {last}",
            "시스템이 고르는 범위 {first}~{last}"
        ),
        None => say!(
            lang,
            "the range that the system chooses from cannot be read",
            "시스템이 고르는 범위를 읽을 수 없음"
        ),
    };
    let state = match taken {
        Some((_, Some(who))) => say!(lang, "taken by {who}", "사용 중({who})"),
        Some((_, None)) => say!(lang, "taken", "사용 중"),
        None => say!(lang, "free", "비어 있음"),
    };
    sheet.fact(say!(
        lang,
        "{range}; {port} is {state}",
        "{range}; 포트 {port}: {state}"
    ));
    if let Some((_, who)) = taken {
        let who = match who {
            Some(who) => who.clone(),
            None => say!(
                lang,
                "a process that this user cannot see",
                "이 사용자에게 보이지 않는 프로세스"
            ),
        };
        let (severity, why) = match wanted.is_needed {
            true => (
                Severity::Error,
                say!(
                    lang,
                    "the program's rank 0 listens there (MASTER_PORT), and fails with \"address already in use\"",
                    "프로그램의 랭크 0이 이 포트(MASTER_PORT)를 열다가 \"address already in use\"로 실패합니다"
                ),
            ),
            false => (
                Severity::Note,
                say!(
                    lang,
                    "it is torchrun's and PyTorch's usual port; `paceline run` on one node takes a free one unless told otherwise",
                    "torchrun과 PyTorch가 흔히 쓰는 포트입니다. 노드가 하나면 `paceline run`은 따로 지정하지 않는 한 빈 포트를 씁니다"
                ),
            ),
        };
        let other = port.saturating_add(10);
        sheet.add(
            severity,
            say!(
                lang,
                "port {port} is taken by {who}",
                "포트 {port} 사용 중: {who}"
            ),
            why,
            say!(
                lang,
                "end that process if it is left over, or choose another port: --master-port {other}",
                "남아 있는 프로세스라면 끝내고, 아니면 다른 포트를 고르세요: --master-port {other}"
            ),
        );
    }
    if let Some((first, last)) = ports.range
        && wanted.is_needed
        && (first..=last).contains(&port)
    {
        sheet.warning(
            say!(
                lang,
                "port {port} is among those that the system gives to any connection ({first} to {last})",
                "포트 {port}: 시스템이 아무 연결에나 주는 범위({first}~{last})에 있음"
            ),
            say!(
                lang,
                "now and then a connection of some program has it at the moment in which the job begins",
                "작업이 시작되는 순간에 다른 프로그램의 연결이 이 포트를 쓰고 있을 수 있습니다"
            ),
            say!(
                lang,
                "choose one below {first}, or `sudo sysctl net.ipv4.ip_local_reserved_ports={port}`",
                "{first}보다 작은 포트를 고르거나 `sudo sysctl net.ipv4.ip_local_reserved_ports={port}` 명령을 실행하세요"
            ),
        );
    }
    if let Some((first, last)) = ports.range
        && last - first < 1000
    {
        sheet.warning(
            say!(
                lang,
                "the system chooses ports from only {first} to {last}",
                "시스템이 고르는 포트 범위가 좁음: {first}~{last}"
            ),
            say!(
                lang,
                "every connection between ranks takes one for a minute or more after its end",
                "랭크 사이의 연결은 끝난 뒤에도 1분 넘게 포트를 차지합니다"
            ),
            say!(
                lang,
                "`sudo sysctl net.ipv4.ip_local_port_range=\"32768 60999\"`",
                "`sudo sysctl net.ipv4.ip_local_port_range=\"32768 60999\"`를 실행하세요"
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::tests::{found, job, noted};
    use paceline_gpu::host::recorded::Recorded;

    const TABLE: &str = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0
   1: 0100007F:733D 0100007F:1234 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 100 0 0 10 0
   nonsense
   2: 0100007F:GGGG 00000000:0000 0A
";

    #[test]
    fn listeners_are_found_with_their_process() {
        let recorded = Recorded::new(&[
            ("/proc/net/tcp", TABLE),
            ("/proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n"),
            ("/proc/17/comm", "python\u{1b}\n"),
            ("/proc/17/fd/x", ""),
            ("/proc/self/x", ""),
        ]);
        let host = recorded.host();
        std::os::unix::fs::symlink("socket:[4711]", host.path("/proc/17/fd/3")).expect("linked");
        let ports = read(&host, &[29_500, 29_501, 5]);
        assert_eq!(ports.range, Some((32_768, 60_999)));
        assert_eq!(ports.taken, [(29_500, Some("python  (pid 17)".into()))]);
        for odd in ["", "5", "9 3", "a b", "1 99999"] {
            assert_eq!(in_range(odd), None, "{odd}");
        }
    }

    #[test]
    fn a_taken_port_is_an_error_where_the_job_needs_it() {
        let check = |ports: Ports, options: Options, expect: &[&str]| {
            let notes = noted(|notes| judge(&ports, &options, notes));
            assert_eq!(found(&notes), expect, "{ports:?}");
        };
        let range = Some((32_768, 60_999));
        let taken = |port| Ports {
            range,
            taken: vec![(port, None)],
        };
        let end = "end that process";
        check(taken(29_500), job(1, 1), &[&format!("note: ports: {end}")]);
        check(taken(29_400), job(1, 1), &[]);
        let rank = |node_rank| Options {
            node_rank: Some(node_rank),
            ..job(1, 2)
        };
        check(taken(29_500), rank(0), &[&format!("error: ports: {end}")]);
        check(taken(29_500), rank(1), &[&format!("note: ports: {end}")]);
        let named = |port| Options {
            master_port: Some(port),
            ..job(1, 1)
        };
        check(taken(5000), named(5000), &[&format!("error: ports: {end}")]);
        check(
            Ports {
                range,
                taken: Vec::new(),
            },
            named(40_000),
            &["warning: ports: choose one below 32768"],
        );
        let narrow = Ports {
            range: Some((50_000, 50_100)),
            taken: Vec::new(),
        };
        check(narrow, job(1, 1), &["warning: ports: `sudo sysctl"]);
    }
}
