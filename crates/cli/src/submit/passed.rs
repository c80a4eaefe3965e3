//! Options of `paceline run` that `paceline submit` passes on to it, whichever there are.

use std::ffi::OsString;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches};

use crate::run;

/// What the submission itself says to the launchers, or has its own word for.
const OWN: [&str; 11] = [
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
    let mut words = Vec::new();
    for arg in options() {
        let id = arg.get_id().as_str();
        if matches.value_source(id) != Some(ValueSource::CommandLine) {
            continue;
        }
        let long = arg.get_long().unwrap_or_default();
        if !arg.get_action().takes_values() {
            let times = match arg.get_action() {
                ArgAction::Count => matches.get_count(id),
                _ => 1,
            };
            words.extend((0..times).map(|_| format!("--{long}")));
            continue;
        }
        for value in matches.get_raw(id).into_iter().flatten() {
            let value = text(&value.to_owned())?;
            if value.starts_with('-') || value.is_empty() {
                words.push(format!("--{long}={value}"));
            } else {
                words.extend([format!("--{long}"), value]);
            }
        }
    }
    Ok(words)
}
