//! What a check comes to: findings, which say what to do, and facts, which only say how it is.

use std::fmt;

pub(crate) use paceline_gpu::words::count;
use serde::{Deserialize, Serialize};

/// How much a finding matters. The order is that of printing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The job will not start, or will fail.
    Error,
    /// The job will run, and something will be slow or go wrong.
    Warning,
    /// Good to know.
    Note,
}

impl Severity {
    /// The word that stands in front of a finding.
    pub fn word(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Note => "note",
        }
    }
}

/// Something that a person should know before the job begins.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Finding {
    /// How much it matters.
    pub severity: Severity,
    /// Which check found it, such as `open files`.
    pub check: String,
    /// What was measured, in one sentence.
    pub what: String,
    /// What comes of it.
    pub why: String,
    /// What to type or change.
    pub fix: String,
    /// The nodes that it holds for; empty where there is only one.
    #[serde(default)]
    pub nodes: Vec<String>,
}

impl fmt::Display for Finding {
    /// Several lines for people, with a line end.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.severity.word(), self.what)?;
        if !self.nodes.is_empty() {
            writeln!(f, "  on:  {}", self.nodes.join(", "))?;
        }
        writeln!(f, "  why: {}", self.why)?;
        match self.fix.as_str() {
            "" => Ok(()),
            fix => writeln!(f, "  fix: {fix}"),
        }
    }
}

/// One line of the table of what was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Fact {
    /// Which check.
    pub check: &'static str,
    /// What it saw.
    pub value: String,
}

/// What checks write down as they go.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    pub(crate) findings: Vec<Finding>,
    pub(crate) facts: Vec<Fact>,
}

/// What one check writes on.
#[derive(Debug)]
pub(crate) struct Sheet<'a> {
    notes: &'a mut Notes,
    check: &'static str,
}

impl Notes {
    pub(crate) fn sheet(&mut self, check: &'static str) -> Sheet<'_> {
        Sheet { notes: self, check }
    }
}

impl Sheet<'_> {
    pub(crate) fn fact(&mut self, value: impl Into<String>) {
        let (check, value) = (self.check, value.into());
        self.notes.facts.push(Fact { check, value });
    }

    /// A finding whose severity is decided by the caller.
    pub(crate) fn add(
        &mut self,
        severity: Severity,
        what: impl Into<String>,
        why: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.notes.findings.push(Finding {
            severity,
            check: self.check.to_owned(),
            what: what.into(),
            why: why.into(),
            fix: fix.into(),
            nodes: Vec::new(),
        });
    }
}

macro_rules! findings {
    ($($name:ident $severity:ident),*) => {
        impl Sheet<'_> {
            $(pub(crate) fn $name(
                &mut self,
                what: impl Into<String>,
                why: impl Into<String>,
                fix: impl Into<String>,
            ) {
                self.add(Severity::$severity, what, why, fix);
            })*
        }
    };
}

findings!(error Error, warning Warning, note Note);

/// A number of bytes for people.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in UNITS {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    let digits = usize::from(value < 10.0 && value.fract() >= 0.05);
    format!("{value:.digits$} {unit}")
}

/// Text from a file or a peer, without what a terminal would obey, and of bounded length.
pub(crate) fn plain(text: &str) -> String {
    const CHARS_MAX: usize = 500;
    paceline_gpu::host::plain(text, CHARS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_two_digits_at_most_before_a_unit_is_left() {
        for (bytes, expect) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (64 << 20, "64 MiB"),
            (5 << 39, "2.5 TiB"),
            (u64::MAX, "16384 PiB"),
        ] {
            assert_eq!(size(bytes), expect);
        }
    }

    #[test]
    fn nothing_from_outside_moves_the_cursor_or_fills_the_screen() {
        assert_eq!(plain("a\u{1b}[31m\nb"), "a [31m b");
        assert_eq!(plain(&"x".repeat(9_000)).len(), 500);
    }
}
