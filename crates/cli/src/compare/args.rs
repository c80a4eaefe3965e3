//! The command line of `paceline compare`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, value_parser};
use paceline_launch::NPROC_MAX;
use paceline_words::counted;

use crate::flags::{json, mistake, required, valued, whole};
use crate::run::{self, RunArgs};
use crate::variables::setting_variable;

/// Strategies that use one rank, whatever `--ranks` says.
const ON_ONE_RANK: [&str; 1] = ["single"];
/// Strategies that use one rank with several devices, as many as `--ranks` says.
const ON_DEVICES: [&str; 2] = ["dp", "model"];
/// The one of them whose devices compute at the same time.
const REPLICATED: &str = "dp";
/// Options of `run` that a comparison sets itself or that are about other nodes: these, and those under these headings.
const NOT_HERE: [&str; 4] = ["nproc_per_node", "stdin", "max_restarts", "run_dir"];
const HEADINGS_NOT_HERE: [&str; 4] = [
    "Nodes",
    "Rendezvous",
    "Usage",
    "Understood for torchrun's sake",
];

/// The command line of `paceline compare`.
#[derive(Clone, Debug, PartialEq)]
pub struct CompareArgs {
    /// The program, and how each run of it is started.
    pub options: RunArgs,
    /// What is compared, the first row being what the others are compared with.
    pub rows: Vec<RowArgs>,
    /// Whether the program is this one, which trains.
    pub is_training: bool,
    /// How often each row runs.
    pub rounds: usize,
    /// Samples that the program processes in a run, if it keeps no record of them.
    pub samples: Option<u64>,
    /// Print JSON.
    pub json: bool,
    /// File for the table as CSV.
    pub csv: Option<PathBuf>,
    /// File for the picture.
    pub svg: Option<PathBuf>,
}

/// One row of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowArgs {
    /// Its name.
    pub name: String,
    /// How many ranks it has.
    pub ranks: usize,
    /// How many replicas of the model one rank has, if it has several.
    pub replicas: Option<usize>,
    /// The arguments of the program.
    pub args: Vec<OsString>,
}

const HEADING: &str = "Comparison";

const EXAMPLES: &str = "\
Every round runs the program once for each row, one run after the other. The table has the
median time of each row with its fastest and slowest round, the speed-up against the first
row, the efficiency (speed-up per rank), the share of the time in which all ranks or GPUs
were busy at once, and the peak memory of a rank. A sentence below it says whether the
difference is larger than the noise. Samples per second are known for `paceline train`,
and for other programs by --samples.

What the programs print goes to files only; the last line names their folder. Options of
`paceline run` about the program, its ranks, failures and logs can be given too. Numbers of
ranks may also stand before PROGRAM, after all options.

Examples:
  Is this script faster on two GPUs than on one?
    paceline compare --ranks 1,2 -- train.py --epochs 3
    paceline compare 1 2 -- train.py --epochs 3
  Draw it, with more rounds and samples per second:
    paceline compare --rounds 5 --samples 50000 --svg compare.svg 1 2 4 -- ./my-program";

/// What follows for a program that trains.
const TRAINING: &str = "
  Compare one process with replicas in threads, with data-parallel ranks and with layers
  on two devices, on a built-in task; options of `paceline train` follow:
    paceline compare --strategy single,dp,ddp,model --epochs 5";

/// The command as clap knows it.
#[must_use]
pub(crate) fn command() -> clap::Command {
    let file = |name, help| valued(name, "FILE", value_parser!(PathBuf)).help(help);
    let own = [
        valued("ranks", "N,...", whole::<usize>(1..=NPROC_MAX as u64))
            .value_delimiter(',')
            .help("Numbers of ranks to compare, the first row first [default: 1,2]"),
        valued("rounds", "N", whole::<usize>(1..=1000))
            .default_value("3")
            .help("How often each row runs; one round shows nothing of the noise"),
        valued("samples", "N", whole::<u64>(1..=1 << 50))
            .help("Samples that the program processes in one run, for samples per second"),
        json(),
        file("csv", "Write the table as CSV"),
        file("svg", "Draw the rows as SVG"),
    ];
    let of_run = run::command();
    let of_run = of_run.get_arguments().cloned().map(|arg| {
        let is_hidden = !is_here(&arg);
        arg.hide(is_hidden)
    });
    clap::Command::new("compare")
        .about("Time a program on several numbers of ranks: was it really faster?")
        .override_usage("paceline compare [OPTIONS] [RANKS]... -- PROGRAM [ARGS]...")
        .after_help(EXAMPLES)
        // As for `run`.
        .allow_external_subcommands(true)
        .external_subcommand_value_parser(value_parser!(OsString))
        .infer_long_args(true)
        .args_override_self(true)
        .args(own.map(|arg| arg.help_heading(HEADING)))
        .args(of_run)
}

