//! Tests of the kernels.

mod batch_norm;
mod conv;
mod functions;
mod gelu;
mod layer_norm;
mod support;
