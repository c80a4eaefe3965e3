//! The command line of a user's program with a task of its own: the options of `paceline train`, without those of built-in models, and of
//! built-in data unless it trains on them.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, value_parser};
use paceline_cli::Stop;
use paceline_train::config::{OPTIONS, OptionRow, UserProgram, synonym};

use super::{
    EvalArgs, PredictArgs, TrainArgs, WorkerArgs, eval, read_worker, train, worker_command,
};

/// What a user's program is asked for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Asked {
    Train(TrainArgs),
    Eval(EvalArgs),
    Predict(PredictArgs),
    /// Run as one rank; started by the program itself.
    Worker(WorkerArgs),
}

/// Reads the command line of a program, its own word first.
///
/// *Errors*: help to print, or the usage error.
pub(crate) fn parse(user: &UserProgram, words: &[OsString]) -> Result<Asked, Stop> {
    let stop = |error| {
        let tip = tip(user, &error);
        Stop::new(error, tip)
    };
    if words.get(1).is_some_and(|word| word == "worker") {
        let command = worker_command().no_binary_name(true).arg(rest());
        let matches = command.try_get_matches_from(&words[2..]).map_err(stop)?;
        return Ok(Asked::Worker(read_worker(&matches)));
    }
    let matches = command(user).try_get_matches_from(words).map_err(stop)?;
    match matches.subcommand() {
        Some(("eval", matches)) => return Ok(Asked::Eval(eval::read_eval(matches))),
        Some(("predict", matches)) => return Ok(Asked::Predict(eval::read_predict(matches))),
        _ => {}
    }
    let rest = matches.get_many("args").into_iter().flatten().cloned();
    Ok(Asked::Train(TrainArgs {
        rest: rest.collect(),
        ..train::read(&matches)
    }))
}

fn command(user: &UserProgram) -> clap::Command {
    let name = &user.name;
    let commands = user.reads_data.then(|| eval::commands(name));
    clap::Command::new(name.clone())
        .about("Train, data-parallel on this machine or as a rank of a job")
        .args_conflicts_with_subcommands(true)
        .subcommands(commands.into_iter().flatten())
        .after_help(format!(
            "Settings can also be keys in the file of --config, as in `global_batch = 64`, or\n\
             environment variables, as in PACELINE_GLOBAL_BATCH=64. A flag wins over a variable,\n\
             and a variable over the file. `paceline run {name} ...` starts it on several nodes."
        ))
        .args(train::general())
        .args(OptionRow::all_of(Some(user)).map(flag))
        .arg(rest())
}

/// The flag of a row, whose default may depend on the built-in task in `paceline train`.
fn flag(row: &'static OptionRow) -> Arg {
    let arg = train::flag(row);
    match row.key {
        "global_batch" => arg.help(format!("{} [default: 64]", row.help)),
        "run_dir" => arg.help(format!(
            "{} [default: runs/<program>-<date>-<time>]",
            row.help
        )),
        _ => arg,
    }
}

fn rest() -> Arg {
    Arg::new("args")
        .value_name("ARGS")
        .value_parser(value_parser!(OsString))
        .num_args(0..)
        .last(true)
        .help("Arguments of the program's own")
}

fn tip(user: &UserProgram, error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let long = argument.strip_prefix("--")?;
    let is_built_in = |row: &'static OptionRow| !row.is_of(Some(user));
    let what = match user.reads_data {
        true => "models",
        false => "data and models",
    };
    let row = OPTIONS.iter().find(|row| row.flag() == *argument);
    match error.kind() {
        ErrorKind::UnknownArgument if row.or(synonym(long)).is_some_and(is_built_in) => Some(
            format!("'{argument}' is an option of `paceline train` for built-in {what}"),
        ),
        ErrorKind::UnknownArgument => super::tip::of_option(long),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use paceline_train::Which;

    use super::*;

    fn mine(reads_data: bool) -> UserProgram {
        UserProgram {
            name: "mine".into(),
            reads_data,
        }
    }

    fn parsed_by(user: &UserProgram, line: &str) -> Result<Asked, Stop> {
        let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        parse(user, &words)
    }

    fn parsed(line: &str) -> Result<Asked, Stop> {
        parsed_by(&mine(false), line)
    }

    #[test]
    fn a_program_that_reads_data_has_its_options_too() {
        let user = mine(true);
        command(&user).debug_assert();
        let asked = parsed_by(&user, "mine --data pets --mixup 0.2 --hflip 0").expect("right");
        let settings = [("data", "pets"), ("mixup", "0.2"), ("hflip", "0")];
        let settings = settings.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let Asked::Train(args) = asked else {
            panic!("{asked:?}");
        };
        assert!(settings.iter().all(|one| args.settings.contains(one)));
        let which = Which::Best;
        let asked = parsed_by(&user, "mine predict --best runs/a new.csv").expect("right");
        let Asked::Predict(PredictArgs {
            run: Some(run),
            which: found,
            input,
            ..
        }) = asked
        else {
            panic!("{asked:?}");
        };
        assert_eq!(
            (run, found, input),
            ("runs/a".into(), which, "new.csv".into())
        );
        let asked = parsed_by(&user, "mine eval").expect("right");
        assert!(
            matches!(asked, Asked::Eval(EvalArgs { run: None, .. })),
            "{asked:?}"
        );
        let help = parsed_by(&user, "mine eval --help")
            .expect_err("help")
            .0
            .to_string();
        assert!(
            help.contains("mine eval runs/wine --json") && !help.contains("paceline"),
            "{help}"
        );
        for line in ["mine --model tiny", "mine --heads 2"] {
            let refused = parsed_by(&user, line).expect_err(line).0.to_string();
            assert!(refused.contains("for built-in models"), "{refused}");
        }
    }

    #[test]
    fn a_program_has_the_options_of_a_training_but_not_those_of_built_in_data() {
        command(&mine(false)).debug_assert();
        let train = Asked::Train(TrainArgs {
            settings: vec![("epochs".into(), "3".into())],
            rest: vec!["--noise".into(), "0.1".into()],
            ..TrainArgs::default()
        });
        assert_eq!(
            parsed("mine --epochs 3 -- --noise 0.1").expect("right"),
            train
        );
        let worker = Asked::Worker(WorkerArgs {
            config: "c.toml".into(),
            json: true,
        });
        assert_eq!(
            parsed("mine worker --config c.toml --json -- a").expect("right"),
            worker
        );
        for (line, expect) in [
            ("mine --task lm", "for built-in data and models"),
            (
                "mine --num-epochs 3",
                "'--num-epochs' is called '--epochs' here",
            ),
            ("mine data.csv", "unexpected argument 'data.csv'"),
            ("mine eval", "unexpected argument 'eval'"),
        ] {
            let refused = parsed(line).expect_err(line).0.to_string();
            assert!(refused.contains(expect), "{refused}");
        }
    }
}
