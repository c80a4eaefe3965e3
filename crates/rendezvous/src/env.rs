//! The environment contract: what a launcher tells a rank about itself and the job.
//!
//! The names are torchrun's, so that one program runs under `paceline run`, `torchrun` and by hand. Where they are absent,
//! the variables of Slurm and of MPI launchers are read ([`crate::scheduler`]). Without any of them a program
//! is alone: world 1.
//!
#![doc = include_str!("env/variables.md")]
//!
//! Identity comes from one source: if `RANK` or `WORLD_SIZE` is set, no scheduler's numbers are read. Without `LOCAL_RANK`,
//! all ranks are assumed to be on this machine if `MASTER_ADDR` is a loopback address, and each on its own machine
//! otherwise.

mod error;
mod listing;
mod source;
mod variables;

use std::fmt;
use std::net::IpAddr;
use std::sync::OnceLock;
use std::time::Duration;

use self::source::Source;
pub(crate) use self::variables::names;
use crate::scheduler;
use crate::token::Token;

pub use self::error::EnvError;
pub use self::listing::{Listed, Origin, list};
pub use self::variables::{Need, TOOL_VARIABLES, VARIABLES, Variable, is_known, nearest, unknown};

/// Largest world: a bound on everything that is allocated per rank.
pub const WORLD_MAX: usize = 65_536;

/// More cores than any machine has.
const CORES_MAX: usize = 65_536;
/// Most data connections of one pair of ranks.
pub const SOCKETS_PER_PEER_MAX: usize = 8;
/// Most operations that a flight recorder can be asked to keep.
pub const FLIGHT_RECORDS_MAX: usize = 65_536;

/// Variables that a launcher does not set for every rank of every job. A launcher that such a rank starts must not pass
/// them on.
pub const SOMETIMES_SET: [&str; 4] = [
    names::PACELINE_LOCAL_RANK,
    names::PACELINE_LOCAL_CORES,
    names::PACELINE_REPLACEMENT,
    names::PACELINE_MEMORY_FOLDER,
];

/// Variables that a launcher sets for its ranks if its own environment does not have them, as torchrun does.
pub const WORKER_DEFAULTS: &[(&str, &str)] = &[("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")];

