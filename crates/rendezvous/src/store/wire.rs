//! The store's messages, byte by byte.
//!
//! ```text
//! frame    u32 bytes of body   body
//!
//! request  u8 operation        fields                       answered with
//!          1  set              key value                    done, full
//!          2  get              timeout key                  value, timed out
//!          3  wait             timeout keys                 done, timed out
//!          4  check            keys                         flag
//!          5  add              key i64                      number, no number, full
//!          6  compare-set      key value(expected) value    value, full
//!          7  delete           key                          flag
//!          9  list             u32 most  key(prefix)        keys
//!          10 multi-get        timeout keys                 values, timed out, too large
//!          11 multi-set        u32 count, each key value    done, full
//!          any other                                        unknown operation
//!
//! reply    u8 status           fields
//!          0  done
//!          1  value            the rest of the body
//!          2  number           i64
//!          3  flag             u8, 0 or 1
//!          4  timed out        keys that are missing
//!          5  no number                                     add to another kind of value
//!          6  full
//!          7  values           u32 count, each a value
//!          8  keys             u8, 1 when there are more, keys
//!          9  too large        u64 bytes                    that the answer would have
//!          10 unknown operation u8 operation
//!
//! key      u16 bytes, UTF-8       keys     u32 count, each a key
//! value    u32 bytes, bytes       timeout  u64 milliseconds
//! ```
//!
//! Numbers are little-endian. A frame's length is checked before anything is allocated, and nothing in a body is
//! allocated for an announced length: a field's bytes must be there. The version is part of the purpose that both
//! sides prove ([`super::PURPOSE`]), so authentication fails between versions.

mod fields;

use self::fields::{Fields, Frame};
use super::{KEY_BYTES_MAX, VALUE_BYTES_MAX};

/// Bytes before a body.
pub(super) const HEAD_BYTES: usize = 4;
/// Longest body: compare-set with two values.
pub(super) const BODY_BYTES_MAX: usize = 2 * VALUE_BYTES_MAX + KEY_BYTES_MAX + 64;
/// Longest body of a message that carries no value; bounds what waiting clients hold.
pub(super) const CONTROL_BYTES_MAX: usize = 1 << 20;

/// A client's request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request<'a> {
    Set {
        key: &'a str,
        value: &'a [u8],
    },
    Get {
        timeout_ms: u64,
        key: &'a str,
    },
    Wait {
        timeout_ms: u64,
        keys: Vec<&'a str>,
    },
    Check {
        keys: Vec<&'a str>,
    },
    Add {
        key: &'a str,
        amount: i64,
    },
    CompareSet {
        key: &'a str,
        expected: &'a [u8],
        new: &'a [u8],
    },
    Delete {
        key: &'a str,
    },
    List {
        most: u32,
        prefix: &'a str,
    },
    MultiGet {
        timeout_ms: u64,
        keys: Vec<&'a str>,
    },
    MultiSet {
        entries: Vec<(&'a str, &'a [u8])>,
    },
}

