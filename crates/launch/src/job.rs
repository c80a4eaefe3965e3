//! What to run: one job on this machine, as data.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use paceline_rendezvous::net::nodename;
use paceline_rendezvous::token::{TOKEN_VARIABLE, Token};
use paceline_words::Lang;

use crate::binding::Binding;
use crate::error::LaunchError;
use crate::judge::Limits;
use crate::output::LogOptions;
use crate::recovery::Recovery;
use crate::stall::StallOptions;
use crate::stop::HandledSignals;
use crate::watch::RankWatch;

/// Most ranks on one machine.
pub const NPROC_MAX: usize = 1024;

/// One job: `nproc` processes of one program.
///
/// Make one with [`Job::new`] and change the fields that should differ.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Job {
    /// The program. A name without a slash is looked up in `PATH`; a file that ends in `.py` runs under Python.
    pub program: PathBuf,
    /// The kind of program, if its name does not tell.
    pub run_as: RunAs,
    /// The rank of the job that reads this process's standard input; the others read `/dev/null`, as all do if absent. A
    /// launcher in the background of a terminal gives the terminal to none.
    pub stdin: Option<usize>,
    /// Its arguments, the same for every rank, except that `${local_rank}` in them is each rank's own.
    pub args: Vec<OsString>,
    /// How many ranks, 1 to [`NPROC_MAX`].
    pub nproc: usize,
    /// Environment variables for the ranks on top of the launcher's own; the contract's names (`RANK`, ...) win.
    pub env: Vec<(String, String)>,
    /// Where each rank's output goes, as `attempt_<N>/<local rank>/{stdout,stderr}.log`, and what became of the job as
    /// `error.json`; `None` keeps no files. See [`RunFolder`](crate::RunFolder) for a folder of its own, which each node of
    /// a job needs where nodes share a file system: two first ranks of a node would write to the same file.
    pub log_dir: Option<PathBuf>,
    /// What the ranks' output looks like on the launcher's own output.
    pub console: Console,
    /// Which lines go where, and how they are written.
    pub logs: LogOptions,
    /// From SIGTERM, or from the request to stop in its place, to SIGKILL, wherever ranks are ended; default 30 s.
    pub grace: Duration,
    /// After a failure, how long the other ranks have to report and end before they get SIGTERM; default 2 s. Ranks that
    /// stop on request get SIGKILL: they would act on SIGTERM only at a step boundary.
    pub report_time: Duration,
    /// Compute threads of each rank; `None` shares out the cores unless the environment already says.
    pub threads_per_rank: Option<usize>,
    /// The signals that the launcher handles. Ranks that look at the job page
    /// ([`Slot::set_polls_stop`](paceline_rendezvous::page::Slot::set_polls_stop)) are asked there to save and stop at a step
    /// boundary; to others the signal is forwarded. After one that ends the job there is the grace, and a second one kills.
    pub signals: HandledSignals,
    /// The CPUs that each rank may run on; `None` leaves it to the kernel.
    pub binding: Option<Binding>,
    /// Whether each rank sees one GPU only, as its first, and gets `LOCAL_RANK=0`. `PACELINE_LOCAL_RANK` is its number then.
    pub virtual_local_rank: bool,
    /// The secret by which the ranks know each other.
    pub token: Token,
    /// The job's name, `TORCHELASTIC_RUN_ID` for the ranks; default `none`, as torchrun's.
    pub run_id: String,
    /// How often this job has been started before: the number of the attempt in the log folder.
    pub restart_count: u32,
    /// How often the whole job is started again after a failed rank, however many nodes it has; default 0.
    pub max_restarts: u32,
    /// What becomes of the job when ranks are lost; default [`Recovery::Auto`].
    pub recovery: Recovery,
    /// torchrun's role of the ranks, `ROLE_NAME`; default `default`.
    pub role: String,
    /// `MASTER_ADDR` of a job on this machine alone; the loopback address when absent.
    pub master_addr: Option<String>,
    /// `MASTER_PORT` of a job on this machine alone; a free port when absent.
    pub master_port: Option<u16>,
    /// The other nodes; `None` for a job on this machine alone.
    pub cluster: Option<Cluster>,
    /// How long the launcher waits before it calls a rank stalled or gone early.
    pub limits: Limits,
    /// What is done about ranks that neither print nor compute; ranks that use Paceline's library have deadlines instead.
    pub stall: StallOptions,
    /// The language of notices on standard error; default English.
    pub lang: Lang,
    /// Is told which processes this machine's ranks are.
    pub watch: Option<RankWatch>,
}