/// A rank's view of itself and the job before it has talked to any other rank.
///
/// Values that were read are consistent: `rank < world`, `local_rank < local_world <= world`, `node_rank < node_count <= world`.
///
/// ```
/// use paceline_rendezvous::env::{WorkerEnv, worker_vars};
///
/// let env = WorkerEnv { rank: 1, world: 2, master_port: 29500, ..WorkerEnv::alone() };
/// let vars = worker_vars(&env);
/// let get = |name: &str| vars.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
/// assert_eq!(WorkerEnv::from_lookup(&get)?.rank, 1);
/// # Ok::<(), paceline_rendezvous::env::EnvError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerEnv {
    /// Global rank.
    pub rank: usize,
    /// Number of ranks of the job.
    pub world: usize,
    /// Rank among the ranks of this machine.
    pub local_rank: usize,
    /// Number of ranks on this machine.
    pub local_world: usize,
    /// Whether `LOCAL_RANK` is 0 on every rank, because each sees one device only. `local_rank` comes from
    /// `PACELINE_LOCAL_RANK` then.
    pub virtual_local_rank: bool,
    /// Cores of all ranks of this machine together, where each rank is bound to a part of them.
    pub local_cores: Option<usize>,
    /// Number of this machine.
    pub node_rank: usize,
    /// Number of machines.
    pub node_count: usize,
    /// Host of rank 0.
    pub master_addr: String,
    /// Port of the meeting point on `master_addr`; 0 if there is no meeting point.
    pub master_port: u16,
    /// Address (host:port) of the job's store, when the launcher hosts one.
    pub store: Option<String>,
    /// Whether torchrun's agent already listens at the master port and speaks torch's TCPStore protocol.
    pub agent_store: bool,
    /// The job's token.
    pub token: Token,
    /// False if `token` was derived from public values and so protects nothing.
    pub token_is_secret: bool,
    /// Name of the job.
    pub run_id: String,
    /// How often the job has been restarted.
    pub restart_count: u32,
    /// How often the launcher restarts at most.
    pub max_restarts: u32,
    /// Number of this process, from 1, among those that were started in place of lost ranks; 0 for the others.
    pub replacement: u32,
    /// torchrun's role name.
    pub role: String,
    /// Where torch's `@record` writes the error of this rank.
    pub error_file: Option<String>,
    /// Inherited descriptor of the job page.
    pub page_fd: Option<i32>,
    /// Folder in this host's memory for checkpoints, which the launcher removes with the job.
    pub memory_folder: Option<String>,
    /// Requested transport, unchecked: `collective` knows the names.
    pub transport: Option<String>,
    /// Name of this rank's host, in place of the machine's. Ranks share memory only where the names are equal, so a
    /// container that cannot share memory with its neighbours gets its own name.
    pub host_id: Option<String>,
    /// Requested algorithms, unchecked: `collective` knows the names.
    pub algorithm: Option<String>,
    /// Data connections of each pair of ranks over TCP.
    pub sockets_per_peer: Option<usize>,
    /// Network interfaces to use, in NCCL's notation and unchecked.
    pub socket_ifname: Option<String>,
    /// Whether connections between ranks and to the store use TLS.
    pub tls: bool,
    /// Deadline of each collective operation.
    pub timeout: Option<Timeout>,
    /// Where this rank's flight recorder writes when a group fails.
    pub flight_dir: Option<String>,
    /// How many operations each group's flight recorder keeps, at most [`FLIGHT_RECORDS_MAX`].
    pub flight_records: Option<usize>,
}

/// How long ranks wait for one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timeout {
    /// As the duration of the job's steps suggests.
    Auto,
    /// This long.
    After(Duration),
}

impl fmt::Display for Timeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::After(time) => time.as_secs_f64().fmt(f),
        }
    }
}

impl WorkerEnv {
    /// Reads this process's environment, and warns if anyone on the network could join the job.
    ///
    /// *Errors*: see [`EnvError`].
    pub fn from_process() -> Result<Self, EnvError> {
        // A value that is not Unicode is lossily converted: it fails its parser and the error shows it.
        let env = Self::from_lookup(&|name| {
            std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
        })?;
        // One rank warns for all: the others have the same settings.
        if env.rank == 0 && env.is_exposed() {
            crate::notice!(
                WARN,
                "{} is not set, so anyone who can reach {} can join this job; start it with `paceline run`, or set the \
                 same 64 hexadecimal digits on every rank",
                names::PACELINE_JOB_TOKEN,
                crate::net::join(&env.master_addr, env.master_port)
            );
        }
        if env.rank == 0 && env.tls && !env.token_is_secret && env.world > 1 {
            crate::notice!(
                WARN,
                "{} without {} stops eavesdropping but not tampering: an attacker can guess the token that \
                 authenticates both ends",
                names::PACELINE_TLS,
                names::PACELINE_JOB_TOKEN
            );
        }
        Ok(env)
    }

