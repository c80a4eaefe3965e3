//! `paceline generate`: text from a trained language model.

use std::path::PathBuf;

use clap::{Arg, ArgMatches, value_parser};
use paceline_cli::flags::{required, valued};
use paceline_train::{GenerateOptions, Which};

/// The command line of `paceline generate`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct GenerateArgs {
    /// The run directory; `None` for the newest run.
    pub(crate) run: Option<PathBuf>,
    /// Which of its checkpoints.
    pub(crate) which: Which,
    /// The text to continue.
    pub(crate) prompt: String,
    /// How to draw tokens.
    pub(crate) options: GenerateOptions,
}

const EXAMPLES: &str = "\
Without a run, the newest one below runs/ that has a checkpoint is used, even while it
still trains.

Examples:
  paceline generate \"ROMEO:\"
  paceline generate runs/lm-20261122-230000 \"ROMEO:\" --tokens 500 --temperature 0.8";

/// Above this, all tokens are equally likely.
const TEMPERATURE_MAX: f64 = 1000.0;

pub(super) fn command() -> clap::Command {
    clap::Command::new("generate")
        .about("Write text with a language model that `paceline train --task lm` has trained")
        .after_help(EXAMPLES)
        .allow_missing_positional(true)
        .arg(super::eval::run())
        .args(super::eval::which_args())
        .arg(
            Arg::new("prompt")
                .value_name("PROMPT")
                .required(true)
                .help("Text to continue; may be empty"),
        )
        .arg(
            valued("tokens", "N", value_parser!(u64).range(1..=1 << 20))
                .default_value("256")
                .help("Most tokens to write; the model may end the text earlier"),
        )
        .arg(
            valued("temperature", "T", temperature)
                .default_value("0.8")
                .help("Below 1 likely tokens become more likely; 0 always takes the likeliest"),
        )
        .arg(
            valued("top_k", "K", value_parser!(u64).range(1..=1 << 20))
                .help("Draw only from the K likeliest tokens [default: all]"),
        )
        .arg(
            valued("seed", "N", value_parser!(u64))
                .default_value("0")
                .help("Seed of the draws; the same seed writes the same text"),
        )
}

fn temperature(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    number
        .filter(|number| (0.0..=TEMPERATURE_MAX).contains(number))
        .ok_or_else(|| format!("expected a number from 0 to {TEMPERATURE_MAX}"))
}

pub(super) fn read(matches: &ArgMatches) -> GenerateArgs {
    let top_k: Option<&u64> = matches.get_one("top_k");
    GenerateArgs {
        run: matches.get_one("run").cloned(),
        which: super::eval::which(matches),
        prompt: required(matches, "prompt"),
        options: GenerateOptions {
            tokens: required::<u64>(matches, "tokens") as usize,
            temperature: required(matches, "temperature"),
            top_k: top_k.map(|top_k| *top_k as usize),
            seed: required(matches, "seed"),
        },
    }
}
