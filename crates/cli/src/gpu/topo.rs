//! `paceline gpu topo`: how the devices are wired.

use std::io::{self, Write};

use clap::{ArgAction, ArgMatches};
use paceline_gpu::topology::Topology;

use crate::exit::{Exit, Failure};
use crate::flags::{finish, option};

use super::source::{self, Source};

/// What `paceline gpu topo` is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopoArgs {
    /// What is looked at.
    pub source: Source,
    /// Print JSON.
    pub json: bool,
}

/// The command as clap knows it.
pub(super) fn command() -> clap::Command {
    let command = clap::Command::new("topo")
        .about("Show how the devices are wired, with each other and with network cards and CPUs")
        .arg(
            option("json")
                .action(ArgAction::SetTrue)
                .help("Print one JSON object with everything"),
        );
    source::add_to(command)
}

/// What it was told.
pub(super) fn read(matches: &ArgMatches) -> TopoArgs {
    TopoArgs {
        source: source::read(matches),
        json: matches.get_flag("json"),
    }
}

/// Looks, and prints what is there.
///
/// *Errors* - what kept it from that.
pub(super) fn run(args: &TopoArgs) -> Result<Exit, Failure> {
    let topology = Topology::of(&args.source.snapshot()?);
    let mut out = io::BufWriter::new(io::stdout().lock());
    let written = topology
        .write(args.json, &mut out)
        .and_then(|()| out.flush());
    finish(written)
}
