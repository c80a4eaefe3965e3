//! A chart in the cells of a terminal.

use std::collections::BTreeMap;

use paceline_report::{Axis, Chart, Curve, Line, Scale, number};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::symbols::Marker;
use ratatui::text::Span;
use ratatui::widgets::Widget;
use ratatui::widgets::canvas::{self, Canvas, Context, Points};

use crate::terminal::{Theme, Tone};

/// Places beside each other in a cell of Braille.
const DOTS: f64 = 2.0;
/// Most columns of the labels of values.
const LABELS_MAX: usize = 10;

/// The steps that are shown.
#[derive(Clone, Copy)]
pub(super) struct Steps {
    pub(super) first: u64,
    pub(super) last: u64,
}

/// Draws the chart with its axes. False if it has no value among these steps.
pub(super) fn plot(
    chart: &Chart<'_>,
    steps: Steps,
    theme: Theme,
    area: Rect,
    buffer: &mut Buffer,
) -> bool {
    let Steps { first, last } = steps;
    let across = Axis::over(first as f64, last as f64, Scale::Fitted);
    let columns = f64::from(area.width) * DOTS;
    let lines: Vec<(Line<'_>, Vec<(f64, f64)>)> = chart
        .lines
        .iter()
        .map(|line| (*line, points(line.curve, first, across, columns)))
        .collect();
    let values = || {
        lines
            .iter()
            .flat_map(|(_, points)| points.iter().map(|p| p.1))
    };
    let (low, high) = (
        values().fold(f64::INFINITY, f64::min),
        values().fold(f64::NEG_INFINITY, f64::max),
    );
    if low > high || area.height < 3 {
        return false;
    }
    let up = Axis::over(low, high, chart.scale);
    let labels: Vec<(f64, String)> = up.marks().into_iter().map(|m| (m, number(m))).collect();
    let left = labels.iter().map(|(_, label)| label.len()).max();
    let left = left.unwrap_or(0).min(LABELS_MAX) as u16 + 1;
    if area.width <= left + 1 {
        return false;
    }
    let inner = Rect {
        x: area.x + left,
        width: area.width - left,
        height: area.height - 1,
        ..area
    };
    let dim = theme.style(Tone::Dim);
    for (mark, label) in labels {
        let row = (1.0 - up.at(mark)) * f64::from(inner.height - 1);
        let y = inner.y + row.round() as u16;
        let label = format!("{label:>width$}", width = usize::from(left) - 1);
        buffer.set_stringn(area.x, y, label, left.into(), dim);
    }
    let mut free = inner.x;
    for mark in across.marks() {
        let label = number(mark);
        let width = label.len() as u16;
        let at = inner.x + (across.at(mark) * f64::from(inner.width - 1)).round() as u16;
        let at = at
            .saturating_sub(width / 2)
            .min(inner.right() - width.min(inner.width));
        if mark.fract() == 0.0 && at >= free {
            buffer.set_stringn(at, inner.bottom(), label, inner.width.into(), dim);
            free = at + width + 2;
        }
    }
    let placed = |points: &[(f64, f64)]| -> Vec<(f64, f64)> {
        points.iter().map(|(x, y)| (*x, up.at(*y))).collect()
    };
    let lines: Vec<_> = lines
        .into_iter()
        .map(|(line, points)| (line, placed(&points)))
        .collect();
    // Runs are told apart by colours, or else by their numbers.
    let has_numbers = !theme.has_colors && lines.iter().any(|(line, _)| line.color > 0);
    Canvas::default()
        .x_bounds([0.0, 1.0])
        .y_bounds([0.0, 1.0])
        .paint(|context| {
            for (line, points) in &lines {
                context.marker(match (has_numbers, line.is_dotted) {
                    (true, _) => Marker::Custom(key(line.color)),
                    (false, true) => Marker::Custom(theme.point()),
                    (false, false) if theme.has_blocks => Marker::Braille,
                    (false, false) => Marker::Custom('.'),
                });
                draw(context, line, points, theme);
                context.layer();
            }
        })
        .render(inner, buffer);
    true
}

/// The number of a run in the picture.
pub(super) fn key(run: usize) -> char {
    char::from_digit(run as u32 + 1, 10).unwrap_or('*')
}

/// Means of a curve for each column of dots, as (place from 0 to 1, value).
fn points(curve: &Curve, first: u64, across: Axis, columns: f64) -> Vec<(f64, f64)> {
    let mut means: BTreeMap<u64, (f64, f64)> = BTreeMap::new();
    for piece in curve.since(first) {
        let place = across.at(piece.step as f64);
        let (count, sum) = means.entry((place * columns) as u64).or_default();
        *count += 1.0;
        *sum += piece.mean();
    }
    let mean = |(column, (count, sum)): (u64, (f64, f64))| (column as f64 / columns, sum / count);
    means.into_iter().map(mean).collect()
}

fn draw(context: &mut Context<'_>, line: &Line<'_>, points: &[(f64, f64)], theme: Theme) {
    let color = theme.series(line.color);
    context.draw(&Points {
        coords: points,
        color,
    });
    if line.is_dotted {
        return;
    }
    for pair in points.windows(2) {
        let [(x1, y1), (x2, y2)] = *pair else {
            continue;
        };
        context.draw(&canvas::Line::new(x1, y1, x2, y2, color));
    }
}

/// The mark before a run's name.
pub(super) fn mark(run: usize, theme: Theme) -> Span<'static> {
    let style = ratatui::style::Style::new().fg(theme.series(run));
    match theme.has_colors {
        true => Span::styled(theme.block(), style),
        false => Span::raw(key(run).to_string()),
    }
}
