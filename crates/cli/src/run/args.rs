//! The command line of `paceline run`.

use std::convert::Infallible;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, value_parser};
use paceline_launch::{HandledSignals, LogOptions, RunAs, StallOptions};
use paceline_rendezvous::env::Timeout;

use super::hosts::HostsArgs;
use super::nodes::NodesArgs;
use super::placement::{self, Placement};
use super::ranks::{self, Processes};
use super::{failures, logs, program, torch_only};
use crate::about;
use crate::flags::{self, mistake, required, valued};
use crate::usage::UsageArgs;

/// The command line of `paceline run`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunArgs {
    /// How many ranks to start.
    pub processes: Processes,
    /// The run directory, for programs that record their steps.
    pub run_dir: Option<PathBuf>,
    /// Folder for the output of every rank; one of the user's state if not given.
    pub log_dir: Option<PathBuf>,
    /// Which lines go where, and how they are written.
    pub logs: LogOptions,
    /// Folder for the ranks' flight records.
    pub flight_dir: Option<PathBuf>,
    /// How long ranks wait for one another; the program's own default if not given.
    pub timeout: Option<Timeout>,
    /// How long a rank that was asked to stop has before it is killed.
    pub shutdown_timeout: Duration,
    /// The signals that the launcher handles.
    pub signals: HandledSignals,
    /// The response to ranks that hang.
    pub stall: StallOptions,
    /// Nodes, rendezvous and restarts.
    pub nodes: NodesArgs,
    /// Compute threads of a rank; cores divided by ranks if not given.
    pub threads_per_rank: Option<usize>,
    /// Where ranks run and which devices they see.
    pub placement: Placement,
    /// The hosts to start the job on over ssh.
    pub hosts: HostsArgs,
    /// The options that the launchers of these hosts get too, word for word.
    pub passed: Vec<String>,
    /// The usage report.
    pub usage: UsageArgs,
    /// The rank that reads this program's standard input.
    pub stdin: Option<usize>,
    /// Which of the options were given, so that a scheduler may say the others.
    pub given: Given,
    /// Warnings that come first: options that do nothing here.
    pub warnings: Vec<String>,
    /// The kind of program.
    pub run_as: RunAs,
    /// The program, looked up in `PATH` unless it has a slash.
    pub program: OsString,
    /// Everything after it.
    pub args: Vec<OsString>,
}

/// The options that were given; others have their defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Given {
    /// `--nproc-per-node`.
    pub processes: bool,
    /// `--nnodes`.
    pub nodes: bool,
    /// `--node-rank`.
    pub node_rank: bool,
    /// `--rdzv-id`.
    pub id: bool,
}

const EXAMPLES: &str = "\
PROGRAM is an executable file, or a name in PATH. One that ends in .py runs under Python:
PYTHON_EXEC, else the first python3 or python in PATH, with -u. Options go before PROGRAM;
everything after it belongs to the program, and ${local_rank} in it becomes the rank's
number on its node. The program finds its place in the job in RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT and torchrun's other variables.

Names are torchrun's, with `_` as with `-`, and may be shortened. Every option can be set
in the environment too: --nnodes by PET_NNODES, --standalone by PET_STANDALONE=1. The
command line wins.

Exit codes: 0 all ranks ended well, otherwise the code of the rank that failed first;
128 + n signal n ended that rank (137: killed, mostly for memory) or stopped this program;
1 a failure without a code; 2 the command line is wrong; 3 the machine lacks something;
4 a deadline passed, or ranks stalled.

Examples:
  Start a PyTorch script on all GPUs of this machine:
    paceline run --nproc-per-node gpu train.py --epochs 3
  Start two ranks of any other program:
    paceline run --nproc-per-node 2 ./my-program --epochs 3
  Start one rank per core, and keep what each one prints below logs:
    paceline run --nproc-per-node cpu --log-dir logs ./my-program
  Show the errors of all ranks and the output of local rank 0 only:
    paceline run --nproc-per-node 8 --redirects 1 --tee 0:3 ./my-program
  Keep each rank on the CPUs near its GPU, or on its own cores:
    paceline run --nproc-per-node 8 --numa-binding node python train.py
    paceline run --nproc-per-node 4 --cpu-bind cores ./my-program
  Start again up to three times when a rank fails:
    paceline run --nproc-per-node 2 --max-restarts 3 ./my-program
  Start on two to four nodes that may come and go; run the same on each of them:
    export PACELINE_JOB_TOKEN=...   # once: openssl rand -hex 32
    paceline run --nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint node1 ./my-program
  Start on two hosts over ssh, with four ranks on each:
    paceline run --hosts node1:4,node2:4 ./my-program
  Start on all nodes of a Slurm job, which says how many there are and where:
    export PACELINE_JOB_TOKEN=$(openssl rand -hex 32)
    srun --ntasks-per-node=1 paceline run --nproc-per-node 8 ./my-program

Signals:
  SIGTERM, SIGINT, SIGHUP, SIGQUIT  end the job within --shutdown-timeout; a second one at once
  SIGUSR1                           asks the job to save and stop, without a deadline
  SIGUSR2                           is passed on to the ranks
  Ranks that use Paceline's library for it save and stop in the same step; others get the signal.
  A job that was stopped exits with 128 + signal and is not started again.";

