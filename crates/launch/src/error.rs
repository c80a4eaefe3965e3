//! Why a job could not be started at all. A job that started and then failed is no error: see `Outcome`.

use std::io;
use std::path::{Path, PathBuf};

use paceline_rendezvous::env::EnvError;
use paceline_rendezvous::nodes::NodesError;
use paceline_rendezvous::page::PageError;
use paceline_rendezvous::store::{EndpointError, StoreError};
use paceline_rendezvous::token::{TOKEN_VARIABLE, TokenError};

use crate::binding::BindError;
use crate::command::{PYTHON_VARIABLE, PYTHONS};
use crate::job::NPROC_MAX;

/// A job that could not be started; nothing is left running.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The number of ranks is zero or above the limit.
    #[error("nproc is {got}, expected 1 to {NPROC_MAX}")]
    Nproc {
        /// The number that was asked for.
        got: usize,
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
    /// A name in the extra environment cannot be an environment variable.
    #[error("`{name}` cannot be the name of an environment variable")]
    VariableName {
        /// The name.
        name: String,
    },
    /// A value in the extra environment or an argument contains a NUL byte.
    #[error("the value of `{name}` contains a NUL byte")]
    NulByte {
        /// The variable, or `arguments`.
        name: String,
    },
    /// The program does not exist.
    #[error("program `{}` not found{}", .program.display(), if *.searched_path { " in PATH" } else { "" })]
    ProgramNotFound {
        /// What was asked for.
        program: PathBuf,
        /// Whether PATH was searched (the name has no slash).
        searched_path: bool,
    },
    /// The program exists and cannot be executed.
    #[error("program `{}` cannot be executed: {why}", .program.display())]
    NotExecutable {
        /// The file.
        program: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The ranks cannot be bound to CPUs as asked.
    #[error(transparent)]
    Binding(#[from] BindError),
    /// Fewer visible devices than ranks that are to see one each.
    #[error("{nproc} ranks with a device each, and {variable} is `{value}`")]
    VisibleDevices {
        /// How many ranks.
        nproc: usize,
        /// The variable that lists the devices.
        variable: &'static str,
        /// Its value.
        value: String,
    },
    /// The Python script exists and cannot be run.
    #[error("script `{}` cannot be run: {why}", .script.display())]
    Script {
        /// The file or folder.
        script: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A file was named where a Python module is to be named.
    #[error("`{}` is a file name, but --module takes the name of a module", .name.display())]
    ModuleName {
        /// What was asked for.
        name: PathBuf,
    },
    /// There is no Python to run the script or module with.
    #[error("no Python found: {}", match .named {
        Some(named) => format!("{PYTHON_VARIABLE} is `{}`", named.display()),
        None => format!("neither {} is in PATH", PYTHONS.join(" nor ")),
    })]
    Python {
        /// The interpreter that the environment names.
        named: Option<PathBuf>,
        /// What is wrong with that one.
        why: Option<Box<LaunchError>>,
    },
    /// Starting a rank failed in the operating system.
    #[error("rank {rank} could not be started as `{}`", .program.display())]
    Spawn {
        /// The rank.
        rank: usize,
        /// The file that was to be executed.
        program: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// The log folder or a log file cannot be written.
    #[error("log `{}` cannot be written", .path.display())]
    Log {
        /// The folder or the file.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// A variable that launcher and ranks share is wrong.
    #[error("the ranks' environment is wrong")]
    Environment(#[from] EnvError),
    /// This process is already running a job.
    #[error("this process is already running a job")]
    Busy,
    /// The job page could not be made.
    #[error("the job page could not be made")]
    Page(#[from] PageError),
    /// Another program listens where node 0 is to host the store.
    #[error("{endpoint}, where the launchers meet, is in use by another program")]
    EndpointInUse {
        /// `host:port`.
        endpoint: String,
    },
    /// Standard input is for a rank that the job does not have.
    #[error("the job has no rank {rank}")]
    NoSuchRank {
        /// The rank that is to read it.
        rank: usize,
        /// How many ranks the job has.
        world: usize,
    },
    /// The store could not be started.
    #[error("the job's store could not be started")]
    Store(#[from] StoreError),
    /// The operating system refused something that the launcher needs.
    #[error("{operation} failed")]
    System {
        /// What was tried.
        operation: &'static str,
        /// The operating system's answer.
        source: io::Error,
    },
}

impl LaunchError {
    /// For `map_err` on a system call.
    pub(crate) fn system<E: Into<io::Error>>(operation: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::System {
            operation,
            source: source.into(),
        }
    }

    /// For `map_err` on what is done with a log file or folder.
    pub(crate) fn log(path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Log { path, source }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::ProgramNotFound {
                program,
                searched_path: true,
            } if program.is_file() => format!(
                "to run the file of the current folder, write `./{0}`, or `--run-path {0}` if it is a Python script",
                program.display()
            ),
            Self::ProgramNotFound {
                searched_path: true,
                ..
            } => "install it, or add its folder to PATH; to run a file that is not in PATH, give its folder: `./program`"
                .into(),
            Self::ProgramNotFound { .. } => match std::env::current_dir() {
                Ok(folder) => format!("a relative path counts from {}", folder.display()),
                Err(_) => "a relative path counts from the folder the launcher is started in".into(),
            },
            Self::NotExecutable { program, .. } if program.is_dir() => "name a program in it".into(),
            Self::NotExecutable { program, .. } => format!(
                "try `chmod +x {}`, or --run-path if it is a Python script",
                program.display()
            ),
            Self::Script { script, .. } if script.is_dir() => "name a script in it".into(),
            Self::Script { script, .. } => format!("try `chmod +r {}`", script.display()),
            Self::ModuleName { .. } => {
                "to run a file, leave --module out; otherwise name the module: `package.train` for package/train.py".into()
            }
            Self::Log { .. } => {
                "give --log-dir a folder that can be written to, or /dev/null to keep no files".into()
            }
            Self::Python { why: Some(why), .. } => format!(
                "{why}; unset {PYTHON_VARIABLE} to take the first {} in PATH",
                PYTHONS.join(" or ")
            ),
            Self::Python { why: None, .. } => format!(
                "activate the environment that has Python, or set {PYTHON_VARIABLE} to the interpreter; --no-python runs a \
                 program that needs none"
            ),
            Self::Spawn { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                "the interpreter named in the file's first line does not exist".into()
            }
            Self::Spawn { source, .. } | Self::System { source, .. } => hint_for(source)?.into(),
            Self::NoSharedToken => format!(
                "run `openssl rand -hex 32` once, and set {TOKEN_VARIABLE} to what it prints on every node"
            ),
            Self::VisibleDevices { variable, .. } => {
                format!("start as many ranks as {variable} has devices, or name one for each rank")
            }
            Self::EndpointInUse { .. } => {
                "most likely it is another launcher of this job with --node-rank 0: give every node a --node-rank of its own; \
                 otherwise choose another --master-port"
                    .into()
            }
            Self::NoSuchRank { world: 1, .. } => {
                "its only rank is 0; `--stdin none` gives standard input to no rank".into()
            }
            Self::NoSuchRank { world, .. } => format!("its ranks are 0 to {}", world - 1),
            Self::Busy => "one process runs one job at a time".into(),
            Self::Environment(source) => return source.hint(),
            Self::Token(error) => return error.hint(),
            Self::Binding(error) => return error.hint(),
            Self::Endpoint(error) => return error.hint(),
            Self::Nodes(error) => return error.hint(),
            Self::Store(error) => return error.hint(),
            Self::Page(error) => return error.hint(),
            Self::Nproc { .. } | Self::VariableName { .. } | Self::NulByte { .. } => return None,
        })
    }

    /// The launcher's exit code: 2 where the request is wrong, 3 where the machine is.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Binding(BindError::TooFewCores { .. }) => 2,
            Self::Binding(_)
            | Self::Python { .. }
            | Self::Spawn { .. }
            | Self::Log { .. }
            | Self::Page(_)
            | Self::EndpointInUse { .. }
            | Self::Store(_)
            | Self::System { .. } => 3,
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
