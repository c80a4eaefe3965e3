//! This machine's name and interfaces: under which addresses other nodes may find it, and which of them ranks use.

use std::net::IpAddr;
use std::time::Duration;

use paceline_rendezvous::net;
use paceline_words::{Lang, say};

use crate::checks;
use crate::finding::{Notes, Severity, plain};
use paceline_gpu::host::Host;

/// What was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Network {
    pub(crate) name: String,
    /// What the name resolves to, or why it does not.
    pub(crate) resolved: Result<Vec<IpAddr>, String>,
    /// Interfaces with their addresses, in the system's order.
    pub(crate) interfaces: Vec<(String, IpAddr)>,
    /// The variables that choose interfaces, as far as they are set; the first is the one that ranks follow.
    pub(crate) chosen: Vec<(&'static str, String)>,
    /// A firewall that seems to be on, by name.
    pub(crate) firewall: Option<&'static str>,
}

/// In the order in which ranks look at them.
const CHOOSING: [&str; 3] = [
    "PACELINE_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
];
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Addresses looked at; hosts full of containers have hundreds.
const ADDRESSES_MAX: usize = 256;
/// Addresses named in one line.
const NAMED_MAX: usize = 8;

pub(crate) fn read(host: &Host<'_>, name: &str) -> Network {
    let resolved = match net::resolve(&net::join(name, 0), RESOLVE_TIMEOUT) {
        Ok(addrs) => {
            let mut ips: Vec<IpAddr> = addrs.iter().map(|addr| addr.ip()).collect();
            ips.sort();
            ips.dedup();
            Ok(ips)
        }
        Err(error) => Err(error.to_string()),
    };
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let set = |name: &'static str| Some((name, host.variable(name)?));
    Network {
        name: name.to_owned(),
        resolved,
        interfaces: interfaces
            .into_iter()
            .map(|interface| (interface.name.clone(), interface.ip()))
            .take(ADDRESSES_MAX)
            .collect(),
        chosen: CHOOSING.into_iter().filter_map(set).collect(),
        firewall: firewall(host),
    }
}

