//! What is made of the answers of something that is no etcd, or no good one. A real etcd is in `tests/etcd.rs`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::messages::Bytes;
use super::*;
use crate::store::Store;

const SECONDS: Duration = Duration::from_secs(20);
/// A deadline that a test waits for.
const SOON: Duration = Duration::from_secs(1);

/// Answers every request with what `answer` says to its path and body, and remembers the paths. `None` is silence.
struct Fake {
    addr: String,
    paths: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<()>>,
}

impl Fake {
    fn new(answer: impl Fn(&str, &str) -> Option<(u16, String)> + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let paths = Arc::<Mutex<Vec<String>>>::default();
        let asked = Arc::clone(&paths);
        let thread = std::thread::spawn(move || {
            let mut silent = Vec::new();
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                let Some((path, body)) = request(&stream) else {
                    return;
                };
                asked.lock().unwrap().push(path.clone());
                match answer(&path, &body) {
                    Some((status, text)) => {
                        let head = format!(
                            "HTTP/1.1 {status} x\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                            text.len()
                        );
                        let _ = (&stream).write_all((head + &text).as_bytes());
                    }
                    // Kept open.
                    None => silent.push(stream),
                }
            }
        });
        Self {
            addr,
            paths,
            thread: Some(thread),
        }
    }

    /// Has a lease, and answers the rest as told.
    fn etcd(answer: impl Fn(&str, &str) -> Option<(u16, String)> + Send + 'static) -> Self {
        Self::new(move |path, body| match path {
            "/v3/lease/keepalive" => ok(r#"{"result":{"ID":"1","TTL":"60"}}"#),
            _ => answer(path, body),
        })
    }

    fn paths(&self) -> Vec<String> {
        self.paths.lock().unwrap().clone()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        // A connection that says nothing ends it.
        drop(TcpStream::connect(&self.addr));
        let _ = self.thread.take().unwrap().join();
    }
}

