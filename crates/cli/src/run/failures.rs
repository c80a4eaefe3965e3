//! The options of `paceline run` about the end of ranks, wanted or not.

use std::path::PathBuf;

use clap::{Arg, value_parser};
use paceline_launch::{HandledSignals, SignalNameError};

use crate::flags::{valued, whole};

const HEADING: &str = "Failures";

fn signals(text: &str) -> Result<HandledSignals, String> {
    text.parse()
        .map_err(|error: SignalNameError| format!("{error}: {}", error.hint()))
}

/// The options.
pub(crate) fn args() -> Vec<Arg> {
    [
        valued("shutdown_timeout", "SECONDS", whole(0..=86_400))
            .default_value("30")
            .help(
                "Seconds between asking a rank to stop and killing it, wherever one is ended [env: \
                 TORCH_ELASTIC_SHUTDOWN_TIMEOUT]",
            ),
        valued("signals_to_handle", "NAMES", signals).help(
            "The signals that this program handles, with commas between them; any other one ends it [default: all six \
             below]",
        ),
        valued("timeout_seconds", "SECONDS", whole(1..=86_400))
            .help("Seconds that ranks wait for one another before the job fails [default: 60]"),
        valued("flight_dir", "DIR", value_parser!(PathBuf)).help(
            "When the job fails, every rank writes its last operations into this folder, for `paceline doctor`",
        ),
    ]
    .map(|arg| arg.help_heading(HEADING))
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

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
