//! What each request does, without sockets.

use proptest::prelude::*;

use super::*;

fn value(bytes: &[u8]) -> Reply {
    Reply::Value(Arc::new(bytes.to_vec()))
}

#[test]
fn requests_do_what_torchs_store_does() {
    use Outcome::{Answer as Now, Appeared};
    use Request::{Add, Check, CompareSet, Delete, Get, Set};
    let mut table = Table::new(1 << 20);
    let wait_for = |key: &str| Outcome::Wait {
        missing: vec![key.into()],
        timeout_ms: 5,
    };
    for (request, expected) in [
        (
            Get {
                timeout_ms: 5,
                key: "a",
            },
            wait_for("a"),
        ),
        (
            Set {
                key: "a",
                value: b"1",
            },
            Appeared(Reply::Done),
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
            Now(Reply::Flag(false)),
        ),
        (Check { keys: vec!["a"] }, Now(Reply::Flag(true))),
        (Check { keys: vec![] }, Now(Reply::Flag(true))),
        (
            Request::Wait {
                timeout_ms: 5,
                keys: vec!["a", "b"],
            },
            wait_for("b"),
        ),
        (
            Request::Wait {
                timeout_ms: 5,
                keys: vec!["a"],
            },
            Now(Reply::Done),
        ),
        (
            Add {
                key: "n",
                amount: 3,
            },
            Appeared(Reply::Number(3)),
        ),
        (
            Add {
                key: "n",
                amount: -5,
            },
            Appeared(Reply::Number(-2)),
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
            Appeared(Reply::Done),
        ),
        (
            Add {
                key: "t",
                amount: 1,
            },
            Now(Reply::NoNumber),
        ),
        (
            Set {
                key: "m",
                value: b"9223372036854775807",
            },
            Appeared(Reply::Done),
        ),
        (
            Add {
                key: "m",
                amount: 1,
            },
            Now(Reply::NoNumber),
        ),
        (
            CompareSet {
                key: "c",
                expected: b"x",
                new: b"y",
            },
            Now(value(b"x")),
        ),
        (Check { keys: vec!["c"] }, Now(Reply::Flag(false))),
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
        (Delete { key: "c" }, Now(Reply::Flag(true))),
        (Delete { key: "c" }, Now(Reply::Flag(false))),
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
        Outcome::Appeared(Reply::Done)
    );
    assert_eq!(
        table.apply(&Request::Set {
            key: "b",
            value: &[0; 10]
        }),
        Outcome::Answer(Reply::Full)
    );
    assert_eq!(
        table.apply(&Request::Set {
            key: "b",
            value: &[0; 9]
        }),
        Outcome::Appeared(Reply::Done)
    );
    assert_eq!(
        table.apply(&Request::Set {
            key: "a",
            value: &[1; 9]
        }),
        Outcome::Appeared(Reply::Done)
    );
    assert_eq!(
        table.apply(&Request::Add {
            key: "c",
            amount: 1
        }),
        Outcome::Answer(Reply::Full)
    );
    table.apply(&Request::Delete { key: "a" });
    table.apply(&Request::Delete { key: "b" });
    assert_eq!(table.bytes(), 0);
}

#[test]
fn a_value_that_an_answer_carries_is_counted_beside_its_successor() {
    let mut table = Table::new(1000);
    let set = |value| Request::Set { key: "a", value };
    table.apply(&set(&[1; 400]));
    let get = Request::Get {
        timeout_ms: 0,
        key: "a",
    };
    let carried = table.apply(&get);
    let again = set(&[2; 400]);
    assert_eq!(table.apply(&again), Outcome::Answer(Reply::Full));
    drop(carried);
    assert!(matches!(table.apply(&again), Outcome::Appeared(_)));
}

/// What the table should count, looked up anew.
fn counted(table: &Table) -> usize {
    let entries = table.entries.iter();
    let entries: usize = entries
        .map(|(key, value)| cost(key, value.capacity()))
        .sum();
    let leaving: usize = table.leaving.iter().map(|value| value.capacity()).sum();
    entries + leaving
}

proptest! {
    #[test]
    fn every_byte_is_counted_once_whatever_comes(
        steps in prop::collection::vec((0..7_u8, 0..3_usize, 0..400_usize), 0..200),
    ) {
        const BYTES_MAX: usize = 4000;
        let mut table = Table::new(BYTES_MAX);
        let mut carried: Vec<Reply> = Vec::new();
        for (step, key, len) in steps {
            let key = ["a", "bb", "ccc"][key];
            let bytes = vec![b'1'; len];
            let request = match step {
                0 | 1 => Request::Set { key, value: &bytes },
                2 => Request::Delete { key },
                3 => Request::MultiSet { entries: vec![(key, &bytes), ("a", &bytes), (key, b"")] },
                4 => Request::Get { timeout_ms: 0, key },
                5 => {
                    carried.clear();
                    Request::Add { key, amount: 1 }
                }
                _ => Request::CompareSet { key, expected: b"", new: &bytes },
            };
            // Large values are what answers carry for a while.
            if let Outcome::Answer(answer @ Reply::Value(_)) = table.apply(&request) {
                carried.push(answer);
            }
            prop_assert_eq!(table.bytes(), counted(&table));
            prop_assert!(table.bytes() <= BYTES_MAX);
        }
        for key in ["a", "bb", "ccc"] {
            table.delete(key);
        }
        carried.clear();
        table.sweep();
        prop_assert_eq!(table.bytes(), 0);
    }
}

#[test]
fn a_folder_counts_the_keys_that_lie_in_it_themselves() {
    let mut table = Table::new(1 << 20);
    let count = |table: &mut Table, folder: &str| match table.apply(&Request::Count { folder }) {
        Outcome::Answer(Reply::Number(number)) => number,
        other => panic!("{other:?}"),
    };
    for key in ["a/b/0", "a/b/1", "a/b/1", "a/b/deep/2", "a/bc/0", "a"] {
        let value = b"";
        table.apply(&Request::Set { key, value });
    }
    for (folder, expected) in [("a/b", 2), ("a/b/deep", 1), ("a", 0), ("", 1), ("c", 0)] {
        assert_eq!(count(&mut table, folder), expected, "{folder:?}");
    }
    for key in ["a/b/0", "a/b/0", "a/b/1"] {
        table.apply(&Request::Delete { key });
    }
    assert_eq!(count(&mut table, "a/b"), 0);
    assert_eq!(count(&mut table, "a/b/deep"), 1);
}
