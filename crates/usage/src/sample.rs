//! What devices and ranks do at one moment: the record that the tracker adds up.

use std::time::Duration;

use paceline_gpu::sample::DeviceSample;
use paceline_gpu::snapshot::Reading;
use serde::{Deserialize, Serialize};

/// All devices and ranks at one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sample {
    /// Time since sampling began.
    pub at: Duration,
    /// Devices, always the same ones in the same order; a lost one stays, with every reading missing.
    pub devices: Vec<DeviceSample>,
    /// Ranks on this machine, in rank order.
    pub ranks: Vec<RankSample>,
}

/// One rank at one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RankSample {
    /// Global rank.
    pub rank: u32,
    /// Its process; nothing before it starts and after it ends.
    pub pid: Option<u32>,
    /// Processor time of the rank and all that it started, since it began.
    pub cpu: Reading<Duration>,
    /// Resident memory of the same, in bytes.
    pub resident_bytes: Reading<u64>,
}
