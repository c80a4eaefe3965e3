//! Settings of a communicator.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::places::Places;

/// The test that a new communicator runs before use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Probe {
    /// No test.
    None,
    /// A sum over all ranks and an exchange between all of them, checked on the host.
    Check,
    /// As `Check`, after testing and measuring each pair of ranks alone. Finds and names broken links.
    ///
    /// *Cost*: `world` rounds of some milliseconds, and device memory that NCCL keeps for each pair. Same as `Check` with
    /// more than [`PROBED_WORLD_MAX`](crate::PROBED_WORLD_MAX) ranks.
    #[default]
    Pairs,
}

/// Settings of a communicator. All ranks use rank 0's probe settings.
#[derive(Debug, Clone)]
pub struct NcclOptions {
    /// The test at the start. Default: [`Probe::Pairs`].
    pub probe: Probe,
    /// Message size between the two ranks of a pair in a probe. Default: 8 MiB.
    ///
    /// *Units*: bytes.
    pub probe_bytes: usize,
    /// Extra time for NCCL beyond the group's timeout, so that the group's error, which names the rank to blame, arrives
    /// first. Also the limit for aborting NCCL. Default: 5 s.
    pub grace: Duration,
    /// Where to look for the libraries. Default: from the environment.
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
