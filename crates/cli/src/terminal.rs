//! Pictures on a terminal: taken over, drawn on, and given back whatever happens; or printed once as text.

mod screen;
mod theme;

use std::io;

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};

use crate::exit::{Exit, Failure};

pub(crate) use self::screen::{Screen, Signals};
pub(crate) use self::theme::{Theme, Tone};

/// Width of a frame that is printed, where the environment does not say another.
const ONCE_WIDTH: u16 = 120;

/// Shows pictures until `follow` returns, which it has to do after a signal.
///
/// *Errors*: the terminal's.
pub(crate) fn show(
    follow: impl FnOnce(&mut Screen, &Signals) -> io::Result<()>,
) -> Result<Exit, Failure> {
    let failed = |error: io::Error| Failure::environment(format!("the terminal fails: {error}"));
    let signals = Signals::heed().map_err(failed)?;
    let ended = Screen::open().and_then(|mut screen| follow(&mut screen, &signals));
    match (signals.received(), ended) {
        // A terminal that is gone fails too; the signal says why.
        (Some(signal), _) => Ok(Exit::Signal(signal)),
        (None, Err(error)) => Err(failed(error)),
        (None, Ok(())) => Ok(Exit::Done),
    }
}

/// The width of a frame that is printed.
pub(crate) fn width(variable: impl Fn(&str) -> Option<String>) -> u16 {
    let columns = variable("COLUMNS").and_then(|columns| columns.parse().ok());
    columns
        .filter(|columns| (20..=1000).contains(columns))
        .unwrap_or(ONCE_WIDTH)
}

/// What is left of the screen.
pub(crate) struct Room<'a> {
    pub(crate) area: Rect,
    pub(crate) buffer: &'a mut Buffer,
}

impl Room<'_> {
    pub(crate) fn top(&mut self, line: Line<'_>) {
        if self.area.height > 0 {
            self.buffer
                .set_line(self.area.x, self.area.y, &line, self.area.width);
            self.area.y += 1;
            self.area.height -= 1;
        }
    }

    pub(crate) fn bottom(&mut self, line: Line<'_>) {
        if self.area.height > 0 {
            self.area.height -= 1;
            let y = self.area.y + self.area.height;
            self.buffer.set_line(self.area.x, y, &line, self.area.width);
        }
    }

    pub(crate) fn fill(mut self, lines: Vec<Line<'_>>) {
        for line in lines {
            self.top(line);
        }
    }
}

/// A frame's lines without colours, and without empty ones.
pub(crate) fn text(width: u16, height: usize, draw: impl FnOnce(Rect, &mut Buffer)) -> Vec<String> {
    // A buffer has at most 65535 places of one another's kind in each direction.
    let area = Rect::new(0, 0, width, u16::try_from(height).unwrap_or(u16::MAX));
    let mut buffer = Buffer::empty(area);
    draw(area, &mut buffer);
    let line = |row: usize| {
        let cells = buffer.content.iter();
        let cells = cells.skip(row * usize::from(width)).take(width.into());
        let mut line = String::new();
        let mut hidden = 0;
        for cell in cells {
            // A wide character hides the places behind it.
            if hidden > 0 {
                hidden -= 1;
                continue;
            }
            line.push_str(cell.symbol());
            hidden = Span::raw(cell.symbol()).width().saturating_sub(1);
        }
        line.trim_end().to_owned()
    };
    let lines = (0..area.height.into()).map(line);
    lines.filter(|line| !line.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_printed_frame_is_as_wide_as_the_environment_says() {
        let of = |columns: &str| width(|_| Some(columns.to_owned()));
        assert_eq!(
            [of("80"), of(""), of("3"), of("99999")],
            [80, 120, 120, 120]
        );
    }
}
