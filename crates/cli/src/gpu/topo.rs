//! `paceline gpu topo`: how the devices are wired.

use clap::Args;
use paceline_gpu::topology::{NothingToSee, Topology};

use crate::exit::{Exit, Failure};
use crate::flags::print;

use super::source::Source;

/// What `paceline gpu topo` is told.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct TopoArgs {
    /// Print one JSON object with everything
    #[arg(long)]
    pub json: bool,
    /// What is looked at.
    #[command(flatten)]
    pub source: Source,
}

pub(super) const HELP: &str = "\
It shows the devices; the connections between GPUs, network cards and CPUs with the codes
of `nvidia-smi topo -m`; peer-to-peer between GPUs with those of `nvidia-smi topo -p2p`,
for reading, writing, NVLink, atomics and PCIe; and the PCIe tree with the width and the
generation of each link against the most that it can. docs/gpu.md explains all of them.

Exit codes: 0 something could be shown, what is missing is said in the notes; 2 wrong
usage, or no snapshot can be read; 3 there is no GPU to see.

Examples:
  Look at this machine:
    paceline gpu topo
  Look at the links that are narrower than they could be:
    paceline gpu topo --json | jq '.. | select(.link?.is_narrow?)'";

/// Looks, and prints what is there. With `--json` also what is not.
///
/// *Errors*: the snapshot cannot be read, or there is no GPU to see.
pub(super) fn run(args: &TopoArgs) -> Result<Exit, Failure> {
    let topology = Topology::of(&args.source.snapshot()?);
    let something = topology.something();
    let exit = match args.json || something.is_ok() {
        true => print(|out| topology.write(args.json, out))?,
        false => Exit::Done,
    };
    let refused = |error: NothingToSee| Failure::new(Exit::Environment, &error, error.hint());
    something.map(|()| exit).map_err(refused)
}
