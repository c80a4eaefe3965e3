//! The languages in which people are told things, and sentences in all of them, side by side.
//!
//! A [`Word`] stands in tables, [`say!`](say) writes a sentence with values. Both are refused by the compiler if the Korean is missing.
//! Machines are told English: JSON, files of errors, and what one process tells another.

mod advice;
mod lang;
mod phrases;

use std::fmt;

pub use advice::advice;
pub use lang::Lang;
pub use phrases::{count, counted, joined, plain, shortened, span};

/// A word or sentence in English and Korean; `{}` in it is for a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word(&'static str, &'static str);

impl Word {
    /// The same in both languages.
    #[must_use]
    pub const fn new(en: &'static str, ko: &'static str) -> Self {
        check(en, ko);
        Self(en, ko)
    }

    /// The word in this language.
    #[must_use]
    pub fn of(self, lang: Lang) -> &'static str {
        match lang {
            Lang::En => self.0,
            Lang::Ko => self.1,
        }
    }

    /// The text with these values in the places of `{}`, in their order.
    #[must_use]
    pub fn filled(self, lang: Lang, values: &[&str]) -> String {
        let mut parts = self.of(lang).split("{}");
        let mut text = parts.next().unwrap_or_default().to_owned();
        for (value, part) in values.iter().zip(parts) {
            text += value;
            text += part;
        }
        text
    }
}

/// A text in both languages, for a reader who is not known yet. Displays in English.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Text {
    en: String,
    ko: String,
}

impl Text {
    /// What a function says in each language.
    pub fn new(say: impl Fn(Lang) -> String) -> Self {
        Self {
            en: say(Lang::En),
            ko: say(Lang::Ko),
        }
    }

    /// The text in this language.
    #[must_use]
    pub fn of(&self, lang: Lang) -> &str {
        match lang {
            Lang::En => &self.en,
            Lang::Ko => &self.ko,
        }
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.en)
    }
}

/// A sentence in the language of the first argument, as a `String`, with the blanks and values of `format!`.
///
/// *Example*:
/// ```
/// use paceline_words::{Lang, say};
///
/// let told = |lang, rank: usize| say!(lang, "rank {rank} left early", "랭크 {rank}: 먼저 종료됨");
/// assert_eq!(told(Lang::Ko, 3), "랭크 3: 먼저 종료됨");
/// ```
///
/// A sentence without its Korean is not compiled:
/// ```compile_fail
/// let text = paceline_words::say!(paceline_words::Lang::Ko, "done", "done");
/// ```
#[macro_export]
macro_rules! say {
    ($lang:expr, $en:literal, $ko:literal $(, $values:expr)* $(,)?) => {{
        const _: () = $crate::check($en, $ko);
        match $lang {
            $crate::Lang::En => ::std::format!($en $(, $values)*),
            $crate::Lang::Ko => ::std::format!($ko $(, $values)*),
        }
    }};
}

/// Panics, in constants while they are compiled, unless the first text is English and the second Korean with as many `{}`.
#[doc(hidden)]
pub const fn check(en: &str, ko: &str) {
    assert!(
        !has_hangul(en),
        "the English of a sentence has Korean in it"
    );
    assert!(has_hangul(ko), "a sentence lacks its Korean");
    assert!(
        blanks(en) == blanks(ko),
        "a sentence has not as many values in Korean as in English"
    );
}

/// Whether there is a syllable of Hangul in the text, U+AC00 to U+D7A3: three bytes from EA B0 80 to ED 9E A3.
const fn has_hangul(text: &str) -> bool {
    let bytes = text.as_bytes();
    let mut at = 0;
    while at + 1 < bytes.len() {
        if matches!(
            (bytes[at], bytes[at + 1]),
            (0xEA, 0xB0..) | (0xEB | 0xEC, _) | (0xED, ..=0x9E)
        ) {
            return true;
        }
        at += 1;
    }
    false
}

const fn blanks(text: &str) -> usize {
    let bytes = text.as_bytes();
    let (mut at, mut count) = (0, 0);
    while at + 1 < bytes.len() {
        if bytes[at] == b'{' && bytes[at + 1] == b'}' {
            count += 1;
        }
        at += 1;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANKS: Word = Word::new("{} of {} ranks", "랭크 {}개 중 {}개");

    #[test]
    fn a_sentence_is_filled_in_its_language() {
        let rank = 3;
        let said = |lang| say!(lang, "rank {rank}: {:.1} s", "랭크 {rank}: {:.1}초", 0.25);
        assert_eq!(said(Lang::En), "rank 3: 0.2 s");
        assert_eq!(said(Lang::Ko), "랭크 3: 0.2초");
        assert_eq!(RANKS.filled(Lang::Ko, &["8", "2"]), "랭크 8개 중 2개");
    }

    #[test]
    fn a_translation_that_is_missing_or_has_other_values_is_found() {
        let check = |en: &'static str, ko: &'static str| {
            std::panic::catch_unwind(|| Word::new(en, ko)).is_ok()
        };
        assert!(check("rank {}", "랭크 {}"));
        assert!(check("a", "힣"));
        assert!(!check("rank", "rank"));
        assert!(
            !check("rank", "\u{3042}\u{d7ff}"),
            "neither kana nor old letters"
        );
        assert!(!check("랭크", "랭크"));
        assert!(!check("rank {}", "랭크"));
    }
}
