//! The figures of each row of a comparison, from the runs that it had.

use std::collections::BTreeSet;

use serde::Serialize;

use super::records::{Busy, Run};

/// A row and its runs.
#[derive(Clone, Debug, Default)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) ranks: usize,
    pub(super) replicas: Option<usize>,
    pub(super) runs: Vec<Run>,
}

/// What the runs of a row came to. Figures of several rounds are their medians, memory is their maximum.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Figures {
    pub(super) name: String,
    pub(super) ranks: usize,
    /// Replicas of the model, if one rank has them all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) replicas: Option<usize>,
    /// Rounds that ended well.
    pub(super) rounds: usize,
    pub(super) seconds: Spread,
    pub(super) samples_per_second: Option<f64>,
    /// How many times faster than the first row.
    pub(super) speed_up: f64,
    /// Speed-up by what the ranks would give at best, the first row's being 1.
    pub(super) efficiency: f64,
    /// The share of the time in which all were busy at once.
    pub(super) all_busy_share: Option<f64>,
    pub(super) busy: Busy,
    /// Peak memory of the rank that had the most.
    pub(super) peak_bytes: Option<u64>,
    /// Peak memory of the device that had the most.
    pub(super) gpu_peak_bytes: Option<u64>,
    /// Devices that did no work in one of the rounds.
    pub(super) idle_gpus: Vec<u32>,
    /// The rank that waited most for data.
    pub(super) waited_for_data: Option<Wait>,
    /// The rank that waited most for other ranks.
    pub(super) waited_for_ranks: Option<Wait>,
    /// Hashes of the trained weights; one if all rounds agree.
    pub(super) weights_sha256: Vec<String>,
    pub(super) runs: Vec<Run>,
}

/// Fastest, median and slowest round, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) least: f64,
    pub(super) most: f64,
}

/// The share of the time in which a rank waited.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Wait {
    pub(super) rank: usize,
    pub(super) share: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64> + Clone) -> Self {
        Self {
            median: median(values.clone()).unwrap_or_default(),
            least: values.clone().fold(f64::INFINITY, f64::min),
            most: values.fold(0.0, f64::max),
        }
    }

    /// `1.28 s to 1.70 s`
    pub(super) fn range(&self) -> String {
        format!(
            "{} to {}",
            seconds_text(self.least),
            seconds_text(self.most)
        )
    }

    /// Whether one is not clearly below the other.
    fn overlaps(&self, other: &Self) -> bool {
        self.least <= other.most && other.least <= self.most
    }
}

/// The figures of all rows that ran at least once, up to the first that did not; `samples` are those of one run.
pub(super) fn figures(rows: Vec<Row>, samples: Option<u64>) -> Vec<Figures> {
    let mut all: Vec<Figures> = rows
        .into_iter()
        .take_while(|row| !row.runs.is_empty())
        .map(|row| of_row(row, samples))
        .collect();
    if let Some(first) = all.first().cloned() {
        for row in &mut all {
            row.speed_up = ratio(first.seconds.median, row.seconds.median);
            row.efficiency = ratio(row.speed_up, row.ideal(&first));
        }
    }
    all
}

impl Figures {
    /// Whether the difference to another row may be noise, by the spreads of both. A single round has none.
    pub(super) fn may_equal(&self, other: &Self) -> bool {
        self.has_spread() && other.has_spread() && self.seconds.overlaps(&other.seconds)
    }

    pub(super) fn has_spread(&self) -> bool {
        self.rounds > 1
    }

    /// The speed-up against the first row if each rank or replica did an equal part of its work.
    pub(super) fn ideal(&self, first: &Self) -> f64 {
        let parts = |row: &Self| row.replicas.unwrap_or(row.ranks) as f64;
        ratio(parts(self), parts(first))
    }
}

fn of_row(row: Row, samples: Option<u64>) -> Figures {
    let runs = &row.runs;
    let seconds = Spread::of(runs.iter().map(|run| run.seconds));
    let recorded = median(runs.iter().filter_map(|run| run.samples_per_second));
    let most = |bytes: fn(&Run) -> &Vec<Option<u64>>| runs.iter().flat_map(bytes).copied().max()?;
    let idle: BTreeSet<u32> = runs.iter().flat_map(|run| run.idle_gpus.clone()).collect();
    let hashes: BTreeSet<_> = runs
        .iter()
        .filter_map(|run| run.weights_sha256.clone())
        .collect();
    Figures {
        name: row.name,
        ranks: row.ranks,
        replicas: row.replicas,
        rounds: runs.len(),
        seconds,
        samples_per_second: recorded.or(samples.map(|count| ratio(count as f64, seconds.median))),
        speed_up: 0.0,
        efficiency: 0.0,
        all_busy_share: median(runs.iter().filter_map(|run| run.all_busy_share)),
        busy: runs[0].busy,
        peak_bytes: most(|run| &run.peak_bytes),
        gpu_peak_bytes: most(|run| &run.gpu_peak_bytes),
        idle_gpus: idle.into_iter().collect(),
        waited_for_data: longest(runs, |run| &run.waited_for_data),
        waited_for_ranks: longest(runs, |run| &run.waited_for_ranks),
        weights_sha256: hashes.into_iter().collect(),
        runs: row.runs,
    }
}

/// The wait of the rank that waited longest, by the medians of the rounds.
fn longest(runs: &[Run], shares: fn(&Run) -> &Vec<f64>) -> Option<Wait> {
    let of_rank =
        |rank: usize| median(runs.iter().filter_map(|run| shares(run).get(rank).copied()));
    let waits = (0..).map_while(|rank| Some((rank, of_rank(rank)?)));
    let (rank, share) = waits.max_by(|a, b| a.1.total_cmp(&b.1))?;
    Some(Wait { rank, share })
}

