//! The short memory of a rank's output: its last lines, and the panic or Python traceback among them.

use std::collections::VecDeque;

use super::escapes::{self, Keep};

/// Lines of each stream that are kept for the report.
pub(crate) const TAIL_LINES: usize = 20;
/// Longer lines are cut in the report; the log file has them whole.
const LINE_CHARS_MAX: usize = 500;
/// Lines of a traceback that are kept: its first and its newest ones.
const TRACE_LINES_MAX: usize = 60;

const TRACEBACK: &str = "Traceback (most recent call last):";

/// The last lines of one rank's streams.
#[derive(Debug, Default)]
pub(crate) struct Tails(pub(crate) [Tail; 2]);

/// The last lines of one stream that are worth a place in the report.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    pub(crate) lines: VecDeque<String>,
    in_backtrace: bool,
    trace: Option<Trace>,
}

/// How a program said why it ends.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Trace {
    /// The error in one line: what a panic says, or the exception.
    pub(crate) message: Option<String>,
    /// All of its lines.
    pub(crate) lines: Vec<String>,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Kind {
    #[default]
    Panic,
    /// torch's hook puts such a prefix before each line.
    Python { prefix_chars: usize },
}

impl Tail {
    pub(crate) fn remember(&mut self, line: &[u8]) {
        // A character has at most four bytes, so no kept one is cut before the text is decoded.
        let mut text = Vec::new();
        escapes::clean(
            &line[..line.len().min(4 * LINE_CHARS_MAX)],
            Keep::Text,
            &mut text,
        );
        let text = String::from_utf8_lossy(&text);
        if text.trim().is_empty() {
            return;
        }
        let text: String = text.chars().take(LINE_CHARS_MAX).collect();
        self.look_for_a_trace(&text);
        // The frames of a Rust panic would push its message out of the report; all of them are indented.
        self.in_backtrace = match text.as_ref() {
            "stack backtrace:" => true,
            text => self.in_backtrace && text.starts_with(' '),
        };
        if self.in_backtrace || is_frame(&text) {
            return;
        }
        if self.lines.len() == TAIL_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(text);
    }

    /// The panic or traceback: of several panics the first, of several tracebacks the last, because a panic is the
    /// cause of those that follow, and a traceback repeats the exception that it was caused by.
    pub(crate) fn trace(&self) -> Option<&Trace> {
        self.trace.as_ref().filter(|trace| trace.message.is_some())
    }

    fn look_for_a_trace(&mut self, text: &str) {
        if let Some(trace) = &mut self.trace
            && trace.message.is_none()
        {
            trace.take(text);
            return;
        }
        let begins = match (text.find(TRACEBACK), &self.trace) {
            (Some(at), _) => Some(Kind::Python {
                prefix_chars: text[..at].chars().count(),
            }),
            (None, None) if is_panic(text) => Some(Kind::Panic),
            _ => None,
        };
        if let Some(kind) = begins {
            self.trace = Some(Trace {
                message: None,
                lines: vec![text.to_owned()],
                kind,
            });
        }
    }
}

impl Trace {
    fn take(&mut self, text: &str) {
        if self.lines.len() == TRACE_LINES_MAX {
            self.lines.remove(1);
        }
        self.lines.push(text.to_owned());
        match self.kind {
            Kind::Panic => self.message = Some(text.trim().to_owned()),
            Kind::Python { prefix_chars } => {
                let inner: String = text.chars().skip(prefix_chars).collect();
                if !inner.starts_with([' ', '\t']) && !inner.is_empty() {
                    self.message = Some(inner);
                }
            }
        }
    }
}

/// A line such as `frame #3: c10d::...`, of which PyTorch's C++ errors have a dozen behind the message.
fn is_frame(text: &str) -> bool {
    let of_rank = text
        .strip_prefix("[rank")
        .and_then(|text| text.split_once("]: "));
    of_rank
        .map_or(text, |(_, line)| line)
        .starts_with("frame #")
}

