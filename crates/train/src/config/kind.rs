//! The format of a value: reading it from a flag, a variable or a file, and describing what was expected.

use paceline_ddp::CommHook;
use paceline_nn::Recompute;

use super::value::Value;

/// The format of a setting's value.
#[derive(Debug)]
pub enum Kind {
    /// One of these words.
    Word(&'static [&'static str]),
    /// Any text.
    Text,
    /// The recomputed blocks.
    Recompute,
    /// The communication hook.
    CommHook,
    /// `true` or `false`.
    Switch,
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
    /// A number.
    Number {
        /// Smallest.
        min: f64,
        /// Largest.
        max: f64,
    },
    /// A number above a bound.
    NumberAbove {
        /// The bound.
        min: f64,
        /// Largest.
        max: f64,
    },
    /// The same, or `auto`.
    Auto(&'static Kind),
    /// The same, or `none`.
    Optional(&'static Kind),
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
                words.contains(&text).then(|| text.into())
            }
            Self::Text => written
                .text()
                .filter(|text| !text.is_empty())
                .map(Value::from),
            Self::Recompute => {
                let text = written.text().or_else(|| written.number())?;
                text.parse::<Recompute>().ok().map(|_| text.into())
            }
            Self::CommHook => {
                let text = written.text()?;
                text.parse::<CommHook>().ok().map(|_| text.into())
            }
            Self::Switch => written.switch().map(Value::Switch),
            Self::Path => written
                .text()
                .filter(|text| !text.is_empty())
                .map(|text| Value::Path(text.into())),
            Self::PathOrSwitch => match written.text() {
                Some("auto") => Some("auto".into()),
                _ => (written.switch().map(Value::Switch)).or_else(|| Self::Path.read(written)),
            },
            Self::Count { min, max } => {
                let count: u64 = written.number()?.parse().ok()?;
                (*min..=*max).contains(&count).then_some(count.into())
            }
            Self::Number { min, max } => {
                let number: f64 = written.number()?.parse().ok()?;
                (*min..=*max)
                    .contains(&number)
                    .then_some(Value::Number(number))
            }
            Self::NumberAbove { min, max } => {
                let number: f64 = written.number()?.parse().ok()?;
                (number > *min && number <= *max).then_some(Value::Number(number))
            }
            Self::Auto(kind) => match written.text() {
                Some("auto") => Some("auto".into()),
                _ => kind.read(written),
            },
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
            Self::Recompute => "blocks, burn or a whole number from 1".to_owned(),
            Self::CommHook => CommHook::EXPECTED.to_owned(),
            Self::Switch => "true or false".to_owned(),
            Self::Path => "a path".to_owned(),
            Self::PathOrSwitch => "true, false, auto or a path".to_owned(),
            Self::Count { min, max } => format!("a whole number {}", span(*min, *max)),
            Self::Number { min, max } => format!("a number from {min} to {max}"),
            Self::NumberAbove { min, max } => format!("a number above {min}, up to {max}"),
            Self::Auto(kind) => format!("auto or {}", kind.expected()),
            Self::Optional(kind) => format!("none or {}", kind.expected()),
        }
    }

    /// The placeholder in the help: `N`, `PATH`, `auto|shm|tcp`.
    #[must_use]
    pub fn placeholder(&self) -> String {
        match self {
            Self::Word(words) => words.join("|"),
            Self::Text | Self::Recompute | Self::CommHook => "NAME".to_owned(),
            Self::Switch => "true|false".to_owned(),
            Self::Path => "PATH".to_owned(),
            Self::PathOrSwitch => "DIR|auto".to_owned(),
            Self::Count { .. } => "N".to_owned(),
            Self::Number { .. } | Self::NumberAbove { .. } => "X".to_owned(),
            Self::Auto(kind) => format!("{}|auto", kind.placeholder()),
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
        matches!(self, Self::Switch | Self::PathOrSwitch)
    }
}

/// The range in words; the largest bound is abbreviated.
fn span(min: u64, max: u64) -> String {
    if max == i64::MAX as u64 {
        format!("from {min} to 2^63 - 1")
    } else {
        format!("from {min} to {max}")
    }
}
