//! Burn modules and autodiff operations that know nothing of ranks: recomputed blocks and backward steps of our own.
//!
//! - [`Block`]: a part of a model that can be run in several ways with the same bits. A [`Pass`] says how.
//! - [`checkpoint`]: a recomputed part of a model without a [`Block`] around it.
//! - [`tape`]: an output that was computed elsewhere, a gradient that is supplied from outside, a backward pass that starts
//!   from given gradients.

mod block;
mod checkpoint;
mod failure;
mod params;
mod pass;
pub mod tape;
mod tensors;

pub use block::Block;
pub use checkpoint::{CapturedTensor, checkpoint};
pub use failure::{BoxError, Failure};
pub use params::{MapParams, map_params};
pub use pass::{Pass, Recompute, RecomputeParseError, mix};
pub use tensors::{MapTensors, Tensors};
