//! One wire to a peer: what has been read ahead from it, and where both directions are.
#![allow(unsafe_code)]

use std::io::IoSlice;

use super::Peer;
use super::board::{Board, Item};
use super::cut::{Cursor, portion};
use super::frame::FRAME_BYTES;
use super::wire::Wire;
use crate::socket::End;

/// Bytes read ahead at most: a small call's head and payload come with one system call.
pub(super) const INBOX_BYTES: usize = 16 << 10;
/// From this size on bytes are read straight to where they belong.
const DIRECT_BYTES_MIN: usize = 4 << 10;
/// Parts handed to one `writev`.
const PARTS_MAX: usize = 16;
/// Bytes handed to one `writev`, so that a rank alternates between sending, receiving and folding.
const SEND_BYTES_MAX: usize = 256 << 10;

/// A wire, with what is kept between rounds.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) wire: Wire,
    /// Read from the wire and not yet used: bytes `start..end`. The beginning of the next round may be among them.
    inbox: Box<[u8; INBOX_BYTES]>,
    start: usize,
    end: usize,
    pub(super) sending: Direction,
    pub(super) receiving: Direction,
}

/// How far one direction of a lane is in the round.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Direction {
    cursor: Cursor,
    pub(super) finished: bool,
    /// The next piece cannot go because of this rank's own work, not because of the peer.
    pub(super) held: bool,
}

impl Lane {
    pub(super) fn new(wire: Wire) -> Self {
        Self {
            wire,
            inbox: Box::new([0; INBOX_BYTES]),
            start: 0,
            end: 0,
            sending: Direction::default(),
            receiving: Direction::default(),
        }
    }

    pub(super) fn begin(&mut self) {
        self.sending = Direction::default();
        self.receiving = Direction::default();
    }

    /// Bytes of the head that are here, at most all of them.
    pub(super) fn read_head(&mut self) -> Result<Option<[u8; FRAME_BYTES]>, End> {
        if self.end - self.start < FRAME_BYTES && self.fill()? == 0 {
            return Ok(None);
        }
        let head = self.inbox[self.start..self.end].first_chunk::<FRAME_BYTES>();
        let head = head.copied();
        if head.is_some() {
            self.start += FRAME_BYTES;
        }
        Ok(head)
    }

