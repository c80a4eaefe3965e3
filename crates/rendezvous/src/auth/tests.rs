//! Honest peers meet; every kind of dishonest one is told apart.

use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use super::*;

fn proof(
    token: &Token,
    side: Side,
    claim: &Claim<'_>,
    dialer: &Nonce,
    listener: &Nonce,
) -> [u8; PROOF_BYTES] {
    let (dialer, listener) = (*dialer, *listener);
    let mac = Nonces { dialer, listener }.keyed(token, side, claim);
    mac.finalize().into_bytes().into()
}

/// [`super::prove`] without TLS.
fn prove<S: Read + Write>(
    stream: &mut S,
    token: &Token,
    side: Side,
    purpose: &str,
) -> Result<(), AuthError> {
    super::prove(stream, token, side, &Claim::plain(purpose))
}

/// Plays both sides over a socket pair; each side's outcome, dialer first.
fn meet(
    dialer: (&Token, &str),
    listener: (&Token, &str),
) -> (Result<(), AuthError>, Result<(), AuthError>) {
    let (mut near, mut far) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        let answer = scope.spawn(move || prove(&mut far, listener.0, Side::Listener, listener.1));
        (
            prove(&mut near, dialer.0, Side::Dialer, dialer.1),
            answer.join().unwrap(),
        )
    })
}

#[test]
fn peers_with_the_same_token_believe_each_other() {
    let token = Token::derived("job");
    assert_eq!(meet((&token, "store"), (&token, "store")), (Ok(()), Ok(())));
}

#[test]
fn a_wrong_token_is_refused_on_both_sides() {
    let outcome = meet(
        (&Token::derived("a"), "store"),
        (&Token::derived("b"), "store"),
    );
    assert_eq!(
        outcome,
        (Err(AuthError::Refused), Err(AuthError::WrongProof))
    );
}

#[test]
fn a_proof_for_one_purpose_opens_no_other() {
    let token = Token::derived("job");
    let outcome = meet((&token, "store"), (&token, "mesh"));
    assert_eq!(
        outcome,
        (Err(AuthError::Refused), Err(AuthError::WrongProof))
    );
}

#[test]
fn a_listener_that_only_claims_to_accept_is_refused() {
    let token = Token::derived("job");
    let (mut near, mut far) = UnixStream::pair().unwrap();
    let outcome = thread::scope(|scope| {
        scope.spawn(move || {
            let mut message = [0; GREETING_BYTES];
            far.read_exact(&mut message).unwrap();
            far.write_all(&greeting(MAGIC, &[7; 32])).unwrap();
            far.read_exact(&mut message[..PROOF_BYTES]).unwrap();
            far.write_all(&[ACCEPTED; VERDICT_BYTES]).unwrap();
        });
        prove(&mut near, &token, Side::Dialer, "store")
    });
    assert_eq!(outcome, Err(AuthError::WrongProof));
}

#[test]
fn a_proof_sent_back_to_its_author_is_refused() {
    let token = Token::derived("job");
    let (mut near, mut far) = UnixStream::pair().unwrap();
    let outcome = thread::scope(|scope| {
        scope.spawn(move || {
            // Reflects the dialer's nonce and its proof.
            let mut hello = [0; GREETING_BYTES];
            far.read_exact(&mut hello).unwrap();
            far.write_all(&hello).unwrap();
            let mut answer = [ACCEPTED; VERDICT_BYTES];
            far.read_exact(&mut answer[1..]).unwrap();
            far.write_all(&answer).unwrap();
        });
        prove(&mut near, &token, Side::Dialer, "store")
    });
    assert_eq!(outcome, Err(AuthError::WrongProof));
}

#[test]
fn a_recorded_proof_does_not_open_a_second_time() {
    let token = Token::derived("job");
    let hello = greeting(MAGIC, &[1; 32]);
    let (handshake, _) = Nonces::greet([2; 32], &hello).unwrap();
    let recorded = proof(
        &token,
        Side::Dialer,
        &Claim::plain("store"),
        &[1; 32],
        &[2; 32],
    );
    assert_eq!(
        handshake.judge(&recorded, &token, &Claim::plain("store")).0,
        Ok(())
    );
    let (handshake, _) = Nonces::greet([3; 32], &hello).unwrap();
    assert_eq!(
        handshake.judge(&recorded, &token, &Claim::plain("store")).0,
        Err(AuthError::WrongProof)
    );
}

