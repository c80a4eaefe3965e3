//! Between an agent and a store: threads that dial, write and watch, so that the agent itself never waits for a network.
//!
//! Keys, under `paceline/agents/<run id>/` (in etcd: `/paceline/<run id>/`): `record`, `agent/<id>`, `joined` (how many have come), `events` (how many times
//! an agent had news) and `event/<n>`, for which watchers wait.

use std::collections::VecDeque;
use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_rendezvous::auth::AuthError;
use paceline_rendezvous::nodes::NODES_MAX;
use paceline_rendezvous::store::{Client, Etcd, EtcdError, Store, StoreError};
use paceline_rendezvous::token::{TOKEN_VARIABLE, Token};
use rustix::event::EventfdFlags;

use super::messages::{Answer, Found, Input};
use super::record::{AgentId, Page, Record, State};

/// The value before the first record: compare-and-set needs one to begin with.
const NO_RECORD: &[u8] = b"-";
/// Requests on their way to one store.
const REQUESTS_MAX: usize = 256;
/// Inputs that the agent has not taken yet; beyond it the oldest look goes.
const INPUTS_MAX: usize = 1024;
/// Events whose keys are kept for watchers that are behind; one further behind looks once a beat anyway.
const EVENTS_KEPT: i64 = 64;

/// Where the threads put what they find. Its descriptor is readable while something is in it.
#[derive(Debug)]
pub(crate) struct Mailbox {
    inputs: Mutex<VecDeque<Input>>,
    bell: OwnedFd,
}

