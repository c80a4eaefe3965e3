//! Columns that share a width: those that matter least give way first, and one takes what is left.

use ratatui::text::{Line, Span};

use crate::terminal::{Theme, Tone};

/// Blanks between two columns.
const GAP: usize = 1;

/// A column.
#[derive(Debug, Clone, Copy)]
pub(super) struct Column {
    pub(super) title: &'static str,
    /// Columns with higher numbers give way first; 0 stays.
    pub(super) gives_way: u8,
    pub(super) align: Align,
}

pub(super) const fn column(title: &'static str, gives_way: u8, align: Align) -> Column {
    Column {
        title,
        gives_way,
        align,
    }
}

/// Where a text stands in its column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Align {
    Left,
    Right,
    /// To the left, and from at least this width on it takes what is left.
    Fill(usize),
}

/// What stands in one place.
#[derive(Debug, Clone, Default)]
pub(super) struct Cell {
    pub(super) content: Content,
    pub(super) tone: Tone,
}

/// Text, or what is drawn as wide as its column.
#[derive(Debug, Clone)]
pub(super) enum Content {
    Text(String),
    /// A bar, from 0 to 1.
    Bar(f64),
    /// Values from 0 to 100, the newest first.
    History(Vec<Option<u8>>),
}

impl Default for Content {
    fn default() -> Self {
        Self::Text(String::new())
    }
}

impl Cell {
    pub(super) fn new(text: impl Into<String>, tone: Tone) -> Self {
        Self {
            content: Content::Text(text.into()),
            tone,
        }
    }

    fn width(&self) -> usize {
        match &self.content {
            Content::Text(text) => Span::raw(text.as_str()).width(),
            Content::Bar(_) | Content::History(_) => 0,
        }
    }
}

/// The titles and the rows as lines of `width`.
pub(super) fn lines(
    columns: &[Column],
    rows: &[Vec<Cell>],
    width: usize,
    theme: Theme,
) -> Vec<Line<'static>> {
    let widths = widths(columns, rows, width);
    let titles = columns
        .iter()
        .map(|column| Cell::new(column.title, Tone::Dim));
    let titles: Vec<Cell> = titles.collect();
    std::iter::once(&titles)
        .chain(rows)
        .map(|cells| line(columns, cells, &widths, theme))
        .collect()
}

/// How wide each column is; nothing for those that have given way.
fn widths(columns: &[Column], rows: &[Vec<Cell>], width: usize) -> Vec<Option<usize>> {
    let needed = |(index, column): (usize, &Column)| {
        let cells = rows.iter().filter_map(|row| row.get(index));
        let widest = cells.map(Cell::width).max().unwrap_or(0);
        let widest = widest.max(column.title.len());
        match column.align {
            Align::Fill(least) => least,
            Align::Left | Align::Right => widest,
        }
    };
    let mut widths: Vec<Option<usize>> = columns.iter().enumerate().map(needed).map(Some).collect();
    let sum = |widths: &[Option<usize>]| {
        let count = widths.iter().flatten().count();
        widths.iter().flatten().sum::<usize>() + GAP * count.saturating_sub(1)
    };
    while sum(&widths) > width {
        let left = columns.iter().zip(&widths).enumerate();
        let left = left.filter(|(_, (_, width))| width.is_some());
        let next = left.max_by_key(|(_, (column, _))| column.gives_way);
        match next {
            Some((index, (column, _))) if column.gives_way > 0 => widths[index] = None,
            _ => break,
        }
    }
    let spare = width.saturating_sub(sum(&widths));
    let fills: Vec<usize> = (0..columns.len())
        .filter(|index| matches!(columns[*index].align, Align::Fill(_)) && widths[*index].is_some())
        .collect();
    for (nth, index) in fills.iter().enumerate() {
        // The first ones take what does not divide.
        let share = spare / fills.len() + usize::from(nth < spare % fills.len());
        widths[*index] = widths[*index].map(|width| width + share);
    }
    widths
}

fn line(
    columns: &[Column],
    cells: &[Cell],
    widths: &[Option<usize>],
    theme: Theme,
) -> Line<'static> {
    let mut spans: Vec<Span<'static>> = Vec::new();
    for ((column, cell), width) in columns.iter().zip(cells).zip(widths) {
        let Some(width) = *width else { continue };
        if !spans.is_empty() {
            spans.push(Span::raw(" ".repeat(GAP)));
        }
        spans.extend(cell_spans(cell, column.align, width, theme));
    }
    Line::from(spans)
}

fn cell_spans(cell: &Cell, align: Align, width: usize, theme: Theme) -> Vec<Span<'static>> {
    let style = theme.style(cell.tone);
    match &cell.content {
        Content::Bar(share) => {
            let (full, rest) = theme.bar(*share, width);
            vec![
                Span::styled(full, style),
                Span::styled(rest, theme.style(Tone::Dim)),
            ]
        }
        Content::History(newest_first) => {
            let newest = newest_first.iter().take(width);
            let mut levels: Vec<char> = newest.map(|percent| theme.level(*percent)).collect();
            levels.resize(width, ' ');
            vec![Span::styled(levels.iter().rev().collect::<String>(), style)]
        }
        Content::Text(text) => {
            let text = theme.cut(text, width);
            let blanks = " ".repeat(width.saturating_sub(Span::raw(text.as_str()).width()));
            let text = Span::styled(text, style);
            match align {
                Align::Right => vec![Span::raw(blanks), text],
                Align::Left | Align::Fill(_) => vec![text, Span::raw(blanks)],
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THEME: Theme = Theme {
        has_colors: false,
        has_blocks: true,
    };

    fn drawn(width: usize) -> Vec<String> {
        let columns = [
            column("RANK", 0, Align::Right),
            column("PID", 3, Align::Right),
            column("DOING", 1, Align::Fill(6)),
            column("MEM", 2, Align::Left),
        ];
        let cell = |text: &str| Cell::new(text, Tone::Plain);
        let rows = vec![
            vec![cell("0"), cell("4711"), cell("backward pass"), cell("1.5G")],
            vec![cell("12"), cell("7"), cell("한국어로 쓴 말"), cell("-")],
        ];
        lines(&columns, &rows, width, THEME)
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn the_columns_that_matter_least_give_way_first() {
        assert_eq!(
            drawn(30),
            [
                "RANK  PID DOING           MEM ",
                "   0 4711 backward pass   1.5G",
                "  12    7 한국어로 쓴 말  -   ",
            ]
        );
        assert_eq!(
            drawn(20),
            [
                "RANK DOING      MEM ",
                "   0 backward … 1.5G",
                "  12 한국어로 … -   "
            ]
        );
        assert_eq!(drawn(12), ["RANK DOING  ", "   0 backwa…", "  12 한국어…"]);
        assert_eq!(drawn(5), ["RANK", "   0", "  12"]);
    }

    #[test]
    fn no_width_is_too_small() {
        for width in 0..40 {
            for line in drawn(width) {
                assert!(
                    Span::raw(line.as_str()).width() <= width.max(4),
                    "{width}: {line}"
                );
            }
        }
    }

    #[test]
    fn a_history_has_its_newest_value_at_the_right() {
        let cell = Cell {
            content: Content::History(vec![Some(100), Some(50), None]),
            tone: Tone::Plain,
        };
        let text = |width| {
            let spans = cell_spans(&cell, Align::Left, width, THEME);
            spans
                .iter()
                .map(|span| span.content.as_ref())
                .collect::<String>()
        };
        assert_eq!(
            [text(5), text(2), text(0)],
            ["    ▄█".split_at(1).1, "▄█", ""]
        );
    }
}
