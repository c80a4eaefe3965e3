//! The self-test of peer-to-peer links: what the driver says of each pair of this process's devices, and what a copy shows.
//!
//! A driver may say that two devices reach each other, and copies between them arrive as something else or never. NCCL
//! believes the driver, so a job on such a machine computes nonsense or hangs. [`test()`] copies data both ways of each pair,
//! checks it and measures it; `paceline_doctor::links` judges the result and what NCCL has to be told.
//!
//! Copies run in a child process ([`serve`] is its side): where one never ends, the child is killed and another goes on with
//! the next pair, so that a driver that hangs holds nobody for longer than the deadline. The same is done after an error that
//! may have spoiled the child's contexts: after some the driver refuses everything until the process ends.

mod measure;
mod watch;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::places::Places;
use crate::version::Version;

pub use measure::serve;
pub use watch::test;

/// Most devices whose pairs are tested.
pub const DEVICES_MAX: usize = 32;

/// How pairs are tested.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairTest {
    /// Size of a copy. Each way is tried by two of them, and from 16 MiB on by four, of which the fastest counts. Default: 4 MiB,
    /// which shows whether a way works and about how fast it is.
    ///
    /// *Units*: bytes. *Cost*: of the host's memory about three times as much, of each device's as much.
    pub message_bytes: usize,
    /// How long the driver is given for one way of one pair, of which there are several copies. Default: 10 s.
    pub timeout: Duration,
    /// Where the driver is. Default: what the environment says.
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

/// What was found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkReport {
    /// The version of CUDA that the driver is made for.
    pub cuda: Version,
    /// The devices that this process sees, in its numbers.
    pub devices: Vec<PairDevice>,
    /// Size of a copy.
    ///
    /// *Units*: bytes.
    pub message_bytes: usize,
    /// Each device to each other one.
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

/// What is known of the way from one device to another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Whose memory was read.
    pub from: usize,
    /// Whose memory was written, by the first.
    pub to: usize,
    /// Whether the driver says that the first may reach the second's memory.
    pub says_ok: bool,
    /// The driver's rank of this way, of which 0 is the best; none where it does not say.
    pub rank: Option<i32>,
    /// With peer access: what NCCL does where the driver says that it may.
    pub peer: Outcome,
    /// Without it: the driver goes through the host's memory, as NCCL does where there is no peer access.
    pub host: Outcome,
}

/// How copies went one way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "is")]
pub enum Outcome {
    /// All that was sent arrived.
    Fine {
        /// The best copy.
        ///
        /// *Units*: gigabytes (10^9 bytes) per second.
        gb_per_second: f64,
    },
    /// Something else arrived.
    Wrong {
        /// By what it was sent: `a copy` or `a kernel`.
        by: String,
        /// So many bytes were wrong in the first message in which some were.
        bytes: usize,
    },
    /// It was not over in time.
    Stuck,
    /// The driver refused it, or the process that tried it ended.
    Failed {
        /// In words.
        reason: String,
    },
    /// The driver says that there is no such way.
    NotSupported,
    /// Nobody came to try it.
    NotTried,
}

impl Outcome {
    /// Whether it was tried and did not work.
    pub fn is_bad(&self) -> bool {
        matches!(self, Self::Wrong { .. } | Self::Stuck | Self::Failed { .. })
    }

    /// Gigabytes per second, where it works.
    pub fn gb_per_second(&self) -> Option<f64> {
        match self {
            Self::Fine { gb_per_second } => Some(*gb_per_second),
            _ => None,
        }
    }
}

/// One way of one pair, in the order in which all are tried: first those that hurt nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    from: usize,
    to: usize,
    is_peer: bool,
}

/// All steps with so many devices.
fn steps(devices: usize) -> Vec<Step> {
    let pairs = |is_peer| {
        let all = (0..devices).flat_map(move |from| (0..devices).map(move |to| (from, to)));
        let apart = all.filter(|(from, to)| from != to);
        apart.map(move |(from, to)| Step { from, to, is_peer })
    };
    pairs(false).chain(pairs(true)).collect()
}

/// What the child tells, one object on a line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// Before the first step.
    Devices(LinkReport),
    /// A step, by its number.
    Begin(usize),
    End(usize, Outcome),
    /// There is no further step.
    Done,
    /// There may be further steps, and this process is of no use for them any more.
    Spent,
    /// What keeps it from going on, and what to do about it.
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
