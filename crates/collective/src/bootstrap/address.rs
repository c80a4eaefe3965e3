//! Where a rank listens, and where its peers dial.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use paceline_rendezvous::env::WorkerEnv;
use paceline_rendezvous::token::Token;

use crate::socket::Socket;

/// Longest attempt to reach one address; addresses of networks that do not lead here would otherwise take minutes.
const DIAL_TIMEOUT: Duration = Duration::from_secs(3);
/// Addresses offered at most; hosts full of containers have hundreds.
const ADDRESSES_MAX: usize = 16;
/// Interfaces named in an error at most.
const LISTED_MAX: usize = 32;

/// A listener at an abstract name: nothing in the file system that could be left behind, or be in the way.
///
/// The name is random, so a peer that reaches a listener of this name has reached this one: in another network namespace
/// there is none, even if process numbers are the same there.
pub(super) fn listen_unix() -> io::Result<(UnixListener, String)> {
    let random = Token::generate().map_err(io::Error::other)?.to_hex();
    let name = format!("paceline-{}-{}", std::process::id(), &random[..16]);
    let listener = UnixListener::bind_addr(&UnixAddr::from_abstract_name(&name)?)?;
    Ok((listener, name))
}

pub(super) fn dial_unix(name: &str) -> io::Result<Socket> {
    UnixStream::connect_addr(&UnixAddr::from_abstract_name(name)?).map(Socket::Unix)
}

/// Why a rank cannot listen for TCP.
#[derive(Debug)]
pub(super) enum NoAddress {
    /// The setting fits no interface with a usable address; `found` names those that there are.
    Interface { wanted: String, found: String },
    /// The system refused.
    System(io::Error),
}

