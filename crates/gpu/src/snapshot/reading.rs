//! A value that was read, or why it is missing: one missing value never hides the rest.

use std::fmt;

use serde::{Deserialize, Serialize};

use paceline_words::plain;

/// A value as it was read, or why it is missing. As JSON the value itself, or `{"missing": why}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Reading<T> {
    /// It is missing.
    Missing {
        /// Why.
        missing: Gap,
    },
    /// The value.
    Known(T),
}

/// Why there is no value.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gap {
    /// It was not asked for.
    #[default]
    NotRead,
    /// The device, or the system, does not have it.
    NotSupported,
    /// This user may not know.
    NoPermission,
    /// The driver is too old to be asked.
    NoFunction,
    /// The device does not answer any more: it fell off the bus.
    Lost,
    /// Something else, in the words of the driver or the system; bounded, without control characters.
    Other(String),
}

impl<T> Default for Reading<T> {
    fn default() -> Self {
        Self::missing(Gap::default())
    }
}

impl<T> From<T> for Reading<T> {
    fn from(value: T) -> Self {
        Self::Known(value)
    }
}

impl<T> From<Result<T, Gap>> for Reading<T> {
    fn from(result: Result<T, Gap>) -> Self {
        match result {
            Ok(value) => Self::Known(value),
            Err(missing) => Self::missing(missing),
        }
    }
}

impl<T> Reading<T> {
    /// No value, and why.
    pub fn missing(missing: Gap) -> Self {
        Self::Missing { missing }
    }

    /// The value, where there is one.
    pub fn known(&self) -> Option<&T> {
        match self {
            Self::Known(value) => Some(value),
            Self::Missing { .. } => None,
        }
    }

    /// Why there is no value.
    pub fn gap(&self) -> Option<&Gap> {
        match self {
            Self::Known(_) => None,
            Self::Missing { missing } => Some(missing),
        }
    }

    /// The same for another value.
    pub fn map<U>(self, change: impl FnOnce(T) -> U) -> Reading<U> {
        match self {
            Self::Known(value) => Reading::Known(change(value)),
            Self::Missing { missing } => Reading::missing(missing),
        }
    }
}

/// A struct whose readings are all missing for one reason, with its other fields behind a semicolon.
macro_rules! all_missing {
    ($gap:expr, $name:ident { $($reading:ident),*; $($others:tt)* }) => {
        $name { $($reading: $crate::snapshot::Reading::missing($gap.clone()),)* $($others)* }
    };
}
pub(crate) use all_missing;

impl Gap {
    /// Longest text of [`Gap::Other`], in characters.
    pub const CHARS_MAX: usize = 200;

    /// Another reason, without what a terminal would obey, and of bounded length.
    pub fn other(text: impl fmt::Display) -> Self {
        Self::Other(plain(&text.to_string(), Self::CHARS_MAX))
    }
}

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotRead => "not read",
            Self::NotSupported => "not supported",
            Self::NoPermission => "no permission",
            Self::NoFunction => "the driver is too old to tell",
            Self::Lost => "the device is lost",
            Self::Other(text) => text,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reading_is_its_value_or_says_why_there_is_none() {
        let check = |reading: Reading<u32>, json: &str| {
            assert_eq!(serde_json::to_string(&reading).expect("encodes"), json);
            let back: Reading<u32> = serde_json::from_str(json).expect("decodes");
            assert_eq!(back, reading);
        };
        check(7.into(), "7");
        check(Err(Gap::Lost).into(), r#"{"missing":"lost"}"#);
        check(
            Err(Gap::other("odd\u{1b}[m")).into(),
            r#"{"missing":{"other":"odd [m"}}"#,
        );
    }
}
