//! `paceline submit slurm`: sbatch's names, where it has them.

use clap::{ArgAction, ArgMatches, value_parser};
use paceline_submit::slurm::{Notice, Options};

use super::{Scheduler, SubmitArgs, common, many, passed, repeated, scheduler};
use crate::flags::{option, valued};

const EXAMPLES: &str = "\
Options go before PROGRAM: everything after it belongs to the program. Every other
option of `paceline run`, such as --max-restarts or --log-dir, is passed on to it.

Examples:
  See the script for two nodes with eight GPUs each, one rank for each GPU:
    paceline submit slurm --dry-run --nodes 2 --gpus-per-node 8 --cpus-per-rank 12 python train.py
  All cores of one node:
    paceline submit slurm --exclusive --nproc-per-node auto ./my-program
  Go on with two nodes when others fail, and start again after failures of ranks:
    paceline submit slurm --nodes 2:4 --nproc-per-node 8 --max-restarts 3 ./my-program
  Save five minutes before the time is up, and go on in the next turn, as often as needed:
    paceline submit slurm --time 4:00:00 --signal TERM@300 --requeue ./my-program";

/// The command as clap knows it.
pub(super) fn command() -> clap::Command {
    let word = || value_parser!(String);
    scheduler("slurm", "sbatch", "this program, under its path here")
        .about("Write a batch script and give it to sbatch")
        .after_help(EXAMPLES)
        .arg(valued("partition", "NAME", word()).short('p').help("Partition"))
        .arg(valued("account", "NAME", word()).short('A').help("Whom to charge"))
        .arg(valued("qos", "NAME", word()).short('q').help("Quality of service"))
        .arg(valued("constraint", "FEATURES", word()).short('C').help("Features that nodes must have"))
        .arg(
            valued("chdir", "DIR", word())
                .short('D')
                .help("Folder that the job works in [default: where it is submitted]"),
        )
        .arg(
            valued("output", "FILE", word())
                .short('o')
                .help("File for what the job prints [default: NAME-%j.out; %j is the job's number]"),
        )
        .arg(
            option("exclusive")
                .action(ArgAction::SetTrue)
                .help("Whole nodes, with all their CPUs unless --cpus-per-rank says less"),
        )
        .arg(valued("signal", "SIGNAL@SECONDS", str::parse::<Notice>).help(
            "Ask the ranks to save and stop so long before the time is up, by TERM, USR1, INT or HUP",
        ))
        .arg(option("requeue").action(ArgAction::SetTrue).help(
            "Queue the job again when it is preempted, when a node fails, and when --signal has stopped it",
        ))
        .arg(
            repeated("setup", "COMMAND", word())
                .help("A command for the script to run first, such as 'module load cuda'"),
        )
        .arg(
            repeated("sbatch_option", "OPTION", word())
                .allow_hyphen_values(true)
                .help("Another option of sbatch, such as --sbatch-option=--reservation=NAME"),
        )
        .args(passed::hidden().map(|arg| {
            if arg.get_id() == "log_dir" {
                arg.hide(false).help("Keep every rank's output below this folder [default: NAME-JOBID]")
            } else {
                arg
            }
        }))
}

/// Reads the arguments of a command line.
pub(super) fn read(matches: &ArgMatches) -> Result<SubmitArgs, clap::Error> {
    let own = std::env::current_exe().ok();
    let launcher = own
        .as_deref()
        .and_then(std::path::Path::to_str)
        .unwrap_or("paceline");
    let (mut job, file) = common("slurm", matches, launcher)?;
    let log_dir = take_value(&mut job.run_options, "--log-dir");
    let text = |name| matches.get_one::<String>(name).cloned();
    let options = Options {
        partition: text("partition"),
        account: text("account"),
        qos: text("qos"),
        constraint: text("constraint"),
        chdir: text("chdir"),
        output: text("output"),
        log_dir,
        exclusive: matches.get_flag("exclusive"),
        notice: matches.get_one("signal").copied(),
        requeue: matches.get_flag("requeue"),
        directives: many(matches, "sbatch_option"),
        setup: many(matches, "setup"),
    };
    Ok(SubmitArgs {
        file: file.unwrap_or_else(|| format!("{}.sbatch", job.name).into()),
        job,
        scheduler: Scheduler::Slurm(options),
        dry_run: matches.get_flag("dry_run"),
        no_submit: matches.get_flag("no_submit"),
    })
}

/// The value of a passed option, which the script writes itself.
fn take_value(words: &mut Vec<String>, name: &str) -> Option<String> {
    let at = words.iter().position(|word| word == name)?;
    words.drain(at..=at + 1).nth(1)
}
