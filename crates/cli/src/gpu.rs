//! `paceline gpu`: this machine's devices, how they are wired, what is wrong with them, and what they do.

mod doctor;
mod live;
pub mod p2p;
mod serve;
mod source;
mod top;
mod topo;
mod usage;

use clap::Subcommand;

use crate::exit::{Exit, Failure};
use crate::flags::usual;

pub use doctor::DoctorArgs;
pub use p2p::P2pArgs;
pub use serve::ServeArgs;
pub use source::{PlacesArgs, Source};
pub use top::TopArgs;
pub use topo::TopoArgs;
pub use usage::UsageArgs;

#[cfg(test)]
pub(crate) use live::tests::running_job;
pub(crate) use live::{Device, Devices, Feed, Jobs};
#[cfg(test)]
pub(crate) use live::{Job, RankUse};

/// The command line of `paceline gpu`.
#[derive(Clone, Debug, PartialEq, Eq, Subcommand)]
pub enum GpuArgs {
    /// Show how the devices are wired, with each other and with network cards and CPUs
    #[command(after_help = topo::HELP)]
    Topo(TopoArgs),
    /// Say what is wrong with the devices, what comes of it, and what to do
    #[command(after_help = doctor::HELP)]
    Doctor(DoctorArgs),
    /// Try out whether the devices reach each other as the driver says, and how fast
    #[command(after_help = p2p::HELP)]
    P2p(P2pArgs),
    /// Sum up a recording: how long all devices really worked at the same time
    #[command(after_help = usage::HELP)]
    Usage(UsageArgs),
    /// Watch the devices and the ranks of running jobs at work
    #[command(after_help = top::EXAMPLES)]
    Top(TopArgs),
    /// Serve what devices and ranks do to Prometheus
    #[command(after_help = serve::EXAMPLES)]
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
    let command = GpuArgs::augment_subcommands(clap::Command::new("gpu"));
    command
        .about("Show the devices: how they are wired, what is wrong with them, what they do")
        .after_help(EXAMPLES)
        .subcommand_required(true)
        .arg_required_else_help(true)
        .mut_subcommands(|command| command.mut_args(usual))
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
