//! Means over time, peaks with their moment, and stretches in which there was nothing to read.

use paceline_gpu::snapshot::Gap;

/// Mean of a value over time.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Mean {
    sum: u128,
    /// The time it is over.
    pub(crate) ns: u64,
}

impl Mean {
    pub(crate) fn add(&mut self, value: u64, ns: u64) {
        self.sum = self.sum.saturating_add(u128::from(value) * u128::from(ns));
        self.ns = self.ns.saturating_add(ns);
    }

    pub(crate) fn mean(&self) -> Option<f64> {
        (self.ns > 0).then(|| self.sum as f64 / self.ns as f64)
    }
}

/// The largest value, and when it was first seen.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Peak<T> {
    pub(crate) top: Option<(T, u64)>,
}

impl<T: PartialOrd + Copy> Peak<T> {
    pub(crate) fn add(&mut self, value: T, at_ns: u64) {
        if self.top.is_none_or(|(top, _)| value > top) {
            self.top = Some((value, at_ns));
        }
    }
}

/// Smallest, mean and largest value.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Spread {
    pub(crate) range: Option<(u32, u32)>,
    pub(crate) mean: Mean,
}

impl Spread {
    pub(crate) fn add(&mut self, value: u32, ns: u64) {
        let (least, most) = self.range.unwrap_or((value, value));
        self.range = Some((least.min(value), most.max(value)));
        self.mean.add(u64::from(value), ns);
    }
}

/// Something that flows: how much in all, and the highest rate.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Rate {
    pub(crate) mean: Mean,
    pub(crate) peak: Peak<u64>,
}

impl Rate {
    pub(crate) fn add(&mut self, per_second: u64, at_ns: u64, ns: u64) {
        self.mean.add(per_second, ns);
        self.peak.add(per_second, at_ns);
    }

    /// What has flowed.
    pub(crate) fn sum(&self) -> Option<u64> {
        let sum = self.mean.sum / 1_000_000_000;
        (self.mean.ns > 0).then(|| u64::try_from(sum).unwrap_or(u64::MAX))
    }
}

/// Reasons that are kept apart; the last one takes in all that come after.
const REASONS_MAX: usize = 8;

/// Time in which a value could not be read, for each reason.
#[derive(Debug, Default)]
pub(crate) struct Absence {
    pub(crate) stretches: Vec<Absent>,
}

/// Time in which a value could not be read for one reason.
#[derive(Debug, Clone)]
pub(crate) struct Absent {
    pub(crate) why: Gap,
    /// When it began.
    pub(crate) since_ns: u64,
    /// The last moment of it.
    pub(crate) until_ns: u64,
    /// How long it was in all.
    pub(crate) ns: u64,
}

impl Absence {
    pub(crate) fn add(&mut self, why: &Gap, span: super::Span) {
        let mut all = self.stretches.iter();
        let known = all.position(|stretch| stretch.why == *why);
        let place = known.or((self.stretches.len() >= REASONS_MAX).then_some(REASONS_MAX - 1));
        match place.and_then(|place| self.stretches.get_mut(place)) {
            Some(stretch) => {
                stretch.until_ns = span.at_ns;
                stretch.ns = stretch.ns.saturating_add(span.elapsed_ns);
            }
            None => self.stretches.push(Absent {
                why: why.clone(),
                since_ns: span.from_ns,
                until_ns: span.at_ns,
                ns: span.elapsed_ns,
            }),
        }
    }
}