#[test]
fn the_proof_is_hmac_sha256_over_the_documented_text() {
    // Expected value computed with Python's hmac module, so that the format cannot drift unnoticed.
    let token = Token::from_hex(&"0b".repeat(32)).unwrap();
    let bytes = proof(
        &token,
        Side::Dialer,
        &Claim::plain("store"),
        &[1; 32],
        &[2; 32],
    );
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(
        hex,
        "4e4d929c2aa4f73cdc78d5b45403dd8c88fc1e64765df576a1833cb5a0069ff6"
    );
    let claim = Claim {
        purpose: "store",
        binding: Some([3; 32]),
    };
    let bytes = proof(&token, Side::Dialer, &claim, &[1; 32], &[2; 32]);
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(
        hex,
        "b034efdc952e28121567be2bdc43c9e67f09d9ab144265910b93b3358114f7cb"
    );
}

/// Keeps what goes through it.
struct Tap<S> {
    stream: S,
    sent: Vec<u8>,
}

impl<S: Read> Read for Tap<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.read(buffer)
    }
}

impl<S: Write> Write for Tap<S> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let n = self.stream.write(buffer)?;
        self.sent.extend_from_slice(&buffer[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

#[test]
fn without_tls_the_documented_messages_and_no_others_are_sent() {
    let token = Token::derived("job");
    let ends = UnixStream::pair().unwrap();
    let [dialer, listener] = thread::scope(|scope| {
        let play = |stream: UnixStream, side: Side| {
            let token = &token;
            scope.spawn(move || {
                let mut tap = Tap {
                    stream,
                    sent: Vec::new(),
                };
                prove(&mut tap, token, side, "store").unwrap();
                tap.sent
            })
        };
        let ends = [play(ends.0, Side::Dialer), play(ends.1, Side::Listener)];
        ends.map(|end| end.join().unwrap())
    });
    let nonce = |sent: &[u8]| -> Nonce { sent[4..GREETING_BYTES].try_into().unwrap() };
    let (ours, theirs) = (nonce(&dialer), nonce(&listener));
    let claim = Claim::plain("store");
    let proof = |side| proof(&token, side, &claim, &ours, &theirs);
    let expected = [b"PLA1", &ours[..], &proof(Side::Dialer)].concat();
    assert_eq!(dialer, expected);
    let expected = [b"PLA1", &theirs[..], &[1], &proof(Side::Listener)].concat();
    assert_eq!(listener, expected);
}

#[test]
fn another_protocol_is_named_by_its_first_bytes() {
    let (mut near, mut far) = UnixStream::pair().unwrap();
    far.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        .unwrap();
    let outcome = prove(&mut near, &Token::derived("job"), Side::Dialer, "store");
    assert_eq!(outcome, Err(AuthError::Foreign { got: *b"HTTP" }));
}

#[test]
fn a_peer_that_leaves_is_told_from_one_that_is_silent() {
    let (mut near, far) = UnixStream::pair().unwrap();
    far.shutdown(Shutdown::Write).unwrap();
    let outcome = prove(&mut near, &Token::derived("job"), Side::Listener, "store");
    assert!(
        matches!(outcome, Err(AuthError::Closed { .. })),
        "{outcome:?}"
    );

    let (mut near, _far) = UnixStream::pair().unwrap();
    near.set_read_timeout(Some(Duration::from_millis(20)))
        .unwrap();
    let outcome = prove(&mut near, &Token::derived("job"), Side::Listener, "store");
    assert!(
        matches!(outcome, Err(AuthError::TimedOut { .. })),
        "{outcome:?}"
    );
}

#[test]
fn a_peer_that_trickles_bytes_cannot_stretch_the_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    let started = Instant::now();
    let outcome = thread::scope(|scope| {
        let trickler = scope.spawn(move || {
            for byte in greeting(MAGIC, &[1; 32]) {
                thread::sleep(Duration::from_millis(200));
                if near.write_all(&[byte]).is_err() {
                    break;
                }
            }
        });
        let token = Token::derived("job");
        let deadline = Instant::now() + Duration::from_millis(500);
        let outcome = Proved::meet(far, &token, Side::Listener, "store", false, deadline).map(drop);
        trickler.join().unwrap();
        outcome
    });
    assert!(
        matches!(outcome, Err(AuthError::TimedOut { .. })),
        "{outcome:?}"
    );
    // All bytes take 7.2 s.
    assert!(
        started.elapsed() < Duration::from_secs(5),
        "{:?}",
        started.elapsed()
    );
}
