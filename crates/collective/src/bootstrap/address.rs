//! Where a rank listens, and where its peers dial.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use paceline_rendezvous::env::WorkerEnv;

use crate::socket::Socket;

/// Longest attempt to reach one address; addresses of networks that do not lead here would otherwise take minutes.
const DIAL_TIMEOUT: Duration = Duration::from_secs(3);
/// Addresses offered at most; hosts full of containers have hundreds.
const ADDRESSES_MAX: usize = 16;

/// A listener at an abstract name: nothing in the file system that could be left behind, or be in the way.
pub(super) fn listen_unix() -> io::Result<(UnixListener, String)> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    loop {
        let name = format!(
            "paceline-{}-{}",
            std::process::id(),
            COUNTER.fetch_add(1, Ordering::Relaxed)
        );
        match UnixListener::bind_addr(&UnixAddr::from_abstract_name(&name)?) {
            Ok(listener) => return Ok((listener, name)),
            // A process of the same number in another namespace for processes.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(error),
        }
    }
}

pub(super) fn dial_unix(name: &str) -> io::Result<Socket> {
    UnixStream::connect_addr(&UnixAddr::from_abstract_name(name)?).map(Socket::Unix)
}

/// A listener at a free port, and the addresses that peers may try, best first.
///
/// `route` is this host's address on its connection to the store, which chooses the family. A job whose meeting point is
/// a loopback address listens on loopback only; any other one on all interfaces, because which of them a peer reaches is
/// known to the peer alone.
pub(super) fn listen_tcp(env: &WorkerEnv, route: IpAddr) -> io::Result<(TcpListener, Vec<IpAddr>)> {
    if route.is_loopback() && meets_on_loopback(env) {
        return Ok((TcpListener::bind((route, 0))?, vec![route]));
    }
    let any = if route.is_ipv4() {
        IpAddr::from(Ipv4Addr::UNSPECIFIED)
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    };
    let listener = TcpListener::bind((any, 0))?;
    let interfaces = if_addrs::get_if_addrs()?
        .into_iter()
        .map(|interface| interface.ip());
    Ok((listener, candidates(route, interfaces)))
}

fn candidates(route: IpAddr, interfaces: impl Iterator<Item = IpAddr>) -> Vec<IpAddr> {
    let usable = |ip: &IpAddr| match ip {
        IpAddr::V4(ip) => route.is_ipv4() && !ip.is_loopback() && !ip.is_link_local(),
        // A link-local address means nothing without the dialer's interface.
        IpAddr::V6(ip) => route.is_ipv6() && !ip.is_loopback() && !ip.is_unicast_link_local(),
    };
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

/// A connection to whoever listens there. Whether that is the right rank shows at its door.
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