    /// Reads any source of variables; an empty variable counts as absent.
    ///
    /// *Errors*: see [`EnvError`].
    pub fn from_lookup(get: &dyn Fn(&str) -> Option<String>) -> Result<Self, EnvError> {
        let get = |name: &str| get(name).filter(|value| !value.trim().is_empty());
        let vars = Source::choose(&get);
        let alone = Self::alone_with(&vars)?;
        if !vars.says_anything() {
            return Ok(alone);
        }
        vars.check_complete()?;

        let is_world = |world: &usize| (1..=WORLD_MAX).contains(world);
        let world = vars.valid(names::WORLD_SIZE, is_world)?.unwrap_or(1);
        let rank = vars.number(names::RANK, WORLD_MAX)?.unwrap_or(0);
        vars.check_below(names::RANK, rank, names::WORLD_SIZE, world)?;

        let master_addr = vars.text(names::MASTER_ADDR).unwrap_or(alone.master_addr);
        let master_port = vars
            .valid(names::MASTER_PORT, |port| *port > 0)?
            .unwrap_or(0);
        let (local_rank, local_world) = local_place(&vars, rank, world, is_loopback(&master_addr))?;
        let (node_rank, node_count) = node_place(&vars, (rank, world), local_world)?;
        let seed = format!("{}\0{master_addr}\0{master_port}", alone.run_id);
        let (token, token_is_secret) = job_token(&vars, &seed)?;
        Ok(Self {
            rank,
            world,
            local_rank,
            local_world,
            virtual_local_rank: vars.text(names::PACELINE_LOCAL_RANK).is_some(),
            node_rank,
            node_count,
            master_addr,
            master_port,
            token,
            token_is_secret,
            ..alone
        })
    }

    /// A job of one rank, which needs no meeting point.
    pub fn alone() -> Self {
        Self::from_lookup(&|_| None).expect("an empty environment has no malformed value")
    }

    /// Whether anyone on the network can join: several ranks, no secret, and a meeting point beyond this machine.
    pub fn is_exposed(&self) -> bool {
        !self.token_is_secret && self.world > 1 && !is_loopback(&self.master_addr)
    }

    /// Cores of all ranks of this machine together: the launcher's number, else the cores that this process may use, assuming
    /// that its neighbours have the same ones.
    pub fn cores(&self) -> usize {
        self.local_cores.unwrap_or_else(own_cores)
    }

    /// The values that do not depend on the job's shape, for a job of one rank.
    fn alone_with(vars: &Source<'_>) -> Result<Self, EnvError> {
        let (token, token_is_secret) = job_token(vars, "alone")?;
        let text = |name, default: &str| vars.text(name).unwrap_or_else(|| default.to_owned());
        Ok(Self {
            rank: 0,
            world: 1,
            local_rank: 0,
            local_world: 1,
            virtual_local_rank: false,
            node_rank: 0,
            node_count: 1,
            master_addr: "127.0.0.1".into(),
            master_port: 0,
            token,
            token_is_secret,
            store: vars.store()?,
            agent_store: vars.flag(names::TORCHELASTIC_USE_AGENT_STORE)?,
            run_id: text(names::TORCHELASTIC_RUN_ID, "none"),
            restart_count: vars.parsed(names::TORCHELASTIC_RESTART_COUNT)?.unwrap_or(0),
            max_restarts: vars.parsed(names::TORCHELASTIC_MAX_RESTARTS)?.unwrap_or(0),
            replacement: vars.parsed(names::PACELINE_REPLACEMENT)?.unwrap_or(0),
            role: text(names::ROLE_NAME, "default"),
            error_file: vars.text(names::TORCHELASTIC_ERROR_FILE),
            page_fd: vars.valid(names::PACELINE_PAGE_FD, |fd: &i32| *fd >= 0)?,
            local_cores: vars
                .number(names::PACELINE_LOCAL_CORES, CORES_MAX)?
                .filter(|cores| *cores > 0),
            memory_folder: vars.text(names::PACELINE_MEMORY_FOLDER),
            transport: vars.text(names::PACELINE_TRANSPORT),
            host_id: vars.text(names::PACELINE_HOST_ID),
            algorithm: vars.text(names::PACELINE_ALGORITHM),
            sockets_per_peer: vars.valid(names::PACELINE_SOCKETS_PER_PEER, |sockets| {
                (1..=SOCKETS_PER_PEER_MAX).contains(sockets)
            })?,
            // PyTorch users may have set one of the others already.
            socket_ifname: [
                names::PACELINE_SOCKET_IFNAME,
                names::NCCL_SOCKET_IFNAME,
                names::GLOO_SOCKET_IFNAME,
            ]
            .into_iter()
            .find_map(|name| vars.text(name)),
            tls: vars.switch(names::PACELINE_TLS)?,
            timeout: vars.timeout()?,
            flight_dir: vars.text(names::PACELINE_FLIGHT_DIR),
            flight_records: vars.number(names::PACELINE_FLIGHT_RECORDS, FLIGHT_RECORDS_MAX)?,
        })
    }
}

