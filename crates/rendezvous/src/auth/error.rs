//! Why a peer was not believed, and what to do about it.

use std::io;

use super::{MAGIC, NOTICE_BYTES, SPEAKS_PLAIN, notice};
use crate::tls::Fault;
use crate::token;

/// Why a peer was not believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// The listener checked our proof and refused it.
    #[error(
        "the listener refused this process: it has another job token, or serves another purpose"
    )]
    Refused,
    /// The peer's proof is wrong.
    #[error("the peer does not know this job's token, or serves another purpose")]
    WrongProof,
    /// The peer does not speak this protocol at all.
    #[error("the peer is no Paceline process: it sent {got:02x?} in place of {MAGIC:02x?}")]
    Foreign {
        /// The first bytes it sent.
        got: [u8; 4],
    },
    /// The peer speaks without TLS, this side with it.
    #[error(
        "the peer speaks without TLS, and this process with it: PACELINE_TLS is not the same on both"
    )]
    PlainPeer,
    /// The peer speaks TLS, this side does not.
    #[error("the peer speaks TLS, and this process does not: PACELINE_TLS is not the same on both")]
    TlsPeer,
    /// TLS failed: somebody changed bytes on the way, or the peer speaks it differently.
    #[error("cannot {step}: {reason}")]
    Tls {
        /// What this side was doing.
        step: &'static str,
        /// TLS's words.
        reason: String,
    },
    /// The peer went away in the middle.
    #[error("the connection was closed while this side had to {step}")]
    Closed {
        /// What this side was doing.
        step: &'static str,
    },
    /// The peer stayed silent for too long.
    #[error("the peer stayed silent for too long while this side had to {step}")]
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
                "every rank needs the same {} (`paceline run` sets it); another job may be using this address; with PACELINE_TLS, \
                 somebody on the way may end TLS and pass on what is sent",
                token::TOKEN_VARIABLE
            )),
            Self::Foreign { .. } | Self::TimedOut { .. } => Some(
                "another program may be listening at this address; choose another MASTER_PORT"
                    .into(),
            ),
            Self::PlainPeer | Self::TlsPeer => Some(
                "set PACELINE_TLS to the same value for every rank and for the launcher".into(),
            ),
            Self::Tls { .. } => Some(
                "something between the two hosts changes what they send, or one of them runs another version".into(),
            ),
            Self::Closed { .. } | Self::Broken { .. } | Self::NoRandomness { .. } => None,
        }
    }

    /// Whether the peer has been heard and trying again would end the same way.
    pub(crate) fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Refused
                | Self::WrongProof
                | Self::Foreign { .. }
                | Self::PlainPeer
                | Self::TlsPeer
        )
    }

    /// What a listener says to a dialer before it closes the connection for this reason, if the dialer understands it.
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
