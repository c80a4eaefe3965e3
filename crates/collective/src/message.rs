//! What ranks tell each other beside their data: farewells, and what a rank is doing.
//!
//! ```text
//! byte 0   magic 0x50 0x4D        byte 4   payload length, u32 little endian, at most 2048
//! byte 2   version                byte 8   payload
//! byte 3   kind
//!
//! kind 1 goodbye   u64 last operation
//! kind 2 abort     u32 rank that gave up, u32 culprit or !0, u8 cause (0 other, 1 deadline, 2 mismatch), u64 operation, text
//! kind 3 ask       nothing
//! kind 4 tell      u64 operation that the rank is in or 0, text
//! ```

use crate::error::Error;

/// Longest payload.
pub(crate) const PAYLOAD_BYTES_MAX: usize = 2048;
const HEAD_BYTES: usize = 8;
const MAGIC: [u8; 2] = [0x50, 0x4D];
const VERSION: u8 = 1;
const ABORT_BYTES: usize = 17;

/// A message between two ranks of one group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// This rank leaves; it took part in all operations up to this one.
    Goodbye { after: u64 },
    /// The group is broken.
    Abort(Abort),
    /// What are you doing?
    Ask,
    /// What this rank is doing.
    Tell(Answer),
}

/// What a rank says when it is asked what it is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    /// The operation that it is in.
    pub(crate) seq: Option<u64>,
    /// The end of "rank 2 ...".
    pub(crate) text: String,
}

/// Why a group is broken, in a form that survives the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Abort {
    pub(crate) by: usize,
    pub(crate) culprit: Option<usize>,
    pub(crate) cause: Cause,
    pub(crate) text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    Other,
    Deadline,
    Mismatch { seq: u64 },
}

impl Abort {
    /// What rank `me` tells its peers about its failure.
    pub(crate) fn of(me: usize, error: &Error) -> Self {
        let culprit = error.culprit();
        match error {
            // Handed on as it came, so that everybody knows the rank that was first.
            Error::Aborted {
                by,
                cause,
                deadline,
                ..
            } => {
                let kind = if *deadline {
                    Cause::Deadline
                } else {
                    Cause::Other
                };
                Self {
                    by: *by,
                    culprit,
                    cause: kind,
                    text: cause.clone(),
                }
            }
            Error::AbortedHere { cause, .. } => Self {
                by: me,
                culprit,
                cause: Cause::Other,
                text: cause.clone(),
            },
            Error::Mismatch { seq, calls, .. } => Self {
                by: me,
                culprit,
                cause: Cause::Mismatch { seq: *seq },
                text: calls.clone(),
            },
            other => {
                let cause = if other.is_deadline() {
                    Cause::Deadline
                } else {
                    Cause::Other
                };
                Self {
                    by: me,
                    culprit,
                    cause,
                    text: other.to_string(),
                }
            }
        }
    }

    /// The error on the rank that is told. A mismatch becomes the error that every rank makes of it by itself.
    pub(crate) fn into_error(self) -> Error {
        let Self {
            by,
            culprit,
            cause,
            text,
        } = self;
        match cause {
            Cause::Mismatch { seq } => Error::Mismatch {
                seq,
                calls: text,
                culprit,
            },
            Cause::Other => Error::Aborted {
                by,
                culprit,
                cause: text,
                deadline: false,
            },
            Cause::Deadline => Error::Aborted {
                by,
                culprit,
                cause: text,
                deadline: true,
            },
        }
    }
}

