//! Where `paceline gpu` has its knowledge from: this machine, another root, or a saved snapshot.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use paceline_gpu::places::Places;
use paceline_gpu::snapshot::{JSON_BYTES_MAX, Snapshot};

use crate::exit::{Exit, Failure};
use crate::flags::fractions;

/// Where the files of a running machine are, for commands that look at one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub struct PlacesArgs {
    /// NVIDIA's management library [default: PACELINE_NVML_LIBRARY, else as the loader finds it]
    #[arg(long, value_name = "FILE")]
    pub nvml_library: Option<PathBuf>,
    /// Where the machine's /proc, /sys and /dev are [default: PACELINE_SYSTEM_ROOT, else /]
    #[arg(long, value_name = "DIR")]
    pub root: Option<PathBuf>,
}

impl PlacesArgs {
    /// The environment decides where the options say nothing.
    pub(super) fn find(&self) -> Places {
        let default = Places::from_env();
        Places {
            library: self.nvml_library.clone().or(default.library),
            root: self.root.clone().unwrap_or(default.root),
        }
    }
}

/// A machine to look at again and again.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct WatchArgs {
    /// How often to look, 0.1 to 60; rates are means over it
    #[arg(long, value_name = "SECONDS", value_parser = fractions(0.1..=60.0), default_value = "1")]
    pub interval: Duration,
    /// Where its files are.
    #[command(flatten)]
    pub places: PlacesArgs,
}

/// What is looked at: a machine, or a snapshot of one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub struct Source {
    /// Where its files are.
    #[command(flatten)]
    pub places: PlacesArgs,
    /// A saved snapshot, in place of this machine
    #[arg(long, value_name = "FILE", conflicts_with_all = ["nvml_library", "root"])]
    pub snapshot: Option<PathBuf>,
}

impl Source {
    /// The snapshot: taken now, or read.
    ///
    /// *Errors*: the file cannot be read or is no snapshot, which is wrong usage. A machine always has one.
    pub(super) fn snapshot(&self) -> Result<Snapshot, Failure> {
        let Some(path) = &self.snapshot else {
            return Ok(paceline_gpu::take(&self.places.find()));
        };
        let bytes = bounded(path)
            .map_err(|error| Failure::usage(format!("cannot read {}: {error}", path.display())))?;
        Snapshot::from_json(&bytes).map_err(|error| {
            let message = format!("{}: {error}", path.display());
            Failure::new(Exit::Usage, message, error.hint())
        })
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
    use crate::flags;

    fn told(words: &str) -> Result<Source, clap::Error> {
        let words = std::iter::once("x").chain(words.split_whitespace());
        let matches = flags::command::<Source>("x").try_get_matches_from(words)?;
        Ok(flags::read(&matches))
    }

    #[test]
    fn a_machine_or_a_file_is_looked_at() {
        let machine = told("--root /host --nvml-library /lib/x.so").expect("fine");
        let expect = Places {
            library: Some("/lib/x.so".into()),
            root: "/host".into(),
        };
        assert_eq!((machine.places.find(), machine.snapshot), (expect, None));
        let file = told("--snapshot a.json").expect("fine");
        assert_eq!(file.snapshot, Some("a.json".into()));
        told("--snapshot a.json --root /host").expect_err("one of them");
    }

    #[test]
    fn what_is_no_snapshot_is_wrong_usage() {
        let check = |path: &Path, expect: &str| {
            let snapshot = Some(path.to_owned());
            let source = Source {
                snapshot,
                ..Source::default()
            };
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
