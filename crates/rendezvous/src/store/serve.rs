//! The store's thread: the order in which clients are served, and when they are dropped.
//!
//! ```text
//!  accept --> Connected --greeting--> Challenged --proof--> Authenticated <-----+
//!     |           \_______________________/                  | request          | answer sent
//!     |                 join_timeout                         v                  |
//!     +-- too many: dropped                      table.apply(request) --answer--+
//!                                                            | key missing      |
//!                                                            +---> Waiting -----+  key appears, or the client's timeout
//! ```
//!
//! All sockets are non-blocking. A client that sends half a message or does not take its answer has `stall_timeout` to
//! go on; one that floods is read 64 KiB and served 64 requests at a time between the others, and not at all while it is
//! being answered. Large values on their way are shared with the table, so a slow reader costs no copy.

mod waiting;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use self::waiting::Waiting;
use super::PURPOSE;
use super::conn::{Conn, State};
use super::server::{LISTENER_KEY, ServerOptions, Shared};
use super::table::{Outcome, Table};
use super::wire::{Reply, Request, WireError};
use crate::auth::{Nonces, Side};
use crate::net::{Wire, deadline_after};
use crate::os::{self, Interest, WAKER_KEY};
use crate::spin::Spin;
use crate::tls::Tls;
use crate::token::{self, Token};

/// Connections accepted before clients have their turn again.
const ACCEPTS_PER_TURN: usize = 64;
/// Messages of one client handled before the others have their turn again.
const MESSAGES_PER_TURN: usize = 64;
/// Bytes of answers gathered before they are written.
const GATHERED_BYTES: usize = 64 << 10;
/// Pause after the system had no descriptor or memory for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why a connection ends.
enum Leave {
    /// The client closed it, or it broke: no fault.
    Gone,
    /// The server closes it.
    Refused(String),
}

type Step<T> = Result<T, Leave>;

/// Everything the thread owns.
pub(super) struct Loop {
    listener: TcpListener,
    shared: Arc<Shared>,
    token: Token,
    options: ServerOptions,
    table: Table,
    /// Boxed: they are taken out and put back for every request.
    conns: HashMap<u64, Box<Conn>>,
    next_key: u64,
    /// Connections by the moment something has to happen.
    timers: BTreeSet<(Instant, u64)>,
    /// Connections that have not proven the token; keys grow, so the first is the oldest.
    unauthenticated: BTreeSet<u64>,
    /// Connections that wait, by key.
    waiting: Waiting,
    /// Connections whose wait is over and that have to be looked at.
    woken: VecDeque<u64>,
    /// Connections that have sent more than one turn's messages.
    again: VecDeque<u64>,
    /// Sum of all connections' `charged`.
    charged: usize,
    listener_paused_until: Option<Instant>,
    spin: Spin,
    scratch: Vec<u8>,
}

impl Loop {
    pub(super) fn new(
        listener: TcpListener,
        shared: Arc<Shared>,
        token: Token,
        options: ServerOptions,
    ) -> Self {
        Self {
            listener,
            shared,
            token,
            table: Table::new(options.bytes_max),
            options,
            conns: HashMap::new(),
            next_key: 0,
            timers: BTreeSet::new(),
            unauthenticated: BTreeSet::new(),
            waiting: Waiting::default(),
            woken: VecDeque::new(),
            again: VecDeque::new(),
            charged: 0,
            listener_paused_until: None,
            spin: Spin::default(),
            scratch: Vec::new(),
        }
    }

    pub(super) fn run(&mut self) {
        let mut ready = Vec::new();
        let mut has_served = false;
        while !self.shared.stop.load(Ordering::Relaxed) {
            let now = Instant::now();
            let next = self
                .timers
                .first()
                .map(|(at, _)| *at)
                .into_iter()
                .chain(self.listener_paused_until)
                .min();
            let timeout = if self.again.is_empty() {
                next.map(|at| at.saturating_duration_since(now))
            } else {
                Some(Duration::ZERO)
            };
            if let Err(error) = self.wait(&mut ready, timeout, has_served) {
                crate::notice!(
                    ERROR,
                    "the store cannot wait for its sockets and stops: {error}"
                );
                return;
            }
            has_served = !ready.is_empty();
            for key in ready.drain(..) {
                match key {
                    WAKER_KEY => {}
                    LISTENER_KEY => self.accept(),
                    key => self.serve(key, true),
                }
                self.serve_woken();
            }
            for _ in 0..self.again.len() {
                if let Some(key) = self.again.pop_front() {
                    self.serve(key, false);
                    self.serve_woken();
                }
            }
            self.expire(Instant::now());
        }
    }

