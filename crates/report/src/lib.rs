//! Pages and pictures of a run, from the files that it writes. Without Burn, so that looking at runs builds in seconds.
//!
//! - [`Run`]: what a run has written so far, in bounded memory however long it trains.
//! - [`Curve`]: one of its figures over steps.
//! - [`page()`]: one page of HTML about several runs.

mod chart;
mod curve;
mod error;
mod page;
mod run;
mod words;

pub use curve::{Curve, Piece};
pub use error::ReportError;
pub use page::{RUNS_MAX, page};
pub use run::Run;