/// A listener at a free port, and the addresses that peers may try, best first.
///
/// `route` is this host's address on its connection to the store, which chooses the family. A job whose meeting point is
/// a loopback address listens on loopback only, unless a setting names interfaces; any other one on all interfaces,
/// because which of them a peer reaches is known to the peer alone.
pub(super) fn listen_tcp(
    env: &WorkerEnv,
    route: IpAddr,
) -> Result<(TcpListener, Vec<IpAddr>), NoAddress> {
    let setting = env.socket_ifname.as_deref();
    if setting.is_none() && route.is_loopback() && meets_on_loopback(env) {
        let listener = TcpListener::bind((route, 0)).map_err(NoAddress::System)?;
        return Ok((listener, vec![route]));
    }
    let found = if_addrs::get_if_addrs().map_err(NoAddress::System)?;
    let interfaces: Vec<(String, IpAddr)> = found
        .into_iter()
        .map(|interface| (interface.name.clone(), interface.ip()))
        .collect();
    let addresses = match setting {
        None => candidates(route, interfaces.into_iter().map(|(_, ip)| ip)),
        Some(setting) => {
            chosen(&interfaces, setting, route).ok_or_else(|| NoAddress::Interface {
                wanted: setting.into(),
                found: listed(&interfaces),
            })?
        }
    };
    let any = match addresses.first().unwrap_or(&route) {
        IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let listener = TcpListener::bind((any, 0)).map_err(NoAddress::System)?;
    Ok((listener, addresses))
}

/// The addresses of the interfaces that a setting asks for: in the order of its names, `route` first where they include
/// it; of the route's family where there are such. Nothing when no usable address is left.
///
/// `eth,ib0` are beginnings of names, `=eth0` (the sign once, in front of the list) whole names, and `^` in front of either
/// stands for all other interfaces. *Source*: NCCL's `NCCL_SOCKET_IFNAME`.
fn chosen(interfaces: &[(String, IpAddr)], setting: &str, route: IpAddr) -> Option<Vec<IpAddr>> {
    let setting = setting.trim();
    let (excluded, rest) = split_sign(setting, '^');
    let (whole, rest) = split_sign(rest, '=');
    let names: Vec<&str> = rest
        .split(',')
        .map(str::trim)
        .filter(|name| !name.is_empty())
        .collect();
    let fits = |interface: &str, name: &str| match whole {
        true => interface == name,
        false => interface.starts_with(name),
    };
    let position = |interface: &str| names.iter().position(|name| fits(interface, name));
    let mut found: Vec<(usize, IpAddr)> = interfaces
        .iter()
        .filter_map(|(interface, ip)| match (position(interface), excluded) {
            (None, true) => Some((0, *ip)),
            (Some(position), false) => Some((position, *ip)),
            _ => None,
        })
        // An exclusion leaves loopback in, which no peer on another host reaches; named, it is what was asked for.
        .filter(|(_, ip)| !(is_link_local(ip) || excluded && ip.is_loopback()))
        .collect();
    if found.iter().any(|(_, ip)| ip.is_ipv4() == route.is_ipv4()) {
        found.retain(|(_, ip)| ip.is_ipv4() == route.is_ipv4());
    } else if let Some((_, first)) = found.first().copied() {
        found.retain(|(_, ip)| ip.is_ipv4() == first.is_ipv4());
    }
    // Stable, so that the system's order stands among addresses of one rank.
    found.sort_by_key(|(position, ip)| (*ip != route, *position));
    let mut seen = std::collections::HashSet::new();
    let unique = found.into_iter().map(|(_, ip)| ip);
    let addresses: Vec<IpAddr> = unique
        .filter(|ip| seen.insert(*ip))
        .take(ADDRESSES_MAX)
        .collect();
    (!addresses.is_empty()).then_some(addresses)
}

/// Whether the text begins with the sign, and what follows.
fn split_sign(text: &str, sign: char) -> (bool, &str) {
    match text.strip_prefix(sign) {
        Some(rest) => (true, rest),
        None => (false, text),
    }
}

/// "eth0 (10.0.0.5), lo (127.0.0.1)".
fn listed(interfaces: &[(String, IpAddr)]) -> String {
    let words = interfaces.iter().map(|(name, ip)| format!("{name} ({ip})"));
    let mut words: Vec<String> = words.take(LISTED_MAX).collect();
    if interfaces.len() > LISTED_MAX {
        words.push("and others".into());
    }
    match words.is_empty() {
        true => "none, because there are none".into(),
        false => words.join(", "),
    }
}

/// A link-local address means nothing without the dialer's interface.
fn is_link_local(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

fn candidates(route: IpAddr, interfaces: impl Iterator<Item = IpAddr>) -> Vec<IpAddr> {
    let usable =
        |ip: &IpAddr| ip.is_ipv4() == route.is_ipv4() && !ip.is_loopback() && !is_link_local(ip);
    let mut found: Vec<IpAddr> = std::iter::once(route)
        .chain(interfaces)
        .filter(usable)
        .collect();
    let mut seen = std::collections::HashSet::new();
    found.retain(|ip| seen.insert(*ip));
    found.truncate(ADDRESSES_MAX - 1);
    // The host of rank 0 may know itself by a loopback address (Debian's 127.0.1.1); good for ranks beside it.
    if route.is_loopback() {
        found.push(route);
    }
    found
}

fn meets_on_loopback(env: &WorkerEnv) -> bool {
    let host = match &env.store {
        Some(store) => store
            .rsplit_once(':')
            .map_or(store.as_str(), |(host, _)| host),
        None => &env.master_addr,
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// A connection to the listener there. The handshake shows whether it is the right rank.
pub(super) fn dial_tcp(ip: IpAddr, port: u16, deadline: Instant) -> Result<Socket, String> {
    let addr = SocketAddr::new(ip, port);
    let left = deadline
        .saturating_duration_since(Instant::now())
        .min(DIAL_TIMEOUT);
    if left.is_zero() {
        return Err(format!("{addr}: no time left"));
    }
    TcpStream::connect_timeout(&addr, left)
        .map(Socket::Tcp)
        .map_err(|error| format!("{addr}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn the_route_comes_first_and_loopback_last() {
        let interfaces = || {
            [
                "127.0.0.1",
                "10.0.0.5",
                "192.168.1.2",
                "169.254.1.1",
                "fe80::1",
            ]
            .map(ip)
            .into_iter()
        };
        assert_eq!(
            candidates(ip("192.168.1.2"), interfaces()),
            ["192.168.1.2", "10.0.0.5"].map(ip)
        );
        assert_eq!(
            candidates(ip("127.0.1.1"), interfaces()),
            ["10.0.0.5", "192.168.1.2", "127.0.1.1"].map(ip)
        );
        assert_eq!(
            candidates(ip("::1"), ["fe80::1", "2001:db8::1"].map(ip).into_iter()),
            ["2001:db8::1", "::1"].map(ip)
        );
    }

    #[test]
    fn interfaces_are_chosen_by_nccls_rules() {
        let interfaces = [
            ("lo", "127.0.0.1"),
            ("lo", "::1"),
            ("eth0", "10.0.0.5"),
            ("eth0", "fe80::5"),
            ("eth1", "10.0.1.5"),
            ("eth10", "10.0.10.5"),
            ("ib0", "192.168.9.5"),
            ("ib0", "2001:db8::9"),
            ("docker0", "172.17.0.1"),
            ("v6only", "2001:db8::7"),
        ]
        .map(|(name, address)| (name.to_owned(), ip(address)));
        for (setting, route, expected) in [
            (
                "eth",
                "10.0.1.5",
                &["10.0.1.5", "10.0.0.5", "10.0.10.5"][..],
            ),
            ("eth1", "10.0.0.5", &["10.0.1.5", "10.0.10.5"]),
            ("=eth1", "10.0.0.5", &["10.0.1.5"]),
            ("=eth1,ib0", "10.0.0.5", &["10.0.1.5", "192.168.9.5"]),
            ("ib, eth0", "10.0.9.9", &["192.168.9.5", "10.0.0.5"]),
            (
                "^docker,lo",
                "10.0.0.5",
                &["10.0.0.5", "10.0.1.5", "10.0.10.5", "192.168.9.5"],
            ),
            (
                "^docker",
                "10.0.0.5",
                &["10.0.0.5", "10.0.1.5", "10.0.10.5", "192.168.9.5"],
            ),
            (
                "^=eth1,docker0",
                "10.0.0.5",
                &["10.0.0.5", "10.0.10.5", "192.168.9.5"],
            ),
            ("lo", "10.0.0.5", &["127.0.0.1"]),
            ("lo", "::1", &["::1"]),
            ("ib0", "2001:db8::1", &["2001:db8::9"]),
            ("v6only", "10.0.0.5", &["2001:db8::7"]),
            ("eth9", "10.0.0.5", &[]),
            ("=eth", "10.0.0.5", &[]),
            (",", "10.0.0.5", &[]),
            ("^eth,ib,docker,lo,v6", "10.0.0.5", &[]),
        ] {
            let found = chosen(&interfaces, setting, ip(route)).unwrap_or_default();
            let expected: Vec<IpAddr> = expected.iter().map(|address| ip(address)).collect();
            assert_eq!(found, expected, "{setting} on the way {route}");
        }
    }

    #[test]
    fn a_setting_that_fits_nothing_lists_what_there_is() {
        let env = WorkerEnv {
            socket_ifname: Some("=no-such-interface".into()),
            ..WorkerEnv::alone()
        };
        let Err(NoAddress::Interface { wanted, found }) = listen_tcp(&env, ip("127.0.0.1")) else {
            panic!("it listens")
        };
        assert_eq!(wanted, "=no-such-interface");
        assert!(found.contains("lo (127.0.0.1)"), "{found}");
        let error = crate::Error::Interface { wanted, found };
        assert!(error.hint().is_some());
        let start = "network interfaces \"=no-such-interface\" were asked for, which fits none of ";
        assert!(error.to_string().starts_with(start), "{error}");
    }

    #[test]
    fn a_named_interface_is_listened_at_also_by_a_job_on_loopback() {
        let env = WorkerEnv {
            socket_ifname: Some("lo".into()),
            ..WorkerEnv::alone()
        };
        let (listener, addresses) = listen_tcp(&env, ip("127.0.0.1")).unwrap();
        assert_eq!(addresses, [ip("127.0.0.1")]);
        let port = listener.local_addr().unwrap().port();
        let deadline = Instant::now() + Duration::from_secs(5);
        assert!(dial_tcp(addresses[0], port, deadline).is_ok());
    }

    #[test]
    fn a_job_on_loopback_is_told_by_its_meeting_point() {
        for (host, expected) in [
            ("127.0.0.1", true),
            ("::1", true),
            ("localhost", true),
            ("node7", false),
        ] {
            let env = WorkerEnv {
                master_addr: host.into(),
                ..WorkerEnv::alone()
            };
            assert_eq!(meets_on_loopback(&env), expected, "{host}");
        }
        let env = WorkerEnv {
            store: Some("[::1]:99".into()),
            master_addr: "node7".into(),
            ..WorkerEnv::alone()
        };
        assert!(meets_on_loopback(&env));
    }

    #[test]
    fn an_abstract_name_can_be_dialed() {
        let (_listener, name) = listen_unix().unwrap();
        assert!(dial_unix(&name).is_ok());
        assert!(dial_unix("paceline-nobody").is_err());
    }
}