fn request(stream: &TcpStream) -> Option<(String, String)> {
    stream.set_read_timeout(Some(SECONDS)).ok()?;
    let mut reader = BufReader::new(stream);
    let (mut first, mut length) = (String::new(), 0);
    reader.read_line(&mut first).ok()?;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        match line.trim().to_ascii_lowercase().split_once(": ") {
            Some(("content-length", value)) => length = value.parse().ok()?,
            Some(_) => {}
            None => break,
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let path = first.split_whitespace().nth(1)?.to_owned();
    Some((path, String::from_utf8(body).ok()?))
}

fn ok(text: &str) -> Option<(u16, String)> {
    Some((200, text.to_owned()))
}

fn etcd(endpoints: &str) -> Etcd {
    Etcd::new(endpoints, "job", &Token::derived("t"), SECONDS).unwrap()
}

fn cause(error: StoreError) -> EtcdError {
    match error {
        StoreError::Etcd { source, .. } => source,
        other => panic!("{other}"),
    }
}

#[test]
fn a_page_of_a_web_server_is_no_etcd() {
    for (status, text) in [(404, "404 page not found"), (200, "<html>"), (200, "")] {
        let fake = Fake::new(move |_, _| Some((status, text.to_owned())));
        let error = etcd(&fake.addr).connect(SECONDS).unwrap_err();
        assert!(error.hint().unwrap().contains("etcd 3.4"), "{error}");
        let error = cause(error);
        assert!(matches!(error, EtcdError::NotEtcd { .. }), "{error}");
    }
}

#[test]
fn a_refusal_is_told_in_etcds_words() {
    let fake = Fake::new(|_, _| {
        Some((
            400,
            r#"{"error":"e","message":"etcdserver: user name is empty","code":3}"#.into(),
        ))
    });
    let error = etcd(&fake.addr).connect(SECONDS).unwrap_err();
    assert!(
        error.to_string().contains("refused: etcdserver: user name"),
        "{error}"
    );
    assert!(error.hint().unwrap().contains("ETCD_USERNAME"));
}

#[test]
fn a_value_without_the_jobs_proof_is_not_looked_at() {
    let token = Token::derived("t");
    let values = [
        b"-".to_vec(),
        seal::seal(&Token::derived("other"), b"/paceline/job/key", b"-"),
        seal::seal(&token, b"/paceline/job/other", b"-"),
    ];
    for value in values {
        let value = serde_json::to_string(&Bytes(value)).unwrap();
        let found = format!(
            r#"{{"key":{},"mod_revision":"5","value":{value}}}"#,
            serde_json::to_string(&Bytes(b"/paceline/job/key".to_vec())).unwrap()
        );
        let fake = Fake::etcd(move |path, _| match path {
            "/v3/kv/range" => ok(&format!(r#"{{"header":{{}},"kvs":[{found}]}}"#)),
            _ => ok(&format!(
                r#"{{"header":{{}},"succeeded":true,"responses":[{{"response_range":{{"kvs":[{found}]}}}}]}}"#
            )),
        });
        let store = etcd(&fake.addr).connect(SECONDS).unwrap();
        for error in [
            store.get("key", Duration::ZERO).unwrap_err(),
            store.add("key", 1).unwrap_err(),
            store.compare_set("key", b"-", b"new").unwrap_err(),
        ] {
            assert!(error.hint().unwrap().contains("PACELINE_JOB_TOKEN"));
            assert_eq!(cause(error), EtcdError::Unproven);
        }
    }
}

#[test]
fn requests_are_as_etcd_reads_them() {
    let bodies = Arc::<Mutex<Vec<serde_json::Value>>>::default();
    let asked = Arc::clone(&bodies);
    let fake = Fake::etcd(move |path, body| {
        asked.lock().unwrap().push(body.parse().unwrap());
        match path {
            "/v3/kv/txn" => ok(r#"{"header":{"revision":"8"},"succeeded":true,"responses":[{}]}"#),
            "/v3/watch" => ok("{\"result\":{\"canceled\":true,\"cancel_reason\":\"enough\"}}\n"),
            _ => ok(r#"{"header":{}}"#),
        }
    });
    let etcd = etcd(&fake.addr);
    let store = etcd.connect(SECONDS).unwrap();
    store.set("a", b"1").unwrap();
    store.add("a", 1).unwrap();
    store.list("a", 5).unwrap();
    store.wait(&["a"], SECONDS).unwrap_err();
    let text = |bytes: &[u8]| serde_json::to_value(Bytes(bytes.to_vec())).unwrap();
    let key = text(b"/paceline/job/a");
    let put = |value: &[u8]| {
        let sealed = seal::seal(&Token::derived("t"), b"/paceline/job/a", value);
        json!({ "key": key, "value": text(&sealed), "lease": etcd.lease.to_string() })
    };
    let unchanged = json!({ "key": key, "target": "MOD", "result": "EQUAL", "mod_revision": "0" });
    let expect = [
        put(b"1"),
        json!({ "key": key }),
        json!({
            "compare": [unchanged],
            "success": [{ "request_put": put(b"1") }],
            "failure": [{ "request_range": { "key": key } }],
        }),
        json!({ "key": key, "range_end": text(b"/paceline/job/b"), "limit": "5", "keys_only": true }),
        json!({ "success": [{ "request_range": { "key": key, "revision": "0", "keys_only": true } }] }),
        json!({ "create_request": { "key": key, "start_revision": "9", "filters": ["NODELETE"] } }),
    ];
    assert_eq!(*bodies.lock().unwrap(), expect);
}

#[test]
fn an_answer_about_other_keys_is_refused() {
    let fake = Fake::etcd(|path, _| match path {
        "/v3/kv/range" => ok(r#"{"header":{},"kvs":[{"key":"YQ=="}]}"#),
        _ => ok(r#"{"header":{},"succeeded":true}"#),
    });
    let store = etcd(&fake.addr).connect(SECONDS).unwrap();
    for error in [
        store.add("key", 1).unwrap_err(),
        store.wait(&["key"], Duration::ZERO).unwrap_err(),
    ] {
        assert!(matches!(cause(error), EtcdError::NotEtcd { .. }));
    }
}

#[test]
fn a_silent_member_costs_its_share_and_a_change_is_not_sent_twice() {
    let silent = Fake::etcd(|_, _| None);
    let good = Fake::etcd(|path, _| match path {
        "/v3/kv/put" => ok(r#"{"header":{}}"#),
        "/v3/kv/range" => ok(r#"{"header":{}}"#),
        _ => ok(r#"{"header":{},"deleted":"1"}"#),
    });
    let both = etcd(&format!("{},{}", silent.addr, good.addr));
    let store = both.connect(SOON * 2).unwrap();
    store.set("key", b"value").unwrap();
    assert_eq!(
        (silent.paths().last().unwrap(), good.paths().last().unwrap()),
        (&"/v3/kv/put".to_owned(), &"/v3/kv/put".to_owned())
    );
    // From now on the member that answered is asked first, even by other connections.
    assert!(both.connect(SOON * 2).unwrap().delete("key").unwrap());
    assert_eq!(silent.paths().len(), 2);

    let other = etcd(&format!("{},{}", silent.addr, good.addr));
    let store = other.connect(SOON).unwrap();
    let asked = good.paths().len();
    assert_eq!(cause(store.delete("key").unwrap_err()), EtcdError::NoAnswer);
    assert_eq!(good.paths().len(), asked, "it may have been done");
    assert!(store.delete("key").unwrap(), "the next one goes elsewhere");
}

#[test]
fn nobody_there_is_told_with_all_members_names() {
    let free = || format!("127.0.0.1:{}", paceline_testing::free_ports(1));
    let endpoints = format!("{},{}", free(), free());
    let error = etcd(&endpoints).connect(SECONDS).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains(&endpoints) && text.contains("refused"),
        "{text}"
    );
    assert!(error.hint().unwrap().contains("2379"));
    assert!(matches!(cause(error), EtcdError::Unreachable { .. }));
}

#[test]
fn a_watch_that_ends_early_or_is_refused_is_an_error_and_one_in_vain_ends_in_time() {
    for (answer, expect) in [
        (
            r#"{"result":{"created":true}}"#.to_owned() + "\n",
            "the stream ended",
        ),
        (
            r#"{"result":{"canceled":true,"cancel_reason":"permission denied"}}"#.to_owned() + "\n",
            "permission denied",
        ),
        ("no JSON\n".to_owned(), "expected"),
    ] {
        let fake = Fake::etcd(move |path, _| match path {
            "/v3/watch" => ok(&answer),
            _ => ok(r#"{"header":{"revision":"3"},"succeeded":true,"responses":[{}]}"#),
        });
        let store = etcd(&fake.addr).connect(SECONDS).unwrap();
        let error = store.wait(&["key"], SECONDS).unwrap_err();
        assert!(error.to_string().contains(expect), "{error}");
    }
    let fake = Fake::etcd(|path, _| match path {
        "/v3/watch" => None,
        _ => ok(r#"{"header":{"revision":"3"},"succeeded":true,"responses":[{}]}"#),
    });
    let store = etcd(&fake.addr).connect(SECONDS).unwrap();
    let error = store.wait(&["key"], SOON).unwrap_err();
    assert!(
        matches!(&error, StoreError::TimedOut { missing, .. } if missing == &["key"]),
        "{error}"
    );
}

#[test]
fn jobs_of_any_name_have_keys_of_their_own() {
    for (job, expect) in [
        ("none", "none"),
        ("a/b", "a%2Fb"),
        ("a%2Fb", "a%252Fb"),
        ("é", "%C3%A9"),
        ("", ""),
    ] {
        assert_eq!(escaped(job), expect);
    }
}

#[test]
fn secrets_are_in_no_debug_text() {
    let etcd = etcd("a").with_user("root".into(), "secret".into());
    let text = format!("{etcd:?}");
    assert!(
        text.contains("a:2379") && !text.contains("secret"),
        "{text}"
    );
}
