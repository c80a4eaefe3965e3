//! A plan as text. Pure.

use std::fmt::Write;

use super::Plan;
use super::choose::Row;

/// Rows of a table that has more than the fastest layout of each kind.
const ROWS_MAX: usize = 16;

impl Plan {
    /// The table and the verdict. Layouts that another one of the same kind beats in time and memory are left out, and in a long
    /// table all but the fastest of each kind.
    #[must_use]
    pub fn text(&self) -> String {
        let mut table = vec![
            [
                "layout",
                "weights",
                "gradients",
                "buckets",
                "optimizer",
                "activations",
                "peak",
                "sent/step",
                "step",
                "",
            ]
            .map(str::to_owned),
        ];
        let shown = self.shown();
        for at in &shown {
            let row = &self.rows[*at];
            let memory = row.cost.memory;
            let mark = match (self.choice == Some(*at), row.fits) {
                (true, _) => "<- take this",
                (_, false) => "does not fit",
                _ => "",
            };
            let sizes = [
                memory.weights,
                memory.gradients,
                memory.buckets,
                memory.optimizer,
                memory.activations,
                memory.peak,
                row.cost.wire,
            ];
            let [a, b, c, d, e, f, g] = sizes.map(bytes_text);
            table.push([
                row.layout.clone(),
                a,
                b,
                c,
                d,
                e,
                f,
                g,
                seconds_text(row.cost.seconds.step),
                mark.into(),
            ]);
        }
        let mut text = aligned(&table);
        let running = self.rows.iter().filter(|row| row.runs()).count();
        let worse = running.saturating_sub(shown.len());
        if worse > 0 {
            let _ = writeln!(
                text,
                "{worse} more layouts are no faster than one of their kind here, or do not fit; --json has them."
            );
        }
        text.push('\n');
        for reason in &self.reasons {
            let _ = writeln!(text, "{reason}");
        }
        let command = self.choice.and_then(|at| self.rows[at].command.as_ref());
        if let Some(command) = command {
            let _ = writeln!(text, "\n{command}");
        }
        text
    }

    /// Rows that no other beats in both time and memory, the simplest, and the chosen one.
    fn shown(&self) -> Vec<usize> {
        let better = |a: &Row, b: &Row| {
            a.cost.seconds.step <= b.cost.seconds.step * 1.001
                && a.cost.memory.peak < b.cost.memory.peak * 0.999
        };
        let kind = |row: &Row| (row.parts.pp > 1, row.parts.tp > 1, row.parts.zero);
        let runs = |at: &usize| self.rows[*at].runs();
        let is_worth = |at: &usize| {
            let row = &self.rows[*at];
            let others = self
                .rows
                .iter()
                .filter(|other| other.runs() && kind(other) == kind(row));
            *at == 0
                || self.choice == Some(*at)
                || !others.into_iter().any(|other| better(other, row))
        };
        let mut shown: Vec<usize> = (0..self.rows.len()).filter(runs).filter(is_worth).collect();
        if shown.len() > ROWS_MAX {
            // The fastest of each kind.
            let fastest = |at: &usize| {
                let row = &self.rows[*at];
                let others = shown.iter().map(|other| &self.rows[*other]);
                let mut same = others.filter(|other| kind(other) == kind(row));
                same.all(|other| {
                    (!other.fits, other.cost.seconds.step) >= (!row.fits, row.cost.seconds.step)
                })
            };
            let best: Vec<usize> = shown
                .iter()
                .filter(|at| **at == 0 || self.choice == Some(**at) || fastest(at))
                .copied()
                .collect();
            shown = best;
        }
        shown
    }
}

pub(super) fn aligned<const N: usize>(table: &[[String; N]]) -> String {
    let width = |column: usize| {
        table
            .iter()
            .map(|row| row[column].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..N).map(width).collect();
    let mut text = String::new();
    for row in table {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = widths[column];
            let _ = match column {
                0 => write!(line, "{cell:width$}"),
                _ if column + 1 == N => write!(line, "  {cell}"),
                _ => write!(line, "  {cell:>width$}"),
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Three digits, in decimal units.
pub(super) fn bytes_text(bytes: f64) -> String {
    let units = [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    match units.into_iter().find(|(unit, _)| bytes >= *unit) {
        None if bytes < 0.5 => "-".into(),
        None => format!("{bytes:.0} B"),
        Some((unit, name)) => format!("{} {name}", digits(bytes / unit)),
    }
}

pub(super) fn seconds_text(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{} s", digits(s)),
        s => format!("{} ms", digits(s * 1e3)),
    }
}

fn digits(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}
