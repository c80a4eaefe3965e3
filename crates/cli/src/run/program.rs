//! The kind of program that `paceline run` starts: an executable, a Python script or a Python module.

use clap::{Arg, ArgAction, ArgMatches};
use paceline_launch::RunAs;

use crate::flags::option;

const HEADING: &str = "Program";

/// The options.
pub(crate) fn args() -> Vec<Arg> {
    let flag = |name| option(name).action(ArgAction::SetTrue);
    [
        flag("module")
            .short('m')
            .conflicts_with_all(["no_python", "run_path"])
            .help("PROGRAM is the name of a Python module, as for `python -m`"),
        flag("no_python").help("PROGRAM is executed as it is, even if its name ends in .py"),
        flag("run_path").help(
            "PROGRAM is a Python script, even if its name does not end in .py; wins over --no-python",
        ),
    ]
    .map(|arg| arg.help_heading(HEADING))
    .into()
}

/// Reads the options.
pub(crate) fn read(matches: &ArgMatches) -> RunAs {
    let is_set = |name| matches.get_flag(name);
    if is_set("run_path") {
        RunAs::Script
    } else if is_set("module") {
        RunAs::Module
    } else if is_set("no_python") {
        RunAs::Program
    } else {
        RunAs::ByName
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_what_its_name_or_a_flag_says() {
        let command = clap::Command::new("run").no_binary_name(true).args(args());
        let check = |line: &str, expect: Option<RunAs>| {
            let matches = command
                .clone()
                .try_get_matches_from(line.split_whitespace());
            assert_eq!(matches.ok().as_ref().map(read), expect, "{line}");
        };
        check("", Some(RunAs::ByName));
        check("-m", Some(RunAs::Module));
        check("--module", Some(RunAs::Module));
        check("--no_python", Some(RunAs::Program));
        check("--run-path", Some(RunAs::Script));
        check("--run-path --no-python", Some(RunAs::Script));
        check("-m --no-python", None);
        check("-m --run-path", None);
    }
}
