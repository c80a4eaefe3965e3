//! Why authentication failed, and what to do about it.

use std::io;

use super::{NOTICE_BYTES, SPEAKS_PLAIN, notice};
use crate::tls::Fault;
use crate::token;

/// Why authentication failed.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// The listener checked our proof and refused it.
    #[error(
        "the listener refused this process: it has another job token, or serves another purpose"
    )]
    Refused,
    /// The peer's proof is wrong.
    #[error(
        "the peer has another {}, or means another service",
        token::TOKEN_VARIABLE
    )]
    WrongProof,
    /// The peer does not speak this protocol at all.
    #[error("the peer seems to be {}, not a process of this job", program(*got))]
    Foreign {
        /// The first bytes it sent.
        got: [u8; 4],
    },
    /// The peer does not use TLS, this side does.
    #[error("the peer does not use TLS and this process does: PACELINE_TLS differs")]
    PlainPeer,
    /// The peer uses TLS, this side does not.
    #[error("the peer uses TLS and this process does not: PACELINE_TLS differs")]
    TlsPeer,
    /// TLS failed: bytes were changed on the way, or the peer's TLS is incompatible.
    #[error("cannot {step}: {reason}")]
    Tls {
        /// What this side was doing.
        step: &'static str,
        /// TLS's words.
        reason: String,
    },
    /// The peer closed the connection early.
    #[error("the peer closed the connection before this side could {step}")]
    Closed {
        /// What this side was doing.
        step: &'static str,
    },
    /// The peer stayed silent for too long.
    #[error("the peer stayed silent for so long that this side could not {step}")]
    TimedOut {
        /// What this side was doing.
        step: &'static str,
    },
    /// The connection broke in another way.
    #[error("cannot {step}: {reason}")]
    Broken {
        /// What this side was doing.
        step: &'static str,
        /// The system's words.
        reason: String,
    },
    /// The operating system gave no nonce.
    #[error("cannot make a nonce: {reason}")]
    NoRandomness {
        /// The system's words.
        reason: String,
    },
}

impl AuthError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Refused | Self::WrongProof => Some(format!(
                "every rank needs the same {}, which `paceline run` sets; otherwise another job uses this address, or with \
                 PACELINE_TLS a proxy between the hosts ends TLS",
                token::TOKEN_VARIABLE
            )),
            Self::Foreign { .. } | Self::TimedOut { .. } => Some(
                "another program listens at this address: stop it, or choose another port with MASTER_PORT, \
                 --master-port or --rdzv-endpoint"
                    .into(),
            ),
            Self::PlainPeer | Self::TlsPeer => Some(
                "set PACELINE_TLS to the same value for every rank and for the launcher".into(),
            ),
            Self::Tls { .. } => Some(
                "a proxy between the two hosts changes their data, or one of them runs another version of Paceline".into(),
            ),
            Self::Closed { .. } | Self::Broken { .. } | Self::NoRandomness { .. } => None,
        }
    }

    /// Whether the peer has answered, so that another attempt would end the same way.
    pub fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Refused
                | Self::WrongProof
                | Self::Foreign { .. }
                | Self::PlainPeer
                | Self::TlsPeer
        )
    }

    /// The listener's last message to a dialer that would understand it.
    pub(crate) fn notice(&self) -> Option<[u8; NOTICE_BYTES]> {
        matches!(self, Self::TlsPeer).then(|| notice(SPEAKS_PLAIN))
    }

    pub(crate) fn from_io(step: &'static str, error: &io::Error) -> Self {
        let fault = error.get_ref().and_then(|inner| inner.downcast_ref());
        match fault {
            Some(Fault::PlainPeer) => return Self::PlainPeer,
            Some(Fault::Foreign { got }) => return Self::Foreign { got: *got },
            Some(refused @ Fault::Refused(_)) => {
                let reason = refused.to_string();
                return Self::Tls { step, reason };
            }
            None => {}
        }
        match error.kind() {
            // A socket's timeout reads as WouldBlock on Linux.
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::TimedOut { step },
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe => Self::Closed { step },
            _ => Self::Broken {
                step,
                reason: error.to_string(),
            },
        }
    }
}

crate::debug_with_hint!(AuthError);

/// The program that begins with these bytes, as far as they tell.
fn program(got: [u8; 4]) -> &'static str {
    match &got {
        b"HTTP" | b"<!DO" | b"<htm" | b"<HTM" => "an HTTP server",
        b"GET " | b"HEAD" | b"POST" | b"PUT " | b"OPTI" | b"CONN" | b"PRI " => "an HTTP client",
        b"SSH-" => "an SSH program",
        b"-ERR" => "a Redis server",
        b"220 " | b"220-" => "a mail or FTP server",
        // An alert of TLS 1.x.
        [0x15, 0x03, ..] => "a TLS server",
        // The query "validate" and the start of its number.
        [0, 0xCE, 0xF7, 0x85] => "a client of PyTorch's TCPStore",
        [b'P', b'L', b'A', _] => "another version of Paceline",
        _ => "an unknown program",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_foreign_program_is_named_and_the_hint_says_what_to_change() {
        for (got, name) in [
            (*b"HTTP", "an HTTP server"),
            (*b"GET ", "an HTTP client"),
            (*b"-ERR", "a Redis server"),
            (*b"PLA2", "another version of Paceline"),
            ([0x15, 3, 1, 0], "a TLS server"),
            ([0, 0xCE, 0xF7, 0x85], "a client of PyTorch's TCPStore"),
            ([7; 4], "an unknown program"),
        ] {
            let error = AuthError::Foreign { got };
            let expected = format!("the peer seems to be {name}, not a process of this job");
            assert_eq!(error.to_string(), expected);
            let hint = error.hint().unwrap_or_default();
            assert!(hint.contains("MASTER_PORT"), "{hint}");
        }
    }
}
