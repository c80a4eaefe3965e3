//! `paceline submit`: a job handed to a scheduler.

mod kubernetes;
mod passed;
mod ray;
mod slurm;

use std::error::Error;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::{Resettable, ValueParser};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, value_parser};
use paceline_rendezvous::token::Token;
use paceline_submit::{Ranks, Submission, SubmitError};

use crate::exit::{Exit, Failure, hint};
use crate::flags::{self, finish, usual, whole};
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
    /// A driver, which submits itself.
    Ray(paceline_submit::ray::Options),
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
            "Write the batch script, the manifest or the driver of a job, and hand it to Slurm, Kubernetes or Ray",
        )
        .after_help(EXAMPLES)
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand_value_name("SCHEDULER")
        .subcommand_help_heading("Schedulers")
        .subcommand(slurm::command())
        .subcommand(kubernetes::command())
        .subcommand(ray::command())
}

/// Reads the arguments of a command line.
///
/// *Errors*: no program, or a word that is no text.
pub fn read(matches: &ArgMatches) -> Result<SubmitArgs, clap::Error> {
    match matches.subcommand() {
        Some(("slurm", matches)) => slurm::read(matches),
        Some(("kubernetes", matches)) => kubernetes::read(matches),
        Some(("ray", matches)) => ray::read(matches),
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
        Scheduler::Ray(_) => ("python3", &[]),
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
        // The file has said how to see the job, and what it is called.
        Scheduler::Ray(_) => format!("the driver is {file}"),
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
            Scheduler::Ray(options) => paceline_submit::ray::render(&self.job, options),
        };
        text.map_err(failed)
    }
}

fn failed(error: SubmitError) -> Failure {
    let exit = match &error {
        SubmitError::Deadline { .. } => Exit::Deadline,
        SubmitError::Usage { .. } => Exit::Usage,
        _ => Exit::Environment,
    };
    let message = match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    };
    Failure::new(exit, message, error.hint())
}

/// The options that all schedulers have.
#[derive(Args)]
struct Common {
    #[command(flatten)]
    job: Submission,
    /// Where to write it
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Print what would be written, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// Write the file, and submit nothing
    #[arg(long, conflicts_with = "dry_run")]
    no_submit: bool,
}

impl Common {
    fn on(self, scheduler: Scheduler, suffix: &str) -> SubmitArgs {
        let file = || format!("{}{suffix}", self.job.name).into();
        SubmitArgs {
            file: self.file.unwrap_or_else(file),
            job: self.job,
            scheduler,
            dry_run: self.dry_run,
            no_submit: self.no_submit,
        }
    }
}

/// A command of one scheduler, with the options that all have.
fn scheduler<O: Args>(name: &'static str, suffix: &str, launcher: &str) -> clap::Command {
    let command = O::augment_args(Common::augment_args(clap::Command::new(name)));
    command
        .mut_args(usual)
        .override_usage(format!("paceline submit {name} [OPTIONS] PROGRAM [ARGS]..."))
        // As for `run`: everything behind the program is the program's.
        .allow_external_subcommands(true)
        .external_subcommand_value_parser(value_parser!(OsString))
        .mut_arg("launcher", |arg| {
            arg.help(format!("`paceline` on the nodes [default: {launcher}]"))
        })
        .mut_arg("file", |arg| {
            arg.help(format!("Where to write it [default: NAME{suffix}]"))
        })
        .arg(
            shared("nproc_per_node")
                .value_parser(ranks)
                .default_value(Resettable::Reset)
                .help("Ranks on each node [default: one for each GPU, else one]"),
        )
        .arg(
            shared("shutdown_timeout")
                .value_parser(ValueParser::new(whole::<u64>(1..=86_400)))
                .default_value(Resettable::Reset)
                .help("Seconds between asking a rank to stop and killing it [default: what the scheduler leaves]"),
        )
        .args(passed::hidden())
}

/// A mistake that clap does not know about.
fn mistake(name: &str, kind: ErrorKind, message: impl std::fmt::Display) -> clap::Error {
    let command = match name {
        "slurm" => slurm::command(),
        "ray" => ray::command(),
        _ => kubernetes::command(),
    };
    let name = format!("paceline submit {name}");
    command.bin_name(name).error(kind, message)
}

/// The options that all schedulers have, and those of one.
fn read_as<O: Args>(
    scheduler: &str,
    matches: &ArgMatches,
    launcher: &str,
) -> Result<(Common, O), clap::Error> {
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
    let args: Vec<_> = words.map(text).collect::<Result<_, _>>()?;
    let is_given = |name| matches.value_source(name) == Some(ValueSource::CommandLine);
    let mut common: Common = flags::read(matches);
    let job = &mut common.job;
    if !is_given("name") {
        job.name = name_of(program, &args);
    }
    if !is_given("launcher") {
        launcher.clone_into(&mut job.launcher);
    }
    let ranks = matches.get_one::<Ranks>("nproc_per_node").cloned();
    job.ranks = ranks.unwrap_or(Ranks::Count(job.gpus_per_node.unwrap_or(1)));
    job.shutdown_timeout = matches.get_one("shutdown_timeout").copied();
    job.run_options = passed::words(matches, text)?;
    program.clone_into(&mut job.program);
    job.args = args;
    Ok((common, flags::read(matches)))
}

/// A number, or what `paceline run` takes in its place.
fn ranks(text: &str) -> Result<Ranks, String> {
    Processes::parse(text).map(|processes| match processes {
        Processes::Count(count) => Ranks::Count(count),
        _ => Ranks::Named(text.to_owned()),
    })
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
