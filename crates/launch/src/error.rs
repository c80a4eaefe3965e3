//! Why a job could not be started at all. A job that started and then failed is no error: see `Outcome`.

use std::io;
use std::path::Path;

use paceline_rendezvous::env::EnvError;
use paceline_rendezvous::nodes::NodesError;
use paceline_rendezvous::page::PageError;
use paceline_rendezvous::store::{EndpointError, StoreError};
use paceline_rendezvous::token::{TOKEN_VARIABLE, TokenError};

use crate::binding::BindError;

/// A job that could not be started; nothing is left running.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The request is wrong.
    #[error("{message}")]
    Usage {
        /// What is wrong with it.
        message: String,
        /// Advice, if there is any.
        hint: Option<String>,
    },
    /// This machine lacks what the job needs, or refused it.
    #[error("{message}")]
    Machine {
        /// What failed.
        message: String,
        /// Advice. Without it, the source may have some.
        hint: Option<String>,
        /// The operating system's answer.
        source: Option<io::Error>,
    },
    /// The numbers of nodes are those of no job.
    #[error(transparent)]
    Nodes(#[from] NodesError),
    /// Several nodes, and no token that all of them know.
    #[error("{TOKEN_VARIABLE} is not set, so the nodes of the job cannot authenticate each other")]
    NoSharedToken,
    /// The token that all nodes share is malformed.
    #[error("{TOKEN_VARIABLE} is malformed: {0}")]
    Token(#[from] TokenError),
    /// etcd's endpoints cannot be used.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// The ranks cannot be bound to CPUs as asked.
    #[error(transparent)]
    Binding(#[from] BindError),
    /// A variable that launcher and ranks share is wrong.
    #[error("the ranks' environment is wrong")]
    Environment(#[from] EnvError),
    /// This process is already running a job.
    #[error("this process is already running a job")]
    Busy,
    /// The job page could not be made.
    #[error("the job page could not be made")]
    Page(#[from] PageError),
    /// The store could not be started.
    #[error("the job's store could not be started")]
    Store(#[from] StoreError),
}

impl LaunchError {
    pub(crate) fn usage(message: String) -> Self {
        let hint = None;
        Self::Usage { message, hint }
    }

    /// For `map_err` on a system call.
    pub(crate) fn system<E: Into<io::Error>>(operation: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Machine {
            message: format!("{operation} failed"),
            hint: None,
            source: Some(source.into()),
        }
    }

    /// For `map_err` on what is done with a log file or folder.
    pub(crate) fn log(path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let message = format!("log `{}` cannot be written", path.display());
        let hint = "give --log-dir a folder that can be written to, or /dev/null to keep no files";
        move |source| Self::Machine {
            message,
            hint: Some(hint.into()),
            source: Some(source),
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Usage { hint, .. }
            | Self::Machine {
                hint: hint @ Some(_),
                ..
            } => {
                return hint.clone();
            }
            Self::Machine { source, .. } => hint_for(source.as_ref()?)?.into(),
            Self::NoSharedToken => format!(
                "run `openssl rand -hex 32` once, and set {TOKEN_VARIABLE} to what it prints on every node"
            ),
            Self::Busy => "one process runs one job at a time".into(),
            Self::Environment(source) => return source.hint(),
            Self::Token(error) => return error.hint(),
            Self::Binding(error) => return error.hint(),
            Self::Endpoint(error) => return error.hint(),
            Self::Nodes(error) => return error.hint(),
            Self::Store(error) => return error.hint(),
            Self::Page(error) => return error.hint(),
        })
    }

    /// The launcher's exit code: 2 where the request is wrong, 3 where the machine is.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Binding(BindError::TooFewCores { .. }) => 2,
            Self::Binding(_) | Self::Page(_) | Self::Store(_) | Self::Machine { .. } => 3,
            _ => 2,
        }
    }
}

paceline_rendezvous::debug_with_hint!(LaunchError);

fn hint_for(source: &io::Error) -> Option<&'static str> {
    Some(match source.raw_os_error()? {
        libc::EAGAIN => "the limit on processes or threads is reached, see `ulimit -u`",
        libc::E2BIG => "arguments and environment together are too large",
        libc::EMFILE => "each rank needs five open files in the launcher, see `ulimit -n`",
        libc::ENFILE => "the machine's limit on open files is reached, see `sysctl fs.file-max`",
        libc::ENOEXEC => "it is a program for another processor, or a script without a `#!` line",
        libc::ENOSYS => "Linux 5.9 or later is needed",
        _ => return None,
    })
}
