//! What no store may do otherwise. The tests of etcd include this file too.

use super::{Duration, Store, StoreError};

/// Opens handles to one and the same store.
pub(super) type Open<'a> = &'a dyn Fn() -> Box<dyn Store>;

pub(super) fn values_are_set_got_compared_counted_and_deleted(open: Open<'_>) {
    let store = open();
    store.set("key", b"value").unwrap();
    store.set("empty", b"").unwrap();
    assert_eq!(store.get("key", Duration::ZERO).unwrap(), b"value");
    assert_eq!(open().get("empty", Duration::ZERO).unwrap(), b"");
    assert!(store.check(&["key", "empty"]).unwrap() && store.check(&[]).unwrap());
    assert!(!store.check(&["key", "other"]).unwrap());
    store.wait(&["key", "empty"], Duration::ZERO).unwrap();
    assert_eq!(store.add("count", 0).unwrap(), 0);
    assert!(store.check(&["count"]).unwrap());
    assert_eq!(store.add("count", 40).unwrap(), 40);
    assert_eq!(store.add("count", 2).unwrap(), 42);
    assert_eq!(store.get("count", Duration::ZERO).unwrap(), b"42");
    let error = store.add("key", 1).unwrap_err();
    assert!(matches!(error, StoreError::NotANumber { .. }), "{error}");
    store.set("most", i64::MAX.to_string().as_bytes()).unwrap();
    let error = store.add("most", 1).unwrap_err();
    assert!(matches!(error, StoreError::NotANumber { .. }), "{error}");
    for (expected, new, now) in [
        (&b"value"[..], &b"new"[..], &b"new"[..]),
        (b"value", b"newer", b"new"),
        (b"", b"newer", b"new"),
    ] {
        assert_eq!(store.compare_set("key", expected, new).unwrap(), now);
    }
    assert_eq!(store.compare_set("absent", b"x", b"y").unwrap(), b"x");
    assert!(!store.check(&["absent"]).unwrap());
    assert_eq!(store.compare_set("absent", b"", b"y").unwrap(), b"y");
    assert!(store.delete("key").unwrap() && !store.delete("key").unwrap());
}

/// Leaves what was appended at `log` and returns it.
pub(super) fn appended_bytes_are_in_the_order_of_the_calls(open: Open<'_>) -> Vec<u8> {
    let store = open();
    assert_eq!(store.append("log", b"").unwrap(), 0);
    let mut expected = Vec::new();
    for index in 0..200_u8 {
        let more = vec![index; usize::from(index % 7)];
        expected.extend_from_slice(&more);
        assert_eq!(store.append("log", &more).unwrap(), expected.len());
    }
    assert_eq!(store.get("log", Duration::ZERO).unwrap(), expected);
    expected
}

pub(super) fn keys_are_listed_and_counted_by_prefix_and_in_order(open: Open<'_>) {
    let store = open();
    for key in ["rank/10", "rank/2", "ranks", "rank/1", "other", "ran"] {
        store.set(key, b"").unwrap();
    }
    let check = |prefix: &str, most: usize, expect: &str, more: bool| {
        let list = store.list(prefix, most).unwrap();
        assert_eq!((list.keys.join(" ").as_str(), list.more), (expect, more));
    };
    check("rank/", 10, "rank/1 rank/10 rank/2", false);
    check("rank/", 3, "rank/1 rank/10 rank/2", false);
    check("rank/", 2, "rank/1 rank/10", true);
    check("rank/", 0, "", true);
    check("none", 5, "", false);
    let all = "other ran rank/1 rank/10 rank/2 ranks";
    check("", usize::MAX, all, false);
    for (prefix, expected) in [("rank/", 3), ("ran", 5), ("", 6), ("none", 0)] {
        assert_eq!(store.num_keys(prefix).unwrap(), expected, "{prefix:?}");
    }
}
