//! `paceline submit`: a job handed to a scheduler.

mod kubernetes;
mod passed;
mod slurm;

use std::error::Error;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::Resettable;
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, value_parser};
use paceline_rendezvous::token::Token;
use paceline_submit::{Memory, Nodes, Ranks, Submission, SubmitError, TimeLimit};

use crate::exit::{Exit, Failure, hint};
use crate::flags::{finish, option, valued, whole};
use crate::run::{Processes, shared};

/// The command line of `paceline submit`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubmitArgs {
    /// The job.
    pub job: Submission,
    /// Where it goes.
    pub scheduler: Scheduler,
    /// Print what would be written, and write nothing.
    pub dry_run: bool,
    /// Write the file, and submit nothing.
    pub no_submit: bool,
    /// The file.
    pub file: PathBuf,
}

/// A scheduler, and what only it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scheduler {
    /// A batch script, for `sbatch`.
    Slurm(paceline_submit::slurm::Options),
    /// Manifests, for `kubectl create`.
    Kubernetes(paceline_submit::kubernetes::Options),
}

const EXAMPLES: &str = "\
Examples:
  Two nodes with eight ranks each, for up to four hours:
    paceline submit slurm --nodes 2 --nproc-per-node 8 --time 4:00:00 ./my-program --epochs 3
  The same on Kubernetes:
    paceline submit kubernetes --image registry/me/program:1 --nodes 2 --nproc-per-node 8 ./my-program

`paceline submit SCHEDULER --help` tells more.";

/// The command as clap knows it.
#[must_use]
pub fn command() -> clap::Command {
    clap::Command::new("submit")
        .about(
            "Write the batch script or the manifest of a job, and hand it to Slurm or Kubernetes",
        )
        .after_help(EXAMPLES)
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand_value_name("SCHEDULER")
        .subcommand_help_heading("Schedulers")
        .subcommand(slurm::command())
        .subcommand(kubernetes::command())
}

/// Reads the arguments of a command line.
///
/// *Errors*: no program, or a word that is no text.
pub fn read(matches: &ArgMatches) -> Result<SubmitArgs, clap::Error> {
    match matches.subcommand() {
        Some(("slurm", matches)) => slurm::read(matches),
        Some(("kubernetes", matches)) => kubernetes::read(matches),
        other => unreachable!("clap knows no scheduler {other:?}"),
    }
}

/// How long a scheduler's program may take.
const DEADLINE: Duration = Duration::from_secs(120);

/// Writes the file and hands it over.
///
/// *Errors*: the job cannot be said to the scheduler, the file cannot be written, the scheduler does not take it.
pub(crate) fn submit(args: &SubmitArgs) -> Result<Exit, Failure> {
    let text = args.text()?;
    if args.dry_run {
        return finish(std::io::stdout().write_all(text.as_bytes()));
    }
    paceline_submit::save(&args.file, &text).map_err(failed)?;
    let (program, words): (_, &[&str]) = match args.scheduler {
        Scheduler::Slurm(_) => ("sbatch", &[]),
        // Unlike `apply` it refuses a job that is there already, and leaves no copy of the Secret in an annotation.
        Scheduler::Kubernetes(_) => ("kubectl", &["create", "-f"]),
    };
    let file = args.file.display();
    if args.no_submit {
        let words = [&[program], words].concat().join(" ");
        hint(&format!("{file} is written; `{words} {file}` submits it"));
        return Ok(Exit::Done);
    }
    paceline_submit::hand_over(program, words, &args.file, DEADLINE).map_err(failed)?;
    let name = &args.job.name;
    hint(&match &args.scheduler {
        Scheduler::Slurm(_) => format!("the script is {file}; `squeue --me` shows the job"),
        Scheduler::Kubernetes(_) => format!(
            "`kubectl logs --follow --prefix --selector app.kubernetes.io/name={name}` shows what the job prints; \
             `kubectl delete -f {file}` removes it"
        ),
    });
    Ok(Exit::Done)
}

