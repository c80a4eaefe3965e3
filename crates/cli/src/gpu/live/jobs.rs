//! Looks at the jobs: what their ranks say, what they use, and which devices they hold.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use paceline_gpu::host::Host;
use paceline_gpu::process::Stat;
use paceline_rendezvous::page::{Running, RunningJob, RunningRank};
use paceline_usage::ranks::Ranks;
use paceline_usage::sample::RankSample;

use super::{Devices, Job, Jobs, RankUse};

/// How far up a device's process is followed to the rank that has started it.
const PARENTS_MAX: usize = 32;
/// Most processes of all devices that are followed.
const PROCESSES_MAX: usize = 4096;

/// Follows the jobs of a machine.
#[derive(Debug)]
pub(super) struct JobWatch {
    root: PathBuf,
    running: Running,
    ranks: Ranks,
}

impl JobWatch {
    pub(super) fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            running: Running::new(root),
            ranks: Ranks::below(root),
        }
    }

    /// The jobs now; `devices` are as they were seen last.
    pub(super) fn look(&mut self, at: Duration, devices: Option<&Devices>) -> Jobs {
        let running = self.running.look(Instant::now());
        let ranks: HashSet<u32> = (running.iter())
            .flat_map(|job| job.ranks.iter().filter_map(|rank| rank.pid))
            .collect();
        let host = Host::new(&self.root, &|_| None);
        let parent = |pid| Stat::read(&host, pid).map(|stat| stat.parent);
        let held = held_by(&ranks, devices, parent);
        // Ranks of several jobs have the same numbers; their processes have not.
        let pids: Vec<(u32, u32)> = ranks.iter().map(|pid| (*pid, *pid)).collect();
        let samples = self.ranks.sample(&pids, at).into_iter();
        let used: HashMap<u32, RankSample> = samples.map(|sample| (sample.rank, sample)).collect();
        let use_of = |rank: &RunningRank| {
            let pid = rank.pid?;
            let sample = used.get(&pid)?;
            Some(RankUse {
                cpu: sample.cpu.clone(),
                resident_bytes: sample.resident_bytes.clone(),
                devices: held.get(&pid).cloned().unwrap_or_default(),
            })
        };
        let labels = labels(&running);
        let jobs = running.into_iter().zip(labels).map(|(running, label)| {
            let ranks = running.ranks.iter();
            Job {
                uses: ranks.map(|rank| use_of(rank).unwrap_or_default()).collect(),
                label,
                running,
            }
        });
        Jobs {
            at,
            jobs: jobs.collect(),
        }
    }
}

/// What to call each job: by its name, else by its launcher, and no two the same.
fn labels(jobs: &[RunningJob]) -> Vec<String> {
    let called = |job: &RunningJob| match (&job.name, job.launcher) {
        (Some(name), _) => name.clone(),
        (None, Some(pid)) => format!("pid {pid}"),
        (None, None) => format!("page {}", job.page.1),
    };
    let names: Vec<String> = jobs.iter().map(called).collect();
    let mut taken = HashSet::new();
    let free = |(job, name): (&RunningJob, String)| {
        if taken.insert(name.clone()) {
            return name;
        }
        let other = match job.launcher {
            Some(pid) => format!("{name} (pid {pid})"),
            None => format!("{name} (page {})", job.page.1),
        };
        // Two jobs of one launcher and name, or one that was named to look so.
        let mut unique = other.clone();
        let mut number = 2;
        while !taken.insert(unique.clone()) {
            unique = format!("{other} #{number}");
            number += 1;
        }
        unique
    };
    jobs.iter().zip(names).map(free).collect()
}

/// The devices that each rank holds, itself or by what it has started.
fn held_by(
    ranks: &HashSet<u32>,
    devices: Option<&Devices>,
    parent: impl Fn(u32) -> Option<u32>,
) -> HashMap<u32, Vec<u32>> {
    let mut held: HashMap<u32, Vec<u32>> = HashMap::new();
    let holders = devices.into_iter().flat_map(|devices| &devices.devices);
    let pairs = holders.flat_map(|device| {
        let processes = device.now.processes.known().into_iter().flatten();
        processes.map(|process| (device.now.index, process.pid))
    });
    for (index, pid) in pairs.take(PROCESSES_MAX) {
        let mut line = std::iter::successors(Some(pid), |pid| parent(*pid)).take(PARENTS_MAX);
        if let Some(rank) = line.find(|pid| ranks.contains(pid)) {
            let devices = held.entry(rank).or_default();
            if !devices.contains(&index) {
                devices.push(index);
            }
        }
    }
    held
}

#[cfg(test)]
mod tests {
    use paceline_gpu::sample::{DeviceSample, ProcessMemory};

    use super::super::Device;
    use super::*;

    fn job(name: Option<&str>, launcher: Option<u32>, inode: u64) -> RunningJob {
        RunningJob {
            page: (1, inode),
            launcher,
            name: name.map(str::to_owned),
            command: "train".to_owned(),
            world: None,
            restarts: 0,
            generation: 0,
            stopping: None,
            revocation: None,
            ranks: Vec::new(),
        }
    }

    #[test]
    fn no_two_jobs_are_called_the_same() {
        let jobs = [
            job(Some("digits"), Some(7), 1),
            job(Some("digits"), Some(8), 2),
            job(Some("digits"), Some(8), 3),
            job(None, Some(9), 4),
            job(None, None, 5),
            job(Some("pid 9"), None, 6),
        ];
        let expect = [
            "digits",
            "digits (pid 8)",
            "digits (pid 8) #2",
            "pid 9",
            "page 5",
            "pid 9 (page 6)",
        ];
        assert_eq!(labels(&jobs), expect);
    }

    #[test]
    fn a_device_is_held_by_the_rank_whose_child_uses_it() {
        let device = |index, pids: &[u32]| Device {
            now: DeviceSample {
                index,
                processes: (pids.iter())
                    .map(|pid| ProcessMemory {
                        pid: *pid,
                        ..ProcessMemory::default()
                    })
                    .collect::<Vec<_>>()
                    .into(),
                ..DeviceSample::default()
            },
            ..Device::default()
        };
        let devices = Devices {
            devices: vec![
                device(0, &[10]),
                device(1, &[22, 23, 99]),
                device(2, &[50]),
                Device::default(),
            ],
            ..Devices::default()
        };
        // 22 and 23 were started by 21, which 20 has started; 50 and 51 name each other.
        let parents = HashMap::from([(22, 21), (23, 21), (21, 20), (20, 1), (50, 51), (51, 50)]);
        let ranks = HashSet::from([10, 20]);
        let held = held_by(&ranks, Some(&devices), |pid| parents.get(&pid).copied());
        let expect = HashMap::from([(10, vec![0]), (20, vec![1])]);
        assert_eq!(held, expect);
        assert!(held_by(&ranks, None, |_| None).is_empty());
    }
}
