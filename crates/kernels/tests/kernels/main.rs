//! Tests of the kernels.

mod activations;
mod attention;
mod batch_norm;
mod conv;
mod functions;
mod gemm;
mod layer_norm;
mod support;
