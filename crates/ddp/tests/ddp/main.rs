//! Threads as ranks: the results of a step on any number of ranks.

mod comm_hooks;
mod double;
mod mixed;
mod overlap;
mod placement;
mod same_bits;
mod sharded;
mod step;
mod step_on;
#[cfg(feature = "burn-train")]
mod strategy;
mod support;
mod sync_batch_norm;
mod uneven;
mod verify;
mod zero;
