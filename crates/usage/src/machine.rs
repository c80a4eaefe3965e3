//! This machine as a source: what its driver says of the devices, and the system of the ranks.

use std::time::Duration;

use paceline_gpu::devices;
use paceline_gpu::places::Places;
use paceline_gpu::sampler::{AmdSampler, Sampler};
use paceline_gpu::snapshot::DriverError;

use super::{RankPids, Source};
use crate::ranks::Ranks;
use crate::sample::{RankSample, Sample};

/// This machine's devices, and the ranks that it is told of.
#[derive(Debug)]
pub struct Machine {
    devices: Option<Sampler>,
    amd: AmdSampler,
    ranks: Ranks,
    pids: RankPids,
}

impl Machine {
    /// All devices, and the ranks of `pids`. On a machine without NVIDIA's driver the devices are AMD's, numbered in the order
    /// of their addresses.
    ///
    /// *Blocks*: as long as the driver takes to be loaded.
    pub fn open(places: &Places, pids: RankPids) -> Self {
        let devices = Sampler::open(places);
        Self {
            amd: match devices.trouble() {
                Some(_) => AmdSampler::open(places),
                None => AmdSampler::default(),
            },
            devices: Some(devices),
            ..Self::without_devices(places, pids)
        }
    }

    /// The ranks of `pids` only: a job that computes on processors.
    pub fn without_devices(places: &Places, pids: RankPids) -> Self {
        Self {
            devices: None,
            amd: AmdSampler::default(),
            ranks: Ranks::below(places.root.clone()),
            pids,
        }
    }

    /// The ranks of `pids`, and those devices that they can see; `variable` looks up a variable of their environment.
    ///
    /// *Blocks*: as [`open`](Self::open).
    pub fn visible(
        places: &Places,
        pids: RankPids,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Self {
        let machine = Self::open(places, pids);
        if variable("CUDA_VISIBLE_DEVICES").is_none() {
            return machine;
        }
        let gpus = devices::list(places).ok();
        match gpus.and_then(|gpus| devices::visible(&gpus, variable).ok()) {
            Some(seen) => machine.only(&seen),
            None => machine,
        }
    }

    /// Of the devices, only those with these numbers of the driver.
    pub fn only(mut self, indexes: &[u32]) -> Self {
        self.devices = self.devices.map(|devices| devices.only(indexes));
        self
    }
}

impl Source for Machine {
    fn sample(&mut self, at: Duration) -> Sample {
        let pids = self.pids.now();
        let running: Vec<(u32, u32)> = pids
            .iter()
            .filter_map(|(rank, pid)| Some((*rank, (*pid)?)))
            .collect();
        let mut devices = match &mut self.devices {
            Some(devices) => devices.sample(at),
            None => Vec::new(),
        };
        devices.extend(self.amd.sample(at));
        Sample {
            at,
            devices,
            ranks: with_ended(&pids, self.ranks.sample(&running, at)),
        }
    }

    fn trouble(&self) -> Option<DriverError> {
        if !self.amd.is_empty() {
            return None;
        }
        self.devices.as_ref()?.trouble().cloned()
    }
}

/// Each rank in its place, also those without a process.
fn with_ended(pids: &[(u32, Option<u32>)], sampled: Vec<RankSample>) -> Vec<RankSample> {
    let mut sampled = sampled.into_iter().peekable();
    let all = pids.iter().map(|(rank, _)| {
        let own = sampled.next_if(|sample| sample.rank == *rank);
        own.unwrap_or_else(|| RankSample {
            rank: *rank,
            ..RankSample::default()
        })
    });
    all.collect()
}

#[cfg(test)]
mod tests {
    use paceline_fake_nvml::Fixture;

    use super::*;

    #[test]
    fn without_nvidias_driver_the_devices_are_amds() {
        let fixture = Fixture::open("amd");
        let places = Places {
            library: Some(fixture.library().into()),
            root: fixture.root().into(),
        };
        let mut machine = Machine::open(&places, RankPids::default());
        assert_eq!(machine.trouble(), None);
        let sample = machine.sample(Duration::ZERO);
        let told: Vec<_> = (sample.devices.iter())
            .map(|device| (device.index, device.memory.known().is_some()))
            .collect();
        assert_eq!(told, [(0, true), (1, true)]);
        assert!((sample.devices.iter()).all(|device| device.utilization_percent.known().is_some()));
    }

    #[test]
    fn devices_that_the_environment_hides_are_not_sampled() {
        let fixture = Fixture::open("nvswitch-8");
        let places = Places {
            library: Some(fixture.library().into()),
            root: fixture.root().into(),
        };
        let seen = |value: Option<&str>| {
            let variable =
                |name: &str| (name == "CUDA_VISIBLE_DEVICES").then(|| value.map(str::to_owned))?;
            let mut machine = Machine::visible(&places, RankPids::default(), &variable);
            let devices = machine.sample(Duration::ZERO).devices;
            devices
                .iter()
                .map(|device| device.index)
                .collect::<Vec<_>>()
        };
        assert_eq!(seen(None), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(seen(Some("2,5")), [2, 5]);
    }

    #[test]
    fn ranks_without_a_process_stay_in_their_place() {
        let sampled = |rank| RankSample {
            rank,
            pid: Some(1),
            ..RankSample::default()
        };
        let pids = [(0, None), (2, Some(1)), (3, None), (7, Some(1))];
        let all = with_ended(&pids, vec![sampled(2), sampled(7)]);
        let told: Vec<_> = all.iter().map(|rank| (rank.rank, rank.pid)).collect();
        assert_eq!(told, pids);
    }

    #[test]
    fn this_process_is_a_rank_with_processor_time() {
        let pids = RankPids::default();
        let mut machine = Machine::without_devices(&Places::default(), pids.clone());
        assert!(machine.sample(Duration::ZERO).ranks.is_empty());
        pids.started(5, std::process::id());
        let sample = machine.sample(Duration::from_secs(1));
        assert_eq!(sample.ranks.len(), 1);
        assert!(
            sample.ranks[0]
                .cpu
                .known()
                .is_some_and(|cpu| !cpu.is_zero())
        );
        assert!(sample.devices.is_empty());
        assert_eq!(machine.trouble(), None);
    }
}
