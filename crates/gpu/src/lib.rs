//! What the machine is and does. Works on a host with no GPU, or a broken one.
//!
//! - [`devices`]: the GPUs that NVIDIA's driver reports.
//! - [`process`]: what the kernel tells about a process.
//! - [`places`]: where the driver's library and the system's files are looked for.
//! - [`snapshot`]: everything that driver and system say about the devices at one moment, as plain data.
//! - [`take`](mod@take): takes a snapshot of this machine.
//! - [`sample`]: what devices and ranks do at one moment.
//! - [`sampler`]: asks the driver for that, again and again.
//! - [`topology`]: how devices are wired, as matrices and a tree.
//! - [`ranks`]: what ranks use of processors and memory.
//! - [`track`]: what devices and ranks did in the course of a job, added up and told to people.
//! - [`usage`]: how long all devices really worked at the same time.
//! - [`host`]: how files of the machine, or of a recorded one, are read within bounds.
//! - [`columns`]: columns for people to read.
//! - [`files`]: files that appear whole.
//! - [`memory`]: the memory a process has used at most.

pub mod columns;
pub mod devices;
pub mod files;
pub mod host;
pub mod memory;
mod nvml;
pub mod places;
pub mod process;
pub mod ranks;
pub mod sample;
pub mod sampler;
pub mod snapshot;
mod system;
pub mod take;
pub mod topology;
pub mod track;
pub mod usage;

pub use take::take;
