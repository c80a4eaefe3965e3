//! What the store holds and what a request does to it: no sockets, no clock, no waiting.

use std::collections::HashMap;
use std::sync::Arc;

use super::wire::{Reply, Request};

/// What an entry costs beside its key and value, so that many empty ones are bounded too.
const ENTRY_BYTES: usize = 128;

/// Keys and values, of bounded total size.
pub(super) struct Table {
    entries: HashMap<Box<str>, Arc<[u8]>>,
    bytes: usize,
    bytes_max: usize,
}

/// A reply whose value is shared with the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    Done,
    Value(Arc<[u8]>),
    Number(i64),
    Flag(bool),
    TimedOut { missing: Vec<String> },
    NoNumber,
    Full,
}

/// What becomes of a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It is answered.
    Answer(Answer),
    /// It is answered, and now the key has a value: whoever waits for it goes on.
    Appeared(Answer),
    /// It waits until these keys are there.
    Park {
        missing: Vec<String>,
        timeout_ms: u64,
    },
}

impl Table {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            entries: HashMap::new(),
            bytes: 0,
            bytes_max,
        }
    }

    /// Memory in use, by the table's own reckoning.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn get(&self, key: &str) -> Option<Arc<[u8]>> {
        self.entries.get(key).cloned()
    }

    /// Carries out a request. torch's TCPStore sets the meaning of `add` and `compare_set`.
    pub(super) fn apply(&mut self, request: &Request<'_>) -> Outcome {
        match request {
            Request::Set { key, value } => self.store(key, value, Answer::Done),
            Request::Get { timeout_ms, key } => match self.get(key) {
                Some(value) => Outcome::Answer(Answer::Value(value)),
                None => Outcome::Park {
                    missing: vec![(*key).to_owned()],
                    timeout_ms: *timeout_ms,
                },
            },
            Request::Wait { timeout_ms, keys } => {
                let missing = self.missing(keys);
                if missing.is_empty() {
                    return Outcome::Answer(Answer::Done);
                }
                Outcome::Park {
                    missing,
                    timeout_ms: *timeout_ms,
                }
            }
            Request::Check { keys } => Outcome::Answer(Answer::Flag(self.missing(keys).is_empty())),
            Request::Add { key, amount } => self.add(key, *amount),
            Request::CompareSet { key, expected, new } => self.compare_set(key, expected, new),
            Request::Delete { key } => {
                let removed = self.entries.remove(*key);
                if let Some(value) = &removed {
                    self.bytes -= cost(key, value.len());
                }
                Outcome::Answer(Answer::Flag(removed.is_some()))
            }
        }
    }

    /// The value is ASCII decimal; a missing key counts as 0.
    fn add(&mut self, key: &str, amount: i64) -> Outcome {
        let current = match self.entries.get(key) {
            None => Some(0),
            Some(value) => std::str::from_utf8(value)
                .ok()
                .and_then(|text| text.parse::<i64>().ok()),
        };
        match current.and_then(|current| current.checked_add(amount)) {
            Some(sum) => self.store(key, sum.to_string().as_bytes(), Answer::Number(sum)),
            None => Outcome::Answer(Answer::NoNumber),
        }
    }

    fn compare_set(&mut self, key: &str, expected: &[u8], new: &[u8]) -> Outcome {
        match self.get(key) {
            Some(current) if *current != *expected => Outcome::Answer(Answer::Value(current)),
            None if !expected.is_empty() => Outcome::Answer(Answer::Value(expected.into())),
            _ => self.store(key, new, Answer::Value(new.into())),
        }
    }

    fn store(&mut self, key: &str, value: &[u8], answer: Answer) -> Outcome {
        let freed = self.entries.get(key).map_or(0, |old| cost(key, old.len()));
        let bytes = self.bytes - freed + cost(key, value.len());
        if bytes > self.bytes_max {
            return Outcome::Answer(Answer::Full);
        }
        self.bytes = bytes;
        self.entries.insert(key.into(), value.into());
        Outcome::Appeared(answer)
    }

    fn missing(&self, keys: &[&str]) -> Vec<String> {
        let absent = keys.iter().filter(|key| !self.entries.contains_key(**key));
        absent.map(|key| (*key).to_owned()).collect()
    }
}

impl Answer {
    /// The frame: what comes first, and the shared value behind it.
    pub(super) fn frame(self) -> (Vec<u8>, Option<Arc<[u8]>>) {
        let reply = match &self {
            Self::Value(value) => return (Reply::value_head(value.len()), Some(value.clone())),
            Self::Done => Reply::Done,
            Self::Number(number) => Reply::Number(*number),
            Self::Flag(flag) => Reply::Flag(*flag),
            Self::TimedOut { missing } => Reply::TimedOut {
                missing: missing.iter().map(String::as_str).collect(),
            },
            Self::NoNumber => Reply::NoNumber,
            Self::Full => Reply::Full,
        };
        (reply.encode(), None)
    }
}

