//! Blocks and steps of our own compute the bits of ordinary layers.

mod adamw;
mod blocks;
mod checkpoint;
mod ema;
mod layers;
mod linear;
mod muon;
mod supply;
mod support;
mod tape;
