//! The connections that carry messages between two ranks, and the thread that reads them.

use std::io::{self, IoSlice, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_rendezvous::wait::wait_for;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFlags, eventfd};

use super::frame::{FRAME_BYTES, Frame, Label};
use super::shelf::{Body, P2pMessage};
use super::{KEPT_BYTES_MAX, PointToPoint};
use crate::error::Error;
use crate::memory::Region;
use crate::socket::{End, Socket, has_ended, poll_sockets, present, read_now};
use crate::status::OpWait;

/// Longest sleep of the thread. It is woken by whatever happens; this only bounds the wait.
const SLICE: Duration = Duration::from_secs(1);
/// Longest sleep of a sender between two looks at the latch and the deadline.
const SEND_SLICE: Duration = Duration::from_millis(5);
/// Most that is read from one peer before the others have their turn.
///
/// *Units*: bytes.
const TURN_BYTES_MAX: usize = 4 << 20;

/// One connection to each peer; none to oneself.
#[derive(Debug)]
pub(crate) struct Lanes {
    pub(crate) sockets: Vec<Option<Socket>>,
    /// Held while a message is written, so that messages of several threads do not mix.
    writing: Vec<Mutex<()>>,
    wake: OwnedFd,
    stop: AtomicBool,
    started: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Lanes {
    pub(super) fn new(sockets: Vec<Option<Socket>>) -> io::Result<Self> {
        for socket in sockets.iter().flatten() {
            socket.set_nonblocking(true)?;
            socket.set_nodelay()?;
        }
        Ok(Self {
            writing: sockets.iter().map(|_| Mutex::default()).collect(),
            sockets,
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            stop: AtomicBool::new(false),
            started: AtomicBool::new(false),
            thread: Mutex::default(),
        })
    }

    /// Starts the thread, unless it runs or has ended.
    pub(super) fn start(&self, p2p: &Arc<PointToPoint>) -> Result<(), Error> {
        if self.is_started() {
            return Ok(());
        }
        let mut thread = self.thread.lock();
        if thread.is_none() && !self.stop.load(Ordering::Acquire) {
            let served = p2p.clone();
            let spawned = p2p.status.spawn("p2p", move || {
                if let Some(lanes) = served.lanes() {
                    lanes.serve(&served);
                }
            });
            *thread = Some(spawned?);
            self.started.store(true, Ordering::Release);
        }
        Ok(())
    }

    pub(crate) fn is_started(&self) -> bool {
        self.started.load(Ordering::Acquire)
    }

    /// What a connection that is ready has, while the thread does not run; nothing once it does, which then finds out
    /// itself.
    pub(super) fn look(&self, peer: usize) -> Option<Ready> {
        // Held while looking: a thread that began now would take the data away and leave the mere end to see.
        let _not_begun = self.thread.lock();
        if self.is_started() {
            return None;
        }
        let socket = self.sockets[peer].as_ref()?;
        if socket.has_pending() {
            return Some(Ready::Data);
        }
        Some(match has_ended(socket) {
            true => Ready::End,
            false => Ready::Data,
        })
    }

    /// The thread looks again at everything.
    pub(super) fn wake(&self) {
        // An eventfd takes a write unless its counter is full, and then it is readable anyway.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Ends the thread; nothing is read any more.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    /// Ends all connections; the peers notice, and so do threads of this rank that still look at them.
    pub(super) fn shutdown(&self) {
        self.sockets.iter().flatten().for_each(Socket::shutdown);
    }

    /// Writes a frame and what follows it; false when the peer's end is closed.
    pub(super) fn write(
        &self,
        to: usize,
        head: &[u8],
        body: &[u8],
        wait: &OpWait<'_>,
    ) -> Result<bool, Error> {
        let Some(mut socket) = self.sockets[to].as_ref() else {
            return Ok(false);
        };
        // The thread that holds it has a deadline too.
        let _turn = self.writing[to].lock();
        let (mut head, mut body) = (head, body);
        while !(head.is_empty() && body.is_empty()) {
            match socket.write_vectored(&[IoSlice::new(head), IoSlice::new(body)]) {
                Ok(0) => return Ok(false),
                Ok(n) => {
                    let of_head = n.min(head.len());
                    head = &head[of_head..];
                    body = &body[n - of_head..];
                }
                Err(error) if is_transient(error.kind()) => {
                    wait.check_alone(&[to])?;
                    // A failing poll is a lack of memory; the next turn finds out what the socket says.
                    let _ = wait_for(socket.as_fd(), PollFlags::OUT, Instant::now() + SEND_SLICE);
                }
                Err(_) => return Ok(false),
            }
        }
        Ok(true)
    }

    /// The thread: reads until it is stopped.
    fn serve(&self, p2p: &PointToPoint) {
        let mut inboxes: Vec<Inbox> = self.sockets.iter().map(|_| Inbox::new()).collect();
        loop {
            let open = present(&self.sockets);
            let open = open.filter(|(peer, _)| inboxes[*peer].wants_more(p2p, *peer));
            let open: Vec<(usize, &Socket)> = open.collect();
            let Ok((woken, ready)) = poll_sockets(&[self.wake.as_fd()], &open, SLICE) else {
                // Only a lack of memory; peers' deaths are then found by the deadlines.
                return;
            };
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            if woken[0] {
                let _ = rustix::io::read(&self.wake, &mut [0; 8][..]);
            }
            for ((peer, socket), _) in open.into_iter().zip(&ready).filter(|(_, ready)| **ready) {
                let inbox = &mut inboxes[peer];
                match inbox.read(socket, p2p, peer) {
                    Ok(()) => {}
                    Err(Stop::Closed) => {
                        inbox.ended = true;
                        p2p.ended(peer);
                    }
                    Err(Stop::Failed(error)) => {
                        inbox.ended = true;
                        p2p.fail(error);
                        // It may still read what it was sent.
                        p2p.state.lock().ledger.lose();
                        p2p.ended(peer);
                    }
                }
            }
        }
    }
}

/// What a connection is ready for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ready {
    Data,
    End,
}

/// What has come from one peer and is no whole message yet.
#[derive(Debug)]
struct Inbox {
    head: [u8; FRAME_BYTES],
    head_got: usize,
    /// The message whose data is coming, once there is room for it.
    label: Option<Label>,
    body: Option<(Region, usize)>,
    ended: bool,
}

/// Why a peer is not read from any more.
enum Stop {
    Closed,
    Failed(Error),
}

impl Inbox {
    fn new() -> Self {
        Self {
            head: [0; FRAME_BYTES],
            head_got: 0,
            label: None,
            body: None,
            ended: false,
        }
    }

