//! Makes a line safe to print between lines of other ranks: colours stay and end with the line, other control sequences go.
//!
//! A rank may move the cursor, clear the screen or set the terminal's title; on a console that several ranks share,
//! that would damage what the others have printed.

const ESC: u8 = 0x1b;
const RESET: &[u8] = b"\x1b[0m";

/// The kinds of text that stay in a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// Text and colours.
    Colours,
    /// Text only.
    Text,
}

/// Appends `line` without the sequences that may not stay.
pub(crate) fn clean(line: &[u8], keep: Keep, out: &mut Vec<u8>) {
    let is_control = |byte: &u8| (*byte < 0x20 && *byte != b'\t') || *byte == 0x7f || *byte == 0xc2;
    if !line.iter().any(is_control) {
        out.extend_from_slice(line);
        return;
    }
    let mut is_coloured = false;
    let mut rest = line;
    while let Some((&first, after)) = rest.split_first() {
        rest = match (first, after.first()) {
            (ESC, _) => {
                let length = sequence_length(rest);
                let (sequence, after) = rest.split_at(length);
                if keep == Keep::Colours && is_colour(sequence) {
                    out.extend_from_slice(sequence);
                    is_coloured = sequence != RESET && sequence != b"\x1b[m";
                }
                after
            }
            // The control characters beyond ASCII, as UTF-8: some terminals obey them as they obey ESC.
            (0xc2, Some(0x80..=0x9f)) => &after[1..],
            (byte, _) => {
                if (byte >= 0x20 && byte != 0x7f) || byte == b'\t' {
                    out.push(byte);
                }
                after
            }
        };
    }
    if is_coloured {
        out.extend_from_slice(RESET);
    }
}

/// Whether a line moves the cursor up, so that it overwrites lines before it: how nested progress bars are drawn.
pub(crate) fn moves_up(line: &[u8]) -> bool {
    let mut rest = line;
    while let Some(at) = rest.iter().position(|byte| *byte == ESC) {
        rest = &rest[at..];
        let (sequence, after) = rest.split_at(sequence_length(rest));
        if matches!(sequence, [ESC, b'[', .., b'A' | b'F']) {
            return true;
        }
        rest = after;
    }
    false
}

/// The length of the escape sequence at the start of `text`; all of it where it does not end.
fn sequence_length(text: &[u8]) -> usize {
    let behind = |from: usize, is_end: &dyn Fn(&u8) -> bool| {
        let tail = text.get(from..).unwrap_or_default();
        tail.iter()
            .position(is_end)
            .map_or(text.len(), |at| from + at + 1)
    };
    match text.get(1) {
        // CSI: parameters, then a final byte. A byte that is neither ends it without being part of it.
        Some(b'[') => {
            let length = behind(2, &|byte| !(0x20..=0x3f).contains(byte));
            match text[length - 1] {
                0x80.. | ..0x20 | 0x7f if length > 2 => length - 1,
                _ => length,
            }
        }
        // Titles, links and other strings, which end with BEL or with ESC \.
        Some(b']' | b'P' | b'X' | b'^' | b'_') => {
            let bell = behind(2, &|byte| *byte == 0x07);
            let end = text.windows(2).position(|pair| pair == b"\x1b\\");
            end.map_or(bell, |at| bell.min(at + 2))
        }
        // A character set: intermediate bytes, then a final one.
        Some(0x20..=0x2f) => behind(2, &|byte| !(0x20..=0x2f).contains(byte)),
        // A letter or digit; anything else is no part of it.
        Some(0x30..=0x7e) => 2,
        _ => 1,
    }
}

fn is_colour(sequence: &[u8]) -> bool {
    let is_parameter = |byte: &u8| byte.is_ascii_digit() || matches!(byte, b';' | b':');
    matches!(sequence, [ESC, b'[', parameters @ .., b'm'] if parameters.iter().all(is_parameter))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes ESC as `^` in both texts.
    fn check(line: &str, coloured: &str, plain: &str) {
        for (keep, expect) in [(Keep::Colours, coloured), (Keep::Text, plain)] {
            let mut out = Vec::new();
            clean(line.replace('^', "\x1b").as_bytes(), keep, &mut out);
            let got = String::from_utf8_lossy(&out).replace('\x1b', "^");
            assert_eq!(got, expect, "{line:?} {keep:?}");
        }
    }

    #[test]
    fn text_stays_as_it_is() {
        for text in ["", "plain", "tab\tand é and 🦀", "a£b"] {
            check(text, text, text);
        }
    }

    #[test]
    fn colours_end_with_the_line() {
        check("^[31mred", "^[31mred^[0m", "red");
        check(
            "^[1;38:5:9mred^[0m done",
            "^[1;38:5:9mred^[0m done",
            "red done",
        );
        check("^[32mgreen^[m", "^[32mgreen^[m", "green");
    }

    #[test]
    fn the_cursor_the_screen_and_the_title_are_not_the_ranks() {
        check("a^[2Kb^[10;3Hc^[?25ld", "abcd", "abcd");
        check("a^]0;title\x07b", "ab", "ab");
        check("a^]8;;http://x^\\link^]8;;^\\b", "alinkb", "alinkb");
        check("a^(Bb^7c^Md", "abcd", "abcd");
        check(
            "bell\x07 back\x08 null\0 delete\x7f",
            "bell back null delete",
            "bell back null delete",
        );
        check("a\u{9b}31mb", "a31mb", "a31mb");
    }

    #[test]
    fn a_sequence_that_does_not_end_takes_no_more_than_its_line() {
        check("a^[12;", "a", "a");
        check("a^]never ends", "a", "a");
        check("a^", "a", "a");
        check("a^[31éb", "aéb", "aéb");
        check("a^[31^[32mb", "a^[32mb^[0m", "ab");
        check("a^[", "a", "a");
    }

    #[test]
    fn a_line_that_moves_up_is_known() {
        let check = |line: &str, expect| {
            assert_eq!(
                moves_up(line.replace('^', "\x1b").as_bytes()),
                expect,
                "{line}"
            );
        };
        check("^[A", true);
        check("50%^[2A", true);
        check("^[1F", true);
        check("^[31mA^[0m", false);
        check("A", false);
        check("^]A\x07", false);
    }
}
