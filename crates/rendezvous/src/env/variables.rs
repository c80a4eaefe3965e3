//! The tables of variables, from which documentation, errors, help and `--explain` are made.
//!
//! Every `PACELINE_*` variable that any crate reads is in [`VARIABLES`] or [`TOOL_VARIABLES`], or is the environment's form
//! of a training setting; `tests/variables.rs` searches the sources for others.

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

/// One variable of the environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// What a valid value looks like: the end of "expected ...".
    pub expected: &'static str,
    /// The effective value if it is absent.
    pub absent: &'static str,
    /// What it means.
    pub meaning: &'static str,
    /// When it must be there.
    pub need: Need,
    /// Where its value comes from in a Slurm step, when `RANK` and `WORLD_SIZE` are both absent.
    pub slurm: Option<&'static str>,
}

macro_rules! variables {
    ($($name:ident, $need:expr, $slurm:expr, $expected:literal, $absent:literal, $meaning:literal;)*) => {
        /// Every variable that tells a rank about itself and its job, in the order of the documentation.
        pub const VARIABLES: &[Variable] = &[$(Variable {
            name: stringify!($name), expected: $expected, absent: $absent, meaning: $meaning, need: $need, slurm: $slurm,
        }),*];
        /// The names as constants, so that a misspelt one does not compile.
        pub(crate) mod names {
            $(pub(crate) const $name: &str = stringify!($name);)*
        }
    };
}

use Need::{Always, Optional, UnlessStore, With};

