//! This machine as a source: what its driver says of the devices, and the system of the ranks.

use std::time::Duration;

use super::{RankPids, Source};
use crate::places::Places;
use crate::ranks::Ranks;
use crate::sample::{RankSample, Sample};
use crate::sampler::Sampler;
use crate::snapshot::Trouble;

/// This machine's devices, and the ranks that it is told of.
#[derive(Debug)]
pub struct Machine {
    devices: Option<Sampler>,
    ranks: Ranks,
    pids: RankPids,
}

impl Machine {
    /// All devices, and the ranks of `pids`.
    ///
    /// *Blocks* - as long as the driver takes to be loaded.
    pub fn open(places: &Places, pids: RankPids) -> Self {
        Self {
            devices: Some(Sampler::open(places)),
            ..Self::without_devices(places, pids)
        }
    }

    /// The ranks of `pids` only: a job that computes on processors.
    pub fn without_devices(places: &Places, pids: RankPids) -> Self {
        Self {
            devices: None,
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
        sample.ranks = with_ended(&pids, self.ranks.sample(&running, at));
        sample
    }

    fn trouble(&self) -> Option<Trouble> {
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
    use super::*;

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
