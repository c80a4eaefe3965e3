//! The store in a real etcd: the operations' meaning, wherever another process stands, and what etcd keeps afterwards.

#[path = "../src/store/tests/contract.rs"]
mod contract;
#[path = "support/etcd.rs"]
mod support;

use std::thread;
use std::time::{Duration, Instant};

use paceline_rendezvous::store::{Etcd, EtcdError, EtcdStore, KEY_BYTES_MAX, Store, StoreError};
use paceline_rendezvous::token::Token;

const SECONDS: Duration = Duration::from_secs(20);
/// A deadline that a test waits for.
const SOON: Duration = Duration::from_millis(200);

fn job(server: &support::Etcd, name: &str) -> Etcd {
    Etcd::new(&server.endpoint(), name, &Token::derived("token"), SECONDS).unwrap()
}

fn open(server: &support::Etcd, name: &str) -> EtcdStore {
    job(server, name).connect(SECONDS).unwrap()
}

#[test]
fn etcd_does_what_every_store_does() {
    let Some(server) = support::Etcd::start() else {
        return;
    };
    let space = |name: &'static str| {
        let job = job(&server, name);
        move || Box::new(job.connect(SECONDS).unwrap()) as Box<dyn Store>
    };
    contract::values_are_set_got_compared_counted_and_deleted(&space("values"));
    contract::keys_are_listed_by_prefix_and_in_order(&space("list"));
    what_is_never_set_is_named_at_the_deadline(&open(&server, "never"));
    many_keys_are_got_at_once(&server);
    a_wait_ends_when_the_last_key_comes(&server);
    many_count_together(&server);
    what_it_does_not_take_is_refused(&open(&server, "refused"));
    a_job_sees_its_own_keys_alone_and_takes_them_along(&server);
    keys_go_away_by_themselves(&server);
}

fn what_is_never_set_is_named_at_the_deadline(store: &EtcdStore) {
    let error = store.get("never", Duration::ZERO).unwrap_err();
    assert!(
        matches!(&error, StoreError::TimedOut { operation: "get", missing, .. } if missing == &["never"]),
        "{error}"
    );
}

/// More than one transaction has room for.
fn many_keys_are_got_at_once(server: &support::Etcd) {
    let store = open(server, "many");
    let values: Vec<Vec<u8>> = (0..300_u32)
        .map(|index| index.to_le_bytes().repeat(index as usize % 50))
        .collect();
    let keys: Vec<String> = (0..300).map(|index| format!("key/{index}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    thread::scope(|scope| {
        let got = scope.spawn(|| open(server, "many").multi_get(&keys, SECONDS).unwrap());
        for (key, value) in keys.iter().zip(&values) {
            store.set(key, value).unwrap();
        }
        assert!(got.join().unwrap() == values);
    });
    store.set("a", b"2").unwrap();
    assert_eq!(
        store.multi_get(&["a", "a"], Duration::ZERO).unwrap(),
        [b"2", b"2"]
    );
}

fn a_wait_ends_when_the_last_key_comes(server: &support::Etcd) {
    let writer = open(server, "wait");
    thread::scope(|scope| {
        let value = scope.spawn(|| open(server, "wait").get("late", SECONDS).unwrap());
        let both = scope.spawn(|| open(server, "wait").wait(&["late", "later", "late"], SECONDS));
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
}

fn many_count_together(server: &support::Etcd) {
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let store = open(server, "count");
                for _ in 0..10 {
                    if store.add("count", 1).unwrap() == 80 {
                        store.set("all", b"").unwrap();
                    }
                }
                store.wait(&["all"], SECONDS).unwrap();
            });
        }
    });
    let count = open(server, "count").get("count", Duration::ZERO).unwrap();
    assert_eq!(count, b"80");
}

fn what_it_does_not_take_is_refused(store: &EtcdStore) {
    let long = "k".repeat(KEY_BYTES_MAX + 1);
    for error in [
        store.set(&long, b"").unwrap_err(),
        store.list(&long, 1).unwrap_err(),
        store.multi_get(&["a", &long], SECONDS).unwrap_err(),
    ] {
        assert!(matches!(error, StoreError::KeyTooLong { .. }), "{error}");
    }
    assert!(store.list("", 1).unwrap().keys.is_empty());
    let error = store.set("large", &vec![0; 4 << 20]).unwrap_err();
    assert!(
        matches!(
            &error,
            StoreError::Etcd {
                source: EtcdError::Refused { .. },
                ..
            }
        ),
        "{error}"
    );
}

