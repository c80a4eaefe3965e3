//! Moves all bytes of one round: to and from all peers at once, never waiting for one of them alone.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use paceline_rendezvous::wait::poll_for;
use rustix::event::{PollFd, PollFlags};

use super::board::Board;
use super::frame::{DIFFERENT, Frame, MEETING};
use super::lane;
use super::{FoldPiece, Peer};
use crate::call::{Header, agree};
use crate::error::Error;
use crate::pace::{Pace, slice};
use crate::plan::Task;
use crate::runner::Runner;
use crate::socket::End;
use crate::status::{Missing, OpWait};

/// Sleep where nothing wakes who sleeps: an eighth of the time waited so far, so that what has taken long takes little longer.
const NAP: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];
const NAPS: u32 = 8;
/// How long a caller looks there before it sleeps: a nap of 20 us takes 70, and a message may need both ranks several times.
const LOOK: Duration = Duration::from_millis(1);
/// Data that has moved within this part of the deadline before it was over says that a peer is not gone.
const LATELY_PART: u32 = 4;
/// How long to look without offering the core to anybody else; a peer that runs answers within it.
const ALONE: Duration = Duration::from_micros(4);
/// Turns that a rank without a core of its own gives to others before it sleeps.
const YIELDS: u32 = 2;

/// One exchange.
pub(super) struct Drive<'a> {
    pub(super) rank: usize,
    /// Ranks of this host, whose calls have been compared.
    pub(super) mates: &'a [usize],
    /// The calls of this host, where they differ.
    pub(super) calls: Option<&'a [(usize, Header)]>,
    pub(super) peers: &'a mut [Option<Peer>],
    pub(super) active: &'a [usize],
    pub(super) board: &'a mut Board,
    pub(super) tasks: &'a [Task],
    pub(super) header: &'a Header,
    pub(super) round: u32,
    /// Who spins; none when the ranks share cores.
    pub(super) runner: Option<Runner>,
    /// Whether nothing wakes it when it sleeps.
    pub(super) asks: bool,
    pub(super) pace: &'a mut Pace,
    pub(super) wait: &'a OpWait<'a>,
}

/// A time in which nothing moves.
struct Idle {
    since: Instant,
    /// How long to look.
    limit: Duration,
    turns: u32,
    slept: bool,
}

impl Idle {
    fn now(drive: &Drive<'_>) -> Self {
        let since = Instant::now();
        let limit = match drive.runner {
            None => Duration::ZERO,
            Some(Runner::Caller) if drive.asks => LOOK,
            Some(runner) => drive.pace.look(since, runner),
        };
        Self {
            since,
            limit,
            turns: 0,
            slept: false,
        }
    }

    fn nap(&self) {
        let part = self.since.elapsed() / NAPS;
        std::thread::sleep(part.clamp(NAP[0], NAP[1]));
    }
}

