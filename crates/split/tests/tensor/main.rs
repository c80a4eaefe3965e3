//! Tensor parallelism: the bits wherever the parts are, against ordinary layers, with data parallelism, and with ranks that leave.

mod data_parallel;
mod failures;
mod gpt;
mod support;
mod vocabulary;
