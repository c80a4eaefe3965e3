//! NVIDIA's collectives between processes: NCCL and the CUDA driver, loaded at run time, with deadlines.
//!
//! Neither library is needed to build, and nothing here knows a tensor: a [`Communicator`] works on addresses of the
//! device's memory. It is made of a [`ProcessGroup`](paceline_collective::ProcessGroup), over which the ranks exchange
//! NCCL's identity and say on which device they are, and whose failure (a rank that died, a deadline, the launcher's
//! word) ends NCCL's calls: NCCL alone waits for ever.
//!
//! # Order
//!
//! A call runs on a stream of its own. [`Before`] says when its data is ready, and [`Communicator::release`] lets later work
//! wait for it; with [`Before::Context`] both happen on the device, without a wait on the host.
//!
//! # Numerics
//!
//! NCCL's sums depend on the number of ranks. [`Communicator::reduce_in_tree_order`] gives the bytes of the shard tree, as on
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

/// Most ranks whose pairs a probe tries one by one: with more the time would be felt.
pub const PROBED_WORLD_MAX: usize = 64;

/// The version of the NCCL that a communicator would use, found before anything is joined.
///
/// *Errors*: it is not installed, too old, or another library.
pub fn installed(places: &Places) -> Result<Version, NcclError> {
    nccl::Nccl::load(places).map(|library| library.version())
}

/// How many devices the driver leaves to this process, without opening one.
///
/// *Blocks*: as long as the driver does; a dead one may take for ever.
///
/// *Errors*: it is not installed, or in its own words why it does not work ([`NcclError::Driver`]).
pub fn devices(places: &Places) -> Result<usize, NcclError> {
    driver::Driver::load(places)?.device_count()
}
