//! `paceline submit slurm`: sbatch's names, where it has them.

use clap::ArgMatches;
use paceline_submit::slurm::Options;

use super::{Scheduler, SubmitArgs, read_as, scheduler};

const EXAMPLES: &str = "\
Options go before PROGRAM: everything after it belongs to the program. Every other
option of `paceline run`, such as --max-restarts or --log-dir, is passed on to it.

Examples:
  See the script for two nodes with eight GPUs each, one rank for each GPU:
    paceline submit slurm --dry-run --nodes 2 --gpus-per-node 8 --cpus-per-rank 12 python train.py
  All cores of one node:
    paceline submit slurm --exclusive --nproc-per-node auto ./my-program
  Go on with two nodes when others fail, and start again after failures of ranks:
    paceline submit slurm --nodes 2:4 --nproc-per-node 8 --max-restarts 3 ./my-program
  Save five minutes before the time is up, and go on in the next turn, as often as needed:
    paceline submit slurm --time 4:00:00 --signal TERM@300 --requeue ./my-program";

/// The command as clap knows it.
pub(super) fn command() -> clap::Command {
    scheduler::<Options>("slurm", ".sbatch", "this program, under its path here")
        .about("Write a batch script and give it to sbatch")
        .after_help(EXAMPLES)
        .mut_arg("log_dir", |arg| {
            arg.hide(false)
                .help("Keep every rank's output below this folder [default: NAME-JOBID]")
        })
}

pub(super) fn read(matches: &ArgMatches) -> Result<SubmitArgs, clap::Error> {
    let own = std::env::current_exe().ok();
    let launcher = own.as_deref().and_then(std::path::Path::to_str);
    let (mut common, mut options): (_, Options) =
        read_as("slurm", matches, launcher.unwrap_or("paceline"))?;
    options.log_dir = take_value(&mut common.job.run_options, "--log-dir");
    Ok(common.on(Scheduler::Slurm(options), ".sbatch"))
}

/// The value of a passed option, which the script writes itself.
fn take_value(words: &mut Vec<String>, name: &str) -> Option<String> {
    let at = words.iter().position(|word| word == name)?;
    words.drain(at..=at + 1).nth(1)
}
