//! The options of `paceline run` about the end of ranks, wanted or not.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::ValueParser;
use clap::{Arg, ArgMatches, value_parser};
use paceline_launch::{HandledSignals, OnStall, SignalNameError, StallOptions};
use paceline_rendezvous::env::Timeout;

use crate::flags::{seconds, valued};

const HEADING: &str = "Failures";

fn signals(text: &str) -> Result<HandledSignals, String> {
    text.parse()
        .map_err(|error: SignalNameError| format!("{error}: {}", error.hint()))
}

/// The deadline of operations between ranks.
fn timeout(text: &str) -> Result<Timeout, String> {
    let seconds = text.parse().ok().filter(|s| (1..=86_400).contains(s));
    match (text, seconds) {
        ("auto", _) => Ok(Timeout::Auto),
        (_, Some(seconds)) => Ok(Timeout::After(Duration::from_secs(seconds))),
        _ => Err("expected auto or a whole number from 1 to 86400".to_owned()),
    }
}

/// The options.
pub(crate) fn args() -> Vec<Arg> {
    [
        valued("shutdown_timeout", "SECONDS", ValueParser::new(seconds(0..=86_400)))
            .default_value("30")
            .help(
                "Seconds between asking a rank to stop and killing it, wherever one is ended [env: \
                 TORCH_ELASTIC_SHUTDOWN_TIMEOUT]",
            ),
        valued("signals_to_handle", "NAMES", signals).help(
            "The signals that this program handles, with commas between them; any other one ends it [default: all six \
             below]",
        ),
        valued("timeout_seconds", "SECONDS|auto", ValueParser::new(timeout)).help(
            "Seconds that ranks wait for one another before one counts as hung; auto follows the duration of the job's steps, \
             evaluation and saving included [default: 60]",
        ),
        valued("stall_after", "SECONDS", ValueParser::new(seconds(0..=86_400))).help(
            "Name ranks that print nothing and use no processor time for so long, and show where each of their threads waits; \
             0 never looks. Ranks that use Paceline's library have deadlines instead [default: 60, without the threads]",
        ),
        valued("on_stall", "ACTION", ["warn", "abort"])
            .default_value("warn")
            .help("What follows: only the warning, or the job's end with exit code 4"),
        valued("flight_dir", "DIR", value_parser!(PathBuf)).help(
            "When the job fails, every rank writes its last operations into this folder, for `paceline doctor`",
        ),
    ]
    .map(|arg| arg.help_heading(HEADING))
    .into()
}

/// The response to ranks that hang.
pub(crate) fn stall(matches: &ArgMatches) -> StallOptions {
    let usual = StallOptions::default();
    let after = matches.get_one::<Duration>("stall_after").copied();
    StallOptions {
        after: after.map_or(usual.after, |after| {
            Some(after).filter(|time| !time.is_zero())
        }),
        stacks: after.is_some(),
        on_stall: match matches.get_one::<String>("on_stall").map(String::as_str) {
            Some("abort") => OnStall::Abort,
            _ => OnStall::Warn,
        },
    }
}

/// The warnings about options that cancel each other.
pub(crate) fn warning(stall: &StallOptions) -> Option<String> {
    (stall.after.is_none() && stall.on_stall == OnStall::Abort).then(|| {
        "--on-stall abort has no effect with --stall-after 0, which never looks".to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_for_stalls_asks_for_the_threads_too_and_zero_turns_the_look_off() {
        let read = |line: &str| {
            let command = clap::Command::new("run").no_binary_name(true).args(args());
            let matches = command.try_get_matches_from(line.split_whitespace());
            matches.map(|matches| stall(&matches))
        };
        let check = |line: &str, after: Option<u64>, stacks: bool, on_stall: OnStall| {
            let expect = StallOptions {
                after: after.map(Duration::from_secs),
                stacks,
                on_stall,
            };
            assert_eq!(read(line).expect(line), expect, "{line}");
            let is_useless = after.is_none() && on_stall == OnStall::Abort;
            assert_eq!(warning(&expect).is_some(), is_useless, "{line}");
        };
        check("", Some(60), false, OnStall::Warn);
        check("--stall-after 5", Some(5), true, OnStall::Warn);
        check("--stall_after 0", None, true, OnStall::Warn);
        check("--on-stall abort", Some(60), false, OnStall::Abort);
        check(
            "--on-stall abort --stall-after 0",
            None,
            true,
            OnStall::Abort,
        );
        for line in ["--stall-after x", "--stall-after -1", "--on-stall kill"] {
            assert!(read(line).is_err(), "{line}");
        }
    }

    #[test]
    fn signals_are_named_and_a_name_that_cannot_be_is_refused_with_those_that_can() {
        let parsed = signals("SIGTERM, SIGUSR1").map(|signals| signals.to_string());
        assert_eq!(parsed.as_deref(), Ok("SIGUSR1,SIGTERM"));
        for text in ["SIGKILL", "TERM", "15", "", "SIGTERM,"] {
            let why = signals(text).expect_err(text);
            assert!(
                why.contains("no signal") && why.contains("SIGTERM, SIGINT"),
                "{why}"
            );
        }
    }
}
