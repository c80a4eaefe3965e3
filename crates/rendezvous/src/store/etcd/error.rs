//! What can go wrong between a launcher and etcd.

use crate::token::TOKEN_VARIABLE;

/// Why an operation in etcd failed.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum EtcdError {
    /// None of its members could be connected to. Nothing was sent.
    #[error("cannot be reached: {reason}")]
    Unreachable {
        /// How the last attempt ended.
        reason: String,
    },
    /// No answer in time. What was asked for may have been done.
    #[error("did not answer in time")]
    NoAnswer,
    /// The connection broke. What was asked for may have been done.
    #[error("broke the connection: {reason}")]
    Lost {
        /// What happened.
        reason: String,
    },
    /// It answered that it will not.
    #[error("refused: {message}")]
    Refused {
        /// gRPC's code.
        code: u32,
        /// Its words.
        message: String,
    },
    /// The server there is not an etcd with API v3.
    #[error("gives no answer of an etcd v3: {reason}")]
    NotEtcd {
        /// What is wrong with the answer.
        reason: String,
    },
    /// A value whose proof is wrong: it was written with another token, or without one.
    #[error("has a value that this job did not write")]
    Unproven,
    /// Others changed the key again and again before this process could.
    #[error("had the key changed by others {attempts} times meanwhile")]
    Contended {
        /// How often it was tried.
        attempts: u32,
    },
}

impl EtcdError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Unreachable { .. } | Self::NoAnswer | Self::Lost { .. } => {
                "check that etcd runs there, that the endpoint names its client port (2379 unless set otherwise), and that \
                 no firewall is in between"
            }
            Self::Refused { message, .. } if message.contains("database space exceeded") => {
                "etcd has reached its quota: compact and defragment it, and have it compact by itself \
                 (--auto-compaction-retention)"
            }
            Self::Refused { code, message } if is_about_identity(*code, message) => {
                "this etcd wants a user: set ETCD_USERNAME and ETCD_PASSWORD on every node"
            }
            Self::Refused { .. } | Self::Contended { .. } => return None,
            Self::NotEtcd { .. } => {
                "the API v3 is spoken, over HTTP without TLS: etcd 3.4 or later, at its client port"
            }
            Self::Unproven => {
                return Some(format!(
                    "is {TOKEN_VARIABLE} the same on every node, and does no other job there have this one's name (--rdzv-id)?"
                ));
            }
        };
        Some(hint.to_owned())
    }
}

crate::debug_with_hint!(EtcdError);

/// gRPC's permission denied and unauthenticated, and what etcd says in their place when no user was named.
fn is_about_identity(code: u32, message: &str) -> bool {
    matches!(code, 7 | 16) || message.contains("user name is empty")
}

/// A list of endpoints that cannot be used.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct EndpointError {
    pub(super) message: String,
    pub(super) hint: Option<&'static str>,
}

impl EndpointError {
    pub(super) fn malformed(message: String) -> Self {
        let hint = "for instance node1:2379,node2:2379,node3:2379; the port may be left out";
        let hint = Some(hint);
        Self { message, hint }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        self.hint.map(str::to_owned)
    }
}

crate::debug_with_hint!(EndpointError);