impl Mailbox {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            inputs: Mutex::default(),
            bell: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    fn push(&self, input: Input) {
        let mut inputs = self.inputs.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(input, Input::Look { .. }) || inputs.len() >= INPUTS_MAX {
            // A newer look replaces an older one.
            inputs.retain(|input| !matches!(input, Input::Look { .. }));
        }
        if inputs.len() < INPUTS_MAX {
            inputs.push_back(input);
        }
        drop(inputs);
        // Fails only when the counter is full, and then the bell rings.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    pub(crate) fn take(&self) -> VecDeque<Input> {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.bell, &mut count);
        std::mem::take(&mut *self.inputs.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

/// Shared by all connections of one agent.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    pub(crate) stores: Stores,
    pub(crate) me: AgentId,
    /// Time between two looks, and between two signs of life.
    pub(crate) beat: Duration,
    /// The start of the agent's time.
    pub(crate) clock: Instant,
    pub(crate) mailbox: Arc<Mailbox>,
}

/// How to speak with a store that is known by its name.
#[derive(Debug, Clone)]
pub(crate) enum Stores {
    /// An agent hosts it; the name is `host:port`.
    Hosted {
        token: Token,
        /// Whether it and its clients speak TLS.
        tls: bool,
        run_id: String,
    },
    /// It is etcd, under any name.
    Etcd(Etcd),
}

impl Stores {
    fn connect(&self, store: &str, limit: Duration) -> Result<Box<dyn Store>, StoreError> {
        match self {
            Self::Hosted { token, tls, .. } => {
                // A connection and both proofs of the token take three answers. Where nobody listens, the agent has to know while its ranks still
                // run: it could not tell that from a partition later.
                let refused = limit * 4 / 5;
                let client = Client::connect_patiently(store, token, *tls, refused, 2 * limit)?;
                Ok(Box::new(client.with_answer_timeout(limit)))
            }
            Self::Etcd(etcd) => Ok(Box::new(etcd.connect(limit)?)),
        }
    }

    /// The whole name of a key. A store in etcd has the job's keys only.
    fn key(&self, name: &str) -> String {
        match self {
            Self::Hosted { run_id, .. } => format!("paceline/agents/{run_id}/{name}"),
            Self::Etcd(_) => name.to_owned(),
        }
    }

    /// Whether a store answers there and has agents of the job.
    pub(crate) fn has_agents(&self, store: &str, limit: Duration) -> bool {
        let listed = || {
            let store = self.connect(store, limit)?;
            store.list(&self.key("agent/"), 1)
        };
        is_listening(store, limit).unwrap_or(false)
            && listed().is_ok_and(|listed| !listed.keys.is_empty())
    }
}

/// Something for the store.
#[derive(Debug)]
pub(crate) enum Request {
    Page {
        page: Box<Page>,
        urgent: bool,
    },
    Publish {
        expected: Option<Box<Record>>,
        new: Box<Record>,
    },
    Forget(AgentId),
    /// The agent has said that it leaves; these give no sign of life any more.
    Close(Vec<AgentId>),
}

/// What a connection's thread does with its store; false if the store was lost.
type Work = Box<dyn FnOnce(&Line, &str) -> bool + Send>;

/// One store that the agent has entered: a thread that writes and one that watches, each with its own connection.
#[derive(Debug)]
pub(crate) struct Connection {
    store: String,
    requests: Option<SyncSender<Request>>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    mailbox: Arc<Mailbox>,
}

impl Connection {
    /// Enters a store. Results go into the mailbox.
    pub(crate) fn open(line: &Line, store: &str) -> io::Result<Self> {
        let (requests, receiver) = sync_channel(REQUESTS_MAX);
        let stop = Arc::new(AtomicBool::new(false));
        let spawn = |name: &str, run: Work| {
            let (line, store) = (line.clone(), store.to_owned());
            let thread = std::thread::Builder::new().name(name.into());
            thread.spawn(move || {
                if !run(&line, &store) {
                    line.mailbox.push(Input::Broken { store });
                }
            })
        };
        let is_over = Arc::clone(&stop);
        let threads = vec![
            spawn(
                "agent/write",
                Box::new(move |line, store| line.write(store, &receiver).is_ok()),
            )?,
            spawn(
                "agent/watch",
                Box::new(move |line, store| {
                    line.watch(store, &is_over).is_ok() || is_over.load(Ordering::Relaxed)
                }),
            )?,
        ];
        Ok(Self {
            store: store.to_owned(),
            requests: Some(requests),
            stop,
            threads,
            mailbox: Arc::clone(&line.mailbox),
        })
    }

    /// Hands over a request without waiting. A store that takes no more requests counts as lost.
    pub(crate) fn send(&self, request: Request) {
        let sent = self.requests.as_ref().map(|to| to.try_send(request));
        if let Some(Err(TrySendError::Full(_))) = sent {
            self.mailbox.push(Input::Broken {
                store: self.store.clone(),
            });
        }
    }

    /// Lets both threads finish the requests that they have and end; returns them to be joined later.
    pub(crate) fn close(&mut self) -> Vec<JoinHandle<()>> {
        self.stop.store(true, Ordering::Relaxed);
        self.requests = None;
        std::mem::take(&mut self.threads)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl Line {
    fn connect(&self, store: &str) -> Result<Box<dyn Store>, StoreError> {
        self.stores.connect(store, self.limit())
    }

    fn key(&self, name: &str) -> String {
        self.stores.key(name)
    }

    fn page_key(&self, id: AgentId) -> String {
        self.key(&format!("agent/{id}"))
    }

    fn event_key(&self, event: i64) -> String {
        self.key(&format!("event/{event}"))
    }

    /// Wakes all watchers.
    fn ring(&self, store: &dyn Store) -> Result<(), StoreError> {
        let event = store.add(&self.key("events"), 1)?;
        store.set(&self.event_key(event), b"")?;
        if event > EVENTS_KEPT {
            store.delete(&self.event_key(event - EVENTS_KEPT))?;
        }
        Ok(())
    }

    /// How long the store has for an answer: with the beat before it, less than the time after which an agent ends its ranks.
    fn limit(&self) -> Duration {
        self.beat * 5 / 2
    }

    fn write(&self, store: &str, requests: &Receiver<Request>) -> Result<(), StoreError> {
        let name = store.to_owned();
        let store = self.connect(&name)?;
        store.compare_set(&self.key("record"), b"", NO_RECORD)?;
        let joined = store.add(&self.key("joined"), 1)?;
        self.mailbox.push(Input::Attached {
            store: name.clone(),
            joined,
        });
        let mut last: Option<Box<Page>> = None;
        // Counted here, so that signs of life go out even while the agent is busy ending its ranks.
        let mut beat = 0;
        loop {
            let request = match requests.recv_timeout(self.beat) {
                Ok(request) => request,
                Err(RecvTimeoutError::Timeout) => match last.take() {
                    Some(page) => Request::Page {
                        page,
                        urgent: false,
                    },
                    None => continue,
                },
                // The connection is closed, and nothing is left to be sent.
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            };
            match request {
                Request::Page { mut page, urgent } => {
                    let sent = self.clock.elapsed();
                    beat += 1;
                    page.beat = beat;
                    page.sent_us = u64::try_from(sent.as_micros()).ok();
                    store.set(&self.page_key(page.id), &encode(&page))?;
                    if urgent {
                        self.ring(&*store)?;
                    }
                    last = Some(page);
                    let store = name.clone();
                    self.mailbox.push(Input::Beaten { store, sent });
                }
                Request::Publish { expected, new } => {
                    let expected = expected.map_or(NO_RECORD.to_vec(), |record| encode(&record));
                    let now = store.compare_set(&self.key("record"), &expected, &encode(&new))?;
                    self.ring(&*store)?;
                    let store = name.clone();
                    self.mailbox.push(match decode_record(&now) {
                        Some(record) => Input::Published { store, record },
                        // The keys were removed, so all knowledge of this store is old.
                        None => Input::Broken { store },
                    });
                }
                Request::Forget(id) => {
                    store.delete(&self.page_key(id))?;
                }
                Request::Close(silent) => self.end_job(&*store, &silent)?,
            }
        }
    }

    /// Removes the job's keys from a store that outlives it, if no agent is left that could need them.
    fn end_job(&self, store: &dyn Store, silent: &[AgentId]) -> Result<(), StoreError> {
        let Stores::Etcd(etcd) = &self.stores else {
            return Ok(());
        };
        let keys = store.list(&self.key("agent/"), 4 * NODES_MAX)?.keys;
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let pages = store.multi_get(&keys, Duration::ZERO)?;
        let is_over = |page: &Vec<u8>| {
            let page: Option<Page> = serde_json::from_slice(page).ok();
            page.is_some_and(|page| {
                matches!(page.state, State::Left(_)) || silent.contains(&page.id)
            })
        };
        if pages.iter().all(is_over) {
            etcd.connect(self.limit())?.end_job()?;
        }
        Ok(())
    }

    /// Looks at once, then whenever an agent has news, and once a beat.
    fn watch(&self, name: &str, stop: &AtomicBool) -> Result<(), StoreError> {
        let store = self.connect(name)?;
        store.compare_set(&self.key("record"), b"", NO_RECORD)?;
        let mut has_record = false;
        while !stop.load(Ordering::Relaxed) {
            let events = store.add(&self.key("events"), 0)?;
            let mut keys = store.list(&self.key("agent/"), 4 * NODES_MAX)?.keys;
            keys.push(self.key("record"));
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            match store.multi_get(&keys, Duration::ZERO) {
                Ok(mut values) => {
                    let at = self.clock.elapsed();
                    let record = values.pop().and_then(|value| decode_record(&value));
                    if has_record && record.is_none() {
                        // The keys were removed, so all knowledge of this store is old.
                        let store = name.to_owned();
                        self.mailbox.push(Input::Broken { store });
                        return Ok(());
                    }
                    has_record |= record.is_some();
                    let pages: Vec<Page> = values
                        .iter()
                        .filter_map(|value| serde_json::from_slice(value).ok())
                        .collect();
                    // An agent whose own page is not there yet has not come yet.
                    if pages.iter().any(|page| page.id == self.me) {
                        self.mailbox.push(Input::Look {
                            store: name.to_owned(),
                            at,
                            record,
                            pages,
                        });
                    }
                }
                // A page was removed between the two requests, or all keys were.
                Err(StoreError::TimedOut { .. }) => {
                    store.compare_set(&self.key("record"), b"", NO_RECORD)?;
                    continue;
                }
                Err(error) => return Err(error),
            }
            match store.wait(&[&self.event_key(events + 1)], self.beat) {
                Ok(()) | Err(StoreError::TimedOut { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Asks each of these stores how far the job has come there.
    pub(crate) fn scan(self, stores: Vec<String>) {
        let found = stores.into_iter().map(|store| Found {
            answer: self.ask(&store),
            store,
        });
        let found = found.collect();
        self.mailbox.push(Input::Found(found));
    }

    /// Leaves a page in a store, if there is one.
    pub(crate) fn tell(&self, store: &str, page: &Page) {
        if !is_listening(store, self.beat).unwrap_or(false) {
            return;
        }
        let told = self.connect(store).and_then(|store| {
            store.compare_set(&self.key("record"), b"", NO_RECORD)?;
            store.set(&self.page_key(page.id), &encode(page))?;
            self.ring(&*store)
        });
        // Without an answer it is told again after a lease.
        let _ = told;
    }

    fn ask(&self, store: &str) -> Answer {
        // That a member of etcd is gone says nothing about the job's store.
        let is_hosted = matches!(self.stores, Stores::Hosted { .. });
        match is_hosted.then(|| is_listening(store, self.beat)) {
            None | Some(Ok(true)) => {}
            Some(Ok(false)) => return Answer::Refused,
            Some(Err(error)) => {
                let host = store.rsplit_once(':').map_or(store, |(host, _)| host);
                let error = error.to_string();
                // The standard library puts its own words before the system's.
                let reason = error.rsplit(": ").next().unwrap_or_default();
                return Answer::Unresolved(format!("cannot resolve {host}: {reason}"));
            }
        }
        let asked = self
            .connect(store)
            .and_then(|store| store.get(&self.key("record"), Duration::ZERO));
        match asked {
            Ok(record) => Answer::Store(decode_record(&record).map(Box::new)),
            Err(StoreError::TimedOut { .. }) => Answer::Store(None),
            Err(error) => match &error {
                StoreError::Auth {
                    source: AuthError::Refused | AuthError::WrongProof,
                    ..
                } => Answer::WrongToken(format!(
                    "the launcher at {store} refuses this node: {TOKEN_VARIABLE} differs"
                )),
                StoreError::Auth { source, .. } if source.is_final() => {
                    let hint = source.hint().map(|hint| format!("; {hint}"));
                    Answer::Stranger(format!("{error}{}", hint.unwrap_or_default()))
                }
                StoreError::Etcd { server, source, .. } => {
                    let is_heard = !matches!(
                        source,
                        EtcdError::Unreachable { .. }
                            | EtcdError::NoAnswer
                            | EtcdError::Lost { .. }
                    );
                    let mut text = format!("etcd at {server} {source}");
                    if let Some(hint) = source.hint().filter(|_| is_heard) {
                        text = format!("{text}; {hint}");
                    }
                    match source {
                        EtcdError::Unproven => Answer::WrongToken(text),
                        _ => Answer::Silent(text),
                    }
                }
                // Without the time that it took, so that equal answers are equal texts.
                StoreError::Connect { server, reason, .. } => {
                    Answer::Silent(format!("{server}: {reason}"))
                }
                _ => Answer::Silent(error.to_string()),
            },
        }
    }
}

/// Whether a program may listen there: only a refusal from all addresses says no.
///
/// *Errors*: the host's name cannot be resolved.
fn is_listening(store: &str, limit: Duration) -> io::Result<bool> {
    let mut addrs = store.to_socket_addrs()?.peekable();
    let deadline = Instant::now() + limit;
    let is_refused = |addr| {
        let left = deadline.saturating_duration_since(Instant::now());
        let outcome = TcpStream::connect_timeout(&addr, left.max(Duration::from_millis(1)));
        matches!(outcome, Err(error) if error.kind() == io::ErrorKind::ConnectionRefused)
    };
    Ok(addrs.peek().is_none() || !addrs.all(is_refused))
}

/// Texts, numbers and lists of them: there is nothing in them that JSON does not take.
fn encode(value: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}

fn decode_record(value: &[u8]) -> Option<Record> {
    serde_json::from_slice(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpListener};

    use paceline_rendezvous::store::Server;

    #[test]
    fn only_a_refusal_says_that_nobody_listens() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let limit = Duration::from_secs(5);
        assert!(is_listening(&addr, limit).unwrap());
        drop(listener);
        assert!(!is_listening(&addr, limit).unwrap());
        // `.invalid` is reserved for names that do not exist.
        assert!(is_listening("node.invalid:1", limit).is_err());
    }

    /// Passes on what comes from `from`, each time after `delay`.
    fn pass_on_late(mut from: TcpStream, mut to: TcpStream, delay: Duration) {
        let mut bytes = [0; 4096];
        while let Ok(n @ 1..) = from.read(&mut bytes) {
            std::thread::sleep(delay);
            if to.write_all(&bytes[..n]).is_err() {
                return;
            }
        }
    }

    /// Where each answer takes twice `delay`.
    fn far_from(server: SocketAddr, delay: Duration) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        // Ends with the test's process; connections end with their two ends.
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let far = TcpStream::connect(server).unwrap();
                let (to, back) = (far.try_clone().unwrap(), near.try_clone().unwrap());
                std::thread::spawn(move || pass_on_late(near, to, delay));
                std::thread::spawn(move || pass_on_late(far, back, delay));
            }
        });
        addr
    }

    #[test]
    fn a_store_is_entered_whose_answers_take_longer_than_a_beat() {
        let token = Token::generate().unwrap();
        let server = Server::bind("127.0.0.1:0".parse().unwrap(), &token).unwrap();
        let beat = Duration::from_millis(200);
        let store = far_from(server.addr(), beat * 3 / 5).to_string();
        let line = Line {
            stores: Stores::Hosted {
                token,
                tls: false,
                run_id: "far".into(),
            },
            me: AgentId(1),
            beat,
            clock: Instant::now(),
            mailbox: Arc::new(Mailbox::new().unwrap()),
        };
        // On a busy machine some attempts are too late.
        let started = Instant::now();
        while !matches!(line.ask(&store), Answer::Store(None)) {
            assert!(started.elapsed() < Duration::from_secs(60));
        }
    }

    #[test]
    fn of_looks_only_the_newest_is_kept() {
        let mailbox = Mailbox::new().unwrap();
        let look = |joined| Input::Look {
            store: format!("{joined}"),
            at: Duration::ZERO,
            record: None,
            pages: Vec::new(),
        };
        for input in [look(1), Input::Tick, look(2), look(3)] {
            mailbox.push(input);
        }
        let taken = mailbox.take();
        assert_eq!(taken.len(), 2);
        assert!(matches!(&taken[1], Input::Look { store, .. } if store == "3"));
        assert!(mailbox.take().is_empty());
    }
}
