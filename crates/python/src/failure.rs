//! What went wrong, as the caller gets it.

use std::any::Any;

use paceline_collective::{Error, ProcessGroup};
use paceline_rendezvous::store::StoreError;
use serde::Serialize;

/// Longest message of a report.
///
/// *Units*: bytes.
const MESSAGE_BYTES_MAX: usize = 16 << 10;

/// A failure, as [`paceline_text`](crate::paceline_text) reports it in JSON.
#[derive(Debug, Clone, Serialize)]
pub struct Failure {
    /// "timeout", "mismatch", "lost" (a rank died), "left" (a rank ended in order), "aborted" (a rank gave up), "configuration", "call"
    /// (wrong arguments), "handle", "bug" or "other".
    pub kind: &'static str,
    /// What happened, with the ranks in the group's numbers.
    pub message: Box<str>,
    /// What to do about it.
    pub hint: Option<Box<str>>,
    /// The ranks to blame, in the group's numbers.
    pub culprits: Vec<usize>,
    /// The hosts of these ranks.
    pub hosts: Vec<String>,
    /// The operation that failed here, such as "all-reduce"; none while the group forms.
    pub operation: Option<&'static str>,
}

impl Failure {
    pub(crate) fn new(kind: &'static str, message: impl Into<String>) -> Self {
        let mut message = message.into();
        message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX));
        Self {
            kind,
            message: message.into(),
            hint: None,
            culprits: Vec::new(),
            hosts: Vec::new(),
            operation: None,
        }
    }

    pub(crate) fn hint(self, hint: &str) -> Self {
        Self {
            hint: Some(hint.into()),
            ..self
        }
    }

    /// Of an operation of a group.
    pub(crate) fn during(operation: &'static str, group: &ProcessGroup, error: &Error) -> Self {
        let failure = Self::from(error);
        let culprits = failure.culprits.iter();
        Self {
            hosts: culprits
                .filter(|rank| **rank < group.world())
                .map(|rank| group.host(*rank).to_owned())
                .collect(),
            operation: Some(operation),
            ..failure
        }
    }
}

impl From<&Error> for Failure {
    fn from(error: &Error) -> Self {
        let culprits = match error {
            Error::Deadline { culprits, .. } => culprits.clone(),
            Error::Absent { missing, .. } => missing.clone(),
            other => other.culprit().into_iter().collect(),
        };
        Self {
            hint: error.hint().map(Into::into),
            culprits,
            ..Self::new(kind(error), error.to_string())
        }
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self {
            hint: error.hint().map(Into::into),
            ..Self::new("other", error.to_string())
        }
    }
}

/// The words of a panic.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = (panic.downcast_ref::<&str>().copied())
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("a bug in Paceline: {}", text.unwrap_or("it panicked"))
}

fn kind(error: &Error) -> &'static str {
    match error {
        error if error.is_deadline() => "timeout",
        error if error.is_configuration() => "configuration",
        Error::Mismatch { .. } => "mismatch",
        Error::PeerLost { .. } | Error::Disconnected { .. } => "lost",
        Error::PeerLeft { .. } => "left",
        Error::Aborted { .. } | Error::AbortedHere { .. } | Error::Revoked { .. } => "aborted",
        Error::Call { .. } | Error::Members { .. } => "call",
        _ => "other",
    }
}
