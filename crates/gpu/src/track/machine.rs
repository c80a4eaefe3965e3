//! This machine as a source: what its driver says of the devices, and the system of the ranks.

use std::time::Duration;

use super::{RankPids, Source};
use crate::host::Host;
use crate::places::Places;
use crate::ranks::Ranks;
use crate::sample::{DeviceSample, RankSample, Sample};
use crate::sampler::Sampler;
use crate::snapshot::{OtherDevice, Trouble};
use crate::system::{self, others};

/// How long a reading of AMD's files holds: for most of them the driver asks the device.
const AMD_PAUSE: Duration = Duration::from_millis(500);

/// This machine's devices, and the ranks that it is told of.
#[derive(Debug)]
pub struct Machine {
    devices: Option<Sampler>,
    amd: Amd,
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
                Some(_) => Amd::find(places),
                None => Amd::default(),
            },
            devices: Some(devices),
            ..Self::without_devices(places, pids)
        }
    }

    /// The ranks of `pids` only: a job that computes on processors.
    pub fn without_devices(places: &Places, pids: RankPids) -> Self {
        Self {
            devices: None,
            amd: Amd::default(),
            ranks: Ranks::below(places.root.clone()),
            pids,
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
        let devices = self.devices.as_mut();
        let mut sample = devices.map_or_else(Sample::default, |devices| devices.sample(at));
        sample.at = at;
        sample.devices.extend(self.amd.sample(at));
        sample.ranks = with_ended(&pids, self.ranks.sample(&running, at));
        sample
    }

    fn trouble(&self) -> Option<Trouble> {
        if !self.amd.devices.is_empty() {
            return None;
        }
        self.devices.as_ref()?.trouble().cloned()
    }
}

/// AMD's devices, by the files of their driver.
#[derive(Debug, Default)]
struct Amd {
    places: Places,
    devices: Vec<OtherDevice>,
    due: Duration,
}

impl Amd {
    fn find(places: &Places) -> Self {
        let mut devices = system::others(&Host::new(&places.root, &|_| None));
        devices.retain(|device| device.maker == "AMD");
        for (device, index) in devices.iter_mut().zip(0..) {
            device.now.index = index;
        }
        Self {
            places: places.clone(),
            devices,
            due: Duration::ZERO,
        }
    }

    fn sample(&mut self, at: Duration) -> impl Iterator<Item = DeviceSample> + '_ {
        if at >= self.due {
            self.due = at.saturating_add(AMD_PAUSE);
            let host = Host::new(&self.places.root, &|_| None);
            for device in &mut self.devices {
                device.now = others::sample(&host, device);
            }
        }
        self.devices.iter().map(|device| device.now.clone())
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