impl Message {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut payload = Vec::new();
        let kind = match self {
            Self::Goodbye { after } => {
                payload.extend(after.to_le_bytes());
                1
            }
            Self::Abort(abort) => {
                let (cause, seq) = match abort.cause {
                    Cause::Other => (0, 0),
                    Cause::Deadline => (1, 0),
                    Cause::Mismatch { seq } => (2, seq),
                };
                payload.extend((abort.by as u32).to_le_bytes());
                payload.extend(
                    abort
                        .culprit
                        .map_or(u32::MAX, |rank| rank as u32)
                        .to_le_bytes(),
                );
                payload.push(cause);
                payload.extend(seq.to_le_bytes());
                payload.extend(cut(&abort.text, PAYLOAD_BYTES_MAX - ABORT_BYTES).as_bytes());
                2
            }
            Self::Ask => 3,
            Self::Tell(answer) => {
                payload.extend(answer.seq.unwrap_or(0).to_le_bytes());
                payload.extend(cut(&answer.text, PAYLOAD_BYTES_MAX - 8).as_bytes());
                4
            }
        };
        let mut bytes = vec![MAGIC[0], MAGIC[1], VERSION, kind];
        bytes.extend((payload.len() as u32).to_le_bytes());
        bytes.extend(payload);
        bytes
    }

    /// Takes the first complete message out of what has arrived so far; `None` when there is none yet.
    ///
    /// *Errors*: bytes that no correct peer sends. Nothing more can be read from that peer.
    pub(crate) fn take(arrived: &mut Vec<u8>) -> Result<Option<Self>, String> {
        let Some(head) = arrived.first_chunk::<HEAD_BYTES>() else {
            return Ok(None);
        };
        if head[..2] != MAGIC || head[2] != VERSION {
            return Err(format!("a message begins with {head:02x?}"));
        }
        let kind = head[3];
        let length = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        if length > PAYLOAD_BYTES_MAX {
            return Err(format!(
                "a message of {length} bytes, at most {PAYLOAD_BYTES_MAX} are allowed"
            ));
        }
        let Some(payload) = arrived.get(HEAD_BYTES..HEAD_BYTES + length) else {
            return Ok(None);
        };
        let message = Self::decode(kind, payload)?;
        arrived.drain(..HEAD_BYTES + length);
        Ok(Some(message))
    }

    fn decode(kind: u8, payload: &[u8]) -> Result<Self, String> {
        let short = || format!("a message of kind {kind} with {} bytes", payload.len());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match kind {
            1 => Ok(Self::Goodbye {
                after: u64::from_le_bytes(payload.try_into().map_err(|_| short())?),
            }),
            2 => {
                let (head, rest) = payload
                    .split_first_chunk::<ABORT_BYTES>()
                    .ok_or_else(short)?;
                let number = |at: usize| {
                    u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]])
                };
                let seq = u64::from(number(9)) | u64::from(number(13)) << 32;
                let cause = match head[8] {
                    0 => Cause::Other,
                    1 => Cause::Deadline,
                    2 => Cause::Mismatch { seq },
                    other => return Err(format!("an abort with cause {other}")),
                };
                let culprit = Some(number(4))
                    .filter(|rank| *rank != u32::MAX)
                    .map(|rank| rank as usize);
                Ok(Self::Abort(Abort {
                    by: number(0) as usize,
                    culprit,
                    cause,
                    text: text(rest),
                }))
            }
            3 if payload.is_empty() => Ok(Self::Ask),
            3 => Err(short()),
            4 => {
                let (seq, rest) = payload.split_first_chunk().ok_or_else(short)?;
                let seq = Some(u64::from_le_bytes(*seq)).filter(|seq| *seq != 0);
                Ok(Self::Tell(Answer {
                    seq,
                    text: text(rest),
                }))
            }
            _ => Err(format!("a message of unknown kind {kind}")),
        }
    }
}

