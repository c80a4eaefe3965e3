//! Two ends, and somebody between them.

use std::net::{Shutdown, TcpListener};
use std::thread;
use std::time::Duration;

use rustls::crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256;
use rustls::{CipherSuiteCommon, SupportedCipherSuite, Tls13CipherSuite};

use super::*;
use crate::auth::Proved;
use crate::token::Token;

/// Long enough for any machine; a test that reaches it fails.
const SECONDS: Duration = Duration::from_secs(20);

fn soon() -> Instant {
    Instant::now() + SECONDS
}

fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near, listener.accept().unwrap().0)
}

/// Both ends of a handshake, the dialer's first.
fn shaken(near: TcpStream, far: TcpStream) -> (Result<Tls, AuthError>, Result<Tls, AuthError>) {
    thread::scope(|scope| {
        let far = scope.spawn(|| Tls::handshake(far, Side::Listener, soon()));
        let near = Tls::handshake(near, Side::Dialer, soon());
        (near, far.join().unwrap())
    })
}

fn pair() -> (Tls, Tls) {
    let (near, far) = tcp_pair();
    let (near, far) = shaken(near, far);
    (near.unwrap(), far.unwrap())
}

/// Somebody between two ends: what the dialer and the listener are connected to.
fn between() -> ((TcpStream, TcpStream), (TcpStream, TcpStream)) {
    (tcp_pair(), tcp_pair())
}

fn within(tls: &Tls) -> Within<'_> {
    Within {
        tls,
        deadline: soon(),
    }
}

/// Bytes that no compression and no repetition hides a mistake in.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Passes on what comes until either end is closed; `change` may change it. What came is returned.
fn relay(
    mut from: impl Read,
    mut to: impl Write,
    mut change: impl FnMut(usize, &mut [u8]),
) -> Vec<u8> {
    let (mut all, mut bytes) = (Vec::new(), vec![0; 64 << 10]);
    while let Ok(n) = from.read(&mut bytes)
        && n > 0
    {
        let before = all.len();
        all.extend_from_slice(&bytes[..n]);
        change(before, &mut bytes[..n]);
        if to.write_all(&bytes[..n]).is_err() {
            break;
        }
    }
    all
}

/// Writes all of `sent` from `ours` while another thread reads `expected` from it.
fn exchange(ours: &Tls, sent: &[u8], expected: &[u8]) {
    thread::scope(|scope| {
        scope.spawn(|| within(ours).write_all(sent).unwrap());
        let mut got = vec![0; expected.len()];
        within(ours).read_exact(&mut got).unwrap();
        assert!(got == expected);
    });
}

#[test]
fn what_one_end_writes_the_other_reads_both_ways_at_once() {
    let (near, far) = pair();
    for len in [1, 1000, 16 << 10, (3 << 20) + 7] {
        let (one, other) = (noise(1, len), noise(2, 2 * len + 1));
        thread::scope(|scope| {
            scope.spawn(|| exchange(&near, &one, &other));
            exchange(&far, &other, &one);
        });
    }
}

#[test]
fn nothing_that_is_sent_can_be_read_on_the_way() {
    let ((near, left), (right, far)) = between();
    let secret = b"the gradients of another".repeat(100);
    let seen = thread::scope(|scope| {
        let back = (right.try_clone().unwrap(), left.try_clone().unwrap());
        scope.spawn(move || relay(back.0, back.1, |_, _| {}));
        let forth = scope.spawn(move || relay(left, right, |_, _| {}));
        let (near, far) = shaken(near, far);
        let (near, far) = (near.unwrap(), far.unwrap());
        exchange(&far, &secret, &[]);
        exchange(&near, &secret, &secret);
        drop((near, far));
        forth.join().unwrap()
    });
    assert!(seen.len() > secret.len());
    assert!(!seen.windows(8).any(|bytes| bytes == &secret[..8]));
}

#[test]
fn a_reader_with_little_room_learns_that_more_waits_inside() {
    let (near, far) = pair();
    let mut to = &near;
    assert!(!far.has_pending());
    to.write_all(b"first").unwrap();
    to.write_all(b"second").unwrap();
    let mut got = [0; 3];
    within(&far).read_exact(&mut got).unwrap();
    // Whether the second record has come yet is up to the kernel; what is left of the first has.
    assert!(far.has_pending());
    let mut rest = [0; 8];
    within(&far).read_exact(&mut rest).unwrap();
    assert_eq!((&got, &rest), (b"fir", b"stsecond"));
    assert!(!far.has_pending());
    let error = (&far).read(&mut rest).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
}

