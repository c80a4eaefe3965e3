//! A client of the store: one connection, one request at a time, a deadline on each.

mod channel;
pub(super) mod dial;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use self::channel::Channel;
use super::api::forward_store;
use super::calls::{Calls, accept};
use super::wire::{Reply, Request};
use super::{KeyList, StoreError};
use crate::net::deadline_after;
use crate::token::Token;

/// How long the server may take for an answer it need not wait for, and for coming back after a wait.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// A connection to the store, used by one thread at a time: a second caller waits for the first one's request.
///
/// What the operations mean is said at [`Store`](super::Store), which this implements.
///
/// *Blocks*: every call ends by its deadline: the timeout given, plus at most 30 s for the server's answer
/// (see [`Client::with_answer_timeout`]).
/// *Errors*: after [`StoreError::NoAnswer`] and [`StoreError::Lost`] the connection is closed and every later call
/// returns that first error; after [`StoreError::TimedOut`] it is as good as before.
pub struct Client {
    server: String,
    answer_timeout: Duration,
    /// The connection, or why there is none any more.
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

    /// The same client with another limit for answers than 30 s, for who must notice quickly that the server is silent.
    #[must_use]
    pub fn with_answer_timeout(mut self, timeout: Duration) -> Self {
        self.answer_timeout = timeout;
        self
    }

    /// Sets a key.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        Calls::set(self, key, value)
    }

    /// The value of a key.
    ///
    /// *Blocks*: until the key exists, at most for `timeout`; with a timeout of zero it looks once.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        Calls::get(self, key, timeout)
    }

    /// Waits until all keys exist.
    ///
    /// *Blocks*: at most for `timeout`; the error names the keys that are missing then.
    pub fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), StoreError> {
        Calls::wait(self, keys, timeout)
    }

    /// Whether all keys exist now.
    pub fn check(&self, keys: &[&str]) -> Result<bool, StoreError> {
        Calls::check(self, keys)
    }

    /// Adds to a number, atomically, and returns the sum. A missing key counts as 0; values are ASCII decimal.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        Calls::add(self, key, amount)
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
        Calls::compare_set(self, key, expected, new)
    }

    /// Removes a key; whether it was there.
    pub fn delete(&self, key: &str) -> Result<bool, StoreError> {
        Calls::delete(self, key)
    }

    /// Puts bytes behind a key's value, atomically, and returns its length then. A missing key counts as empty.
    pub fn append(&self, key: &str, more: &[u8]) -> Result<usize, StoreError> {
        Calls::append(self, key, more)
    }

    /// The first `most` keys that begin with `prefix`, in the order of their bytes.
    pub fn list(&self, prefix: &str, most: usize) -> Result<KeyList, StoreError> {
        Calls::list(self, prefix, most)
    }

    /// The values of several keys at one moment.
    ///
    /// *Blocks*: until all exist, at most for `timeout`.
    pub fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>, StoreError> {
        Calls::multi_get(self, keys, timeout)
    }

    /// Sets several keys at one moment, or none of them.
    pub fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<(), StoreError> {
        Calls::multi_set(self, entries)
    }

    /// Puts a value at the end of a queue and returns how many are in it then.
    pub fn queue_push(&self, queue: &str, value: &[u8]) -> Result<usize, StoreError> {
        Calls::queue_push(self, queue, value)
    }

    /// Takes the first value of a queue.
    ///
    /// *Blocks*: until the queue has one, at most for `timeout`. *Cost*: two round trips, so that a value goes to
    /// exactly one client and none is lost with a client that dies while it waits.
    pub fn queue_pop(&self, queue: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        Calls::queue_pop(self, queue, timeout)
    }

    /// How many values are in a queue now.
    pub fn queue_len(&self, queue: &str) -> Result<usize, StoreError> {
        Calls::queue_len(self, queue)
    }

    /// How many keys begin with `prefix`; all, for an empty one.
    pub fn num_keys(&self, prefix: &str) -> Result<usize, StoreError> {
        Calls::num_keys(self, prefix)
    }

    /// Host and port of the server.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// The address of the server as this machine reached it.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.lock().as_ref().ok()?.stream.tcp().peer_addr().ok()
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
        let stream = dial::attempt(server, token, tls, left)?;
        let channel = Channel::new(stream).map_err(|error| StoreError::Connect {
            server: server.to_owned(),
            waited: Duration::ZERO,
            attempts: 1,
            reason: format!("the connection cannot be set up: {error}"),
        })?;
        Ok(Self {
            server: server.to_owned(),
            answer_timeout: ANSWER_TIMEOUT,
            channel: Mutex::new(Ok(channel)),
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Result<Channel, StoreError>> {
        self.channel.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, request: &Request<'_>, waited: Duration, failure: Failure) -> StoreError {
        let (operation, key) = (request.name(), request.first_key().to_owned());
        let server = self.server.clone();
        match failure {
            Failure::Late => StoreError::NoAnswer {
                operation,
                key,
                server,
                waited,
            },
            Failure::Broken(reason) => StoreError::Lost {
                operation,
                key,
                server,
                waited,
                reason,
            },
        }
    }
}

impl Calls for Client {
    fn call<T>(
        &self,
        request: &Request<'_>,
        read: impl FnOnce(Reply<'_>) -> Option<T>,
    ) -> Result<T, StoreError> {
        request.check_bounds()?;
        let mut latch = self.lock();
        let channel = latch.as_mut().map_err(|first| first.clone())?;
        let started = Instant::now();
        let deadline = deadline_after(request.timeout().saturating_add(self.answer_timeout));
        let outcome = exchange(channel, request, deadline, |reply| {
            match accept(request, reply, &self.server, started.elapsed()) {
                Ok(reply) => read(reply).map(Ok),
                Err(error) => Some(Err(error)),
            }
        });
        let outcome = match (outcome, request) {
            // Shown is not taken yet. The lock is held: no other request may come between.
            (Ok(Ok(item)), Request::QueuePop { .. }) => {
                let deadline = deadline_after(self.answer_timeout);
                exchange(channel, &Request::QueueTake, deadline, |reply| {
                    matches!(reply, Reply::Flag(true)).then_some(Ok(item))
                })
            }
            (outcome, _) => outcome,
        };
        channel.tidy();
        outcome.unwrap_or_else(|failure| {
            let error = self.failed(request, started.elapsed(), failure);
            *latch = Err(error.clone());
            Err(error)
        })
    }
}

forward_store!([] Client, <Client>, this => this);

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("server", &self.server)
            .finish_non_exhaustive()
    }
}

/// Why a connection is of no more use.
enum Failure {
    Late,
    Broken(String),
}

fn exchange<T>(
    channel: &mut Channel,
    request: &Request<'_>,
    deadline: Instant,
    read: impl FnOnce(Reply<'_>) -> Option<T>,
) -> Result<T, Failure> {
    let body = channel
        .exchange(request, deadline)
        .map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => Failure::Late,
            _ => Failure::Broken(error.to_string()),
        })?;
    let reply = Reply::decode(body).map_err(|error| Failure::Broken(format!("it sent {error}")))?;
    read(reply).ok_or_else(|| Failure::Broken("it answered another question".into()))
}
