//! A client of the store: one connection, one request at a time, a deadline on each.

mod channel;
pub(super) mod dial;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use self::channel::Channel;
use super::calls::{accept, check_value, whole_milliseconds};
use super::wire::{Reply, Request};
use super::{KeyList, Store, StoreError};
use crate::net::deadline_after;
use crate::token::Token;

/// How long the server may take to answer, beyond the request's own timeout.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// A connection to the store, used by one thread at a time: a second caller waits for the first one's request.
///
/// [`Store`](super::Store) says what the operations mean.
///
/// *Blocks*: every call ends by its deadline: the timeout given, plus at most 30 s for the server's answer
/// (see [`Client::with_answer_timeout`]).
/// *Errors*: after [`StoreError::NoAnswer`] and [`StoreError::Lost`] the connection is closed and every later call
/// returns that first error; after [`StoreError::TimedOut`] it is as good as before. A client that
/// [reconnects](Client::reconnecting) makes up for a broken connection where it can.
pub struct Client {
    server: String,
    token: Token,
    tls: bool,
    reconnects: bool,
    answer_timeout: Duration,
    /// The connection, or why it ended.
    channel: Mutex<Result<Channel, StoreError>>,
}

impl Client {
    /// Connects to `host:port` and proves the token, trying again until `timeout`: the server may start later.
    ///
    /// *Errors*: at once when the peer is heard and is not this job's store; [`StoreError::Connect`] at the deadline.
    pub fn connect(server: &str, token: &Token, timeout: Duration) -> Result<Self, StoreError> {
        Self::connect_as(server, token, false, timeout)
    }

    /// [`Client::connect`], through TLS or not: as the server was bound ([`ServerOptions::tls`](super::ServerOptions::tls)).
    pub fn connect_as(
        server: &str,
        token: &Token,
        tls: bool,
        timeout: Duration,
    ) -> Result<Self, StoreError> {
        dial::retry(server, timeout, dial::is_final, |left| {
            Self::attempt(server, token, tls, left)
        })
    }

    /// The same for a server that may be far away: each attempt may take `patience`, but none begins after `timeout`. So a server that
    /// is gone, and refuses connections, is known to be soon.
    pub fn connect_patiently(
        server: &str,
        token: &Token,
        tls: bool,
        timeout: Duration,
        patience: Duration,
    ) -> Result<Self, StoreError> {
        dial::retry(server, timeout, dial::is_final, |_| {
            Self::attempt(server, token, tls, patience)
        })
    }

    /// The same client with another limit for answers than 30 s, to notice a silent server sooner.
    #[must_use]
    pub fn with_answer_timeout(mut self, timeout: Duration) -> Self {
        self.answer_timeout = timeout;
        self
    }

    /// The same client, which connects once more if its connection breaks, and repeats the request. An `add`,
    /// `compare_set` or `delete` is not repeated, because the server may have carried it out.
    ///
    /// For a store that lasts as long as its address: if another one takes its place there, the client goes on with that one.
    #[must_use]
    pub fn reconnecting(mut self) -> Self {
        self.reconnects = true;
        self
    }