/// The longest prefix of at most `bytes_max` bytes that ends on a character.
fn cut(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn abort(text: &str) -> Message {
        Message::Abort(Abort {
            by: 3,
            culprit: Some(1),
            cause: Cause::Mismatch { seq: 1 << 40 | 7 },
            text: text.into(),
        })
    }

    #[test]
    fn messages_survive_in_pieces() {
        let all = [
            Message::Goodbye { after: 12 },
            abort("no"),
            Message::Ask,
            Message::Tell(Answer {
                seq: Some(9),
                text: "is asleep".into(),
            }),
            Message::Tell(Answer {
                seq: None,
                text: String::new(),
            }),
        ];
        let bytes: Vec<u8> = all.iter().flat_map(Message::encode).collect();
        let (mut arrived, mut seen) = (Vec::new(), Vec::new());
        for byte in bytes {
            arrived.push(byte);
            seen.extend(Message::take(&mut arrived).unwrap());
        }
        assert_eq!(seen, all);
        assert!(arrived.is_empty());
    }

    #[test]
    fn long_texts_are_cut_on_a_character() {
        let mut bytes = abort(&"ä".repeat(3000)).encode();
        assert!(bytes.len() <= HEAD_BYTES + PAYLOAD_BYTES_MAX);
        let Some(Message::Abort(abort)) = Message::take(&mut bytes).unwrap() else {
            panic!("no abort")
        };
        assert!(abort.text.chars().all(|c| c == 'ä'));
    }

    #[test]
    fn an_oversized_message_is_refused_before_it_is_read() {
        let mut bytes = vec![0x50, 0x4D, 1, 4];
        bytes.extend(u32::MAX.to_le_bytes());
        assert!(
            Message::take(&mut bytes)
                .unwrap_err()
                .contains("at most 2048")
        );
    }

    #[test]
    fn an_abort_that_is_handed_on_names_the_first_rank() {
        let first = Error::Aborted {
            by: 5,
            culprit: Some(4),
            cause: "tired".into(),
            deadline: true,
        };
        let again = Abort::of(2, &first).into_error();
        assert_eq!(again.to_string(), first.to_string());
        assert!(again.is_deadline());
    }

    /// Files are named after what they are: `good-*` is one message, encoded as these very bytes; `lossy-*` is one that is
    /// written differently; `short-*` may become one; `bad-*` never does.
    #[test]
    fn the_saved_corpus_is_judged_as_its_names_say() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/corpus/message");
        let mut seen = std::collections::BTreeMap::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let mut arrived = bytes.clone();
            let judged = match Message::take(&mut arrived) {
                Ok(Some(message)) => {
                    assert!(arrived.is_empty(), "{name}");
                    let again = message.encode();
                    assert_eq!(
                        Message::take(&mut again.clone()).unwrap(),
                        Some(message),
                        "{name}"
                    );
                    if again == bytes { "good" } else { "lossy" }
                }
                Ok(None) => "short",
                Err(reason) => {
                    assert!(!reason.is_empty());
                    "bad"
                }
            };
            assert_eq!(name.split_once('-').unwrap().0, judged, "{name}");
            *seen.entry(judged).or_insert(0) += 1;
        }
        assert!(
            seen.len() == 4 && seen["good"] >= 8 && seen["bad"] >= 10,
            "{seen:?}"
        );
    }

    proptest! {
        #[test]
        fn any_payload_of_any_kind_is_a_message_or_an_error(
            kind in any::<u8>(), payload in prop::collection::vec(any::<u8>(), 0..40)
        ) {
            let mut bytes = vec![MAGIC[0], MAGIC[1], VERSION, kind];
            bytes.extend((payload.len() as u32).to_le_bytes());
            bytes.extend(payload);
            if let Ok(message) = Message::take(&mut bytes) {
                let message = message.expect("all of it is there");
                prop_assert!(bytes.is_empty());
                prop_assert_eq!(Message::take(&mut message.encode()).unwrap(), Some(message));
            }
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error(mut bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let before = bytes.len();
            if let Ok(Some(_)) = Message::take(&mut bytes) {
                prop_assert!(bytes.len() <= before - HEAD_BYTES);
            }
        }

        #[test]
        fn a_flipped_bit_never_panics(at in 0_usize..40, bit in 0..8) {
            let mut bytes = abort("some words").encode();
            let at = at % bytes.len();
            bytes[at] ^= 1_u8 << bit;
            let _ = Message::take(&mut bytes);
        }
    }
}
