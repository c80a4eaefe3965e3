//! Moves all bytes of one phase: to and from all peers at once, never waiting for one of them alone.

use std::io::{self, IoSlice, Read, Write};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::frame::{FRAME_BYTES, Frame, Phase};
use crate::call::{Call, Header, agree};
use crate::error::Error;
use crate::socket::{Socket, poll_for};
use crate::status::Vigil;

/// Longest sleep between two looks at the latch, the launcher's page and the deadline.
const SLICE: Duration = Duration::from_millis(5);
/// How long the reason for the end of a data connection may take to arrive on the message connection.
const CAUSE_TIMEOUT: Duration = Duration::from_millis(300);
/// Parts handed to one `writev`.
const PARTS_MAX: usize = 16;

/// What goes to one peer in a phase, and what comes from it.
pub(super) struct Flow<'a> {
    peer: usize,
    socket: &'a Socket,
    phase: Phase,
    head: [u8; FRAME_BYTES],
    parts: Vec<&'a [u8]>,
    /// Bytes sent, of the head and then of the parts.
    sent: usize,
    to_send: usize,
    head_in: [u8; FRAME_BYTES],
    head_got: usize,
    /// The peer's call, once its head is in.
    header: Option<Header>,
    into: &'a mut [u8],
    got: usize,
}

impl<'a> Flow<'a> {
    pub(super) fn new(
        peer: usize,
        socket: &'a Socket,
        frame: Frame,
        parts: Vec<&'a [u8]>,
        into: &'a mut [u8],
    ) -> Self {
        Self {
            peer,
            socket,
            phase: frame.phase,
            head: frame.encode(),
            sent: 0,
            to_send: FRAME_BYTES + parts.iter().map(|part| part.len()).sum::<usize>(),
            parts,
            head_in: [0; FRAME_BYTES],
            head_got: 0,
            header: None,
            into,
            got: 0,
        }
    }

    fn is_sent(&self) -> bool {
        self.sent == self.to_send
    }

    fn is_received(&self) -> bool {
        self.header.is_some() && self.got == self.into.len()
    }

    /// One write; whether it moved anything.
    fn send(&mut self) -> io::Result<bool> {
        let mut skip = self.sent;
        let mut slices = Vec::with_capacity(PARTS_MAX);
        for part in std::iter::once(&self.head[..]).chain(self.parts.iter().copied()) {
            if skip < part.len() && slices.len() < PARTS_MAX {
                slices.push(IoSlice::new(&part[skip..]));
            }
            skip = skip.saturating_sub(part.len());
        }
        let mut socket = self.socket;
        let n = moved(socket.write_vectored(&slices))?;
        self.sent += n;
        Ok(n > 0)
    }

    /// One read, of the head or of the payload; whether it moved anything. The head is judged by `call`.
    fn receive(&mut self, call: &Call) -> Result<bool, Failure> {
        let mut socket = self.socket;
        let target = if self.header.is_none() {
            &mut self.head_in[self.head_got..]
        } else {
            &mut self.into[self.got..]
        };
        let n = match socket.read(target) {
            Ok(0) => return Err(Failure::Ended),
            read => moved(read).map_err(|_| Failure::Ended)?,
        };
        if self.header.is_some() {
            self.got += n;
        } else {
            self.head_got += n;
            if self.head_got == FRAME_BYTES {
                self.header = Some(self.judge(call).map_err(Failure::Nonsense)?);
            }
        }
        Ok(n > 0)
    }

    /// The peer's header, equal to ours or not. What is said beside it must fit if the calls are equal.
    fn judge(&self, call: &Call) -> Result<Header, String> {
        let frame = Frame::decode(&self.head_in)?;
        if frame.phase != self.phase {
            return Err(format!(
                "a frame of phase {:?}, expected {:?}",
                frame.phase, self.phase
            ));
        }
        if frame.header == call.header && frame.payload != self.into.len() as u64 {
            return Err(format!(
                "a payload of {} bytes, expected {}",
                frame.payload,
                self.into.len()
            ));
        }
        if frame.header != call.header && self.phase == Phase::Second {
            return Err(format!(
                "a result of {} #{}",
                frame.header, frame.header.operation.seq
            ));
        }
        Ok(frame.header)
    }

