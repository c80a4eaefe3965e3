//! Files that are no whole images, found before a job begins and left out.

use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::decode::{Pixels, file_bytes};
use crate::config::{BadSamples, TrainConfig};
use crate::data::error::left_out;
use crate::data::{DataError, DataProblem};

/// The file of a run directory with the images that were left out.
pub(crate) const FILE: &str = "bad-images.jsonl";

/// Maximum size of that file.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// An image that is left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BadImage {
    /// Its path within the image folder.
    path: String,
    /// What is wrong with it.
    problem: String,
}

/// Whether images that cannot be used are looked for.
#[derive(Debug)]
pub enum Inspection {
    /// They are not: the first that is read ends the job.
    None,
    /// Every image is read and decoded.
    All,
    /// They were when the run began.
    Known(KnownBad),
}

/// What is wrong with each image, by its path within the image folder.
#[derive(Debug, Default)]
pub struct KnownBad(HashMap<String, String>);

impl Inspection {
    /// What a job, or an evaluation, looks for. If the run `has_begun`, it keeps to the images that it began with, as far as its directory is within reach.
    ///
    /// *Errors*: a file in the run directory that cannot be read, or was changed.
    pub(crate) fn of_run(config: &TrainConfig, has_begun: bool) -> Result<Self, DataError> {
        let path = config.run_dir.join(FILE);
        match has_begun {
            true if config.bad_samples == BadSamples::Skip => match read(&path) {
                Ok(known) => Ok(known.map_or(Self::All, Self::Known)),
                Err(problem) => Err(problem.of(&path)),
            },
            _ => Ok(Self::of(config.bad_samples)),
        }
    }

    /// What is looked for in images that no run knows.
    pub(crate) fn of(bad_samples: BadSamples) -> Self {
        match bad_samples {
            BadSamples::Stop => Self::None,
            BadSamples::Skip => Self::All,
        }
    }

    /// The names in `folder`, which is in `root`, without those of files that are no whole images, and these.
    ///
    /// *Cost*: with [`All`](Self::All), one decoding of each, on all threads of rayon.
    ///
    /// *Errors*: a file that the system cannot read: its disk may fail, so it is not left out.
    pub(super) fn sort_out(
        &self,
        root: &Path,
        folder: &Path,
        names: Vec<Box<str>>,
    ) -> Result<(Vec<Box<str>>, Vec<BadImage>), DataError> {
        let known = match self {
            Self::None => return Ok((names, Vec::new())),
            Self::All => None,
            Self::Known(KnownBad(known)) => Some(known),
        };
        let inner = folder.strip_prefix(root).unwrap_or(folder);
        let path_of = |name: &str| inner.join(name).to_string_lossy().into_owned();
        let problem_of = |name: &str| match known {
            Some(known) => Ok(known.get(&path_of(name)).cloned()),
            None => {
                let file = folder.join(name);
                let bytes = file_bytes(&file).map_err(|problem| problem.of(&file))?;
                let decoded = Pixels::decode(&bytes);
                Ok(decoded.err().map(|problem| problem.message().to_owned()))
            }
        };
        let problems: Vec<Option<String>> =
            (names.par_iter().map(|name| problem_of(name))).collect::<Result<_, _>>()?;
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        for (name, problem) in names.into_iter().zip(problems) {
            match problem {
                None => good.push(name),
                Some(problem) => bad.push(BadImage {
                    path: path_of(&name),
                    problem,
                }),
            }
        }
        Ok((good, bad))
    }
}

/// The images in a file that [`to_text`] wrote; `None` if there is no such file.
fn read(path: &Path) -> Result<Option<KnownBad>, DataProblem> {
    let size = match path.metadata() {
        Ok(found) => found.len(),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(DataProblem::io(&error)),
    };
    if size > FILE_BYTES_MAX {
        return Err(DataProblem::too_large("bytes", size, FILE_BYTES_MAX));
    }
    let text = fs::read_to_string(path).map_err(|error| DataProblem::io(&error))?;
    let mut known = KnownBad::default();
    for (line, image) in (1..).zip(text.lines()) {
        let image: BadImage = serde_json::from_str(image).map_err(|error| {
            DataProblem::new(format!("line {line}: {error}"))
                .with_hint("begin a new run: this one needs the file to leave out the same images")
        })?;
        known.0.insert(image.path, image.problem);
    }
    Ok(Some(known))
}

/// The images as JSON lines.
pub(super) fn to_text(bad: &[BadImage]) -> String {
    let line = |image| serde_json::to_string(image).expect("it always encodes") + "\n";
    bad.iter().map(line).collect()
}

/// That these are left out of `folder`.
pub(super) fn warning(folder: &Path, bad: &[BadImage]) -> Option<String> {
    let first = bad.first()?.in_words();
    let text = left_out(folder, bad.len() as u64, "bad image", &first);
    Some(match bad {
        [_] => text,
        _ => format!("{text}; {FILE} in the run directory lists them"),
    })
}

impl BadImage {
    pub(super) fn in_words(&self) -> String {
        format!("{}: {}", self.path, self.problem)
    }
}
