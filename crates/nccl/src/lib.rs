//! NVIDIA's collectives between processes: NCCL and the CUDA driver, loaded at run time, with deadlines.
//!
//! Neither library is needed to build, and nothing here knows tensors: a [`Communicator`] works on device addresses. It is
//! built on a [`ProcessGroup`](paceline_collective::ProcessGroup), over which the ranks exchange NCCL's unique id and their
//! devices. A failure of the group (a dead rank, a deadline, the launcher) aborts NCCL's calls: NCCL alone waits for ever.
//!
//! # Order
//!
//! Calls of all groups that a rank [joins](Communicator::join_lane) run on one stream, in one order: a device waits for a call with
//! all its streams, so two queues of calls could wait for each other. [`Before`] says when a call's data is ready, and [`Communicator::release`] makes
//! later work wait for it; with [`Before::Context`] both happen on the device, without a wait on the host.
//!
//! # Numerics
//!
//! NCCL's sums depend on the number of ranks. [`Communicator::reduce_in_tree_order`] gives the same bytes as the shard tree on
//! the host.

mod call;
mod clock;
mod communicator;
mod driver;
mod environment;
mod error;
mod identity;
mod join;
mod library;
mod nccl;
mod options;
pub mod pairs;
mod places;
mod pool;
mod probe;
mod reason;
mod report;
mod shared;
mod ticket;
mod tree_sum;
mod version;
mod worker;

#[cfg(test)]
mod tests;

pub use call::{Before, CallName, DeviceBuffer, Float, Kind, Label, TreeSum};
pub use communicator::Communicator;
pub use error::NcclError;
pub use options::{NcclOptions, Probe};
pub use places::{CUDA_VARIABLE, NCCL_VARIABLE, Places};
pub use report::{PairFailure, PairReport, RankPlace};
pub use ticket::{CallTiming, Ticket};
pub use version::Version;

/// Maximum world size for probing pairs one by one: with more ranks it would take noticeable time.
pub const PROBED_WORLD_MAX: usize = 64;

/// The version of the NCCL that a communicator would use.
///
/// *Errors*: it is not installed, too old, or not NCCL.
pub fn installed(places: &Places) -> Result<Version, NcclError> {
    nccl::Nccl::load(places).map(|library| library.version)
}

/// The number of devices visible to this process. Opens none.
///
/// *Blocks*: as long as the driver does; a hung one for ever.
///
/// *Errors*: the driver is not installed, or its own error ([`NcclError::Driver`]).
pub fn devices(places: &Places) -> Result<usize, NcclError> {
    driver::Driver::load(places)?.device_count()
}
