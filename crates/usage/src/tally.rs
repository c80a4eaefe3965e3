//! Totals and their course, fed together.

use std::time::Duration;

use super::history::History;
use super::totals::Totals;
use super::{Report, Rules};
use crate::sample::Sample;

/// All that a report is made of, in bounded memory.
///
/// *Example*:
/// ```
/// use std::time::Duration;
/// use paceline_gpu::sample::DeviceSample;
/// use paceline_usage::sample::Sample;
/// use paceline_usage::{Rules, Tally};
///
/// let mut tally = Tally::new(Rules::default(), Duration::from_secs(1));
/// for second in 0..=10 {
///     let device = |index, percent: u32| DeviceSample {
///         index,
///         utilization_percent: percent.into(),
///         ..DeviceSample::default()
///     };
///     let second_gpu = if second > 5 { 97 } else { 0 };
///     tally.add(&Sample {
///         at: Duration::from_secs(second),
///         devices: vec![device(0, 99), device(1, second_gpu)],
///         ranks: Vec::new(),
///     });
/// }
/// let both = tally.report().gpus_at_once.expect("two devices");
/// assert_eq!(both.all_busy_share, 0.5);
/// ```
#[derive(Debug)]
pub struct Tally {
    totals: Totals,
    history: History,
}

impl Tally {
    /// Nothing yet, of samples that come at this period.
    pub fn new(rules: Rules, period: Duration) -> Self {
        Self {
            totals: Totals::new(rules),
            history: History::new(period),
        }
    }

    /// Adds a sample.
    pub fn add(&mut self, sample: &Sample) {
        if self.totals.add(sample) {
            let origin_ns = self.totals.first_ns.unwrap_or(0);
            self.history.add(&self.totals.step, origin_ns);
        }
    }

    /// The report so far.
    pub fn report(&self) -> Report {
        Report::new(&self.totals, &self.history)
    }
}
