//! Where the ranks of a job meet: which process hosts the store, and how the others find it.
//!
//! | the environment says | rank 0 | other ranks |
//! |---|---|---|
//! | world 1 | hosts on a free port of the loopback address | - |
//! | `PACELINE_STORE` | client | clients |
//! | `MASTER_ADDR`, `MASTER_PORT` | hosts there | dial there |
//! | and `TORCHELASTIC_USE_AGENT_STORE=True` | hosts on a free port, publishes it in the agent's store | read it there, dial |

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use super::client::dial::retry;
use super::torch::Agent;
use super::{Client, Server, ServerOptions, StoreError};
use crate::endpoint::on_all_addresses;
use crate::env::WorkerEnv;
use crate::net;
use crate::token::Token;

/// How long a rank without a launcher waits for the others before it says so.
pub const NOTICE_AFTER: Duration = Duration::from_secs(2);
/// Addresses of rank 0 that are tried.
const ADDRESSES_MAX: usize = 4;

/// Connects this rank to its job's store, and hosts it when that is this rank's part. Keep the server as long as any
/// rank may need the store.
///
/// *Blocks*: at most for `timeout`.
pub fn connect_or_host(
    env: &WorkerEnv,
    timeout: Duration,
) -> Result<(Option<Server>, Client), StoreError> {
    if let Some(store) = &env.store {
        return Ok((
            None,
            Client::connect_as(store, &env.token, env.tls, timeout)?,
        ));
    }
    if env.world == 1 {
        return host_alone(env, timeout);
    }
    if env.master_port == 0 {
        return Err(StoreError::NoMeetingPoint { world: env.world });
    }
    let master = net::join(&env.master_addr, env.master_port);
    match (env.agent_store, env.rank) {
        (true, 0) => host_beside_agent(env, &master, timeout),
        (true, _) => Ok((None, find_through_agent(env, &master, timeout)?)),
        (false, 0) => host(env, env.master_port, timeout),
        (false, _) => Ok((None, dial(env, &master, timeout)?)),
    }
}

/// Hosts the store on a free port, for ranks that tell each other by means of their own where it is. The second result is its addresses
/// as text, for [`find`].
///
/// *Blocks*: at most for `timeout`, while it looks up names.
pub fn host_anywhere(env: &WorkerEnv, timeout: Duration) -> Result<(Server, String), StoreError> {
    let server = bind(env, 0, timeout)?;
    let master = net::join(&env.master_addr, env.master_port.max(1));
    let local = net::resolve(&master, timeout)
        .ok()
        .and_then(|addrs| net::route_to(*addrs.first()?));
    let addresses = addresses(env, local, server.addr().port());
    Ok((server, addresses))
}

/// The one of these addresses at which the job's store answers. They are hints: the listener there has to prove the token.
///
/// *Blocks*: at most for `timeout`.
pub fn find(env: &WorkerEnv, addresses: &str, timeout: Duration) -> Result<String, StoreError> {
    retry(addresses, timeout, never, |left| {
        first_of(env, addresses, left)
    })
    .map(|client| client.server().to_owned())
}

