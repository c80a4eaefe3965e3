//! Pipelines: a model as a sequence of stages on different ranks, which work on different micro-batches at once.
//!
//! [`PipelineSize::plan`] says what each rank does in which order, as plain data, and [`simulate`] plays such a plan.

mod cut;
mod error;
mod measure;
mod model;
mod order;
mod run;
mod schedule;
mod simulate;
mod tied;
mod wire;

pub use cut::cut;
pub use error::PipelineError;
pub use measure::measure;
pub use model::Sequential;
pub use run::{Busy, MicroBatches, Pipeline, PipelineOptions};
pub use schedule::{Act, Action, PipelineSize, Schedule, ScheduleParseError};
pub use simulate::{Interval, Trace, in_flight, simulate, unit_cost, whole_cost};
