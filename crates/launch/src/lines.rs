//! Bytes in, lines out: cuts a stream into lines of bounded length and drops what a progress bar has overwritten.
//!
//! A line ends with `\n` or `\r\n`. A `\r` alone takes the cursor back to the start of the line, so what stands
//! before it is overwritten by what follows: only the last state is a line. At the stream's end the rest is a line.

/// Longer lines are cut here, so that a stream without a newline needs bounded memory.
pub(crate) const LINE_BYTES_MAX: usize = 64 * 1024;

/// The state between two reads of one stream.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    pending: Vec<u8>,
    /// A `\r` was the last byte: the next byte tells whether the line ends or starts over.
    returned: bool,
}

impl Lines {
    /// Takes the next bytes and calls `line` with every line that is complete, without its line ending.
    pub(crate) fn push(&mut self, mut bytes: &[u8], mut line: impl FnMut(&[u8])) {
        while let Some(&first) = bytes.first() {
            if self.returned {
                match first {
                    b'\r' | b'\n' => {}
                    _ => {
                        self.pending.clear();
                        self.returned = false;
                    }
                }
            }
            let end = bytes
                .iter()
                .position(|byte| matches!(byte, b'\r' | b'\n'))
                .unwrap_or(bytes.len());
            self.append(&bytes[..end], &mut line);
            match bytes.get(end) {
                Some(b'\r') => self.returned = true,
                Some(_) => {
                    line(&self.pending);
                    self.pending.clear();
                    self.returned = false;
                }
                None => return,
            }
            bytes = &bytes[end + 1..];
        }
    }

    /// The stream has ended: what is left is a line.
    pub(crate) fn finish(&mut self, mut line: impl FnMut(&[u8])) {
        if !self.pending.is_empty() {
            line(&self.pending);
        }
        *self = Self::default();
    }

    fn append(&mut self, mut text: &[u8], line: &mut impl FnMut(&[u8])) {
        while self.pending.len() + text.len() > LINE_BYTES_MAX {
            let (now, later) = text.split_at(LINE_BYTES_MAX - self.pending.len());
            self.pending.extend_from_slice(now);
            let cut = character_boundary(&self.pending);
            line(&self.pending[..cut]);
            self.pending.drain(..cut);
            text = later;
        }
        self.pending.extend_from_slice(text);
    }
}

/// Where to cut so that no UTF-8 character is torn; the whole length if the text is not UTF-8 there.
fn character_boundary(text: &[u8]) -> usize {
    let is_continuation = |byte: u8| byte & 0b1100_0000 == 0b1000_0000;
    let start = text
        .iter()
        .rposition(|&byte| !is_continuation(byte))
        .unwrap_or(text.len());
    let is_torn = match text.get(start) {
        Some(&lead) if lead >= 0b1100_0000 => {
            let needed = lead.leading_ones() as usize;
            text.len() - start < needed.min(4)
        }
        _ => false,
    };
    if is_torn && start > 0 {
        start
    } else {
        text.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cuts `input` in one piece, then byte by byte: the lines must be the same.
    fn check(input: &str, expect: &[&str]) {
        for step in [input.len().max(1), 1] {
            let mut lines = Lines::default();
            let mut seen = Vec::new();
            for piece in input.as_bytes().chunks(step) {
                lines.push(piece, |line| {
                    seen.push(String::from_utf8(line.to_vec()).unwrap())
                });
            }
            lines.finish(|line| seen.push(String::from_utf8(line.to_vec()).unwrap()));
            assert_eq!(seen, expect, "{input:?} in pieces of {step}");
        }
    }

    #[test]
    fn lines_end_with_a_newline() {
        check("", &[]);
        check("one\ntwo\n", &["one", "two"]);
        check("one\r\ntwo\r\n", &["one", "two"]);
        check("\n\nx\n", &["", "", "x"]);
    }

    #[test]
    fn the_rest_at_the_end_is_a_line() {
        check("one\ntwo", &["one", "two"]);
        check("two\r", &["two"]);
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
    fn a_long_line_is_cut_between_characters() {
        let mut lines = Lines::default();
        let mut seen: Vec<String> = Vec::new();
        let text = format!("x{}", "é".repeat(LINE_BYTES_MAX));
        lines.push(text.as_bytes(), |line| {
            seen.push(String::from_utf8(line.to_vec()).expect("whole characters"))
        });
        lines.finish(|line| seen.push(String::from_utf8(line.to_vec()).expect("whole characters")));
        assert_eq!(seen.concat(), text);
        assert!(seen.iter().all(|line| line.len() <= LINE_BYTES_MAX));
        assert_eq!(seen.len(), 3);
    }

    #[test]
    fn bytes_that_are_no_text_are_cut_at_the_bound() {
        let mut lines = Lines::default();
        let mut seen = Vec::new();
        lines.push(&vec![0x80_u8; 3 * LINE_BYTES_MAX], |line| {
            seen.push(line.len())
        });
        lines.finish(|line| seen.push(line.len()));
        assert_eq!(seen, [LINE_BYTES_MAX; 3]);
    }
}