/// The server's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reply<'a> {
    Done,
    Value(&'a [u8]),
    Number(i64),
    Flag(bool),
    TimedOut { missing: Vec<&'a str> },
    NoNumber,
    Full,
    Values(Vec<&'a [u8]>),
    Keys { more: bool, keys: Vec<&'a str> },
    TooLarge { bytes: u64 },
    Unknown { operation: u8 },
}

/// Why bytes are not a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum WireError {
    #[error("a frame of {bytes} bytes, at most {max} are allowed")]
    TooLong { bytes: usize, max: usize },
    #[error("the message ends inside its {field}")]
    Cut { field: &'static str },
    #[error("{bytes} bytes behind the end of the message")]
    Trailing { bytes: usize },
    #[error("a {field} of {bytes} bytes, at most {max} are allowed")]
    FieldTooLong {
        field: &'static str,
        bytes: usize,
        max: usize,
    },
    #[error("a key that is not UTF-8")]
    KeyText,
    #[error("unknown {field} {value}")]
    Unknown { field: &'static str, value: u8 },
    #[error("unknown operation {operation}")]
    Operation { operation: u8 },
}

/// The body's length from a frame's head.
pub(super) fn body_bytes(head: [u8; HEAD_BYTES]) -> Result<usize, WireError> {
    let bytes = u32::from_le_bytes(head) as usize;
    if bytes > BODY_BYTES_MAX {
        Err(WireError::TooLong {
            bytes,
            max: BODY_BYTES_MAX,
        })
    } else {
        Ok(bytes)
    }
}

impl<'a> Request<'a> {
    /// Writes the frame behind what the buffer holds.
    pub(super) fn encode_into(&self, buffer: &mut Vec<u8>) {
        let frame = Frame::begin(buffer).u8(self.operation());
        match self {
            Self::Set { key, value } => frame.key(key).value(value),
            Self::Get { timeout_ms, key } => frame.u64(*timeout_ms).key(key),
            Self::Wait { timeout_ms, keys } | Self::MultiGet { timeout_ms, keys } => {
                frame.u64(*timeout_ms).keys(keys)
            }
            Self::Check { keys } => frame.keys(keys),
            Self::Add { key, amount } => frame.key(key).u64(amount.cast_unsigned()),
            Self::CompareSet { key, expected, new } => frame.key(key).value(expected).value(new),
            Self::Delete { key } => frame.key(key),
            Self::List { most, prefix } => frame.u32(*most).key(prefix),
            Self::MultiSet { entries } => {
                let frame = frame.u32(entries.len() as u32);
                entries
                    .iter()
                    .fold(frame, |frame, (key, value)| frame.key(key).value(value))
            }
        }
        .finish();
    }

    pub(super) fn decode(body: &'a [u8]) -> Result<Self, WireError> {
        let mut fields = Fields(body);
        let operation = fields.u8("operation")?;
        if !matches!(operation, 1 | 6 | 11) && body.len() > CONTROL_BYTES_MAX {
            return Err(WireError::TooLong {
                bytes: body.len(),
                max: CONTROL_BYTES_MAX,
            });
        }
        let request = match operation {
            1 => Self::Set {
                key: fields.key()?,
                value: fields.value()?,
            },
            2 => Self::Get {
                timeout_ms: fields.u64("timeout")?,
                key: fields.key()?,
            },
            3 => Self::Wait {
                timeout_ms: fields.u64("timeout")?,
                keys: fields.keys()?,
            },
            4 => Self::Check {
                keys: fields.keys()?,
            },
            5 => Self::Add {
                key: fields.key()?,
                amount: fields.u64("amount")?.cast_signed(),
            },
            6 => Self::CompareSet {
                key: fields.key()?,
                expected: fields.value()?,
                new: fields.value()?,
            },
            7 => Self::Delete { key: fields.key()? },
            9 => Self::List {
                most: fields.u32("most")?,
                prefix: fields.key()?,
            },
            10 => Self::MultiGet {
                timeout_ms: fields.u64("timeout")?,
                keys: fields.keys()?,
            },
            11 => Self::MultiSet {
                entries: fields.entries()?,
            },
            operation => return Err(WireError::Operation { operation }),
        };
        fields.end()?;
        Ok(request)
    }

    fn operation(&self) -> u8 {
        match self {
            Self::Set { .. } => 1,
            Self::Get { .. } => 2,
            Self::Wait { .. } => 3,
            Self::Check { .. } => 4,
            Self::Add { .. } => 5,
            Self::CompareSet { .. } => 6,
            Self::Delete { .. } => 7,
            Self::List { .. } => 9,
            Self::MultiGet { .. } => 10,
            Self::MultiSet { .. } => 11,
        }
    }
}

impl<'a> Reply<'a> {
    /// Writes the frame behind what the buffer holds.
    pub(super) fn encode_into(&self, buffer: &mut Vec<u8>) {
        let frame = Frame::begin(buffer);
        match self {
            Self::Done => frame.u8(0),
            Self::Value(value) => frame.u8(1).raw(value),
            Self::Number(number) => frame.u8(2).u64(number.cast_unsigned()),
            Self::Flag(flag) => frame.u8(3).u8(u8::from(*flag)),
            Self::TimedOut { missing } => frame.u8(4).keys(missing),
            Self::NoNumber => frame.u8(5),
            Self::Full => frame.u8(6),
            Self::Values(values) => {
                let frame = frame.u8(7).u32(values.len() as u32);
                values.iter().fold(frame, |frame, value| frame.value(value))
            }
            Self::Keys { more, keys } => frame.u8(8).u8(u8::from(*more)).keys(keys),
            Self::TooLarge { bytes } => frame.u8(9).u64(*bytes),
            Self::Unknown { operation } => frame.u8(10).u8(*operation),
        }
        .finish();
    }

    pub(super) fn decode(body: &'a [u8]) -> Result<Self, WireError> {
        let mut fields = Fields(body);
        let reply = match fields.u8("status")? {
            0 => Self::Done,
            1 => Self::Value(std::mem::take(&mut fields.0)),
            2 => Self::Number(fields.u64("number")?.cast_signed()),
            3 => Self::Flag(fields.flag("flag")?),
            4 => Self::TimedOut {
                missing: fields.keys()?,
            },
            5 => Self::NoNumber,
            6 => Self::Full,
            7 => Self::Values(fields.values()?),
            8 => Self::Keys {
                more: fields.flag("more")?,
                keys: fields.keys()?,
            },
            9 => Self::TooLarge {
                bytes: fields.u64("bytes")?,
            },
            10 => Self::Unknown {
                operation: fields.u8("operation")?,
            },
            value => {
                return Err(WireError::Unknown {
                    field: "status",
                    value,
                });
            }
        };
        fields.end()?;
        Ok(reply)
    }

    /// The part of a value's frame before the value, so that a long one need not be copied.
    pub(super) fn value_head(value_bytes: usize) -> [u8; HEAD_BYTES + 1] {
        let mut head = [1; HEAD_BYTES + 1];
        head[..HEAD_BYTES].copy_from_slice(&(1 + value_bytes as u32).to_le_bytes());
        head
    }

    /// The part of a frame of values before the first value; each then has its length before it.
    pub(super) fn values_head(count: usize, body_bytes: usize) -> [u8; HEAD_BYTES + 5] {
        let mut head = [7; HEAD_BYTES + 5];
        head[..HEAD_BYTES].copy_from_slice(&(body_bytes as u32).to_le_bytes());
        head[HEAD_BYTES + 1..].copy_from_slice(&(count as u32).to_le_bytes());
        head
    }
}

#[cfg(test)]
mod tests;
