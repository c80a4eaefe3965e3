//! Where `paceline gpu` has its knowledge from: this machine, another root, or a saved snapshot.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use clap::{ArgMatches, value_parser};
use paceline_gpu::places::Places;
use paceline_gpu::snapshot::{JSON_BYTES_MAX, Snapshot};

use crate::exit::{Exit, Failure};
use crate::flags::valued;

/// What is looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A machine: where its driver's library and its files are.
    Machine(Places),
    /// A snapshot in this file.
    File(PathBuf),
}

/// Adds `--nvml-library` and `--root`, for commands that look at a running machine.
pub(super) fn add_places(command: clap::Command) -> clap::Command {
    command
        .arg(
            valued("nvml_library", "FILE", value_parser!(PathBuf)).help(
                "NVIDIA's management library [default: PACELINE_NVML_LIBRARY, else as the loader finds it]",
            ),
        )
        .arg(valued("root", "DIR", value_parser!(PathBuf)).help(
            "Where the machine's /proc, /sys and /dev are [default: PACELINE_SYSTEM_ROOT, else /]",
        ))
}

/// Adds [`add_places`]'s options and `--snapshot`, for commands that take either.
pub(super) fn add_to(command: clap::Command) -> clap::Command {
    add_places(command).arg(
        valued("snapshot", "FILE", value_parser!(PathBuf))
            .conflicts_with_all(["nvml_library", "root"])
            .help("A saved snapshot, in place of this machine"),
    )
}

/// What [`add_places`]'s options say, and the environment where they say nothing.
pub(super) fn read_places(matches: &ArgMatches) -> Places {
    let given = |name| matches.get_one::<PathBuf>(name).cloned();
    let default = Places::from_env();
    Places {
        library: given("nvml_library").or(default.library),
        root: given("root").unwrap_or(default.root),
    }
}

/// What [`add_to`]'s options say.
pub(super) fn read(matches: &ArgMatches) -> Source {
    match matches.get_one::<PathBuf>("snapshot") {
        Some(file) => Source::File(file.clone()),
        None => Source::Machine(read_places(matches)),
    }
}

impl Source {
    /// The snapshot: taken now, or read.
    ///
    /// *Errors*: the file cannot be read or is no snapshot, which is wrong usage. A machine always has one.
    pub(super) fn snapshot(&self) -> Result<Snapshot, Failure> {
        match self {
            Self::Machine(places) => Ok(paceline_gpu::take(places)),
            Self::File(path) => {
                let bytes = bounded(path).map_err(|error| {
                    let message = format!("cannot read {}: {error}", path.display());
                    Failure::new(Exit::Usage, message, None)
                })?;
                Snapshot::from_json(&bytes).map_err(|error| {
                    let message = format!("{}: {error}", path.display());
                    Failure::new(Exit::Usage, message, error.hint())
                })
            }
        }
    }
}

/// The file's bytes, one more than is believed where it has more.
fn bounded(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let most = JSON_BYTES_MAX as u64 + 1;
    File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(words: &str) -> Result<Source, clap::Error> {
        let words = std::iter::once("x").chain(words.split_whitespace());
        let matches = add_to(clap::Command::new("x")).try_get_matches_from(words)?;
        Ok(read(&matches))
    }

    #[test]
    fn a_machine_or_a_file_is_looked_at() {
        let machine = told("--root /host --nvml-library /lib/x.so").expect("fine");
        let expect = Source::Machine(Places {
            library: Some("/lib/x.so".into()),
            root: "/host".into(),
        });
        assert_eq!(machine, expect);
        let file = told("--snapshot a.json").expect("fine");
        assert_eq!(file, Source::File("a.json".into()));
        told("--snapshot a.json --root /host").expect_err("one of them");
    }

    #[test]
    fn what_is_no_snapshot_is_wrong_usage() {
        let check = |path: &Path, expect: &str| {
            let source = Source::File(path.to_owned());
            let failure = source.snapshot().expect_err("none");
            assert_eq!(failure.exit(), Exit::Usage);
            assert!(format!("{failure:?}").contains(expect), "{failure:?}");
        };
        let dir = tempfile::tempdir().expect("a folder");
        check(&dir.path().join("none"), "cannot read ");
        check(dir.path(), "cannot read ");
        let file = dir.path().join("a.json");
        std::fs::write(&file, "{}").expect("written");
        check(&file, "this is no snapshot");
        check(&file, "--save-snapshot");
        let large = File::create(&file).expect("a file");
        large.set_len(1 << 40).expect("a hole");
        check(&file, "the snapshot has ");
    }
}
