//! Mutual authentication: both ends of a connection prove the job's token before either believes a byte.
//!
//! ```text
//! dialer                                                          listener
//!   hello      "PLA1"  nonce_d            4 + 32 bytes    ------>
//!              <------  challenge  "PLA1"  nonce_l        4 + 32 bytes
//!   proof      HMAC(token, dialer text)       32 bytes    ------>  refuses here: closes after the verdict
//!              <------  verdict    1 or 0, HMAC(token, listener text) or zeros      1 + 32 bytes
//!   refuses here: closes
//!
//! dialer text   = "paceline auth 1 dialer\0"   u32 bytes of purpose  purpose  nonce_d  nonce_l
//! listener text = "paceline auth 1 listener\0" u32 bytes of purpose  purpose  nonce_d  nonce_l
//! ```
//!
//! Numbers are little-endian, HMAC is HMAC-SHA256, nonces are 32 fresh random bytes (a dialer's ends with an empty line),
//! proofs are compared in constant time. All messages have a fixed size, so an unauthenticated peer cannot make
//! either side allocate. The nonces make a recorded exchange worthless, the two texts differ so that a proof cannot be sent
//! back to its author, and the purpose keeps a proof for one service ("store") from opening another. The dialer proves
//! first: an unauthenticated peer gets nothing but a nonce.
//!
//! This authenticates the peer when a connection begins. By itself it neither hides nor protects the bytes that follow
//! from an attacker on the way. With `PACELINE_TLS` the same messages go through TLS ([`crate::tls`]), and the texts are
//! bound to that one TLS connection:
//!
//! ```text
//! dialer text   = "paceline auth 1 dialer over TLS\0"   u32 bytes of purpose  purpose  nonce_d  nonce_l  binding, 32 bytes
//! listener text = "paceline auth 1 listener over TLS\0" u32 bytes of purpose  purpose  nonce_d  nonce_l  binding
//! ```
//!
//! When one end speaks TLS and the other does not, the listener says so in the place of its challenge, with 32 zeros: "PLAT"
//! when it wants TLS, "PLAP" when it does not.

mod error;
mod proved;

use std::io::{Read, Write};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::tls::Binding;
use crate::token::{self, Token};

pub use self::error::AuthError;
pub use self::proved::Proved;

const MAGIC: [u8; 4] = *b"PLA1";
pub(crate) const GREETING_BYTES: usize = 4 + 32;
pub(crate) const PROOF_BYTES: usize = 32;
pub(crate) const VERDICT_BYTES: usize = 1 + 32;

/// A listener's answer to a dialer without TLS where it wants TLS, and the other way round.
pub(crate) const WANTS_TLS: [u8; 4] = *b"PLAT";
const SPEAKS_PLAIN: [u8; 4] = *b"PLAP";
pub(crate) const NOTICE_BYTES: usize = GREETING_BYTES;
/// How a dialer's TLS begins: a handshake record of TLS 1.x.
const TLS_BEGINS: [u8; 2] = [0x16, 0x03];

const REFUSED: u8 = 0;
const ACCEPTED: u8 = 1;

pub(crate) type Nonce = [u8; 32];

/// The end of a dialer's nonce: to a server of a text protocol the greeting is then a whole request, so it answers at
/// once and is recognised ([`AuthError::Foreign`]) instead of waiting for more. 28 random bytes are left.
const LINE_END: &[u8; 4] = b"\r\n\r\n";

/// Which end of the connection this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The end that opened the connection; speaks first.
    Dialer,
    /// The end that accepted the connection.
    Listener,
}

impl Side {
    fn label(self, over_tls: bool) -> &'static [u8] {
        match (self, over_tls) {
            (Self::Dialer, false) => b"paceline auth 1 dialer\0",
            (Self::Listener, false) => b"paceline auth 1 listener\0",
            (Self::Dialer, true) => b"paceline auth 1 dialer over TLS\0",
            (Self::Listener, true) => b"paceline auth 1 listener over TLS\0",
        }
    }
}