    /// One read into the inbox.
    fn fill(&mut self) -> Result<usize, End> {
        if self.start > 0 {
            self.inbox.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let n = self.wire.read(&mut self.inbox[self.end..])?.unwrap_or(0);
        self.end += n;
        Ok(n)
    }
}

/// One write to the peer's `lane`; what was sent, the head not counted.
///
/// # Safety
///
/// As [`Streams::round`](super::Streams::round).
pub(super) unsafe fn send(peer: &mut Peer, lane: usize, board: &Board) -> Result<usize, End> {
    let lanes = peer.lanes.len();
    let Peer {
        lanes: all,
        outgoing,
        head,
        head_left,
        ..
    } = peer;
    let direction = &mut all[lane].sending;
    let head_part = if lane == 0 { *head_left } else { 0 };
    let mut parts = [IoSlice::new(&[]); PARTS_MAX];
    let (mut count, mut bytes) = (0, 0);
    if head_part > 0 {
        parts[0] = IoSlice::new(&head[FRAME_BYTES - head_part..]);
        (count, bytes) = (1, head_part);
    }
    let mut cursor = direction.cursor;
    direction.held = false;
    while count < PARTS_MAX && bytes < SEND_BYTES_MAX {
        let Some((item, piece)) = cursor.seek(outgoing) else {
            break;
        };
        let item = &outgoing[item];
        let part = lane_part(item, piece, lanes, lane, cursor.gone);
        if part.1 > 0 {
            if !board.can_send(item, piece) {
                direction.held = count == 0;
                break;
            }
            // SAFETY: the piece lies where the caller vouches for, and nobody writes to it before it has been sent: the
            // plan has no such task, and what makes the piece itself is done.
            parts[count] = IoSlice::new(unsafe { std::slice::from_raw_parts(part.0, part.1) });
            count += 1;
            bytes += part.1;
        }
        cursor.pass();
    }
    let mut sent = 0;
    if count > 0 {
        let n = all[lane].wire.write(&parts[..count])?;
        let of_head = n.min(head_part);
        *head_left -= of_head;
        sent = n - of_head;
        if of_head < head_part {
            return Ok(n);
        }
    }
    settle(&mut all[lane].sending, outgoing, lanes, lane, sent);
    Ok(sent + head_part)
}

/// Takes in what the peer has sent on `lane` and there is room for, with one read at most; how much that was.
///
/// # Safety
///
/// As [`Streams::round`](super::Streams::round).
pub(super) unsafe fn receive(
    peers: &mut [Option<Peer>],
    number: usize,
    lane: usize,
    board: &Board,
) -> Result<usize, End> {
    let mut total = 0;
    let mut may_read = true;
    loop {
        let peer = peers[number]
            .as_mut()
            .expect("only stream peers are active");
        let lanes = peer.lanes.len();
        // Passes portions of nothing, which need no room.
        settle(
            &mut peer.lanes[lane].receiving,
            &mut peer.incoming,
            lanes,
            lane,
            0,
        );
        let peer = peers[number]
            .as_ref()
            .expect("only stream peers are active");
        let mut cursor = peer.lanes[lane].receiving.cursor;
        let Some((at, piece)) = cursor.seek(&peer.incoming) else {
            return Ok(total);
        };
        let item = &peer.incoming[at];
        let (address, wanted) = lane_part(item, piece, lanes, lane, cursor.gone);
        let room = board.has_room(peers, item, piece);
        let peer = peers[number]
            .as_mut()
            .expect("only stream peers are active");
        let Peer {
            lanes: all,
            incoming,
            ..
        } = peer;
        let Lane {
            wire,
            inbox,
            start,
            end,
            receiving,
            ..
        } = &mut all[lane];
        receiving.held = !room;
        if !room {
            return Ok(total);
        }
        // SAFETY: the place is valid by the caller's contract; it holds what the peer overwrites, or is a free place of
        // a ring, so that nobody reads it now.
        let place = unsafe { std::slice::from_raw_parts_mut(address.cast_mut(), wanted) };
        let waiting = *end - *start;
        let n = if waiting > 0 {
            let n = waiting.min(wanted);
            place[..n].copy_from_slice(&inbox[*start..*start + n]);
            *start += n;
            n
        } else if !may_read {
            return Ok(total);
        } else if wanted >= DIRECT_BYTES_MIN {
            may_read = false;
            wire.read(place)?.unwrap_or(0)
        } else {
            may_read = false;
            match all[lane].fill()? {
                0 => return Ok(total),
                _ => continue,
            }
        };
        if n == 0 {
            return Ok(total);
        }
        total += n;
        settle(&mut all[lane].receiving, incoming, lanes, lane, n);
    }
}

/// The rest of a lane's portion of a piece: where it lies, and how long it is.
fn lane_part(
    item: &Item,
    piece: usize,
    lanes: usize,
    lane: usize,
    gone: usize,
) -> (*const u8, usize) {
    let part = portion(item.cut.piece(piece).len(), lanes, lane);
    let start = item.operand.piece(&item.cut, piece);
    (
        start.wrapping_add(part.start + gone).cast_const(),
        part.len() - gone,
    )
}

/// Moves on by `n` bytes, and past portions of nothing.
fn settle(direction: &mut Direction, items: &mut [Item], lanes: usize, lane: usize, mut n: usize) {
    loop {
        let Some((at, piece)) = direction.cursor.seek(items) else {
            direction.finished = true;
            return;
        };
        let item = &mut items[at];
        let portion = portion(item.cut.piece(piece).len(), lanes, lane).len();
        let rest = portion - direction.cursor.gone;
        if n < rest {
            direction.cursor.gone += n;
            return;
        }
        n -= rest;
        item.done[lane] += 1;
        direction.cursor.pass();
    }
}
