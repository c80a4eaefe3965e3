//! The settings of a job, from the user's input to the effective values.

mod checks;
mod precedence;
mod resuming;
mod text;
mod values;

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use paceline_ddp::device::{DeviceError, DeviceKind, Survey};

use super::*;

/// The tests do not read the disk of the machine that runs them.
fn path_kind(path: &Path) -> PathKind {
    match path.file_name().and_then(|name| name.to_str()) {
        Some("mnist") => PathKind::Folder,
        Some("wine.csv" | "notes.txt") => PathKind::File,
        _ => PathKind::Missing,
    }
}

/// Nor its devices: the fake machine has two CUDA GPUs and no others.
fn survey(kind: DeviceKind) -> Result<Survey, DeviceError> {
    match kind {
        DeviceKind::Cuda => Ok(Survey {
            kind,
            count: 2,
            software: None,
        }),
        _ => Err(DeviceError::NotBuilt { kind }),
    }
}

fn surroundings() -> Surroundings {
    Surroundings {
        cores: 8,
        folder: PathBuf::from("/home/ada"),
        now: SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_253_405),
        path_kind,
        survey,
        job: None,
    }
}

fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
}

fn file(path: &str, text: &str) -> FileText {
    FileText {
        path: PathBuf::from(path),
        text: text.to_owned(),
    }
}

/// Inputs of flags and the text of a file `train.toml`.
fn inputs(flags: &[(&str, &str)], environment: &[(&str, &str)], text: Option<&str>) -> Inputs {
    Inputs {
        flags: pairs(flags),
        environment: pairs(environment),
        file: text.map(|text| file("train.toml", text)),
        program: None,
    }
}

fn resolve(inputs: &Inputs) -> Result<Resolved, ConfigError> {
    Given::read(inputs)?.resolve(None, &surroundings())
}

fn with_flags(flags: &[(&str, &str)]) -> Result<Resolved, ConfigError> {
    resolve(&inputs(flags, &[], None))
}

/// The error and its hint, as a user reads them.
fn complaint(result: Result<Resolved, ConfigError>) -> String {
    let error = result
        .map(|resolved| resolved.explain())
        .expect_err("refused");
    match error.hint() {
        Some(hint) => format!("{error}\nhint: {hint}"),
        None => error.to_string(),
    }
}

/// A saved run in `folder` that was started with these flags.
fn saved_run(folder: &str, flags: &[(&str, &str)]) -> SavedRun {
    let text = with_flags(flags).expect("a valid first start").to_toml();
    SavedRun {
        folder: PathBuf::from(folder),
        settings: file(&format!("{folder}/config.toml"), &text),
    }
}
