//! A communicator: its join, incoming messages, errors and end.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::io::BufReader;
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock};

use super::hub::Id;
use super::wire::{About, Frame, Member};
use crate::code::Reply;
use crate::device::{Device, corrupt};
use crate::machine::{Effect, Kind, Link, PeerDeath};
use crate::process::{Process, lock};

/// The communicator was aborted, so its work ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Aborted;

/// The parameters of a join.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Join {
    pub(crate) id: Id,
    pub(crate) rank: u32,
    pub(crate) world: u32,
    /// Whether the communicator's functions block.
    pub(crate) is_blocking: bool,
    /// Its fault.
    pub(crate) effect: Option<Effect>,
}

/// One rank's end of a communicator.
#[derive(Debug)]
pub(crate) struct Comm {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) is_blocking: bool,
    pub(crate) device: Arc<Device>,
    state: Mutex<State>,
    /// Signals a change of the state, or a message.
    changed: Condvar,
    /// To the hub, once connected.
    link: OnceLock<Line>,
    roster: OnceLock<Vec<Member>>,
    /// Background jobs, in order.
    jobs: Mutex<Option<Sender<Job>>>,
}

/// The connection to the hub.
#[derive(Debug)]
struct Line {
    writer: Mutex<TcpStream>,
    /// The same, to shut it down while the writer is blocked.
    socket: TcpStream,
}

type Job = Box<dyn FnOnce() + Send>;

#[derive(Debug, Default)]
struct State {
    /// The state that [`Comm::reply`] returns.
    reply: Reply,
    /// The error message.
    words: Option<&'static CStr>,
    is_aborted: bool,
    /// Messages by sender and tag.
    arrived: BTreeMap<(u32, u64), Vec<u8>>,
    /// Queued and running pieces of work.
    pending: usize,
    running: usize,
    /// Numbers of collectives, and of messages to and from each peer.
    collectives: u64,
    sent: BTreeMap<u32, u64>,
    received: BTreeMap<u32, u64>,
}

impl Comm {
    /// Begins to join; [`Self::reply`] is `ncclInProgress` until it is done.
    pub(crate) fn begin(join: Join, device: Arc<Device>) -> Arc<Self> {
        let state = State {
            reply: Reply::IN_PROGRESS,
            ..State::default()
        };
        let Join {
            rank,
            world,
            is_blocking,
            ..
        } = join;
        let comm = Arc::new(Self {
            rank,
            world,
            is_blocking,
            device,
            state: Mutex::new(state),
            changed: Condvar::new(),
            link: OnceLock::new(),
            roster: OnceLock::new(),
            jobs: Mutex::default(),
        });
        let joining = comm.clone();
        comm.thread("", move || joining.join(join));
        comm
    }

    fn thread(&self, what: &str, run: impl FnOnce() + Send + 'static) {
        let name = format!("fake-nccl/rank{}{what}", self.rank);
        // Never joined: it ends with the communicator or never, as NCCL's threads do.
        drop(
            std::thread::Builder::new()
                .name(name)
                .spawn(run)
                .expect("a thread for a communicator"),
        );
    }

    /// Connects, then receives messages.
    fn join(self: &Arc<Self>, join: Join) {
        match join.effect {
            Some(Effect::Hang) => return,
            Some(Effect::Async(code)) => {
                return self.fail(Reply(code), "joining fails as it is told to");
            }
            _ => {}
        }
        let Some(from) = self.meet(join.id) else {
            return;
        };
        self.settle();
        self.take_in(from);
    }

    fn meet(&self, id: Id) -> Option<BufReader<TcpStream>> {
        let refused = |error: &dyn std::fmt::Display| {
            self.fail(Reply::SYSTEM_ERROR, &format!("no hub: {error}"))
        };
        let connected = TcpStream::connect((Ipv4Addr::LOCALHOST, id.port)).and_then(|socket| {
            socket.set_nodelay(true)?;
            Ok((socket.try_clone()?, socket.try_clone()?, socket))
        });
        let (to, from, socket) = connected.map_err(|error| refused(&error)).ok()?;
        let member = Member {
            nonce: id.nonce,
            world: self.world,
            host: host(),
            uuid: self.device.uuid,
            place: self.device.place,
        };
        let bytes = serde_json::to_vec(&member).ok()?;
        let hello = Frame {
            bytes,
            ..Frame::empty(About::Hello, self.rank)
        };
        hello.send(&to).map_err(|error| refused(&error)).ok()?;
        // From now on, an abort ends the wait below.
        self.link
            .set(Line {
                writer: Mutex::new(to),
                socket,
            })
            .ok()?;
        if self.is_aborted() {
            return None;
        }
        let mut from = BufReader::new(from);
        loop {
            let frame = Frame::receive(&mut from)
                .map_err(|error| self.lose(&format!("the root is gone: {error}")))
                .ok()?;
            match frame.about {
                About::Roster => {
                    self.roster
                        .set(serde_json::from_slice(&frame.bytes).ok()?)
                        .ok()?;
                    return Some(from);
                }
                About::Refused => {
                    self.fail(Reply::INVALID_USAGE, &String::from_utf8_lossy(&frame.bytes));
                    return None;
                }
                About::Gone => self.lose(&format!("rank {} is gone", frame.from)),
                _ => {}
            }
        }
    }