fn cost(key: &str, value_bytes: usize) -> usize {
    key.len() + value_bytes + ENTRY_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(bytes: &[u8]) -> Answer {
        Answer::Value(bytes.into())
    }

    #[test]
    fn requests_do_what_torchs_store_does() {
        use Outcome::{Answer as Now, Appeared};
        use Request::{Add, Check, CompareSet, Delete, Get, Set};
        let mut table = Table::new(1 << 20);
        let park = |key: &str| Outcome::Park {
            missing: vec![key.into()],
            timeout_ms: 5,
        };
        for (request, expected) in [
            (
                Get {
                    timeout_ms: 5,
                    key: "a",
                },
                park("a"),
            ),
            (
                Set {
                    key: "a",
                    value: b"1",
                },
                Appeared(Answer::Done),
            ),
            (
                Get {
                    timeout_ms: 5,
                    key: "a",
                },
                Now(value(b"1")),
            ),
            (
                Check {
                    keys: vec!["a", "b"],
                },
                Now(Answer::Flag(false)),
            ),
            (Check { keys: vec!["a"] }, Now(Answer::Flag(true))),
            (Check { keys: vec![] }, Now(Answer::Flag(true))),
            (
                Request::Wait {
                    timeout_ms: 5,
                    keys: vec!["a", "b"],
                },
                park("b"),
            ),
            (
                Request::Wait {
                    timeout_ms: 5,
                    keys: vec!["a"],
                },
                Now(Answer::Done),
            ),
            (
                Add {
                    key: "n",
                    amount: 3,
                },
                Appeared(Answer::Number(3)),
            ),
            (
                Add {
                    key: "n",
                    amount: -5,
                },
                Appeared(Answer::Number(-2)),
            ),
            (
                Get {
                    timeout_ms: 5,
                    key: "n",
                },
                Now(value(b"-2")),
            ),
            (
                Set {
                    key: "t",
                    value: b"text",
                },
                Appeared(Answer::Done),
            ),
            (
                Add {
                    key: "t",
                    amount: 1,
                },
                Now(Answer::NoNumber),
            ),
            (
                Set {
                    key: "m",
                    value: b"9223372036854775807",
                },
                Appeared(Answer::Done),
            ),
            (
                Add {
                    key: "m",
                    amount: 1,
                },
                Now(Answer::NoNumber),
            ),
            (
                CompareSet {
                    key: "c",
                    expected: b"x",
                    new: b"y",
                },
                Now(value(b"x")),
            ),
            (Check { keys: vec!["c"] }, Now(Answer::Flag(false))),
            (
                CompareSet {
                    key: "c",
                    expected: b"",
                    new: b"y",
                },
                Appeared(value(b"y")),
            ),
            (
                CompareSet {
                    key: "c",
                    expected: b"x",
                    new: b"z",
                },
                Now(value(b"y")),
            ),
            (
                CompareSet {
                    key: "c",
                    expected: b"y",
                    new: b"z",
                },
                Appeared(value(b"z")),
            ),
            (Delete { key: "c" }, Now(Answer::Flag(true))),
            (Delete { key: "c" }, Now(Answer::Flag(false))),
        ] {
            assert_eq!(table.apply(&request), expected, "{request:?}");
        }
    }

    #[test]
    fn the_table_is_bounded_and_gets_its_room_back() {
        let mut table = Table::new(2 * (ENTRY_BYTES + 10));
        assert_eq!(
            table.apply(&Request::Set {
                key: "a",
                value: &[0; 9]
            }),
            Outcome::Appeared(Answer::Done)
        );
        assert_eq!(
            table.apply(&Request::Set {
                key: "b",
                value: &[0; 10]
            }),
            Outcome::Answer(Answer::Full)
        );
        assert_eq!(
            table.apply(&Request::Set {
                key: "b",
                value: &[0; 9]
            }),
            Outcome::Appeared(Answer::Done)
        );
        assert_eq!(
            table.apply(&Request::Set {
                key: "a",
                value: &[1; 9]
            }),
            Outcome::Appeared(Answer::Done)
        );
        assert_eq!(
            table.apply(&Request::Add {
                key: "c",
                amount: 1
            }),
            Outcome::Answer(Answer::Full)
        );
        table.apply(&Request::Delete { key: "a" });
        table.apply(&Request::Delete { key: "b" });
        assert_eq!(table.bytes(), 0);
    }
}