variables! {
    RANK, Always, Some("SLURM_PROCID"), "a whole number below WORLD_SIZE", "0",
        "number of this process in the job";
    WORLD_SIZE, Always, Some("SLURM_STEP_NUM_TASKS or SLURM_NTASKS"), "a whole number from 1 to 65536", "1",
        "number of processes in the job";
    MASTER_ADDR, UnlessStore, Some("first of SLURM_STEP_NODELIST"), "a host name or address", "127.0.0.1",
        "host of rank 0, where the ranks meet";
    MASTER_PORT, UnlessStore, Some("from SLURM_JOB_ID and SLURM_STEP_ID, 10000 to 29998"), "a port from 1 to 65535", "none",
        "port of the meeting point on that host";
    LOCAL_RANK, With("LOCAL_WORLD_SIZE"), Some("SLURM_LOCALID"), "a whole number below LOCAL_WORLD_SIZE", "RANK if MASTER_ADDR is a loopback address, else 0",
        "number of this process on its machine";
    LOCAL_WORLD_SIZE, With("LOCAL_RANK"), Some("SLURM_STEP_TASKS_PER_NODE or SLURM_NTASKS_PER_NODE"), "a whole number from 1 to WORLD_SIZE", "WORLD_SIZE if MASTER_ADDR is a loopback address, else 1",
        "number of processes on this machine";
    PACELINE_LOCAL_RANK, Optional, None, "a whole number below LOCAL_WORLD_SIZE", "LOCAL_RANK",
        "number of this process on its machine where each process sees one device only, so that LOCAL_RANK is 0 for all";
    GROUP_RANK, Optional, Some("SLURM_NODEID"), "a whole number below GROUP_WORLD_SIZE", "RANK divided by LOCAL_WORLD_SIZE",
        "number of this machine";
    GROUP_WORLD_SIZE, Optional, Some("SLURM_STEP_NUM_NODES or SLURM_NNODES"), "a whole number from 1 to WORLD_SIZE", "WORLD_SIZE divided by LOCAL_WORLD_SIZE",
        "number of machines";
    ROLE_NAME, Optional, None, "any text", "default",
        "torchrun's role";
    TORCHELASTIC_RUN_ID, Optional, Some("SLURM_JOB_ID and SLURM_STEP_ID"), "any text", "none",
        "name of the job";
    TORCHELASTIC_RESTART_COUNT, Optional, Some("SLURM_RESTART_COUNT"), "a whole number", "0",
        "how often the job has been restarted";
    TORCHELASTIC_MAX_RESTARTS, Optional, None, "a whole number", "0",
        "how often the launcher restarts the job at most";
    TORCHELASTIC_USE_AGENT_STORE, Optional, None, "True or False", "False",
        "whether torchrun's agent listens at MASTER_PORT";
    TORCHELASTIC_ERROR_FILE, Optional, None, "a path", "none",
        "where torch's `@record` writes this rank's error";
    PACELINE_JOB_TOKEN, Optional, None, "64 hexadecimal digits", "none",
        "the job's secret; without one, anyone who can reach the port can join";
    PACELINE_STORE, Optional, None, "host:port", "none",
        "the launcher's store, where the ranks meet in place of MASTER_ADDR:MASTER_PORT";
    PACELINE_PAGE_FD, Optional, None, "the number of an open descriptor", "none",
        "the launcher's job page";
    PACELINE_LOCAL_CORES, Optional, None, "a whole number up to 65536", "those that this process may use",
        "cores that all ranks of this machine have together, where each rank is bound to a part of them";
    PACELINE_REPLACEMENT, Optional, None, "a whole number", "0",
        "number of this process, from 1, among those that the launcher has started in place of lost ranks; 0 for a rank that the job began with";
    PACELINE_MEMORY_FOLDER, Optional, None, "a path; set by the launcher", "none",
        "folder in this host's memory for checkpoints; the launcher removes it with the job";
    PACELINE_TRANSPORT, Optional, None, "the name of a transport", "auto",
        "transport between the ranks";
    PACELINE_HOST_ID, Optional, None, "any text", "the machine itself",
        "host that this rank counts as being on, in place of the machine's name; only ranks of one host share memory";
    PACELINE_ALGORITHM, Optional, None, "`ring`, or `allreduce:ring,broadcast:tree`; the same on every rank", "chosen for each call",
        "algorithm of collective operations, for all or for some";
    PACELINE_SOCKETS_PER_PEER, Optional, None, "a whole number from 1 to 8, the same on every rank", "chosen by itself",
        "TCP data connections of each pair of ranks";
    PACELINE_SOCKET_IFNAME, Optional, None, "interface names as NCCL takes them: `eth,ib` for prefixes, `=eth0` for whole names, `^docker,lo` for all others", "NCCL_SOCKET_IFNAME",
        "network interfaces by which ranks reach each other";
    NCCL_SOCKET_IFNAME, Optional, None, "as PACELINE_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
        "as PACELINE_SOCKET_IFNAME, read when that is absent";
    GLOO_SOCKET_IFNAME, Optional, None, "as PACELINE_SOCKET_IFNAME", "all interfaces",
        "as PACELINE_SOCKET_IFNAME, read when both are absent";
    PACELINE_TLS, Optional, None, "`on` or `1`, `off` or `0`; the same for every rank and the launcher", "off",
        "TLS on TCP connections between ranks and to their store, authenticated by PACELINE_JOB_TOKEN";
    PACELINE_TIMEOUT_SECONDS, Optional, None, "seconds above 0 and up to 30 days, fractions allowed; or `auto`, which follows the job's steps", "60",
        "deadline of each collective operation";
    PACELINE_FLIGHT_DIR, Optional, None, "a path", "none",
        "folder for the flight recorder's file, written when a group fails";
    PACELINE_FLIGHT_RECORDS, Optional, None, "a whole number up to 65536", "1024",
        "operations that each group's flight recorder keeps; 0 turns it off";
}

