//! A client of the store: one connection, one request at a time, a deadline on each.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::wire::{self, CONTROL_BYTES_MAX, HEAD_BYTES, Reply, Request};
use super::{KEY_BYTES_MAX, PURPOSE, StoreError, VALUE_BYTES_MAX};
use crate::auth::{self, AuthError, Side};
use crate::net::{self, DeadlineStream, deadline_after};
use crate::os;
use crate::token::Token;

/// How long the server may take for an answer it need not wait for, and for coming back after a wait.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest single attempt to connect, so that a lost packet or a stuck listener costs one attempt and not the deadline.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(5);
/// Pauses between attempts double from the first to the last: a server about to start is met at once, one that is long
/// in coming is not flooded by a thousand ranks.
const PAUSES: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(250)];

/// A connection to the store, used by one thread at a time: a second caller waits for the first one's request.
///
/// *Blocks*: every call ends by its deadline: the timeout given, plus at most 30 s for the server's answer.
/// *Errors*: after [`StoreError::NoAnswer`] and [`StoreError::Lost`] the connection is closed and every later call
/// returns that first error; after [`StoreError::TimedOut`] it is as good as before.
pub struct Client {
    server: String,
    /// The connection, or why there is none any more.
    stream: Mutex<Result<TcpStream, StoreError>>,
}

impl Client {
    /// Connects to `host:port` and proves the token, trying again until `timeout`: the server may start later.
    ///
    /// *Errors*: at once when the peer is heard and is not this job's store; [`StoreError::Connect`] at the deadline.
    pub fn connect(server: &str, token: &Token, timeout: Duration) -> Result<Self, StoreError> {
        retry(server, timeout, is_final, |left| {
            Self::attempt(server, token, left)
        })
    }

    /// Sets a key.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        check_value(key, value)?;
        self.call(
            "set",
            key,
            Duration::ZERO,
            &Request::Set { key, value },
            |reply| match reply {
                Reply::Done => Some(()),
                _ => None,
            },
        )
    }

    /// The value of a key.
    ///
    /// *Blocks* until the key exists, at most for `timeout`; with a timeout of zero it looks once.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        let request = Request::Get {
            timeout_ms: whole_milliseconds(timeout),
            key,
        };
        self.call("get", key, timeout, &request, take_value)
    }

    /// Waits until all keys exist.
    ///
    /// *Blocks* at most for `timeout`; the error names the keys that are missing then.
    pub fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), StoreError> {
        let first = keys.first().copied().unwrap_or_default();
        let request = Request::Wait {
            timeout_ms: whole_milliseconds(timeout),
            keys: keys.to_vec(),
        };
        self.call("wait", first, timeout, &request, |reply| match reply {
            Reply::Done => Some(()),
            _ => None,
        })
    }

    /// Whether all keys exist now.
    pub fn check(&self, keys: &[&str]) -> Result<bool, StoreError> {
        let first = keys.first().copied().unwrap_or_default();
        self.call(
            "check",
            first,
            Duration::ZERO,
            &Request::Check {
                keys: keys.to_vec(),
            },
            take_flag,
        )
    }

    /// Adds to a number, atomically, and returns the sum. A missing key counts as 0; values are ASCII decimal.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        self.call(
            "add",
            key,
            Duration::ZERO,
            &Request::Add { key, amount },
            |reply| match reply {
                Reply::Number(sum) => Some(sum),
                _ => None,
            },
        )
    }

    /// Sets a key to `new` if its value is `expected`, atomically, and returns the value it has then.
    ///
    /// A missing key is set when `expected` is empty; otherwise `expected` is returned and nothing is set.
    ///
    /// *Source*: torch's TCPStore.
    pub fn compare_set(
        &self,
        key: &str,
        expected: &[u8],
        new: &[u8],
    ) -> Result<Vec<u8>, StoreError> {
        check_value(key, expected)?;
        check_value(key, new)?;
        self.call(
            "compare-set",
            key,
            Duration::ZERO,
            &Request::CompareSet { key, expected, new },
            take_value,
        )
    }

    /// Removes a key; whether it was there.
    pub fn delete(&self, key: &str) -> Result<bool, StoreError> {
        self.call(
            "delete",
            key,
            Duration::ZERO,
            &Request::Delete { key },
            take_flag,
        )
    }

    /// Host and port of the server.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// The address of the server as this machine reached it.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.lock().as_ref().ok()?.peer_addr().ok()
    }

    /// The address of this end: the one of this machine's addresses that the server's machine can reach.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.lock().as_ref().ok()?.local_addr().ok()
    }

    /// One attempt, over all addresses of the name.
    pub(super) fn attempt(server: &str, token: &Token, left: Duration) -> Result<Self, StoreError> {
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
                    outcome = Err(failed(format!("{addr}: nobody listens there")));
                    continue;
                }
                Ok(stream) => stream,
                Err(error) => {
                    outcome = Err(failed(format!("{addr}: {error}")));
                    continue;
                }
            };
            match enter(&stream, token, left()) {
                Ok(()) => {
                    return Ok(Self {
                        server: server.to_owned(),
                        stream: Mutex::new(Ok(stream)),
                    });
                }
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

    fn lock(&self) -> std::sync::MutexGuard<'_, Result<TcpStream, StoreError>> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request and waits for its answer. `key` is the one that errors name; `wait` is how long the server may
    /// wait for keys; `read` takes the expected kind of reply and leaves the others.
    fn call<T>(
        &self,
        operation: &'static str,
        key: &str,
        wait: Duration,
        request: &Request<'_>,
        read: impl FnOnce(Reply<'_>) -> Option<T>,
    ) -> Result<T, StoreError> {
        check_keys(request)?;
        let mut latch = self.lock();
        let stream = latch.as_ref().map_err(Clone::clone)?;
        let (key, server) = (key.to_owned(), self.server.clone());
        let started = Instant::now();
        let answer = exchange(
            stream,
            &request.encode(),
            wait.saturating_add(ANSWER_TIMEOUT),
        );
        let waited = started.elapsed();
        let reason = match answer {
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                let error = StoreError::NoAnswer {
                    operation,
                    key,
                    server,
                    waited,
                };
                *latch = Err(error.clone());
                return Err(error);
            }
            Err(error) => error.to_string(),
            Ok(body) => match Reply::decode(&body) {
                Ok(Reply::TimedOut { missing }) => {
                    let missing = missing.into_iter().map(str::to_owned).collect();
                    return Err(StoreError::TimedOut {
                        operation,
                        server,
                        missing,
                        waited,
                    });
                }
                Ok(Reply::NoNumber) => return Err(StoreError::NotANumber { key, server }),
                Ok(Reply::Full) => {
                    return Err(StoreError::Full {
                        operation,
                        key,
                        server,
                    });
                }
                Ok(reply) => match read(reply) {
                    Some(result) => return Ok(result),
                    None => "it answered another question".into(),
                },
                Err(error) => format!("it sent {error}"),
            },
        };
        let error = StoreError::Lost {
            operation,
            key,
            server,
            waited,
            reason,
        };
        *latch = Err(error.clone());
        Err(error)
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("server", &self.server)
            .finish_non_exhaustive()
    }
}