impl SubmitArgs {
    /// The file's text. A token is made only if the text is not printed.
    fn text(&self) -> Result<String, Failure> {
        let text = match &self.scheduler {
            Scheduler::Slurm(options) => paceline_submit::slurm::render(&self.job, options),
            Scheduler::Kubernetes(options) => {
                let token = (!self.dry_run).then(Token::generate).transpose();
                let token = token.map_err(|error| {
                    let message = format!("no job token can be made: {error}");
                    Failure::new(Exit::Environment, message, error.hint())
                })?;
                paceline_submit::kubernetes::render(&self.job, options, token.as_ref())
            }
        };
        text.map_err(failed)
    }
}

fn failed(error: SubmitError) -> Failure {
    let exit = match &error {
        SubmitError::Deadline { .. } => Exit::Deadline,
        error if error.is_usage() => Exit::Usage,
        _ => Exit::Environment,
    };
    let message = match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    };
    Failure::new(exit, message, error.hint())
}

/// A command of one scheduler, with the options that both have.
fn scheduler(name: &'static str, suffix: &str, launcher: &str) -> clap::Command {
    let positive = || value_parser!(u64).range(1..=4096);
    clap::Command::new(name)
        .override_usage(format!("paceline submit {name} [OPTIONS] PROGRAM [ARGS]..."))
        // As for `run`: everything behind the program is the program's.
        .allow_external_subcommands(true)
        .external_subcommand_value_parser(value_parser!(OsString))
        .arg(
            valued("job_name", "NAME", value_parser!(String))
                .short('J')
                .help("Name of the job [default: the program's]"),
        )
        .arg(
            valued("nodes", "N|MIN:MAX", Nodes::parse)
                .short('N')
                .alias("nnodes")
                .default_value("1")
                .help("Nodes of the job; with a range it starts with MIN and goes on when nodes are lost"),
        )
        .arg(
            shared("nproc_per_node")
                .value_parser(ranks)
                .default_value(Resettable::Reset)
                .help("Ranks on each node [default: one for each GPU, else one]"),
        )
        .arg(
            valued("cpus_per_rank", "N", positive())
                .help("CPUs of each rank [default: 1]"),
        )
        .arg(valued("gpus_per_node", "N", positive()).help("GPUs of each node"))
        .arg(
            valued("mem", "SIZE", str::parse::<Memory>)
                .help("Memory of each node, such as 500M or 64G"),
        )
        .arg(
            valued("time", "TIME", str::parse::<TimeLimit>)
                .short('t')
                .help("Longest time: MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS"),
        )
        .arg(repeated("env", "NAME[=VALUE]", variable).help(
            "A variable for the program; without a value the one that it has here",
        ))
        .arg(
            shared("shutdown_timeout")
                .value_parser(whole(1..=86_400))
                .default_value(Resettable::Reset)
                .help("Seconds between asking a rank to stop and killing it [default: what the scheduler leaves]"),
        )
        .arg(
            valued("launcher", "PATH", value_parser!(String))
                .help(format!("`paceline` on the nodes [default: {launcher}]")),
        )
        .arg(
            valued("file", "FILE", value_parser!(PathBuf))
                .help(format!("Where to write it [default: NAME.{suffix}]")),
        )
        .arg(
            option("dry_run")
                .action(ArgAction::SetTrue)
                .help("Print what would be written, and do nothing"),
        )
        .arg(
            option("no_submit")
                .action(ArgAction::SetTrue)
                .conflicts_with("dry_run")
                .help("Write the file, and submit nothing"),
        )
}

/// An option that may be given several times.
fn repeated(
    name: &'static str,
    placeholder: &'static str,
    parser: impl Into<clap::builder::ValueParser>,
) -> Arg {
    valued(name, placeholder, parser).action(ArgAction::Append)
}

/// A mistake that clap does not know about.
fn mistake(name: &str, kind: ErrorKind, message: impl std::fmt::Display) -> clap::Error {
    let command = match name {
        "slurm" => slurm::command(),
        _ => kubernetes::command(),
    };
    let name = format!("paceline submit {name}");
    command.bin_name(name).error(kind, message)
}

