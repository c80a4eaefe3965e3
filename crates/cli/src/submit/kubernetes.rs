//! `paceline submit kubernetes`.

use clap::ArgMatches;
use paceline_submit::kubernetes::Options;

use super::{Scheduler, SubmitArgs, read_as, scheduler};

const EXAMPLES: &str = "\
Options go before PROGRAM: everything after it belongs to the program. Every other
option of `paceline run`, such as --max-restarts, is passed on to it. The image must
have `paceline` and the program.

Examples:
  See the manifests for two pods with eight GPUs each, one rank for each GPU:
    paceline submit kubernetes --dry-run --image registry/me/program:1 --nodes 2 --gpus-per-node 8 python train.py
  Go on with two pods when others are lost, and start again after failures of ranks:
    paceline submit kubernetes --image registry/me/program:1 --nodes 2:4 --max-restarts 3 ./my-program
  With data and results on volumes, in a namespace:
    paceline submit kubernetes --image registry/me/program:1 --namespace research \\
        --pvc data:/data:ro --pvc runs:/runs --chdir /runs ./my-program --data /data";

/// The command as clap knows it.
pub(super) fn command() -> clap::Command {
    scheduler::<Options>("kubernetes", ".yaml", "paceline")
        .about("Write the manifests of an indexed Job or a JobSet and give them to kubectl")
        .after_help(EXAMPLES)
}

pub(super) fn read(matches: &ArgMatches) -> Result<SubmitArgs, clap::Error> {
    let (common, options) = read_as("kubernetes", matches, "paceline")?;
    Ok(common.on(Scheduler::Kubernetes(options), ".yaml"))
}
