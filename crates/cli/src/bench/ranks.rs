//! The ranks of `paceline bench`: how they are started, and what they print.

use std::ffi::OsString;
use std::io::{self, Write};

use paceline_collective::{Error, GroupOptions, ProcessGroup};
use paceline_launch::Console;
use paceline_rendezvous::env::WorkerEnv;

use super::BenchArgs;
use super::measurement;
use super::record::Record;
use super::table::line;
use crate::exit::{Exit, Failure, warn};
use crate::flags::finish;
use crate::job;
use crate::run::Processes;
use crate::usage::UsageArgs;

/// Ranks to start if no number is given.
const PROCESSES: usize = 2;
/// The user's choice of algorithms, which the group follows.
const ALGORITHM_VARIABLE: &str = "PACELINE_ALGORITHM";

/// Measures as a rank of the job that this process belongs to, or starts ranks that do.
///
/// *Errors*: the ranks cannot be started or the group cannot be formed; a result is wrong.
pub(crate) fn bench(args: &BenchArgs) -> Result<Exit, Failure> {
    let env = WorkerEnv::from_process()
        .map_err(|error| Failure::new(Exit::Usage, &error, error.hint()))?;
    let named = ["RANK", "WORLD_SIZE"].map(|name| std::env::var_os(name).is_some());
    if env.world == 1 && named == [false, false] {
        return start(args);
    }
    if args.processes.is_some() && env.rank == 0 {
        warn("--nproc-per-node is not used: the ranks of this job are there already");
    }
    if args.algorithm.is_some() && std::env::var_os(ALGORITHM_VARIABLE).is_none() {
        let message = "--algorithm cannot reach the ranks of a job that is there already";
        let hint = format!("set {ALGORITHM_VARIABLE} on every rank");
        return Err(Failure::new(Exit::Usage, message, Some(hint)));
    }
    rank(args)
}

/// Measures as the rank that the environment says.
///
/// *Errors*: the group's first failure; a result is wrong.
pub(crate) fn rank(args: &BenchArgs) -> Result<Exit, Failure> {
    let options = GroupOptions {
        transport: args.transport.unwrap_or_default(),
        ..GroupOptions::default()
    };
    let group = ProcessGroup::init(&options).map_err(|error| failure(&error))?;
    let (mut written, mut wrong) = (Ok(()), 0);
    let report = |record: &Record| {
        if let Record::Timing(timing) = record {
            wrong += timing.wrong.unwrap_or(0);
        }
        // The other ranks go on measuring even if nobody reads the results any more.
        if written.is_ok() {
            written = print(record, args.json, &mut io::stdout().lock());
        }
    };
    measurement::run(&group, &args.settings, report).map_err(|error| failure(&error))?;
    if written.is_ok() && group.rank() == 0 && !args.json {
        written = writeln!(io::stdout(), "# memory of rank 0: {}", group.memory());
    }
    judge(wrong)?;
    finish(written)
}

fn start(args: &BenchArgs) -> Result<Exit, Failure> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let processes = args
        .processes
        .unwrap_or(Processes::Count(PROCESSES))
        // The operations run on cores, not on devices.
        .on(cores, || Ok(0))?;
    check_root(args.settings.root, processes)?;
    let program = job::own_program()?;
    let mut job = job::new(&program, processes)?;
    job.args = rank_arguments(std::env::args_os());
    job.console = Console::RankZeroRaw;
    if let Some(transport) = args.transport {
        let name = transport.name().to_owned();
        job.env.push(("PACELINE_TRANSPORT".into(), name));
    }
    if let Some(algorithm) = &args.algorithm {
        job.env.push((ALGORITHM_VARIABLE.into(), algorithm.clone()));
    }
    // A benchmark measures itself, undisturbed.
    job::run(job, &UsageArgs::off())
}

/// A rank is told what this command was told: the program's name and the command's are left out.
fn rank_arguments(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let own = std::iter::once("bench-rank".into());
    own.chain(arguments.skip(2)).collect()
}

fn check_root(root: usize, world: usize) -> Result<(), Failure> {
    if root < world {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "--root {root} is no rank: {world} ranks have the numbers 0 to {}",
        world - 1
    )))
}

fn print(record: &Record, json: bool, out: &mut impl Write) -> io::Result<()> {
    if json {
        serde_json::to_writer(&mut *out, record)?;
        writeln!(out)?;
    } else {
        writeln!(out, "{}", line(record))?;
    }
    out.flush()
}

fn judge(wrong: u64) -> Result<(), Failure> {
    if wrong == 0 {
        return Ok(());
    }
    let message = format!("{wrong} elements of the results are wrong");
    let hint = "this is a bug of Paceline or of the machine's memory; please report it";
    Err(Failure::new(Exit::JobFailed, message, Some(hint.into())))
}

fn failure(error: &Error) -> Failure {
    let exit = match error {
        Error::Setting { .. } | Error::Environment(_) | Error::Transport { .. } => Exit::Usage,
        Error::Call { .. } | Error::Plan(_) => Exit::Usage,
        Error::Memory { .. } | Error::System { .. } | Error::Page(_) => Exit::Environment,
        other if other.is_deadline() => Exit::Deadline,
        _ => Exit::JobFailed,
    };
    Failure::new(exit, error, error.hint())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_told_what_the_command_was_told() {
        let words =
            |line: &str| -> Vec<OsString> { line.split_whitespace().map(OsString::from).collect() };
        let line = "paceline bench all-gather --nproc-per-node 4 --json";
        assert_eq!(
            rank_arguments(words(line).into_iter()),
            words("bench-rank all-gather --nproc-per-node 4 --json")
        );
        assert_eq!(
            rank_arguments(words("paceline bench").into_iter()),
            words("bench-rank")
        );
    }

    #[test]
    fn a_root_that_is_no_rank_starts_nothing() {
        assert_eq!(check_root(1, 2), Ok(()));
        let failure = check_root(2, 2).expect_err("refused");
        assert_eq!(failure.exit(), Exit::Usage);
    }

    #[test]
    fn wrong_results_fail_the_job() {
        assert_eq!(judge(0), Ok(()));
        let failure = judge(3).expect_err("a failure");
        assert_eq!(failure.exit(), Exit::JobFailed);
    }

    #[test]
    fn a_failure_ends_with_the_code_of_its_kind() {
        let memory = Error::Memory {
            bytes: 2,
            used: 0,
            size: 1,
        };
        assert_eq!(failure(&memory).exit(), Exit::Environment);
        let setting = Error::Setting {
            name: "PACELINE_TRANSPORT",
            value: "x".into(),
            expected: "y",
        };
        assert_eq!(failure(&setting).exit(), Exit::Usage);
        let lost = Error::ThreadGone { rank: 0 };
        assert_eq!(failure(&lost).exit(), Exit::JobFailed);
    }
}
