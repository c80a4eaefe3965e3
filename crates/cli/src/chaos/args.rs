//! The command line of `paceline chaos`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use clap::error::ErrorKind;
use clap::{ArgMatches, Args, ValueEnum};
use regex_lite::Regex;

use super::plan::{Fault, Recipe};
use crate::flags::{self, fractions, mistake, one_of};

/// What `paceline train` prints at its end.
const WEIGHTS: &str = "weights sha256: ([0-9a-f]{64})";

/// The command line of `paceline chaos`.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct ChaosArgs {
    /// Faults in all
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=10_000), default_value = "20")]
    kills: usize,
    /// Which plan: the same seed gives the same faults in the same order
    #[arg(long, value_name = "N", default_value = "1")]
    pub(super) seed: u64,
    /// Kinds of faults
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_parser = one_of(Fault::value_variants(), Fault::name), default_value = "kill,abort,stop,slow")]
    faults: Vec<Fault>,
    /// Longest time for which a fault lasts that lasts
    #[arg(long, value_name = "S", value_parser = fractions(0.02..=86_400.0), default_value = "1")]
    hold_seconds: Duration,
    /// Mean time between two faults, if no undisturbed run says how long the job takes
    #[arg(long, value_name = "S", value_parser = fractions(0.001..=86_400.0), default_value = "2")]
    pub(super) every_seconds: Duration,
    /// Ranks that are left alive at any time
    #[arg(long, value_name = "N", default_value = "1")]
    pub(super) leave: usize,
    /// Faults of the kind `agent` may hit a job's only launcher: PROGRAM is then started again, or this shell command
    #[arg(long, value_name = "COMMAND", num_args = 0..=1, require_equals = true)]
    resume: Option<Option<String>>,
    /// Run the program undisturbed first, or this shell command, and compare the results
    #[arg(long, value_name = "COMMAND", num_args = 0..=1, require_equals = true)]
    reference: Option<Option<String>>,
    /// The result is the last output that this regular expression matches: its first group, if it has one [default: the hash
    /// that `paceline train` prints]
    #[arg(long, value_name = "REGEX", value_parser = expression)]
    compare: Option<String>,
    /// The result is also what the runs write to this file; may be repeated
    #[arg(long, value_name = "FILE")]
    pub(super) same: Vec<PathBuf>,
    /// The job hangs if for so long it neither prints nor does a step
    #[arg(long, value_name = "S", value_parser = fractions(0.1..=864_000.0), default_value = "300")]
    pub(super) hang_seconds: Duration,
    /// Folder for the output of the runs [default: one of the last 20 below $XDG_STATE_HOME/paceline/runs]
    #[arg(long, value_name = "DIR")]
    pub(super) log_dir: Option<PathBuf>,
    /// Print one JSON object with everything
    #[arg(long)]
    pub(super) json: bool,
    /// The program that starts the job, and its arguments
    #[arg(
        value_name = "PROGRAM",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    #[arg(value_hint = clap::ValueHint::CommandWithArguments)]
    pub(super) program: Vec<OsString>,
}

/// A regular expression that can be read.
fn expression(text: &str) -> Result<String, regex_lite::Error> {
    Regex::new(text).map(|_| text.to_owned())
}

const EXAMPLES: &str = "\
The faults are those of a plan that depends on the seed only. They hit processes that
PROGRAM has started and no others, and nothing of the job outlives this command. Ranks and
their steps are found through the job page, so any program under `paceline run` or `paceline
train` will do. With --reference the moments are spread over the steps of the undisturbed
run. Faults hit ranks in all phases of a step, in the data loader, evaluating and at
checkpoints, and one in four follows another within 30 ms.

  kill    a rank is killed (SIGKILL)
  abort   a rank crashes (SIGABRT)
  exit    a rank exits with code 0
  memory  a rank gets no more memory (RLIMIT_AS) for up to --hold-seconds
  stop    a rank stands still (SIGSTOP, then SIGCONT), for as long
  slow    a rank gets a tenth of its time, for as long
  cut     a TCP connection of a rank breaks
  stall   nothing reaches a rank on one of its TCP connections, for as long
  agent   a launcher is killed with its ranks and its store, if the job has several or
          --resume is given
  corrupt a bit of a rank's weights flips, if the ranks compare their weights

Exit codes: 0 the job survived, with the same result if there was a reference; 1 it did
not, or it left something behind; 2 the command line is wrong.

Examples:
  Kill and stop ranks of a training job 20 times, and compare the weights:
    paceline chaos --seed 7 --reference -- paceline train --nproc-per-node 4 --max-restarts 20
  Kill only, and compare a line that the program prints:
    paceline chaos --kills 5 --faults kill --reference --compare 'loss: (.*)' -- \\
      paceline run --nproc-per-node 4 --recovery live ./my-program";

#[must_use]
pub(crate) fn command() -> clap::Command {
    flags::command::<ChaosArgs>("chaos")
        .about("Kill, stop and corrupt ranks of a job of yours, and see whether it survives with the same result")
        .after_help(EXAMPLES)
}

/// Reads the arguments of a command line.
///
/// *Errors*: a result to compare, and nothing to compare it with.
pub(crate) fn read(matches: &ArgMatches) -> Result<ChaosArgs, clap::Error> {
    let args: ChaosArgs = flags::read(matches);
    if args.reference.is_none() && (args.compare.is_some() || !args.same.is_empty()) {
        let message = "--compare and --same need --reference, the run to compare with";
        let kind = ErrorKind::MissingRequiredArgument;
        return Err(mistake(command(), kind, message));
    }
    Ok(args)
}

impl ChaosArgs {
    pub(super) fn recipe(&self) -> Recipe<'_> {
        Recipe {
            seed: self.seed,
            count: self.kills,
            faults: &self.faults,
            hold_max: self.hold_seconds,
        }
    }

    /// The program of the undisturbed run, if there is one.
    pub(super) fn reference(&self) -> Option<Vec<OsString>> {
        self.or_program(self.reference.as_ref()?)
    }

    /// The program that goes on after the only launcher was killed, if there is one.
    pub(super) fn resume(&self) -> Option<Vec<OsString>> {
        self.or_program(self.resume.as_ref()?)
    }

    fn or_program(&self, command: &Option<String>) -> Option<Vec<OsString>> {
        Some(match command {
            Some(line) => ["sh".into(), "-c".into(), line.into()].into(),
            None => self.program.clone(),
        })
    }

    /// How a run's result is found in its output; `None` if only files are compared.
    pub(super) fn pattern(&self) -> Option<Regex> {
        let default = self.same.is_empty().then_some(WEIGHTS);
        let text = self.compare.as_deref().or(default)?;
        Some(Regex::new(text).expect("it was read before"))
    }
}
