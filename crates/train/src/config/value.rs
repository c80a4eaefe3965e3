//! A setting's value and its source.

use std::fmt;
use std::path::PathBuf;

/// A value of any setting.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Nothing was set.
    Unset,
    /// A word, or any text.
    Text(String),
    /// A path.
    Path(PathBuf),
    /// A whole number, at most `i64::MAX`.
    Count(u64),
    /// A finite number.
    Number(f64),
    /// On or off.
    Switch(bool),
}

impl Value {
    /// The value in a TOML file; `None` if not set.
    pub(super) fn to_toml(&self) -> Option<toml::Value> {
        let value = match self {
            Self::Unset => return None,
            Self::Text(text) => toml::Value::String(text.clone()),
            Self::Path(path) => toml::Value::String(path.to_string_lossy().into_owned()),
            Self::Count(count) => toml::Value::Integer(
                i64::try_from(*count).expect("no kind reads more than i64::MAX"),
            ),
            Self::Number(number) => toml::Value::Float(*number),
            Self::Switch(switch) => toml::Value::Boolean(*switch),
        };
        Some(value)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<u64> for Value {
    fn from(count: u64) -> Self {
        Self::Count(count)
    }
}

impl fmt::Display for Value {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unset => out.write_str("none"),
            Self::Text(text) => out.write_str(text),
            Self::Path(path) => path.display().fmt(out),
            Self::Count(count) => count.fmt(out),
            Self::Number(number) => number.fmt(out),
            Self::Switch(switch) => switch.fmt(out),
        }
    }
}

/// The source of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A flag of the command line, such as `--epochs`.
    Flag(String),
    /// An environment variable, such as `PACELINE_LR`.
    Environment(String),
    /// A line of the settings file.
    File {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
    },
    /// The saved settings of the resumed run, in this file.
    Run(PathBuf),
    /// The launcher of this rank.
    Launcher,
    /// Nothing set it.
    Default,
}

impl fmt::Display for Source {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(flag) => write!(out, "flag {flag}"),
            Self::Environment(variable) => write!(out, "environment {variable}"),
            Self::File { path, line } => write!(out, "file {}:{line}", path.display()),
            Self::Run(path) => write!(out, "run {}", path.display()),
            Self::Launcher => out.write_str("launcher of this rank"),
            Self::Default => out.write_str("default"),
        }
    }
}

/// A value with its source.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// The value.
    pub value: Value,
    /// Where it came from.
    pub source: Source,
    /// How the value follows from the source, if it is derived.
    pub note: Option<String>,
}

impl Setting {
    pub(super) fn new(value: Value, source: Source) -> Self {
        Self {
            value,
            source,
            note: None,
        }
    }

    pub(super) fn noted(value: Value, source: Source, note: impl Into<String>) -> Self {
        Self {
            note: Some(note.into()),
            ..Self::new(value, source)
        }
    }

    /// The source and how the value follows from it: `default (one per rank)`.
    #[must_use]
    pub fn origin(&self) -> String {
        match &self.note {
            Some(note) => format!("{} ({note})", self.source),
            None => self.source.to_string(),
        }
    }

    /// The value and its source, for an error: `64 (default)`.
    pub(super) fn cite(&self) -> String {
        format!("{} ({})", self.value, self.source)
    }
}
