//! A comparison as a table, JSON, CSV and a picture.

use std::fmt::Write as _;
use std::path::Path;

use paceline_gpu::columns::aligned;
use paceline_usage::{Bar, Bars};
use serde::Serialize;

use super::CompareArgs;
use super::figures::{Figures, Row, figures, percent, seconds_text};
use super::verdict::verdict;

/// Version of the JSON's fields.
const VERSION: u32 = 1;

/// What is told of a comparison.
#[derive(Serialize)]
pub(super) struct Comparison {
    paceline_compare: u32,
    program: String,
    rounds: usize,
    /// The folder with the output and the records of every run.
    folder: String,
    rows: Vec<Figures>,
    verdict: Vec<String>,
}

impl Comparison {
    /// The comparison of what has run, on a machine with so many cores.
    pub(super) fn new(args: &CompareArgs, rows: Vec<Row>, folder: &Path, cores: usize) -> Self {
        let rows = figures(rows, args.samples);
        let verdict = verdict(&rows, cores);
        Self {
            paceline_compare: VERSION,
            program: program(args),
            rounds: args.rounds,
            folder: folder.display().to_string(),
            rows,
            verdict,
        }
    }

    /// Whether nothing has run to its end.
    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The table, and the sentences below it.
    pub(super) fn text(&self) -> String {
        let mut table: Vec<Vec<String>> = vec![Vec::new(); self.rows.len() + 1];
        for (head, cell) in &COLUMNS {
            let cells: Vec<Option<String>> = self.rows.iter().map(cell).collect();
            if cells.iter().any(Option::is_some) {
                let cells = cells
                    .into_iter()
                    .map(|cell| cell.unwrap_or_else(|| "-".to_owned()));
                let cells = std::iter::once((*head).to_owned()).chain(cells);
                table
                    .iter_mut()
                    .zip(cells)
                    .for_each(|(row, cell)| row.push(cell));
            }
        }
        let mut text = format!("{}\n\n{}\n", self.program, aligned(&table));
        for sentence in &self.verdict {
            let _ = writeln!(text, "{sentence}");
        }
        let _ = writeln!(text, "Output and records of every run: {}", self.folder);
        text
    }

    /// All figures on one line, with those of every run.
    pub(super) fn json(&self) -> String {
        // Plain data: encoding does not fail.
        let mut text = serde_json::to_string(self).unwrap_or_default();
        text.push('\n');
        text
    }

    /// One line for each row; bytes, seconds, and shares from 0 to 1.
    pub(super) fn csv(&self) -> String {
        let mut text = "row,ranks,rounds,median_s,least_s,most_s,samples_per_second,speed_up,efficiency,all_busy_share,peak_bytes,gpu_peak_bytes,weights_sha256\n".to_owned();
        for row in &self.rows {
            let cells = [
                row.name.clone(),
                row.ranks.to_string(),
                row.rounds.to_string(),
                row.seconds.median.to_string(),
                row.seconds.least.to_string(),
                row.seconds.most.to_string(),
                or_empty(row.samples_per_second),
                row.speed_up.to_string(),
                row.efficiency.to_string(),
                or_empty(row.all_busy_share),
                or_empty(row.peak_bytes),
                or_empty(row.gpu_peak_bytes),
                row.weights_sha256.join(" "),
            ];
            text.push_str(&(cells.join(",") + "\n"));
        }
        text
    }

    /// The picture.
    pub(super) fn svg(&self) -> String {
        let first = self.rows.first();
        let bar = |row: &Figures| Bar {
            name: row.name.clone(),
            median_s: row.seconds.median,
            least_s: row.seconds.least,
            most_s: row.seconds.most,
            ideal_s: first.map(|first| first.seconds.median / row.ideal(first)),
            all_busy_share: row.all_busy_share,
            figure: format!(
                "{}, speed-up {:.2}",
                seconds_text(row.seconds.median),
                row.speed_up
            ),
        };
        let fastest = self
            .rows
            .iter()
            .max_by(|a, b| a.speed_up.total_cmp(&b.speed_up));
        let title = match (first, fastest) {
            (Some(first), Some(row)) if row.speed_up > 1.0 && !row.may_equal(first) => {
                format!(
                    "{} took {:.2} of the time of {}",
                    row.name,
                    1.0 / row.speed_up,
                    first.name
                )
            }
            (Some(first), _) => format!("Nothing was shown to be faster than {}", first.name),
            (None, _) => String::new(),
        };
        let rounds = paceline_words::counted(self.rounds, "round");
        Bars {
            title,
            subtitle: format!("{}: median of {rounds}", self.program),
            rows: self.rows.iter().map(bar).collect(),
        }
        .svg()
    }
}

type Cell = fn(&Figures) -> Option<String>;

/// The columns of the table; one without any value is left out.
const COLUMNS: [(&str, Cell); 9] = [
    ("", |row| Some(row.name.clone())),
    ("time", |row| Some(seconds_text(row.seconds.median))),
    ("fastest to slowest", |row| {
        row.has_spread().then(|| row.seconds.range())
    }),
    ("samples/s", |row| {
        Some(format!("{:.0}", row.samples_per_second?))
    }),
    ("speed-up", |row| Some(format!("{:.2}", row.speed_up))),
    ("efficiency", |row| Some(percent(row.efficiency))),
    ("all busy", |row| row.all_busy_share.map(percent)),
    ("memory of a rank", |row| row.peak_bytes.map(megabytes)),
    ("memory of a GPU", |row| row.gpu_peak_bytes.map(megabytes)),
];

fn megabytes(bytes: u64) -> String {
    format!("{} MB", bytes / 1_000_000)
}

fn or_empty(value: Option<impl ToString>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}

/// What was compared, on one line.
fn program(args: &CompareArgs) -> String {
    if args.is_training {
        return "paceline train".to_owned();
    }
    let args = std::iter::once(&args.options.program).chain(&args.rows[0].args);
    let words: Vec<_> = args.map(|word| word.to_string_lossy()).collect();
    words.join(" ")
}
