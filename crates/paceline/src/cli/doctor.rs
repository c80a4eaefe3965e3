//! `paceline doctor`: what went wrong in a job, from the records that its ranks left.

use std::path::PathBuf;

use clap::{ArgAction, ArgMatches, value_parser};

/// What `paceline doctor` is told on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DoctorArgs {
    /// Folder of the flight records.
    pub(crate) flight: PathBuf,
    /// Print JSON.
    pub(crate) json: bool,
}

const EXAMPLES: &str = "\
Ranks leave flight records when a job fails that was started with
`paceline run --flight-dir DIR`, or with PACELINE_FLIGHT_DIR set. Records of several
hosts belong into one folder; records of ranks may be missing.

Exit codes: 0 nothing wrong was found, 1 a fault was found, 2 there is no record that
can be read.

Examples:
  paceline run --nproc-per-node 4 --flight-dir flight ./my-program
  paceline doctor --flight flight";

pub(super) fn command() -> clap::Command {
    clap::Command::new("doctor")
        .about("Say what went wrong in a job, from the records that its ranks left")
        .after_help(EXAMPLES)
        .arg(
            super::valued("flight", "DIR", value_parser!(PathBuf))
                .required(true)
                .help("Folder of the flight records"),
        )
        .arg(
            super::option("json")
                .action(ArgAction::SetTrue)
                .help("Print one JSON object: all findings and all ranks"),
        )
}

pub(super) fn read(matches: &ArgMatches) -> DoctorArgs {
    DoctorArgs {
        flight: super::required(matches, "flight"),
        json: matches.get_flag("json"),
    }
}
