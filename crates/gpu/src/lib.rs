//! What the machine is and does. Works on a host with no GPU, or a broken one.
//!
//! - [`devices`]: the GPUs that NVIDIA's driver reports.
//! - [`usage`]: how long all devices really worked at the same time.
//! - [`memory`]: the memory a process has used at most.

pub mod devices;
pub mod memory;
pub mod usage;
