//! `paceline eval` and `paceline predict`: what a run has trained, on data.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, value_parser};
use paceline_cli::flags::{json, option, required, valued, whole};
use paceline_train::Which;
use paceline_train::data::table::separator_named;

/// The command line of `paceline eval`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EvalArgs {
    /// The run directory; `None` for the newest run.
    pub(crate) run: Option<PathBuf>,
    /// Which of its checkpoints.
    pub(crate) which: Which,
    /// The data; `None` for the run's held-out data.
    pub(crate) data: Option<PathBuf>,
    /// The column of its labels; `None` for that of the run.
    pub(crate) label_column: Option<String>,
    /// What separates its cells; `None` as for the run's data.
    pub(crate) separator: Option<String>,
    /// Print JSON.
    pub(crate) json: bool,
}

/// The command line of `paceline predict`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PredictArgs {
    /// The run directory; `None` for the newest run.
    pub(crate) run: Option<PathBuf>,
    /// Which of its checkpoints.
    pub(crate) which: Which,
    /// The samples.
    pub(crate) input: PathBuf,
    /// What separates the cells of a table; `None` as for the run's data.
    pub(crate) separator: Option<String>,
    /// The file to write; `None` for stdout.
    pub(crate) output: Option<PathBuf>,
}

/// Most checkpoints that a run keeps.
const AVERAGED_MAX: u64 = 10_000;

const EVAL_EXAMPLES: &str = "\
The newest checkpoint is evaluated in 32-bit floats on the CPU, even while the run still trains. Without --data
a run in 32-bit floats on the CPU gives the very loss and accuracy that it printed then.

With --data all of the data is evaluated: a table with the run's columns and labels, the
held-out files of an IDX or image folder, or a text. Values are scaled as those of the run were.

Examples:
  paceline eval
  paceline eval runs/wine --data test.csv
  paceline eval runs/wine --json";

const PREDICT_EXAMPLES: &str = "\
Prints CSV: for each sample its likeliest class, that class's probability, and the probability
of each class; or the predicted number. For a model of tables INPUT is a table as CSV, JSON lines
or Parquet with the columns that the run was trained on, in any order; others are left out. For a
model of an image folder it is a PNG or JPEG file, or a folder of them and of folders, and each
line begins with the path. For a model of IDX files it is an IDX file of images, plain or .gz.

Examples:
  paceline predict new.csv
  paceline predict runs/wine new.csv --output classes.csv
  paceline predict runs/mnist t10k-images-idx3-ubyte.gz";

/// `eval` and `predict` of this program.
pub(super) fn commands(program: &str) -> [clap::Command; 2] {
    let of = |examples: &str| examples.replace("paceline", program);
    [
        eval_command().after_help(of(EVAL_EXAMPLES)),
        predict_command().after_help(of(PREDICT_EXAMPLES)),
    ]
}

fn eval_command() -> clap::Command {
    clap::Command::new("eval")
        .about("Evaluate what a run has trained: loss, accuracy, figures of each class, confusion matrix; or errors of predicted numbers")
        .arg(run())
        .args(which_args())
        .arg(
            valued("data", "PATH", value_parser!(PathBuf))
                .help("Data to evaluate on [default: the run's held-out data]"),
        )
        .arg(
            valued("label_column", "NAME", value_parser!(String))
                .requires("data")
                .help("Column with the labels of --data [default: the run's]"),
        )
        .arg(separator().requires("data"))
        .arg(json())
}

fn predict_command() -> clap::Command {
    clap::Command::new("predict")
        .about("Print the classes of new samples, with probabilities, or the numbers that a run has learned to predict")
        .allow_missing_positional(true)
        .arg(run())
        .args(which_args())
        .arg(
            Arg::new("input")
                .value_name("INPUT")
                .value_parser(value_parser!(PathBuf))
                .required(true)
                .help("File with the samples, or folder of images"),
        )
        .arg(separator())
        .arg(
            valued("output", "FILE", value_parser!(PathBuf))
                .help("File to write, complete or not at all [default: stdout]"),
        )
}

fn separator() -> Arg {
    valued("separator", "NAME", parse_separator)
        .help("What separates cells: comma, semicolon, tab, pipe, space, or another character [default: as for the run's data]")
}

/// A separator as it was written, if it can be one.
fn parse_separator(text: &str) -> Result<String, String> {
    match separator_named(text) {
        Some(_) => Ok(text.to_owned()),
        None => Err("it separates no cells: write comma, semicolon, tab, pipe, space, or one character in quotes".to_owned()),
    }
}

/// The run, which may be left out.
pub(super) fn run() -> Arg {
    Arg::new("run")
        .value_name("RUN")
        .value_parser(value_parser!(PathBuf))
        .help("Run directory [default: the newest below runs/ with a checkpoint]")
}

/// Which checkpoint is used.
pub(super) fn which_args() -> [Arg; 2] {
    [
        option("best")
            .action(ArgAction::SetTrue)
            .conflicts_with("average")
            .help("Use the checkpoint of the epoch with the best --monitor, not the newest one"),
        valued("average", "N", whole::<u64>(1..=AVERAGED_MAX))
            .help("Use the mean of the weights of the newest N checkpoints, which --keep N keeps"),
    ]
}

pub(super) fn which(matches: &ArgMatches) -> Which {
    let average = matches.get_one::<u64>("average").copied();
    match average.and_then(|count| NonZeroUsize::new(count as usize)) {
        Some(count) => Which::MeanOf(count),
        None if matches.get_flag("best") => Which::Best,
        None => Which::Newest,
    }
}

pub(super) fn read_eval(matches: &ArgMatches) -> EvalArgs {
    EvalArgs {
        run: matches.get_one("run").cloned(),
        which: which(matches),
        data: matches.get_one("data").cloned(),
        label_column: matches.get_one("label_column").cloned(),
        separator: matches.get_one("separator").cloned(),
        json: matches.get_flag("json"),
    }
}

pub(super) fn read_predict(matches: &ArgMatches) -> PredictArgs {
    PredictArgs {
        run: matches.get_one("run").cloned(),
        which: which(matches),
        input: required(matches, "input"),
        separator: matches.get_one("separator").cloned(),
        output: matches.get_one("output").cloned(),
    }
}
