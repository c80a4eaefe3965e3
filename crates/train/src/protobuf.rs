//! Messages of Protocol Buffers, as far as files of other programs need them: fields are written in order, by their numbers.
//!
//! *Source*: the encoding guide of Protocol Buffers.

/// Wire types.
const VARINT: u64 = 0;
const FIXED_64: u64 = 1;
const BYTES: u64 = 2;
const FIXED_32: u64 = 5;

/// A message that is being written.
#[derive(Default)]
pub(crate) struct Message(Vec<u8>);

impl Message {
    pub(crate) fn number(&mut self, field: u64, number: u64) {
        self.varint(field << 3 | VARINT);
        self.varint(number);
    }

    pub(crate) fn float(&mut self, field: u64, number: f32) {
        self.varint(field << 3 | FIXED_32);
        self.0.extend(number.to_le_bytes());
    }

    pub(crate) fn double(&mut self, field: u64, number: f64) {
        self.varint(field << 3 | FIXED_64);
        self.0.extend(number.to_le_bytes());
    }

    pub(crate) fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.varint(field << 3 | BYTES);
        self.varint(bytes.len() as u64);
        self.0.extend(bytes);
    }

    pub(crate) fn text(&mut self, field: u64, text: &str) {
        self.bytes(field, text.as_bytes());
    }

    pub(crate) fn message(&mut self, field: u64, message: &Self) {
        self.bytes(field, &message.0);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The encoded message.
    pub(crate) fn encoded(self) -> Vec<u8> {
        self.0
    }

    fn varint(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }
}
