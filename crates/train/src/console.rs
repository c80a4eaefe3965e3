//! Rank 0's lines and progress bar, or its JSON lines; every other rank is silent.

use std::cell::Cell;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use paceline_usage::figures::thousands;
use serde::Serialize;

/// Environment variable with the width of the terminal that shows rank 0's standard output, set by the command that starts
/// the ranks. If absent, the output is not a terminal and rank 0 prints plain lines.
pub const COLUMNS_VARIABLE: &str = "PACELINE_TERMINAL_COLUMNS";

/// Upper limit for the terminal width.
const COLUMNS_MAX: usize = 1000;

/// Minimum time between two redraws of the bar.
const REDRAW_AFTER: Duration = Duration::from_millis(100);

/// Letters of the bar itself, where there is room and where there is little.
const BAR_WIDTH: usize = 30;
const BAR_WIDTH_MIN: usize = 8;

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
    pub(crate) fn step(&self, at: impl FnOnce() -> At) {
        if let Some(bar) = &self.bar {
            bar.draw(at);
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

/// What the bar shows.
pub(crate) struct At {
    /// Steps that are done.
    pub(crate) step: u64,
    /// The one that goes on, and all.
    pub(crate) epochs: (u64, u64),
    pub(crate) loss: f32,
    pub(crate) per_second: f64,
    /// What is counted by the second.
    pub(crate) unit: &'static str,
    pub(crate) ranks: usize,
    /// Share of the time in which all of them computed at once, once it is known.
    pub(crate) all_busy: Option<f64>,
}

/// A bar on the last line of a terminal. Standard output is a pipe here; the launcher forwards its bytes, and takes the bar away before it
/// prints anything else: it knows a bar by how it begins and ends.
struct Bar {
    columns: usize,
    steps: u64,
    first_step: u64,
    started: Instant,
    /// When it was last drawn, if visible.
    drawn: Cell<Option<Instant>>,
}

impl Bar {
    fn draw(&self, at: impl FnOnce() -> At) {
        let is_fresh = |at: Instant| at.elapsed() < REDRAW_AFTER;
        if self.drawn.get().is_none_or(|at| !is_fresh(at)) {
            let text = self.text(&at(), self.started.elapsed());
            write(&format!("\r\x1b[2K{text}\r"));
            self.drawn.set(Some(Instant::now()));
        }
    }

    /// The figures that fit beside a bar, the least important ones left out first.
    fn text(&self, at: &At, elapsed: Duration) -> String {
        let done = at.step;
        let since_start = done.saturating_sub(self.first_step).max(1) as f64;
        let left = self.steps.saturating_sub(done) as f64;
        let left = left_text(elapsed.as_secs_f64() / since_start * left);
        let (epoch, epochs) = at.epochs;
        let busy = at.all_busy.filter(|_| at.ranks > 1);
        // In the order of the line, each with its rank.
        let mut figures = vec![
            (1, format!("epoch {epoch}/{epochs}")),
            (5, format!("step {done}/{}", self.steps)),
            (2, format!("loss {:.4}", at.loss)),
            (
                4,
                format!("{} {}/s", thousands(at.per_second.round() as u64), at.unit),
            ),
            (3, format!("{left} left")),
        ];
        figures.extend(busy.map(|share| {
            (
                6,
                format!("all {} ranks busy {:.0} %", at.ranks, 100.0 * share),
            )
        }));
        let room = self.columns - 1;
        let len = |figures: &[(u8, String)]| -> usize {
            figures
                .iter()
                .map(|(_, text)| text.chars().count() + 2)
                .sum()
        };
        while figures.len() > 1 && len(&figures) + BAR_WIDTH_MIN > room {
            let least = figures.iter().map(|(rank, _)| *rank).max();
            figures.retain(|(rank, _)| Some(*rank) != least);
        }
        let width = room.saturating_sub(len(&figures)).min(BAR_WIDTH);
        let filled = (done as usize * width / self.steps.max(1) as usize).min(width);
        let mut text = format!("{}{}", "█".repeat(filled), "░".repeat(width - filled));
        for (_, figure) in figures {
            text.push_str("  ");
            text.push_str(&figure);
        }
        text.chars().take(room).collect()
    }
}

/// `45 s`, `12 min`, `3 h 20 min`.
fn left_text(seconds: f64) -> String {
    let minutes = (seconds / 60.0).round() as u64;
    match minutes {
        _ if seconds < 100.0 => format!("{seconds:.0} s"),
        0..100 => format!("{minutes} min"),
        _ => format!("{} h {} min", minutes / 60, minutes % 60),
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
        let at = At {
            step: 50,
            epochs: (2, 3),
            loss: 0.5,
            per_second: 16_738.4,
            unit: "samples",
            ranks: 4,
            all_busy: Some(0.756),
        };
        let two = Duration::from_secs(2);
        let bars = |filled, empty| format!("{}{}", "█".repeat(filled), "░".repeat(empty));
        let all = "  epoch 2/3  step 50/100  loss 0.5000  16,738 samples/s  10 s left  all 4 ranks busy 76 %";
        assert_eq!(bar(200).text(&at, two), bars(15, 15) + all);
        let most = "  epoch 2/3  step 50/100  loss 0.5000  16,738 samples/s  10 s left";
        assert_eq!(bar(80).text(&at, two), bars(6, 7) + most);
        let some = "  epoch 2/3  loss 0.5000  10 s left";
        assert_eq!(bar(50).text(&at, two), bars(7, 7) + some);
        let least = bar(20).text(&at, two);
        assert_eq!(least, bars(4, 4) + "  epoch 2/3");
        let alone = At { ranks: 1, ..at };
        assert!(!bar(200).text(&alone, two).contains("busy"));
    }

    #[test]
    fn the_time_left_is_rounded() {
        for (seconds, expect) in [
            (0.4, "0 s"),
            (99.0, "99 s"),
            (130.0, "2 min"),
            (12_000.0, "3 h 20 min"),
        ] {
            assert_eq!(left_text(seconds), expect);
        }
    }
}