/// How this machine's launcher finds those of the job's other nodes.
///
/// Every node runs one launcher with the same values, except where a field says otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cluster {
    /// Fewest nodes that the job runs with, at least 1.
    pub nodes_min: usize,
    /// Most nodes; more are spares. At most [`NODES_MAX`](paceline_rendezvous::nodes::NODES_MAX).
    pub nodes_max: usize,
    /// The kind of store where the launchers meet; default [`StoreKind::Hosted`].
    pub store: StoreKind,
    /// `host:port` of that store. With [`StoreKind::Hosted`] the launcher on that host that comes first hosts it; of etcd all
    /// members may be named, with commas between them.
    pub endpoint: String,
    /// This node's place and the address of node 0, in a job whose nodes never change; `None` where they may.
    pub place: Option<StaticPlace>,
    /// The address under which the other nodes reach this one; found by itself when absent. Each node has its own.
    pub local_addr: Option<String>,
    /// What this host is called: launchers of one host get neighbouring ranks. Each node has its own.
    pub host: String,
    /// A launcher that gives no sign of life for so long is left out; default 3 s.
    pub lease: Duration,
    /// With enough nodes but not all, how long to wait for another one before the job starts; default 5 s.
    pub last_call: Duration,
    /// How long to wait for enough nodes; default 600 s.
    pub join_timeout: Duration,
    /// At the end, how long the launcher with the store, or the first where it is etcd's, waits until all others know about
    /// it; default 30 s.
    pub close_timeout: Duration,
    /// With [`StoreKind::Etcd`], how long ranks run on when etcd is not reached; default 60 s.
    pub outage: Duration,
    /// How long this node waits for others before it says so on standard error; default 2 s.
    pub notice_after: Duration,
}

/// Where the launchers' store is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StoreKind {
    /// In one of the launchers; another one takes its place when it is lost. torchrun's `static` and `c10d`.
    #[default]
    Hosted,
    /// In etcd, API v3. `ETCD_USERNAME` and `ETCD_PASSWORD` in the environment name the user to be.
    Etcd,
}

/// A node's place in a job whose nodes are known beforehand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticPlace {
    /// The number of this node. Each node has its own.
    pub node_rank: usize,
    /// Host of node 0.
    pub master_addr: String,
    /// Port on that host, left for the ranks.
    pub master_port: u16,
}

impl Cluster {
    /// `nodes_min` to `nodes_max` nodes that meet at `endpoint`, with the defaults.
    pub fn new(nodes_min: usize, nodes_max: usize, endpoint: impl Into<String>) -> Self {
        let host = std::env::var("PACELINE_HOST_ID").ok();
        Self {
            nodes_min,
            nodes_max,
            store: StoreKind::default(),
            endpoint: endpoint.into(),
            place: None,
            local_addr: None,
            host: host
                .filter(|name| !name.is_empty())
                .unwrap_or_else(nodename),
            lease: Duration::from_secs(3),
            last_call: Duration::from_secs(5),
            join_timeout: Duration::from_secs(600),
            close_timeout: Duration::from_secs(30),
            outage: Duration::from_secs(60),
            notice_after: Duration::from_secs(2),
        }
    }
}

impl Job {
    /// A job with the defaults: prefixed console, no log files, 30 s grace.
    pub fn new(program: impl Into<PathBuf>, nproc: usize, token: Token) -> Self {
        Self {
            program: program.into(),
            run_as: RunAs::ByName,
            stdin: None,
            args: Vec::new(),
            nproc,
            env: Vec::new(),
            log_dir: None,
            console: Console::Prefixed,
            logs: LogOptions::default(),
            grace: Duration::from_secs(30),
            report_time: Duration::from_secs(2),
            threads_per_rank: None,
            signals: HandledSignals::default(),
            binding: None,
            virtual_local_rank: false,
            token,
            run_id: "none".to_owned(),
            restart_count: 0,
            max_restarts: 0,
            recovery: Recovery::default(),
            role: "default".to_owned(),
            master_addr: None,
            master_port: None,
            cluster: None,
            limits: Limits::default(),
            stall: StallOptions::default(),
            lang: Lang::default(),
            watch: None,
        }
    }

    /// Whether the ranks that are left go on after a loss.
    pub(crate) fn recovers_live(&self) -> bool {
        matches!(self.recovery, Recovery::Live | Recovery::Auto)
    }

    /// A rank's variable, where the launcher does not set it.
    pub(crate) fn var(&self, name: &str) -> Option<OsString> {
        let own = self.env.iter().rev().find(|(key, _)| key == name);
        own.map(|(_, value)| value.into())
            .or_else(|| std::env::var_os(name))
    }

    /// The same as text.
    pub(crate) fn variable(&self, name: &str) -> Option<String> {
        Some(self.var(name)?.to_string_lossy().into_owned())
    }
}

/// How a program is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RunAs {
    /// Under Python where its name ends in `.py`, else as it is.
    #[default]
    ByName,
    /// As it is.
    Program,
    /// Under Python, whatever it is called.
    Script,
    /// As a Python module of this name.
    Module,
}

/// What the ranks' output looks like on the launcher's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Console {
    /// `[rank 3] line` for all ranks, whole lines only; standard output and standard error stay apart.
    #[default]
    Prefixed,
    /// Rank 0's bytes pass through as they come, so that a progress bar works; the others go to their files only.
    RankZeroRaw,
}

/// The token that all nodes of a job share, from `PACELINE_JOB_TOKEN`.
///
/// *Errors*: it is not set, or malformed.
pub fn shared_token() -> Result<Token, LaunchError> {
    match std::env::var(TOKEN_VARIABLE) {
        Ok(hex) if !hex.trim().is_empty() => Ok(Token::from_hex(&hex)?),
        _ => Err(LaunchError::NoSharedToken),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_job_sets_last_is_what_ranks_and_launcher_see() {
        let mut job = Job::new("program", 1, Token::derived("job"));
        let own = std::env::var("PATH").ok();
        assert_eq!(job.variable("PATH"), own);
        for value in ["on", "off"] {
            job.env.push(("PACELINE_TLS".into(), value.into()));
            assert_eq!(job.variable("PACELINE_TLS").as_deref(), Some(value));
        }
    }
}