/// Tries until it works, the error is final or the deadline has come.
pub(super) fn retry<T>(
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

/// Whether trying again would end the same way.
fn is_final(error: &StoreError) -> bool {
    matches!(error, StoreError::Auth { source, .. } if source.is_final())
}

/// Whether the socket is connected to itself, which TCP allows: dialing a port of the ephemeral range that nobody listens
/// at, the kernel may pick that very port for this end. Kept open, it would also keep the server from binding.
fn is_to_itself(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(near), Ok(far)) if near == far)
}

fn enter(stream: &TcpStream, token: &Token, timeout: Duration) -> Result<(), AuthError> {
    let prepared = stream
        .set_nodelay(true)
        .and_then(|()| os::keep_alive(stream));
    prepared.map_err(|error| AuthError::Broken {
        step: "set up the connection",
        reason: error.to_string(),
    })?;
    auth::prove_within(stream, token, Side::Dialer, PURPOSE, timeout)
}

fn exchange(stream: &TcpStream, frame: &[u8], timeout: Duration) -> io::Result<Vec<u8>> {
    let mut stream = DeadlineStream::new(stream, timeout);
    stream.write_all(frame)?;
    let mut head = [0; HEAD_BYTES];
    stream.read_exact(&mut head)?;
    let bytes = wire::body_bytes(head)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    let mut body = vec![0; bytes];
    stream.read_exact(&mut body)?;
    Ok(body)
}

fn take_value(reply: Reply<'_>) -> Option<Vec<u8>> {
    match reply {
        Reply::Value(value) => Some(value.to_vec()),
        _ => None,
    }
}

fn take_flag(reply: Reply<'_>) -> Option<bool> {
    match reply {
        Reply::Flag(flag) => Some(flag),
        _ => None,
    }
}

/// Rounded up: a wait is never shorter than asked for.
fn whole_milliseconds(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

fn check_value(key: &str, value: &[u8]) -> Result<(), StoreError> {
    if value.len() > VALUE_BYTES_MAX {
        return Err(StoreError::ValueTooLarge {
            key: key.to_owned(),
            bytes: value.len(),
        });
    }
    Ok(())
}

fn check_keys(request: &Request<'_>) -> Result<(), StoreError> {
    let keys = match request {
        Request::Wait { keys, .. } | Request::Check { keys } => keys.as_slice(),
        Request::Set { key, .. }
        | Request::Get { key, .. }
        | Request::Add { key, .. }
        | Request::CompareSet { key, .. }
        | Request::Delete { key } => std::slice::from_ref(key),
    };
    if let Some(key) = keys.iter().find(|key| key.len() > KEY_BYTES_MAX) {
        let start = key[..key.floor_char_boundary(40)].to_owned();
        return Err(StoreError::KeyTooLong {
            bytes: key.len(),
            start,
        });
    }
    let bytes = 13 + keys.iter().map(|key| 2 + key.len()).sum::<usize>();
    if bytes > CONTROL_BYTES_MAX {
        return Err(StoreError::TooManyKeys {
            keys: keys.len(),
            bytes,
            bytes_max: CONTROL_BYTES_MAX,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn a_wait_is_never_shorter_than_asked_for() {
        for (timeout, expected) in [
            (Duration::ZERO, 0),
            (Duration::from_nanos(1), 1),
            (Duration::from_micros(1001), 2),
            (Duration::from_secs(2), 2000),
            (Duration::MAX, u64::MAX),
        ] {
            assert_eq!(whole_milliseconds(timeout), expected, "{timeout:?}");
        }
    }
}