fn first_of(env: &WorkerEnv, addresses: &str, left: Duration) -> Result<Client, StoreError> {
    let mut outcome = Err(StoreError::NoMeetingPoint { world: env.world });
    for address in addresses.split(',').take(ADDRESSES_MAX) {
        outcome = Client::attempt(address, &env.token, env.tls, left);
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

/// Dials rank 0, and says so if that takes long: where no launcher hosts the store, none tells.
fn dial(env: &WorkerEnv, master: &str, timeout: Duration) -> Result<Client, StoreError> {
    let connect = |timeout| Client::connect_as(master, &env.token, env.tls, timeout);
    let first = connect(timeout.min(NOTICE_AFTER));
    let Err(StoreError::Connect {
        waited,
        attempts,
        reason,
        ..
    }) = &first
    else {
        return first;
    };
    if timeout <= NOTICE_AFTER {
        return first;
    }
    let (rank, before) = (env.rank, (*waited, *attempts));
    crate::notice!(WARN, "rank {rank} waits for rank 0 at {master} ({reason})");
    connect(timeout - before.0).map_err(|error| match error {
        StoreError::Connect {
            server,
            waited,
            attempts,
            reason,
        } => StoreError::Connect {
            server,
            waited: waited + before.0,
            attempts: attempts + before.1,
            reason,
        },
        other => other,
    })
}

/// No other process joins a world of one, so it uses a fresh token, whatever the environment says.
fn host_alone(env: &WorkerEnv, timeout: Duration) -> Result<(Option<Server>, Client), StoreError> {
    let token = Token::generate().unwrap_or_else(|_| env.token.clone());
    let server = Server::bind((Ipv4Addr::LOCALHOST, 0).into(), &token)?;
    let client = Client::connect(&server.addr().to_string(), &token, timeout)?;
    Ok((Some(server), client))
}

fn host(
    env: &WorkerEnv,
    port: u16,
    timeout: Duration,
) -> Result<(Option<Server>, Client), StoreError> {
    let server = bind(env, port, timeout)?;
    let near = near(server.addr()).to_string();
    let client = Client::connect_as(&near, &env.token, env.tls, timeout)?;
    Ok((Some(server), client))
}

/// Listens on the loopback address when that is where the others dial, else on all: the address under which other
/// machines know this one need not be one that this one knows (containers, `/etc/hosts` with 127.0.1.1).
fn bind(env: &WorkerEnv, port: u16, timeout: Duration) -> Result<Server, StoreError> {
    let bind = |addr| {
        let options = ServerOptions {
            tls: env.tls,
            ..ServerOptions::default()
        };
        Server::bind_with(addr, &env.token, options)
    };
    let addrs = net::resolve(&net::join(&env.master_addr, port), timeout).unwrap_or_default();
    if env.node_count == 1
        && let Some(addr) = addrs.first()
        && addrs.iter().all(|addr| addr.ip().is_loopback())
    {
        return bind(*addr);
    }
    on_all_addresses(port, &bind)
}

/// The address at which this machine reaches its own server. A server on all addresses serves IPv4 in either case, and a machine without
/// `::1` is more common than one without `127.0.0.1`.
fn near(addr: SocketAddr) -> SocketAddr {
    let ip = if addr.ip().is_unspecified() {
        Ipv4Addr::LOCALHOST.into()
    } else {
        addr.ip()
    };
    SocketAddr::new(ip, addr.port())
}

fn host_beside_agent(
    env: &WorkerEnv,
    master: &str,
    timeout: Duration,
) -> Result<(Option<Server>, Client), StoreError> {
    let started = Instant::now();
    let (server, client) = host(env, 0, timeout)?;
    let port = server.as_ref().map_or(0, |server| server.addr().port());
    let left = timeout.saturating_sub(started.elapsed());
    retry(master, left, never, |left| {
        let agent = Agent::connect(master, left)?;
        agent.set(
            &agent_key(env),
            addresses(env, agent.local_ip(), port).as_bytes(),
            left,
        )
    })?;
    Ok((server, client))
}

/// Where others may find rank 0, best first: the job's master, which is rank 0's host unless the nodes have changed since
/// the job began, then this machine's address on the route to the agent.
fn addresses(env: &WorkerEnv, local: Option<IpAddr>, port: u16) -> String {
    let mut addresses = net::join(&env.master_addr, port);
    if let Some(ip) = local.filter(|ip| !ip.is_loopback()) {
        addresses.push_str(&format!(",{}", SocketAddr::new(ip, port)));
    }
    addresses
}

/// The addresses are read anew for each attempt: after a restart an older round's may still be there. They are only
/// hints, from a store without authentication: the listener there still has to prove the token.
fn find_through_agent(
    env: &WorkerEnv,
    master: &str,
    timeout: Duration,
) -> Result<Client, StoreError> {
    retry(master, timeout, never, |left| {
        let published = Agent::connect(master, left)?.get(&agent_key(env), left)?;
        let published = String::from_utf8_lossy(&published).into_owned();
        first_of(env, &published, left)
    })
}

fn never(_: &StoreError) -> bool {
    false
}

fn agent_key(env: &WorkerEnv) -> String {
    format!("/paceline/{}/{}/store", env.run_id, env.restart_count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agents_store_holds_every_address_of_rank_0_that_others_can_dial() {
        let env = WorkerEnv {
            master_addr: "node-a".into(),
            ..WorkerEnv::alone()
        };
        let ip = |text: &str| Some(text.parse().unwrap());
        for (local, expected) in [
            (None, "node-a:4711"),
            (ip("127.0.1.1"), "node-a:4711"),
            (ip("10.0.0.5"), "node-a:4711,10.0.0.5:4711"),
            (ip("fd00::5"), "node-a:4711,[fd00::5]:4711"),
        ] {
            assert_eq!(addresses(&env, local, 4711), expected);
        }
    }

    #[test]
    fn a_store_on_a_free_port_is_found_at_the_first_of_its_addresses_that_answers() {
        let (env, timeout) = (WorkerEnv::alone(), Duration::from_secs(5));
        let (server, addresses) = host_anywhere(&env, timeout).unwrap();
        assert_eq!(addresses, server.addr().to_string());
        let with_another = format!("127.0.0.1:1,{addresses}");
        assert_eq!(find(&env, &with_another, timeout).unwrap(), addresses);
    }

    #[test]
    fn a_server_on_all_addresses_is_near_on_the_loopback_address() {
        for (addr, expected) in [
            ("0.0.0.0:1", "127.0.0.1:1"),
            ("[::]:1", "127.0.0.1:1"),
            ("[::1]:1", "[::1]:1"),
            ("10.0.0.5:1", "10.0.0.5:1"),
        ] {
            assert_eq!(near(addr.parse().unwrap()).to_string(), expected);
        }
    }
}
