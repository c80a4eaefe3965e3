//! Under which addresses nodes reach each other, and who hosts the first store.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};

use paceline_rendezvous::store::{Server, StoreError};

use crate::error::LaunchError;
use crate::job::Cluster;
use crate::round::Standing;

/// The port of an endpoint that names none; torchrun's.
const ENDPOINT_PORT: u16 = 29400;

/// Hosts the endpoint's store if that is this agent's part: node 0's where places are given, else that of whoever comes
/// first on the endpoint's host.
pub(super) fn host(
    standing: &Standing<'_>,
    cluster: &Cluster,
    endpoint: &str,
) -> Result<Option<Server>, LaunchError> {
    let port = endpoint
        .rsplit_once(':')
        .and_then(|(_, port)| port.parse().ok())
        .unwrap_or(ENDPOINT_PORT);
    let addrs: Vec<SocketAddr> = match endpoint.to_socket_addrs() {
        Ok(addrs) => addrs.collect(),
        Err(_) => Vec::new(),
    };
    let is_here = match &cluster.place {
        Some(place) => place.node_rank == 0,
        None => addrs
            .iter()
            .any(|addr| TcpListener::bind((addr.ip(), 0)).is_ok()),
    };
    if !is_here {
        return Ok(None);
    }
    let only_loopback = !addrs.is_empty() && addrs.iter().all(|addr| addr.ip().is_loopback());
    let bound = if only_loopback {
        standing.serve(addrs[0])
    } else {
        standing
            .serve((Ipv6Addr::UNSPECIFIED, port).into())
            .or_else(|error| match &error {
                StoreError::Bind { source, .. }
                    if source.kind() == std::io::ErrorKind::AddrInUse =>
                {
                    Err(error)
                }
                _ => standing.serve((Ipv4Addr::UNSPECIFIED, port).into()),
            })
    };
    match bound {
        Ok(server) => Ok(Some(server)),
        // Another agent of this host was quicker, or one of another namespace has the address.
        Err(StoreError::Bind { source, .. })
            if source.kind() == std::io::ErrorKind::AddrInUse && cluster.place.is_none() =>
        {
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// The address of this machine that leads to the endpoint. No packet is sent.
pub(super) fn own_addr(endpoint: &str, is_host: bool) -> String {
    let host = endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    if is_host {
        return host.to_owned();
    }
    let route = |addr: SocketAddr| -> Option<IpAddr> {
        let any: SocketAddr = match addr {
            SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
        };
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect(addr).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    let mut addrs = endpoint.to_socket_addrs().into_iter().flatten();
    match addrs.find_map(route) {
        // The endpoint is this machine, which may call itself by a loopback address.
        Some(ip) if ip.is_loopback() => host.to_owned(),
        Some(ip) => ip.to_string(),
        None => host.to_owned(),
    }
}

/// Where a server listens that the others reach at `addr`.
pub(super) fn everywhere(addr: &str) -> SocketAddr {
    match addr.parse::<IpAddr>() {
        Ok(ip) if ip.is_loopback() => (ip, 0).into(),
        _ if addr == "localhost" => (Ipv4Addr::LOCALHOST, 0).into(),
        _ => (Ipv6Addr::UNSPECIFIED, 0).into(),
    }
}

pub(super) fn with_port(endpoint: &str) -> String {
    let has_port = endpoint
        .rsplit_once(':')
        .is_some_and(|(host, port)| port.parse::<u16>().is_ok() && !host.ends_with(':'));
    if has_port {
        endpoint.to_owned()
    } else {
        join(endpoint, ENDPOINT_PORT)
    }
}

pub(super) fn join(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_without_a_port_gets_torchruns() {
        for (endpoint, expect) in [
            ("node1", "node1:29400"),
            ("node1:5000", "node1:5000"),
            ("10.0.0.1:5000", "10.0.0.1:5000"),
            ("::1", "[::1]:29400"),
            ("[::1]:5000", "[::1]:5000"),
        ] {
            assert_eq!(with_port(endpoint), expect);
        }
    }

    #[test]
    fn an_agent_on_the_endpoints_machine_goes_by_the_endpoints_name() {
        assert_eq!(own_addr("localhost:1", true), "localhost");
        assert_eq!(own_addr("127.0.0.1:1", false), "127.0.0.1");
        assert_eq!(own_addr("[::1]:1", true), "::1");
    }
}
