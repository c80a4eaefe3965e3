//! Has the ranks of a host map each other's memory, and finds out what is behind a connection that ends meanwhile.
//!
//! The first connection of a pair has proved that both belong to the job. The second one, for p2p, is made by the lower rank and
//! travels over the first, so it needs no proof.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_rendezvous::page::JobPage;

use super::notice::Behind;
use super::record::{END_TIMEOUT, Record};
use super::{Forming, SLICE};
use crate::error::Error;
use crate::handover;
use crate::memory::{Segment, Shown};
use crate::mesh::Advice;
use crate::socket::{Socket, poll_sockets, present};

/// The ranks of a host once they are connected.
pub(super) struct Swap<'a> {
    pub(super) forming: &'a Forming<'a>,
    pub(super) records: &'a [Record],
    /// The ranks of this host, ascending.
    pub(super) team: &'a [usize],
    /// The connections to the others of them, by rank.
    pub(super) sockets: &'a [Option<Socket>],
}

/// Descriptors that a rank may have sent before it has received as many. All of them together are bounded by a process's
/// limit of open files while they are on their way, whatever the number of ranks; a user's processes are refused above it.
const AHEAD_MAX: usize = 8;

/// What a rank has got of the others of its host.
#[derive(Debug)]
pub(super) struct Swapped {
    /// All memory in the team's order.
    pub(super) shown: Vec<Shown>,
    /// The page that the first rank has made.
    pub(super) page: Option<JobPage>,
    /// The connections for p2p, by rank.
    pub(super) p2p: Vec<Option<Socket>>,
}

/// Why descriptors could not be swapped.
enum Failure {
    /// It needs no explanation: a peer gave it, or it is this rank's own.
    Known(Error),
    /// The connection to a peer ended, and nothing was said there.
    Ended { peer: usize, reason: io::Error },
    /// The deadline is over, and these have not sent theirs.
    Late(Vec<usize>),
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Known(error.into())
    }
}

