//! What the probe of a communicator found: which pairs of ranks reach each other, and how fast.

use serde::{Deserialize, Serialize};

use crate::version::Version;

/// Where a rank is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPlace {
    /// The rank.
    pub rank: usize,
    /// Its host, as NCCL tells hosts apart: `NCCL_HOSTID`, or the host's name.
    pub host: String,
    /// The driver's number of its device, in its own process.
    pub device: usize,
    /// The device's name.
    pub name: String,
    /// The device's identity, `GPU-` and hexadecimal digits.
    pub uuid: String,
    /// Where it is on its host, as `00000000:41:00.0`.
    pub bus: String,
}

/// What was wrong with one direction of a pair.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairFailure {
    /// Who sent.
    pub from: usize,
    /// Who should have received.
    pub to: usize,
    /// What happened, in words.
    pub reason: String,
}

/// What moving data between each pair of ranks with NCCL showed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PairReport {
    /// Version of NCCL.
    pub nccl: Version,
    /// Where the ranks are, in their order.
    pub ranks: Vec<RankPlace>,
    /// What was sent from one to another at once; 0 when pairs were not measured.
    ///
    /// *Units*: bytes.
    pub message_bytes: usize,
    /// From row to column, while the same went the other way; none on the diagonal and where nothing was measured.
    ///
    /// *Units*: gigabytes (10^9 bytes) per second.
    pub gb_per_second: Vec<Vec<Option<f64>>>,
    /// What did not work.
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

    /// The slowest direction that was measured: who to whom, and how fast.
    pub fn slowest(&self) -> Option<(usize, usize, f64)> {
        let rows = self.gb_per_second.iter().enumerate();
        let all = rows.flat_map(|(from, row)| {
            let cells = row.iter().enumerate();
            cells.filter_map(move |(to, cell)| cell.map(|speed| (from, to, speed)))
        });
        all.min_by(|a, b| a.2.total_cmp(&b.2))
    }

    /// `rank 0 and rank 1 (what happened)`, as far as it can be read.
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

    /// What to do about the failures; none when there are none.
    pub fn advice(&self) -> Option<String> {
        let apart = |failure: &PairFailure| {
            let host = |rank: usize| self.ranks.get(rank).map(|place| &place.host);
            host(failure.from) != host(failure.to)
        };
        let between = self.failures.iter().any(apart);
        let within = self.failures.iter().any(|failure| !apart(failure));
        let local = "on one host: set NCCL_P2P_DISABLE=1 on all ranks, so that devices go through the host's memory \
                     (peer-to-peer that does not work is often access control of the PCIe switches or an IOMMU; `paceline gpu \
                     topo -p2p` shows what the driver believes); if that does not help, NCCL_SHM_DISABLE=1 as well, and \
                     NCCL_NVLS_ENABLE=0 where there are NVSwitches";
        let remote = "between hosts: set NCCL_IB_DISABLE=1 on all ranks, so that plain sockets are used, or \
                      NCCL_NET_GDR_LEVEL=LOC, which only keeps network cards out of the devices' memory; NCCL_SOCKET_IFNAME \
                      chooses the interface";
        match (within, between) {
            (false, false) => None,
            (true, false) => Some(local.into()),
            (false, true) => Some(remote.into()),
            (true, true) => Some(format!("{local}. {remote}")),
        }
    }
}
