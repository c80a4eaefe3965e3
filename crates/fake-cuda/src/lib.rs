//! A stand-in for NVIDIA's CUDA driver and NCCL on host memory, for tests without a GPU.
//!
//! Built twice from the same source: as a C library that can be loaded as `libcuda.so.1` and as `libnccl.so.2`, and as a Rust
//! library that gives tests a [`Library`] to point a program at. The README describes the machines.

mod c_abi;
mod code;
mod device;
mod library;
mod machine;
mod nccl;
mod process;

pub use self::c_abi::{DRIVER_FUNCTIONS, NCCL_FUNCTIONS};
pub use self::library::{Library, Room};
