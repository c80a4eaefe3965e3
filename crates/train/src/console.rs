//! Rank 0's lines and progress bar, or its JSON lines; every other rank is silent.

use std::cell::Cell;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use serde::Serialize;

/// Environment variable with the width of the terminal that shows rank 0's standard output, set by the command that starts
/// the ranks. If absent, the output is not a terminal and rank 0 prints plain lines.
pub const COLUMNS_VARIABLE: &str = "PACELINE_TERMINAL_COLUMNS";

/// Upper limit for the terminal width.
const COLUMNS_MAX: usize = 1000;

/// Minimum time between two redraws of the bar.
const REDRAW_AFTER: Duration = Duration::from_millis(100);

const BAR_WIDTH: u64 = 30;

/// The format of rank 0's standard output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Output {
    /// Text for people.
    #[default]
    Text,
    /// One JSON object per line: `start`, one `epoch` per epoch, and `end` or `stopped`.
    Json,
}

impl Output {
    /// JSON if `json`, otherwise text.
    #[must_use]
    pub fn of(json: bool) -> Self {
        if json { Self::Json } else { Self::Text }
    }
}

/// Rank 0's console.
pub(crate) struct Console {
    /// `None` on the other ranks.
    output: Option<Output>,
    bar: Option<Bar>,
}

impl Console {
    /// A console that prints on rank 0 only, with a bar over `steps` on a terminal.
    pub(crate) fn new(rank: usize, output: Output, steps: u64, first_step: u64) -> Self {
        let has_bar = rank == 0 && output == Output::Text;
        let width = std::env::var(COLUMNS_VARIABLE).ok().filter(|_| has_bar);
        Self {
            output: (rank == 0).then_some(output),
            bar: width.and_then(|text| columns(&text)).map(|columns| Bar {
                columns,
                steps,
                first_step,
                started: Instant::now(),
                drawn: Cell::new(None),
            }),
        }
    }

    /// Prints whole lines for people.
    pub(crate) fn print(&self, text: &str) {
        if self.output == Some(Output::Text) {
            self.finish();
            line(text.trim_end());
        }
    }

    /// Prints a record for programs.
    pub(crate) fn emit(&self, record: &impl Serialize) {
        if self.output == Some(Output::Json) {
            line(&serde_json::to_string(record).expect("records always encode"));
        }
    }

    /// Moves the bar.
    pub(crate) fn step(&self, done: u64, loss: f32) {
        if let Some(bar) = &self.bar {
            bar.draw(done, loss);
        }
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar
            && bar.drawn.take().is_some()
        {
            write("\r\x1b[2K");
        }
    }
}

/// Ignores errors: training goes on even if nothing reads the lines.
fn line(text: &str) {
    write(&format!("{text}\n"));
}

fn write(text: &str) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// A bar on the last line of a terminal. Standard output is a pipe here; the launcher forwards its bytes.
struct Bar {
    columns: usize,
    steps: u64,
    first_step: u64,
    started: Instant,
    /// When it was last drawn, if visible.
    drawn: Cell<Option<Instant>>,
}

impl Bar {
    fn draw(&self, done: u64, loss: f32) {
        let is_fresh = |at: Instant| at.elapsed() < REDRAW_AFTER;
        if self.drawn.get().is_none_or(|at| !is_fresh(at)) {
            write(&format!(
                "\r\x1b[2K{}",
                self.text(done, loss, self.started.elapsed())
            ));
            self.drawn.set(Some(Instant::now()));
        }
    }

    fn text(&self, done: u64, loss: f32, elapsed: Duration) -> String {
        let filled = (done * BAR_WIDTH / self.steps.max(1)).min(BAR_WIDTH) as usize;
        let bar = format!(
            "{}{}",
            "█".repeat(filled),
            "░".repeat(BAR_WIDTH as usize - filled)
        );
        let since_start = done.saturating_sub(self.first_step).max(1) as f64;
        let left = self.steps.saturating_sub(done) as f64;
        let seconds = elapsed.as_secs_f64() / since_start * left;
        let text = format!(
            "{bar} step {done}/{}  loss {loss:.4}  {seconds:.0} s left",
            self.steps
        );
        text.chars().take(self.columns - 1).collect()
    }
}

fn columns(text: &str) -> Option<usize> {
    text.parse()
        .ok()
        .filter(|columns| (20..=COLUMNS_MAX).contains(columns))
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

    #[test]
    fn the_bar_fits_its_terminal() {
        let bar = |columns| Bar {
            columns,
            steps: 100,
            first_step: 40,
            started: Instant::now(),
            drawn: Cell::new(None),
        };
        let text = bar(80).text(50, 0.5, Duration::from_secs(2));
        let expect = format!(
            "{}{} step 50/100  loss 0.5000  10 s left",
            "█".repeat(15),
            "░".repeat(15)
        );
        assert_eq!(text, expect);
        assert_eq!(bar(20).text(50, 0.5, Duration::ZERO).chars().count(), 19);
    }
}
