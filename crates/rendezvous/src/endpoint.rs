//! Where the launchers of several nodes meet: which launcher hosts the store, and which address reaches a node.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

use crate::net;
use crate::store::{Server, StoreError};

/// The default port of an endpoint; torchrun's.
pub const ENDPOINT_PORT: u16 = 29_400;
/// The default `MASTER_PORT`; torchrun's.
pub const MASTER_PORT: u16 = 29_500;

/// Hosts the endpoint's store if that is this node's task: node 0 hosts it where nodes are numbered beforehand, else the
/// first launcher on the endpoint's host.
///
/// `serve` binds a store with the job's token and TLS setting.
///
/// *Errors*: the port cannot be bound. Where nodes are not numbered, a port in use is no error: another node may have been
/// quicker.
pub fn host(
    endpoint: &str,
    node_rank: Option<usize>,
    serve: &dyn Fn(SocketAddr) -> Result<Server, StoreError>,
) -> Result<Option<Server>, StoreError> {
    let port = endpoint
        .rsplit_once(':')
        .and_then(|(_, port)| port.parse().ok())
        .unwrap_or(ENDPOINT_PORT);
    let addrs: Vec<SocketAddr> = match endpoint.to_socket_addrs() {
        Ok(addrs) => addrs.collect(),
        Err(_) => Vec::new(),
    };
    let is_here = match node_rank {
        Some(node_rank) => node_rank == 0,
        None => addrs
            .iter()
            .any(|addr| TcpListener::bind((addr.ip(), 0)).is_ok()),
    };
    if !is_here {
        return Ok(None);
    }
    let only_loopback = !addrs.is_empty() && addrs.iter().all(|addr| addr.ip().is_loopback());
    let bound = match only_loopback {
        true => serve(addrs[0]),
        false => on_all_addresses(port, serve),
    };
    match bound {
        Ok(server) => Ok(Some(server)),
        // Another launcher of this host, or of another namespace with this address, was quicker.
        Err(error) if node_rank.is_none() && is_in_use(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A server on all addresses of this machine. IPv6's serve IPv4 as well, unless the machine has no IPv6 at all.
pub(crate) fn on_all_addresses(
    port: u16,
    serve: &dyn Fn(SocketAddr) -> Result<Server, StoreError>,
) -> Result<Server, StoreError> {
    match serve((Ipv6Addr::UNSPECIFIED, port).into()) {
        Err(error) if !is_in_use(&error) => serve((Ipv4Addr::UNSPECIFIED, port).into()),
        bound => bound,
    }
}

fn is_in_use(error: &StoreError) -> bool {
    matches!(error, StoreError::Bind { source, .. } if source.kind() == io::ErrorKind::AddrInUse)
}

/// This machine's address on the route to the endpoint, or the endpoint's host where this machine hosts it. Sends no packet.
pub fn own_addr(endpoint: &str, is_host: bool) -> String {
    let host = endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    if is_host {
        return host.to_owned();
    }
    let mut addrs = endpoint.to_socket_addrs().into_iter().flatten();
    match addrs.find_map(net::route_to) {
        // The endpoint is this machine, which may call itself by a loopback address.
        Some(ip) if ip.is_loopback() => host.to_owned(),
        Some(ip) => ip.to_string(),
        None => host.to_owned(),
    }
}

/// The address to bind for a server that other nodes reach at `addr`.
pub fn everywhere(addr: &str) -> SocketAddr {
    match addr.parse::<IpAddr>() {
        Ok(ip) if ip.is_loopback() => (ip, 0).into(),
        _ if addr == "localhost" => (Ipv4Addr::LOCALHOST, 0).into(),
        _ => (Ipv6Addr::UNSPECIFIED, 0).into(),
    }
}

/// The endpoint, with [`ENDPOINT_PORT`] if it names no port.
pub fn with_port(endpoint: &str) -> String {
    let has_port = endpoint
        .rsplit_once(':')
        .is_some_and(|(host, port)| port.parse::<u16>().is_ok() && !host.ends_with(':'));
    if has_port {
        endpoint.to_owned()
    } else {
        net::join(endpoint, ENDPOINT_PORT)
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