#[test]
fn a_writer_whose_peer_does_not_read_comes_again_and_loses_nothing() {
    let (near, far) = pair();
    let bytes = noise(3, 32 << 20);
    let mut sent = 0;
    let blocked = loop {
        match (&near).write(&bytes[sent..]) {
            Ok(n) => sent += n,
            Err(error) => break error,
        }
    };
    assert_eq!(blocked.kind(), io::ErrorKind::WouldBlock);
    // A word that is not offered again is left out rather than cut in two.
    near.post(b"never");
    thread::scope(|scope| {
        scope.spawn(|| within(&near).write_all(&bytes[sent..]).unwrap());
        let mut got = vec![0; bytes.len()];
        within(&far).read_exact(&mut got).unwrap();
        assert!(got == bytes);
    });
    near.post(b"now");
    let mut word = [0; 3];
    within(&far).read_exact(&mut word).unwrap();
    assert_eq!(&word, b"now");
}

#[test]
fn the_end_of_the_connection_is_the_end() {
    let (near, far) = pair();
    (&near).write_all(b"last").unwrap();
    near.tcp().shutdown(Shutdown::Both).unwrap();
    let mut got = Vec::new();
    within(&far).read_to_end(&mut got).unwrap();
    assert_eq!(got, b"last");
    assert_eq!((&far).read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn a_byte_changed_on_the_way_is_refused_where_it_arrives_and_reset_where_it_came_from() {
    let ((near, left), (right, far)) = between();
    // A place behind the handshake.
    const AT: usize = 4000;
    thread::scope(|scope| {
        let back = (right.try_clone().unwrap(), left.try_clone().unwrap());
        scope.spawn(move || relay(back.0, back.1, |_, _| {}));
        scope.spawn(move || {
            relay(left, right, |before, bytes| {
                if (before..before + bytes.len()).contains(&AT) {
                    bytes[AT - before] ^= 1;
                }
            })
        });
        let (near, far) = shaken(near, far);
        let (near, far) = (near.unwrap(), far.unwrap());
        within(&near).write_all(&noise(4, 2 * AT)).unwrap();
        let error = within(&far).read_exact(&mut vec![0; 2 * AT]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(error.to_string().contains("fail TLS's check"), "{error}");
        // The same again, and not a wait for more.
        let again = (&far).read(&mut [0; 8]).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::InvalidData);
        let error = within(&near).read(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}");
        drop((near, far));
    });
}

#[test]
fn both_ends_derive_one_binding_and_no_other_connection_does() {
    let (one, other) = (pair(), pair());
    assert_eq!(one.0.binding().unwrap(), one.1.binding().unwrap());
    assert_ne!(one.0.binding().unwrap(), other.0.binding().unwrap());
}

/// The outcomes of a proof between a dialer and a listener, and whether they speak TLS.
fn proved(
    (near, near_tls): (TcpStream, bool),
    (far, far_tls): (TcpStream, bool),
) -> [Result<(), AuthError>; 2] {
    let token = Token::derived("job");
    let prove = |stream: TcpStream, tls: bool, side: Side| {
        Proved::meet(stream, &token, side, "store", tls, soon()).map(drop)
    };
    thread::scope(|scope| {
        let far = scope.spawn(|| prove(far, far_tls, Side::Listener));
        let near = prove(near, near_tls, Side::Dialer);
        [near, far.join().unwrap()]
    })
}

#[test]
fn the_token_is_proved_through_tls() {
    let (near, far) = tcp_pair();
    assert_eq!(proved((near, true), (far, true)), [Ok(()), Ok(())]);
}

#[test]
fn who_ends_tls_in_the_middle_and_passes_on_what_it_reads_is_refused_at_both_ends() {
    let ((near, left), (right, far)) = between();
    let outcomes = thread::scope(|scope| {
        scope.spawn(|| {
            let left = Tls::handshake(left, Side::Listener, soon()).unwrap();
            let right = Tls::handshake(right, Side::Dialer, soon()).unwrap();
            thread::scope(|scope| {
                scope.spawn(|| {
                    let back = relay(within(&right), within(&left), |_, _| {});
                    // The middle hears all of it; it is worth nothing.
                    assert!(back.starts_with(b"PLA1"));
                    let _ = left.tcp().shutdown(Shutdown::Both);
                });
                let forth = relay(within(&left), within(&right), |_, _| {});
                assert!(forth.starts_with(b"PLA1"));
                let _ = right.tcp().shutdown(Shutdown::Both);
            });
        });
        proved((near, true), (far, true))
    });
    assert_eq!(
        outcomes,
        [Err(AuthError::Refused), Err(AuthError::WrongProof)]
    );
}

#[test]
fn a_proof_from_the_middle_with_a_forged_verdict_is_refused_by_the_dialer() {
    let ((near, left), (right, far)) = between();
    let outcomes = thread::scope(|scope| {
        scope.spawn(|| {
            let left = Tls::handshake(left, Side::Listener, soon()).unwrap();
            let right = Tls::handshake(right, Side::Dialer, soon()).unwrap();
            thread::scope(|scope| {
                scope.spawn(|| {
                    // The verdict follows the challenge of 36 bytes: "refused" becomes "accepted".
                    relay(within(&right), within(&left), |before, bytes| {
                        if before == 36 {
                            bytes[0] = 1;
                        }
                    });
                    let _ = left.tcp().shutdown(Shutdown::Both);
                });
                relay(within(&left), within(&right), |_, _| {});
                let _ = right.tcp().shutdown(Shutdown::Both);
            });
        });
        proved((near, true), (far, true))
    });
    assert_eq!(
        outcomes,
        [Err(AuthError::WrongProof), Err(AuthError::WrongProof)]
    );
}

#[test]
fn when_only_one_end_speaks_tls_both_name_the_variable_at_once() {
    for dialer in [true, false] {
        let (near, far) = tcp_pair();
        let started = Instant::now();
        let [near, far] = proved((near, dialer), (far, !dialer));
        let (with, without) = if dialer { (near, far) } else { (far, near) };
        assert_eq!(with, Err(AuthError::PlainPeer));
        assert_eq!(without, Err(AuthError::TlsPeer));
        for error in [with, without].map(Result::unwrap_err) {
            assert!(error.to_string().contains("PACELINE_TLS") && error.is_final());
            assert!(error.hint().unwrap().contains("PACELINE_TLS"));
        }
        assert!(started.elapsed() < SECONDS / 4);
    }
}

#[test]
fn another_program_at_the_other_end_is_named_by_its_first_bytes() {
    let (near, mut far) = tcp_pair();
    far.write_all(b"HTTP/1.1 400 Bad Request\r\n").unwrap();
    let error = Tls::handshake(near, Side::Dialer, soon()).unwrap_err();
    assert_eq!(error, AuthError::Foreign { got: *b"HTTP" });
}

#[test]
fn a_peer_that_is_silent_or_leaves_ends_the_handshake() {
    let (near, far) = tcp_pair();
    let deadline = Instant::now() + Duration::from_millis(50);
    let error = Tls::handshake(near, Side::Dialer, deadline).unwrap_err();
    assert!(matches!(error, AuthError::TimedOut { .. }), "{error}");
    assert!(Instant::now() >= deadline);
    // What it had to say is in the buffers of the other end, and nothing comes after it.
    let error = Tls::handshake(far, Side::Listener, soon()).unwrap_err();
    assert!(matches!(error, AuthError::Closed { .. }), "{error}");
}

#[test]
fn long_traffic_changes_the_keys_and_nobody_notices() {
    // Another crate of the build may turn on TLS 1.2, which adds a variant.
    let suite = TLS13_AES_128_GCM_SHA256
        .tls13()
        .expect("a suite of TLS 1.3");
    // One key for a few records in place of 2^24.
    let suite = Box::leak(Box::new(Tls13CipherSuite {
        common: CipherSuiteCommon {
            confidentiality_limit: 5,
            ..suite.common
        },
        ..*suite
    }));
    let keys = Keys::new(SupportedCipherSuite::Tls13(suite)).unwrap();
    let (near, far) = tcp_pair();
    let near = Tls::begin_with(&keys, near, Side::Dialer).unwrap();
    let far = Tls::begin_with(&keys, far, Side::Listener).unwrap();
    let (one, other) = (noise(5, 4 << 20), noise(6, 1 << 20));
    thread::scope(|scope| {
        scope.spawn(|| exchange(&near, &one, &other));
        exchange(&far, &other, &one);
    });
}
