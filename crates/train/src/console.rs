//! Rank 0's lines and progress bar; every other rank is silent.

use std::io::{self, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

/// Environment variable by which the command that starts the ranks tells rank 0 the width of the terminal that its
/// standard output ends up on. Absent: not a terminal, plain lines.
pub const COLUMNS_VARIABLE: &str = "PACELINE_TERMINAL_COLUMNS";

/// Widest terminal that is believed.
const COLUMNS_MAX: u16 = 1000;

/// Where rank 0 reports to.
pub struct Console {
    speaks: bool,
    bar: Option<ProgressBar>,
}

impl Console {
    /// A console that speaks on rank 0 only, with a bar over `steps` on a terminal.
    pub fn new(rank: usize, steps: u64, first_step: u64) -> Self {
        let speaks = rank == 0;
        let columns = std::env::var(COLUMNS_VARIABLE)
            .ok()
            .and_then(|text| columns(&text));
        let bar = columns.filter(|_| speaks).map(|columns| {
            let target = ProgressDrawTarget::term_like_with_hz(Box::new(Stdout { columns }), 10);
            let style =
                ProgressStyle::with_template("{bar:30} step {pos}/{len}  {msg}  {eta} left")
                    .expect("a constant template");
            let bar = ProgressBar::with_draw_target(Some(steps), target).with_style(style);
            bar.set_position(first_step);
            bar
        });
        Self { speaks, bar }
    }

    /// Prints whole lines.
    pub fn print(&self, text: &str) {
        if !self.speaks {
            return;
        }
        let write = || {
            // Nobody to read the lines is no reason to stop training.
            let mut out = io::stdout().lock();
            let _ = writeln!(out, "{}", text.trim_end());
            let _ = out.flush();
        };
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    /// Moves the bar.
    pub fn step(&self, done: u64, loss: f32) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("loss {loss:.4}"));
            bar.set_position(done);
        }
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn columns(text: &str) -> Option<u16> {
    text.parse()
        .ok()
        .filter(|columns| (20..=COLUMNS_MAX).contains(columns))
}

/// Standard output as a terminal although it is a pipe here: the launcher passes its bytes on to one.
#[derive(Debug)]
struct Stdout {
    columns: u16,
}

impl Stdout {
    fn escape(&self, count: usize, code: char) -> io::Result<()> {
        if count == 0 {
            return Ok(());
        }
        write!(io::stdout().lock(), "\x1b[{count}{code}")
    }
}

impl TermLike for Stdout {
    fn width(&self) -> u16 {
        self.columns
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.escape(n, 'A')
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.escape(n, 'B')
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.escape(n, 'C')
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.escape(n, 'D')
    }

    fn write_line(&self, s: &str) -> io::Result<()> {
        writeln!(io::stdout().lock(), "{s}")
    }

    fn write_str(&self, s: &str) -> io::Result<()> {
        write!(io::stdout().lock(), "{s}")
    }

    fn clear_line(&self) -> io::Result<()> {
        write!(io::stdout().lock(), "\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        io::stdout().lock().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sensible_widths_are_believed() {
        for (text, expect) in [
            ("80", Some(80)),
            ("0", None),
            ("99999", None),
            ("wide", None),
            ("", None),
        ] {
            assert_eq!(columns(text), expect, "{text:?}");
        }
    }
}
