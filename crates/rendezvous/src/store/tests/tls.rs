//! The store through TLS: what differs from the store without.

use super::*;
use crate::net::deadline_after;
use crate::tls::Tls;

fn options() -> ServerOptions {
    ServerOptions {
        tls: true,
        ..ServerOptions::default()
    }
}

#[test]
fn a_client_and_a_server_of_which_one_speaks_tls_name_the_variable_at_once() {
    for tls in [false, true] {
        let bench = Bench::with(ServerOptions { tls, ..options() });
        let started = Instant::now();
        let server = bench.server.addr().to_string();
        let error = Client::connect_as(&server, &bench.token, !tls, SECONDS).unwrap_err();
        let expected = match tls {
            true => AuthError::TlsPeer,
            false => AuthError::PlainPeer,
        };
        assert!(
            matches!(&error, StoreError::Auth { source, .. } if *source == expected),
            "{error}"
        );
        assert!(error.to_string().contains("PACELINE_TLS"), "{error}");
        assert!(started.elapsed() < SECONDS / 4);
        while bench.server.refused() == 0 {
            assert!(started.elapsed() < SECONDS);
            thread::yield_now();
        }
        bench.assert_serves_others();
    }
}

#[test]
fn another_token_opens_no_store_through_tls() {
    let bench = Bench::with(options());
    let server = bench.server.addr().to_string();
    let guess = Token::derived("guess");
    let error = Client::connect_as(&server, &guess, true, SECONDS).unwrap_err();
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
    bench.assert_serves_others();
}

#[test]
fn peers_that_begin_or_finish_tls_and_then_stay_silent_are_dropped_in_time() {
    let bench = Bench::with(ServerOptions {
        join_timeout: SOON,
        ..options()
    });
    let member = bench.client();
    let mut silent: Vec<TcpStream> = (0..3).map(|_| bench.unauthenticated()).collect();
    // The head of a handshake record, and some that no record begins with.
    silent[0]
        .write_all(&[0x16, 0x03, 0x01, 0x10, 0x00])
        .unwrap();
    silent[1].write_all(&[0xFF; 64]).unwrap();
    let shaken = Tls::handshake(
        bench.unauthenticated(),
        Side::Dialer,
        deadline_after(SECONDS),
    )
    .unwrap();
    silent.push(shaken.tcp().try_clone().unwrap());
    for peer in silent {
        peer.set_nonblocking(false).unwrap();
        peer.set_read_timeout(Some(SECONDS)).unwrap();
        assert_closed(peer);
    }
    assert_eq!(bench.server.refused(), 4);
    member.set("still", b"here").unwrap();
}

#[test]
fn requests_that_come_in_many_records_at_once_are_all_answered() {
    let bench = Bench::with(options());
    let token = &bench.token;
    let deadline = deadline_after(SECONDS);
    let tls = Tls::handshake(bench.unauthenticated(), Side::Dialer, deadline).unwrap();
    let mut within = crate::tls::Within {
        tls: &tls,
        deadline,
    };
    let claim = crate::auth::Claim {
        purpose: PURPOSE,
        binding: Some(tls.binding().unwrap()),
    };
    crate::auth::prove(&mut within, token, Side::Dialer, &claim).unwrap();
    // More than the server reads at a time, and never an answer taken in between.
    let value = vec![7; 30_000];
    for _ in 0..12 {
        let set = wire::Request::Set {
            key: "key",
            value: &value,
        };
        within.write_all(&set.encode()).unwrap();
    }
    let mut expected = Vec::new();
    wire::Reply::Done.encode_into(&mut expected);
    let expected = expected.repeat(12);
    let mut got = vec![0; expected.len()];
    within.read_exact(&mut got).unwrap();
    assert_eq!(got, expected);
}

#[test]
fn ranks_meet_through_tls_where_their_environment_says_so() {
    let env = WorkerEnv {
        world: 2,
        local_world: 2,
        master_port: free_ports(1),
        tls: true,
        ..WorkerEnv::alone()
    };
    let (_server, zero) = connect_or_host(&env, SECONDS).unwrap();
    let one = WorkerEnv {
        rank: 1,
        local_rank: 1,
        ..env
    };
    let (_, client) = connect_or_host(&one, SECONDS).unwrap();
    client.set("one", b"1").unwrap();
    assert_eq!(zero.get("one", SECONDS).unwrap(), b"1");
    let plain = WorkerEnv { tls: false, ..one };
    let error = connect_or_host(&plain, SECONDS).unwrap_err();
    assert!(error.to_string().contains("PACELINE_TLS"), "{error}");
}
