//! Pages and pictures of a run, from the files that it writes. Without Burn, so that looking at runs builds in seconds.
//!
//! - [`Run`]: what a run has written so far, in bounded memory however long it trains. [`Tail`]: its lines.
//! - [`charts()`]: the charts of several runs, and [`Axis`] to draw them anywhere.
//! - [`page()`]: one page of HTML about several runs; [`sections`] and [`document`] for a server of pages.
//! - [`words`]: the words of all of them in English and Korean.

mod chart;
mod charts;
mod curve;
mod error;
mod failure;
mod gantt;
mod incident;
mod page;
mod records;
mod run;
mod tail;
pub mod words;

pub use chart::{Axis, Line, Scale, escaped, number};
pub use charts::{ACCURACY, Chart, charts};
pub use curve::{Curve, Piece};
pub use error::ReportError;
pub use failure::{FAILURE, JobFailure};
pub use gantt::Spans;
pub use incident::Incident;
pub use page::{RUNS_MAX, document, page, sections, table};
pub use records::{End, Environment, RankEnd, Start, Straggler};
pub use run::{Run, Seen, State, runs_below};
pub use tail::{METRICS, Tail};
