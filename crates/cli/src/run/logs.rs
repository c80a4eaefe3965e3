//! The flags of `paceline run` about what the ranks print; torchrun's names where it has them.

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, value_parser};
use paceline_launch::{LineFilter, LogFormat, LogOptions, PrefixTemplate, RankFilter, StreamMap};

use crate::flags::{option, required, valued};

const HEADING: &str = "Logs";

/// The flags.
pub(crate) fn args() -> Vec<Arg> {
    let streams = |name, short, help| {
        valued(name, "STREAMS", str::parse::<StreamMap>)
            .short(short)
            .help(help)
    };
    let words = |name, help| valued(name, "WORDS", str::parse::<LineFilter>).help(help);
    let args = [
        valued("log_dir", "DIR", value_parser!(PathBuf)).help(
            "Keep every rank's output and errors in a new folder below this one; /dev/null keeps none \
             [default: ~/.local/state/paceline/runs, the last 20 runs]",
        ),
        streams(
            "redirects",
            'r',
            "Keep these streams off the console: 0 none, 1 stdout, 2 stderr, 3 both, or a map of local ranks such \
             as 0:1,12:3; the files have them anyway",
        ),
        streams(
            "tee",
            't',
            "Show these streams on the console whatever --redirects says",
        ),
        valued("local_ranks_filter", "RANKS", str::parse::<RankFilter>)
            .help("Show only these local ranks on the console, such as 0,2 or 0-3; the files have all"),
        valued(
            "log_line_prefix_template",
            "TEXT",
            str::parse::<PrefixTemplate>,
        )
        .help(
            "What stands before each line, with ${role_name}, ${local_rank}, ${rank} and ${hostname} [default: \
             '[rank ${rank}] '] [env: TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE]",
        ),
        words(
            "duplicate_stdout_filters",
            "Write the lines of stdout that have one of these words, divided by commas, also to filtered_stdout.log",
        ),
        words(
            "duplicate_stderr_filters",
            "Write the lines of stderr that have one of these words also to filtered_stderr.log",
        ),
        option("log_format")
            .value_name("FORMAT")
            .value_parser(["text", "json"])
            .default_value("text")
            .help("How lines are written on the console; json is one object a line, with time, rank and host"),
        option("log_timestamps")
            .action(ArgAction::SetTrue)
            .help("Write the time, in UTC, before each line on the console"),
        option("no_fold").action(ArgAction::SetTrue).help(
            "Print equal lines of several ranks one by one, not once as `[ranks 0-7] line`",
        ),
    ];
    args.map(|arg| arg.help_heading(HEADING)).into()
}

/// Reads the options.
pub(crate) fn read(matches: &ArgMatches) -> LogOptions {
    let get_words = |name| matches.get_one(name).cloned().unwrap_or_default();
    let get_streams = |name| matches.get_one(name).cloned().unwrap_or_default();
    let format: String = required(matches, "log_format");
    LogOptions {
        format: if format == "json" {
            LogFormat::Json
        } else {
            LogFormat::Text
        },
        timestamps: matches.get_flag("log_timestamps"),
        prefix: matches.get_one("log_line_prefix_template").cloned(),
        fold: !matches.get_flag("no_fold"),
        redirects: get_streams("redirects"),
        tee: get_streams("tee"),
        local_ranks: matches.get_one("local_ranks_filter").cloned(),
        filter_out: get_words("duplicate_stdout_filters"),
        filter_err: get_words("duplicate_stderr_filters"),
        file_bytes_max: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<LogOptions, String> {
        let command = clap::Command::new("run").no_binary_name(true).args(args());
        let matches = command.try_get_matches_from(line.split_whitespace());
        matches
            .map(|matches| read(&matches))
            .map_err(|error| error.to_string())
    }

    fn default() -> LogOptions {
        LogOptions {
            fold: true,
            ..LogOptions::default()
        }
    }

    #[test]
    fn torchruns_flags_have_their_names_and_short_forms() {
        let expect = LogOptions {
            redirects: "3".parse().unwrap(),
            tee: "0:1,12:2".parse().unwrap(),
            local_ranks: Some("0,2".parse().unwrap()),
            prefix: Some("[${role_name}${local_rank}]:".parse().unwrap()),
            filter_out: "apple,orange".parse().unwrap(),
            filter_err: "error".parse().unwrap(),
            ..default()
        };
        let rest = "prefix_template=[${role_name}${local_rank}]: --duplicate-stdout-filters apple,orange \
                    --duplicate_stderr_filters=error --local_ranks_filter=0,2";
        let check = |line: &str| assert_eq!(parsed(line).as_ref(), Ok(&expect), "{line}");
        check(&format!("-r 3 -t 0:1,12:2 --log_line_{rest}"));
        check(&format!("--redirects 3 --tee=0:1,12:2 --log_line_{rest}"));
    }

    #[test]
    fn the_console_is_text_without_times_and_folded_unless_told_otherwise() {
        assert_eq!(parsed(""), Ok(default()));
        let expect = LogOptions {
            format: LogFormat::Json,
            timestamps: true,
            fold: false,
            ..default()
        };
        assert_eq!(
            parsed("--log-format json --log-timestamps --no-fold"),
            Ok(expect)
        );
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_what_can() {
        let check = |line: &str, text: &str| {
            let error = parsed(line).expect_err(line);
            assert!(error.contains(text), "{error}");
        };
        check("-r 4", "0:1,12:3");
        check("--local-ranks-filter all", "0,2 or 0-3,8");
        check("--log-format xml", "json");
    }
}
