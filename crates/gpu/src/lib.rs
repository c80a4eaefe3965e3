//! The GPUs of a machine, how they are wired, and what the system says of them. Works on a host with no GPU, or a broken one.
//!
//! - [`bus`]: what hangs on what on the PCI bus.
//! - [`devices`]: the GPUs that NVIDIA's driver reports.
//! - [`process`]: what the kernel tells about a process.
//! - [`places`]: where the driver's library and the system's files are looked for.
//! - [`snapshot`]: everything that driver and system say about the devices at one moment, as plain data.
//! - [`take`](mod@take): takes a snapshot of this machine.
//! - [`sample`]: what a device does at one moment.
//! - [`sampler`]: asks the driver for that, again and again.
//! - [`topology`]: how devices are wired, as matrices and a tree.
//! - [`host`]: how files of the machine, or of a recorded one, are read within bounds.
//! - [`cgroup`]: the limits of containers and batch systems.
//! - [`memory`]: how much memory the machine and the container have left.
//! - [`columns`]: columns for people to read.

pub mod bus;
pub mod cgroup;
pub mod columns;
pub mod devices;
pub mod host;
pub mod memory;
mod nvml;
pub mod places;
pub mod process;
pub mod sample;
pub mod sampler;
pub mod snapshot;
mod system;
pub mod take;
pub mod topology;
pub mod words;

pub use take::take;
