//! Pipelines of ranks as threads train to the bits of one rank.

mod comm_hooks;
mod failures;
mod on_device;
mod parts;
mod same_bits;
mod support;
mod zero;
