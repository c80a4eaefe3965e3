//! The usage tracker: how long all devices, or all ranks, of a job really worked at the same time.

mod history;
mod totals;

use std::time::Duration;

use crate::sample::Sample;

pub use self::history::{BUCKETS, History};
pub use self::totals::{RANKS_MAX, Rules, Totals};

/// Where samples come from: the driver and the system, or a recording.
pub trait Source: Send {
    /// What devices and ranks do now; `at` is the time since sampling began. What cannot be read is missing in it.
    ///
    /// *Blocks* - as long as the driver does.
    fn sample(&mut self, at: Duration) -> Sample;
}
