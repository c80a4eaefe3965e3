//! What each command does.

pub(crate) mod bench;
pub(crate) mod doctor;
pub(crate) mod indices;
mod job;
mod logs;
pub(crate) mod run;
pub(crate) mod train;
pub(crate) mod worker;
