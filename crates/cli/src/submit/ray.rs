//! `paceline submit ray`: the names of `ray job submit`, where it has them.

use clap::ArgMatches;
use paceline_submit::ray::Options;

use super::{Scheduler, SubmitArgs, read_as, scheduler};
use crate::run::Conf;

const EXAMPLES: &str = "\
Options go before PROGRAM: everything after it belongs to the program. Every other
option of `paceline run`, such as --max-restarts, is passed on to it. `paceline`, and
a `python3` with Ray, must be on the nodes, and the latter here too.

Examples:
  Two nodes with eight GPUs each, one rank for each GPU, in a copy of this folder:
    paceline submit ray --address http://head:8265 --nodes 2 --gpus-per-node 8 --working-dir . train.py
  Go on with one node when others are lost, and with up to four when nodes come:
    paceline submit ray --nodes 1:4 --nproc-per-node 2 --cpus-per-rank 4 ./my-program
  See the driver:
    paceline submit ray --dry-run --nodes 2 ./my-program";

/// The command as clap knows it.
pub(super) fn command() -> clap::Command {
    scheduler::<Options>("ray", ".ray.py", "paceline")
        .about("Write the driver of a Ray job and submit it")
        .after_help(EXAMPLES)
}

pub(super) fn read(matches: &ArgMatches) -> Result<SubmitArgs, clap::Error> {
    let (common, mut options): (_, Options) = read_as("ray", matches, "paceline")?;
    let conf = matches.get_one::<Conf>("rdzv_conf");
    options.join_timeout = conf.and_then(|conf| conf.join_timeout);
    Ok(common.on(Scheduler::Ray(options), ".ray.py"))
}
