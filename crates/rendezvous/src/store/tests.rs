//! Servers and clients over real sockets, among them clients that stall, flood, lie and die.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use paceline_testing::free_ports;

use super::*;
use crate::auth::{AuthError, Claim, Side, prove};
use crate::env::WorkerEnv;
use crate::token::Token;

/// Long enough for any machine; a test that reaches it fails.
const SECONDS: Duration = Duration::from_secs(20);
/// A bound of a server under test that the test waits for. It holds for the test's own clients too.
const SOON: Duration = Duration::from_secs(1);

struct Bench {
    token: Token,
    server: Server,
    tls: bool,
}

impl Bench {
    fn new() -> Self {
        Self::with(ServerOptions::default())
    }

    fn with(options: ServerOptions) -> Self {
        let token = Token::generate().unwrap();
        let tls = options.tls;
        let server = Server::bind_with("127.0.0.1:0".parse().unwrap(), &token, options).unwrap();
        Self { token, server, tls }
    }

    /// The same server without TLS and with it.
    fn both() -> [Self; 2] {
        [false, true].map(|tls| {
            Self::with(ServerOptions {
                tls,
                ..ServerOptions::default()
            })
        })
    }

    fn client(&self) -> Client {
        let server = self.server.addr().to_string();
        Client::connect_as(&server, &self.token, self.tls, SECONDS).unwrap()
    }

    /// A member that does as it likes with its connection.
    fn raw_member(&self) -> TcpStream {
        let mut stream = TcpStream::connect(self.server.addr()).unwrap();
        stream.set_read_timeout(Some(SECONDS)).unwrap();
        stream.set_write_timeout(Some(SECONDS)).unwrap();
        prove(
            &mut stream,
            &self.token,
            Side::Dialer,
            &Claim::plain(PURPOSE),
        )
        .unwrap();
        stream
    }

    fn unauthenticated(&self) -> TcpStream {
        let stream = TcpStream::connect(self.server.addr()).unwrap();
        stream.set_read_timeout(Some(SECONDS)).unwrap();
        stream
    }

    /// The server works for others, and quickly.
    fn assert_serves_others(&self) {
        let started = Instant::now();
        let client = self.client();
        client.set("others", b"served").unwrap();
        assert_eq!(client.get("others", SECONDS).unwrap(), b"served");
        assert!(started.elapsed() < SECONDS / 4, "{:?}", started.elapsed());
    }
}

/// Waits until the server has closed the connection, for a reset as for an orderly end.
fn assert_closed(mut stream: TcpStream) {
    let mut rest = Vec::new();
    if let Err(error) = stream.read_to_end(&mut rest) {
        assert!(
            !matches!(
                error.kind(),
                std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
            ),
            "{error}"
        );
    }
}

#[test]
fn every_operation_works_over_the_wire() {
    for bench in Bench::both() {
        let client = bench.client();
        client.set("key", b"value").unwrap();
        client.set("empty", b"").unwrap();
        assert_eq!(client.get("key", Duration::ZERO).unwrap(), b"value");
        assert_eq!(client.get("empty", Duration::ZERO).unwrap(), b"");
        assert!(client.check(&["key", "empty"]).unwrap());
        assert!(!client.check(&["key", "other"]).unwrap());
        client.wait(&["key", "empty"], Duration::ZERO).unwrap();
        assert_eq!(client.add("count", 40).unwrap(), 40);
        assert_eq!(client.add("count", 2).unwrap(), 42);
        assert!(matches!(
            client.add("key", 1),
            Err(StoreError::NotANumber { .. })
        ));
        assert_eq!(client.compare_set("key", b"value", b"new").unwrap(), b"new");
        assert_eq!(
            client.compare_set("key", b"value", b"newer").unwrap(),
            b"new"
        );
        assert!(client.delete("key").unwrap());
        assert!(!client.delete("key").unwrap());
        assert_eq!(bench.server.refused(), 0);
    }
}