    /// Whether the peer is to be read from: it has not ended, and there is room for the message that comes.
    fn wants_more(&self, p2p: &PointToPoint, peer: usize) -> bool {
        match (self.ended, self.label, &self.body) {
            (true, ..) => false,
            (false, Some(label), None) => {
                let mut state = p2p.state.lock();
                let room = state.shelf.has_room(peer, label.bytes(), KEPT_BYTES_MAX);
                // Under the same lock as the look: a thread that makes room from now on wakes this one.
                state.paused |= !room;
                room
            }
            (false, ..) => true,
        }
    }

    /// Reads what is there, up to a turn's share.
    fn read(&mut self, socket: &Socket, p2p: &PointToPoint, peer: usize) -> Result<(), Stop> {
        let mut share = TURN_BYTES_MAX;
        let wire = |reason| Stop::Failed(Error::wire(peer, None, reason));
        let stop = |end| match end {
            End::Closed => Stop::Closed,
            End::Nonsense(reason) => wire(reason),
        };
        while share > 0 && self.wants_more(p2p, peer) {
            if let Some(label) = self.label {
                let (region, got) = match &mut self.body {
                    Some(body) => body,
                    none => {
                        let region = Region::heap(label.bytes()).map_err(Stop::Failed)?;
                        none.insert((region, 0))
                    }
                };
                let rest = &mut region.as_mut_slice()[*got..];
                let n = match rest.is_empty() {
                    true => 0,
                    false => match read_now(socket, rest).map_err(stop)? {
                        Some(n) => n,
                        None => return Ok(()),
                    },
                };
                *got += n;
                share = share.saturating_sub(n.max(1));
                if *got == label.bytes()
                    && let (Some(label), Some((region, _))) = (self.label.take(), self.body.take())
                {
                    let body = Body::Here(region);
                    p2p.state.lock().shelf.deliver(P2pMessage {
                        from: peer,
                        label,
                        body,
                    });
                    p2p.changed.notify_all();
                }
                continue;
            }
            let Some(n) = read_now(socket, &mut self.head[self.head_got..]).map_err(stop)? else {
                return Ok(());
            };
            self.head_got += n;
            share = share.saturating_sub(n);
            if self.head_got == FRAME_BYTES {
                self.head_got = 0;
                self.frame(p2p, peer).map_err(wire)?;
            }
        }
        Ok(())
    }

    /// A whole head is there.
    fn frame(&mut self, p2p: &PointToPoint, peer: usize) -> Result<(), String> {
        match (Frame::decode(&self.head)?, p2p.segment(peer)) {
            (Frame::Inline(_), Some(_)) => {
                Err("a message with its data, where memory is shared".into())
            }
            (Frame::Inline(label), None) => {
                self.label = Some(label);
                Ok(())
            }
            (frame, _) => p2p.arrived(peer, frame),
        }
    }
}

fn is_transient(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