impl Drive<'_> {
    /// Moves everything; returns when the last head had come. When heads differ, collects them all, so that every rank
    /// reports the same mismatch, and uses no payload.
    ///
    /// # Safety
    ///
    /// As [`Streams::round`](super::Streams::round).
    pub(super) unsafe fn run(mut self, fold: &mut FoldPiece<'_>) -> Result<Instant, Error> {
        let mut ready = None;
        let mut idle: Option<Idle> = None;
        let mut first = true;
        loop {
            // SAFETY: the caller's contract.
            let mut progress = unsafe { self.turn() }?;
            let differs = self.differs();
            if !differs && (progress || first) {
                // SAFETY: the caller's contract.
                progress |= unsafe { self.board.work(self.peers, self.tasks, fold) };
            }
            first = false;
            if progress && let Some(idle) = idle.take().filter(|idle| idle.slept) {
                let now = Instant::now();
                *self.pace = self.pace.after_sleep(idle.since, now);
                self.wait.moved(now);
            }
            if ready.is_none() && self.all(|peer| !peer.awaited) {
                ready = Some(Instant::now());
            }
            if let Some(ready) = ready {
                if differs && self.all(|peer| peer.head_left == 0) {
                    agree(&self.headers())?;
                    return Err(self.no_difference());
                }
                if !differs && self.is_done()? {
                    // What this rank has sent may have woken peers; no matter whether it has, the next wait looks a bounded time longer.
                    *self.pace = self.pace.after_waking(Instant::now());
                    return Ok(ready);
                }
            }
            if !progress && !self.spins(&mut idle) {
                // A peer that asks must hear that this rank waits itself, or would blame it.
                self.wait.publish();
                if let Err(error) = self.wait.check(|| self.missing()) {
                    // A peer may have sent all that was missing before it failed.
                    // SAFETY: the caller's contract.
                    first = unsafe { self.turn() }.is_ok_and(|progress| progress);
                    if !first {
                        return Err(error);
                    }
                    self.wait.moved(Instant::now());
                    continue;
                }
                let waited = idle
                    .as_ref()
                    .map_or(Duration::ZERO, |idle| idle.since.elapsed());
                match &idle {
                    Some(idle) if self.asks => idle.nap(),
                    _ => self.sleep(differs, slice(waited, self.wait.left())),
                }
                idle.iter_mut().for_each(|idle| idle.slept = true);
            }
        }
    }

    /// One write and one read for every connection that has something to do; whether anything moved.
    unsafe fn turn(&mut self) -> Result<bool, Error> {
        let mut progress = false;
        for &number in self.active {
            let peer = self.peers[number]
                .as_mut()
                .expect("active peers are stream peers");
            for lane in 0..peer.lanes.len() {
                if (lane == 0 && peer.head_left > 0) || !peer.lanes[lane].sending.finished {
                    // SAFETY: the caller's contract.
                    let sent = unsafe { lane::send(peer, lane, self.board) };
                    let sent = sent.map_err(|_| self.wait.cause_of_end(number))?;
                    peer.hear(sent);
                    progress |= sent > 0;
                }
            }
            if peer.awaited {
                let judged = peer.lanes[0].read_head().and_then(|head| {
                    let judge = |bytes| judge(&bytes, peer, self.header, self.round);
                    head.map(judge).transpose().map_err(End::Nonsense)
                });
                let Some(header) = judged.map_err(|failure| self.error(number, failure))? else {
                    continue;
                };
                let peer = self.peers[number]
                    .as_mut()
                    .expect("active peers are stream peers");
                let (header, differs) = header;
                (peer.awaited, peer.header, peer.differs) = (false, Some(header), differs);
                progress = true;
            }
        }
        if self.differs() {
            return Ok(progress);
        }
        for &number in self.active {
            let peer = self.peers[number]
                .as_ref()
                .expect("active peers are stream peers");
            if peer.awaited {
                continue;
            }
            for lane in 0..peer.lanes.len() {
                let peer = self.peers[number]
                    .as_ref()
                    .expect("active peers are stream peers");
                if !peer.lanes[lane].receiving.finished {
                    // SAFETY: the caller's contract.
                    let n = unsafe { lane::receive(self.peers, number, lane, self.board) };
                    let n = n.map_err(|failure| self.error(number, failure))?;
                    if let Some(peer) = &mut self.peers[number] {
                        peer.hear(n);
                    }
                    progress |= n > 0;
                }
            }
        }
        Ok(progress)
    }

    fn is_done(&mut self) -> Result<bool, Error> {
        let moved = self.board.is_done()
            && self.all(|peer| {
                let lane = |lane: &lane::Lane| lane.sending.finished && lane.receiving.finished;
                peer.head_left == 0 && peer.lanes.iter().all(lane)
            });
        Ok(moved && self.flush()?)
    }

    /// Whether nothing of what was sent needs this rank any more.
    fn flush(&mut self) -> Result<bool, Error> {
        let mut flushed = true;
        for &number in self.active {
            let lanes = self.peers[number]
                .iter_mut()
                .flat_map(|peer| &mut peer.lanes);
            let mut lanes = lanes.map(|lane| lane.wire.flush());
            let all = lanes.try_fold(true, |all, lane| Ok(all & lane?));
            flushed &= all.map_err(|failure| self.error(number, failure))?;
        }
        Ok(flushed)
    }

    /// Whether to look again instead of sleeping.
    fn spins(&self, idle: &mut Option<Idle>) -> bool {
        let idle = idle.get_or_insert_with(|| Idle::now(self));
        idle.turns += 1;
        if self.runner.is_none() {
            std::thread::yield_now();
            return idle.turns <= YIELDS;
        }
        let spun = idle.since.elapsed();
        // Other programs use the cores too: the peer may be waiting for this very one.
        if spun >= ALONE {
            std::thread::yield_now();
        }
        spun < idle.limit
    }

    /// Until a wire is ready for what is still to be done, at most for `limit`.
    fn sleep(&self, differs: bool, limit: Duration) {
        let mut fds = Vec::with_capacity(self.active.len());
        for (_, peer) in self.active() {
            for (number, lane) in peer.lanes.iter().enumerate() {
                let head_out = number == 0 && peer.head_left > 0;
                let head_in = number == 0 && peer.awaited;
                let (sending, receiving) = (&lane.sending, &lane.receiving);
                let out = head_out || (!differs && !sending.finished && !sending.held);
                let payload = !differs && !peer.awaited && !receiving.finished && !receiving.held;
                let mut flags = PollFlags::empty();
                flags.set(PollFlags::OUT, out);
                flags.set(PollFlags::IN, head_in || payload);
                if flags.contains(PollFlags::IN) && lane.wire.has_pending() {
                    return;
                }
                if let Some(fd) = lane.wire.fd().filter(|_| !flags.is_empty()) {
                    fds.push(PollFd::from_borrowed_fd(fd, flags));
                }
            }
        }
        // A failing poll is a lack of memory; the next turn finds out what the sockets say.
        let _ = poll_for(&mut fds, limit);
    }

    /// The ranks that are waited for: those that have not come, else those whose data is late, else those that do not read.
    fn missing(&self) -> Missing {
        let stages: [&dyn Fn(&Peer) -> bool; 3] = [
            &|peer| peer.awaited,
            &|peer| {
                let late = |lane: &lane::Lane| !lane.receiving.finished && !lane.receiving.held;
                peer.lanes.iter().any(late)
            },
            &|peer| {
                let late = |lane: &lane::Lane| !lane.sending.finished || lane.wire.holds_unsent();
                peer.head_left > 0 || peer.lanes.iter().any(late)
            },
        ];
        let those = |late: &dyn Fn(&Peer) -> bool| -> Vec<usize> {
            let late = self.active().filter(|(_, peer)| late(peer));
            late.map(|(number, _)| number).collect()
        };
        let mut found = stages.into_iter().map(those).enumerate();
        let late = found.find(|(_, late)| !late.is_empty());
        let (stage, ranks) = late.unwrap_or_default();
        let lately = self.wait.timeout / LATELY_PART;
        let is_heard = |rank: &usize| {
            let heard = self.peers[*rank].as_ref().and_then(|peer| peer.heard);
            heard.is_some_and(|at| at.elapsed() < lately)
        };
        Missing {
            // All that there are have come to the first round.
            have_come: stage > 0 || !matches!(self.round, 0 | MEETING | DIFFERENT),
            are_heard: stage > 0 && ranks.iter().all(is_heard),
            ranks,
        }
    }

    fn differs(&self) -> bool {
        let differs =
            |peer: &Peer| peer.differs || peer.header.is_some_and(|header| header != *self.header);
        self.calls.is_some() || self.active().any(|(_, peer)| differs(peer))
    }

    /// A peer says that the calls of its host differ, and all calls are equal.
    fn no_difference(&self) -> Error {
        let odd = self.active().find(|(_, peer)| peer.differs);
        let peer = odd.map_or(self.rank, |(peer, _)| peer);
        self.error(
            peer,
            End::Nonsense("that calls differ, which do not".into()),
        )
    }

    /// The calls of all ranks that are known, in rank order.
    fn headers(&self) -> Vec<(usize, Header)> {
        let theirs = self
            .active()
            .filter_map(|(number, peer)| Some((number, peer.header?)));
        let mut headers: Vec<_> = theirs.collect();
        match self.calls {
            Some(calls) => headers.extend(calls),
            // Equal calls, or the streams would not have begun.
            None => {
                let here = self.mates.iter().copied().chain([self.rank]);
                headers.extend(here.map(|rank| (rank, *self.header)));
            }
        }
        headers.sort_by_key(|(rank, _)| *rank);
        headers
    }

    fn active(&self) -> impl Iterator<Item = (usize, &Peer)> {
        let peers = self.active.iter();
        peers.filter_map(|number| Some((*number, self.peers[*number].as_ref()?)))
    }

    fn all(&self, what: impl Fn(&Peer) -> bool) -> bool {
        self.active().all(|(_, peer)| what(peer))
    }

    /// The connection to a peer has ended, and why is on its way on the other connection; or it sent nonsense.
    fn error(&self, peer: usize, failure: End) -> Error {
        match failure {
            End::Closed => self.wait.cause_of_end(peer),
            End::Nonsense(reason) => Error::wire(peer, Some(self.wait.operation), reason),
        }
    }
}

/// The peer's header, equal to ours or not, and whether it has found a difference already. What is said beside it must fit
/// if the calls are equal; only where calls are compared they may differ.
fn judge(
    bytes: &[u8; super::FRAME_BYTES],
    peer: &Peer,
    ours: &Header,
    round: u32,
) -> Result<(Header, bool), String> {
    let frame = Frame::decode(bytes)?;
    let compares = matches!(round, 0 | MEETING | DIFFERENT);
    if compares && (round == DIFFERENT || frame.round == DIFFERENT) {
        return Ok((frame.header, frame.round == DIFFERENT));
    }
    if frame.header != *ours {
        return match round {
            0 | MEETING => Ok((frame.header, false)),
            _ => Err(format!(
                "round {round} of {} #{}",
                frame.header, frame.header.operation.seq
            )),
        };
    }
    if frame.round != round {
        return Err(format!(
            "a frame of round {}, expected {round}",
            frame.round
        ));
    }
    if frame.payload != peer.expected {
        return Err(format!(
            "a payload of {} bytes, expected {}",
            frame.payload, peer.expected
        ));
    }
    Ok((frame.header, false))
}
