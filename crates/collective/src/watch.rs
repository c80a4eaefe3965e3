//! The watch thread: listens to all peers, so that a death is known at once and not at the next deadline.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use crate::error::Error;
use crate::message::Message;
use crate::p2p::PointToPoint;
use crate::socket::{End, Socket, poll_sockets, present, read_now};
use crate::status::{Courier, Status};

/// Longest sleep of the thread. It is woken by whatever happens; this only bounds the wait.
const SLICE: Duration = Duration::from_secs(1);

/// The thread `rank3/watch` and how to end it.
#[derive(Debug)]
pub(crate) struct Watch {
    thread: Option<JoinHandle<()>>,
    stop: Arc<OwnedFd>,
    links: Arc<Links>,
}

/// The connections to all peers over which messages go; none to oneself.
#[derive(Debug)]
struct Links(Vec<Option<Socket>>);

impl Watch {
    /// Starts to listen, and makes the connections the group's way of sending messages. Until the thread of `p2p`
    /// runs, its connections are listened to as well.
    pub(crate) fn start(
        status: &Arc<Status>,
        sockets: Vec<Option<Socket>>,
        p2p: &Arc<PointToPoint>,
    ) -> Result<Self, Error> {
        let failed = |error: io::Error| Error::system(status.rank, "start its watch thread", error);
        for socket in sockets.iter().flatten() {
            socket.set_nonblocking(true).map_err(failed)?;
        }
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| failed(error.into()))?;
        let (stop, links) = (Arc::new(stop), Arc::new(Links(sockets)));
        status.set_courier(Box::new(Post(links.clone())));
        let thread = {
            let (status, stop, links) = (status.clone(), stop.clone(), links.clone());
            let p2p = p2p.clone();
            let watched = status.clone();
            watched.spawn("watch", move || listen(&status, &links, &p2p, &stop))?
        };
        Ok(Self {
            thread: Some(thread),
            stop,
            links,
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // An eventfd takes a write unless its counter is full, and then it is readable anyway.
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // The courier holds the links too; peers must see the end now.
        self.links.0.iter().flatten().for_each(Socket::shutdown);
    }
}

/// Sends messages over the links.
#[derive(Debug)]
struct Post(Arc<Links>);

impl Courier for Post {
    fn send(&self, to: usize, message: &Message) {
        // At most 2 KiB, on a connection that carries only these. A peer that does not read will learn from its end.
        if let Some(socket) = &self.0.0[to] {
            socket.post(&message.encode());
        }
    }
}

/// What has arrived from one peer and is no whole message yet.
#[derive(Debug, Default)]
struct Inbox {
    arrived: Vec<u8>,
    ended: bool,
}

fn listen(status: &Status, links: &Links, p2p: &Arc<PointToPoint>, stop: &OwnedFd) {
    let mut inboxes: Vec<Inbox> = links.0.iter().map(|_| Inbox::default()).collect();
    // Peers whose first message of the other kind may still come.
    let mut quiet: Vec<bool> = links.0.iter().map(Option::is_some).collect();
    loop {
        let open = present(&links.0).filter(|(peer, _)| !inboxes[*peer].ended);
        let open: Vec<(usize, &Socket)> = open.collect();
        let lanes = p2p.lanes().filter(|lanes| !lanes.is_started());
        let lanes = lanes.map_or(&[][..], |lanes| &lanes.sockets);
        let idle = present(lanes).filter(|(peer, _)| quiet[*peer]);
        let idle: Vec<(usize, &Socket)> = idle.collect();
        let watched: Vec<(usize, &Socket)> = open.iter().chain(&idle).copied().collect();
        let Ok((stopped, ready)) = poll_sockets(&[stop.as_fd()], &watched, SLICE) else {
            // Only a lack of memory; peers' deaths are then found by the deadlines.
            return;
        };
        if stopped[0] {
            return;
        }
        for ((peer, _), _) in idle
            .iter()
            .zip(&ready[open.len()..])
            .filter(|(_, ready)| **ready)
        {
            quiet[*peer] = p2p.nudge(*peer);
        }
        // All words first, then the ends: a rank that dies because another one did has said so, and the first failure
        // is the one that stays.
        let mut ends = Vec::new();
        for ((peer, socket), _) in open.into_iter().zip(&ready).filter(|(_, ready)| **ready) {
            if let Err(reason) = read(status, peer, socket, &mut inboxes[peer]) {
                inboxes[peer].ended = true;
                ends.push((peer, reason));
            }
        }
        for (peer, reason) in ends {
            match reason {
                End::Closed => status.lost(peer),
                End::Nonsense(reason) => drop(status.fail(Error::wire(peer, None, reason))),
            }
        }
        // This rank may compute for long before it notices, and be stopped before that.
        if !status.is_sound() {
            status.write_flight();
        }
    }
}

/// Reads what is there and delivers whole messages.
fn read(status: &Status, peer: usize, socket: &Socket, inbox: &mut Inbox) -> Result<(), End> {
    let mut bytes = [0; 2048];
    while let Some(n) = read_now(socket, &mut bytes)? {
        inbox.arrived.extend(&bytes[..n]);
        while let Some(message) = Message::take(&mut inbox.arrived).map_err(End::Nonsense)? {
            status.receive(peer, message);
        }
    }
    Ok(())
}