    /// Host and port of the server.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// The address of this end: the one of this machine's addresses that the server's machine can reach.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.lock().as_ref().ok()?.stream.tcp().local_addr().ok()
    }

    /// One attempt, over all addresses of the name.
    pub(super) fn attempt(
        server: &str,
        token: &Token,
        tls: bool,
        left: Duration,
    ) -> Result<Self, StoreError> {
        let channel = open(server, token, tls, left)?;
        Ok(Self {
            server: server.to_owned(),
            token: token.clone(),
            tls,
            reconnects: false,
            answer_timeout: ANSWER_TIMEOUT,
            channel: Mutex::new(Ok(channel)),
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Result<Channel, StoreError>> {
        self.channel.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a request answered. `read` takes the expected kind of reply and leaves the others.
    fn call<T>(
        &self,
        request: &Request<'_>,
        read: impl FnOnce(Reply) -> Option<T>,
    ) -> Result<T, StoreError> {
        request.check_bounds()?;
        let mut latch = self.lock();
        let channel = latch.as_mut().map_err(|first| first.clone())?;
        let started = Instant::now();
        let deadline = deadline_after(request.timeout().saturating_add(self.answer_timeout));
        let mut sent = channel.exchange(request, deadline);
        if let Err(error) = &sent
            && self.reconnects
            && is_broken(error)
            && let Some(again) = request.repeated(started.elapsed())
            && let Ok(fresh) = self.open_again(deadline)
        {
            *channel = fresh;
            sent = channel.exchange(&again, deadline);
        }
        let outcome = sent.and_then(|()| {
            read_reply(channel.body(), |reply| {
                match accept(request, reply, &self.server, started.elapsed()) {
                    Ok(reply) => read(reply).map(Ok),
                    Err(error) => Some(Err(error)),
                }
            })
        });
        channel.tidy();
        outcome.unwrap_or_else(|failure| {
            let error = self.failed(request, started.elapsed(), &failure);
            *latch = Err(error.clone());
            Err(error)
        })
    }

    fn open_again(&self, deadline: Instant) -> Result<Channel, StoreError> {
        let left = deadline.saturating_duration_since(Instant::now());
        open(&self.server, &self.token, self.tls, left)
    }

    fn failed(&self, request: &Request<'_>, waited: Duration, error: &io::Error) -> StoreError {
        let (operation, key) = (request.name(), request.first_key().to_owned());
        let server = self.server.clone();
        match error.kind() {
            io::ErrorKind::TimedOut => StoreError::NoAnswer {
                operation,
                key,
                server,
                waited,
            },
            _ => StoreError::Lost {
                operation,
                key,
                server,
                waited,
                reason: error.to_string(),
            },
        }
    }
}

/// Takes the expected kind of reply, and leaves the others.
macro_rules! expect {
    ($reply:pat => $result:expr) => {
        |reply| match reply {
            $reply => Some($result),
            _ => None,
        }
    };
}

impl Client {
    /// Whether all keys exist now.
    pub fn check(&self, keys: &[&str]) -> Result<bool, StoreError> {
        let keys = keys.to_vec();
        self.call(&Request::Check { keys }, expect!(Reply::Flag(flag) => flag))
    }

    /// How many keys there are in a folder: those that are its name, a slash, and a name without one.
    ///
    /// *Cost*: the same for any number of keys.
    pub fn count(&self, folder: &str) -> Result<usize, StoreError> {
        let number = self.call(
            &Request::Count { folder },
            expect!(Reply::Number(number) => number),
        )?;
        Ok(usize::try_from(number).unwrap_or(0))
    }

    /// Sets several keys at one moment, or none of them.
    pub fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<(), StoreError> {
        for (key, value) in entries {
            check_value(key, value.len())?;
        }
        let entries = entries.to_vec();
        self.call(&Request::MultiSet { entries }, expect!(Reply::Done => ()))
    }
}

impl Store for Client {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        check_value(key, value.len())?;
        self.call(&Request::Set { key, value }, expect!(Reply::Done => ()))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        let timeout_ms = whole_milliseconds(timeout);
        self.call(
            &Request::Get { timeout_ms, key },
            expect!(Reply::Value(value) => Arc::unwrap_or_clone(value)),
        )
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), StoreError> {
        let request = Request::Wait {
            timeout_ms: whole_milliseconds(timeout),
            keys: keys.to_vec(),
        };
        self.call(&request, expect!(Reply::Done => ()))
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        self.call(
            &Request::Add { key, amount },
            expect!(Reply::Number(number) => number),
        )
    }

    fn compare_set(&self, key: &str, expected: &[u8], new: &[u8]) -> Result<Vec<u8>, StoreError> {
        check_value(key, expected.len())?;
        check_value(key, new.len())?;
        self.call(
            &Request::CompareSet { key, expected, new },
            expect!(Reply::Value(value) => Arc::unwrap_or_clone(value)),
        )
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        self.call(&Request::Delete { key }, expect!(Reply::Flag(flag) => flag))
    }

    fn list(&self, prefix: &str, most: usize) -> Result<KeyList, StoreError> {
        let most = u32::try_from(most).unwrap_or(u32::MAX);
        let request = Request::List { most, prefix };
        self.call(
            &request,
            expect!(Reply::Keys { keys, more } => KeyList { keys, more }),
        )
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>, StoreError> {
        let request = Request::MultiGet {
            timeout_ms: whole_milliseconds(timeout),
            keys: keys.to_vec(),
        };
        self.call(&request, |reply| match reply {
            Reply::Values(values) if values.len() == keys.len() => {
                Some(values.into_iter().map(Arc::unwrap_or_clone).collect())
            }
            _ => None,
        })
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("server", &self.server)
            .finish_non_exhaustive()
    }
}

/// One attempt to connect.
fn open(server: &str, token: &Token, tls: bool, left: Duration) -> Result<Channel, StoreError> {
    let stream = dial::attempt(server, token, tls, left)?;
    Channel::new(stream).map_err(|error| StoreError::Connect {
        server: server.to_owned(),
        waited: Duration::ZERO,
        attempts: 1,
        reason: format!("the connection cannot be set up: {error}"),
    })
}

/// Whether the connection ended, and nothing worse: a server that is silent or sends nonsense would do so again.
fn is_broken(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::NotConnected
    )
}

fn read_reply<T>(body: &[u8], read: impl FnOnce(Reply) -> Option<T>) -> io::Result<T> {
    let reply =
        Reply::decode(body).map_err(|error| io::Error::other(format!("it sent {error}")))?;
    read(reply).ok_or_else(|| io::Error::other("it answered another question"))
}

#[cfg(test)]
mod tests {
    use std::net::{Shutdown, TcpStream};

    use super::*;
    use crate::store::{Server, ServerOptions};

    const SOON: Duration = Duration::from_secs(30);

    /// A store, and two clients of it.
    fn pair(tls: bool) -> (Server, Client, Client) {
        let token = Token::generate().unwrap();
        let options = ServerOptions {
            tls,
            ..ServerOptions::default()
        };
        let server = Server::bind_with("127.0.0.1:0".parse().unwrap(), &token, options).unwrap();
        let address = server.addr().to_string();
        let client = || Client::connect_as(&address, &token, tls, SOON).unwrap();
        let (one, other) = (client(), client());
        (server, one.reconnecting(), other)
    }

    fn connection(client: &Client) -> TcpStream {
        let latch = client.lock();
        let channel = latch.as_ref().unwrap_or_else(|error| panic!("{error}"));
        channel.stream.tcp().try_clone().unwrap()
    }

    fn cut(client: &Client) {
        connection(client).shutdown(Shutdown::Both).unwrap();
    }

    #[test]
    fn a_client_that_reconnects_does_not_notice_a_broken_connection() {
        for tls in [false, true] {
            let (_server, client, other) = pair(tls);
            for value in [b"a", b"b"] {
                cut(&client);
                client.set("key", value).unwrap();
                assert_eq!(other.get("key", Duration::ZERO).unwrap(), value);
                cut(&client);
                assert!(client.check(&["key"]).unwrap());
            }
            // Most likely in the middle of a wait.
            let waits = connection(&client);
            std::thread::scope(|scope| {
                let value = scope.spawn(|| client.get("late", SOON).unwrap());
                while client.channel.try_lock().is_ok() {
                    std::thread::yield_now();
                }
                std::thread::sleep(Duration::from_millis(10));
                waits.shutdown(Shutdown::Both).unwrap();
                other.set("late", b"c").unwrap();
                assert_eq!(value.join().unwrap(), b"c");
            });
            let missing = client.get("never", Duration::ZERO).unwrap_err();
            assert!(matches!(missing, StoreError::TimedOut { .. }), "{missing}");
        }
    }

    #[test]
    fn what_the_server_may_have_carried_out_is_not_repeated() {
        let (_server, client, other) = pair(false);
        cut(&client);
        let error = client.add("count", 1).unwrap_err();
        assert!(matches!(error, StoreError::Lost { .. }), "{error}");
        assert_eq!(other.add("count", 1).unwrap(), 1);
        // The first failure stays.
        let again = client.set("key", b"").unwrap_err();
        assert_eq!(again.to_string(), error.to_string());
    }

    #[test]
    fn a_client_without_a_server_fails_at_once_with_what_it_lost() {
        let (server, client, other) = pair(false);
        drop(server);
        for client in [client, other] {
            let error = client.get("key", SOON).unwrap_err();
            assert!(matches!(error, StoreError::Lost { .. }), "{error}");
        }
    }
}
