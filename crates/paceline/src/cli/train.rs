//! `paceline train`: its flags are the rows of the table of settings.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, value_parser};
use paceline_cli::flags::{option, valued};
use paceline_cli::{about, compare};
use paceline_train::config::{self, Kind, OPTIONS, OptionRow};

/// The command line of `paceline train`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TrainArgs {
    /// Settings file.
    pub(crate) config: Option<PathBuf>,
    /// Print the settings and their sources instead of training.
    pub(crate) explain: bool,
    /// Print JSON.
    pub(crate) json: bool,
    /// Settings from flags: key and text, unchecked, in table order.
    pub(crate) settings: Vec<(String, String)>,
    /// Words for the user's own code in each rank.
    pub(crate) rest: Vec<OsString>,
}

const EXAMPLES: &str = "\
Settings can also be keys in the file of --config, as in `global_batch = 64`, or
environment variables, as in PACELINE_GLOBAL_BATCH=64. A flag wins over a variable,
and a variable over the file.

Examples:
  Learn the built-in digits:
    paceline train
  Use four ranks, for the same bits as with any number of ranks up to eight:
    paceline train --nproc-per-node 4 --shards 8
  Train a small language model on a text, then let it write:
    paceline train --task lm --data book.txt
    paceline generate 'Once upon a time'
  Go on with the newest run, on another number of ranks if you like:
    paceline train --resume
  Begin in a folder or go on there, and start again up to three times after a failure:
    paceline train --run-dir runs/a --resume auto --max-restarts 3
  Keep a copy of the newest checkpoints in S3, and go on from it on another machine:
    paceline train --checkpoint-dir s3://bucket/runs/a
    paceline train --resume s3://bucket/runs/a
  Train on two nodes:
    paceline run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node1 paceline train --run-dir runs/a
  Show each effective setting and its source:
    paceline train --config my.toml --explain";

pub(super) fn command() -> clap::Command {
    clap::Command::new("train")
        .about("Train a built-in network, data-parallel on this machine or as a rank of a job")
        .after_help(EXAMPLES)
        .args(general())
        .args(OPTIONS.iter().map(flag))
        .arg(about::completion_arg())
}

/// The options that are no settings.
pub(super) fn general() -> [Arg; 3] {
    [
        config_arg(),
        option("explain")
            .action(ArgAction::SetTrue)
            .help("Print every setting and its source, then exit"),
        option("json")
            .action(ArgAction::SetTrue)
            .help("Print JSON: one object per line for the start, every epoch and the end; with --explain, the settings"),
    ]
}

pub(super) fn config_arg() -> Arg {
    valued("config", "FILE", value_parser!(PathBuf))
        .help("TOML file of settings, each a key named like its flag with _ for -")
}

/// Adds the strategies to `paceline compare`, and all settings but those that each of its runs has of its own.
pub(super) fn add_to_compare(command: clap::Command) -> clap::Command {
    let strategies = match config::option("strategy").map(|row| &row.kind) {
        Some(Kind::Word(names)) => *names,
        _ => &[],
    };
    let is_free =
        |row: &&OptionRow| !["strategy", "devices", "run_dir", "resume"].contains(&row.key);
    let settings = OPTIONS.iter().filter(is_free).map(flag);
    compare::add_training(command, strategies, settings.chain([config_arg()]))
}

/// The flag of a row. Its value is taken as text: the table checks it, with the same messages for all sources.
pub(super) fn flag(row: &'static OptionRow) -> Arg {
    let help = match row.fallback_text() {
        "none" => row.help.to_owned(),
        text => format!("{} [default: {text}]", row.help),
    };
    let arg = option(row.key)
        .visible_aliases(row.alias)
        .help(help)
        .help_heading(row.group)
        .value_name(row.kind.placeholder())
        // Makes a negative number an invalid value, not an unknown flag.
        .allow_negative_numbers(true);
    if row.kind.is_switch() {
        arg.num_args(0..=1).default_missing_value("true")
    } else {
        arg
    }
}

/// Settings from flags, in table order; a command may have some of them only.
pub(super) fn settings(matches: &ArgMatches) -> Vec<(String, String)> {
    let setting = |row: &'static OptionRow| {
        let text: &String = matches.try_get_one(row.key).ok().flatten()?;
        Some((row.key.to_owned(), text.clone()))
    };
    OPTIONS.iter().filter_map(setting).collect()
}

pub(super) fn read(matches: &ArgMatches) -> TrainArgs {
    TrainArgs {
        config: matches.get_one("config").cloned(),
        explain: matches.get_flag("explain"),
        json: matches.get_flag("json"),
        settings: settings(matches),
        rest: Vec::new(),
    }
}
