//! The result of a communicator's probe: which pairs of ranks reach each other, and at what speed.

use serde::{Deserialize, Serialize};

use crate::version::Version;

/// A rank's host and device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPlace {
    /// The rank.
    pub rank: usize,
    /// Its host as NCCL identifies it: `NCCL_HOSTID`, or the host name.
    pub host: String,
    /// The device's ordinal in the rank's process.
    pub device: usize,
    /// The device's name.
    pub name: String,
    /// The device's UUID, `GPU-` and hexadecimal digits.
    pub uuid: String,
    /// The device's PCI address, such as `00000000:41:00.0`.
    pub bus: String,
}

/// A failure in one direction of a pair.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairFailure {
    /// The sending rank.
    pub from: usize,
    /// The receiving rank.
    pub to: usize,
    /// The reason.
    pub reason: String,
}

/// The result of sending data between each pair of ranks with NCCL.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PairReport {
    /// Version of NCCL.
    pub nccl: Version,
    /// The ranks' hosts and devices, in rank order.
    pub ranks: Vec<RankPlace>,
    /// Message size; 0 if pairs were not measured.
    ///
    /// *Units*: bytes.
    pub message_bytes: usize,
    /// Speed from row to column with equal traffic in the other direction; `None` on the diagonal and where nothing was
    /// measured.
    ///
    /// *Units*: gigabytes (10^9 bytes) per second.
    pub gb_per_second: Vec<Vec<Option<f64>>>,
    /// The failures.
    pub failures: Vec<PairFailure>,
}

impl PairReport {
    /// A report without measurements.
    pub(crate) fn empty(nccl: Version, ranks: Vec<RankPlace>) -> Self {
        let world = ranks.len();
        Self {
            nccl,
            ranks,
            message_bytes: 0,
            gb_per_second: vec![vec![None; world]; world],
            failures: Vec::new(),
        }
    }

    /// The slowest measured direction: sender, receiver and speed.
    pub fn slowest(&self) -> Option<(usize, usize, f64)> {
        let rows = self.gb_per_second.iter().enumerate();
        let all = rows.flat_map(|(from, row)| {
            let cells = row.iter().enumerate();
            cells.filter_map(move |(to, cell)| cell.map(|speed| (from, to, speed)))
        });
        all.min_by(|a, b| a.2.total_cmp(&b.2))
    }

    /// `rank 0 and rank 1 (reason)`, shortened to a readable number of pairs.
    pub(crate) fn failures_in_words(&self) -> String {
        const SHOWN_MAX: usize = 4;
        let shown = self.failures.iter().take(SHOWN_MAX);
        let shown: Vec<String> = shown
            .map(|failure| {
                let PairFailure { from, to, reason } = failure;
                format!("rank {from} and rank {to} ({reason})")
            })
            .collect();
        match self.failures.len().saturating_sub(SHOWN_MAX) {
            0 => shown.join(", "),
            more => format!("{}, and {more} more", shown.join(", ")),
        }
    }

    /// Advice on the failures; `None` without failures.
    pub fn advice(&self) -> Option<String> {
        let apart = |failure: &PairFailure| {
            let host = |rank: usize| self.ranks.get(rank).map(|place| &place.host);
            host(failure.from) != host(failure.to)
        };
        let between = self.failures.iter().any(apart);
        let within = self.failures.iter().any(|failure| !apart(failure));
        let local = "on one host: set NCCL_P2P_DISABLE=1 on all ranks, so that devices go through the host's memory \
                     (a common cause of broken peer-to-peer is access control of the PCIe switches or an IOMMU; `paceline gpu \
                     topo -p2p` shows the driver's view); if that does not help, also set NCCL_SHM_DISABLE=1, and \
                     NCCL_NVLS_ENABLE=0 on machines with NVSwitches";
        let remote = "between hosts: set NCCL_IB_DISABLE=1 on all ranks, to use plain sockets, or \
                     NCCL_NET_GDR_LEVEL=LOC, which only disables GPUDirect RDMA; NCCL_SOCKET_IFNAME chooses the interface";
        match (within, between) {
            (false, false) => None,
            (true, false) => Some(local.into()),
            (false, true) => Some(remote.into()),
            (true, true) => Some(format!("{local}. {remote}")),
        }
    }
}