/// Every other variable that Paceline reads, apart from the settings of `paceline train`.
#[rustfmt::skip] // a table: two lines a variable
pub const TOOL_VARIABLES: &[Variable] = &[
    tool("PACELINE_DEVICE", "auto, cpu, cuda, vulkan, metal or rocm", "auto",
        "kind of device that ranks compute on"),
    tool("PACELINE_USE_GPU", "a whole number", "0",
        "GPUs to train on, one rank each; above 0, `auto` takes the best kind of GPU"),
    tool("PACELINE_ISA", "portable, avx2 or avx512", "the widest that the processor has",
        "instructions of Paceline's kernels for CPUs; the bits are the same with each"),
    tool("PACELINE_NCCL_LIBRARY", "a path", "found in the usual folders",
        "NCCL's library"),
    tool("PACELINE_CUDA_LIBRARY", "a path", "found by the loader",
        "the CUDA driver's library"),
    tool("PACELINE_MPI_LIBRARY", "a path", "found by the loader: Open MPI's, MPICH's or the standard's, that of the launcher first",
        "MPI's library, for PACELINE_TRANSPORT=mpi"),
    tool("PACELINE_NVML_LIBRARY", "a path", "found by the loader",
        "NVIDIA's management library"),
    tool("PACELINE_SYSTEM_ROOT", "a path", "/",
        "folder that holds the machine's /proc, /sys and /dev, as in a container that mounts the host's"),
    tool("PACELINE_SSH", "a command with its options", "ssh",
        "what `paceline run --hosts` reaches hosts by, as --ssh"),
    tool("PACELINE_LAUNCHER", "set by the launcher", "none",
        "launchers around this process, by pid and start time; tells the processes of a job from others"),
    tool("PACELINE_TERMINAL_COLUMNS", "a whole number up to 1000; set by the launcher", "none",
        "width of the terminal that shows rank 0's progress bar"),
    tool("PACELINE_POD_NAMESPACE", "set by the manifests of `paceline submit kubernetes`", "none",
        "namespace of the pod, part of its host name"),
    tool("PACELINE_COMMIT", "a commit, when Paceline is compiled", "none",
        "commit that `paceline bench --json` records"),
];

const fn tool(
    name: &'static str,
    expected: &'static str,
    absent: &'static str,
    meaning: &'static str,
) -> Variable {
    Variable {
        name,
        expected,
        absent,
        meaning,
        need: Optional,
        slurm: None,
    }
}

/// The start of all variables of our own.
const PREFIX: &str = "PACELINE_";
/// The start of the variables of the libraries that stand in for NVIDIA's in tests.
const STAND_INS: &str = "PACELINE_FAKE_";

/// Whether Paceline reads a variable of this name; training settings are not among them.
pub fn is_known(name: &str) -> bool {
    find(name).is_some() || name.starts_with(STAND_INS)
}

/// A warning for each of these variables that has our prefix and that Paceline does not read.
///
/// Settings of `paceline train` are among them: they are settings of that command, and have no effect in other programs.
pub fn unknown(names: impl Iterator<Item = String>) -> Vec<String> {
    let warning = |name: &str| {
        let known = VARIABLES.iter().chain(TOOL_VARIABLES);
        let near = nearest(name, known.map(|row| row.name));
        let advice = near.map(|near| format!(" (did you mean {near}?)"));
        format!(
            "environment variable {name} has no effect in this program{}",
            advice.unwrap_or_default()
        )
    };
    names
        .filter(|name| name.starts_with(PREFIX) && !is_known(name))
        .map(|name| warning(&name))
        .collect()
}

/// The most similar name, if a typo explains the difference: at most one edit per three letters behind our prefix.
pub fn nearest<N: AsRef<str> + Ord>(unknown: &str, known: impl Iterator<Item = N>) -> Option<N> {
    let own = |name: &str| name.strip_prefix(PREFIX).unwrap_or(name).len();
    known
        .map(|name| (strsim::damerau_levenshtein(unknown, name.as_ref()), name))
        .filter(|(edits, name)| *edits <= own(name.as_ref()).div_ceil(3))
        .min()
        .map(|(_, name)| name)
}

/// The row of `name`.
pub(super) fn find(name: &str) -> Option<&'static Variable> {
    let mut all = VARIABLES.iter().chain(TOOL_VARIABLES);
    all.find(|variable| variable.name == name)
}
