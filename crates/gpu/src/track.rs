//! The usage tracker: how long all devices, or all ranks, of a job really worked at the same time.
//!
//! A [`Source`] gives samples, a [`Tally`] adds them up, a [`Report`] tells what came of it: as text in English and Korean,
//! as JSON, and as a picture. [`Tracker`] does all three beside a running job; [`Replay`] does it with samples that were
//! recorded.

mod csv;
mod history;
mod lang;
mod recording;
pub mod report;
mod svg;
mod tally;
mod text;
mod totals;
mod tracker;

use std::time::Duration;

use crate::sample::Sample;
use crate::snapshot::Trouble;

pub use self::history::{BUCKETS, History};
pub use self::lang::Lang;
pub use self::recording::{RecordingError, Replay};
pub use self::report::Report;
pub use self::tally::Tally;
pub use self::totals::{RANKS_MAX, Rules, Totals};
pub use self::tracker::{Options, RankPids, Tracker};

/// Where samples come from: the driver and the system, or a recording.
pub trait Source: Send {
    /// What devices and ranks do now; `at` is the time since sampling began. What cannot be read is missing in it.
    ///
    /// *Blocks* - as long as the driver does.
    fn sample(&mut self, at: Duration) -> Sample;

    /// Why there are no devices, where that is known.
    fn trouble(&self) -> Option<Trouble> {
        None
    }
}

#[cfg(test)]
mod tests;
