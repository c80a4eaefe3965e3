//! Blocks and steps of our own compute the bits of ordinary layers.

mod blocks;
mod checkpoint;
mod support;
mod tape;