fn is_here(arg: &Arg) -> bool {
    let heading = arg.get_help_heading().unwrap_or_default();
    !NOT_HERE.contains(&arg.get_id().as_str()) && !HEADINGS_NOT_HERE.contains(&heading)
}

/// Adds `--strategy` to the command, for a program that trains: the names of its strategies, and its options for training.
#[must_use]
pub fn add_training(
    command: clap::Command,
    strategies: &[&'static str],
    options: impl IntoIterator<Item = Arg>,
) -> clap::Command {
    let own: Vec<_> = command
        .get_arguments()
        .map(|arg| arg.get_id().clone())
        .collect();
    let options = options
        .into_iter()
        .filter(|arg| !own.contains(arg.get_id()));
    let names = PossibleValuesParser::new(strategies.iter().copied());
    let strategy = valued("strategy", "NAME,...", names)
        .value_delimiter(',')
        .help("Compare these strategies of `paceline train`, whose options can be given too, on the numbers of ranks or devices in --ranks [default: 2]")
        .help_heading(HEADING);
    command
        .arg(strategy)
        .args(options.map(|arg| arg.hide(true).requires("strategy")))
        .after_help(format!("{EXAMPLES}{TRAINING}"))
}

/// Reads the arguments of a command line.
///
/// *Errors*: no program, an invalid number of ranks, or an option of `run` that is not for comparisons.
pub(crate) fn read(matches: &ArgMatches) -> Result<CompareArgs, clap::Error> {
    let wrong = |kind, message: &str| Err(mistake(command(), kind, message));
    let own = command();
    let mut refused = own
        .get_arguments()
        .filter(|arg| !is_here(arg))
        .map(|arg| arg.get_id().as_str());
    if let Some(name) = refused.find(|name| is_given(matches, name)) {
        let name = name.replace('_', "-");
        let message = format!(
            "--{name} cannot be used here: `compare` starts and measures every run itself, on this machine, on the numbers \
             of ranks in --ranks"
        );
        return wrong(ErrorKind::ArgumentConflict, &message);
    }
    let words = run::words(matches).map(|(program, args)| [vec![program], args].concat());
    let words = words.unwrap_or_default();
    let (ranks, words) = match matches.get_many::<usize>("ranks") {
        Some(ranks) => (ranks.copied().collect(), &*words),
        None => match leading(&words) {
            Ok(found) => found,
            Err(why) => return wrong(ErrorKind::ValueValidation, &why),
        },
    };
    let strategies = matches.try_get_many::<String>("strategy").ok().flatten();
    let is_training = strategies.is_some();
    let (program, rows) = match (strategies, words) {
        (Some(_), [word, ..]) if !word.to_string_lossy().starts_with('-') => {
            let word = word.display();
            let message = format!(
                "--strategy runs `paceline train` and takes no PROGRAM, but there is {word}"
            );
            return wrong(ErrorKind::ArgumentConflict, &message);
        }
        (Some(names), words) => {
            let train = [train_options(matches), words.to_vec()].concat();
            (OsString::new(), strategy_rows(names, &ranks, &train))
        }
        (None, [program, args @ ..]) => (program.clone(), program_rows(&ranks, args)),
        (None, []) => return wrong(ErrorKind::MissingRequiredArgument, "no PROGRAM to start"),
    };
    let mut options = run::options(matches, program, Vec::new());
    options.stdin = None;
    if !is_given(matches, "redirects") && !is_given(matches, "tee") {
        options.logs.redirects = "3".parse().expect("both streams of all ranks");
    }
    Ok(CompareArgs {
        options,
        rows,
        is_training,
        rounds: required(matches, "rounds"),
        samples: matches.get_one("samples").copied(),
        json: matches.get_flag("json"),
        csv: matches.get_one("csv").cloned(),
        svg: matches.get_one("svg").cloned(),
    })
}

fn is_given(matches: &ArgMatches, name: &str) -> bool {
    matches.value_source(name) == Some(ValueSource::CommandLine)
}

/// The numbers of ranks before the program, and the words after them: two dashes may stand between.
///
/// *Errors*: a number that is no number of ranks.
fn leading(words: &[OsString]) -> Result<(Vec<usize>, &[OsString]), String> {
    let is_number = |word: &&OsString| {
        word.to_str()
            .is_some_and(|word| word.parse::<i64>().is_ok())
    };
    let (numbers, rest) = words.split_at(words.iter().take_while(is_number).count());
    let parse = whole::<usize>(1..=NPROC_MAX as u64);
    let mut ranks = Vec::new();
    for text in numbers.iter().filter_map(|word| word.to_str()) {
        let number =
            parse(text).map_err(|why| format!("invalid number of ranks '{text}': {why}"))?;
        ranks.push(number);
    }
    match rest {
        [dashes, rest @ ..] if !ranks.is_empty() && dashes == "--" => Ok((ranks, rest)),
        [option, ..] if !ranks.is_empty() && option.to_string_lossy().starts_with('-') => {
            let option = option.display();
            Err(format!(
                "{option} comes after the numbers of ranks: options go before them"
            ))
        }
        rest => Ok((ranks, rest)),
    }
}

fn program_rows(ranks: &[usize], args: &[OsString]) -> Vec<RowArgs> {
    let ranks = if ranks.is_empty() { &[1, 2] } else { ranks };
    let row = |ranks: &usize| RowArgs {
        name: counted(*ranks, "rank"),
        ranks: *ranks,
        replicas: None,
        args: args.to_vec(),
    };
    ranks.iter().map(row).collect()
}

/// The rows of `paceline train`, on as many shards as the largest has ranks unless told otherwise: all do the same work then,
/// and end with the same weights.
fn strategy_rows<'a>(
    names: impl Iterator<Item = &'a String>,
    ranks: &[usize],
    train: &[OsString],
) -> Vec<RowArgs> {
    let ranks = if ranks.is_empty() { &[2] } else { ranks };
    let mut rows = Vec::new();
    for name in names {
        if ON_ONE_RANK.contains(&name.as_str()) {
            rows.push((name, name.clone(), 1));
            continue;
        }
        let what = if ON_DEVICES.contains(&name.as_str()) {
            "device"
        } else {
            "rank"
        };
        let row = |parts: &usize| (name, format!("{name} on {}", counted(*parts, what)), *parts);
        rows.extend(ranks.iter().map(row));
    }
    let shards = rows.iter().map(|(_, _, parts)| *parts).max().unwrap_or(1);
    let sets_shards = |word: &OsString| {
        let name = word.to_str().and_then(|word| word.split('=').next());
        name.is_some_and(|name| ["--shards", "--config"].contains(&name))
    };
    let is_set =
        train.iter().any(sets_shards) || std::env::var_os(setting_variable("shards")).is_some();
    let shards = (!is_set).then(|| OsString::from(format!("--shards={shards}")));
    let row = |(strategy, name, parts): (&String, String, usize)| {
        let is_local = ON_DEVICES.contains(&strategy.as_str());
        let devices = is_local.then(|| OsString::from(format!("--devices={parts}")));
        let own = ["train".into(), format!("--strategy={strategy}").into()];
        let own = own.into_iter().chain(devices).chain(shards.clone());
        RowArgs {
            name,
            ranks: if is_local { 1 } else { parts },
            replicas: (strategy == REPLICATED).then_some(parts),
            args: own.chain(train.iter().cloned()).collect(),
        }
    };
    rows.into_iter().map(row).collect()
}

/// The options of `paceline train` on the command line, as they go to it.
fn train_options(matches: &ArgMatches) -> Vec<OsString> {
    let own = command().arg(Arg::new("strategy"));
    let is_own = |id: &str| own.get_arguments().any(|arg| *arg.get_id() == *id);
    let ids = matches.ids().map(|id| id.as_str());
    let given = ids.filter(|id| !is_own(id) && is_given(matches, id));
    let option = |id: &str| {
        let mut option = OsString::from(format!("--{}=", id.replace('_', "-")));
        option.push(matches.get_raw(id)?.next_back()?);
        Some(option)
    };
    given.filter_map(option).collect()
}
