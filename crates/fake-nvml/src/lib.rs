//! A stand-in for NVIDIA's management library, and for the system around the devices, for tests without a GPU.
//!
//! Built twice from the same source: as a C library that answers NVML's functions from a JSON file, and as a Rust library with
//! which tests take a [`Fixture`] and point a program at it. The README says what the files may hold.

mod c_abi;
mod fixture;
mod library;
mod model;
mod root;
mod state;

pub use self::c_abi::FUNCTIONS;
pub use self::fixture::{Fixture, names};
pub use self::library::Library;
