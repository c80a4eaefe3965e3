//! The table of variables, from which documentation, errors and help are made.

/// When a variable must be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// In every job of more than one process.
    Always,
    /// Unless `PACELINE_STORE` says where the ranks meet.
    UnlessStore,
    /// Together with the named variable, or not at all.
    With(&'static str),
    /// Never.
    Optional,
}

/// One variable of the environment contract.
#[derive(Debug, Clone, Copy)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// What a valid value looks like: the end of "expected ...".
    pub expected: &'static str,
    /// What it means.
    pub meaning: &'static str,
    /// When it must be there.
    pub need: Need,
    /// Where its value comes from in a Slurm step, when `RANK` and `WORLD_SIZE` are both absent.
    pub slurm: Option<&'static str>,
}

macro_rules! variables {
    ($($name:ident, $need:expr, $slurm:expr, $expected:literal, $meaning:literal;)*) => {
        /// Every variable a rank reads, in the order of the documentation.
        pub const VARIABLES: &[Variable] = &[$(Variable {
            name: stringify!($name), expected: $expected, meaning: $meaning, need: $need, slurm: $slurm,
        }),*];
        /// The names as constants, so that a misspelt one does not compile.
        pub(crate) mod names {
            $(pub(crate) const $name: &str = stringify!($name);)*
        }
    };
}

use Need::{Always, Optional, UnlessStore, With};

variables! {
    RANK, Always, Some("SLURM_PROCID"), "a whole number below WORLD_SIZE", "number of this process in the job";
    WORLD_SIZE, Always, Some("SLURM_STEP_NUM_TASKS or SLURM_NTASKS"), "a whole number from 1 to 65536", "number of processes in the job";
    MASTER_ADDR, UnlessStore, Some("first of SLURM_STEP_NODELIST"), "a host name or address", "host of rank 0, where the ranks meet";
    MASTER_PORT, UnlessStore, Some("from SLURM_JOB_ID and SLURM_STEP_ID, 10000 to 29998"), "a port from 1 to 65535", "port of the meeting point on that host";
    LOCAL_RANK, With("LOCAL_WORLD_SIZE"), Some("SLURM_LOCALID"), "a whole number below LOCAL_WORLD_SIZE", "number of this process on its machine";
    LOCAL_WORLD_SIZE, With("LOCAL_RANK"), Some("SLURM_STEP_TASKS_PER_NODE or SLURM_NTASKS_PER_NODE"), "a whole number from 1 to WORLD_SIZE", "number of processes on this machine";
    PACELINE_LOCAL_RANK, Optional, None, "a whole number below LOCAL_WORLD_SIZE", "number of this process on its machine where LOCAL_RANK is 0 for all, because each sees one device only";
    GROUP_RANK, Optional, Some("SLURM_NODEID"), "a whole number below GROUP_WORLD_SIZE", "number of this machine";
    GROUP_WORLD_SIZE, Optional, Some("SLURM_STEP_NUM_NODES or SLURM_NNODES"), "a whole number from 1 to WORLD_SIZE", "number of machines";
    ROLE_NAME, Optional, None, "any text", "torchrun's role; `default` when absent";
    TORCHELASTIC_RUN_ID, Optional, Some("SLURM_JOB_ID and SLURM_STEP_ID"), "any text", "name of the job; `none` when absent";
    TORCHELASTIC_RESTART_COUNT, Optional, Some("SLURM_RESTART_COUNT"), "a whole number", "how often the job was restarted before";
    TORCHELASTIC_MAX_RESTARTS, Optional, None, "a whole number", "how often the launcher restarts at most";
    TORCHELASTIC_USE_AGENT_STORE, Optional, None, "True or False", "whether torchrun's agent listens at MASTER_PORT";
    TORCHELASTIC_ERROR_FILE, Optional, None, "a path", "where torch's `@record` writes this rank's error";
    PACELINE_JOB_TOKEN, Optional, None, "64 hexadecimal digits", "the job's secret; without it the job is open to everybody who reaches the port";
    PACELINE_STORE, Optional, None, "host:port", "the launcher's store, where the ranks meet in place of MASTER_ADDR:MASTER_PORT";
    PACELINE_PAGE_FD, Optional, None, "the number of an open descriptor", "the launcher's job page";
    PACELINE_LOCAL_CORES, Optional, None, "a whole number up to 65536", "cores that the ranks of this machine have together, where each is bound to a part of them; those that a rank may use when absent or 0";
    PACELINE_TRANSPORT, Optional, None, "the name of a transport", "transport between the ranks; chosen by itself when absent";
    PACELINE_HOST_ID, Optional, None, "any text", "host that this rank counts as being on, in place of the machine's name: ranks share memory only where it is equal";
    PACELINE_ALGORITHM, Optional, None, "`ring`, or `allreduce:ring,broadcast:tree`; the same on every rank", "algorithm of collective operations, for all or for some; chosen by a table when absent";
    PACELINE_SOCKETS_PER_PEER, Optional, None, "a whole number from 1 to 8, the same on every rank", "data connections of each pair of ranks over TCP; chosen by itself when absent";
    PACELINE_SOCKET_IFNAME, Optional, None, "names of interfaces as NCCL takes them: `eth,ib` by how they begin, `=eth0` whole ones, `^docker,lo` all others", "network interfaces that ranks reach each other by; all that fit when absent";
    NCCL_SOCKET_IFNAME, Optional, None, "as PACELINE_SOCKET_IFNAME", "the same, read when that is absent";
    GLOO_SOCKET_IFNAME, Optional, None, "as PACELINE_SOCKET_IFNAME", "the same, read when both are absent";
    PACELINE_TLS, Optional, None, "`on` or `1`, `off` or `0`; the same for every rank and the launcher", "encryption of TCP between ranks and to their store, by TLS that PACELINE_JOB_TOKEN vouches for; none when absent";
    PACELINE_TIMEOUT_SECONDS, Optional, None, "seconds above 0 and up to 30 days, fractions allowed", "deadline of each collective operation";
    PACELINE_FLIGHT_DIR, Optional, None, "a path", "folder for what this rank's flight recorder holds when a group fails; none is written when absent";
    PACELINE_FLIGHT_RECORDS, Optional, None, "a whole number up to 65536", "operations that each group's flight recorder keeps; 1024 when absent, 0 turns it off";
}

impl Variable {
    /// When it is needed, in words.
    pub fn needed(&self) -> String {
        match self.need {
            Always => "yes".into(),
            UnlessStore => "unless `PACELINE_STORE`".into(),
            With(other) => format!("with `{other}`"),
            Optional => "no".into(),
        }
    }
}

/// The table as Markdown, for help texts and documentation.
pub fn reference() -> String {
    let mut text =
        String::from("| variable | meaning | needed | in a Slurm step |\n|---|---|---|---|\n");
    for variable in VARIABLES {
        let Variable {
            name,
            meaning,
            expected,
            ..
        } = variable;
        let slurm = variable.slurm.unwrap_or("");
        let row = format!(
            "| `{name}` | {meaning} ({expected}) | {} | {slurm} |\n",
            variable.needed()
        );
        text.push_str(&row);
    }
    text
}

/// What a valid value of `name` looks like.
pub(super) fn expected(name: &str) -> &'static str {
    VARIABLES
        .iter()
        .find(|variable| variable.name == name)
        .map_or("another value", |variable| variable.expected)
}
