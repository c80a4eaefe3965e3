//! Devices and jobs for tests of what draws or serves them.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use paceline_gpu::sample::{DeviceSample, ProcessMemory};
use paceline_gpu::snapshot::{Gap, Memory};
use paceline_rendezvous::page::{
    Activity, Differences, OpActivity, Phase, RunningJob, RunningRank, op,
};

use super::*;

pub(in super::super) fn secs(s: f64) -> Duration {
    Duration::from_secs_f64(s)
}

/// A device that is so busy.
pub(in super::super) fn device(index: u32, percent: u32) -> Device {
    let mb = |mb: u64| mb << 20;
    Device {
        name: "NVIDIA H100 80GB HBM3".to_owned().into(),
        uuid: format!("GPU-{index}").into(),
        idleness: Some(Idleness::default()),
        now: DeviceSample {
            index,
            utilization_percent: percent.into(),
            memory_utilization_percent: (percent / 2).into(),
            memory: Memory {
                used_bytes: mb(2340 + 1000 * u64::from(index)),
                total_bytes: mb(81_559),
            }
            .into(),
            power_mw: 312_400.into(),
            power_limit_mw: 700_000.into(),
            energy_mj: 12_345_678.into(),
            temperature_c: 54.into(),
            sm_clock_mhz: 1980.into(),
            memory_clock_mhz: 2619.into(),
            pcie_tx_bytes_s: 1_200_000_000.into(),
            pcie_rx_bytes_s: 340_000_000.into(),
            nvlink_tx_bytes_s: 25_000_000_000.into(),
            nvlink_rx_bytes_s: 24_000_000_000.into(),
            throttles: Vec::new().into(),
            processes: vec![ProcessMemory {
                pid: 1000 + index,
                used_bytes: mb(2000).into(),
            }]
            .into(),
            ..DeviceSample::default()
        },
    }
}

/// The same with performance counters.
pub(in super::super) fn counting(index: u32, percent: u32) -> Device {
    let mut device = device(index, percent);
    device.now.sm_active_percent = 61.53.into();
    device.now.sm_occupancy_percent = 38.5.into();
    device.now.tensor_active_percent = 27.2.into();
    device.now.dram_active_percent = 44.0.into();
    device
}

/// One that has done nothing for two minutes: held, or by nobody.
pub(in super::super) fn idle(index: u32, pids: &[u32]) -> Device {
    let mut device = device(index, 0);
    let process = |pid: &u32| ProcessMemory {
        pid: *pid,
        ..ProcessMemory::default()
    };
    device.now.processes = pids.iter().map(process).collect::<Vec<_>>().into();
    device.idleness = Some(Idleness {
        held_idle: !pids.is_empty(),
        unused: pids.is_empty(),
        lasts: secs(125.0),
    });
    device
}

/// One of which everything is missing for the same reason.
pub(in super::super) fn without(index: u32, gap: &Gap) -> Device {
    Device {
        now: DeviceSample::missing(index, gap),
        idleness: None,
        ..device(index, 0)
    }
}

pub(in super::super) fn devices(at: f64, devices: Vec<Device>) -> Arc<Devices> {
    Arc::new(Devices {
        at: secs(at),
        host: "node1".to_owned(),
        driver: Some("580.159.04".to_owned()),
        trouble: None,
        devices,
    })
}

/// A job of so many ranks at a step.
pub(crate) fn running_job(inode: u64, ranks: usize, step: u64) -> RunningJob {
    let rank = |index: usize| RunningRank {
        rank: Some(index),
        pid: u32::try_from(1000 + index).ok(),
        activity: Some((
            Activity {
                phase: if index.is_multiple_of(2) {
                    Phase::Backward
                } else {
                    Phase::DataLoader
                },
                step,
                op: (index % 4 == 2).then_some(OpActivity {
                    code: op::ALL_REDUCE,
                    seq: 4411,
                    bucket: Some(3),
                }),
            },
            secs(if index % 4 == 2 { 12.3 } else { 0.04 }),
        )),
        victim_of: None,
        stopped: None,
        weights: None,
        differences: Differences::default(),
    };
    RunningJob {
        page: (1, inode),
        launcher: Some(999),
        name: Some(format!("digits{inode}")),
        command: "python train.py --lr 0.1".to_owned(),
        world: Some(ranks),
        restarts: 0,
        generation: 0,
        stopping: None,
        revocation: None,
        ranks: (0..ranks).map(rank).collect(),
    }
}

/// The same, and each rank has a device of its number.
pub(in super::super) fn job(inode: u64, ranks: usize, step: u64, cpu_s: f64) -> Job {
    Job {
        label: format!("digits{inode}"),
        running: running_job(inode, ranks, step),
        uses: (0..ranks)
            .map(|index| RankUse {
                cpu: secs(cpu_s).into(),
                resident_bytes: (1536_u64 << 20).into(),
                devices: vec![u32::try_from(index).unwrap_or(0)],
            })
            .collect(),
    }
}

pub(in super::super) fn jobs(at: f64, jobs: Vec<Job>) -> Arc<Jobs> {
    Arc::new(Jobs { at: secs(at), jobs })
}

#[test]
fn the_newest_look_is_there_while_the_next_one_hangs() {
    let board = Arc::new(Board::new());
    let (release, held) = mpsc::channel::<()>();
    let (begun, has_begun) = mpsc::channel();
    let filling = board.clone();
    let thread = thread::spawn(move || {
        let mut looks = 0;
        filling.fill(Duration::ZERO, || {
            looks += 1;
            if looks == 2 {
                begun.send(()).expect("heard");
                // Ends when the test lets go.
                let _ = held.recv();
            }
            looks
        });
    });
    has_begun.recv().expect("a second look");
    let newest = board.newest();
    assert_eq!(newest.latest.as_deref(), Some(&1));
    assert!(newest.looking_for.is_some());
    board.unwant();
    assert!(!board.wait(Instant::now(), |state| state.has_ended));
    drop(release);
    thread.join().expect("ended");
    assert_eq!(board.newest().latest.as_deref(), Some(&2));
    assert!(board.lock().has_ended);
}

#[test]
fn a_machine_without_a_driver_is_looked_at_all_the_same() {
    let places = Places {
        library: Some("/nowhere/libnvidia-ml.so.1".into()),
        root: "/nowhere".into(),
    };
    let feed = Feed::start(&places, Duration::from_millis(1)).expect("threads");
    let first = Duration::ZERO;
    feed.wait_later_than(first, Duration::from_secs(60));
    let devices = feed.devices().latest.expect("looked");
    assert!(devices.devices.is_empty() && devices.trouble.is_some());
    assert_eq!(feed.jobs().latest.expect("looked").jobs, []);
}
