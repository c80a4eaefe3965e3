//! What can fail between a client and its store.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "etcd")]
use super::EtcdError;
use super::{KEY_BYTES_MAX, VALUE_BYTES_MAX};
use crate::auth::AuthError;

/// What failed, at which server, and after how long.
#[derive(Clone, thiserror::Error)]
pub enum StoreError {
    /// The server cannot listen.
    #[error("the store cannot listen at {addr}: {source}")]
    Bind {
        /// Where it was to listen.
        addr: SocketAddr,
        /// The system's answer.
        source: Arc<io::Error>,
    },
    /// No connection was made in time.
    #[error(
        "no connection to the store at {server} within {waited:.1?} ({attempts} attempts): {reason}"
    )]
    Connect {
        /// Host and port.
        server: String,
        /// How long it was tried.
        waited: Duration,
        /// How often.
        attempts: u32,
        /// How the last attempt ended.
        reason: String,
    },
    /// The listener there is not this job's store, or refuses this process.
    #[error("the store at {server}: {source}")]
    Auth {
        /// Host and port.
        server: String,
        /// What was wrong.
        source: AuthError,
    },
    /// Keys did not appear in time. The connection is still good.
    #[error(
        "{operation} at the store {server}: {} not there after {waited:.1?}",
        list(missing)
    )]
    TimedOut {
        /// The operation.
        operation: &'static str,
        /// Host and port.
        server: String,
        /// Keys that are missing.
        missing: Vec<String>,
        /// How long the server waited.
        waited: Duration,
    },
    /// The server did not answer in time. The connection is unusable.
    #[error("{operation} of {key:?}: no answer from the store {server} within {waited:.1?}")]
    NoAnswer {
        /// The operation.
        operation: &'static str,
        /// The key, or the first of several.
        key: String,
        /// Host and port.
        server: String,
        /// How long this client waited.
        waited: Duration,
    },
    /// The connection broke. It is unusable.
    #[error("{operation} of {key:?}: lost the store {server} after {waited:.1?}: {reason}")]
    Lost {
        /// The operation.
        operation: &'static str,
        /// The key, or the first of several.
        key: String,
        /// Host and port.
        server: String,
        /// How long after the request.
        waited: Duration,
        /// What happened.
        reason: String,
    },
    /// `add` to a value that is not a decimal number, or a sum beyond 64 bits.
    #[error(
        "add to {key:?} at the store {server}: its value is not a whole number, or the sum does not fit 64 bits"
    )]
    NotANumber {
        /// The key.
        key: String,
        /// Host and port.
        server: String,
    },
    /// The server is at its bound for keys and values.
    #[error("{operation} of {key:?}: the store {server} is full")]
    Full {
        /// The operation.
        operation: &'static str,
        /// The key.
        key: String,
        /// Host and port.
        server: String,
    },
    /// A key, or a request's keys together, is longer than allowed. Nothing was sent.
    #[error("a key of {bytes} bytes ({start:?}...), at most {KEY_BYTES_MAX} are allowed")]
    KeyTooLong {
        /// Its length.
        bytes: usize,
        /// Its beginning.
        start: String,
    },
    /// A value is longer than allowed, or would be with what was to be appended. It is as it was before.
    #[error("a value of {bytes} bytes for {key:?}, at most {VALUE_BYTES_MAX} are allowed")]
    ValueTooLarge {
        /// The key.
        key: String,
        /// Its length.
        bytes: usize,
    },
    /// One request names more keys than fit a message. Nothing was sent.
    #[error(
        "a request for {keys} keys of {bytes} bytes together, at most {bytes_max} bytes are allowed"
    )]
    TooManyKeys {
        /// How many.
        keys: usize,
        /// Their length with the request's own bytes.
        bytes: usize,
        /// The bound.
        bytes_max: usize,
    },
    /// The values asked for together do not fit one message.
    #[error(
        "{operation} of {key:?} and more: an answer of {bytes} bytes, at most {bytes_max} are allowed"
    )]
    AnswerTooLarge {
        /// The operation.
        operation: &'static str,
        /// The first key.
        key: String,
        /// Length of the answer.
        bytes: usize,
        /// The bound.
        bytes_max: usize,
    },
    /// This store does not have the operation.
    #[error("{operation}: the store {server} does not know this operation")]
    Unsupported {
        /// The operation.
        operation: &'static str,
        /// Host and port.
        server: String,
    },
    /// The environment names no place where several ranks could meet.
    #[error("{world} ranks and no place to meet: neither a store nor a master port is given")]
    NoMeetingPoint {
        /// Number of ranks.
        world: usize,
    },
    /// A store in etcd did not do what it was asked for.
    #[cfg(feature = "etcd")]
    #[error(
        "{}: etcd at {server} {source} (after {waited:.1?})",
        named(operation, key)
    )]
    Etcd {
        /// The operation.
        operation: &'static str,
        /// The key, or the first of several.
        key: String,
        /// Its members.
        server: String,
        /// How long it was tried.
        waited: Duration,
        /// What was wrong.
        source: EtcdError,
    },
    /// torchrun's agent store, where rank 0 publishes the address of this store, failed.
    #[error("torchrun's agent store at {server}: cannot {step} within {waited:.1?}: {reason}")]
    AgentStore {
        /// Host and port.
        server: String,
        /// What was tried.
        step: &'static str,
        /// How long.
        waited: Duration,
        /// What happened.
        reason: String,
    },
}

