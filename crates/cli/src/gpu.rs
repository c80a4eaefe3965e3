//! `paceline gpu`: this machine's devices, how they are wired, what is wrong with them, and what they do.

mod doctor;
mod live;
pub mod p2p;
mod serve;
mod source;
mod top;
mod topo;
mod usage;

use clap::ArgMatches;

use crate::exit::{Exit, Failure};

pub use doctor::DoctorArgs;
pub use p2p::P2pArgs;
pub use serve::ServeArgs;
pub use source::Source;
pub use top::TopArgs;
pub use topo::TopoArgs;
pub use usage::UsageArgs;

/// The command line of `paceline gpu`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuArgs {
    /// Show how the devices are wired.
    Topo(TopoArgs),
    /// Say what is wrong with them.
    Doctor(DoctorArgs),
    /// Copy data between each two of them.
    P2p(P2pArgs),
    /// Sum up what they did.
    Usage(UsageArgs),
    /// Watch the devices and the ranks of running jobs.
    Top(TopArgs),
    /// Serve what they do to Prometheus.
    Serve(ServeArgs),
}

const EXAMPLES: &str = "\
Devices have the driver's numbers, as in nvidia-smi; CUDA_VISIBLE_DEVICES hides none.
Nothing is changed, and no device is woken for longer than it takes to ask it; only
`p2p` copies data, on the devices that CUDA_VISIBLE_DEVICES shows, with CUDA's numbers.

In a container that has the host's /proc and /sys mounted, such as under /host,
`--root /host` looks there. A saved snapshot of another machine is shown with
`--snapshot FILE`.

Examples:
  See what runs between the devices, and where they are plugged in:
    paceline gpu topo
  Find out what is wrong with them, and what to do about it:
    paceline gpu doctor
  Find out whether they reach each other as the driver says, and how fast:
    paceline gpu p2p
  Ask again what a job's devices did, of which samples were kept:
    paceline gpu usage job.csv
  Watch devices and the ranks of running jobs:
    paceline gpu top
  Let Prometheus collect what they do:
    paceline gpu serve";

/// The command as clap knows it.
#[must_use]
pub fn command() -> clap::Command {
    clap::Command::new("gpu")
        .about("Show the devices: how they are wired, what is wrong with them, what they do")
        .after_help(EXAMPLES)
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(topo::command())
        .subcommand(doctor::command())
        .subcommand(p2p::command())
        .subcommand(usage::command())
        .subcommand(top::command())
        .subcommand(serve::command())
}

/// Reads the arguments of a command line.
///
/// # Panics
///
/// If `matches` are not [`command`]'s.
#[must_use]
pub fn read(matches: &ArgMatches) -> GpuArgs {
    match matches.subcommand() {
        Some(("topo", matches)) => GpuArgs::Topo(topo::read(matches)),
        Some(("doctor", matches)) => GpuArgs::Doctor(doctor::read(matches)),
        Some(("p2p", matches)) => GpuArgs::P2p(p2p::read(matches)),
        Some(("usage", matches)) => GpuArgs::Usage(usage::read(matches)),
        Some(("top", matches)) => GpuArgs::Top(top::read(matches)),
        Some(("serve", matches)) => GpuArgs::Serve(serve::read(matches)),
        other => unreachable!("clap knows no other command and requires one: {other:?}"),
    }
}

/// Does it.
///
/// *Errors*: what kept it from being done.
pub(crate) fn run(args: &GpuArgs) -> Result<Exit, Failure> {
    match args {
        GpuArgs::Topo(args) => topo::run(args),
        GpuArgs::Doctor(args) => doctor::run(args),
        GpuArgs::P2p(args) => p2p::run(args),
        GpuArgs::Usage(args) => usage::run(args),
        GpuArgs::Top(args) => top::run(args),
        GpuArgs::Serve(args) => serve::run(args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_sound() {
        command().debug_assert();
    }
}
