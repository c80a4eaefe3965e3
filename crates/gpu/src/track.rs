//! The usage tracker: how long all devices, or all ranks, of a job really worked at the same time.
//!
//! A [`Source`] gives samples, a [`Tally`] adds them up, a [`Report`] tells what came of it: as text in English and Korean,
//! as JSON, and as a picture. [`Tracker`] does all three beside a running job; [`Replay`] does it with samples that were
//! recorded.
//!
//! ```
//! use paceline_gpu::places::Places;
//! use paceline_gpu::track::{Lang, Options, Tracker};
//!
//! let tracker = Tracker::start(Options::default(), Places::from_env());
//! tracker.ranks().started(0, std::process::id());
//! // ... the job runs ...
//! let report = tracker.finish();
//! print!("{}", report.text(Lang::from_env(|name| std::env::var(name).ok())));
//! ```

mod csv;
mod history;
mod lang;
mod machine;
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

pub use self::lang::Lang;
pub use self::machine::Machine;
pub use self::recording::{RecordingError, Replay};
pub use self::report::Report;
pub use self::tally::Tally;
pub use self::totals::Rules;
pub use self::tracker::{Options, RankPids, Tracker};

/// Where samples come from: the driver and the system, or a recording.
pub trait Source: Send {
    /// What devices and ranks do now; `at` is the time since sampling began. What cannot be read is missing in it.
    ///
    /// *Blocks*: as long as the driver does.
    fn sample(&mut self, at: Duration) -> Sample;

    /// Why there are no devices, where that is known.
    fn trouble(&self) -> Option<Trouble> {
        None
    }
}

#[cfg(test)]
mod tests;
