//! How options are written.

use std::ffi::OsString;
use std::io::{self, Write};
use std::ops::RangeInclusive;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser, ValueParser};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, FromArgMatches};

use crate::exit::{Exit, Failure};

/// An option, `--with-dashes` for the name `with_dashes`.
#[must_use]
pub fn option(name: &'static str) -> Arg {
    with_underscores(Arg::new(name).long(name.replace('_', "-")))
}

/// Understands underscores too, as torchrun does.
fn with_underscores(arg: Arg) -> Arg {
    let long = arg.get_long().filter(|long| long.contains('-'));
    match long.map(|long| long.replace('-', "_")) {
        Some(other) => arg.alias(other),
        None => arg,
    }
}

/// What every derived option gets.
pub(crate) fn usual(arg: Arg) -> Arg {
    let has_value = arg.get_long().is_some() && arg.get_action().takes_values();
    with_underscores(arg).allow_negative_numbers(has_value)
}

/// A command with the options of `A`.
pub(crate) fn command<A: Args>(name: &'static str) -> clap::Command {
    A::augment_args(clap::Command::new(name)).mut_args(usual)
}

/// The options of `A`, for a command that has others too.
pub(crate) fn args<A: Args>() -> Vec<Arg> {
    command::<A>("").get_arguments().cloned().collect()
}

/// The options of a command that clap has checked.
pub(crate) fn read<A: FromArgMatches>(matches: &ArgMatches) -> A {
    A::from_arg_matches(matches).expect("clap has checked what is required")
}

/// `--json`, for commands that print one object.
#[must_use]
pub fn json() -> Arg {
    option("json")
        .action(ArgAction::SetTrue)
        .help("Print one JSON object with everything")
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
pub fn whole<T: TryFrom<u64>>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        let number = number.and_then(|number| T::try_from(number).ok());
        number.ok_or_else(|| {
            format!(
                "expected a whole number from {} to {}",
                range.start(),
                range.end()
            )
        })
    }
}

/// Reads whole seconds in this range.
pub(crate) fn seconds(range: RangeInclusive<u64>) -> impl TypedValueParser<Value = Duration> {
    whole(range).map(Duration::from_secs)
}

/// Reads seconds in this range, and fractions of them.
pub(crate) fn fractions(
    range: RangeInclusive<f64>,
) -> impl Fn(&str) -> Result<Duration, String> + Clone {
    move |text| {
        let seconds = text.parse().ok().filter(|seconds| range.contains(seconds));
        seconds
            .map(Duration::from_secs_f64)
            .ok_or_else(|| format!("expected seconds from {} to {}", range.start(), range.end()))
    }
}

/// One of a few values by name, hyphens optional. clap lists the names and knows near ones.
pub(crate) fn one_of<T: Copy + Send + Sync + 'static>(
    all: &'static [T],
    name: fn(T) -> String,
) -> impl TypedValueParser<Value = T> {
    let word = move |one: &T| {
        let name = name(*one);
        let other = ["", "_"].map(|hyphen| name.replace('-', hyphen));
        let has_hyphen = name.contains('-');
        PossibleValue::new(name).aliases(other.into_iter().filter(|_| has_hyphen))
    };
    PossibleValuesParser::new(all.iter().map(word)).map(move |text| {
        let meant = all.iter().find(|one| word(one).matches(&text, false));
        *meant.expect("clap takes no other names")
    })
}

/// The options that are given, word for word, as another command line has them.
///
/// *Errors*: those of `text`.
pub(crate) fn words<E>(
    matches: &ArgMatches,
    options: impl IntoIterator<Item = Arg>,
    is_given: impl Fn(ValueSource) -> bool,
    text: impl Fn(&OsString) -> Result<String, E>,
) -> Result<Vec<String>, E> {
    let mut words = Vec::new();
    for arg in options {
        let id = arg.get_id().as_str();
        if !matches.value_source(id).is_some_and(&is_given) {
            continue;
        }
        let long = arg.get_long().unwrap_or_default();
        if !arg.get_action().takes_values() {
            let times = match arg.get_action() {
                ArgAction::Count => matches.get_count(id),
                _ => 1,
            };
            words.extend((0..times).map(|_| format!("--{long}")));
            continue;
        }
        for value in matches.get_raw(id).into_iter().flatten() {
            let value = text(&value.to_owned())?;
            if value.starts_with('-') || value.is_empty() {
                words.push(format!("--{long}={value}"));
            } else {
                words.extend([format!("--{long}"), value]);
            }
        }
    }
    Ok(words)
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
    // The program itself is what its commands belong to.
    let name = match command.get_name() {
        "paceline" => "paceline".to_owned(),
        name => format!("paceline {name}"),
    };
    command.bin_name(name).error(kind, message)
}

/// The exit of a command that has written to stdout. A reader that stops early, as in `paceline indices ... | head`, is no
/// failure.
///
/// *Errors*: stdout takes no more for another reason.
pub fn finish(written: io::Result<()>) -> Result<Exit, Failure> {
    match written {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::environment(
            format!("cannot write to stdout: {error}"),
        )),
        _ => Ok(Exit::Done),
    }
}

/// Stdout, with room for what is to be written at once.
pub type Stdout = io::BufWriter<io::StdoutLock<'static>>;

/// Writes to stdout, and ends as [`finish`] says.
///
/// *Errors*: stdout takes no more.
pub fn print(write: impl FnOnce(&mut Stdout) -> io::Result<()>) -> Result<Exit, Failure> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    finish(write(&mut out).and_then(|()| out.flush()))
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::*;

    #[test]
    fn numbers_out_of_their_range_are_told_it() {
        let port = whole::<u16>(1..=65_534);
        assert_eq!(port("1"), Ok(1));
        for text in ["0", "65535", "-1", "x", ""] {
            let expect = "expected a whole number from 1 to 65534".to_owned();
            assert_eq!(port(text), Err(expect), "{text}");
        }
    }

    #[test]
    fn an_interval_is_seconds_within_bounds() {
        let check = |text: &str, expect: Option<f64>| {
            let expect = expect.map(Duration::from_secs_f64);
            assert_eq!(fractions(0.1..=60.0)(text).ok(), expect, "{text}");
        };
        check("1", Some(1.0));
        check("0.25", Some(0.25));
        check("60", Some(60.0));
        check("0", None);
        check("-1", None);
        check("NaN", None);
        check("inf", None);
        check("1s", None);
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
