//! Which devices the ranks of the runs hold, and what these do.

use std::collections::BTreeSet;
use std::time::Duration;

use paceline_gpu::places::Places;
use paceline_rendezvous::page::RunningJob;

use super::state::Watched;
use crate::gpu::{Device, Devices, Feed, Jobs};

/// How often devices are looked at.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long a single frame waits for a driver that does not answer.
const ONCE_TIMEOUT: Duration = Duration::from_secs(5);

/// Looks at devices as soon as a run has ranks here: drivers are not woken for files.
#[derive(Default)]
pub(super) struct Held {
    feed: Option<Feed>,
}

impl Held {
    /// Gives each run the devices that its ranks hold now.
    pub(super) fn look(&mut self, runs: &mut [Watched]) {
        if self.feed.is_none() && runs.iter().any(|watched| watched.job.is_some()) {
            // Without a thread for it there are no devices to see.
            self.feed = Feed::start(&Places::from_env(), INTERVAL).ok();
        }
        let Some(feed) = &self.feed else {
            return;
        };
        let (Some(jobs), Some(devices)) = (feed.jobs().latest, feed.devices().latest) else {
            return;
        };
        for watched in runs {
            let job = watched.job.as_ref();
            watched.devices = job.map_or(Vec::new(), |job| of_job(job, &jobs, &devices));
        }
    }

    /// Waits until devices and their processes were looked at, if anybody looks.
    pub(super) fn wait(&self) {
        let Some(feed) = &self.feed else {
            return;
        };
        // Jobs are told which devices there are, so their second look may know more than the first.
        for _ in 0..2 {
            let at = feed.jobs().latest.map_or(Duration::ZERO, |jobs| jobs.at);
            feed.wait_later_than(at, ONCE_TIMEOUT);
            let devices = feed.devices().latest;
            if devices.is_none_or(|devices| devices.devices.is_empty()) {
                return;
            }
        }
    }
}

/// The devices that the ranks of a job hold, by their numbers.
fn of_job(job: &RunningJob, jobs: &Jobs, devices: &Devices) -> Vec<Device> {
    let found = jobs
        .jobs
        .iter()
        .find(|other| other.running.page == job.page);
    let held: BTreeSet<u32> = found
        .iter()
        .flat_map(|found| &found.uses)
        .flat_map(|rank| rank.devices.iter().copied())
        .collect();
    let devices = devices.devices.iter();
    devices
        .filter(|device| held.contains(&device.now.index))
        .cloned()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{Job, RankUse, running_job};

    #[test]
    fn a_run_has_the_devices_of_its_own_ranks() {
        let job = |inode, held: [&[u32]; 2]| Job {
            label: String::new(),
            running: running_job(inode, 2, 9),
            uses: held
                .map(|devices| RankUse {
                    devices: devices.to_vec(),
                    ..RankUse::default()
                })
                .into(),
        };
        let jobs = Jobs {
            jobs: vec![job(1, [&[0], &[]]), job(2, [&[3, 2], &[3]])],
            ..Jobs::default()
        };
        let device = |index| {
            let mut device = Device::default();
            device.now.index = index;
            device
        };
        let devices = Devices {
            devices: (0..4).map(device).collect(),
            ..Devices::default()
        };
        let of = |inode| -> Vec<u32> {
            let devices = of_job(&running_job(inode, 2, 9), &jobs, &devices);
            devices.iter().map(|device| device.now.index).collect()
        };
        assert_eq!((of(1), of(2), of(3)), (vec![0], vec![2, 3], vec![]));
    }
}
