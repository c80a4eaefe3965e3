//! How options are written, and command lines that end the program.

use std::ops::RangeInclusive;

use clap::builder::ValueParser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgMatches};

use crate::exit::{Exit, Failure, hint};
use crate::variables;

/// A command line that ends the program: by asking for help or the version, or by a mistake.
#[derive(Debug)]
pub struct Stop(pub clap::Error);

impl Stop {
    /// How to end.
    #[must_use]
    pub fn exit(&self) -> Exit {
        if self.0.use_stderr() {
            Exit::Usage
        } else {
            Exit::Done
        }
    }

    /// Prints help and version on stdout, a mistake on stderr, and returns how to end.
    ///
    /// Coloured on a terminal only, and not with `NO_COLOR`.
    #[must_use]
    pub fn report(mut self) -> Exit {
        variables::blame(&mut self.0, |name| std::env::var_os(name));
        // A closed pipe, as in `paceline --help | head`, is no failure.
        let _ = self.0.print();
        if let Some(advice) = without_run(&self.0) {
            hint(&advice);
        }
        self.exit()
    }
}

/// Advice for a command line without `run`, as torchrun has it.
fn without_run(error: &clap::Error) -> Option<String> {
    match (error.kind(), error.get(ContextKind::InvalidSubcommand)) {
        (ErrorKind::InvalidSubcommand, Some(ContextValue::String(program))) => Some(format!(
            "to start it as the ranks of a job: `paceline run {program}`"
        )),
        _ => {
            let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else {
                return None;
            };
            let name = option.trim_start_matches('-').replace('-', "_");
            let of_run = crate::run::command();
            let is_known = of_run.get_arguments().any(|arg| *arg.get_id() == *name);
            (error.kind() == ErrorKind::UnknownArgument && is_known).then(|| {
                format!("{option} is an option of `paceline run`, and stands behind `run`")
            })
        }
    }
}

/// An option, `--with-dashes` for the name `with_dashes`; underscores are understood too, as by torchrun.
#[must_use]
pub fn option(name: &'static str) -> Arg {
    let arg = Arg::new(name);
    if name.contains('_') {
        arg.long(name.replace('_', "-")).alias(name)
    } else {
        arg.long(name)
    }
}

/// An option with a value.
#[must_use]
pub fn valued(
    name: &'static str,
    placeholder: &'static str,
    parser: impl Into<ValueParser>,
) -> Arg {
    option(name)
        .value_name(placeholder)
        .value_parser(parser.into())
        // So that -1 is told what is expected, not that there is no option of this name.
        .allow_negative_numbers(true)
}

/// Reads a whole number in this range.
pub fn whole(range: RangeInclusive<u64>) -> impl Fn(&str) -> Result<u64, String> + Clone {
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| {
            format!(
                "expected a whole number from {} to {}",
                range.start(),
                range.end()
            )
        })
    }
}

/// The value of an option that clap requires or that has a default.
///
/// # Panics
///
/// If the option is neither.
#[must_use]
pub fn required<T: Clone + Send + Sync + 'static>(matches: &ArgMatches, name: &str) -> T {
    matches
        .get_one::<T>(name)
        .cloned()
        .expect("clap requires the option or has its default")
}

/// A mistake in a command that clap does not know about, shown as clap shows its own.
#[must_use]
pub fn mistake(command: clap::Command, kind: ErrorKind, message: &str) -> clap::Error {
    let name = format!("paceline {}", command.get_name());
    command.bin_name(name).error(kind, message)
}

/// How a command ends that has written to stdout: a reader who has seen enough, as in `paceline indices ... | head`, is
/// no failure.
///
/// *Errors*: stdout takes no more for another reason.
pub fn finish(written: std::io::Result<()>) -> Result<Exit, Failure> {
    match written {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            let message = format!("cannot write to stdout: {error}");
            Err(Failure::new(Exit::Environment, message, None))
        }
        _ => Ok(Exit::Done),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, ErrorKind};

    use super::*;

    #[test]
    fn a_command_line_without_run_is_told_of_it() {
        let advice = |line: &str| {
            let words = std::iter::once("paceline").chain(line.split_whitespace());
            let error = crate::launcher().try_get_matches_from(words);
            without_run(&error.expect_err(line))
        };
        let expect = "to start it as the ranks of a job: `paceline run train.py`";
        assert_eq!(advice("train.py --epochs 3").as_deref(), Some(expect));
        let expect = "--nproc_per_node is an option of `paceline run`, and stands behind `run`";
        assert_eq!(
            advice("--nproc_per_node=2 train.py").as_deref(),
            Some(expect)
        );
        assert_eq!(advice("--epochs 2 train.py"), None);
        assert_eq!(advice("run --epochs 2 train.py"), None);
    }

    #[test]
    fn numbers_out_of_their_range_are_told_it() {
        let port = whole(1..=65_534);
        assert_eq!(port("1"), Ok(1));
        for text in ["0", "65535", "-1", "x", ""] {
            let expect = "expected a whole number from 1 to 65534".to_owned();
            assert_eq!(port(text), Err(expect), "{text}");
        }
    }

    #[test]
    fn a_closed_pipe_is_quiet_and_a_full_disk_is_not() {
        let broken = || io::Error::from(ErrorKind::BrokenPipe);
        assert_eq!(finish(Err(broken())), Ok(Exit::Done));
        // JSON goes through serde_json, which must not hide the kind.
        assert_eq!(
            finish(Err(serde_json::Error::io(broken()).into())),
            Ok(Exit::Done)
        );
        let full = finish(Err(ErrorKind::StorageFull.into())).expect_err("a failure");
        assert_eq!(full.exit(), Exit::Environment);
    }
}
