//! The store's messages, byte by byte.
//!
//! ```text
//! frame    u32 bytes of body   body
//! request  u8 operation        fields              reply  u8 status   fields
//!          1 set          key value                       0 done
//!          2 get          timeout key                     1 value     the rest of the body
//!          3 wait         timeout keys                    2 number    i64
//!          4 check        keys                            3 flag      u8, 0 or 1
//!          5 add          key i64                         4 timed out keys that are missing
//!          6 compare-set  key value(expected) value(new)  5 no number (add to another kind of value)
//!          7 delete       key                             6 full
//!
//! key      u16 bytes, UTF-8       keys     u32 count, each a key
//! value    u32 bytes, bytes       timeout  u64 milliseconds
//! ```
//!
//! Numbers are little-endian. A frame's length is checked before anything is allocated, and nothing in a body is
//! allocated on the word of a length: a field's bytes must be there. The version is part of the purpose that both
//! sides prove ([`super::PURPOSE`]), so other versions meet at the door.

use super::{KEY_BYTES_MAX, VALUE_BYTES_MAX};

/// Bytes before a body.
pub(super) const HEAD_BYTES: usize = 4;
/// Longest body: compare-set with two values.
pub(super) const BODY_BYTES_MAX: usize = 2 * VALUE_BYTES_MAX + KEY_BYTES_MAX + 64;
/// Longest body of a request that carries no value; bounds what waiting clients hold.
pub(super) const CONTROL_BYTES_MAX: usize = 1 << 20;

/// What a client asks.
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
}

