//! Why the checks could not be made at all. What they find is no error: see [`Report`](crate::Report).

use std::io;
use std::sync::Arc;

use paceline_rendezvous::env::EnvError;
use paceline_rendezvous::nodes::NodesError;
use paceline_rendezvous::token::TOKEN_VARIABLE;

/// The checks could not be made.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum DoctorError {
    /// The numbers of nodes are those of no job.
    #[error(transparent)]
    Nodes(#[from] NodesError),
    /// Several nodes, and no token that all of them know.
    #[error("{TOKEN_VARIABLE} is not set, so the nodes of the job cannot authenticate each other")]
    NoSharedToken,
    /// A variable has a value that no job could start with.
    #[error(transparent)]
    Environment(#[from] EnvError),
    /// This machine lacks what the checks themselves need.
    #[error("cannot {step}: {source}")]
    System {
        /// What was tried.
        step: &'static str,
        /// The system's words.
        source: Arc<io::Error>,
    },
}

impl DoctorError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::NoSharedToken => Some(format!(
                "set {TOKEN_VARIABLE} to the same value on every node, for instance from `openssl rand -hex 32`"
            )),
            Self::Environment(error) => error.hint(),
            Self::Nodes(error) => error.hint(),
            Self::System { .. } => None,
        }
    }

    /// 2 where the command or a variable is wrong, 3 where the machine lacks something.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::System { .. } => 3,
            _ => 2,
        }
    }

    pub(crate) fn system(step: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::System {
            step,
            source: Arc::new(source),
        }
    }
}

paceline_rendezvous::debug_with_hint!(DoctorError);
