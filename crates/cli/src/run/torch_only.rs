//! torchrun's options that set something which this launcher does not have. What they may safely say is understood, with a
//! warning; what would change a job's behaviour there is refused with the reason.

use clap::builder::{PossibleValuesParser, ValueParser};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches};

use crate::flags::valued;

const HEADING: &str = "Understood for torchrun's sake";

/// One option.
struct Row {
    name: &'static str,
    placeholder: &'static str,
    /// torchrun's own way, for which there is nothing to say.
    usual: &'static str,
    /// The values; with none, seconds.
    values: &'static [&'static str],
    /// What stands behind the option's name in the warning.
    why: &'static str,
    help: &'static str,
}

const ROWS: [Row; 4] = [
    Row {
        name: "monitor_interval",
        placeholder: "SECONDS",
        usual: "",
        values: &[],
        why: "failures are noticed at once, without polling",
        help: "Has no effect: failures are noticed at once, without polling",
    },
    Row {
        name: "start_method",
        placeholder: "spawn|fork|forkserver",
        usual: "spawn",
        values: &["spawn", "fork", "forkserver"],
        why: "ranks are programs, not functions of a Python process",
        help: "Has no effect: ranks are programs, as always on torchrun's command line",
    },
    Row {
        name: "event_log_handler",
        placeholder: "null|console",
        usual: "null",
        values: &["null", "console"],
        why: "what happens is said on stderr and in error.json",
        help: "Has no effect: what happens is said on stderr and in error.json",
    },
    Row {
        name: "logs_specs",
        placeholder: "default",
        usual: "default",
        values: &["default"],
        why: "",
        help: "Only default: other values name a class in Python. --redirects, --tee, --log-dir and --log-line-prefix-template say \
               where output goes",
    },
];

/// The options.
pub(crate) fn args() -> Vec<Arg> {
    let arg = |row: &Row| {
        let parser: ValueParser = match row.values {
            [] => ValueParser::new(seconds),
            values => PossibleValuesParser::new(values).into(),
        };
        valued(row.name, row.placeholder, parser)
            .hide_possible_values(true)
            .help(row.help)
            .help_heading(HEADING)
    };
    ROWS.iter().map(arg).collect()
}

/// A warning for each that was set to something and does nothing.
pub(crate) fn warnings(matches: &ArgMatches) -> Vec<String> {
    let warning = |row: &Row| {
        let value: &String = matches.get_one(row.name)?;
        let is_set = matches.value_source(row.name) != Some(ValueSource::DefaultValue);
        (is_set && value != row.usual).then(|| {
            let name = row.name.replace('_', "-");
            format!("--{name} has no effect here: {}", row.why)
        })
    };
    ROWS.iter().filter_map(warning).collect()
}

fn seconds(text: &str) -> Result<String, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 => Ok(text.to_owned()),
        _ => Err("expected seconds above 0".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warned(line: &str) -> Result<Vec<String>, String> {
        let command = clap::Command::new("run").no_binary_name(true).args(args());
        let matches = command.try_get_matches_from(line.split_whitespace());
        matches
            .map(|matches| warnings(&matches))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn what_has_no_effect_is_said_and_what_asks_for_nothing_is_not() {
        assert_eq!(warned(""), Ok(vec![]));
        let usual = "--start-method spawn --event-log-handler null --logs-specs default";
        assert_eq!(warned(usual), Ok(vec![]));
        let expect = [
            "--monitor-interval has no effect here: failures are noticed at once, without polling",
            "--start-method has no effect here: ranks are programs, not functions of a Python process",
            "--event-log-handler has no effect here: what happens is said on stderr and in error.json",
        ];
        let line = "--monitor_interval 0.5 --start_method fork --event_log_handler console";
        assert_eq!(warned(line), Ok(expect.map(str::to_owned).into()));
    }

    #[test]
    fn what_only_python_could_do_is_refused_with_what_there_is_instead() {
        let check = |line: &str, text: &str| {
            let error = warned(line).expect_err(line);
            assert!(error.contains(text), "{error}");
        };
        check("--logs-specs mine", "[possible values: default]");
        check("--event-log-handler mine", "null, console");
        check("--start-method thread", "spawn, fork, forkserver");
        check("--monitor-interval 0", "seconds above 0");
        check("--monitor-interval x", "seconds above 0");
    }
}
