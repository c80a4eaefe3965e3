//! Counts, lists, ranges and foreign text within sentences.

use std::fmt::Display;

use crate::{Lang, say};

/// "1 rank", "3 processes", "랭크 3개".
pub fn count(lang: Lang, number: usize, en: &str, ko: &str) -> String {
    match lang {
        Lang::En => counted(number, en),
        Lang::Ko => format!("{ko} {number}개"),
    }
}

/// `1 GPU`, `2 GPUs`, `3 processes`: where all is English.
#[must_use]
pub fn counted(number: usize, noun: &str) -> String {
    let plural = match noun {
        _ if number == 1 => "",
        _ if noun.ends_with('s') || noun.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{number} {noun}{plural}")
}

/// "a", "a and b", "a, b and c", "a, b and 7 more"; "a, b 외 7개". At most so many of the words.
pub fn joined(words: Vec<String>, most: usize, lang: Lang) -> String {
    match (lang, words.as_slice()) {
        (Lang::En, [rest @ .., last]) if !rest.is_empty() && words.len() <= most => {
            format!("{} and {last}", rest.join(", "))
        }
        _ => shortened(words, most, lang),
    }
}

/// "a", "a, b", "a, b and 7 more"; "a, b 외 7개". At most so many of the words.
pub fn shortened(mut words: Vec<String>, most: usize, lang: Lang) -> String {
    let more = words.len().saturating_sub(most);
    words.truncate(most);
    let shown = words.join(", ");
    match more {
        0 => shown,
        _ => say!(lang, "{shown} and {more} more", "{shown} 외 {more}개"),
    }
}

/// "4 to 7", "4~7".
pub fn span(first: impl Display, last: impl Display, lang: Lang) -> String {
    match lang {
        Lang::En => format!("{first} to {last}"),
        Lang::Ko => format!("{first}~{last}"),
    }
}

/// Text from outside without what a terminal would obey, and of at most so many characters.
#[must_use]
pub fn plain(text: &str, chars_max: usize) -> String {
    let harmless = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().take(chars_max).map(harmless).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nouns_have_their_plural() {
        for (number, noun, expect) in [
            (0, "rank", "0 ranks"),
            (1, "process", "1 process"),
            (2, "process", "2 processes"),
            (2, "NVSwitch", "2 NVSwitches"),
        ] {
            assert_eq!(count(Lang::En, number, noun, "랭크"), expect);
        }
        assert_eq!(count(Lang::Ko, 1, "rank", "랭크"), "랭크 1개");
    }

    #[test]
    fn lists_are_cut_short() {
        let check = |number, en: &str, en_shortened: &str, ko: &str| {
            let words: Vec<String> = (0..number).map(|word: u32| word.to_string()).collect();
            assert_eq!(joined(words.clone(), 3, Lang::En), en);
            assert_eq!(shortened(words.clone(), 3, Lang::En), en_shortened);
            for cut in [joined, shortened] {
                assert_eq!(cut(words.clone(), 3, Lang::Ko), ko);
            }
        };
        check(0, "", "", "");
        check(1, "0", "0", "0");
        check(3, "0, 1 and 2", "0, 1, 2", "0, 1, 2");
        check(
            5,
            "0, 1, 2 and 2 more",
            "0, 1, 2 and 2 more",
            "0, 1, 2 외 2개",
        );
    }
}
