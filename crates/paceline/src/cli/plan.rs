//! `paceline plan`: what each layout of a training costs.

use std::path::PathBuf;

use clap::{ArgAction, ArgMatches, value_parser};
use paceline_cli::flags::{json, option, required, valued, whole};
use paceline_launch::NPROC_MAX;
use paceline_train::config::OPTIONS;

use super::train::{self, TrainArgs};

/// The command line of `paceline plan`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlanArgs {
    /// The task, the model, the batch, and the ranks of a node.
    pub(crate) train: TrainArgs,
    /// Machines.
    pub(crate) nodes: usize,
    /// Memory of a rank in GB; `None` for this machine's.
    pub(crate) memory_gb: Option<f64>,
    /// Link within a node: GB/s and microseconds; `None` for what was measured.
    pub(crate) within: [Option<f64>; 2],
    /// Link between nodes: GB/s and microseconds.
    pub(crate) between: [f64; 2],
    /// Numbers of ranks to run for real and compare with the plan.
    pub(crate) check: Vec<usize>,
    /// Print JSON.
    pub(crate) json: bool,
}

/// The command line of one rank that measures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlanRankArgs {
    /// The resolved settings.
    pub(crate) config: PathBuf,
    /// Folder for the figures of each rank.
    pub(crate) out: PathBuf,
    /// Layers of the model; `None` for a few.
    pub(crate) layers: Option<usize>,
    /// Ranks that share each layer.
    pub(crate) tp: usize,
    /// Recompute blocks.
    pub(crate) recompute: bool,
    /// Samples of a dry pass.
    pub(crate) samples: usize,
    /// Measure what waits between forward and backward passes.
    pub(crate) waits: bool,
    /// Run whole steps of the layout instead of dry ones.
    pub(crate) whole: bool,
}

const EXAMPLES: &str = "\
Measures passes of the model on this machine, with as many ranks at once as a node has, and
the link between them. The rest is arithmetic: what each layout costs on NODES machines, which
ones fit, and which one to take. A language model is measured with few layers, so it may be
larger than this machine. Settings of `paceline train` say what is trained.

Examples:
  What would a small language model cost on this machine's ranks?
    paceline plan --task lm --model gpt-10m --nproc-per-node 4
  On 1,250 machines with 8 ranks of 16 GB each, and 25 GB/s between the machines?
    paceline plan --task lm --model gpt-124m --global-batch 20000 --nodes 1250 --nproc-per-node 8 --memory-gb 16 --node-bandwidth-gb 25
  How far from the truth are the predictions here?
    paceline plan --task lm --check 1,2,4";

const HEADING: &str = "Machines";
/// Settings that a plan finds itself, or does not depend on.
const NOT_HERE: [&str; 15] = [
    "strategy",
    "devices",
    "zero",
    "dp",
    "tp",
    "pp",
    "sequence_parallel",
    "schedule",
    "pp_chunks",
    "pp_cuts",
    "recompute",
    "run_dir",
    "checkpoint_dir",
    "mlflow",
    "resume",
];
/// Most machines: with their ranks they stay far below overflow.
const NODES_MAX: u64 = 1 << 20;

pub(super) fn command() -> clap::Command {
    let figure = |name, unit, help: &'static str| {
        valued(name, unit, positive)
            .help(help)
            .help_heading(HEADING)
    };
    let settings = OPTIONS.iter().filter(|row| !NOT_HERE.contains(&row.key));
    let settings = settings.map(|row| {
        let is_shown = ["Task and data", "Language model"].contains(&row.group)
            || ["global_batch", "shards", "accumulate", "nproc_per_node"].contains(&row.key);
        train::flag(row).hide(!is_shown)
    });
    clap::Command::new("plan")
        .about("Say what each layout of a training costs: memory, bytes, time, and which to take")
        .after_help(EXAMPLES)
        .arg(
            valued("nodes", "N", whole::<u64>(1..=NODES_MAX))
                .default_value("1")
                .help("Machines, each with --nproc-per-node ranks")
                .help_heading(HEADING),
        )
        .arg(figure(
            "memory_gb",
            "GB",
            "Memory of a rank in 10^9 bytes [default: what this machine and its container have left, divided by the ranks; none on GPUs]",
        ))
        .arg(figure(
            "bandwidth_gb",
            "GB/S",
            "10^9 bytes per second that a rank sends within a machine [default: measured]",
        ))
        .arg(figure(
            "latency_us",
            "US",
            "Microseconds of a message within a machine [default: measured]",
        ))
        .arg(figure("node_bandwidth_gb", "GB/S", "The same between machines").default_value("1.25"))
        .arg(figure("node_latency_us", "US", "The same between machines").default_value("50"))
        .arg(
            valued("check", "N,...", whole::<u64>(1..=NPROC_MAX as u64))
                .value_delimiter(',')
                .help("Run layouts on these numbers of ranks of this machine, and show the errors of the predictions")
                .help_heading(HEADING),
        )
        .arg(json())
        .arg(train::config_arg())
        .args(settings)
}

/// One rank that measures; started by `paceline plan`.
pub(super) fn rank_command() -> clap::Command {
    let path = |name| valued(name, "PATH", value_parser!(PathBuf)).required(true);
    clap::Command::new("plan-rank")
        .about("Measure as one rank; started by `paceline plan`")
        .hide(true)
        .arg(path("config"))
        .arg(path("out"))
        .arg(valued("layers", "N", value_parser!(u64)))
        .arg(valued("tp", "N", value_parser!(u64)).default_value("1"))
        .arg(option("recompute").action(ArgAction::SetTrue))
        .arg(valued("samples", "N", value_parser!(u64)).default_value("1"))
        .arg(option("waits").action(ArgAction::SetTrue))
        .arg(option("whole").action(ArgAction::SetTrue))
}

fn positive(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    number
        .filter(|number| *number > 0.0 && number.is_finite())
        .ok_or_else(|| "expected a number above 0".to_owned())
}

pub(super) fn read(matches: &ArgMatches) -> PlanArgs {
    let figure = |name| matches.get_one::<f64>(name).copied();
    let check = matches.get_many::<u64>("check").into_iter().flatten();
    PlanArgs {
        train: TrainArgs {
            config: matches.get_one("config").cloned(),
            settings: train::settings(matches),
            ..TrainArgs::default()
        },
        nodes: required::<u64>(matches, "nodes") as usize,
        memory_gb: figure("memory_gb"),
        within: [figure("bandwidth_gb"), figure("latency_us")],
        between: ["node_bandwidth_gb", "node_latency_us"].map(|name| required(matches, name)),
        check: check.map(|ranks| *ranks as usize).collect(),
        json: matches.get_flag("json"),
    }
}

pub(super) fn read_rank(matches: &ArgMatches) -> PlanRankArgs {
    PlanRankArgs {
        config: required(matches, "config"),
        out: required(matches, "out"),
        layers: matches
            .get_one::<u64>("layers")
            .map(|layers| *layers as usize),
        tp: required::<u64>(matches, "tp") as usize,
        recompute: matches.get_flag("recompute"),
        samples: required::<u64>(matches, "samples") as usize,
        waits: matches.get_flag("waits"),
        whole: matches.get_flag("whole"),
    }
}
