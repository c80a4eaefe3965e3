//! Clients over loopback: those that ask well, many at once, and those that mean no good.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

use super::*;

/// Longer than any answer, so that a test fails and does not hang.
const PATIENCE: Duration = Duration::from_secs(60);

struct Server {
    address: SocketAddr,
    told: UnixStream,
    thread: Option<JoinHandle<io::Result<()>>>,
    asked: Arc<AtomicUsize>,
}

impl Server {
    fn start(body: Vec<u8>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let (stop, told) = UnixStream::pair().expect("a pair");
        let asked = Arc::new(AtomicUsize::new(0));
        let (count, body): (_, Arc<[u8]>) = (asked.clone(), body.into());
        let answer = move |request: &Request<'_>| match request.path {
            "/metrics" => {
                count.fetch_add(1, Ordering::SeqCst);
                Answer::found("text/plain", body.clone())
            }
            "/stream" => {
                let mut parts = [b"one ", b"two "].into_iter();
                Answer::stream("text/plain", Box::new(move || Some(parts.next()?.to_vec())))
            }
            _ => Answer::text("404 Not Found", "not here"),
        };
        let thread = thread::spawn(move || serve(listener, stop, answer));
        Self {
            address,
            told,
            thread: Some(thread),
            asked,
        }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("accepted");
        stream.set_read_timeout(Some(PATIENCE)).expect("set");
        stream.set_write_timeout(Some(PATIENCE)).expect("set");
        stream
    }

    /// What it answers to this.
    fn says(&self, request: &[u8]) -> String {
        let mut stream = self.connect();
        stream.write_all(request).expect("taken");
        read_all(stream)
    }

    fn stop(&mut self) {
        self.told.write_all(b"x").expect("told");
        let thread = self.thread.take().expect("once");
        thread.join().expect("no panic").expect("a clean end");
    }
}

fn read_all(mut stream: TcpStream) -> String {
    let mut answer = Vec::new();
    stream
        .read_to_end(&mut answer)
        .expect("an answer, and its end");
    String::from_utf8(answer).expect("text")
}

const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";

#[test]
fn the_page_is_where_it_is_looked_for_and_nothing_else_is_done() {
    let mut server = Server::start(b"up 1\n".to_vec());
    let check = |request: &[u8], status: &str, ends: &str| {
        let answer = server.says(request);
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")),
            "{answer}"
        );
        assert!(answer.ends_with(ends), "{answer}");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        assert!(
            head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())),
            "{answer}"
        );
    };
    check(GET, "200 OK", "\r\n\r\nup 1\n");
    check(b"GET /metrics?x=1 HTTP/1.0\r\n\r\n", "200 OK", "up 1\n");
    check(
        b"GET /etc/passwd HTTP/1.1\r\n\r\n",
        "404 Not Found",
        "not here\n",
    );
    check(
        b"GET /metrics/../x HTTP/1.1\r\n\r\n",
        "404 Not Found",
        "not here\n",
    );
    check(
        b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
        "405",
        "only GET is understood\n",
    );
    check(
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "400",
        "no HTTP request\n",
    );
    check(b"GET /metrics\r\n\r\n", "400", "no HTTP request\n");
    let long = [
        b"GET /metrics HTTP/1.1\r\nX: ".to_vec(),
        vec![b'a'; 2 * REQUEST_BYTES_MAX],
    ]
    .concat();
    check(&long, "431", "too long\n");
    let many = [
        b"GET /metrics HTTP/1.1\r\n".to_vec(),
        b"A: b\r\n".repeat(100),
    ]
    .concat();
    check(&many, "431", "too long\n");
    assert_eq!(server.asked.load(Ordering::SeqCst), 2);
    server.stop();
}

#[test]
fn an_answer_may_come_in_parts() {
    let mut server = Server::start(Vec::new());
    let answer = server.says(b"GET /stream HTTP/1.1\r\n\r\n");
    assert!(answer.ends_with("\r\n\r\none two "), "{answer}");
    server.stop();
}

#[test]
fn parameters_and_headers_are_found_by_name() {
    let request = b"GET /a?x=1&token=ab HTTP/1.1\r\nhOST: me\r\n\r\n";
    let found = answered(request, &|request| {
        assert_eq!((request.path, request.query), ("/a", "x=1&token=ab"));
        assert_eq!(request.parameter("token"), Some("ab"));
        assert_eq!(request.parameter("tok"), None);
        assert_eq!(request.header("Host"), Some("me"));
        Answer::text("200 OK", "")
    });
    assert!(found.is_some());
}

#[test]
fn a_request_may_come_byte_by_byte() {
    let mut server = Server::start(b"up 1\n".to_vec());
    let mut stream = server.connect();
    stream.set_nodelay(true).expect("set");
    for byte in GET {
        stream.write_all(&[*byte]).expect("taken");
    }
    assert!(read_all(stream).ends_with("up 1\n"));
    server.stop();
}

#[test]
fn many_clients_at_once_each_get_all_of_it() {
    let body: Vec<u8> = (0..1 << 20).map(|i| b'a' + (i % 26) as u8).collect();
    let mut server = Server::start(body.clone());
    thread::scope(|scope| {
        let clients: Vec<_> = (0..32)
            .map(|_| scope.spawn(|| server.says(GET).into_bytes().ends_with(&body)))
            .collect();
        assert!(
            clients
                .into_iter()
                .all(|client| client.join().expect("no panic"))
        );
    });
    assert_eq!(server.asked.load(Ordering::SeqCst), 32);
    server.stop();
}

#[test]
fn clients_that_mean_no_good_keep_nobody_from_the_page() {
    let mut server = Server::start(vec![b'x'; 8 << 20]);
    // Some say nothing, some ask by half, some ask and never take the answer: more than there is room for.
    let mut idle: Vec<TcpStream> = Vec::new();
    for index in 0..3 * CONNECTIONS_MAX {
        let mut stream = server.connect();
        let half = [&b""[..], &GET[..20], GET][index % 3];
        // One that was sent away may not take it any more.
        let _ = stream.write_all(half);
        idle.push(stream);
        if index % 16 == 0 {
            assert!(server.says(GET).len() > 8 << 20);
        }
    }
    // Others only come and go.
    for _ in 0..200 {
        drop(server.connect());
    }
    assert!(server.says(GET).len() > 8 << 20);
    // The first ones have gone, to make room.
    let mut first = BufReader::new(idle.swap_remove(0));
    let ended = first.fill_buf().map_or(true, <[u8]>::is_empty);
    assert!(ended, "it is not held any longer");
    server.stop();
}

#[test]
fn a_stop_ends_it_at_once_with_clients_still_there() {
    let mut server = Server::start(b"up 1\n".to_vec());
    let _silent = server.connect();
    assert!(server.says(GET).ends_with("up 1\n"));
    server.stop();
    assert!(
        TcpStream::connect(server.address).is_err(),
        "nobody listens any more"
    );
}
