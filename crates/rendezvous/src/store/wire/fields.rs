//! The parts that messages are made of: written into one buffer, read without believing a length.

use super::{HEAD_BYTES, WireError};
use crate::store::{KEY_BYTES_MAX, VALUE_BYTES_MAX};

/// A frame being written behind whatever the buffer holds. Lengths fit: callers have checked keys and values against
/// their bounds.
pub(super) struct Frame<'b> {
    buffer: &'b mut Vec<u8>,
    start: usize,
}

impl<'b> Frame<'b> {
    pub(super) fn begin(buffer: &'b mut Vec<u8>) -> Self {
        let start = buffer.len();
        buffer.extend_from_slice(&[0; HEAD_BYTES]);
        Self { buffer, start }
    }

    pub(super) fn raw(self, bytes: &[u8]) -> Self {
        self.buffer.extend_from_slice(bytes);
        self
    }

    pub(super) fn u8(self, value: u8) -> Self {
        self.raw(&[value])
    }

    pub(super) fn u32(self, value: u32) -> Self {
        self.raw(&value.to_le_bytes())
    }

    pub(super) fn u64(self, value: u64) -> Self {
        self.raw(&value.to_le_bytes())
    }

    pub(super) fn key(self, key: &str) -> Self {
        self.raw(&(key.len() as u16).to_le_bytes())
            .raw(key.as_bytes())
    }

    pub(super) fn keys(self, keys: &[&str]) -> Self {
        let frame = self.u32(keys.len() as u32);
        keys.iter().fold(frame, |frame, key| frame.key(key))
    }

    pub(super) fn value(self, value: &[u8]) -> Self {
        self.u32(value.len() as u32).raw(value)
    }

    pub(super) fn finish(self) {
        let bytes = (self.buffer.len() - self.start - HEAD_BYTES) as u32;
        self.buffer[self.start..self.start + HEAD_BYTES].copy_from_slice(&bytes.to_le_bytes());
    }
}

/// The part of a body that is not read yet.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn u8(&mut self, field: &'static str) -> Result<u8, WireError> {
        Ok(u8::from_le_bytes(self.array(field)?))
    }

    pub(super) fn u32(&mut self, field: &'static str) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub(super) fn u64(&mut self, field: &'static str) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    pub(super) fn flag(&mut self, field: &'static str) -> Result<bool, WireError> {
        match self.u8(field)? {
            value @ (0 | 1) => Ok(value == 1),
            value => Err(WireError::Unknown { field, value }),
        }
    }

    pub(super) fn key(&mut self) -> Result<&'a str, WireError> {
        let bytes = usize::from(u16::from_le_bytes(self.array("key")?));
        std::str::from_utf8(self.bounded(bytes, KEY_BYTES_MAX, "key")?)
            .map_err(|_| WireError::KeyText)
    }

    pub(super) fn keys(&mut self) -> Result<Vec<&'a str>, WireError> {
        self.many("keys", Self::key)
    }

    pub(super) fn value(&mut self) -> Result<&'a [u8], WireError> {
        let bytes = self.u32("value")? as usize;
        self.bounded(bytes, VALUE_BYTES_MAX, "value")
    }

    pub(super) fn values(&mut self) -> Result<Vec<&'a [u8]>, WireError> {
        self.many("values", Self::value)
    }

    pub(super) fn entries(&mut self) -> Result<Vec<(&'a str, &'a [u8])>, WireError> {
        self.many("entries", |fields| Ok((fields.key()?, fields.value()?)))
    }

    pub(super) fn end(&self) -> Result<(), WireError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(WireError::Trailing {
                bytes: self.0.len(),
            })
        }
    }

    /// Nothing is reserved for the count: it is only believed as far as the bytes go.
    fn many<T>(
        &mut self,
        field: &'static str,
        mut one: impl FnMut(&mut Self) -> Result<T, WireError>,
    ) -> Result<Vec<T>, WireError> {
        let count = self.u32(field)?;
        (0..count).map(|_| one(self)).collect()
    }

    fn bounded(
        &mut self,
        bytes: usize,
        max: usize,
        field: &'static str,
    ) -> Result<&'a [u8], WireError> {
        if bytes > max {
            return Err(WireError::FieldTooLong { field, bytes, max });
        }
        self.take(bytes, field)
    }

    fn take(&mut self, bytes: usize, field: &'static str) -> Result<&'a [u8], WireError> {
        let (taken, rest) = self
            .0
            .split_at_checked(bytes)
            .ok_or(WireError::Cut { field })?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], WireError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N, field)?);
        Ok(array)
    }
}