/// The first line of a Rust panic; its message is on the next.
fn is_panic(text: &str) -> bool {
    text.starts_with("thread '") && text.contains(" panicked at ") && text.ends_with(':')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tail(lines: &[&str]) -> Tail {
        let mut tail = Tail::default();
        for line in lines {
            tail.remember(line.as_bytes());
        }
        tail
    }

    #[test]
    fn the_message_of_a_panic_is_remembered_and_its_frames_are_not() {
        let mut tail = tail(&[
            "thread 'main' panicked at src/main.rs:7:5:",
            "no more samples",
            "stack backtrace:",
        ]);
        for frame in 0..TAIL_LINES {
            tail.remember(format!("  {frame}: core::panicking::panic_fmt").as_bytes());
            tail.remember(b"             at /rustc/library/core/src/panicking.rs:80:14");
        }
        tail.remember(b"note: run with `RUST_BACKTRACE=full` for more");
        let expect = [
            "thread 'main' panicked at src/main.rs:7:5:",
            "no more samples",
            "note: run with `RUST_BACKTRACE=full` for more",
        ];
        assert_eq!(tail.lines, expect);
    }

    #[test]
    fn the_frames_of_a_c10_error_do_not_push_out_its_message() {
        let mut tail = tail(&["  what():  Watchdog caught collective operation timeout"]);
        for frame in 0..TAIL_LINES {
            tail.remember(format!("frame #{frame}: clone + 0x44 (0x7fe7 in libc.so.6)").as_bytes());
            tail.remember(format!("[rank3]: frame #{frame}: c10d::Store::get()").as_bytes());
        }
        assert_eq!(tail.lines.len(), 1);
        tail.remember(b"frames: 12");
        assert_eq!(tail.lines.len(), 2);
    }

    #[test]
    fn a_panic_or_a_traceback_is_found_among_what_follows_it() {
        let check = |lines: &[&str], message: Option<&str>, length: usize| {
            let mut tail = tail(lines);
            for number in 0..2 * TAIL_LINES {
                tail.remember(format!("warning {number}").as_bytes());
            }
            let trace = tail.trace();
            let got = trace.and_then(|trace| trace.message.as_deref());
            assert_eq!(got, message, "{lines:?}");
            assert_eq!(
                trace.map_or(0, |trace| trace.lines.len()),
                length,
                "{lines:?}"
            );
        };
        check(&["all is well"], None, 0);
        let panic = "thread 'main' (77) panicked at src/main.rs:7:5:";
        check(&[panic, "no more samples"], Some("no more samples"), 2);
        let second = "thread 'loader' panicked at src/loader.rs:1:1:";
        check(&[panic, "first", second, "second"], Some("first"), 2);
        let python = [
            TRACEBACK,
            "  File \"a.py\", line 1, in <module>",
            "    main()",
            "ValueError: no data",
        ];
        check(&python, Some("ValueError: no data"), 4);
        let again = [
            &python[..],
            &["During handling of the above exception, another exception occurred:"],
            &[TRACEBACK, "  File \"b.py\", line 2", "KeyError: 'x'"],
        ];
        check(&again.concat(), Some("KeyError: 'x'"), 3);
        let of_torch = python.map(|line| format!("[rank3]: {line}"));
        let of_torch = of_torch.each_ref().map(String::as_str);
        check(&of_torch, Some("ValueError: no data"), 4);
    }

    #[test]
    fn a_traceback_that_never_ends_is_bounded() {
        let mut tail = tail(&[TRACEBACK]);
        for number in 0..1000 {
            tail.remember(format!("  File {number}").as_bytes());
        }
        assert!(tail.trace().is_none());
        tail.remember(b"RecursionError: too deep");
        let trace = tail.trace().unwrap();
        assert_eq!(trace.lines.len(), TRACE_LINES_MAX);
        assert_eq!(
            (&*trace.lines[0], &*trace.lines[1]),
            (TRACEBACK, "  File 942")
        );
    }
}
