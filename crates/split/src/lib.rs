//! One model over several devices: the parts of a model on different ranks or devices, with the bits of one process.

mod data_parallel;
mod model_parallel;
pub mod pipeline;
pub mod tensor;

pub use data_parallel::DataParallel;
pub use model_parallel::{ModelParallel, Part};
