//! What ranks tell each other beside their data: farewells, and what a rank is doing.
//!
//! ```text
//! byte 0   magic "PM", version 2, zero
//! byte 4   payload length, u32 little endian, at most 16384
//! byte 8   the message as JSON
//! ```

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// Longest payload: room for a text of which every byte has to be escaped.
const PAYLOAD_BYTES_MAX: usize = 16 << 10;
/// Longest text that is sent.
const TEXT_BYTES_MAX: usize = 2000;
const HEAD_BYTES: usize = 8;
const MAGIC: [u8; 4] = *b"PM\x02\0";

/// A message between two ranks of one group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// The operation that it is in.
    pub(crate) seq: Option<u64>,
    /// The end of "rank 2 ...".
    pub(crate) text: String,
}

/// Why a group is broken, in a form that survives the wire.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Abort {
    /// The rank that gave up.
    pub(crate) by: usize,
    pub(crate) culprit: Option<usize>,
    pub(crate) cause: Cause,
    pub(crate) text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Cause {
    Other,
    Deadline,
    Mismatch { seq: u64 },
}

impl Abort {
    /// What rank `me` tells its peers about its failure.
    pub(crate) fn of(me: usize, error: &Error) -> Self {
        let cause = match error {
            Error::Mismatch { seq, .. } => Cause::Mismatch { seq: *seq },
            error if error.is_deadline() => Cause::Deadline,
            _ => Cause::Other,
        };
        let (by, text) = match error {
            // Handed on as it came, so that everybody knows the rank that was first.
            Error::Aborted { by, cause, .. } => (*by, cause.clone()),
            Error::AbortedHere { cause, .. } => (me, cause.clone()),
            Error::Mismatch { calls, .. } => (me, calls.clone()),
            other => (me, other.to_string()),
        };
        let culprit = error.culprit();
        Self {
            by,
            culprit,
            cause,
            text,
        }
    }

    /// The error on the rank that is told. A mismatch becomes the error that every rank makes of it by itself.
    pub(crate) fn into_error(self) -> Error {
        match self.cause {
            Cause::Mismatch { seq } => Error::Mismatch {
                seq,
                calls: self.text,
                culprit: self.culprit,
            },
            cause => Error::Aborted {
                by: self.by,
                culprit: self.culprit,
                cause: self.text,
                deadline: cause == Cause::Deadline,
            },
        }
    }
}

impl Message {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut message = self.clone();
        if let Self::Abort(Abort { text, .. }) | Self::Tell(Answer { text, .. }) = &mut message {
            text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
        }
        let payload = serde_json::to_vec(&message).expect("a message has string keys only");
        let length = (payload.len() as u32).to_le_bytes();
        [&MAGIC[..], &length, &payload].concat()
    }

    /// Takes the first complete message out of what has arrived so far; `None` when there is none yet.
    ///
    /// *Errors*: bytes that no correct peer sends. Nothing more can be read from that peer.
    pub(crate) fn take(arrived: &mut Vec<u8>) -> Result<Option<Self>, String> {
        let Some(head) = arrived.first_chunk::<HEAD_BYTES>() else {
            return Ok(None);
        };
        if head[..4] != MAGIC {
            return Err(format!("a message begins with {head:02x?}"));
        }
        let length = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        if length > PAYLOAD_BYTES_MAX {
            return Err(format!(
                "a message of {length} bytes, at most {PAYLOAD_BYTES_MAX} are allowed"
            ));
        }
        let Some(payload) = arrived.get(HEAD_BYTES..HEAD_BYTES + length) else {
            return Ok(None);
        };
        let message = serde_json::from_slice(payload)
            .map_err(|error| format!("a message that is unreadable: {error}"))?;
        arrived.drain(..HEAD_BYTES + length);
        Ok(Some(message))
    }
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
        let mut bytes = MAGIC.to_vec();
        bytes.extend(u32::MAX.to_le_bytes());
        assert!(
            Message::take(&mut bytes)
                .unwrap_err()
                .contains("at most 16384")
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
        fn any_payload_is_a_message_or_an_error(payload in prop::collection::vec(any::<u8>(), 0..40)) {
            let mut bytes = MAGIC.to_vec();
            bytes.extend((payload.len() as u32).to_le_bytes());
            bytes.extend(payload);
            if let Ok(message) = Message::take(&mut bytes) {
                let message = message.expect("all of it is there");
                prop_assert!(bytes.is_empty());
                prop_assert_eq!(Message::take(&mut message.encode()).unwrap(), Some(message));
            }
        }

        #[test]
        fn any_text_survives_up_to_its_longest(text in any::<String>()) {
            let mut bytes = abort(&text.repeat(2000 / text.len().max(1))).encode();
            prop_assert!(bytes.len() <= HEAD_BYTES + PAYLOAD_BYTES_MAX);
            let Some(Message::Abort(abort)) = Message::take(&mut bytes).unwrap() else { panic!("no abort") };
            prop_assert_eq!(abort.text, text.repeat(2000 / text.len().max(1)));
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