/// The subject of a proof: the service, and the TLS connection if there is one.
#[derive(Debug, Clone, Copy)]
pub struct Claim<'a> {
    /// The service.
    pub purpose: &'a str,
    /// See [`Tls::binding`](crate::tls::Tls::binding).
    pub binding: Option<Binding>,
}

impl<'a> Claim<'a> {
    /// A claim for a connection without TLS.
    pub fn plain(purpose: &'a str) -> Self {
        Self {
            purpose,
            binding: None,
        }
    }
}

/// Proves to the peer that this side knows `token`, and checks that the peer does, for the same claim.
///
/// *Blocks*: as long as the stream does: the caller has set the stream's timeouts. A peer that sends one byte at a time
/// stretches a timeout per read; [`Proved`] bounds the whole exchange.
///
/// *Errors*: see [`AuthError`]. After an error the stream is useless; a listener has told the peer.
///
/// ```
/// use std::os::unix::net::UnixStream;
/// use std::thread;
/// use paceline_rendezvous::auth::{Claim, Side, prove};
/// use paceline_rendezvous::token::Token;
///
/// let (token, claim) = (Token::generate()?, Claim::plain("example"));
/// let (mut dialer, mut listener) = UnixStream::pair()?;
/// thread::scope(|scope| {
///     scope.spawn(|| prove(&mut listener, &token, Side::Listener, &claim).unwrap());
///     prove(&mut dialer, &token, Side::Dialer, &claim).unwrap();
/// });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn prove<S: Read + Write>(
    stream: &mut S,
    token: &Token,
    side: Side,
    claim: &Claim<'_>,
) -> Result<(), AuthError> {
    let mut ours = token::random().map_err(|error| AuthError::NoRandomness {
        reason: error.to_string(),
    })?;
    match side {
        Side::Dialer => {
            ours[32 - LINE_END.len()..].copy_from_slice(LINE_END);
            prove_as_dialer(stream, token, claim, ours)
        }
        Side::Listener => prove_as_listener(stream, token, claim, ours),
    }
}

fn prove_as_dialer<S: Read + Write>(
    stream: &mut S,
    token: &Token,
    claim: &Claim<'_>,
    ours: Nonce,
) -> Result<(), AuthError> {
    send(stream, &greeting(MAGIC, &ours), "send its greeting")?;
    let mut challenge = [0; GREETING_BYTES];
    receive(stream, &mut challenge, "receive the listener's challenge")?;
    let nonces = Nonces {
        dialer: ours,
        listener: read_greeting(&challenge)?,
    };
    let proof = nonces.keyed(token, Side::Dialer, claim).finalize();
    send(stream, &proof.into_bytes(), "send its proof")?;
    let mut verdict = [0; VERDICT_BYTES];
    receive(stream, &mut verdict, "receive the listener's verdict")?;
    let (accepted, answer) = verdict.split_at(1);
    if accepted != [ACCEPTED] {
        return Err(AuthError::Refused);
    }
    nonces.verify(token, Side::Listener, claim, answer)
}

fn prove_as_listener<S: Read + Write>(
    stream: &mut S,
    token: &Token,
    claim: &Claim<'_>,
    ours: Nonce,
) -> Result<(), AuthError> {
    let mut hello = [0; GREETING_BYTES];
    receive(stream, &mut hello, "receive the dialer's greeting")?;
    let (nonces, challenge) = Nonces::greet(ours, &hello).inspect_err(|error| {
        if let Some(notice) = error.notice() {
            // The dialer is refused in any case; this tells it why.
            let _ = send(stream, &notice, "say that it speaks without TLS");
        }
    })?;
    send(stream, &challenge, "send its challenge")?;
    let mut answer = [0; PROOF_BYTES];
    receive(stream, &mut answer, "receive the dialer's proof")?;
    let (outcome, verdict) = nonces.judge(&answer, token, claim);
    let sent = send(stream, &verdict, "send its verdict");
    outcome.and(sent)
}

