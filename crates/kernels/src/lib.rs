//! Compute kernels for CPUs. They know neither Burn nor ranks.
//!
//! **One rule for all: the order of an output's operations is fixed by shapes alone.** An output of a product is one chain of fused
//! multiply-adds, or a sum over a fixed number of such chains; a convolution may take a fixed combination of several (`winograd.rs`); a sum over a
//! row has 32 lanes, whatever the width of the registers. Vector lanes, register tiles, cache blocks and threads are otherwise only ever spread over
//! outputs, so the bits are the same on every instruction set ([`Isa`]), with any number of threads, and on any machine. No function of the system's
//! math library takes part, but for the fused multiply-add itself where the processor has none. Which bits a NaN has is left open.
//!
//! - [`Kernels`]: the kernels of one instruction set, by default the widest that the processor has.
//! - [`Conv`]: a two-dimensional convolution, with the gradients of its input, its weight and its bias.
//! - [`Gemm`]: a product of two matrices.
//! - [`Attention`]: fused, with its gradients.
//! - [`BatchNorm`]: batch normalisation in training, with a sum and an activation [`After`] it if need be, and its gradients.
//! - [`LayerNorm`]: layer normalisation, and that by the root mean square, with their gradients.
//! - [`Kernels::softmax`], [`Kernels::cross_entropy`]: probabilities from logits and the loss of a classifier, with their gradients.
//! - [`Kernels::exp`], [`Kernels::log`], [`Kernels::tanh`], [`Kernels::erf`]: functions of each value.
//! - [`Kernels::relu`], [`Kernels::gelu`], [`Kernels::silu`], [`Kernels::sigmoid`]: activations, with their gradients.
//! - [`AdamW`]: steps of an optimizer. [`Kernels::lerp`]: a step of a moving average.
//!
//! Values are `f32`, tensors are slices in row-major order. Threads are those of rayon's current pool; [`compute_here`] makes the calling one
//! one of them.

mod activations;
mod adamw;
mod attention;
mod batch_norm;
mod by_rows;
mod conv;
mod cross_entropy;
mod functions;
mod gemm;
mod isa;
mod layer_norm;
mod lerp;
mod peak;
mod pointwise;
mod product;
mod registers;
mod resample;
mod scratch;
mod softmax;
mod sums;
mod threads;
mod transpose;
mod winograd;

pub use adamw::AdamW;
pub use attention::{Attention, AttentionGradients, AttentionSums};
pub use batch_norm::{After, BatchNorm, BatchNormGradients, Moments};
pub use conv::Conv;
pub use cross_entropy::RowSums;
pub use gemm::Gemm;
pub use isa::{Isa, IsaError, Kernels};
pub use layer_norm::{LayerNorm, LayerNormGradients, RowMoments};
pub use resample::{Tap, WEIGHT_BITS};
pub use threads::compute_here;
