//! How text is laid out: columns, ranges of numbers, and words from outside.

use crate::words::runs;
use paceline_words::plain;

/// Longest word from outside that is shown, in characters.
const CHARS_MAX: usize = 100;

/// Text from outside, without what a terminal would obey, and of bounded length.
pub(super) fn shown(text: &str) -> String {
    plain(text, CHARS_MAX)
}

/// Numbers as the kernel lists CPUs: `0-3,8`.
pub(super) fn ranges(numbers: &[u32]) -> String {
    let part = |(first, last): (u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    let parts: Vec<String> = runs(numbers).into_iter().map(part).collect();
    parts.join(",")
}

/// `a`, `a and b`, `a, b and c`.
pub(super) fn listed(words: &[String]) -> String {
    match words {
        [] => String::new(),
        [word] => word.clone(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::columns::aligned;

    #[test]
    fn numbers_in_a_row_are_a_range() {
        let check = |numbers: &[u32], expect| assert_eq!(ranges(numbers), expect);
        check(&[], "");
        check(&[7], "7");
        check(&[0, 1, 2, 8, 10, 11], "0-2,8,10-11");
        check(&[3, 2, 2, u32::MAX, 0], "0,2-3,4294967295");
    }

    #[test]
    fn columns_stand_below_each_other_whatever_the_alphabet() {
        let row = |words: [&str; 2]| words.map(str::to_owned).to_vec();
        let text = aligned(&[row(["a", "b"]), row(["서버", "c"]), row(["", ""])]);
        assert_eq!(text, "a     b\n서버  c\n\n");
    }

    #[test]
    fn a_terminal_obeys_nothing_that_is_shown() {
        assert_eq!(shown("a\u{1b}[2Jb\nc"), "a [2Jb c");
        assert_eq!(shown(&"x".repeat(1000)).len(), CHARS_MAX);
    }
}
