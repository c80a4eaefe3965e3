//! The self-test of peer-to-peer links: the driver's report on each pair of devices, and the result of real copies.
//!
//! Some drivers report peer access although copies arrive corrupted or never. NCCL trusts the driver, so a job on such a machine
//! computes garbage or hangs. [`test()`] copies data in both directions of each pair, checks it and measures it;
//! `paceline_doctor::links` judges the result and recommends NCCL settings.
//!
//! Copies run in a child process ([`serve`] is its side). If one hangs, the child is killed and another continues with the next
//! pair, so that a hanging driver costs one deadline. The same happens after an error that may have corrupted the child's
//! contexts: after some errors, the driver refuses everything until the process ends.

mod measure;
mod watch;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::places::Places;
use crate::version::Version;

pub use measure::serve;
pub use watch::test;

/// Maximum number of tested devices.
pub const DEVICES_MAX: usize = 32;

/// Settings of the test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairTest {
    /// Size of a copy. Each direction is tried with two copies, or with four from 16 MiB on; the fastest counts. Default: 4 MiB,
    /// which shows whether a link works and its approximate speed.
    ///
    /// *Units*: bytes.
    ///
    /// *Cost*: about three times this much host memory, and this much on each device.
    pub message_bytes: usize,
    /// Time limit for all copies in one direction of a pair. Default: 10 s.
    pub timeout: Duration,
    /// Where to look for the driver. Default: from the environment.
    pub places: Places,
}

impl Default for PairTest {
    fn default() -> Self {
        Self {
            message_bytes: 4 << 20,
            timeout: Duration::from_secs(10),
            places: Places::from_env(),
        }
    }
}

/// The result of the test.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkReport {
    /// The version of CUDA that the driver is made for.
    pub cuda: Version,
    /// The visible devices, by ordinal.
    pub devices: Vec<PairDevice>,
    /// Size of a copy.
    ///
    /// *Units*: bytes.
    pub message_bytes: usize,
    /// Both directions of each pair.
    pub links: Vec<Link>,
}

/// A device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairDevice {
    /// "NVIDIA H200".
    pub name: String,
    /// "00000000:41:00.0".
    pub bus: String,
    /// "GPU-" and hexadecimal digits.
    pub uuid: String,
}

/// The link from one device to another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// The device that was read, and that made the copy.
    pub from: usize,
    /// The device that was written.
    pub to: usize,
    /// Whether the driver reports peer access.
    pub says_ok: bool,
    /// The driver's performance rank of this link, 0 being the best; `None` if it does not say.
    pub rank: Option<i32>,
    /// The result with peer access, which NCCL uses if the driver reports it.
    pub peer: Outcome,
    /// The result without peer access: through host memory, as NCCL does then.
    pub host: Outcome,
}

/// The result of copies in one direction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "is")]
pub enum Outcome {
    /// All data arrived intact.
    Fine {
        /// The best copy.
        ///
        /// *Units*: gigabytes (10^9 bytes) per second.
        gb_per_second: f64,
    },
    /// Wrong data arrived.
    Wrong {
        /// The sender: `a copy` or `a kernel`.
        by: String,
        /// Number of wrong bytes in the first bad message.
        bytes: usize,
    },
    /// It did not end in time.
    Stuck,
    /// The driver refused it, or the child process died.
    Failed {
        /// The reason.
        reason: String,
    },
    /// The driver reports no such link.
    NotSupported,
    /// Not tested.
    NotTried,
}

impl Outcome {
    /// Whether it was tested and failed.
    pub fn is_bad(&self) -> bool {
        matches!(self, Self::Wrong { .. } | Self::Stuck | Self::Failed { .. })
    }

    /// Gigabytes per second, if it works.
    pub fn gb_per_second(&self) -> Option<f64> {
        match self {
            Self::Fine { gb_per_second } => Some(*gb_per_second),
            _ => None,
        }
    }
}

/// One direction of a pair. Harmless steps, through the host, come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    from: usize,
    to: usize,
    is_peer: bool,
}

/// All steps for a number of devices.
fn steps(devices: usize) -> Vec<Step> {
    let pairs = |is_peer| {
        let all = (0..devices).flat_map(move |from| (0..devices).map(move |to| (from, to)));
        let apart = all.filter(|(from, to)| from != to);
        apart.map(move |(from, to)| Step { from, to, is_peer })
    };
    pairs(false).chain(pairs(true)).collect()
}

/// A line of the child: one JSON object.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// Before the first step.
    Devices(LinkReport),
    /// The start of a step, by its number.
    Begin(usize),
    End(usize, Outcome),
    /// All steps are done.
    Done,
    /// This process cannot continue; another may.
    Spent,
    /// An error, and advice.
    Failed(String, Option<String>),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_is_tried_once_and_those_through_the_host_first() {
        let all = steps(3);
        assert_eq!(all.len(), 12);
        assert!(all[..6].iter().all(|step| !step.is_peer));
        assert_eq!(
            all[6],
            Step {
                from: 0,
                to: 1,
                is_peer: true
            }
        );
        assert!(all.iter().all(|step| step.from != step.to));
        assert_eq!(steps(1), []);
    }
}
