//! `paceline gpu doctor`: what is wrong with the devices, from one snapshot.

use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use paceline_doctor::Severity;
use paceline_doctor::gpu::diagnose;
use paceline_gpu::snapshot::Snapshot;
use paceline_usage::files::write_beside;
use paceline_words::Lang;

use crate::exit::{Exit, Failure};
use crate::flags::{one_of, print};
use crate::usage;

use super::source::Source;

/// What `paceline gpu doctor` is told.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct DoctorArgs {
    /// Print one JSON object with everything
    #[arg(long)]
    pub json: bool,
    /// Mildest finding that makes the exit code 1
    #[arg(long, value_name = "SEVERITY", default_value = "error")]
    #[arg(value_parser = one_of(&SEVERITIES, |severity| severity.word(Lang::En).to_owned()))]
    pub fail_on: Severity,
    /// What is looked at.
    #[command(flatten)]
    pub source: Source,
    /// Language of the report [default: the locale's, else en]
    #[arg(long, value_name = "LANG", value_parser = usage::langs())]
    pub lang: Option<Lang>,
    /// Save what was looked at as JSON
    #[arg(long = "save-snapshot", value_name = "FILE")]
    #[arg(conflicts_with = "snapshot")]
    pub save: Option<PathBuf>,
}

const SEVERITIES: [Severity; 3] = [Severity::Error, Severity::Warning, Severity::Note];

pub(super) const HELP: &str = "\
Findings say what is so, why it matters and what to do about it: peer-to-peer that is
missing or cannot be trusted, PCIe lanes and NVLinks that are missing, memory errors and
Xid lines, processes that a job left behind, drivers that are too old, and more.
docs/gpu.md has the table of all findings. Nothing is changed, and nothing is measured:
what the driver says of peer-to-peer is its word. The kernel's log and ACS need root.

`--save-snapshot FILE` keeps what was looked at, for a diagnosis elsewhere. The file holds
the machine's name, the devices with their serial-like UUIDs, the PCI bus, network cards,
numbers and names of the processes on the devices, places of NCCL libraries, and
variables of CUDA and NCCL. It holds no other variables and no command lines, and names
of users only where a path has one.

Exit codes: 0 nothing was found that is as bad as --fail-on says, by default no error;
1 something was; 2 wrong usage, or no snapshot can be read; 3 the snapshot cannot be saved.

Examples:
  Look at this machine, with what only root may see:
    sudo paceline gpu doctor
  Let a colleague look:
    paceline gpu doctor --save-snapshot node7.json
    paceline gpu doctor --snapshot node7.json
  Let a script stop at warnings too:
    paceline gpu doctor --fail-on warning && paceline run ...";

/// Looks, saves if asked to, and prints the findings.
///
/// *Errors*: the snapshot cannot be read or saved.
pub(super) fn run(args: &DoctorArgs) -> Result<Exit, Failure> {
    let snapshot = args.source.snapshot()?;
    if let Some(path) = &args.save {
        save(&snapshot, path).map_err(|error| {
            Failure::environment(format!(
                "cannot save the snapshot as {}: {error}",
                path.display()
            ))
        })?;
    }
    let lang = usage::report_lang(args.lang, args.json);
    let report = diagnose(&snapshot, lang);
    let is_bad = report.worst().is_some_and(|worst| worst <= args.fail_on);
    let exit = print(|out| match args.json {
        true => report.write_json(out),
        false => report.write(out),
    });
    exit.map(|_| match is_bad {
        true => Exit::JobFailed,
        false => Exit::Done,
    })
}

fn save(snapshot: &Snapshot, path: &Path) -> io::Result<()> {
    let mut json = serde_json::to_vec(snapshot)?;
    json.push(b'\n');
    write_beside(path, &json)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::flags;

    fn told(words: &str) -> Result<DoctorArgs, clap::Error> {
        let words = std::iter::once("doctor").chain(words.split_whitespace());
        let matches = flags::command::<DoctorArgs>("doctor").try_get_matches_from(words)?;
        Ok(flags::read(&matches))
    }

    #[test]
    fn errors_are_faults_unless_more_is_asked_for() {
        let check = |words: &str, expect: Severity| {
            assert_eq!(told(words).expect("fine").fail_on, expect, "{words}");
        };
        check("", Severity::Error);
        check("--fail-on warning", Severity::Warning);
        check("--fail-on note", Severity::Note);
        let error = told("--fail-on bad").expect_err("no severity");
        assert!(error.to_string().contains("error, warning, note"));
    }

    #[test]
    fn a_saved_snapshot_is_read_or_one_is_saved() {
        let args = told("--save-snapshot a.json").expect("fine");
        assert_eq!(args.save, Some("a.json".into()));
        told("--save-snapshot a.json --snapshot b.json").expect_err("one of them");
    }

    #[test]
    fn a_snapshot_is_saved_whole_or_not_at_all() {
        let dir = tempfile::tempdir().expect("a folder");
        let snapshot = Snapshot {
            paceline_snapshot: paceline_gpu::snapshot::VERSION,
            host: "node1".to_owned(),
            ..Snapshot::default()
        };
        let path = dir.path().join("a.json");
        for _ in 0..2 {
            save(&snapshot, &path).expect("saved, over an older one too");
        }
        let bytes = fs::read(&path).expect("there");
        assert_eq!(Snapshot::from_json(&bytes).expect("a snapshot"), snapshot);

        // A folder stands in the way of the last step.
        let folder = dir.path().join("folder");
        fs::create_dir(&folder).expect("made");
        save(&snapshot, &folder).expect_err("a folder");
        save(&snapshot, &dir.path().join("none/a.json")).expect_err("no folder");
        save(&snapshot, Path::new("..")).expect_err("no file");
        let mut left: Vec<_> = fs::read_dir(dir.path()).expect("read").flatten().collect();
        left.sort_by_key(fs::DirEntry::file_name);
        let names: Vec<_> = left.iter().map(fs::DirEntry::file_name).collect();
        assert_eq!(names, ["a.json", "folder"]);
    }
}
