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
//!          12 count            key(folder)                  number
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

use std::sync::Arc;

use self::fields::{Field, end, frame};
use super::{KEY_BYTES_MAX, VALUE_BYTES_MAX};

/// Bytes before a body.
pub(super) const HEAD_BYTES: usize = 4;
/// Longest body: compare-set with two values.
pub(super) const BODY_BYTES_MAX: usize = 2 * VALUE_BYTES_MAX + KEY_BYTES_MAX + 64;
/// Longest body of a message that carries no value; bounds what waiting clients hold.
pub(super) const CONTROL_BYTES_MAX: usize = 1 << 20;

/// Declares the requests: the code on the wire, the name in errors, and the fields in the order in which they are sent.
macro_rules! requests {
    ($($code:literal $name:literal $variant:ident { $($field:ident: $type:ty),+ })*) => {
        /// A client's request.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub(super) enum Request<'a> {
            $($variant { $($field: $type),+ }),*
        }

        impl<'a> Request<'a> {
            /// Its name in errors.
            pub(super) fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant { .. } => $name),*
                }
            }

            /// Writes the frame behind the buffer's content.
            pub(super) fn encode_into(&self, buffer: &mut Vec<u8>) {
                frame(buffer, |buffer| match self {
                    $(Self::$variant { $($field),+ } => {
                        buffer.push($code);
                        $($field.write(buffer);)+
                    })*
                });
            }

            fn read(operation: u8, from: &mut &'a [u8]) -> Result<Self, WireError> {
                Ok(match operation {
                    $($code => Self::$variant {
                        $($field: Field::read(from, stringify!($field))?),+
                    },)*
                    operation => return Err(WireError::Operation { operation }),
                })
            }
        }
    };
}

requests! {
    1 "set" Set { key: &'a str, value: &'a [u8] }
    2 "get" Get { timeout_ms: u64, key: &'a str }
    3 "wait" Wait { timeout_ms: u64, keys: Vec<&'a str> }
    4 "check" Check { keys: Vec<&'a str> }
    5 "add" Add { key: &'a str, amount: i64 }
    6 "compare-set" CompareSet { key: &'a str, expected: &'a [u8], new: &'a [u8] }
    7 "delete" Delete { key: &'a str }
    9 "list" List { most: u32, prefix: &'a str }
    10 "multi-get" MultiGet { timeout_ms: u64, keys: Vec<&'a str> }
    11 "multi-set" MultiSet { entries: Vec<(&'a str, &'a [u8])> }
    12 "count" Count { folder: &'a str }
}

/// A value, which the server shares between its table and the answers that are being sent.
pub(super) type Value = Arc<Vec<u8>>;

/// The server's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reply {
    Done,
    Value(Value),
    Number(i64),
    Flag(bool),
    TimedOut { missing: Vec<String> },
    NoNumber,
    Full,
    Values(Vec<Value>),
    Keys { more: bool, keys: Vec<String> },
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
    pub(super) fn decode(mut body: &'a [u8]) -> Result<Self, WireError> {
        let bytes = body.len();
        let operation = u8::read(&mut body, "operation")?;
        if !matches!(operation, 1 | 6 | 11) && bytes > CONTROL_BYTES_MAX {
            return Err(WireError::TooLong {
                bytes,
                max: CONTROL_BYTES_MAX,
            });
        }
        let request = Self::read(operation, &mut body)?;
        end(body)?;
        Ok(request)
    }
}

impl Reply {
    /// Writes the frame behind the buffer's content.
    pub(super) fn encode_into(&self, buffer: &mut Vec<u8>) {
        fn coded<'f>(buffer: &mut Vec<u8>, code: u8, field: &impl Field<'f>) {
            buffer.push(code);
            field.write(buffer);
        }
        frame(buffer, |buffer| match self {
            Self::Done => buffer.push(0),
            Self::Value(value) => {
                buffer.push(1);
                buffer.extend_from_slice(value);
            }
            Self::Number(number) => coded(buffer, 2, number),
            Self::Flag(flag) => coded(buffer, 3, flag),
            Self::TimedOut { missing } => coded(buffer, 4, missing),
            Self::NoNumber => buffer.push(5),
            Self::Full => buffer.push(6),
            Self::Values(values) => coded(buffer, 7, values),
            Self::Keys { more, keys } => {
                coded(buffer, 8, more);
                keys.write(buffer);
            }
            Self::TooLarge { bytes } => coded(buffer, 9, bytes),
            Self::Unknown { operation } => coded(buffer, 10, operation),
        });
    }

    pub(super) fn decode(mut body: &[u8]) -> Result<Self, WireError> {
        let from = &mut body;
        let reply = match u8::read(from, "status")? {
            0 => Self::Done,
            1 => Self::Value(Arc::new(std::mem::take(from).to_vec())),
            2 => Self::Number(Field::read(from, "number")?),
            3 => Self::Flag(Field::read(from, "flag")?),
            4 => Self::TimedOut {
                missing: Field::read(from, "keys")?,
            },
            5 => Self::NoNumber,
            6 => Self::Full,
            7 => Self::Values(Field::read(from, "values")?),
            8 => Self::Keys {
                more: Field::read(from, "more")?,
                keys: Field::read(from, "keys")?,
            },
            9 => Self::TooLarge {
                bytes: Field::read(from, "bytes")?,
            },
            10 => Self::Unknown {
                operation: Field::read(from, "operation")?,
            },
            value => {
                let field = "status";
                return Err(WireError::Unknown { field, value });
            }
        };
        end(body)?;
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
