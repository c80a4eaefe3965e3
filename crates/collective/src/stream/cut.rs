//! How what goes over a connection is cut, and in which order it goes: pure functions that both ends compute.
//!
//! Every item (an input that a peer's task reads, or a result that it is given) is cut into pieces. Pieces go by number:
//! first piece 0 of all inputs, then piece 1 of all, and so on; the piece of a result goes [`LAG`] steps later than the
//! piece of the inputs that it is made of. So nobody waits in a circle: whatever a step waits for is of an earlier step,
//! or of the same one and an earlier stage of *send input, fold, send result*.

use std::ops::Range;

/// Most connections of one pair.
pub(crate) const LANES_MAX: usize = paceline_rendezvous::env::SOCKETS_PER_PEER_MAX;

/// Steps by which results follow inputs; at most [`RING`].
pub(super) const LAG: usize = 2;
/// Pieces of one input that may be here without having been folded, and of one result without having been sent.
pub(super) const RING: usize = 4;

/// Longest piece: large enough that system calls do not count, small enough that a piece which was just received is
/// still in the second-level cache when it is folded and sent on. Of 64, 96, 128, 192, 256 and 512 KiB the ones in the
/// middle took the least time of the processor for 16 MiB between two ranks on loopback, with 1 MiB of such a cache.
const PIECE_BYTES_MAX: usize = 128 << 10;
/// Shortest piece of an item that is cut at all.
const PIECE_BYTES_MIN: usize = 32 << 10;
/// What one piece from each rank of a group may take together before pieces become smaller.
const STEP_BYTES: usize = 1 << 20;
/// Pieces that an item shorter than that many of the longest ones is cut into, so that its stages still overlap.
const PIECES_MIN: usize = 4;
/// Pieces begin on multiples of a cache line.
const LINE_BYTES: usize = 64;
/// A piece goes over so many lanes that each has this much of it: less is not worth a system call.
const PORTION_BYTES_MIN: usize = 16 << 10;

/// Length of the pieces of an item of `bytes` bytes in a group of `world` ranks.
pub(super) fn piece_bytes(bytes: usize, world: usize) -> usize {
    let most = (STEP_BYTES / world.max(1)).clamp(PIECE_BYTES_MIN, PIECE_BYTES_MAX);
    let even = bytes.div_ceil(PIECES_MIN).next_multiple_of(LINE_BYTES);
    even.clamp(PIECE_BYTES_MIN, most)
}

/// The part of a piece of `bytes` bytes that goes over one lane of several.
pub(super) fn portion(bytes: usize, lanes: usize, lane: usize) -> Range<usize> {
    let lanes = lanes.min(bytes / PORTION_BYTES_MIN).max(1);
    if lane >= lanes {
        return 0..0;
    }
    let lines = bytes.div_ceil(LINE_BYTES);
    let bound = |lane: usize| (lines * lane / lanes * LINE_BYTES).min(bytes);
    bound(lane)..bound(lane + 1)
}

/// What is known of an item by its length alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) bytes: usize,
    pub(super) piece_bytes: usize,
    /// The step of its first piece.
    pub(super) lag: usize,
}

impl Cut {
    pub(super) fn pieces(&self) -> usize {
        self.bytes.div_ceil(self.piece_bytes)
    }

    /// The bytes of one piece.
    pub(super) fn piece(&self, number: usize) -> Range<usize> {
        let start = number * self.piece_bytes;
        start..(start + self.piece_bytes).min(self.bytes)
    }
}

/// Where a lane is in the order of pieces.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Cursor {
    step: usize,
    item: usize,
    /// Bytes of the lane's portion of the current piece that have gone already.
    pub(super) gone: usize,
}

impl Cursor {
    /// The current item and piece; nothing at the end.
    pub(super) fn seek<T: AsRef<Cut>>(&mut self, items: &[T]) -> Option<(usize, usize)> {
        let mut later = false;
        let mut wrapped = self.item == 0;
        loop {
            let Some(item) = items.get(self.item) else {
                if wrapped && !later {
                    return None;
                }
                (self.item, self.step) = (0, self.step + 1);
                (wrapped, later) = (true, false);
                continue;
            };
            let cut = item.as_ref();
            match self.step.checked_sub(cut.lag) {
                None => later |= cut.bytes > 0,
                Some(piece) if piece < cut.pieces() => return Some((self.item, piece)),
                Some(_) => {}
            }
            self.item += 1;
        }
    }

    /// On to the next piece.
    pub(super) fn pass(&mut self) {
        self.item += 1;
        self.gone = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl AsRef<Cut> for Cut {
        fn as_ref(&self) -> &Cut {
            self
        }
    }

    #[test]
    fn pieces_cover_every_length_and_stay_in_bounds() {
        for bytes in [1, 63, 64, 32 << 10, (32 << 10) + 1, 1 << 20, (5 << 20) + 8] {
            for world in [2, 3, 8, 64, 4096] {
                let cut = Cut {
                    bytes,
                    piece_bytes: piece_bytes(bytes, world),
                    lag: 0,
                };
                assert!((PIECE_BYTES_MIN..=PIECE_BYTES_MAX).contains(&cut.piece_bytes));
                assert_eq!(cut.piece_bytes % LINE_BYTES, 0);
                let mut next = 0;
                for number in 0..cut.pieces() {
                    assert_eq!(cut.piece(number).start, next);
                    assert!(!cut.piece(number).is_empty());
                    next = cut.piece(number).end;
                }
                assert_eq!(next, bytes);
            }
        }
    }

    #[test]
    fn portions_cover_every_piece() {
        for bytes in [
            0,
            1,
            2 * PORTION_BYTES_MIN - 1,
            2 * PORTION_BYTES_MIN,
            100_001,
            256 << 10,
        ] {
            for lanes in 1..=LANES_MAX {
                let mut next = 0;
                for lane in 0..lanes {
                    let part = portion(bytes, lanes, lane);
                    assert!(
                        part.is_empty() || part.start == next,
                        "{bytes} over {lanes}"
                    );
                    next = next.max(part.end);
                }
                assert_eq!(next, bytes);
            }
        }
    }

    fn order(items: &[Cut]) -> Vec<(usize, usize)> {
        let mut cursor = Cursor::default();
        let mut order = Vec::new();
        while let Some(at) = cursor.seek(items) {
            order.push(at);
            cursor.pass();
        }
        order
    }

    #[test]
    fn pieces_go_by_number_and_results_later() {
        let cut = |bytes, lag| Cut {
            bytes,
            piece_bytes: 10,
            lag,
        };
        assert_eq!(
            order(&[cut(25, 0), cut(10, 0), cut(11, LAG)]),
            [(0, 0), (1, 0), (0, 1), (0, 2), (2, 0), (2, 1)]
        );
        assert_eq!(order(&[cut(0, 0), cut(11, LAG)]), [(1, 0), (1, 1)]);
        assert_eq!(
            order(&[cut(11, LAG), cut(31, 0)]),
            [(1, 0), (1, 1), (0, 0), (1, 2), (0, 1), (1, 3)]
        );
        assert_eq!(order(&[]), []);
        assert_eq!(order(&[cut(0, LAG)]), []);
    }
}
