//! `paceline compare`: the same program on several numbers of ranks, in rounds. Was it really faster?

mod args;
mod figures;
mod records;
mod render;
mod verdict;

use std::io::Write;
use std::path::Path;

use paceline_launch::{DEFAULT_FILE_BYTES_MAX, RunFolder};
use paceline_usage::files::write_beside;

use self::figures::{Row, seconds_text};
use self::records::Run;
use self::render::Comparison;
use crate::exit::{Exit, Failure, note};
use crate::flags::print;
use crate::job;
use crate::run::{self, Processes, RunArgs};
use crate::usage::{self, UsageArgs};
use crate::variables::setting_variable;

pub use self::args::{CompareArgs, RowArgs, add_training};
pub(crate) use self::args::{command, read};

/// Runs every row once in each round, and prints what came of it. A run that fails ends the comparison with its exit code,
/// after the rows so far are printed.
///
/// *Errors*: a file or a folder that was asked for cannot be written.
pub(crate) fn compare(args: &CompareArgs) -> Result<Exit, Failure> {
    usage::require_folders([&args.csv, &args.svg])?;
    let mut options = args.options.clone();
    if args.is_training {
        options.program = job::own_program()?.into();
    }
    let folder = match &options.log_dir {
        Some(dir) => RunFolder::create(dir, "compare"),
        None => {
            options.logs.file_bytes_max = Some(DEFAULT_FILE_BYTES_MAX);
            RunFolder::create_default("compare", &|name| std::env::var_os(name))
        }
    };
    // Other runs leave the folder alone as long as this lives.
    let folder = folder.map_err(job::refused)?;
    let (rows, exit) = rows(args, &options, folder.path());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let comparison = Comparison::new(args, rows, folder.path(), cores);
    if comparison.is_empty() {
        return Ok(exit);
    }
    let files = [(&args.csv, comparison.csv()), (&args.svg, comparison.svg())];
    for (file, text) in files {
        let Some(file) = file else { continue };
        write_beside(file, text.as_bytes()).map_err(|error| Failure::unwritten(file, &error))?;
    }
    let text = match args.json {
        true => comparison.json(),
        false => comparison.text(),
    };
    print(|out| out.write_all(text.as_bytes())).map(|_| exit)
}

/// The rows and the runs of each, and how the last run ended. Rounds are interleaved, so that a machine that changes its
/// speed changes it for all rows.
fn rows(args: &CompareArgs, options: &RunArgs, folder: &Path) -> (Vec<Row>, Exit) {
    let row = |row: &RowArgs| Row {
        name: row.name.clone(),
        ranks: row.ranks,
        replicas: row.replicas,
        runs: Vec::new(),
    };
    let mut rows: Vec<Row> = args.rows.iter().map(row).collect();
    for round in 1..=args.rounds {
        for (place, asked) in args.rows.iter().enumerate() {
            let name = format!("row{}-round{round}", place + 1);
            let run = one(options, asked, (&name, round), folder);
            match run.unwrap_or_else(|failure| Err(failure.report())) {
                Ok(run) => {
                    let (rounds, seconds) = (args.rounds, seconds_text(run.seconds));
                    note(&format!(
                        "round {round} of {rounds}: {} took {seconds}",
                        asked.name
                    ));
                    rows[place].runs.push(run);
                }
                Err(exit) => return (rows, exit),
            }
        }
    }
    (rows, Exit::Done)
}

/// One run and what it left behind, or how it failed, which is reported.
///
/// *Errors*: it could not be started, or its records cannot be read.
fn one(
    options: &RunArgs,
    row: &RowArgs,
    (name, round): (&str, usize),
    folder: &Path,
) -> Result<Result<Run, Exit>, Failure> {
    let usage_file = folder.join(format!("{name}.usage.json"));
    let run_dir = folder.join(format!("{name}.run"));
    let mut run = options.clone();
    run.processes = Processes::Count(row.ranks);
    run.args.clone_from(&row.args);
    run.log_dir = Some(folder.to_owned());
    run.nodes.id = name.to_owned();
    run.usage = UsageArgs {
        json: Some(usage_file.clone()),
        ..UsageArgs::off()
    };
    // `paceline train` leaves its metrics there; other programs would call the variable unknown.
    let trains = Path::new(&run.program).file_name() == Some("paceline".as_ref());
    let dir = run_dir.to_str().filter(|_| trains);
    let variable = dir.map(|dir| (setting_variable("run_dir"), dir.to_owned()));
    let exit = run::repeat(&run, variable.as_slice(), round == 1)?;
    if exit != Exit::Done {
        return Ok(Err(exit));
    }
    Run::read(round, &usage_file, &run_dir).map(Ok)
}
