//! The library behind the Python package `paceline`: process groups of `paceline-collective` and the tracker of `paceline-usage` as C
//! functions, loaded with ctypes. It knows
//! neither Python nor PyTorch.
//!
//! # Handles
//!
//! Groups, works and servers are numbers. A number that is none, or no longer, is a failure and not a crash. So is a number of the parent
//! process in a forked child, where none of the parent's threads runs: the child may form groups of its own.
//!
//! # Calls
//!
//! A [`Call`] is an operation on the caller's memory, given as [`Span`]s. [`paceline_run`] returns when it is over;
//! [`paceline_submit`] gives a work, to wait for or to be told of. Collective operations of a group run in the order of their submission.
//! Sends run in the order of their submission to each rank, receives are matched in the order of theirs, and both make progress whether or
//! not anybody waits, so that two ranks may first wait for their sends and then for their receives.
//!
//! # Live recovery
//!
//! When a rank is lost, the others go on with the next generation of the group ([`paceline_next_generation`]), which has a number of its own.
//! They then compare how far each has come ([`paceline_settle`]): the program completes the commit that it is in, or repeats it.
//!
//! # Usage
//!
//! [`paceline_track`] tracks what the process uses, as `paceline run` does for ranks, without a group. There is one tracker in a process at a
//! time, so it has no number.
//!
//! # Runs
//!
//! [`paceline_record`] notes what the process does in each step, as [`paceline_set_phase`] and its calls tell it, and rank 0 writes that in a run
//! directory, for `paceline watch` and `paceline report`.
//!
//! # Failures
//!
//! Functions return [`OK`], [`PENDING`] or [`FAILED`]. After a failure, [`paceline_text`] is a report in JSON ([`Failure`]). A panic is a
//! failure too, and never reaches the caller.

mod abi;
mod call;
mod failure;
mod group;
mod handles;
mod memory;
mod recorder;
mod recovery;
mod settings;
mod steps;
mod track;
mod work;
mod worker;

pub use self::abi::{
    FAILED, OK, PENDING, paceline_abort, paceline_close, paceline_forget, paceline_host,
    paceline_join, paceline_next_finished, paceline_notify, paceline_record, paceline_run,
    paceline_set_phase, paceline_set_timeout, paceline_subgroup, paceline_submit, paceline_text,
    paceline_track, paceline_track_end, paceline_tracked, paceline_version, paceline_wait,
};
pub use self::call::{Call, Kind};
pub use self::failure::Failure;
pub use self::memory::Span;
pub use self::recovery::{
    paceline_declare, paceline_next_generation, paceline_outlook, paceline_settle,
    paceline_wait_while_held,
};