    /// Waits for sockets. A client that was just answered may ask again at once, so this polls for a moment first.
    fn wait(
        &mut self,
        ready: &mut Vec<u64>,
        timeout: Option<Duration>,
        has_served: bool,
    ) -> io::Result<()> {
        let poller = &self.shared.poller;
        if has_served && timeout != Some(Duration::ZERO) {
            let found = self
                .spin
                .look(|| match poller.wait(ready, Some(Duration::ZERO)) {
                    Ok(()) if ready.is_empty() => None,
                    outcome => Some(outcome),
                });
            if let Some(outcome) = found {
                return outcome;
            }
        }
        poller.wait(ready, timeout)
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS_PER_TURN {
            match self.listener.accept() {
                Ok((stream, peer)) => self.welcome(stream, peer),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // A connection that broke before it was accepted.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted
                    ) => {}
                // No descriptor is left: one that has not proven anything makes room for the next.
                Err(error)
                    if is_out_of_descriptors(&error)
                        && let Some(oldest) = self.unauthenticated.first().copied() =>
                {
                    self.close(
                        oldest,
                        Leave::Refused(
                            "it had not proven the token when descriptors ran out".into(),
                        ),
                    );
                }
                Err(error) => {
                    // No descriptor or no memory. The connection stays in the queue: pause, or this loop would spin.
                    crate::notice!(WARN, "the store cannot accept a connection yet: {error}");
                    self.shared.poller.remove(&self.listener);
                    self.listener_paused_until = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    fn welcome(&mut self, stream: TcpStream, peer: SocketAddr) {
        if self.conns.len() >= self.options.connections_max {
            return self.refuse(peer, "all connections are in use");
        }
        if self.unauthenticated.len() >= self.options.unauthenticated_max
            && let Some(oldest) = self.unauthenticated.first().copied()
        {
            self.close(
                oldest,
                Leave::Refused("it had not proven the token when too many others came".into()),
            );
        }
        let key = self.next_key;
        self.next_key += 1;
        let prepare = || -> io::Result<Conn> {
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            os::keep_alive(&stream)?;
            self.shared.poller.add(&stream, key, Interest::Read)?;
            let nonce = token::random().map_err(io::Error::other)?;
            let wire = match self.options.tls {
                false => Wire::Plain(stream),
                true => Wire::Tls(Box::new(Tls::begin(stream, Side::Listener)?)),
            };
            Ok(Conn::new(wire, peer, nonce))
        };
        let mut conn = match prepare() {
            Ok(conn) => conn,
            Err(error) => return self.refuse(peer, &error.to_string()),
        };
        conn.deadline = Some(deadline_after(self.options.join_timeout));
        self.timers.extend(conn.deadline.map(|at| (at, key)));
        self.unauthenticated.insert(key);
        self.conns.insert(key, Box::new(conn));
    }

    /// Lets a client go on as far as it can now.
    fn serve(&mut self, key: u64, is_ready: bool) {
        // Taken out while it is looked at, so that the rest of the loop's state can be borrowed; an unknown key is a
        // client that was closed earlier in this turn.
        let Some(mut conn) = self.conns.remove(&key) else {
            return;
        };
        let completed = conn.completed;
        let step = self.advance(key, &mut conn, is_ready).and_then(|()| {
            let is_same_message = conn.completed == completed;
            self.settle(key, &mut conn, is_same_message)
        });
        self.conns.insert(key, conn);
        if let Err(leave) = step {
            self.close(key, leave);
        }
        self.keep_budget();
    }

    fn advance(&mut self, key: u64, conn: &mut Conn, is_ready: bool) -> Step<()> {
        conn.flush().map_err(|_| Leave::Gone)?;
        if is_ready && conn.interest != Interest::Write {
            // A client that is not listened to has nothing to say; that it became ready means that it went away.
            if conn.interest == Interest::Hangup {
                return Err(Leave::Gone);
            }
            match conn.receive(&mut self.scratch) {
                Ok(true) => {}
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    return Err(Leave::Refused(error.to_string()));
                }
                Ok(false) | Err(_) => return Err(Leave::Gone),
            }
        }
        let mut left = MESSAGES_PER_TURN;
        while !conn.is_sending() && left > 0 {
            let before = left;
            while left > 0
                && conn.outbox.bytes() < GATHERED_BYTES
                && self.next_message(key, conn)?
            {
                left -= 1;
            }
            conn.flush().map_err(|_| Leave::Gone)?;
            if left == before {
                break;
            }
        }
        conn.tidy();
        // After a full turn there may be more complete messages.
        let has_more = left == 0 && !conn.is_sending() && !conn.is_waiting();
        if has_more {
            self.again.push_back(key);
        }
        conn.has_more = has_more;
        Ok(())
    }

    /// Handles one message; `false` when none is complete or the client has to wait.
    fn next_message(&mut self, key: u64, conn: &mut Conn) -> Step<bool> {
        match std::mem::replace(&mut conn.state, State::Authenticated) {
            State::Connected(nonce) => {
                let Some(hello) = conn.take_fixed() else {
                    conn.state = State::Connected(nonce);
                    return Ok(false);
                };
                let (handshake, challenge) = match Nonces::greet(nonce, &hello) {
                    Ok(greeted) => greeted,
                    Err(error) => {
                        if let Some(notice) = error.notice() {
                            conn.outbox.push_bytes(&notice);
                            let _ = conn.flush();
                        }
                        return Err(Leave::Refused(error.to_string()));
                    }
                };
                conn.outbox.push_bytes(&challenge);
                conn.state = State::Challenged(handshake);
            }
            State::Challenged(handshake) => {
                let Some(proof) = conn.take_fixed() else {
                    conn.state = State::Challenged(handshake);
                    return Ok(false);
                };
                let claim = (conn.stream.claim(PURPOSE))
                    .map_err(|error| Leave::Refused(error.to_string()))?;
                let (outcome, verdict) = handshake.judge(&proof, &self.token, &claim);
                conn.outbox.push_bytes(&verdict);
                if let Err(error) = outcome {
                    // 33 bytes fit a fresh socket's buffer, so the peer learns why.
                    let _ = conn.flush();
                    return Err(Leave::Refused(error.to_string()));
                }
                self.unauthenticated.remove(&key);
            }
            State::Authenticated => {
                let body = conn
                    .next_body()
                    .map_err(|error| Leave::Refused(error.to_string()))?;
                let Some(body) = body else { return Ok(false) };
                self.request(key, conn, body)?;
            }
            waiting @ State::Waiting { .. } => {
                conn.state = waiting;
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn request(&mut self, key: u64, conn: &mut Conn, body: std::ops::Range<usize>) -> Step<()> {
        let request = match Request::decode(conn.body(body)) {
            Ok(request) => request,
            Err(WireError::Operation { operation }) => {
                conn.outbox.push_answer(&Reply::Unknown { operation });
                return Ok(());
            }
            Err(error) => return Err(Leave::Refused(error.to_string())),
        };
        self.shared.requests.fetch_add(1, Ordering::Relaxed);
        match self.table.apply(&request) {
            Outcome::Answer(answer) => conn.outbox.push_answer(&answer),
            Outcome::Appeared(answer) => {
                self.appeared(&request);
                conn.outbox.push_answer(&answer);
            }
            Outcome::Wait {
                missing,
                timeout_ms,
            } => {
                let state = self.waiting.enter(key, &request, missing);
                conn.state = state;
                let deadline = deadline_after(Duration::from_millis(timeout_ms));
                self.set_deadline(key, conn, Some(deadline));
            }
        }
        Ok(())
    }

    fn serve_woken(&mut self) {
        while let Some(key) = self.woken.pop_front() {
            self.serve(key, false);
        }
    }

    /// Brings deadline, interest and budget in line with what the client is doing now. Progress inside one message does
    /// not move its deadline, or a trickle would never end.
    fn settle(&mut self, key: u64, conn: &mut Conn, is_same_message: bool) -> Step<()> {
        if !conn.is_waiting() && !conn.is_unauthenticated() {
            let begun = conn.deadline.filter(|_| is_same_message);
            let deadline = conn
                .is_busy()
                .then(|| begun.unwrap_or_else(|| deadline_after(self.options.stall_timeout)));
            self.set_deadline(key, conn, deadline);
        }
        let wanted = conn.wanted();
        if wanted != conn.interest {
            self.shared
                .poller
                .modify(conn.stream.tcp(), key, wanted)
                .map_err(|_| Leave::Gone)?;
            conn.interest = wanted;
        }
        let held = conn.held_bytes();
        self.charged = self.charged - conn.charged + held;
        conn.charged = held;
        Ok(())
    }

    /// Over its bound the server drops the client that holds most, not the one that came last: a hog displaces no other.
    fn keep_budget(&mut self) {
        if self.charged + self.table.bytes() > self.options.bytes_max {
            self.table.sweep();
        }
        while self.charged + self.table.bytes() > self.options.bytes_max {
            let largest = self
                .conns
                .iter()
                .max_by_key(|(key, conn)| (conn.charged, **key));
            let Some(key) = largest
                .filter(|(_, conn)| conn.charged > 0)
                .map(|(key, _)| *key)
            else {
                return;
            };
            let bytes_max = self.options.bytes_max;
            self.close(
                key,
                Leave::Refused(format!("the store would hold more than {bytes_max} bytes")),
            );
        }
    }

    fn set_deadline(&mut self, key: u64, conn: &mut Conn, deadline: Option<Instant>) {
        if let Some(at) = std::mem::replace(&mut conn.deadline, deadline) {
            self.timers.remove(&(at, key));
        }
        self.timers.extend(deadline.map(|at| (at, key)));
    }

    /// Does what is due at `now`.
    fn expire(&mut self, now: Instant) {
        if self.listener_paused_until.is_some_and(|until| until <= now) {
            self.listener_paused_until =
                match self
                    .shared
                    .poller
                    .add(&self.listener, LISTENER_KEY, Interest::Read)
                {
                    Ok(()) => None,
                    Err(_) => Some(now + ACCEPT_PAUSE),
                };
        }
        while let Some((at, key)) = self.timers.first().copied()
            && at <= now
        {
            self.timers.pop_first();
            let Some(conn) = self.conns.get_mut(&key) else {
                continue;
            };
            conn.deadline = None;
            if conn.is_waiting() {
                let state = std::mem::replace(&mut conn.state, State::Authenticated);
                let missing = self.waiting.leave(key, state);
                conn.outbox.push_answer(&Reply::TimedOut { missing });
                self.serve(key, false);
                self.serve_woken();
            } else {
                let what = if conn.is_unauthenticated() {
                    "it did not prove the token in time"
                } else {
                    "it stalled"
                };
                self.close(key, Leave::Refused(what.into()));
                self.serve_woken();
            }
        }
    }

    fn close(&mut self, key: u64, leave: Leave) {
        let Some(conn) = self.conns.remove(&key) else {
            return;
        };
        let conn = *conn;
        self.shared.poller.remove(conn.stream.tcp());
        self.unauthenticated.remove(&key);
        if let Some(at) = conn.deadline {
            self.timers.remove(&(at, key));
        }
        self.charged -= conn.charged;
        self.waiting.leave(key, conn.state);
        if let Leave::Refused(reason) = leave {
            self.refuse(conn.peer, &reason);
        }
    }

    /// Counts and warns of the refusals 1, 2, ... 8, 16, 32, ... so that a flood of connections is no flood of lines. The
    /// peer's port changes with every attempt, so without it a peer that comes again makes an equal line, printed once.
    fn refuse(&self, peer: SocketAddr, reason: &str) {
        let refused = self.shared.refused.fetch_add(1, Ordering::Relaxed) + 1;
        if refused <= 8 || refused.is_power_of_two() {
            let host = peer.ip().to_canonical();
            crate::notice!(
                WARN,
                "the job's store refused a connection from {host}: {reason}"
            );
        }
    }
}

fn is_out_of_descriptors(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let errno = error.raw_os_error();
    [Errno::MFILE, Errno::NFILE]
        .iter()
        .any(|full| errno == Some(full.raw_os_error()))
}
