//! One model over several devices: the parts of a model on different ranks or devices, with the bits of one process.

pub mod pipeline;