#[test]
fn values_up_to_the_bound_come_through_and_longer_ones_are_not_sent() {
    for bench in Bench::both() {
        let client = bench.client();
        let value: Vec<u8> = (0..VALUE_BYTES_MAX)
            .map(|index| (index % 251) as u8)
            .collect();
        client.set("large", &value).unwrap();
        assert!(client.get("large", SECONDS).unwrap() == value);
        assert!(client.compare_set("large", &value, &value).unwrap() == value);

        let error = client
            .set("large", &vec![0; VALUE_BYTES_MAX + 1])
            .unwrap_err();
        assert!(matches!(error, StoreError::ValueTooLarge { .. }), "{error}");
        let long = "k".repeat(KEY_BYTES_MAX + 1);
        assert!(matches!(
            client.add(&long, 1),
            Err(StoreError::KeyTooLong { bytes: 4097, .. })
        ));
        assert!(matches!(
            client.check(&[&long[1..]; 300]),
            Err(StoreError::TooManyKeys { .. })
        ));
        assert!(client.check(&["large"]).unwrap());
    }
}

#[test]
fn a_get_blocks_until_another_client_sets_the_key() {
    for bench in Bench::both() {
        let (reader, waiter, writer) = (bench.client(), bench.client(), bench.client());
        thread::scope(|scope| {
            let value = scope.spawn(|| reader.get("late", SECONDS).unwrap());
            let both = scope.spawn(|| waiter.wait(&["late", "later", "late"], SECONDS).unwrap());
            writer.set("late", b"1").unwrap();
            assert_eq!(value.join().unwrap(), b"1");
            writer.add("later", 1).unwrap();
            both.join().unwrap();
        });
    }
}

