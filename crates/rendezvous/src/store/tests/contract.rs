//! What no store may do otherwise. The tests of etcd include this file too.

use super::{Duration, Store, StoreError};

/// Opens handles to one and the same store.
pub(super) type Open<'a> = &'a dyn Fn() -> Box<dyn Store>;

pub(super) fn values_are_set_got_compared_counted_and_deleted(open: Open<'_>) {
    let store = open();
    let has = |keys: &[&str]| store.wait(keys, Duration::ZERO).is_ok();
    store.set("key", b"value").unwrap();
    store.set("empty", b"").unwrap();
    assert_eq!(store.get("key", Duration::ZERO).unwrap(), b"value");
    assert_eq!(open().get("empty", Duration::ZERO).unwrap(), b"");
    assert!(has(&["key", "empty"]) && has(&[]));
    assert!(!has(&["key", "other"]));
    store.wait(&["key", "empty"], Duration::ZERO).unwrap();
    assert_eq!(store.add("count", 0).unwrap(), 0);
    assert!(has(&["count"]));
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
    assert!(!has(&["absent"]));
    assert_eq!(store.compare_set("absent", b"", b"y").unwrap(), b"y");
    assert!(store.delete("key").unwrap() && !store.delete("key").unwrap());
}

pub(super) fn keys_are_listed_by_prefix_and_in_order(open: Open<'_>) {
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
}
