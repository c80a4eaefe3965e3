//! What every store does, over TCP.

use super::*;

/// Opens handles to one and the same store.
struct Space(Bench);

impl Space {
    fn open(&self) -> Client {
        let addr = self.0.server.addr().to_string();
        Client::connect(&addr, &self.0.token, SECONDS).unwrap()
    }
}

/// Runs a test over a fresh store.
fn over_tcp(test: impl Fn(&Space)) {
    test(&Space(Bench::new()));
}

#[test]
fn values_are_set_got_compared_counted_and_deleted() {
    over_tcp(|space| {
        contract::values_are_set_got_compared_counted_and_deleted(&|| Box::new(space.open()))
    });
}

#[test]
fn keys_are_listed_by_prefix_and_in_order() {
    over_tcp(|space| contract::keys_are_listed_by_prefix_and_in_order(&|| Box::new(space.open())));
}

#[test]
fn many_keys_are_set_and_got_at_once() {
    over_tcp(|space| {
        let store = space.open();
        let values: Vec<Vec<u8>> = (0..40)
            .map(|index| vec![index; index as usize * 500])
            .collect();
        let keys: Vec<String> = (0..40).map(|index| format!("key/{index}")).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let entries: Vec<(&str, &[u8])> = keys
            .iter()
            .copied()
            .zip(values.iter().map(Vec::as_slice))
            .collect();
        thread::scope(|scope| {
            let other = space.open();
            let keys = &keys;
            let got = scope.spawn(move || other.multi_get(keys, SECONDS).unwrap());
            store.multi_set(&entries).unwrap();
            assert!(got.join().unwrap() == values);
        });
        assert_eq!(store.multi_get(&[], Duration::ZERO).unwrap().len(), 0);
        store.multi_set(&[("a", b"1"), ("a", b"2")]).unwrap();
        assert_eq!(
            store.multi_get(&["a", "a"], Duration::ZERO).unwrap(),
            [b"2", b"2"]
        );
        let error = store
            .multi_get(&["a", "absent"], Duration::ZERO)
            .unwrap_err();
        assert!(
            matches!(&error, StoreError::TimedOut { missing, .. } if missing.len() == 1 && missing[0].ends_with("absent")),
            "{error}"
        );
    });
}

#[test]
fn values_that_fit_no_message_together_are_refused_by_name() {
    over_tcp(|space| {
        let store = space.open();
        store.set("large", &vec![0; VALUE_BYTES_MAX]).unwrap();
        assert_eq!(
            store.multi_get(&["large", "large"], SECONDS).unwrap().len(),
            2
        );
        let error = store.multi_get(&["large"; 3], SECONDS).unwrap_err();
        assert!(
            matches!(error, StoreError::AnswerTooLarge { .. }),
            "{error}"
        );
        assert!(error.hint().unwrap().contains("fewer"));
        let value = vec![0; VALUE_BYTES_MAX];
        let entries: [(&str, &[u8]); 3] = [("a", &value), ("b", &value), ("c", &value)];
        let error = store.multi_set(&entries).unwrap_err();
        assert!(
            matches!(error, StoreError::TooManyKeys { keys: 3, .. }),
            "{error}"
        );
        assert!(store.check(&["large"]).unwrap() && !store.check(&["a"]).unwrap());
    });
}

#[test]
fn a_wait_ends_when_the_last_key_comes_and_at_its_deadline_names_the_others() {
    over_tcp(|space| {
        let (reader, waiter, writer) = (space.open(), space.open(), space.open());
        thread::scope(|scope| {
            let value = scope.spawn(move || reader.get("late", SECONDS).unwrap());
            let both = scope.spawn(move || waiter.wait(&["late", "later", "late"], SECONDS));
            writer.set("late", b"1").unwrap();
            assert_eq!(value.join().unwrap(), b"1");
            writer.add("later", 1).unwrap();
            both.join().unwrap().unwrap();
        });
        let error = writer.wait(&["late", "never"], SOON).unwrap_err();
        assert!(
            error.is_deadline() && error.to_string().contains("never"),
            "{error}"
        );
        let error = writer.get("never", Duration::ZERO).unwrap_err();
        assert!(
            matches!(
                error,
                StoreError::TimedOut {
                    operation: "get",
                    ..
                }
            ),
            "{error}"
        );
    });
}

#[test]
fn a_key_that_is_too_long_is_not_sent() {
    over_tcp(|space| {
        let store = space.open();
        let long = "k".repeat(KEY_BYTES_MAX + 1);
        let refused = [
            store.set(&long, b"").unwrap_err(),
            store.list(&long, 1).unwrap_err(),
            store.multi_get(&["a", &long], SECONDS).unwrap_err(),
            store.multi_set(&[("a", b""), (&long, b"")]).unwrap_err(),
        ];
        for error in refused {
            assert!(matches!(error, StoreError::KeyTooLong { .. }), "{error}");
        }
        assert!(store.list("", 1).unwrap().keys.is_empty());
    });
}
