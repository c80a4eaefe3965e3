//! Tests of the kernels.

mod activations;
mod adamw;
mod attention;
mod batch_norm;
mod conv;
mod cross_entropy;
mod functions;
mod gemm;
mod layer_norm;
mod lerp;
mod softmax;
mod support;