/// Cores that this process may use. Asked once: to learn what a container allows takes some ten files, and each group of ranks wants to know.
pub fn own_cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get))
}

/// Whether an environment says that this process is one of a job's ranks: by torchrun's `RANK` or `WORLD_SIZE`, or as one
/// of several tasks of a scheduler.
///
/// A program that can also start ranks asks this first. A lone task is not a rank: it may be where ranks are to be started.
pub fn is_rank(get: &dyn Fn(&str) -> Option<String>) -> bool {
    let get = |name: &str| get(name).filter(|value| !value.trim().is_empty());
    let is_one_of_several = || {
        let (_, vars) = scheduler::rank_vars(&get)?;
        Some(vars.get(names::WORLD_SIZE)? != "1")
    };
    get(names::RANK).is_some()
        || get(names::WORLD_SIZE).is_some()
        || is_one_of_several().unwrap_or(false)
}

/// Whether an environment asks for TLS, for a launcher that hosts the ranks' store.
///
/// *Errors*: a value that is neither on nor off.
pub fn asks_for_tls(get: &dyn Fn(&str) -> Option<String>) -> Result<bool, EnvError> {
    let get = |name: &str| get(name).filter(|value| !value.trim().is_empty());
    Source::choose(&get).switch(names::PACELINE_TLS)
}

/// Every variable of a rank with this environment: torchrun's contract and Paceline's own.
///
/// Reading them again gives the same [`WorkerEnv`]. Job-independent variables of torchrun are in [`WORKER_DEFAULTS`].
pub fn worker_vars(worker: &WorkerEnv) -> Vec<(String, String)> {
    let text = |value: &dyn ToString| Some(value.to_string());
    let number = |value: Option<usize>| value.map(|value| value.to_string());
    let is_virtual = worker.virtual_local_rank;
    let shown_local_rank = if is_virtual { 0 } else { worker.local_rank };
    let agent_store = if worker.agent_store { "True" } else { "False" };
    let vars = [
        (names::RANK, text(&worker.rank)),
        (names::WORLD_SIZE, text(&worker.world)),
        (names::LOCAL_RANK, text(&shown_local_rank)),
        (names::LOCAL_WORLD_SIZE, text(&worker.local_world)),
        (names::GROUP_RANK, text(&worker.node_rank)),
        (names::GROUP_WORLD_SIZE, text(&worker.node_count)),
        (names::ROLE_NAME, text(&worker.role)),
        // One role per job, so a role's numbers are the job's.
        ("ROLE_RANK", text(&worker.rank)),
        ("ROLE_WORLD_SIZE", text(&worker.world)),
        (names::MASTER_ADDR, text(&worker.master_addr)),
        (
            names::MASTER_PORT,
            number(Some(worker.master_port.into()).filter(|port| *port != 0)),
        ),
        (names::TORCHELASTIC_RUN_ID, text(&worker.run_id)),
        (
            names::TORCHELASTIC_RESTART_COUNT,
            text(&worker.restart_count),
        ),
        (names::TORCHELASTIC_MAX_RESTARTS, text(&worker.max_restarts)),
        (names::TORCHELASTIC_USE_AGENT_STORE, text(&agent_store)),
        // torch reads it without a default; empty means no file.
        (
            names::TORCHELASTIC_ERROR_FILE,
            Some(worker.error_file.clone().unwrap_or_default()),
        ),
        (
            names::PACELINE_JOB_TOKEN,
            worker.token_is_secret.then(|| worker.token.to_hex()),
        ),
        (
            names::PACELINE_LOCAL_RANK,
            number(is_virtual.then_some(worker.local_rank)),
        ),
        (names::PACELINE_LOCAL_CORES, number(worker.local_cores)),
        (
            names::PACELINE_REPLACEMENT,
            Some(worker.replacement)
                .filter(|number| *number > 0)
                .map(|number| number.to_string()),
        ),
        (names::PACELINE_STORE, worker.store.clone()),
        (
            names::PACELINE_PAGE_FD,
            worker.page_fd.map(|fd| fd.to_string()),
        ),
        (names::PACELINE_MEMORY_FOLDER, worker.memory_folder.clone()),
        (names::PACELINE_TRANSPORT, worker.transport.clone()),
        (names::PACELINE_HOST_ID, worker.host_id.clone()),
        (names::PACELINE_ALGORITHM, worker.algorithm.clone()),
        (
            names::PACELINE_SOCKETS_PER_PEER,
            number(worker.sockets_per_peer),
        ),
        (names::PACELINE_SOCKET_IFNAME, worker.socket_ifname.clone()),
        (names::PACELINE_TLS, worker.tls.then(|| "on".to_owned())),
        (
            names::PACELINE_TIMEOUT_SECONDS,
            worker.timeout.map(|timeout| timeout.to_string()),
        ),
        (names::PACELINE_FLIGHT_DIR, worker.flight_dir.clone()),
        (
            names::PACELINE_FLIGHT_RECORDS,
            number(worker.flight_records),
        ),
    ];
    let set = |(name, value): (&str, Option<String>)| Some((name.to_owned(), value?));
    vars.into_iter().filter_map(set).collect()
}

