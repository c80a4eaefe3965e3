//! Burn modules and autodiff operations that know nothing of ranks: recomputed blocks and backward steps of our own.
//!
//! - [`Block`]: a part of a model that can be run in several ways with the same bits. A [`Pass`] says how.
//! - [`checkpoint`]: a recomputed part of a model without a [`Block`] around it.
//! - [`Supply`]: parameters that a block gets when it runs and drops afterwards.
//! - [`linear`]: a linear layer whose weight gradients a pass can leave for later; [`last_linear`], whose product a recomputed block
//!   saves.
//! - [`conv2d`] and [`batch_norm`]: Burn's layers, faster on CPUs, with the same bits on any machine.
//! - [`gpt`]: a language model made of blocks.
//! - [`tape`]: an output that was computed elsewhere, a gradient that is supplied from outside, a backward pass that starts
//!   from given gradients.

mod block;
mod checkpoint;
mod failure;
pub mod gpt;
mod in_f32;
mod layers;
mod linear;
mod params;
mod pass;
mod run;
mod supply;
pub mod tape;
mod tensors;
mod turn;
mod values;

pub use block::{Block, visited_block, visited_is_shared};
pub use checkpoint::{CapturedTensor, checkpoint};
pub use failure::{BoxError, Failure};
pub use in_f32::in_f32;
pub use layers::{batch_norm, conv2d};
pub use linear::{WeightGradients, last_linear, linear};
pub use paceline_kernels::{Isa, IsaError, Kernels};
pub use params::{MapParams, map_params};
pub use pass::{Pass, Recompute, RecomputeParseError, mix};
pub use run::draw_seed;
pub use supply::Supply;
pub use tensors::{Kind, MapTensors, Tensors, to_device};
pub use turn::Turn;