    /// Waits for readiness of what is still to be done.
    fn interest(&self, differs: bool) -> PollFlags {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::OUT, !self.is_sent());
        flags.set(
            PollFlags::IN,
            self.header.is_none() || (!differs && !self.is_received()),
        );
        flags
    }
}

/// Why a peer's connection is of no more use.
enum Failure {
    Ended,
    Nonsense(String),
}

/// Bytes moved; none when the socket is not ready.
fn moved(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
            ) =>
        {
            Ok(0)
        }
        result => result,
    }
}

/// Moves everything; returns when the last peer's head had come. When heads differ, collects them all, so that every
/// rank reports the same mismatch, and reads no payload.
pub(super) fn drive(
    flows: &mut [Flow<'_>],
    call: &Call,
    rank: usize,
    vigil: &Vigil<'_>,
) -> Result<Instant, Error> {
    let mut ready = None;
    loop {
        let mut progress = false;
        let differing = differs(flows, call);
        for flow in flows.iter_mut() {
            if !flow.is_sent() {
                progress |= flow.send().map_err(|_| ended(flow.peer, vigil))?;
            }
            if flow.header.is_none() || (!differing && !flow.is_received()) {
                progress |= flow.receive(call).map_err(|failure| match failure {
                    Failure::Ended => ended(flow.peer, vigil),
                    Failure::Nonsense(reason) => Error::Wire {
                        peer: flow.peer,
                        during: Some(vigil.operation),
                        reason,
                    },
                })?;
            }
        }
        if flows.iter().all(|flow| flow.header.is_some()) {
            ready.get_or_insert_with(Instant::now);
            if differs(flows, call) && flows.iter().all(|flow| flow.sent >= FRAME_BYTES) {
                agree(&headers(flows, call, rank))?;
            }
        }
        match ready {
            Some(ready)
                if flows
                    .iter()
                    .all(|flow| flow.is_sent() && flow.is_received()) =>
            {
                return Ok(ready);
            }
            _ if progress => continue,
            _ => {}
        }
        vigil.check(|| missing(flows))?;
        let fds = flows
            .iter()
            .map(|flow| PollFd::new(flow.socket, flow.interest(differing)));
        let mut fds: Vec<PollFd<'_>> = fds.collect();
        // A failing poll is a lack of memory; the next turn finds out what the sockets say.
        let _ = poll_for(&mut fds, SLICE.min(vigil.timeout));
    }
}

fn differs(flows: &[Flow<'_>], call: &Call) -> bool {
    flows
        .iter()
        .any(|flow| flow.header.is_some_and(|header| header != call.header))
}

/// All ranks' headers, in rank order.
fn headers(flows: &[Flow<'_>], call: &Call, rank: usize) -> Vec<Header> {
    let mut headers: Vec<Header> = flows.iter().filter_map(|flow| flow.header).collect();
    headers.insert(rank.min(headers.len()), call.header);
    headers
}

/// Who is waited for: ranks that have not come, else those whose data is late, else those that do not read.
fn missing(flows: &[Flow<'_>]) -> Vec<usize> {
    let those = |late: &dyn Fn(&Flow<'_>) -> bool| -> Vec<usize> {
        flows
            .iter()
            .filter(|flow| late(flow))
            .map(|flow| flow.peer)
            .collect()
    };
    let stages: [&dyn Fn(&Flow<'_>) -> bool; 3] = [
        &|flow| flow.header.is_none(),
        &|flow| !flow.is_received(),
        &|flow| !flow.is_sent(),
    ];
    stages
        .into_iter()
        .map(those)
        .find(|late| !late.is_empty())
        .unwrap_or_default()
}

/// The data connection to a peer has ended; why is on its way on the other connection.
fn ended(peer: usize, vigil: &Vigil<'_>) -> Error {
    vigil.cause_of_end(peer, CAUSE_TIMEOUT)
}
