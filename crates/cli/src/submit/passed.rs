//! Options of `paceline run` that `paceline submit` passes on to it, whichever there are.

use std::ffi::OsString;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches};

use crate::{flags, run};

/// What the submission itself says to the launchers, or has its own word for.
const OWN: [&str; 14] = [
    "nproc_per_node",
    "shutdown_timeout",
    "standalone",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "local_addr",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "hosts",
    "hostfile",
    "ssh",
];

fn options() -> impl Iterator<Item = Arg> {
    let command = run::command();
    let passed: Vec<_> = command
        .get_arguments()
        .filter(|arg| !OWN.contains(&arg.get_id().as_str()))
        .cloned()
        .collect();
    passed.into_iter()
}

/// The options, for a command whose help says where to read about them; short forms are sbatch's.
pub(super) fn hidden() -> impl Iterator<Item = Arg> {
    options().map(|arg| arg.short(None).hide(true))
}

/// The given ones, word for word.
pub(super) fn words(
    matches: &ArgMatches,
    text: impl Fn(&OsString) -> Result<String, clap::Error>,
) -> Result<Vec<String>, clap::Error> {
    let is_given = |source| source == ValueSource::CommandLine;
    flags::words(matches, options(), is_given, text)
}