    fn take_in(&self, mut from: BufReader<TcpStream>) {
        loop {
            match Frame::receive(&mut from) {
                Ok(Frame {
                    about: About::Gone,
                    from,
                    ..
                }) => self.lose(&format!("rank {from} is gone")),
                Ok(frame) => {
                    lock(&self.state)
                        .arrived
                        .insert((frame.from, frame.tag), frame.bytes);
                    self.changed.notify_all();
                }
                Err(_) => return self.lose("the process of the root is gone"),
            }
        }
    }

    /// The state: `ncclSuccess`, `ncclInProgress`, or an error.
    pub(crate) fn reply(&self) -> Reply {
        lock(&self.state).reply
    }

    /// The error message.
    pub(crate) fn words(&self) -> Option<&'static CStr> {
        lock(&self.state).words
    }

    /// Waits while a call is in progress.
    pub(crate) fn wait_until_settled(&self) -> Reply {
        let state = lock(&self.state);
        let settled = self
            .changed
            .wait_while(state, |state| state.reply == Reply::IN_PROGRESS);
        settled.map_or(Reply::INTERNAL_ERROR, |state| state.reply)
    }

    pub(super) fn unsettle(&self) {
        let mut state = lock(&self.state);
        if state.reply == Reply::SUCCESS {
            state.reply = Reply::IN_PROGRESS;
        }
    }

    fn settle(&self) {
        let mut state = lock(&self.state);
        if state.reply == Reply::IN_PROGRESS {
            state.reply = Reply::SUCCESS;
        }
        self.changed.notify_all();
    }

    /// Latches the first error.
    pub(super) fn fail(&self, reply: Reply, words: &str) {
        let mut state = lock(&self.state);
        if matches!(state.reply, Reply::SUCCESS | Reply::IN_PROGRESS) && !state.is_aborted {
            state.reply = reply;
            let line = format!("fake NCCL: rank {}: {words}", self.rank);
            state.words = std::ffi::CString::new(line).ok().map(keep);
        }
        self.changed.notify_all();
    }

    /// Handles a dead peer.
    fn lose(&self, words: &str) {
        let machine = Process::here().machine().unwrap_or_default();
        if machine.peer_death == PeerDeath::Error {
            self.fail(Reply::REMOTE_ERROR, words);
        }
    }

    pub(super) fn is_aborted(&self) -> bool {
        lock(&self.state).is_aborted
    }

    /// Waits for the abort.
    pub(super) fn wait_for_abort(&self) -> Aborted {
        let state = lock(&self.state);
        drop(self.changed.wait_while(state, |state| !state.is_aborted));
        Aborted
    }

    /// Sends to a peer over the link between the devices.
    pub(super) fn send(
        &self,
        to: u32,
        tag: u64,
        mut bytes: Vec<u8>,
        is_data: bool,
    ) -> Result<(), Aborted> {
        match self.link_to(to) {
            Link::Corrupting | Link::CorruptingKernels if is_data => corrupt(&mut bytes),
            Link::Stuck => return Ok(()),
            _ => {}
        }
        let frame = Frame {
            about: About::Data,
            to,
            from: self.rank,
            tag,
            bytes,
        };
        let sent = self
            .link
            .get()
            .map(|link| frame.send(&mut *lock(&link.writer)));
        if self.is_aborted() {
            return Err(Aborted);
        }
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(self.wait_for_abort()),
        }
    }

    /// Receives a peer's message with a tag.
    pub(super) fn receive(&self, from: u32, tag: u64) -> Result<Vec<u8>, Aborted> {
        let state = lock(&self.state);
        let is_missing =
            |state: &mut State| !state.is_aborted && !state.arrived.contains_key(&(from, tag));
        let Ok(mut state) = self.changed.wait_while(state, is_missing) else {
            return Err(Aborted);
        };
        if state.is_aborted {
            return Err(Aborted);
        }
        state.arrived.remove(&(from, tag)).ok_or(Aborted)
    }

    /// The link to a peer's device. NCCL goes through host memory if configured to, or without peer access.
    fn link_to(&self, peer: u32) -> Link {
        let Some(other) = self
            .roster
            .get()
            .and_then(|roster| roster.get(peer as usize))
        else {
            return Link::Ok;
        };
        let is_told = std::env::var("NCCL_P2P_DISABLE").is_ok_and(|value| value == "1");
        if is_told || other.host != host() {
            return Link::Ok;
        }
        let machine = Process::here().machine().unwrap_or_default();
        machine
            .link(self.device.place, other.place)
            .unwrap_or(Link::Ok)
    }

    /// The number of the next collective, in the order of the host's calls.
    pub(super) fn next_collective(&self) -> u64 {
        let mut state = lock(&self.state);
        state.collectives += 1;
        state.collectives
    }

    /// The number of the next message to a peer.
    pub(super) fn next_sent(&self, peer: u32) -> u64 {
        next(&mut lock(&self.state).sent, peer)
    }

    /// The number of the next message from a peer.
    pub(super) fn next_received(&self, peer: u32) -> u64 {
        next(&mut lock(&self.state).received, peer)
    }

    /// Runs a job in the background, after earlier ones.
    pub(super) fn later(self: &Arc<Self>, job: impl FnOnce() + Send + 'static) {
        self.unsettle();
        let comm = self.clone();
        let job: Job = Box::new(move || {
            let machine = Process::here().machine().unwrap_or_default();
            std::thread::sleep(machine.delay(Kind::Submit));
            job();
            comm.settle();
        });
        let mut jobs = lock(&self.jobs);
        let jobs = jobs.get_or_insert_with(|| {
            let (sender, receiver) = channel::<Job>();
            self.thread("/submit", move || {
                receiver.into_iter().for_each(|job| job())
            });
            sender
        });
        // The thread ends with its sender.
        let _ = jobs.send(job);
    }

    /// Counts another piece of work of a stream.
    pub(super) fn promise(&self) {
        lock(&self.state).pending += 1;
    }

    /// Does a counted piece of work.
    pub(super) fn keep_promise(&self, work: impl FnOnce() -> Result<(), Aborted>) {
        lock(&self.state).running += 1;
        // The stream continues even after an abort.
        let _ = work();
        let mut state = lock(&self.state);
        state.running -= 1;
        state.pending -= 1;
        self.changed.notify_all();
    }

    /// Waits until no stream runs its work.
    pub(crate) fn wait_until_idle(&self) {
        let state = lock(&self.state);
        drop(self.changed.wait_while(state, |state| state.running > 0));
    }

    /// Waits until streams have done all its work.
    pub(crate) fn wait_until_done(&self) {
        let state = lock(&self.state);
        drop(self.changed.wait_while(state, |state| state.pending > 0));
    }

    /// The same, in the background if calls do not block.
    pub(crate) fn finalize(self: &Arc<Self>) -> Reply {
        if self.is_blocking {
            self.wait_until_done();
            return self.reply();
        }
        let comm = self.clone();
        self.later(move || comm.wait_until_done());
        self.reply()
    }

    /// Leaves after all its work.
    pub(crate) fn destroy(&self) {
        self.wait_until_done();
        if let Some(link) = self.link.get() {
            // The hub may be gone already.
            let _ = Frame::empty(About::Bye, self.rank).send(&mut *lock(&link.writer));
        }
        self.leave();
    }

    /// Leaves at once, which ends its running work.
    pub(crate) fn abort(&self) {
        self.leave();
        self.wait_until_idle();
    }

    fn leave(&self) {
        let mut state = lock(&self.state);
        state.is_aborted = true;
        drop(state);
        self.changed.notify_all();
        lock(&self.jobs).take();
        if let Some(link) = self.link.get() {
            // The hub may have closed it already.
            let _ = link.socket.shutdown(Shutdown::Both);
        }
    }
}

fn next(counts: &mut BTreeMap<u32, u64>, peer: u32) -> u64 {
    let count = counts.entry(peer).or_default();
    *count += 1;
    *count
}

/// NCCL's name of this host.
///
/// *Source*: `NCCL_HOSTID`, which makes one machine look like several.
fn host() -> String {
    std::env::var("NCCL_HOSTID").unwrap_or_default()
}

/// Leaks a message, since callers may read it at any time. There are few per communicator.
fn keep(words: std::ffi::CString) -> &'static CStr {
    Box::leak(words.into_boxed_c_str())
}
