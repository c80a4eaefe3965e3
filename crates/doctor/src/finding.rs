//! What a check comes to: findings, which say what to do, and facts, which only say how it is.

use std::fmt;

use paceline_words::{Lang, Word, say};
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
    pub fn word(self, lang: Lang) -> &'static str {
        const ERROR: Word = Word::new("error", "오류");
        const WARNING: Word = Word::new("warning", "경고");
        const NOTE: Word = Word::new("note", "참고");
        let word = match self {
            Self::Error => ERROR,
            Self::Warning => WARNING,
            Self::Note => NOTE,
        };
        word.of(lang)
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

impl Finding {
    /// Several lines for people, with a line end. The sentences are in the language in which they were found.
    pub fn text(&self, lang: Lang) -> String {
        let (severity, what) = (self.severity.word(lang), &self.what);
        let mut text = format!("{severity}: {what}\n");
        if !self.nodes.is_empty() {
            let nodes = self.nodes.join(", ");
            text += &say!(lang, "  on:  {nodes}\n", "  노드: {nodes}\n");
        }
        let (why, fix) = (&self.why, &self.fix);
        text += &say!(lang, "  why: {why}\n", "  이유: {why}\n");
        if !fix.is_empty() {
            text += &say!(lang, "  fix: {fix}\n", "  조치: {fix}\n");
        }
        text
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(Lang::En))
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
    /// The language of all of it.
    pub(crate) lang: Lang,
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
    pub(crate) fn new(lang: Lang) -> Self {
        Self {
            lang,
            ..Self::default()
        }
    }

    pub(crate) fn sheet(&mut self, check: Word) -> Sheet<'_> {
        let check = check.of(self.lang);
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
    paceline_words::plain(text, CHARS_MAX)
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