/// The middle value, or the mean of the two in the middle, if there is a value.
pub(super) fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    let upper = *values.get(half)?;
    match values.len() % 2 {
        1 => Some(upper),
        _ => Some(f64::midpoint(values[half - 1], upper)),
    }
}

/// 0 where there is nothing to divide by.
fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

/// `46 %`
pub(super) fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// A time as people read it: `3.21 s`, `321.0 s`, `35 min 12 s`.
pub(super) fn seconds_text(seconds: f64) -> String {
    match seconds {
        ..10.0 => format!("{seconds:.2} s"),
        ..600.0 => format!("{seconds:.1} s"),
        _ => {
            let whole = seconds.round() as u64;
            match whole / 3600 {
                0 => format!("{} min {} s", whole / 60, whole % 60),
                hours => format!("{hours} h {} min", whole % 3600 / 60),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ranks: usize, seconds: &[f64]) -> Row {
        let run = |seconds: &f64| Run {
            seconds: *seconds,
            ..Run::default()
        };
        Row {
            name: ranks.to_string(),
            ranks,
            replicas: None,
            runs: seconds.iter().map(run).collect(),
        }
    }

    #[test]
    fn a_median_is_in_the_middle() {
        let check = |values: &[f64], expect| assert_eq!(median(values.iter().copied()), expect);
        check(&[3.0, 1.0, 2.0], Some(2.0));
        check(&[4.0, 1.0, 2.0, 3.0], Some(2.5));
        check(&[], None);
    }

    #[test]
    fn speed_up_and_efficiency_are_against_the_first_row() {
        let check = |rows: &[Row], expect: &[(f64, f64)]| {
            let found = figures(rows.to_vec(), None);
            let found = found.iter().map(|row| (row.speed_up, row.efficiency));
            assert_eq!(found.collect::<Vec<_>>(), expect);
        };
        let one = || row(1, &[35.0, 36.0, 34.0]);
        check(&[one(), row(2, &[17.5])], &[(1.0, 1.0), (2.0, 1.0)]);
        check(&[one(), row(2, &[70.0])], &[(1.0, 1.0), (0.5, 0.25)]);
        check(&[row(2, &[4.0]), row(1, &[8.0])], &[(1.0, 1.0), (0.5, 1.0)]);
        check(&[one(), row(2, &[]), row(4, &[1.0])], &[(1.0, 1.0)]);
        check(&[row(1, &[]), row(2, &[1.0])], &[]);
        check(&[row(1, &[0.0]), row(2, &[1.0])], &[(0.0, 0.0), (0.0, 0.0)]);
    }

    #[test]
    fn a_row_has_the_medians_of_its_rounds_and_the_most_memory() {
        let run = |seconds, share, bytes: &[u64]| Run {
            seconds,
            all_busy_share: Some(share),
            peak_bytes: bytes.iter().copied().map(Some).collect(),
            ..Run::default()
        };
        let row = Row {
            ranks: 2,
            runs: vec![
                run(3.0, 0.4, &[5, 9]),
                run(2.0, 0.6, &[7, 1]),
                run(4.0, 0.5, &[]),
            ],
            ..Row::default()
        };
        let found = &figures(vec![row], Some(300))[0];
        let spread = Spread {
            median: 3.0,
            least: 2.0,
            most: 4.0,
        };
        assert_eq!((found.seconds, found.rounds), (spread, 3));
        assert_eq!((found.all_busy_share, found.busy), (Some(0.5), Busy::Ranks));
        assert_eq!(
            (found.peak_bytes, found.samples_per_second),
            (Some(9), Some(100.0))
        );
    }

    #[test]
    fn what_a_training_recorded_comes_before_the_samples_that_were_given() {
        let run = |waited: [f64; 2], hash: &str| Run {
            seconds: 1.0,
            samples_per_second: Some(50.0),
            waited_for_data: waited.to_vec(),
            weights_sha256: Some(hash.to_owned()),
            ..Run::default()
        };
        let of = |hashes: [&str; 2]| {
            let runs = vec![run([0.1, 0.5], hashes[0]), run([0.2, 0.1], hashes[1])];
            let row = Row {
                ranks: 2,
                runs,
                ..Row::default()
            };
            figures(vec![row], Some(7)).remove(0)
        };
        let found = of(["b", "b"]);
        assert_eq!(found.samples_per_second, Some(50.0));
        let wait = Wait {
            rank: 1,
            share: 0.3,
        };
        assert_eq!(found.waited_for_data, Some(wait));
        assert_eq!(found.waited_for_ranks, None);
        assert_eq!(found.weights_sha256, ["b"]);
        assert_eq!(of(["b", "a"]).weights_sha256, ["a", "b"]);
    }

    #[test]
    fn spreads_that_touch_overlap() {
        let of = |least, most| Spread {
            median: least,
            least,
            most,
        };
        let check = |a: Spread, b: Spread, expect| {
            assert_eq!(
                (a.overlaps(&b), b.overlaps(&a)),
                (expect, expect),
                "{a:?} {b:?}"
            );
        };
        check(of(1.0, 2.0), of(2.0, 3.0), true);
        check(of(1.0, 4.0), of(2.0, 3.0), true);
        check(of(1.0, 1.9), of(2.0, 3.0), false);
    }

    #[test]
    fn times_are_told_in_units_that_people_use() {
        let check = |seconds, expect| assert_eq!(seconds_text(seconds), expect);
        check(0.0, "0.00 s");
        check(3.214, "3.21 s");
        check(321.04, "321.0 s");
        check(2112.4, "35 min 12 s");
        check(7384.0, "2 h 3 min");
    }
}
