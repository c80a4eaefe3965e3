//! What the devices and ranks of a job did over time, and how long all of them worked at once.
//!
//! A [`Source`] gives samples, a [`Tally`] adds them up, a [`Report`] tells what came of it: as text in English and Korean,
//! as JSON, and as a picture. [`Tracker`] does all three beside a running job; [`Replay`] does it with samples that were
//! recorded.
//!
//! - [`busy`]: busy time of several devices, and of all at once.
//! - [`idle`]: devices that do nothing, held or not.
//! - [`sample`]: what devices and ranks do at one moment.
//! - [`ranks`]: what ranks use of processors and memory.
//! - [`report`]: the figures of a job.
//! - [`files`]: files that appear whole.
//! - [`figures`]: numbers and times as people read them.
//! - [`memory`]: the peak memory of this process.
//! - [`spans`]: what ranks did in a step of training.
//!
//! ```
//! use paceline_gpu::places::Places;
//! use paceline_usage::{Lang, Options, Tracker};
//!
//! let tracker = Tracker::start(Options::default(), Places::from_env());
//! tracker.ranks().started(0, std::process::id());
//! // ... the job runs ...
//! let report = tracker.finish();
//! print!("{}", report.text(Lang::from_env(|name| std::env::var(name).ok())));
//! ```

pub mod busy;
mod csv;
pub mod environment;
pub mod figures;
pub mod files;
mod history;
pub mod idle;
mod machine;
pub mod memory;
pub mod ranks;
mod recording;
pub mod report;
pub mod sample;
pub mod spans;
mod svg;
mod tally;
mod text;
mod totals;
mod tracker;

use std::time::Duration;

use paceline_gpu::snapshot::DriverError;

use crate::sample::Sample;

pub use self::machine::Machine;
pub use self::recording::{RecordingError, Replay};
pub use self::report::Report;
pub use self::svg::bars::{Bar, Bars};
pub use self::svg::lanes::{Lane, Lanes, Piece};
pub use self::tally::Tally;
pub use self::totals::Rules;
pub use self::tracker::{Options, RankPids, Tracker};
pub use paceline_gpu::columns;
pub use paceline_words::Lang;

/// Where samples come from: the driver and the system, or a recording.
pub trait Source: Send {
    /// What devices and ranks do now; `at` is the time since sampling began. What cannot be read is missing in it.
    ///
    /// *Blocks*: as long as the driver does.
    fn sample(&mut self, at: Duration) -> Sample;

    /// Why there are no devices, where that is known.
    fn trouble(&self) -> Option<DriverError> {
        None
    }
}

#[cfg(test)]
mod tests;
