//! Settings of a communicator.

use std::time::Duration;

use crate::places::Places;

/// What a new communicator tries before it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Probe {
    /// Nothing: the first call finds out.
    None,
    /// A sum over all ranks and an exchange between all of them, checked on the host.
    Check,
    /// As `Check`, and before that each pair of ranks alone, measured: a link that does not work is found and named.
    ///
    /// *Cost*: `world` rounds of some milliseconds, and memory of the device that NCCL keeps for each pair. With more than
    /// [`PROBED_WORLD_MAX`](crate::PROBED_WORLD_MAX) ranks as `Check`.
    #[default]
    Pairs,
}

/// Settings of a communicator. Of the probe's, rank 0's count for all ranks.
#[derive(Debug, Clone)]
pub struct NcclOptions {
    /// What is tried at the beginning. Default: [`Probe::Pairs`].
    pub probe: Probe,
    /// What each rank of a pair sends the other at once in a probe. Default: 8 MiB.
    ///
    /// *Units*: bytes.
    pub probe_bytes: usize,
    /// How long NCCL is given beyond what the group's own error takes to come, which names the rank to blame; and how
    /// long NCCL may take to give up. Default: 5 s.
    pub grace: Duration,
    /// Where the libraries are. Default: what the environment says.
    pub places: Places,
}

impl Default for NcclOptions {
    fn default() -> Self {
        Self {
            probe: Probe::default(),
            probe_bytes: 8 << 20,
            grace: Duration::from_secs(5),
            places: Places::from_env(),
        }
    }
}