/// What the server answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reply<'a> {
    Done,
    Value(&'a [u8]),
    Number(i64),
    Flag(bool),
    TimedOut { missing: Vec<&'a str> },
    NoNumber,
    Full,
}

/// Why bytes are no message.
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
    #[error("a key that is no UTF-8")]
    KeyText,
    #[error("unknown {field} {value}")]
    Unknown { field: &'static str, value: u8 },
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
    pub(super) fn encode(&self) -> Vec<u8> {
        let frame = Frame::new();
        match self {
            Self::Set { key, value } => frame.u8(1).key(key).value(value),
            Self::Get { timeout_ms, key } => frame.u8(2).u64(*timeout_ms).key(key),
            Self::Wait { timeout_ms, keys } => frame.u8(3).u64(*timeout_ms).keys(keys),
            Self::Check { keys } => frame.u8(4).keys(keys),
            Self::Add { key, amount } => frame.u8(5).key(key).u64(amount.cast_unsigned()),
            Self::CompareSet { key, expected, new } => {
                frame.u8(6).key(key).value(expected).value(new)
            }
            Self::Delete { key } => frame.u8(7).key(key),
        }
        .finish()
    }

    pub(super) fn decode(body: &'a [u8]) -> Result<Self, WireError> {
        let mut fields = Fields(body);
        let operation = fields.u8("operation")?;
        if !matches!(operation, 1 | 6) && body.len() > CONTROL_BYTES_MAX {
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
            value => {
                return Err(WireError::Unknown {
                    field: "operation",
                    value,
                });
            }
        };
        fields.end()?;
        Ok(request)
    }
}

impl<'a> Reply<'a> {
    pub(super) fn encode(&self) -> Vec<u8> {
        let frame = Frame::new();
        match self {
            Self::Done => frame.u8(0),
            Self::Value(value) => frame.u8(1).raw(value),
            Self::Number(number) => frame.u8(2).u64(number.cast_unsigned()),
            Self::Flag(flag) => frame.u8(3).u8(u8::from(*flag)),
            Self::TimedOut { missing } => frame.u8(4).keys(missing),
            Self::NoNumber => frame.u8(5),
            Self::Full => frame.u8(6),
        }
        .finish()
    }

    /// The part of a value's frame before the value, so that the value itself need not be copied.
    pub(super) fn value_head(value_bytes: usize) -> Vec<u8> {
        let mut head = (1 + value_bytes as u32).to_le_bytes().to_vec();
        head.push(1);
        head
    }

    pub(super) fn decode(body: &'a [u8]) -> Result<Self, WireError> {
        let mut fields = Fields(body);
        let reply = match fields.u8("status")? {
            0 => Self::Done,
            1 => Self::Value(std::mem::take(&mut fields.0)),
            2 => Self::Number(fields.u64("number")?.cast_signed()),
            3 => match fields.u8("flag")? {
                value @ (0 | 1) => Self::Flag(value == 1),
                value => {
                    return Err(WireError::Unknown {
                        field: "flag",
                        value,
                    });
                }
            },
            4 => Self::TimedOut {
                missing: fields.keys()?,
            },
            5 => Self::NoNumber,
            6 => Self::Full,
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
}

/// A frame being written. Lengths fit: callers have checked keys and values against their bounds.
struct Frame(Vec<u8>);

impl Frame {
    fn new() -> Self {
        Self(vec![0; HEAD_BYTES])
    }

    fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn u8(self, value: u8) -> Self {
        self.raw(&[value])
    }

    fn u64(self, value: u64) -> Self {
        self.raw(&value.to_le_bytes())
    }

    fn key(self, key: &str) -> Self {
        self.raw(&(key.len() as u16).to_le_bytes())
            .raw(key.as_bytes())
    }

    fn keys(self, keys: &[&str]) -> Self {
        let frame = self.raw(&(keys.len() as u32).to_le_bytes());
        keys.iter().fold(frame, |frame, key| frame.key(key))
    }

    fn value(self, value: &[u8]) -> Self {
        self.raw(&(value.len() as u32).to_le_bytes()).raw(value)
    }

    fn finish(mut self) -> Vec<u8> {
        let bytes = (self.0.len() - HEAD_BYTES) as u32;
        self.0[..HEAD_BYTES].copy_from_slice(&bytes.to_le_bytes());
        self.0
    }
}

/// The part of a body that is not read yet.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
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

    fn u8(&mut self, field: &'static str) -> Result<u8, WireError> {
        Ok(u8::from_le_bytes(self.array(field)?))
    }

    fn u64(&mut self, field: &'static str) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array(field)?))
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

    fn key(&mut self) -> Result<&'a str, WireError> {
        let bytes = usize::from(u16::from_le_bytes(self.array("key")?));
        std::str::from_utf8(self.bounded(bytes, KEY_BYTES_MAX, "key")?)
            .map_err(|_| WireError::KeyText)
    }

    fn keys(&mut self) -> Result<Vec<&'a str>, WireError> {
        let count = u32::from_le_bytes(self.array("keys")?);
        // Not reserved: the count is only believed as far as the bytes go.
        (0..count).map(|_| self.key()).collect()
    }

    fn value(&mut self) -> Result<&'a [u8], WireError> {
        let bytes = u32::from_le_bytes(self.array("value")?) as usize;
        self.bounded(bytes, VALUE_BYTES_MAX, "value")
    }

    fn end(&self) -> Result<(), WireError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(WireError::Trailing {
                bytes: self.0.len(),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split(frame: &[u8]) -> &[u8] {
        let (head, body) = frame.split_at(HEAD_BYTES);
        assert_eq!(body_bytes(head.try_into().unwrap()).unwrap(), body.len());
        body
    }

    #[test]
    fn a_request_has_the_documented_bytes() {
        let frame = Request::Add {
            key: "ab",
            amount: -2,
        }
        .encode();
        assert_eq!(
            frame,
            b"\x0d\0\0\0\x05\x02\0ab\xfe\xff\xff\xff\xff\xff\xff\xff"
        );
    }

    #[test]
    fn an_oversized_frame_is_refused_by_its_head() {
        let head = |bytes: usize| body_bytes((bytes as u32).to_le_bytes());
        assert_eq!(head(BODY_BYTES_MAX), Ok(BODY_BYTES_MAX));
        assert!(matches!(
            head(BODY_BYTES_MAX + 1),
            Err(WireError::TooLong { .. })
        ));
        assert!(head(u32::MAX as usize).is_err());
    }

    #[test]
    fn malformed_bodies_are_told_apart() {
        for (body, expected) in [
            (&b""[..], WireError::Cut { field: "operation" }),
            (
                b"\x09",
                WireError::Unknown {
                    field: "operation",
                    value: 9,
                },
            ),
            (b"\x07\x02\0a", WireError::Cut { field: "key" }),
            (b"\x07\x01\0\xff", WireError::KeyText),
            (b"\x07\x01\0ab", WireError::Trailing { bytes: 1 }),
            (
                b"\x07\x01\x10",
                WireError::FieldTooLong {
                    field: "key",
                    bytes: 4097,
                    max: 4096,
                },
            ),
            (
                b"\x01\x01\0a\xff\xff\xff\xff",
                WireError::FieldTooLong {
                    field: "value",
                    bytes: 0xffff_ffff,
                    max: VALUE_BYTES_MAX,
                },
            ),
            (b"\x04\xff\xff\xff\xff", WireError::Cut { field: "key" }),
        ] {
            assert_eq!(Request::decode(body), Err(expected), "{body:?}");
        }
        let mut long = vec![4];
        long.resize(CONTROL_BYTES_MAX + 1, 0);
        assert!(matches!(
            Request::decode(&long),
            Err(WireError::TooLong { .. })
        ));
    }

    #[test]
    fn a_values_head_announces_the_same_frame() {
        let mut frame = Reply::value_head(3);
        frame.extend_from_slice(b"abc");
        assert_eq!(frame, Reply::Value(b"abc").encode());
    }

    proptest! {
        #[test]
        fn requests_go_there_and_back(key in "\\PC{0,40}", keys in prop::collection::vec("[a-z/]{0,9}", 0..9),
                                      value: Vec<u8>, new: Vec<u8>, timeout_ms: u64, amount: i64, which in 0..7) {
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            let request = match which {
                0 => Request::Set { key: &key, value: &value },
                1 => Request::Get { timeout_ms, key: &key },
                2 => Request::Wait { timeout_ms, keys },
                3 => Request::Check { keys },
                4 => Request::Add { key: &key, amount },
                5 => Request::CompareSet { key: &key, expected: &value, new: &new },
                _ => Request::Delete { key: &key },
            };
            let frame = request.encode();
            prop_assert_eq!(Request::decode(split(&frame)), Ok(request));
        }

        #[test]
        fn replies_go_there_and_back(keys in prop::collection::vec("[a-z/]{0,9}", 0..9), value: Vec<u8>, number: i64,
                                     flag: bool, which in 0..7) {
            let reply = match which {
                0 => Reply::Done,
                1 => Reply::Value(&value),
                2 => Reply::Number(number),
                3 => Reply::Flag(flag),
                4 => Reply::TimedOut { missing: keys.iter().map(String::as_str).collect() },
                5 => Reply::NoNumber,
                _ => Reply::Full,
            };
            let frame = reply.encode();
            prop_assert_eq!(Reply::decode(split(&frame)), Ok(reply));
        }

        #[test]
        fn any_bytes_decode_or_fail_and_what_decodes_encodes_to_the_same(body: Vec<u8>) {
            if let Ok(request) = Request::decode(&body) {
                let frame = request.encode();
                prop_assert_eq!(split(&frame), &body[..]);
            }
            if let Ok(reply) = Reply::decode(&body) {
                let frame = reply.encode();
                prop_assert_eq!(split(&frame), &body[..]);
            }
        }

        #[test]
        fn a_cut_request_never_decodes(value in prop::collection::vec(any::<u8>(), 1..50), cut in 1..50_usize) {
            let frame = Request::CompareSet { key: "key", expected: &value, new: &value }.encode();
            let body = split(&frame);
            prop_assert!(Request::decode(&body[..body.len() - cut.min(body.len())]).is_err());
        }
    }
}
