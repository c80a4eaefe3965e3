//! Burn modules and autodiff operations that know nothing of ranks: recomputed blocks and backward steps of our own.
//!
//! - [`Block`]: a part of a model that can be run in several ways with the same bits. A [`Pass`] says how.
//! - [`checkpoint`]: a recomputed part of a model without a [`Block`] around it.
//! - [`Supply`]: parameters that a block gets when it runs and drops afterwards.
//! - [`linear`]: a linear layer whose weight gradients a pass can leave for later; [`last_linear`], whose product a recomputed block
//!   saves; [`product`] and [`scores`], for weights that are not a layer's.
//! - [`conv1d`], [`conv2d`], [`batch_norm`], [`layer_norm`], [`rms_norm`], [`relu`], [`gelu`], [`silu`], [`sigmoid`], [`tanh`],
//!   [`softmax`]: Burn's own, faster on CPUs, with the same bits on any machine (a `batch_norm` in training, of inputs with more
//!   dimensions than batch and features). [`batch_norm_relu`] and [`batch_norm_add_relu`] save passes over memory.
//! - [`attention`]: of several heads, without a tensor of all weights.
//! - [`cross_entropy`] and [`AdamWConfig`]: Burn's loss and optimizer, in one pass over memory; [`MuonConfig`]: Burn's Muon, with the same
//!   bits on any machine; [`Ema`]: a moving average of the weights beside any optimizer.
//! - [`gpt`]: a language model made of [transformer blocks](TransformerBlock); [`vit`] and [`resnet`]: networks for images.
//! - [`tape`]: an output that was computed elsewhere, a gradient that is supplied from outside, a backward pass that starts
//!   from given gradients.

mod activation;
mod adamw;
mod attention;
mod block;
mod checkpoint;
mod conv;
mod ema;
mod failure;
pub mod gpt;
mod in_f32;
mod linear;
mod loss;
mod muon;
mod norm;
mod params;
mod pass;
pub mod resnet;
mod run;
mod supply;
pub mod tape;
mod tensors;
mod transformer;
mod turn;
mod values;
pub mod vit;

pub use activation::{gelu, relu, sigmoid, silu, softmax, tanh};
pub use adamw::{AdamW, AdamWConfig};
pub use attention::attention;
pub use block::{Block, visited_block, visited_is_shared};
pub use checkpoint::{CapturedTensor, checkpoint};
pub use conv::{conv1d, conv2d};
pub use ema::{Ema, EmaState};
pub use failure::{BoxError, Failure};
pub use in_f32::in_f32;
pub use linear::{WeightGradients, last_linear, linear, product, scores};
pub use loss::cross_entropy;
pub use muon::{Muon, MuonConfig};
pub use norm::{batch_norm, batch_norm_add_relu, batch_norm_relu, layer_norm, rms_norm};
pub use paceline_kernels::{Isa, IsaError, Kernels, compute_here};
pub use params::{MapParams, map_params};
pub use pass::{Pass, Recompute, RecomputeParseError, mix};
pub use run::draw_seed;
pub use supply::Supply;
pub use tensors::{Kind, MapTensors, Tensors, to_device};
pub use transformer::{TransformerBlock, TransformerBlockConfig};
pub use turn::Turn;