/// The command as clap knows it.
#[must_use]
pub fn command() -> clap::Command {
    clap::Command::new("run")
        .about("Start a program as the ranks of a job, on this machine or on several")
        .override_usage("paceline run [OPTIONS] PROGRAM [ARGS]...")
        .after_help(EXAMPLES)
        // A program is what clap calls an external subcommand: the first word that is no option, and all behind it
        // untouched. A trailing argument would leave options that we know too to us.
        .allow_external_subcommands(true)
        .external_subcommand_value_parser(value_parser!(OsString))
        // As Python's argparse: what can only mean one option is that one, and the last one of several counts.
        .infer_long_args(true)
        .args_override_self(true)
        .args(ranks::args())
        .args(program::args())
        .arg(stdin_arg())
        .args(flags::args::<NodesArgs>())
        .args(flags::args::<HostsArgs>())
        .args(placement::args())
        .args(failures::args())
        .args(logs::args())
        .args(flags::args::<UsageArgs>())
        .args(torch_only::args())
        .arg(about::completion_arg())
}

/// An option of `run` for another command that has it too: declared once, here, without its short form and its heading.
///
/// # Panics
///
/// If `run` has no option of this name.
#[must_use]
pub fn shared(name: &str) -> Arg {
    let command = command();
    let found = command.get_arguments().find(|arg| *arg.get_id() == *name);
    let arg = found.expect("`run` has the option").clone();
    arg.short(None).help_heading(None::<&str>)
}

/// Reads the arguments of a command line.
///
/// *Errors*: no program.
pub fn read(matches: &ArgMatches) -> Result<RunArgs, clap::Error> {
    let (program, args) = words(matches).ok_or_else(no_program)?;
    Ok(options(matches, program, args))
}

/// The program of a command line and its arguments.
pub(crate) fn words(matches: &ArgMatches) -> Option<(OsString, Vec<OsString>)> {
    let (program, rest) = matches.subcommand()?;
    let args = rest.get_many::<OsString>("").into_iter().flatten().cloned();
    Some((program.into(), args.collect()))
}

/// Reads the options of a command line for this program.
pub(crate) fn options(matches: &ArgMatches, program: OsString, args: Vec<OsString>) -> RunArgs {
    let stall = failures::stall(matches);
    let mut warnings = torch_only::warnings(matches);
    warnings.extend(failures::warning(&stall));
    RunArgs {
        processes: required(matches, "nproc_per_node"),
        run_dir: matches.get_one("run_dir").cloned(),
        log_dir: matches.get_one("log_dir").cloned(),
        logs: logs::read(matches),
        flight_dir: matches.get_one("flight_dir").cloned(),
        timeout: matches.get_one("timeout_seconds").copied(),
        shutdown_timeout: required(matches, "shutdown_timeout"),
        signals: matches
            .get_one("signals_to_handle")
            .cloned()
            .unwrap_or_default(),
        stall,
        nodes: flags::read(matches),
        hosts: flags::read(matches),
        passed: passed(matches),
        threads_per_rank: matches.get_one("threads_per_rank").copied(),
        placement: placement::read(matches),
        usage: flags::read(matches),
        stdin: *matches
            .get_one::<Stdin>("stdin")
            .map_or(&Some(0), |Stdin(rank)| rank),
        given: given(matches),
        warnings,
        run_as: program::read(matches),
        program,
        args,
    }
}

/// The rank that reads standard input, if one does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stdin(Option<usize>);

fn stdin_arg() -> Arg {
    valued("stdin", "RANK|none", stdin)
        .default_value("0")
        .help("The rank that reads this program's standard input; the others read nothing")
        .help_heading("Program")
}

fn stdin(text: &str) -> Result<Stdin, String> {
    match (text, text.parse()) {
        ("none", _) => Ok(Stdin(None)),
        (_, Ok(rank)) => Ok(Stdin(Some(rank))),
        _ => Err("expected the number of a rank, or none".to_owned()),
    }
}

/// What is said to each host of its own, and what only this launcher does.
const NOT_PASSED: [&str; 7] = [
    "nproc_per_node",
    "master_addr",
    "master_port",
    "hosts",
    "hostfile",
    "ssh",
    "stdin",
];

/// The given options for the launchers of hosts. A path that is no text is said in other words, and is found nowhere.
fn passed(matches: &ArgMatches) -> Vec<String> {
    let command = command();
    let options = command.get_arguments().cloned();
    let options = options.filter(|arg| !NOT_PASSED.contains(&arg.get_id().as_str()));
    let is_given = |source| source != ValueSource::DefaultValue;
    let text = |value: &OsString| Ok::<_, Infallible>(value.to_string_lossy().into_owned());
    let Ok(words) = flags::words(matches, options, is_given, text);
    words
}

/// Which options have more than their defaults.
fn given(matches: &ArgMatches) -> Given {
    let is_given = |name| matches.value_source(name) > Some(ValueSource::DefaultValue);
    Given {
        processes: is_given("nproc_per_node"),
        nodes: is_given("nnodes"),
        node_rank: is_given("node_rank"),
        id: is_given("rdzv_id"),
    }
}

fn no_program() -> clap::Error {
    mistake(
        command(),
        ErrorKind::MissingRequiredArgument,
        "no PROGRAM to start",
    )
}
