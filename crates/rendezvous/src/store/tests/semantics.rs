//! What every store does, over TCP, in this process, and as a part of either.

use super::*;

/// Opens handles to one and the same store.
struct Space {
    name: &'static str,
    open: Box<dyn Fn() -> Box<dyn Store> + Sync>,
}

impl Space {
    fn open(&self) -> Box<dyn Store> {
        (self.open)()
    }
}

/// Runs a test over a fresh store of each kind.
fn over_all(test: impl Fn(&Space)) {
    for (name, is_part) in [("tcp", false), ("prefix of tcp", true)] {
        let bench = Bench::new();
        let addr = bench.server.addr().to_string();
        let token = bench.token.clone();
        let connect = move || Client::connect(&addr, &token, SECONDS).unwrap();
        let open: Box<dyn Fn() -> Box<dyn Store> + Sync> = if is_part {
            connect().set("part", b"a neighbour").unwrap();
            Box::new(move || Box::new(PrefixStore::new(connect(), "part")))
        } else {
            Box::new(move || Box::new(connect()))
        };
        test(&Space { name, open });
    }
    let local = LocalStore::new();
    let open = Box::new(move || Box::new(local.clone()) as Box<dyn Store>);
    test(&Space {
        name: "local",
        open,
    });
    let local = LocalStore::new();
    local.set("part0", b"a neighbour").unwrap();
    let open =
        Box::new(move || Box::new(PrefixStore::new(local.clone(), "part")) as Box<dyn Store>);
    test(&Space {
        name: "prefix of local",
        open,
    });
}

#[test]
fn values_are_set_got_compared_counted_and_deleted() {
    over_all(|space| contract::values_are_set_got_compared_counted_and_deleted(&*space.open));
}

#[test]
fn appended_bytes_are_in_the_order_of_the_calls() {
    over_all(|space| {
        let expected = contract::appended_bytes_are_in_the_order_of_the_calls(&*space.open);
        let store = space.open();
        let error = store.append("log", &vec![0; VALUE_BYTES_MAX]).unwrap_err();
        assert!(
            matches!(error, StoreError::ValueTooLarge { bytes, .. } if bytes == VALUE_BYTES_MAX + expected.len()),
            "{error}"
        );
        assert_eq!(store.get("log", Duration::ZERO).unwrap(), expected);
    });
}

#[test]
fn keys_are_listed_and_counted_by_prefix_and_in_order() {
    over_all(|space| contract::keys_are_listed_and_counted_by_prefix_and_in_order(&*space.open));
}

#[test]
fn many_keys_are_set_and_got_at_once() {
    over_all(|space| {
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
    over_all(|space| {
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
    over_all(|space| {
        let (reader, waiter, writer) = (space.open(), space.open(), space.open());
        thread::scope(|scope| {
            let value = scope.spawn(move || reader.get("late", SECONDS).unwrap());
            let both = scope.spawn(move || waiter.wait(&["late", "later", "late"], SECONDS));
            writer.append("late", b"1").unwrap();
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
fn a_queue_gives_its_items_in_order_and_names_no_key() {
    over_all(|space| {
        let store = space.open();
        for index in 1..=3_u8 {
            assert_eq!(
                store.queue_push("work", &[index]).unwrap(),
                usize::from(index)
            );
        }
        assert_eq!(store.queue_len("work").unwrap(), 3);
        assert_eq!(store.queue_len("other").unwrap(), 0);
        assert!(!store.check(&["work"]).unwrap() && store.num_keys("").unwrap() == 0);
        for index in 1..=3_u8 {
            assert_eq!(space.open().queue_pop("work", SECONDS).unwrap(), [index]);
        }
        let error = store.queue_pop("work", SOON).unwrap_err();
        assert!(
            matches!(&error, StoreError::TimedOut { operation: "queue-pop", missing, .. } if missing[0].ends_with("work")),
            "{error}"
        );
        assert!(matches!(
            store.queue_pop("work", Duration::ZERO),
            Err(StoreError::TimedOut { .. })
        ));
    });
}

#[test]
fn every_item_goes_to_exactly_one_of_those_who_wait() {
    const ITEMS: u32 = 200;
    over_all(|space| {
        let mut got: Vec<u32> = thread::scope(|scope| {
            let poppers: Vec<_> = (0..4)
                .map(|_| {
                    let store = space.open();
                    scope.spawn(move || {
                        let mut mine = Vec::new();
                        loop {
                            let item = store.queue_pop("work", SECONDS).unwrap();
                            if item.is_empty() {
                                return mine;
                            }
                            mine.push(u32::from_le_bytes(item.try_into().unwrap()));
                        }
                    })
                })
                .collect();
            let pushers: Vec<_> = (0..2)
                .map(|half| {
                    let store = space.open();
                    scope.spawn(move || {
                        for item in (half..ITEMS).step_by(2) {
                            store.queue_push("work", &item.to_le_bytes()).unwrap();
                        }
                    })
                })
                .collect();
            pushers
                .into_iter()
                .for_each(|pusher| pusher.join().unwrap());
            let store = space.open();
            (0..4).for_each(|_| assert!(store.queue_push("work", b"").unwrap() >= 1));
            poppers
                .into_iter()
                .flat_map(|popper| popper.join().unwrap())
                .collect()
        });
        got.sort_unstable();
        assert!(got.iter().copied().eq(0..ITEMS), "{}", space.name);
    });
}

#[test]
fn a_key_that_is_too_long_is_not_sent() {
    over_all(|space| {
        let store = space.open();
        let long = "k".repeat(KEY_BYTES_MAX + 1);
        let refused = [
            store.set(&long, b"").unwrap_err(),
            store.append(&long, b"").unwrap_err(),
            store.list(&long, 1).unwrap_err(),
            store.multi_get(&["a", &long], SECONDS).unwrap_err(),
            store.multi_set(&[("a", b""), (&long, b"")]).unwrap_err(),
            store.queue_push(&long, b"").unwrap_err(),
            store.queue_pop(&long, SECONDS).unwrap_err(),
            store.num_keys(&long).unwrap_err(),
        ];
        for error in refused {
            assert!(matches!(error, StoreError::KeyTooLong { .. }), "{error}");
        }
        assert_eq!(store.num_keys("").unwrap(), 0);
    });
}

#[test]
fn a_full_store_in_this_process_says_so_and_gets_its_room_back() {
    let store = LocalStore::with_bytes_max(1000);
    store.set("key", &[0; 600]).unwrap();
    for error in [
        store.set("other", &[0; 400]).unwrap_err(),
        store.append("key", &[0; 200]).unwrap_err(),
        store.queue_push("work", &[0; 400]).unwrap_err(),
        store
            .multi_set(&[("a", &[]), ("b", &[]), ("c", &[])])
            .unwrap_err(),
    ] {
        assert!(matches!(error, StoreError::Full { .. }), "{error}");
        assert!(error.to_string().contains("in this process"));
    }
    assert_eq!(store.num_keys("").unwrap(), 1);
    store.queue_push("work", &[0; 50]).unwrap();
    store.delete("key").unwrap();
    assert_eq!(store.queue_pop("work", Duration::ZERO).unwrap(), [0; 50]);
    store.set("other", &[0; 860]).unwrap();
}
