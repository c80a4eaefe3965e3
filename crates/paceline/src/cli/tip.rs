//! Tips for words that users know from other tools, on command lines that clap refuses.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use paceline_cli::flags::mistake;
use paceline_train::config::{OptionRow, synonym};

use super::{program, train};

/// The error with our tip instead of clap's, if we have one.
pub(super) fn point(error: clap::Error, is_train: bool) -> clap::Error {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let (message, tip, command) = match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let name = text(ContextKind::InvalidSubcommand).unwrap_or_default();
            let message = format!("unrecognized subcommand '{name}'");
            (message, of_command(name).map(str::to_owned), program())
        }
        ErrorKind::UnknownArgument if is_train => {
            let name = text(ContextKind::InvalidArg).unwrap_or_default();
            let message = format!("unexpected argument '{name}' found");
            (message, of_argument(name), train::command())
        }
        _ => return error,
    };
    match tip {
        Some(tip) => mistake(command, error.kind(), &format!("{message}\n\n  tip: {tip}")),
        None => error,
    }
}

fn of_command(name: &str) -> Option<&'static str> {
    Some(match name {
        "predict" | "infer" | "inference" => {
            "weights are SafeTensors: load RUN/checkpoints/step-*/model.safetensors in your own program"
        }
        "eval" | "evaluate" | "test" | "validate" => {
            "`paceline train` evaluates on held-out data after every epoch and writes the results to RUN/metrics.jsonl"
        }
        "fit" => "`paceline train` trains",
        "launch" | "torchrun" => "`paceline run` starts a program's ranks",
        _ => return None,
    })
}

fn of_argument(name: &str) -> Option<String> {
    let Some(long) = name.strip_prefix("--") else {
        let is_word = !name.starts_with('-');
        return is_word.then(|| format!("pass the data as an option: '--data {name}'"));
    };
    let meant = |row: &OptionRow| format!("use '{}': {}", row.flag(), row.help);
    let of_run = || {
        let name = long.replace('-', "_");
        let run = paceline_cli::run::command();
        run.get_arguments().any(|arg| *arg.get_id() == *name).then(|| {
            format!(
                "--{long} is an option of `paceline run`, which starts ranks on several nodes: `paceline run --{long} ... paceline train ...`"
            )
        })
    };
    synonym(long).map(meant).or_else(of_run)
}