impl Swap<'_> {
    /// Gives every rank of the team this rank's memory (its first one also the page it made) and takes theirs.
    ///
    /// *Errors*: the first cause that this rank can hear of, and the others hear of it before their connections end.
    pub(super) fn run(&self, own: &Shown, page: Option<&JobPage>) -> Result<Swapped, Error> {
        let page_fd = page.and_then(handover::page_fd);
        let fds: Vec<BorrowedFd<'_>> = own.fds().chain(page_fd).collect();
        (self.exchange(own, &fds))
            .map_err(|failure| self.cause_of(failure))
            .inspect_err(|error| self.forming.part(self.sockets, error))
    }

    fn exchange(&self, own: &Shown, fds: &[BorrowedFd<'_>]) -> Result<Swapped, Failure> {
        let mut shown: Vec<Option<Shown>> = vec![None; self.sockets.len()];
        shown[self.forming.env.rank] = Some(own.clone());
        let mut p2p: Vec<Option<Socket>> = self.sockets.iter().map(|_| None).collect();
        let mut page = None;
        let mut pending: Vec<(usize, &Socket)> = self.peers().collect();
        let mut ahead = AHEAD_MAX;
        let mut unsent = self.in_turn();
        loop {
            // Whoever holds back has been sent less than it has sent itself, so never do all.
            for (peer, socket) in unsent.by_ref().take(ahead) {
                ahead -= 1;
                let sent = self.send(peer, socket, fds, &mut p2p[peer]);
                if let Err(reason) = sent {
                    // To all, even if one is dead: the others would take this rank for the one that failed.
                    for (peer, socket) in unsent {
                        let _ = self.send(peer, socket, fds, &mut p2p[peer]);
                    }
                    return Err(Failure::Ended { peer, reason });
                }
            }
            if pending.is_empty() {
                break;
            }
            self.forming.health()?;
            let left = (self.forming.deadline).saturating_duration_since(Instant::now());
            let (_, ready) = poll_sockets(&[], &pending, left.min(SLICE))
                .map_err(|error| self.forming.system("wait for its peers", &error))?;
            if left.is_zero() && !ready.contains(&true) {
                return Err(Failure::Late(
                    pending.iter().map(|(peer, _)| *peer).collect(),
                ));
            }
            let mut ended = None;
            for ((peer, socket), _) in pending.iter().zip(&ready).filter(|(_, ready)| **ready) {
                match self.take(*peer, socket, Instant::now() + END_TIMEOUT) {
                    Ok(fds) => {
                        let (memory, made) = self.open(*peer, fds, &mut p2p[*peer])?;
                        shown[*peer] = Some(memory);
                        page = page.or(made);
                        ahead += 1;
                    }
                    // A notice counts at once. The end of a connection may be due to a notice that is still to be read.
                    Err(Failure::Ended { peer, reason }) => {
                        ended.get_or_insert(Failure::Ended { peer, reason });
                    }
                    Err(known) => return Err(known),
                }
            }
            ended.map_or(Ok(()), Err)?;
            pending.retain(|(peer, _)| shown[*peer].is_none());
        }
        Ok(Swapped {
            shown: shown.into_iter().flatten().collect(),
            page,
            p2p,
        })
    }

    /// The peers from the next one on, so that not all send to the same one first.
    fn in_turn(&self) -> impl Iterator<Item = (usize, &Socket)> {
        let own = self.forming.env.rank;
        let above = self.peers().filter(move |(peer, _)| *peer > own);
        above.chain(self.peers().filter(move |(peer, _)| *peer < own))
    }

    /// Sends a peer the descriptors, and a higher one a connection.
    fn send(
        &self,
        peer: usize,
        socket: &Socket,
        fds: &[BorrowedFd<'_>],
        p2p: &mut Option<Socket>,
    ) -> io::Result<()> {
        if peer < self.forming.env.rank {
            return handover::send(socket, fds, self.forming.deadline);
        }
        let (own, theirs) = UnixStream::pair()?;
        *p2p = Some(Socket::Unix(own));
        let fds = [fds, &[theirs.as_fd()]].concat();
        handover::send(socket, &fds, self.forming.deadline)
    }

    /// What a peer has sent: descriptors, or why it gives up.
    fn take(&self, peer: usize, socket: &Socket, until: Instant) -> Result<Vec<OwnedFd>, Failure> {
        let received = handover::receive(socket, until);
        received.map_err(|error| match error.downcast::<Error>() {
            Ok(Error::Aborted { culprit, .. })
                if culprit.is_some_and(|culprit| culprit >= self.sockets.len()) =>
            {
                self.unshared(peer, &"it blames a rank that there is not")
                    .into()
            }
            Ok(said) => said.into(),
            Err(reason) => Failure::Ended { peer, reason },
        })
    }

    fn open(
        &self,
        peer: usize,
        mut fds: Vec<OwnedFd>,
        p2p: &mut Option<Socket>,
    ) -> Result<(Shown, Option<JobPage>), Error> {
        if peer < self.forming.env.rank {
            let socket = fds.pop().filter(|_| !fds.is_empty());
            let socket = socket.ok_or_else(|| self.unshared(peer, &"it sent no connection"))?;
            *p2p = Some(Socket::Unix(socket.into()));
        }
        let mut fds = fds.into_iter();
        let segment = match fds.next() {
            Some(fd) => Segment::open(fd),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        };
        let segment = segment.map_err(|error| self.unshared(peer, &error))?;
        let mut shown = Shown::whole(Arc::new(segment));
        if let Some(succession) = self.forming.succession {
            // All have a page by now.
            if let Some(fd) = fds.next() {
                let arena = succession.memory.open(fd);
                shown.arena = arena.map_err(|error| self.unshared(peer, &error))?;
            }
            return Ok((shown, None));
        }
        let page = match fds.next().filter(|_| peer == self.team[0]) {
            Some(fd) => Some(JobPage::from_fd(fd.as_raw_fd()).map_err(Arc::new)?),
            None => None,
        };
        Ok((shown, page))
    }

    /// The first cause. A rank that gives up tells those that are connected to it and leaves a notice in the store, and either
    /// may be missing: a rank whose connection is not accepted yet is not told, and the store may be gone. So an end without a
    /// notice is the peer's own failure only if the store answers and no other rank has said anything.
    fn cause_of(&self, failure: Failure) -> Error {
        let (peer, reason) = match failure {
            Failure::Known(error) => return error,
            Failure::Late(missing) => {
                let what = "hand over shared memory";
                return self.forming.absent(missing, what, String::new());
            }
            Failure::Ended { peer, reason } => (peer, reason),
        };
        let behind = self.forming.behind_the_end_of(peer);
        if let Behind::Cause(error) = behind {
            return error;
        }
        if let Some(said) = self.overheard() {
            return said;
        }
        let first = match behind {
            Behind::Unknown => self.death_behind(peer),
            _ => None,
        };
        let is_dead = |rank: &usize| self.sees_the_end_of(*rank, END_TIMEOUT);
        match first.or(Some(peer).filter(is_dead)) {
            Some(dead) => lost(&self.records[dead]),
            None => self.unshared(peer, &reason),
        }
    }

    /// What a peer has said by now, on whichever connection.
    fn overheard(&self) -> Option<Error> {
        self.peers().find_map(|(peer, socket)| {
            loop {
                match self.take(peer, socket, Instant::now()) {
                    Ok(_) => {}
                    Err(Failure::Known(error)) => return Some(error),
                    Err(_) => return None,
                }
            }
        })
    }

    /// With nobody to ask, the rank whose process has ended before the one of `peer`, as far as can be told: the store's
    /// own host, which otherwise waits for the others' notices; else another one.
    fn death_behind(&self, peer: usize) -> Option<usize> {
        let others = self.team.iter().copied();
        let others = others.filter(|rank| ![self.forming.env.rank, peer].contains(rank));
        let host = self
            .forming
            .hosts_store()
            .filter(|host| *host != self.forming.env.rank);
        let mut suspects = host.into_iter().chain(others);
        suspects.find(|rank| self.sees_the_end_of(*rank, Duration::ZERO))
    }

    fn sees_the_end_of(&self, rank: usize, limit: Duration) -> bool {
        self.records[self.forming.env.rank].sees_the_end_of(&self.records[rank], limit)
    }

    fn peers(&self) -> impl Iterator<Item = (usize, &Socket)> {
        present(self.sockets)
    }

    fn unshared(&self, peer: usize, reason: &impl std::fmt::Display) -> Error {
        let reason = format!("handing over shared memory failed: {reason}");
        self.forming.peer(peer, reason)
    }
}

/// The error of a rank that sees another one's process ended.
pub(super) fn lost(peer: &Record) -> Error {
    Error::PeerLost {
        rank: peer.rank,
        place: format!("host {}, pid {}", peer.host, peer.pid),
        during: None,
    }
}
