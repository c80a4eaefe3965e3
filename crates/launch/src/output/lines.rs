//! Bytes in, lines out: cuts a stream into lines of bounded length and tells a progress bar's redraws from lines.
//!
//! A line ends with `\n` or `\r\n`. A `\r` alone takes the cursor back to the start of the line, so the text
//! behind it overwrites the text before it: only the last state is a line. Nested bars also move the cursor up to
//! lines that they have ended: such lines are redraws too. At the stream's end the rest is a line.

use super::escapes;

/// Longer lines are cut here, so that a stream without a newline needs bounded memory.
pub(crate) const LINE_BYTES_MAX: usize = 64 * 1024;

/// A part of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Piece<'a> {
    /// A line, without its ending.
    Line(&'a [u8]),
    /// A state of a progress bar that another one has overwritten.
    Overwritten(&'a [u8]),
    /// A line that stands, until a later piece overwrites it, where an earlier one stood.
    Redrawn(&'a [u8]),
}

/// The state between two reads of one stream.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    pending: Vec<u8>,
    /// A `\r` was the last byte: the next byte tells whether the line ends or starts over.
    returned: bool,
    /// Something on this line moved the cursor up.
    moved: bool,
}

impl Lines {
    /// Takes the next bytes and calls `sink` with every piece that is complete.
    pub(crate) fn push(&mut self, mut bytes: &[u8], mut sink: impl FnMut(Piece<'_>)) {
        while let Some(&first) = bytes.first() {
            if self.returned && !matches!(first, b'\r' | b'\n') {
                self.start_over(&mut sink);
            }
            let end = bytes
                .iter()
                .position(|byte| matches!(byte, b'\r' | b'\n'))
                .unwrap_or(bytes.len());
            self.append(&bytes[..end], &mut sink);
            match bytes.get(end) {
                Some(b'\r') => self.returned = true,
                Some(_) => self.end_line(&mut sink),
                None => return,
            }
            bytes = &bytes[end + 1..];
        }
    }

    /// The line that has begun and not ended.
    pub(crate) fn unfinished(&self) -> &[u8] {
        &self.pending
    }

    /// The stream has ended: the rest is a line.
    pub(crate) fn finish(&mut self, mut sink: impl FnMut(Piece<'_>)) {
        if !self.pending.is_empty() {
            self.end_line(&mut sink);
        }
        *self = Self::default();
    }

    fn end_line(&mut self, sink: &mut impl FnMut(Piece<'_>)) {
        if self.moved || escapes::moves_up(&self.pending) {
            sink(Piece::Redrawn(&self.pending));
        } else {
            sink(Piece::Line(&self.pending));
        }
        self.pending.clear();
        self.returned = false;
        self.moved = false;
    }

    fn start_over(&mut self, sink: &mut impl FnMut(Piece<'_>)) {
        if !self.pending.is_empty() {
            sink(Piece::Overwritten(&self.pending));
        }
        self.moved |= escapes::moves_up(&self.pending);
        self.pending.clear();
        self.returned = false;
    }

    fn append(&mut self, mut text: &[u8], sink: &mut impl FnMut(Piece<'_>)) {
        while self.pending.len() + text.len() > LINE_BYTES_MAX {
            let (now, later) = text.split_at(LINE_BYTES_MAX - self.pending.len());
            self.pending.extend_from_slice(now);
            let cut = character_boundary(&self.pending);
            sink(Piece::Line(&self.pending[..cut]));
            self.pending.drain(..cut);
            text = later;
        }
        self.pending.extend_from_slice(text);
    }
}

/// Where to cut so that no UTF-8 character is torn; the whole length if the text is not UTF-8 there.
fn character_boundary(text: &[u8]) -> usize {
    let torn = text.utf8_chunks().last().map_or(0, |chunk| {
        let end = std::str::from_utf8(chunk.invalid());
        let is_cut = end.is_err_and(|error| error.error_len().is_none());
        if is_cut { chunk.invalid().len() } else { 0 }
    });
    if torn < text.len() {
        text.len() - torn
    } else {
        torn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cuts `input` in one piece, then byte by byte: the pieces must be the same. `~` marks what was overwritten and
    /// `^` a redrawn line, in the input ESC.
    fn check_all(input: &str, expect: &[&str]) {
        let input = input.replace('^', "\x1b");
        for step in [input.len().max(1), 1] {
            let mut lines = Lines::default();
            let mut seen = Vec::new();
            let mut sink = |piece: Piece<'_>| {
                let (mark, line) = match piece {
                    Piece::Line(line) => ("", line),
                    Piece::Overwritten(line) => ("~", line),
                    Piece::Redrawn(line) => ("^", line),
                };
                seen.push(format!("{mark}{}", String::from_utf8_lossy(line)).replace('\x1b', "^"));
            };
            for bytes in input.as_bytes().chunks(step) {
                lines.push(bytes, &mut sink);
            }
            lines.finish(&mut sink);
            assert_eq!(seen, expect, "{input:?} in pieces of {step}");
        }
    }

    /// The same for what stays.
    fn check(input: &str, expect: &[&str]) {
        let mut lines = Lines::default();
        let mut seen = Vec::new();
        let mut sink = |piece: Piece<'_>| {
            if let Piece::Line(line) = piece {
                seen.push(String::from_utf8_lossy(line).into_owned());
            }
        };
        lines.push(input.as_bytes(), &mut sink);
        lines.finish(&mut sink);
        assert_eq!(seen, expect, "{input:?}");
    }

    #[test]
    fn lines_end_with_a_newline() {
        check_all("", &[]);
        check_all("one\ntwo\n", &["one", "two"]);
        check_all("one\r\ntwo\r\n", &["one", "two"]);
        check_all("\n\nx\n", &["", "", "x"]);
    }

    #[test]
    fn the_rest_at_the_end_is_a_line() {
        check_all("one\ntwo", &["one", "two"]);
        check_all("two\r", &["two"]);
    }

    #[test]
    fn only_the_last_redraw_of_a_progress_bar_stays() {
        check("10%\r50%\r100%\n", &["100%"]);
        check("\r10%\r50%\r100%", &["100%"]);
        check("10%\r100%\r\nnext\n", &["100%", "next"]);
        check("10%\r100%\r\r\nnext\n", &["100%", "next"]);
        check("step 1\n10%\r20%\rstep 2\n", &["step 1", "step 2"]);
    }

    #[test]
    fn the_states_of_a_progress_bar_are_told_from_lines() {
        check_all("10%\r50%\r100%\nend\n", &["~10%", "~50%", "100%", "end"]);
        check_all("\r10%\r20%", &["~10%", "20%"]);
    }

    #[test]
    fn nested_bars_are_redrawn_lines() {
        check_all(
            "a 0%\n\r b 0%^[A\r a 1%\n\r b 9%^[A\nend\n",
            &["a 0%", "~ b 0%^[A", "^ a 1%", "^ b 9%^[A", "end"],
        );
    }

    #[test]
    fn a_long_line_is_cut_between_characters() {
        let mut lines = Lines::default();
        let mut seen: Vec<String> = Vec::new();
        let text = format!("x{}", "é".repeat(LINE_BYTES_MAX));
        let mut sink = |piece: Piece<'_>| match piece {
            Piece::Line(line) => {
                seen.push(String::from_utf8(line.to_vec()).expect("whole characters"))
            }
            other => panic!("{other:?}"),
        };
        lines.push(text.as_bytes(), &mut sink);
        lines.finish(&mut sink);
        assert_eq!(seen.concat(), text);
        assert!(seen.iter().all(|line| line.len() <= LINE_BYTES_MAX));
        assert_eq!(seen.len(), 3);
    }

    #[test]
    fn bytes_that_are_no_text_are_cut_at_the_bound() {
        let mut lines = Lines::default();
        let mut seen = Vec::new();
        let mut sink = |piece: Piece<'_>| match piece {
            Piece::Line(line) => seen.push(line.len()),
            other => panic!("{other:?}"),
        };
        lines.push(&vec![0x80_u8; 3 * LINE_BYTES_MAX], &mut sink);
        lines.finish(&mut sink);
        assert_eq!(seen, [LINE_BYTES_MAX; 3]);
    }
}
