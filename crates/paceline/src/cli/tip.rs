//! Tips on the command line of `paceline train` for words of other tools, and for its own options in the wrong place.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use paceline_train::config::{OPTIONS, OptionRow, option, synonym};

/// The tip for a refused command line, if there is one. `words` begin with the program's name.
pub(super) fn of(error: &clap::Error, words: &[OsString]) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    match (error.kind(), words.get(1)?.to_str()?) {
        (ErrorKind::InvalidSubcommand, _) => {
            of_command(text(ContextKind::InvalidSubcommand)?).map(str::to_owned)
        }
        (ErrorKind::UnknownArgument, "train") => {
            let argument = text(ContextKind::InvalidArg)?;
            match argument.strip_prefix("--") {
                Some(long) => of_option(long),
                None => of_word(argument, words),
            }
        }
        (ErrorKind::UnknownArgument, "run") => {
            let argument = text(ContextKind::InvalidArg)?;
            let is_train = OPTIONS.iter().any(|row| row.flag() == argument);
            is_train.then(|| {
                format!(
                    "'{argument}' is an option of `paceline train` and goes after it: `paceline run ... paceline train {argument} ...`"
                )
            })
        }
        _ => None,
    }
}

fn of_command(name: &str) -> Option<&'static str> {
    Some(match name {
        "infer" | "inference" | "classify" => {
            "`paceline predict` classifies new samples, `paceline generate` writes text with a language model"
        }
        "evaluate" | "test" | "validate" => "`paceline eval` evaluates what a run has trained",
        "fit" => "`paceline train` trains",
        "launch" | "torchrun" => "`paceline run` starts a program's ranks",
        _ => return None,
    })
}

pub(super) fn of_option(long: &str) -> Option<String> {
    let called = |ours: &str, help: &str| format!("'--{long}' is called '{ours}' here: {help}");
    if let "dry-run" | "dry_run" | "show-config" = long {
        return Some(called(
            "--explain",
            "Print every setting and its source, then exit",
        ));
    }
    if let Some(row) = synonym(long) {
        return Some(called(&row.flag(), row.help));
    }
    let name = long.replace('-', "_");
    let run = paceline_cli::run::command();
    run.get_arguments().any(|arg| *arg.get_id() == *name).then(|| {
        format!(
            "'--{long}' is an option of `paceline run`, which starts ranks on several nodes: `paceline run --{long} ... paceline train ...`"
        )
    })
}

/// A word that is no option: a setting as in a file (`epochs=1`, `epochs = 1`), or a path.
fn of_word(word: &str, words: &[OsString]) -> Option<String> {
    if word.starts_with('-') {
        return None;
    }
    let (key, value) = word.split_once('=').unwrap_or((word, ""));
    let Some(row) = option(key).or_else(|| synonym(key)) else {
        return Some(format!("pass the data as an option: '--data {word}'"));
    };
    let rest = words.iter().map(|word| word.to_string_lossy());
    let mut rest = rest.skip_while(|other| other != word).skip(1);
    let value = match value {
        "" => rest.find(|word| word != "=").unwrap_or("...".into()),
        value => value.into(),
    };
    let value = value.trim_start_matches('=');
    let flag = OptionRow::flag(row);
    Some(format!("pass a setting as an option: '{flag} {value}'"))
}