fn local_place(
    vars: &Source<'_>,
    rank: usize,
    world: usize,
    here: bool,
) -> Result<(usize, usize), EnvError> {
    let is_part = |local_world: &usize| (1..=world).contains(local_world);
    let Some(local_world) = vars.valid(names::LOCAL_WORLD_SIZE, is_part)? else {
        return Ok(if here { (rank, world) } else { (0, 1) });
    };
    let (name, number) = match vars.number(names::PACELINE_LOCAL_RANK, WORLD_MAX)? {
        Some(number) => (names::PACELINE_LOCAL_RANK, Some(number)),
        None => (
            names::LOCAL_RANK,
            vars.number(names::LOCAL_RANK, WORLD_MAX)?,
        ),
    };
    let local_rank = number.unwrap_or(0);
    vars.check_below(name, local_rank, names::LOCAL_WORLD_SIZE, local_world)?;
    Ok((local_rank, local_world))
}

/// Without the variables, each machine is assumed to have `local_world` ranks, the last one perhaps fewer.
fn node_place(
    vars: &Source<'_>,
    (rank, world): (usize, usize),
    local_world: usize,
) -> Result<(usize, usize), EnvError> {
    let is_count = |nodes: &usize| (1..=world).contains(nodes);
    let node_count = vars
        .valid(names::GROUP_WORLD_SIZE, is_count)?
        .unwrap_or_else(|| world.div_ceil(local_world));
    let by_shape = (rank / local_world).min(node_count - 1);
    let node_rank = vars
        .number(names::GROUP_RANK, WORLD_MAX)?
        .unwrap_or(by_shape);
    vars.check_below(
        names::GROUP_RANK,
        node_rank,
        names::GROUP_WORLD_SIZE,
        node_count,
    )?;
    Ok((node_rank, node_count))
}

/// The token and whether it is a secret.
fn job_token(vars: &Source<'_>, seed: &str) -> Result<(Token, bool), EnvError> {
    match vars.text(names::PACELINE_JOB_TOKEN) {
        // The value stays out of the error.
        Some(hex) => Ok((Token::from_hex(&hex)?, true)),
        None => Ok((Token::derived(seed), false)),
    }
}

fn is_loopback(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests;
