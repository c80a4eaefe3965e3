//! The format of a value: reading it from a flag, a variable or a file, and describing what was expected.

use std::path::PathBuf;

use super::value::Value;

/// The format of a setting's value.
#[derive(Debug)]
pub enum Kind {
    /// One of these words.
    Word(&'static [&'static str]),
    /// Any text.
    Text,
    /// A path.
    Path,
    /// `true`, `false`, `auto`, or a path.
    PathOrSwitch,
    /// A whole number.
    Count {
        /// Smallest.
        min: u64,
        /// Largest.
        max: u64,
    },
    /// A whole number or a word.
    CountOr {
        /// The word.
        word: &'static str,
        /// Smallest.
        min: u64,
        /// Largest.
        max: u64,
    },
    /// A number.
    Number(Bounds),
    /// The same, or `none`.
    Optional(&'static Kind),
}

/// The bounds of a number.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    min: f64,
    min_is_in: bool,
    max: f64,
}

impl Bounds {
    /// From `min` to `max`, both included.
    pub(super) const fn from(min: f64, max: f64) -> Self {
        Self {
            min,
            min_is_in: true,
            max,
        }
    }

    /// Above `min`, up to `max`.
    pub(super) const fn above(min: f64, max: f64) -> Self {
        Self {
            min,
            min_is_in: false,
            max,
        }
    }

    /// Also false for NaN.
    fn contains(&self, number: f64) -> bool {
        let above_min = if self.min_is_in {
            number >= self.min
        } else {
            number > self.min
        };
        above_min && number <= self.max
    }
}

/// A value as written.
#[derive(Clone, Copy, Debug)]
pub(super) enum Written<'a> {
    /// In a flag or a variable, where everything is text.
    Bare(&'a str),
    /// A TOML string.
    String(&'a str),
    /// A TOML number in decimal digits.
    Number(&'a str),
    /// A TOML boolean.
    Boolean(bool),
    /// Any other TOML value.
    Other,
}

impl<'a> Written<'a> {
    fn text(self) -> Option<&'a str> {
        match self {
            Self::Bare(text) | Self::String(text) => Some(text),
            Self::Number(_) | Self::Boolean(_) | Self::Other => None,
        }
    }

    fn number(self) -> Option<&'a str> {
        match self {
            Self::Bare(text) | Self::Number(text) => Some(text),
            Self::String(_) | Self::Boolean(_) | Self::Other => None,
        }
    }

    /// `1` and `0` are common in the environment.
    fn switch(self) -> Option<bool> {
        match self {
            Self::Boolean(switch) => Some(switch),
            Self::Bare("true" | "1") => Some(true),
            Self::Bare("false" | "0") => Some(false),
            _ => None,
        }
    }
}

impl Kind {
    /// The value, or `None` if it is not of this kind or out of range.
    pub(super) fn read(&self, written: Written<'_>) -> Option<Value> {
        match self {
            Self::Word(words) => {
                let text = written.text()?;
                words.contains(&text).then(|| Value::Word(text.to_owned()))
            }
            Self::Text => written
                .text()
                .filter(|text| !text.is_empty())
                .map(|text| Value::Text(text.to_owned())),
            Self::Path => read_path(written),
            Self::PathOrSwitch => match written.text() {
                Some("auto") => Some(Value::Word("auto".to_owned())),
                _ => (written.switch().map(Value::Switch)).or_else(|| read_path(written)),
            },
            Self::Count { min, max } => read_count(written, *min, *max),
            Self::CountOr { word, min, max } => match written.text() {
                Some(text) if text == *word => Some(Value::Word(text.to_owned())),
                _ => read_count(written, *min, *max),
            },
            Self::Number(bounds) => {
                let number: f64 = written.number()?.parse().ok()?;
                bounds.contains(number).then_some(Value::Number(number))
            }
            Self::Optional(kind) => match written.text() {
                Some("none") => Some(Value::Unset),
                _ => kind.read(written),
            },
        }
    }

    /// Describes a valid value, to follow the word "expected".
    pub(super) fn expected(&self) -> String {
        match self {
            Self::Word(words) => format!("one of {}", words.join(", ")),
            Self::Text => "a text".to_owned(),
            Self::Path => "a path".to_owned(),
            Self::PathOrSwitch => "true, false, auto or a path".to_owned(),
            Self::Count { min, max } => format!("a whole number {}", span(*min, *max)),
            Self::CountOr { word, min, max } => {
                format!("{word} or a whole number {}", span(*min, *max))
            }
            Self::Number(Bounds {
                min,
                min_is_in: true,
                max,
            }) => {
                format!("a number from {min} to {max}")
            }
            Self::Number(Bounds {
                min,
                min_is_in: false,
                max,
            }) => {
                format!("a number above {min}, up to {max}")
            }
            Self::Optional(kind) => format!("none or {}", kind.expected()),
        }
    }

    /// The placeholder in the help: `N`, `PATH`, `auto|shm|tcp`.
    #[must_use]
    pub fn placeholder(&self) -> String {
        match self {
            Self::Word(words) => words.join("|"),
            Self::Text => "NAME".to_owned(),
            Self::Path => "PATH".to_owned(),
            Self::PathOrSwitch => "DIR|auto".to_owned(),
            Self::Count { .. } => "N".to_owned(),
            Self::CountOr { word, .. } => format!("N|{word}"),
            Self::Number(_) => "X".to_owned(),
            Self::Optional(kind) => kind.placeholder(),
        }
    }

    /// The words allowed as a value.
    pub(super) fn words(&self) -> &'static [&'static str] {
        match self {
            Self::Word(words) => words,
            _ => &[],
        }
    }

    /// Whether the flag may be given without a value, as a switch.
    #[must_use]
    pub fn is_switch(&self) -> bool {
        matches!(self, Self::PathOrSwitch)
    }
}

fn read_path(written: Written<'_>) -> Option<Value> {
    let text = written.text().filter(|text| !text.is_empty())?;
    Some(Value::Path(PathBuf::from(text)))
}

fn read_count(written: Written<'_>, min: u64, max: u64) -> Option<Value> {
    let count: u64 = written.number()?.parse().ok()?;
    (min..=max).contains(&count).then_some(Value::Count(count))
}

/// The range in words; the largest bound is abbreviated.
fn span(min: u64, max: u64) -> String {
    if max == i64::MAX as u64 {
        format!("from {min} to 2^63 - 1")
    } else {
        format!("from {min} to {max}")
    }
}
