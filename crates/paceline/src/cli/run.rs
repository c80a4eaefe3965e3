//! `paceline run`: torchrun's way of starting a program.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{ArgAction, ArgMatches, value_parser};
use paceline_launch::LogOptions;

use super::nodes::{self, NodesArgs};

/// What `paceline run` is told on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RunArgs {
    /// How many ranks to start.
    pub(crate) processes: Processes,
    /// Folder for the output of every rank; one of the user's state if not given.
    pub(crate) log_dir: Option<PathBuf>,
    /// Which lines go where, and how they are written.
    pub(crate) logs: LogOptions,
    /// Folder for the ranks' flight records.
    pub(crate) flight_dir: Option<PathBuf>,
    /// How long ranks wait for one another; the program's own default if not given.
    pub(crate) timeout: Option<Duration>,
    /// How long a rank that was asked to stop has before it is killed.
    pub(crate) shutdown_timeout: Duration,
    /// Nodes, rendezvous and restarts.
    pub(crate) nodes: Box<NodesArgs>,
    /// Compute threads of a rank; cores divided by ranks if not given.
    pub(crate) threads_per_rank: Option<usize>,
    /// The program, looked up in `PATH` unless it has a slash.
    pub(crate) program: OsString,
    /// Everything after it.
    pub(crate) args: Vec<OsString>,
}

/// How many ranks to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Processes {
    /// This many.
    Count(usize),
    /// One for each core.
    PerCore,
}

/// Most ranks that one machine is asked to start.
const PROCESSES_MAX: usize = 4096;

impl Processes {
    /// The number on a machine with this many cores.
    #[must_use]
    pub(crate) fn on(self, cores: usize) -> usize {
        match self {
            Self::Count(count) => count,
            Self::PerCore => cores.max(1),
        }
    }

    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if matches!(text, "auto" | "cpu") {
            return Ok(Self::PerCore);
        }
        let count = text
            .parse()
            .ok()
            .filter(|count| (1..=PROCESSES_MAX).contains(count));
        count.map(Self::Count).ok_or_else(|| {
            format!("expected auto, cpu, or a whole number from 1 to {PROCESSES_MAX}")
        })
    }
}

const EXAMPLES: &str = "\
Options go before PROGRAM: everything after it belongs to the program. torchrun's
names are understood, with `_` as with `-`. The program finds its place in the job
in RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and torchrun's other
variables.

Examples:
  Start two ranks, with options of the program's own:
    paceline run --nproc-per-node 2 ./my-program --epochs 3
  Start a PyTorch script:
    paceline run --nproc-per-node 2 python train.py
  Start one rank per core, and keep what each one prints below logs:
    paceline run --nproc-per-node auto --log-dir logs ./my-program
  Show the errors of all ranks and the output of local rank 0 only:
    paceline run --nproc-per-node 8 --redirects 1 --tee 0:3 ./my-program
  Start again up to three times when a rank fails:
    paceline run --nproc-per-node 2 --max-restarts 3 ./my-program
  Start on two to four nodes, that may come and go; the same on each of them:
    export PACELINE_JOB_TOKEN=...   # once: openssl rand -hex 32
    paceline run --nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint node1 ./my-program";

pub(super) fn command() -> clap::Command {
    let seconds = || value_parser!(u64).range(1..=86_400);
    let command = clap::Command::new("run")
        .about("Start a program as the ranks of a job, on this machine or on several")
        .override_usage("paceline run [OPTIONS] PROGRAM [ARGS]...")
        .after_help(EXAMPLES)
        // A program is what clap calls an external subcommand: the first word that is no option, and all behind it
        // untouched. A trailing argument would leave options that we know too to us.
        .allow_external_subcommands(true)
        .external_subcommand_value_parser(value_parser!(OsString))
        .arg(
            super::valued("nproc_per_node", "N|auto", Processes::parse)
                .default_value("1")
                .help("Ranks to start; auto or cpu is one per core"),
        )
        .arg(super::option("standalone").action(ArgAction::SetTrue).help(
            "Understood for torchrun's sake: a job on one node takes a free port anyway",
        ))
        .arg(
            super::valued("log_dir", "DIR", value_parser!(PathBuf))
                .help(
                    "Keep every rank's output and errors in a new folder below this one; /dev/null keeps none \
                     [default: ~/.local/state/paceline/runs, the last 20 runs]",
                ),
        )
        .arg(
            super::valued("flight_dir", "DIR", value_parser!(PathBuf)).help(
                "When the job fails, every rank writes its last operations into this folder, for `paceline doctor`",
            ),
        )
        .arg(
            super::valued("timeout_seconds", "N", seconds())
                .help("Seconds that ranks wait for one another before the job fails [default: 60]"),
        )
        .arg(
            super::valued("shutdown_timeout", "N", seconds())
                .default_value("30")
                .help("Seconds between asking a rank to stop and killing it"),
        )
        .arg(
            super::valued("threads_per_rank", "N", value_parser!(u64).range(1..=1024))
                .help("Compute threads of a rank [default: cores / ranks]"),
        );
    nodes::add_to(command).args(super::logs::args())
}

pub(super) fn read(matches: &ArgMatches) -> Result<RunArgs, clap::Error> {
    let Some((program, rest)) = matches.subcommand() else {
        return Err(no_program());
    };
    let args = rest.get_many::<OsString>("").into_iter().flatten().cloned();
    let seconds = |name| matches.get_one(name).copied().map(Duration::from_secs);
    Ok(RunArgs {
        processes: super::required(matches, "nproc_per_node"),
        log_dir: matches.get_one("log_dir").cloned(),
        logs: super::logs::read(matches),
        flight_dir: matches.get_one("flight_dir").cloned(),
        timeout: seconds("timeout_seconds"),
        shutdown_timeout: seconds("shutdown_timeout").expect("it has a default"),
        nodes: Box::new(nodes::read(matches)),
        threads_per_rank: matches
            .get_one("threads_per_rank")
            .map(|threads: &u64| *threads as usize),
        program: program.into(),
        args: args.collect(),
    })
}

fn no_program() -> clap::Error {
    super::mistake(
        command(),
        ErrorKind::MissingRequiredArgument,
        "no PROGRAM to start",
    )
}