/// The options of both schedulers, and the file.
fn common(
    scheduler: &str,
    matches: &ArgMatches,
    launcher: &str,
) -> Result<(Submission, Option<PathBuf>), clap::Error> {
    let text = |word: &OsString| match word.to_str() {
        Some(text) => Ok(text.to_owned()),
        None => Err(mistake(
            scheduler,
            ErrorKind::InvalidUtf8,
            format!("`{}` is no text", word.display()),
        )),
    };
    let Some((program, rest)) = matches.subcommand() else {
        let message = "no PROGRAM to start";
        return Err(mistake(
            scheduler,
            ErrorKind::MissingRequiredArgument,
            message,
        ));
    };
    let words = rest.get_many::<OsString>("").into_iter().flatten();
    let gpus = number(matches, "gpus_per_node");
    let args: Vec<_> = words.map(text).collect::<Result<_, _>>()?;
    let name = match matches.get_one::<String>("job_name") {
        Some(name) => name.clone(),
        None => name_of(program, &args),
    };
    let mut job = Submission::new(name, program);
    job.nodes = crate::flags::required(matches, "nodes");
    let ranks = matches.get_one::<Ranks>("nproc_per_node").cloned();
    job.ranks = ranks.unwrap_or(Ranks::Count(gpus.unwrap_or(1)));
    job.cpus_per_rank = number(matches, "cpus_per_rank");
    job.gpus_per_node = gpus;
    job.memory = matches.get_one("mem").copied();
    job.time_limit = matches.get_one("time").copied();
    job.env = many(matches, "env");
    let given = matches.get_one::<String>("launcher");
    job.launcher = given.map_or(launcher, String::as_str).to_owned();
    job.shutdown_timeout = matches.get_one("shutdown_timeout").copied();
    job.run_options = passed::words(matches, text)?;
    job.args = args;
    Ok((job, matches.get_one::<PathBuf>("file").cloned()))
}

fn number(matches: &ArgMatches, name: &str) -> Option<usize> {
    matches.get_one(name).map(|number: &u64| *number as usize)
}

/// Everything that a repeated option was given.
fn many<T: Clone + Send + Sync + 'static>(matches: &ArgMatches, name: &str) -> Vec<T> {
    matches
        .get_many(name)
        .into_iter()
        .flatten()
        .cloned()
        .collect()
}

/// A number, or what `paceline run` takes in its place.
fn ranks(text: &str) -> Result<Ranks, String> {
    Processes::parse(text).map(|processes| match processes {
        Processes::Count(count) => Ranks::Count(count),
        _ => Ranks::Named(text.to_owned()),
    })
}

fn variable(text: &str) -> Result<(String, String), String> {
    if let Some((name, value)) = text.split_once('=') {
        return Ok((name.to_owned(), value.to_owned()));
    }
    match std::env::var(text) {
        Ok(value) => Ok((text.to_owned(), value)),
        Err(std::env::VarError::NotPresent) => {
            Err(format!("{text} is not set here, expected NAME=VALUE"))
        }
        Err(std::env::VarError::NotUnicode(_)) => Err(format!("the value of {text} is no text")),
    }
}

/// The program's name, or that of the script that an interpreter runs, as every scheduler takes it: `My_prog.py` is
/// `my-prog`.
fn name_of(program: &str, args: &[String]) -> String {
    let script = args.iter().find(|word| word.ends_with(".py"));
    let program = script.map_or(program, String::as_str);
    let stem = Path::new(program).file_stem().unwrap_or_default();
    let plain = |letter: char| match letter.to_ascii_lowercase() {
        letter if letter.is_ascii_alphanumeric() => letter,
        _ => '-',
    };
    let name: String = stem.to_string_lossy().chars().map(plain).take(40).collect();
    let name = name.trim_matches('-');
    if name.starts_with(|letter: char| letter.is_ascii_lowercase()) {
        name.to_owned()
    } else {
        format!("job-{name}").trim_end_matches('-').to_owned()
    }
}

#[cfg(test)]
mod tests;
