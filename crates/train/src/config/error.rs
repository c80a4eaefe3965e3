//! Errors in settings, for the person who wrote them.

use paceline_rendezvous::env;

use super::table::{OPTIONS, OptionRow, synonym};
use super::value::Source;

/// Why the settings of a job cannot be used. The user can correct all of them: exit code 2.
///
/// Values are quoted as they were written, with their source.
#[derive(thiserror::Error)]
#[error("{message}")]
pub struct ConfigError {
    message: String,
    hint: Option<String>,
}

impl ConfigError {
    /// Advice, if there is any.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        self.hint.clone()
    }

    pub(super) fn new(message: String, hint: impl Into<String>) -> Self {
        let hint = Some(hint.into());
        Self { message, hint }
    }

    pub(super) fn without_hint(message: String) -> Self {
        let hint = None;
        Self { message, hint }
    }

    pub(super) fn unknown_key(key: &str, origin: &Source) -> Self {
        let nearest = synonym(key).map(|row| row.key).or_else(|| {
            let key = key.to_lowercase().replace('-', "_");
            env::nearest(&key, OPTIONS.iter().map(|row| row.key))
        });
        let unlisted = || "`--help` lists the settings".to_owned();
        Self::new(
            format!("unknown setting `{key}` ({origin})"),
            nearest.map_or_else(unlisted, did_you_mean),
        )
    }

    pub(super) fn bad_value(row: &'static OptionRow, value: &str, origin: &Source) -> Self {
        let words = row.kind.words().iter().copied();
        let nearest = env::nearest(value.trim_matches('"'), words);
        let (key, expected) = (row.key, row.kind.expected());
        Self::new(
            format!("invalid value `{value}` for `{key}` ({origin}): expected {expected}"),
            nearest.map_or_else(|| about(row), did_you_mean),
        )
    }
}

paceline_rendezvous::debug_with_hint!(ConfigError);

fn did_you_mean(name: &str) -> String {
    format!("did you mean `{name}`?")
}

pub(super) fn about(row: &'static OptionRow) -> String {
    format!(
        "`{}`: {} [default: {}]",
        row.key,
        row.help,
        row.fallback_text()
    )
}