impl StoreError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Bind { source, .. } if source.kind() == io::ErrorKind::AddrInUse => {
                "another program, perhaps another job, listens there: choose another port with MASTER_PORT, --master-port or \
                 --rdzv-endpoint"
            }
            Self::Bind { .. } => "rank 0 must run on the host that MASTER_ADDR names",
            Self::Connect { .. } => {
                "rank 0 or the launcher hosts the store: check that it runs, that MASTER_ADDR or PACELINE_STORE names its \
                 host, and that no firewall blocks the port"
            }
            Self::Auth { source, .. } => return source.hint(),
            #[cfg(feature = "etcd")]
            Self::Etcd { source, .. } => return source.hint(),
            Self::TimedOut { .. } => {
                "some rank did not come this far; look at the output of the ranks that should have set these keys"
            }
            Self::NoAnswer { .. } | Self::Lost { .. } => {
                "the process that hosts the store may be gone; look at rank 0's or the launcher's output"
            }
            Self::NoMeetingPoint { .. } => {
                "set MASTER_ADDR and MASTER_PORT on every rank, or start with `paceline run`"
            }
            Self::AgentStore { .. } => {
                "TORCHELASTIC_USE_AGENT_STORE=True says that torchrun's agent listens at MASTER_ADDR:MASTER_PORT; unset it \
                 when this process was not started by torchrun"
            }
            Self::AnswerTooLarge { .. } => "ask for fewer keys at a time",
            Self::Unsupported { .. } => {
                "the process that hosts the store may be older than this one, or another kind of store"
            }
            Self::NotANumber { .. }
            | Self::Full { .. }
            | Self::KeyTooLong { .. }
            | Self::ValueTooLarge { .. }
            | Self::TooManyKeys { .. } => return None,
        };
        Some(hint.into())
    }

    /// Whether it is only that a deadline passed.
    pub fn is_deadline(&self) -> bool {
        #[cfg(feature = "etcd")]
        if let Self::Etcd { source, .. } = self {
            return *source == EtcdError::NoAnswer;
        }
        matches!(
            self,
            Self::Connect { .. } | Self::TimedOut { .. } | Self::NoAnswer { .. }
        )
    }
}

crate::debug_with_hint!(StoreError);

#[cfg(feature = "etcd")]
fn named(operation: &str, key: &str) -> String {
    match key {
        "" => operation.to_owned(),
        key => format!("{operation} of {key:?}"),
    }
}

/// At most ten keys by name: a message for people.
fn list(keys: &[String]) -> String {
    let mut text: Vec<String> = keys.iter().take(10).map(|key| format!("{key:?}")).collect();
    if keys.len() > 10 {
        text.push(format!("and {} more", keys.len() - 10));
    }
    format!(
        "{} {}",
        text.join(", "),
        if keys.len() == 1 { "is" } else { "are" }
    )
}
