//! The flags of `paceline run` about what the ranks print; torchrun's names where it has them.

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, value_parser};
use paceline_launch::LogOptions;

use crate::flags::{self, option, valued};

const HEADING: &str = "Logs";

pub(crate) fn args() -> Vec<Arg> {
    let run_dir = valued("run_dir", "DIR", value_parser!(PathBuf)).help(
        "Have a PyTorch program with the backend paceline record its steps in this run directory (PACELINE_RUN_DIR), for `paceline watch` and \
         `paceline report`; on one node the logs go there too",
    );
    let log_dir = valued("log_dir", "DIR", value_parser!(PathBuf)).help(
        "Keep every rank's output and errors in a new folder below this one; /dev/null keeps none \
         [default: ~/.local/state/paceline/runs, the last 20 runs]",
    );
    let no_fold = option("no_fold")
        .action(ArgAction::SetTrue)
        .help("Print equal lines of several ranks one by one, not once as `[ranks 0-7] line`");
    let [run_dir, log_dir, no_fold] =
        [run_dir, log_dir, no_fold].map(|arg| arg.help_heading(HEADING));
    [
        vec![run_dir, log_dir],
        flags::args::<LogOptions>(),
        vec![no_fold],
    ]
    .concat()
}

pub(crate) fn read(matches: &ArgMatches) -> LogOptions {
    LogOptions {
        fold: !matches.get_flag("no_fold"),
        ..flags::read(matches)
    }
}

#[cfg(test)]
mod tests {
    use paceline_launch::LogFormat;

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