#[test]
fn a_wait_that_times_out_names_what_is_missing_and_the_connection_lives_on() {
    for bench in Bench::both() {
        let client = bench.client();
        client.set("rank/0", b"").unwrap();
        let error = client
            .wait(&["rank/0", "rank/1", "rank/2"], SOON)
            .unwrap_err();
        let StoreError::TimedOut {
            missing,
            waited,
            server,
            ..
        } = &error
        else {
            panic!("{error}")
        };
        assert_eq!(missing, &["rank/1", "rank/2"]);
        assert_eq!(*server, bench.server.addr().to_string());
        assert!(*waited >= SOON && *waited < SECONDS && error.is_deadline());
        let text = error.to_string();
        assert!(
            text.starts_with("wait at the store 127.0.0.1:")
                && text.contains(r#""rank/1", "rank/2" are not there"#),
            "{text}"
        );
        client.set("rank/1", b"").unwrap();
        assert!(matches!(
            client.get("rank/2", Duration::ZERO),
            Err(StoreError::TimedOut { .. })
        ));
    }
}

#[test]
fn many_clients_count_together() {
    for bench in Bench::both() {
        thread::scope(|scope| {
            for _ in 0..32 {
                scope.spawn(|| {
                    let client = bench.client();
                    for _ in 0..50 {
                        if client.add("count", 1).unwrap() == 32 * 50 {
                            client.set("all", b"").unwrap();
                        }
                    }
                    client.wait(&["all"], SECONDS).unwrap();
                });
            }
        });
        assert_eq!(
            bench.client().get("count", Duration::ZERO).unwrap(),
            b"1600"
        );
    }
}

#[test]
fn a_wrong_token_is_refused_at_once_on_both_sides() {
    let bench = Bench::new();
    let started = Instant::now();
    let error = Client::connect(
        &bench.server.addr().to_string(),
        &Token::derived("guess"),
        SECONDS,
    )
    .unwrap_err();
    assert!(
        matches!(
            error,
            StoreError::Auth {
                source: AuthError::Refused,
                ..
            }
        ),
        "{error}"
    );
    assert!(error.hint().unwrap().contains("PACELINE_JOB_TOKEN"));
    assert!(started.elapsed() < SECONDS / 4);
    // The server counts after it has answered.
    while bench.server.refused() == 0 {
        assert!(started.elapsed() < SECONDS);
        thread::yield_now();
    }
    bench.assert_serves_others();
}

#[test]
fn a_client_waits_for_a_server_that_starts_later() {
    let token = Token::derived("job");
    let addr = SocketAddr::from(([127, 0, 0, 1], free_ports(1)));
    thread::scope(|scope| {
        let client = scope.spawn(|| Client::connect(&addr.to_string(), &token, SECONDS));
        thread::sleep(Duration::from_millis(30));
        let _server = Server::bind(addr, &token).unwrap();
        client.join().unwrap().unwrap().set("here", b"").unwrap();
    });
}

#[test]
fn a_server_that_is_gone_is_known_to_be_however_patient_an_attempt_is() {
    let addr = format!("127.0.0.1:{}", free_ports(1));
    let patience = Duration::from_secs(3600);
    let client = Client::connect_patiently(&addr, &Token::derived("job"), false, SOON, patience);
    let Err(StoreError::Connect { waited, .. }) = client else {
        panic!("{client:?}")
    };
    assert!(waited <= SOON, "{waited:?}");
}

#[test]
fn a_connection_that_never_comes_names_server_time_and_reason() {
    let addr = format!("127.0.0.1:{}", free_ports(1));
    let error = Client::connect(&addr, &Token::derived("job"), SOON).unwrap_err();
    let StoreError::Connect {
        server, attempts, ..
    } = &error
    else {
        panic!("{error}")
    };
    assert!(
        *server == addr && *attempts > 1 && error.to_string().contains("refused"),
        "{error}"
    );

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let started = Instant::now();
    let error = Client::connect(&addr, &Token::derived("job"), SOON).unwrap_err();
    assert!(error.to_string().contains("stayed silent"), "{error}");
    assert!(started.elapsed() < SECONDS / 4);
}

#[test]
fn silent_peers_are_dropped_in_time() {
    let bench = Bench::with(ServerOptions {
        join_timeout: SOON,
        ..ServerOptions::default()
    });
    let member = bench.client();
    let mut peers: Vec<TcpStream> = (0..8).map(|_| bench.unauthenticated()).collect();
    // Half a greeting is as good as none.
    peers[0].write_all(b"PLA1").unwrap();
    peers.into_iter().for_each(assert_closed);
    assert_eq!(bench.server.refused(), 8);
    member.set("still", b"here").unwrap();
}

#[test]
fn a_crowd_of_unauthenticated_peers_keeps_no_client_out() {
    let options = ServerOptions {
        connections_max: 16,
        unauthenticated_max: 8,
        join_timeout: SECONDS,
        ..ServerOptions::default()
    };
    let bench = Bench::with(options);
    let member = bench.client();
    let mut peers: Vec<TcpStream> = (0..64).map(|_| bench.unauthenticated()).collect();
    bench.assert_serves_others();
    member.set("still", b"here").unwrap();
    // The oldest went first, long before their time was over; the last ones still have theirs.
    peers.drain(..32).for_each(assert_closed);
    assert!(
        (56..=57).contains(&bench.server.refused()),
        "{}",
        bench.server.refused()
    );
}

#[test]
fn peers_with_another_protocol_are_dropped() {
    let bench = Bench::new();
    let mut peer = bench.unauthenticated();
    peer.write_all(b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n")
        .unwrap();
    assert_closed(peer);
    assert_eq!(bench.server.refused(), 1);
    bench.assert_serves_others();
}

#[test]
fn an_oversized_frame_is_refused_by_its_head_alone() {
    let bench = Bench::new();
    for head in [u32::MAX, wire::BODY_BYTES_MAX as u32 + 1] {
        let mut member = bench.raw_member();
        member.write_all(&head.to_le_bytes()).unwrap();
        assert_closed(member);
    }
    assert_eq!(bench.server.refused(), 2);
    bench.assert_serves_others();
}

#[test]
fn a_client_that_stalls_in_a_message_is_dropped_and_harms_nobody() {
    let bench = Bench::with(ServerOptions {
        stall_timeout: SOON,
        ..ServerOptions::default()
    });
    let idle = bench.client();
    let mut member = bench.raw_member();
    let frame = wire::Request::Set {
        key: "half",
        value: &[1; 1000],
    }
    .encode();
    member.write_all(&frame[..500]).unwrap();
    bench.assert_serves_others();
    assert_closed(member);
    assert_eq!(bench.server.refused(), 1);
    // A client that has nothing to say may stay as long as it likes.
    assert!(!idle.check(&["half"]).unwrap());
}

#[test]
fn a_client_that_does_not_take_its_answers_is_dropped_and_harms_nobody() {
    let bench = Bench::with(ServerOptions {
        stall_timeout: SOON,
        ..ServerOptions::default()
    });
    bench.client().set("large", &vec![7; 2 << 20]).unwrap();
    let mut member = bench.raw_member();
    let request = wire::Request::Get {
        timeout_ms: 0,
        key: "large",
    }
    .encode();
    // Many answers of 2 MiB: more than any socket buffers.
    member.write_all(&request.repeat(64)).unwrap();
    bench.assert_serves_others();
    let started = Instant::now();
    while bench.server.refused() == 0 {
        assert!(started.elapsed() < SECONDS);
        bench.assert_serves_others();
    }
}

#[test]
fn a_client_that_floods_harms_nobody() {
    let bench = Bench::new();
    let stop = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let flooder = bench.raw_member();
                flooder.set_write_timeout(Some(SOON)).unwrap();
                let request = wire::Request::Check {
                    keys: vec!["a", "b"],
                }
                .encode()
                .repeat(4000);
                // Never reads. Its buffers fill, its writes time out, it goes on.
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let _ = (&flooder).write(&request);
                }
            });
        }
        for _ in 0..20 {
            bench.assert_serves_others();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn a_client_that_dies_while_it_waits_gives_its_place_back() {
    let bench = Bench::with(ServerOptions {
        connections_max: 2,
        ..ServerOptions::default()
    });
    let writer = bench.client();
    let mut waiter = bench.raw_member();
    waiter
        .write_all(
            &wire::Request::Get {
                timeout_ms: 3_600_000,
                key: "never",
            }
            .encode(),
        )
        .unwrap();
    waiter.shutdown(Shutdown::Both).unwrap();
    drop(waiter);
    // Retried until the place is free.
    let next = bench.client();
    writer.set("never", b"now").unwrap();
    assert_eq!(next.get("never", SECONDS).unwrap(), b"now");
}

#[test]
fn requests_sent_ahead_are_answered_in_order_also_behind_a_wait() {
    let bench = Bench::new();
    let mut member = bench.raw_member();
    let add = wire::Request::Add {
        key: "n",
        amount: 1,
    }
    .encode();
    let get = wire::Request::Get {
        timeout_ms: 20_000,
        key: "late",
    }
    .encode();
    member.write_all(&[&add[..], &get, &add].concat()).unwrap();
    let writer = bench.client();
    writer.wait(&["n"], SECONDS).unwrap();
    // This one arrives while its sender waits.
    member.write_all(&add).unwrap();
    writer.set("late", b"x").unwrap();
    let mut expected = wire::Reply::Number(1).encode();
    expected.extend(wire::Reply::Value(Arc::new(b"x".to_vec())).encode());
    expected.extend(wire::Reply::Number(2).encode());
    expected.extend(wire::Reply::Number(3).encode());
    let mut answers = vec![0; expected.len()];
    member.read_exact(&mut answers).unwrap();
    assert_eq!(answers, expected);
}

#[test]
fn a_full_store_says_so_and_keeps_serving() {
    let bench = Bench::with(ServerOptions {
        bytes_max: 1 << 20,
        ..ServerOptions::default()
    });
    let client = bench.client();
    for index in 0..4 {
        client.set(&index.to_string(), &[0; 200 << 10]).unwrap();
    }
    // Whether the value fits no more in the table or already not on its way there, the store stays bounded.
    let error = bench.client().set("more", &[0; 300 << 10]).unwrap_err();
    assert!(
        matches!(error, StoreError::Full { .. } | StoreError::Lost { .. }),
        "{error}"
    );
    assert!(client.check(&["0", "3"]).unwrap() && !client.check(&["more"]).unwrap());
    client.delete("0").unwrap();
    client.delete("1").unwrap();
    client.set("less", &[0; 100 << 10]).unwrap();
}

#[test]
fn half_messages_are_bounded_together_and_the_largest_holder_goes() {
    let bench = Bench::with(ServerOptions {
        bytes_max: 4 << 20,
        ..ServerOptions::default()
    });
    let small = bench.client();
    let hogs: Vec<TcpStream> = (0..8).map(|_| bench.raw_member()).collect();
    let frame = wire::Request::Set {
        key: "hog",
        value: &[1; 2 << 20],
    }
    .encode();
    let started = Instant::now();
    for mut hog in &hogs {
        // All but the last byte, so that the server has to keep it; one that is dropped fails to write.
        let _ = hog.write_all(&frame[..frame.len() - 1]);
        small.add("small", 1).unwrap();
    }
    while bench.server.refused() < 4 {
        assert!(started.elapsed() < SECONDS);
        thread::yield_now();
    }
    assert_eq!(small.get("small", Duration::ZERO).unwrap(), b"8");
    bench.assert_serves_others();
}

#[test]
fn a_server_that_ends_wakes_its_waiters_and_their_first_error_stays() {
    let bench = Bench::new();
    let client = bench.client();
    let error = thread::scope(|scope| {
        let waiter = scope.spawn(|| client.get("never", SECONDS));
        drop(bench);
        waiter.join().unwrap().unwrap_err()
    });
    assert!(
        matches!(&error, StoreError::Lost { operation: "get", key, .. } if key == "never"),
        "{error}"
    );
    assert_eq!(
        client.set("key", b"").unwrap_err().to_string(),
        error.to_string()
    );
}

#[test]
fn a_server_that_ends_gives_its_port_back() {
    let bench = Bench::new();
    let addr = bench.server.addr();
    let error = Server::bind(addr, &bench.token).unwrap_err();
    assert!(
        error.to_string().contains(&addr.to_string())
            && error.hint().unwrap().contains("MASTER_PORT"),
        "{error}"
    );
    let _client = bench.client();
    let token = bench.token.clone();
    drop(bench);
    Server::bind(addr, &token).unwrap();
}

#[test]
fn ranks_meet_at_the_master_port_or_at_the_launchers_store() {
    let env = WorkerEnv {
        world: 2,
        local_world: 2,
        master_port: free_ports(1),
        ..WorkerEnv::alone()
    };
    thread::scope(|scope| {
        let other = WorkerEnv {
            rank: 1,
            local_rank: 1,
            ..env.clone()
        };
        let other = scope.spawn(move || connect_or_host(&other, SECONDS).unwrap());
        let (server, zero) = connect_or_host(&env, SECONDS).unwrap();
        assert!(server.as_ref().unwrap().addr().ip().is_loopback());
        let (none, one) = other.join().unwrap();
        assert!(none.is_none());
        one.set("one", b"1").unwrap();
        assert_eq!(zero.get("one", SECONDS).unwrap(), b"1");

        let third = WorkerEnv {
            store: Some(zero.server().to_owned()),
            ..env.clone()
        };
        let (none, third) = connect_or_host(&third, SECONDS).unwrap();
        assert!(none.is_none() && third.check(&["one"]).unwrap());
    });
}

#[test]
fn a_rank_alone_needs_no_address_and_lets_nobody_in() {
    let env = WorkerEnv::alone();
    let (server, client) = connect_or_host(&env, SECONDS).unwrap();
    client.set("key", b"").unwrap();
    let addr = server.unwrap().addr();
    assert!(addr.ip().is_loopback());
    let error = connect_or_host(&WorkerEnv { world: 2, ..env }, SECONDS).unwrap_err();
    assert!(matches!(error, StoreError::NoMeetingPoint { world: 2 }));
}

#[test]
fn ranks_of_several_nodes_meet_on_all_addresses() {
    let env = WorkerEnv {
        world: 2,
        node_count: 2,
        master_port: free_ports(1),
        ..WorkerEnv::alone()
    };
    let (server, _client) = connect_or_host(&env, SECONDS).unwrap();
    assert!(server.unwrap().addr().ip().is_unspecified());
}

mod contract;
mod corpus;
mod hostile;
mod semantics;
mod tls;
