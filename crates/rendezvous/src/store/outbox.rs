//! Data on its way to one client: small answers gathered into one write, large values sent without a copy.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Write};
use std::sync::Arc;

use super::table::values_body_bytes;
use super::wire::{Reply, Value};

/// Values up to this length are copied behind their head: one buffer, and no count held on the table's value.
const COPIED_BYTES_MAX: usize = 8 << 10;
/// Segments in one write.
const SLICES_MAX: usize = 16;
/// Memory that an empty outbox keeps for the next answer.
const KEPT_BYTES: usize = 4 << 10;

enum Segment {
    Own(Vec<u8>),
    Shared(Value),
}

/// Bytes in the order in which they go out.
#[derive(Default)]
pub(super) struct Outbox {
    segments: VecDeque<Segment>,
    /// Bytes of the first segment that are out.
    sent: usize,
    /// Bytes of all segments.
    bytes: usize,
    /// Memory of the segments that are not shared with the table.
    own_bytes: usize,
    /// An emptied buffer, for the next answer.
    spare: Vec<u8>,
}

impl Outbox {
    pub(super) fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Bytes that wait, and those of the first segment that are out already.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Memory that is not counted elsewhere.
    pub(super) fn held_bytes(&self) -> usize {
        self.own_bytes + self.spare.capacity()
    }

    pub(super) fn push_bytes(&mut self, bytes: &[u8]) {
        self.write_own(|buffer| buffer.extend_from_slice(bytes));
    }

    pub(super) fn push_answer(&mut self, answer: &Reply) {
        match answer {
            Reply::Value(value) => {
                self.push_bytes(&Reply::value_head(value.len()));
                self.push_value(value);
            }
            Reply::Values(values) => {
                self.push_bytes(&Reply::values_head(values.len(), values_body_bytes(values)));
                for value in values {
                    self.push_bytes(&(value.len() as u32).to_le_bytes());
                    self.push_value(value);
                }
            }
            other => self.write_own(|buffer| other.encode_into(buffer)),
        }
    }

    /// Writes as much as the stream takes. Whether everything is out.
    pub(super) fn flush(&mut self, mut stream: impl Write) -> io::Result<bool> {
        while !self.is_empty() {
            match self.write_once(&mut stream) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => self.advance(bytes),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn push_value(&mut self, value: &Value) {
        if value.len() <= COPIED_BYTES_MAX {
            return self.push_bytes(value);
        }
        self.bytes += value.len();
        self.segments.push_back(Segment::Shared(Arc::clone(value)));
    }

    fn write_own(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        if !matches!(self.segments.back(), Some(Segment::Own(_))) {
            self.segments
                .push_back(Segment::Own(std::mem::take(&mut self.spare)));
        }
        if let Some(Segment::Own(buffer)) = self.segments.back_mut() {
            let before = buffer.len();
            write(buffer);
            self.bytes += buffer.len() - before;
            self.own_bytes += buffer.len() - before;
        }
    }

    fn write_once(&self, stream: &mut impl Write) -> io::Result<usize> {
        if let [Segment::Own(only)] = self.segments.as_slices().0
            && self.segments.len() == 1
        {
            return stream.write(&only[self.sent..]);
        }
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        let mut count = 0;
        for (slice, segment) in slices.iter_mut().zip(&self.segments) {
            let skipped = if count == 0 { self.sent } else { 0 };
            *slice = IoSlice::new(&segment.bytes()[skipped..]);
            count += 1;
        }
        stream.write_vectored(&slices[..count])
    }

    fn advance(&mut self, mut written: usize) {
        while let Some(first) = self.segments.front() {
            let len = first.bytes().len();
            let left = len - self.sent;
            if written < left {
                self.sent += written;
                return;
            }
            written -= left;
            self.sent = 0;
            self.bytes -= len;
            if let Some(Segment::Own(mut buffer)) = self.segments.pop_front() {
                self.own_bytes -= len;
                if buffer.capacity() <= KEPT_BYTES {
                    buffer.clear();
                    self.spare = buffer;
                }
            }
        }
    }
}

impl Segment {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Shared(value) => value,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes a few bytes at a time, and sometimes none.
    struct Slow {
        taken: Vec<u8>,
        most: usize,
        turn: usize,
    }

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.turn += 1;
            if self.turn.is_multiple_of(3) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let bytes = &bytes[..bytes.len().min(self.most)];
            self.taken.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn answers_go_out_in_order_whatever_the_socket_takes_at_a_time() {
        let value = |byte: u8, len: usize| Value::new(vec![byte; len]);
        let (small, large) = (value(1, 10), value(2, COPIED_BYTES_MAX + 1));
        let answers = [
            Reply::Value(small.clone()),
            Reply::Number(7),
            Reply::Values(vec![small, large.clone(), value(3, 0), large.clone()]),
            Reply::Value(large),
            Reply::Done,
        ];
        let mut expected = Vec::new();
        for answer in &answers {
            answer.encode_into(&mut expected);
        }
        for most in [1, 7, 4096, usize::MAX] {
            let mut outbox = Outbox::default();
            for answer in &answers {
                outbox.push_answer(answer);
            }
            assert_eq!(outbox.bytes(), expected.len());
            let mut slow = Slow {
                taken: Vec::new(),
                most,
                turn: 0,
            };
            while !outbox.flush(&mut slow).unwrap() {}
            assert!(slow.taken == expected && outbox.is_empty() && outbox.bytes() == 0);
            assert_eq!(outbox.own_bytes, 0);
        }
    }

    #[test]
    fn a_large_value_is_shared_and_a_small_one_copied() {
        let (small, large) = (Value::new(vec![0; 64]), Value::new(vec![0; 1 << 20]));
        let mut outbox = Outbox::default();
        outbox.push_answer(&Reply::Value(small.clone()));
        outbox.push_answer(&Reply::Value(large.clone()));
        assert_eq!(Arc::strong_count(&small), 1);
        assert_eq!(Arc::strong_count(&large), 2);
        assert!(outbox.held_bytes() < 256);
    }
}