/// What is turned on is said in files that everybody may read; the rules themselves are root's alone.
fn firewall(host: &Host<'_>) -> Option<&'static str> {
    let ufw = host.text("/etc/ufw/ufw.conf").unwrap_or_default();
    if ufw.lines().any(|line| line.trim() == "ENABLED=yes") {
        return Some("ufw");
    }
    let runs = |path| host.path(path).exists();
    runs("/run/firewalld").then_some("firewalld")
}

impl Network {
    /// Addresses that other machines may reach this one by: those of the interfaces that ranks would use.
    pub(crate) fn candidates(&self) -> Vec<IpAddr> {
        let setting = self.chosen.first().map(|(_, setting)| setting.as_str());
        let fits = |name: &str| setting.is_none_or(|setting| is_chosen(name, setting));
        let usable = |ip: &IpAddr| !ip.is_loopback() && !is_link_local(ip);
        let found = self.interfaces.iter().filter(|(name, _)| fits(name));
        let mut ips: Vec<IpAddr> = found.map(|(_, ip)| *ip).filter(usable).collect();
        ips.dedup();
        ips
    }
}

/// NCCL's rules, which ranks follow: `eth,ib` are beginnings of names, `=eth0` whole names, `^` turns either around.
fn is_chosen(name: &str, setting: &str) -> bool {
    let setting = setting.trim();
    let (excluded, rest) = match setting.strip_prefix('^') {
        Some(rest) => (true, rest),
        None => (false, setting),
    };
    let (whole, rest) = match rest.strip_prefix('=') {
        Some(rest) => (true, rest),
        None => (false, rest),
    };
    let mut names = rest
        .split(',')
        .map(str::trim)
        .filter(|word| !word.is_empty());
    let listed = names.any(|word| match whole {
        true => name == word,
        false => name.starts_with(word),
    });
    listed != excluded
}

fn is_link_local(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// `endpoint` is where several nodes are to meet.
pub(crate) fn judge(network: &Network, endpoint: Option<&String>, notes: &mut Notes) {
    let lang = notes.lang;
    let several_nodes = endpoint.is_some();
    if let Some(endpoint) = endpoint.filter(|endpoint| leads_home(endpoint)) {
        let endpoint = plain(endpoint);
        notes.sheet(checks::ENDPOINT).warning(
            say!(
                lang,
                "the nodes are to meet at {endpoint}, which every machine takes for itself",
                "노드가 만날 곳이 {endpoint}: 머신마다 자기 자신을 가리킴"
            ),
            say!(
                lang,
                "nodes on other machines never get there; only several nodes of one machine do",
                "다른 머신의 노드는 여기에 올 수 없습니다. 한 머신의 여러 노드만 만날 수 있습니다"
            ),
            say!(
                lang,
                "name the host where they meet, the same on every node: --rdzv-endpoint HOST",
                "만날 호스트를 모든 노드에 똑같이 지정하세요: --rdzv-endpoint HOST"
            ),
        );
    }
    judge_name(network, several_nodes, notes);
    let mut sheet = notes.sheet(checks::INTERFACES);
    let all = listed(&network.interfaces, lang);
    sheet.fact(all.as_str());
    for (variable, setting) in &network.chosen {
        let names = network.interfaces.iter().map(|(name, _)| name);
        if !names.clone().any(|name| is_chosen(name, setting)) {
            let severity = match several_nodes {
                true => Severity::Error,
                false => Severity::Warning,
            };
            let setting = plain(setting);
            sheet.add(
                severity,
                say!(
                    lang,
                    "{variable} is {setting:?}, and no interface here is called so",
                    "{variable} 값 {setting:?}: 그런 이름의 인터페이스가 없음"
                ),
                say!(
                    lang,
                    "ranks on several nodes do not find an address to listen at; there are: {all}",
                    "여러 노드의 랭크가 연결을 받을 주소를 찾지 못합니다. 있는 인터페이스: {all}"
                ),
                say!(
                    lang,
                    "name one that exists, or `unset {variable}`",
                    "있는 인터페이스를 지정하거나 `unset {variable}` 명령을 실행하세요"
                ),
            );
        }
    }
    if several_nodes && network.candidates().is_empty() {
        sheet.error(
            say!(
                lang,
                "this machine has no address that another machine could reach",
                "다른 머신에서 연결할 수 있는 주소가 없음"
            ),
            say!(
                lang,
                "only loopback and link-local addresses are there, or the variables that choose interfaces leave no other",
                "루프백과 링크 로컬 주소뿐이거나, 인터페이스를 고르는 변수 때문에 다른 주소가 남지 않습니다"
            ),
            say!(
                lang,
                "bring a network up (`ip address`), or run the container with a network (`docker run --network host`)",
                "네트워크를 켜거나(`ip address`로 확인), 컨테이너를 네트워크와 함께 실행하세요(`docker run --network host`)"
            ),
        );
    }
    if several_nodes && let Some(firewall) = network.firewall {
        let allow = match firewall {
            "ufw" => "`sudo ufw allow from NETWORK/24 to any proto tcp`",
            _ => "`sudo firewall-cmd --zone=trusted --add-source=NETWORK/24`",
        };
        notes.sheet(checks::FIREWALL).note(
            say!(
                lang,
                "{firewall} is turned on here",
                "방화벽이 켜져 있음: {firewall}"
            ),
            say!(
                lang,
                "ranks connect to one another at ports that the system chooses, so the nodes have to let each other in at all of them",
                "랭크는 시스템이 고른 포트로 서로 연결하므로, 노드끼리는 모든 포트를 열어 두어야 합니다"
            ),
            say!(
                lang,
                "{allow}, unless the nodes are shown below to reach each other",
                "아래 표에서 노드가 서로 연결되지 않는다면 {allow} 명령을 실행하세요"
            ),
        );
    }
}

fn leads_home(endpoint: &str) -> bool {
    let whole = endpoint.trim_start_matches('[').trim_end_matches(']');
    let host = match whole.parse::<IpAddr>() {
        Ok(_) => whole,
        Err(_) => endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn judge_name(network: &Network, several_nodes: bool, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::HOST_NAME);
    let name = plain(&network.name);
    match &network.resolved {
        Ok(ips) if !ips.is_empty() => {
            let text: Vec<String> = ips.iter().take(NAMED_MAX).map(IpAddr::to_string).collect();
            let text = text.join(", ");
            sheet.fact(match lang {
                Lang::En => format!("{name} is {text}"),
                Lang::Ko => format!("{name}: {text}"),
            });
            if several_nodes && ips.iter().all(IpAddr::is_loopback) {
                sheet.warning(
                    say!(
                        lang,
                        "this machine's own name, {name}, leads to {text}, which only this machine reaches",
                        "이 머신의 이름 {name}의 주소가 {text}: 이 머신에서만 쓸 수 있음"
                    ),
                    say!(
                        lang,
                        "a program that tells others its name's address tells them one that leads to themselves: PyTorch's Gloo and torchrun \
                         do; Paceline tells the address that leads to the endpoint",
                        "자기 이름의 주소를 알려 주는 프로그램(PyTorch의 Gloo, torchrun)은 상대에게 상대 자신을 가리키는 주소를 주게 됩니다. Paceline은 엔드포인트 \
                         쪽으로 나가는 주소를 알려 줍니다"
                    ),
                    say!(
                        lang,
                        "in /etc/hosts, put the machine's network address in front of {name} in place of {text}; for Gloo set \
                         GLOO_SOCKET_IFNAME",
                        "/etc/hosts에서 {name} 앞의 주소 {text} 대신 이 머신의 네트워크 주소를 쓰세요. Gloo를 쓴다면 GLOO_SOCKET_IFNAME을 설정하세요"
                    ),
                );
            }
        }
        outcome => {
            let reason = match outcome {
                Err(reason) => plain(reason),
                Ok(_) => say!(lang, "it has no address", "주소가 없음"),
            };
            sheet.fact(say!(
                lang,
                "{name}, which does not resolve: {reason}",
                "{name}의 주소를 찾을 수 없음: {reason}"
            ));
            let what = say!(
                lang,
                "this machine's own name, {name}, does not resolve: {reason}",
                "이 머신의 이름 {name}의 주소를 찾을 수 없음: {reason}"
            );
            let why = say!(
                lang,
                "programs that look up their own name wait or fail (PyTorch's Gloo, MPI); Paceline does not",
                "자기 이름의 주소를 찾는 프로그램(PyTorch의 Gloo, MPI)은 기다리거나 실패합니다. Paceline은 그렇지 않습니다"
            );
            let fix = say!(
                lang,
                "add a line to /etc/hosts: ADDRESS {name}",
                "/etc/hosts에 다음 줄을 추가하세요: ADDRESS {name}"
            );
            match several_nodes {
                true => sheet.warning(what, why, fix),
                false => sheet.note(what, why, fix),
            }
        }
    }
}

/// "eth0 10.0.0.5, lo 127.0.0.1".
fn listed(interfaces: &[(String, IpAddr)], lang: Lang) -> String {
    let words = interfaces.iter().map(|(name, ip)| format!("{name} {ip}"));
    let words = words.take(NAMED_MAX).collect::<Vec<_>>().join(", ");
    match interfaces.len() {
        0 => say!(lang, "none", "없음"),
        count if count > NAMED_MAX => {
            let more = count - NAMED_MAX;
            say!(lang, "{words}, {more} more", "{words} 외 {more}개")
        }
        _ => words,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::tests::{found, noted};
    use paceline_gpu::host::recorded::Recorded;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn sound() -> Network {
        let interfaces = [
            ("lo", "127.0.0.1"),
            ("eth0", "10.0.0.5"),
            ("eth0", "fe80::1"),
            ("docker0", "172.17.0.1"),
        ];
        Network {
            name: "node1".into(),
            resolved: Ok(vec![ip("10.0.0.5")]),
            interfaces: interfaces
                .map(|(name, addr)| (name.to_owned(), ip(addr)))
                .into(),
            chosen: Vec::new(),
            firewall: None,
        }
    }

    #[test]
    fn a_name_that_leads_home_or_nowhere_matters_between_nodes() {
        let check = |resolved: Result<&[&str], &str>, several: bool, expect: &[&str]| {
            let network = Network {
                resolved: match resolved {
                    Ok(ips) => Ok(ips.iter().map(|text| ip(text)).collect()),
                    Err(reason) => Err(reason.to_owned()),
                },
                ..sound()
            };
            let endpoint = several.then(|| "node1".to_owned());
            let notes = noted(|notes| judge(&network, endpoint.as_ref(), notes));
            assert_eq!(found(&notes), expect, "{network:?}");
        };
        check(Ok(&["10.0.0.5"]), true, &[]);
        check(Ok(&["127.0.1.1", "10.0.0.5"]), true, &[]);
        check(Ok(&["127.0.1.1"]), false, &[]);
        let hosts = "warning: host name: in /etc/hosts, put";
        check(Ok(&["127.0.1.1"]), true, &[hosts]);
        let add = "warning: host name: add a line to /etc/hosts";
        check(Err("NXDOMAIN"), true, &[add]);
        check(
            Ok(&[]),
            false,
            &["note: host name: add a line to /etc/hosts"],
        );
    }

    #[test]
    fn interfaces_are_chosen_as_ranks_choose_them() {
        for (setting, expect) in [
            (None, &["10.0.0.5", "172.17.0.1"][..]),
            (Some("eth"), &["10.0.0.5"]),
            (Some("=eth"), &[]),
            (Some("=eth0"), &["10.0.0.5"]),
            (Some("^docker,lo"), &["10.0.0.5"]),
            (Some("^=eth0"), &["172.17.0.1"]),
        ] {
            let network = Network {
                chosen: setting
                    .map(|setting| ("NCCL_SOCKET_IFNAME", setting.to_owned()))
                    .into_iter()
                    .collect(),
                ..sound()
            };
            let expect: Vec<IpAddr> = expect.iter().map(|text| ip(text)).collect();
            assert_eq!(network.candidates(), expect, "{setting:?}");
        }
    }

    #[test]
    fn a_variable_that_names_no_interface_is_an_error_between_nodes() {
        let network = Network {
            chosen: vec![("GLOO_SOCKET_IFNAME", "ib0".into())],
            ..sound()
        };
        let endpoint = "node1".to_owned();
        let notes = noted(|notes| judge(&network, Some(&endpoint), notes));
        let expect = [
            "error: interfaces: name one that exists, or `unset GLOO_SOCKET_IFNAME`",
            "error: interfaces: bring a network up",
        ];
        assert_eq!(found(&notes), expect);
    }

    #[test]
    fn an_endpoint_that_every_machine_takes_for_itself_is_said() {
        for (endpoint, expect) in [
            ("node1", false),
            ("node1:29400", false),
            ("10.0.0.1:29400", false),
            ("[fd00::1]:29400", false),
            ("fd00::1", false),
            ("localhost", true),
            ("localhost:1", true),
            ("127.0.1.1", true),
            ("127.0.0.1:29400", true),
            ("::1", true),
            ("[::1]", true),
            ("[::1]:29400", true),
        ] {
            assert_eq!(leads_home(endpoint), expect, "{endpoint}");
        }
        let endpoint = "localhost".to_owned();
        let notes = noted(|notes| judge(&sound(), Some(&endpoint), notes));
        assert_eq!(found(&notes), ["warning: endpoint: name the host"]);
    }

    #[test]
    fn a_firewall_that_is_on_is_named() {
        for (files, expect) in [
            (
                &[("/etc/ufw/ufw.conf", "# x\nENABLED=yes\n")][..],
                Some("ufw"),
            ),
            (&[("/etc/ufw/ufw.conf", "ENABLED=no\n")], None),
            (&[("/run/firewalld/x", "")], Some("firewalld")),
            (&[], None),
        ] {
            let recorded = Recorded::new(files);
            assert_eq!(firewall(&recorded.host()), expect, "{files:?}");
        }
    }
}
