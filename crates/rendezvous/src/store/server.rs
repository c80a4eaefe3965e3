//! The store's server as its owner sees it: start, bounds, end. What its thread does is in `serve.rs`.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::StoreError;
use super::serve::Loop;
use crate::os::{self, Interest, Poller, WAKER_KEY};
use crate::token::Token;

/// The poller's key of the listening socket; connections count up from 0.
pub(super) const LISTENER_KEY: u64 = WAKER_KEY - 1;

/// Descriptors that connections leave to the rest of the process, where it has that many.
const DESCRIPTORS_LEFT: usize = 256;

/// Bounds of a [`Server`].
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Connections at the same time. Default 65536; never so many that the process would run out of descriptors.
    pub connections_max: usize,
    /// Of these, connections that have not proven the token yet; the oldest goes when one more comes. Default 16384, at
    /// most half of all: the other half is for those that have.
    pub unauthenticated_max: usize,
    /// Bytes of keys, values, waiting clients and half-received messages together. Default 1 GiB.
    pub bytes_max: usize,
    /// Whether all connections use TLS. Default no. A client with the other setting is told so and dropped.
    pub tls: bool,
    /// Time to prove the token, with TLS that to agree on keys included. Default 2 s.
    pub join_timeout: Duration,
    /// Time to finish a message once begun, in either direction. Default 30 s.
    pub stall_timeout: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            connections_max: 1 << 16,
            unauthenticated_max: 1 << 14,
            bytes_max: 1 << 30,
            tls: false,
            join_timeout: Duration::from_secs(2),
            stall_timeout: Duration::from_secs(30),
        }
    }
}

impl ServerOptions {
    /// The same bounds within a limit of open descriptors, of which the process needs some itself.
    fn within(mut self, descriptors_max: usize) -> Self {
        let connections_max = descriptors_max - (descriptors_max / 4).min(DESCRIPTORS_LEFT);
        self.connections_max = self.connections_max.min(connections_max).max(1);
        self.unauthenticated_max = self
            .unauthenticated_max
            .min(self.connections_max / 2)
            .max(1);
        self
    }
}

/// Serves a store until it is dropped; dropping closes all connections and joins the thread.
///
/// ```
/// use std::time::Duration;
/// use paceline_rendezvous::store::{Client, Server, Store};
/// use paceline_rendezvous::token::Token;
///
/// let token = Token::generate()?;
/// let server = Server::bind("127.0.0.1:0".parse()?, &token)?;
/// let client = Client::connect(&server.addr().to_string(), &token, Duration::from_secs(5))?;
/// client.set("greeting", b"hello")?;
/// assert_eq!(client.get("greeting", Duration::from_secs(1))?, b"hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Server {
    addr: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// State shared by the server's owner and its thread.
pub(super) struct Shared {
    pub(super) poller: Poller,
    pub(super) stop: AtomicBool,
    pub(super) refused: AtomicU64,
    pub(super) requests: AtomicU64,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("refused", &self.refused)
            .finish_non_exhaustive()
    }
}

impl Server {
    /// Listens at `addr` (port 0: any free port) and serves, with the default bounds.
    pub fn bind(addr: SocketAddr, token: &Token) -> Result<Self, StoreError> {
        Self::bind_with(addr, token, ServerOptions::default())
    }

    /// [`Server::bind`] with other bounds.
    pub fn bind_with(
        addr: SocketAddr,
        token: &Token,
        options: ServerOptions,
    ) -> Result<Self, StoreError> {
        Self::start(addr, token, options).map_err(|source| StoreError::Bind {
            addr,
            source: Arc::new(source),
        })
    }

    /// The address it listens at.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Connections dropped so far because they did not prove the token in time, sent an invalid message, stalled or
    /// went over a bound.
    pub fn refused(&self) -> u64 {
        self.shared.refused.load(Ordering::Relaxed)
    }

    /// Requests of clients so far.
    pub fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::Relaxed)
    }

    fn start(addr: SocketAddr, token: &Token, options: ServerOptions) -> io::Result<Self> {
        let options = options.within(os::descriptors_max());
        let listener = os::listen(addr, options.connections_max)?;
        let addr = listener.local_addr()?;
        let poller = Poller::new()?;
        poller.add(&listener, LISTENER_KEY, Interest::Read)?;
        let shared = Arc::new(Shared {
            poller,
            stop: AtomicBool::new(false),
            refused: AtomicU64::new(0),
            requests: AtomicU64::new(0),
        });
        let mut turn = Loop::new(listener, shared.clone(), token.clone(), options);
        let thread = thread::Builder::new()
            .name("store/server".into())
            .spawn(move || turn.run())?;
        Ok(Self {
            addr,
            shared,
            thread: Some(thread),
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.poller.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            crate::notice!(ERROR, "the thread of the store at {} panicked", self.addr);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_descriptors_to_the_process_and_places_to_authenticated_clients() {
        for (descriptors, asked, expected) in [
            (usize::MAX, (1 << 16, 1 << 14), (1 << 16, 1 << 14)),
            (20_000, (1 << 16, 1 << 14), (19_744, 9_872)),
            (1024, (1 << 16, 1 << 14), (768, 384)),
            (64, (1 << 16, 8), (48, 8)),
            (20_000, (2, 1 << 14), (2, 1)),
            (0, (10, 10), (1, 1)),
        ] {
            let options = ServerOptions {
                connections_max: asked.0,
                unauthenticated_max: asked.1,
                ..ServerOptions::default()
            };
            let options = options.within(descriptors);
            let got = (options.connections_max, options.unauthenticated_max);
            assert_eq!(got, expected, "{descriptors} {asked:?}");
        }
    }
}