fn a_job_sees_its_own_keys_alone_and_takes_them_along(server: &support::Etcd) {
    let (one, two) = (open(server, "one"), open(server, "one/two"));
    one.set("key", b"1").unwrap();
    two.set("key", b"2").unwrap();
    assert_eq!(one.list("", 10).unwrap().keys, ["key"]);
    let stranger = Etcd::new(&server.endpoint(), "one", &Token::derived("other"), SECONDS).unwrap();
    let error = stranger
        .connect(SECONDS)
        .unwrap()
        .get("key", SECONDS)
        .unwrap_err();
    assert!(
        matches!(
            &error,
            StoreError::Etcd {
                source: EtcdError::Unproven,
                ..
            }
        ),
        "{error}"
    );
    one.end_job().unwrap();
    one.end_job().unwrap();
    assert!(one.list("", 1).unwrap().keys.is_empty());
    assert_eq!(two.get("key", Duration::ZERO).unwrap(), b"2");
}

/// A second is the least that a lease may have; etcd makes two of it.
fn keys_go_away_by_themselves(server: &support::Etcd) {
    let short = Etcd::new(
        &server.endpoint(),
        "short",
        &Token::derived("token"),
        Duration::from_secs(1),
    )
    .unwrap();
    short.connect(SECONDS).unwrap().set("key", b"").unwrap();
    // Who looks with another token looks at the same keys, and does not keep them alive.
    let other = Etcd::new(
        &server.endpoint(),
        "short",
        &Token::derived("other"),
        SECONDS,
    )
    .unwrap();
    let other = other.connect(SECONDS).unwrap();
    let deadline = Instant::now() + SECONDS;
    while !other.list("", 1).unwrap().keys.is_empty() {
        assert!(Instant::now() < deadline, "the key is still there");
        thread::yield_now();
    }
}

#[test]
fn an_etcd_that_wants_a_user_is_given_one() {
    let Some(server) = support::Etcd::start() else {
        return;
    };
    for (path, body) in [
        ("user/add", r#"{"name":"root","password":"secret"}"#),
        ("role/add", r#"{"name":"root"}"#),
        ("user/grant", r#"{"user":"root","role":"root"}"#),
        ("enable", "{}"),
    ] {
        server.post(&format!("/v3/auth/{path}"), body);
    }
    let nobody = job(&server, "job");
    // A lease is for everybody.
    let store = nobody.connect(SECONDS).unwrap();
    let error = store.get("key", Duration::ZERO).unwrap_err();
    assert!(error.hint().unwrap().contains("ETCD_USERNAME"), "{error}");
    let wrong = nobody.clone().with_user("root".into(), "guess".into());
    let error = wrong.connect(SECONDS).unwrap_err();
    assert!(
        error.to_string().contains("authentication failed"),
        "{error}"
    );
    let right = nobody.with_user("root".into(), "secret".into());
    let store = right.connect(SECONDS).unwrap();
    store.set("key", b"value").unwrap();
    assert_eq!(store.get("key", Duration::ZERO).unwrap(), b"value");
    store.end_job().unwrap();
    assert!(store.list("", 1).unwrap().keys.is_empty());
}

#[test]
fn a_connection_outlives_etcd() {
    let Some(mut server) = support::Etcd::start() else {
        return;
    };
    let store = open(&server, "job");
    store.set("key", b"value").unwrap();
    server.kill();
    let error = store.get("key", Duration::ZERO).unwrap_err();
    assert!(matches!(error, StoreError::Etcd { .. }), "{error}");
    server.start_again();
    let deadline = Instant::now() + SECONDS;
    let value = loop {
        match store.get("key", Duration::ZERO) {
            Ok(value) => break value,
            // It listens before it has a leader.
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    };
    assert_eq!(value, b"value");
    store.set("key", b"new").unwrap();
}
