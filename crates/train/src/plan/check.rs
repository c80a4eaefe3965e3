//! Predictions beside what real steps took. Pure.

use serde::Serialize;

use super::render::{aligned, bytes_text, seconds_text};

/// Layouts that were run.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// In the order in which they ran.
    pub rows: Vec<Checked>,
}

/// One of them.
#[derive(Clone, Debug, Serialize)]
pub struct Checked {
    /// The layout in words.
    pub layout: String,
    /// Its ranks.
    pub ranks: usize,
    /// Seconds of a step as predicted.
    pub predicted_seconds: f64,
    /// Seconds of the fastest step of all rounds, as its slowest rank saw it.
    pub seconds: f64,
    /// Peak bytes of a rank as predicted.
    pub predicted_bytes: f64,
    /// Those of the largest rank.
    pub bytes: f64,
    /// Bytes that a rank sends in a step, as predicted.
    pub predicted_sent: f64,
    /// Those of the rank that sends most.
    pub sent: f64,
}

impl Check {
    /// The table, and the largest errors.
    #[must_use]
    pub fn text(&self) -> String {
        let names = [
            "layout",
            "ranks",
            "step predicted",
            "measured",
            "error",
            "peak predicted",
            "measured",
            "error",
            "sent predicted",
            "measured",
            "error",
        ];
        let mut table = vec![names.map(str::to_owned)];
        for row in &self.rows {
            table.push([
                row.layout.clone(),
                row.ranks.to_string(),
                seconds_text(row.predicted_seconds),
                seconds_text(row.seconds),
                percent(error(row.predicted_seconds, row.seconds)),
                bytes_text(row.predicted_bytes),
                bytes_text(row.bytes),
                percent(error(row.predicted_bytes, row.bytes)),
                bytes_text(row.predicted_sent),
                bytes_text(row.sent),
                percent(sent_error(row)),
            ]);
        }
        let largest = |of: fn(&Checked) -> f64| {
            self.rows
                .iter()
                .map(|row| of(row).abs())
                .fold(0.0, f64::max)
        };
        let time = largest(|row| error(row.predicted_seconds, row.seconds));
        let memory = largest(|row| error(row.predicted_bytes, row.bytes));
        let sent = largest(sent_error);
        format!(
            "{}\nLargest error: {:.0} % of the time, {:.0} % of the memory, {:.0} % of the bytes sent.\n",
            aligned(&table),
            time * 100.0,
            memory * 100.0,
            sent * 100.0
        )
    }
}

/// By how much the prediction is too large, as a share of what was measured.
fn error(predicted: f64, measured: f64) -> f64 {
    predicted / measured.max(f64::MIN_POSITIVE) - 1.0
}

/// A rank alone sends nothing.
fn sent_error(row: &Checked) -> f64 {
    match row.sent > 0.0 {
        true => error(row.predicted_sent, row.sent),
        false => row.predicted_sent,
    }
}

fn percent(share: f64) -> String {
    format!("{:+.0} %", share * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_shares_of_what_was_measured() {
        let row = Checked {
            layout: "dp 2".into(),
            ranks: 2,
            predicted_seconds: 1.1,
            seconds: 1.0,
            predicted_bytes: 90e6,
            bytes: 100e6,
            predicted_sent: 7e6,
            sent: 7e6,
        };
        let text = Check { rows: vec![row] }.text();
        let cells: Vec<_> = text
            .lines()
            .nth(1)
            .expect("a row")
            .split_whitespace()
            .collect();
        let expect = "dp 2 2 1.10 s 1.00 s +10 % 90.0 MB 100 MB -10 % 7.00 MB 7.00 MB +0 %";
        assert_eq!(cells.join(" "), expect);
        assert!(
            text.ends_with(
                "Largest error: 10 % of the time, 10 % of the memory, 0 % of the bytes sent.\n"
            ),
            "{text}"
        );
    }
}