/// The nonces of both ends, about which the proofs are: the listener's side of the exchange, also for a server that reads
/// and writes when its sockets are ready.
pub(crate) struct Nonces {
    dialer: Nonce,
    listener: Nonce,
}

impl Nonces {
    /// Takes the dialer's greeting and returns the challenge to send.
    pub(crate) fn greet(
        ours: Nonce,
        hello: &[u8; GREETING_BYTES],
    ) -> Result<(Self, [u8; GREETING_BYTES]), AuthError> {
        let nonces = Self {
            dialer: read_greeting(hello)?,
            listener: ours,
        };
        Ok((nonces, greeting(MAGIC, &ours)))
    }

    /// Judges the dialer's proof; returns the verdict to send in either case.
    pub(crate) fn judge(
        &self,
        answer: &[u8; PROOF_BYTES],
        token: &Token,
        claim: &Claim<'_>,
    ) -> (Result<(), AuthError>, [u8; VERDICT_BYTES]) {
        let outcome = self.verify(token, Side::Dialer, claim, answer);
        let mut verdict = [REFUSED; VERDICT_BYTES];
        if outcome.is_ok() {
            verdict[0] = ACCEPTED;
            let proof = self.keyed(token, Side::Listener, claim).finalize();
            verdict[1..].copy_from_slice(&proof.into_bytes());
        }
        (outcome, verdict)
    }

    fn verify(
        &self,
        token: &Token,
        side: Side,
        claim: &Claim<'_>,
        answer: &[u8],
    ) -> Result<(), AuthError> {
        let mac = self.keyed(token, side, claim);
        mac.verify_slice(answer).map_err(|_| AuthError::WrongProof)
    }

    fn keyed(&self, token: &Token, side: Side, claim: &Claim<'_>) -> Hmac<Sha256> {
        token.hmac(&[
            side.label(claim.binding.is_some()),
            &(claim.purpose.len() as u32).to_le_bytes(),
            claim.purpose.as_bytes(),
            &self.dialer,
            &self.listener,
            claim.binding.as_ref().map_or(&[], |binding| binding),
        ])
    }
}

fn greeting(word: [u8; 4], nonce: &Nonce) -> [u8; GREETING_BYTES] {
    let mut message = [0; GREETING_BYTES];
    message[..4].copy_from_slice(&word);
    message[4..].copy_from_slice(nonce);
    message
}

/// A listener's last message, in place of its greeting.
pub(crate) fn notice(word: [u8; 4]) -> [u8; NOTICE_BYTES] {
    greeting(word, &[0; 32])
}

fn read_greeting(message: &[u8; GREETING_BYTES]) -> Result<Nonce, AuthError> {
    let (mut got, mut nonce) = ([0; 4], [0; 32]);
    got.copy_from_slice(&message[..4]);
    nonce.copy_from_slice(&message[4..]);
    match got {
        MAGIC => Ok(nonce),
        WANTS_TLS => Err(AuthError::TlsPeer),
        _ if got.starts_with(&TLS_BEGINS) => Err(AuthError::TlsPeer),
        _ => Err(AuthError::Foreign { got }),
    }
}

fn send<S: Write>(stream: &mut S, message: &[u8], step: &'static str) -> Result<(), AuthError> {
    stream
        .write_all(message)
        .and_then(|()| stream.flush())
        .map_err(|error| AuthError::from_io(step, &error))
}

fn receive<S: Read>(
    stream: &mut S,
    message: &mut [u8],
    step: &'static str,
) -> Result<(), AuthError> {
    stream
        .read_exact(message)
        .map_err(|error| AuthError::from_io(step, &error))
}

#[cfg(test)]
mod tests;
