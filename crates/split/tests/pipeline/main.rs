//! Pipelines of ranks as threads train to the bits of one rank.

mod failures;
mod parts;
mod same_bits;
mod support;
mod zero;
