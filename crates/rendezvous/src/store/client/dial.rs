//! How a client connects: names, addresses, authentication and retries.

use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use crate::auth::{AuthError, Proved, Side};
use crate::net::{self, Wire, deadline_after};
use crate::os;
use crate::store::{PURPOSE, StoreError};
use crate::token::Token;

/// Longest single attempt to connect, so that a lost packet or a stuck listener costs one attempt and not the deadline.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(5);
/// Pauses between attempts double from the first to the last: a server about to start is met at once, one that is long
/// in coming is not flooded by a thousand ranks.
const PAUSES: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(250)];

/// Tries until it works, the error is final or the deadline has come.
pub(in crate::store) fn retry<T>(
    server: &str,
    timeout: Duration,
    is_final: fn(&StoreError) -> bool,
    mut attempt: impl FnMut(Duration) -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    let started = Instant::now();
    let mut pause = PAUSES[0];
    let mut attempts = 0;
    loop {
        attempts += 1;
        let error = match attempt(timeout.saturating_sub(started.elapsed())) {
            Ok(done) => return Ok(done),
            Err(error) if is_final(&error) => return Err(error),
            Err(error) => error,
        };
        let waited = started.elapsed();
        if waited + pause >= timeout {
            let reason = match error {
                StoreError::Connect { reason, .. } => reason,
                StoreError::Auth { source, .. } => source.to_string(),
                other => return Err(other),
            };
            return Err(StoreError::Connect {
                server: server.to_owned(),
                waited,
                attempts,
                reason,
            });
        }
        // Nothing here tells when another machine's server starts; asking again is all there is.
        thread::sleep(pause);
        pause = (pause * 2).min(PAUSES[1]);
    }
}

/// One attempt, over all addresses of the name.
pub(in crate::store) fn attempt(
    server: &str,
    token: &Token,
    tls: bool,
    left: Duration,
) -> Result<Wire, StoreError> {
    let deadline = deadline_after(left.min(ATTEMPT_TIMEOUT));
    let left = || {
        deadline
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1))
    };
    let failed = |reason: String| StoreError::Connect {
        server: server.to_owned(),
        waited: Duration::ZERO,
        attempts: 1,
        reason,
    };
    let addrs = net::resolve(server, left())
        .map_err(|error| failed(format!("the name does not resolve: {error}")))?;
    let mut outcome = Err(failed("the name has no address".into()));
    for addr in addrs {
        let stream = match TcpStream::connect_timeout(&addr, left()) {
            Ok(stream) if is_to_itself(&stream) => {
                outcome = Err(failed(format!("{addr}: no process listens there")));
                continue;
            }
            Ok(stream) => stream,
            Err(error) => {
                outcome = Err(failed(format!("{addr}: {error}")));
                continue;
            }
        };
        match enter(stream, token, tls, left()) {
            Ok(wire) => return Ok(wire),
            Err(source) => {
                outcome = Err(StoreError::Auth {
                    server: server.to_owned(),
                    source,
                })
            }
        }
    }
    outcome
}

/// Whether another attempt would end the same way.
pub(super) fn is_final(error: &StoreError) -> bool {
    matches!(error, StoreError::Auth { source, .. } if source.is_final())
}

/// Whether the socket is connected to itself, which TCP allows: dialing a port of the ephemeral range without a listener,
/// the kernel may pick that very port for this end. Kept open, it would also keep the server from binding.
fn is_to_itself(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(near), Ok(far)) if near == far)
}

fn enter(
    stream: TcpStream,
    token: &Token,
    tls: bool,
    timeout: Duration,
) -> Result<Wire, AuthError> {
    let prepared = stream
        .set_nodelay(true)
        .and_then(|()| os::keep_alive(&stream));
    prepared.map_err(|error| AuthError::Broken {
        step: "set up the connection",
        reason: error.to_string(),
    })?;
    let deadline = deadline_after(timeout);
    Ok(Proved::meet(stream, token, Side::Dialer, PURPOSE, tls, deadline)?.into_wire())
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    #[test]
    fn a_socket_connected_to_itself_is_recognised() {
        let socket = rustix::net::socket(
            rustix::net::AddressFamily::INET,
            rustix::net::SocketType::STREAM,
            None,
        )
        .unwrap();
        rustix::net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let stream = TcpStream::from(socket);
        rustix::net::connect(&stream, &stream.local_addr().unwrap()).unwrap();
        assert!(is_to_itself(&stream));
    }
}
