//! The parts that messages are made of: written into one buffer, read without believing a length.

use std::sync::Arc;

use super::{HEAD_BYTES, Value, WireError};
use crate::store::{KEY_BYTES_MAX, VALUE_BYTES_MAX};

/// Writes a frame behind the buffer's content.
pub(super) fn frame(buffer: &mut Vec<u8>, write_body: impl FnOnce(&mut Vec<u8>)) {
    let start = buffer.len();
    buffer.extend_from_slice(&[0; HEAD_BYTES]);
    write_body(buffer);
    let bytes = (buffer.len() - start - HEAD_BYTES) as u32;
    buffer[start..start + HEAD_BYTES].copy_from_slice(&bytes.to_le_bytes());
}

/// Refuses a body that goes on behind its message.
pub(super) fn end(rest: &[u8]) -> Result<(), WireError> {
    match rest.len() {
        0 => Ok(()),
        bytes => Err(WireError::Trailing { bytes }),
    }
}

/// A part of a message. Lengths fit when it is written: callers have checked keys and values against their bounds.
pub(super) trait Field<'a>: Sized {
    fn write(&self, buffer: &mut Vec<u8>);

    /// Reads the part at the start of `body`, which is the rest afterwards; `name` is for errors.
    fn read(body: &mut &'a [u8], name: &'static str) -> Result<Self, WireError>;
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Field<'_> for $number {
            fn write(&self, buffer: &mut Vec<u8>) {
                buffer.extend_from_slice(&self.to_le_bytes());
            }

            fn read(body: &mut &[u8], name: &'static str) -> Result<Self, WireError> {
                let bytes = body.split_off(..size_of::<Self>());
                let bytes = bytes.and_then(<[u8]>::as_array);
                bytes.map(|bytes| Self::from_le_bytes(*bytes)).ok_or(WireError::Cut { field: name })
            }
        }
    )*};
}

numbers!(u8, u16, u32, u64, i64);

impl Field<'_> for bool {
    fn write(&self, buffer: &mut Vec<u8>) {
        buffer.push(u8::from(*self));
    }

    fn read(body: &mut &[u8], field: &'static str) -> Result<Self, WireError> {
        match u8::read(body, field)? {
            value @ (0 | 1) => Ok(value == 1),
            value => Err(WireError::Unknown { field, value }),
        }
    }
}

/// A key.
impl<'a> Field<'a> for &'a str {
    fn write(&self, buffer: &mut Vec<u8>) {
        (self.len() as u16).write(buffer);
        buffer.extend_from_slice(self.as_bytes());
    }

    fn read(body: &mut &'a [u8], _name: &'static str) -> Result<Self, WireError> {
        let bytes = usize::from(u16::read(body, "key")?);
        let key = bounded(body, bytes, KEY_BYTES_MAX, "key")?;
        std::str::from_utf8(key).map_err(|_| WireError::KeyText)
    }
}

/// A value.
impl<'a> Field<'a> for &'a [u8] {
    fn write(&self, buffer: &mut Vec<u8>) {
        (self.len() as u32).write(buffer);
        buffer.extend_from_slice(self);
    }

    fn read(body: &mut &'a [u8], _name: &'static str) -> Result<Self, WireError> {
        let bytes = u32::read(body, "value")? as usize;
        bounded(body, bytes, VALUE_BYTES_MAX, "value")
    }
}

impl Field<'_> for String {
    fn write(&self, buffer: &mut Vec<u8>) {
        self.as_str().write(buffer);
    }

    fn read(body: &mut &[u8], name: &'static str) -> Result<Self, WireError> {
        <&str>::read(body, name).map(Self::from)
    }
}

impl Field<'_> for Value {
    fn write(&self, buffer: &mut Vec<u8>) {
        self.as_slice().write(buffer);
    }

    fn read(body: &mut &[u8], name: &'static str) -> Result<Self, WireError> {
        <&[u8]>::read(body, name).map(|value| Arc::new(value.to_vec()))
    }
}

/// Nothing is reserved for the count: it is only believed as far as the bytes go.
impl<'a, F: Field<'a>> Field<'a> for Vec<F> {
    fn write(&self, buffer: &mut Vec<u8>) {
        (self.len() as u32).write(buffer);
        self.iter().for_each(|field| field.write(buffer));
    }

    fn read(body: &mut &'a [u8], name: &'static str) -> Result<Self, WireError> {
        let count = u32::read(body, name)?;
        (0..count).map(|_| F::read(body, name)).collect()
    }
}

impl<'a, A: Field<'a>, B: Field<'a>> Field<'a> for (A, B) {
    fn write(&self, buffer: &mut Vec<u8>) {
        self.0.write(buffer);
        self.1.write(buffer);
    }

    fn read(body: &mut &'a [u8], name: &'static str) -> Result<Self, WireError> {
        Ok((A::read(body, name)?, B::read(body, name)?))
    }
}

fn bounded<'a>(
    body: &mut &'a [u8],
    bytes: usize,
    max: usize,
    field: &'static str,
) -> Result<&'a [u8], WireError> {
    if bytes > max {
        return Err(WireError::FieldTooLong { field, bytes, max });
    }
    body.split_off(..bytes).ok_or(WireError::Cut { field })
}
