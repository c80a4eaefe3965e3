//! Runs made up for the tests.

use std::fmt::Write as _;
use std::time::Duration;

use paceline_gpu::sample::DeviceSample;
use paceline_gpu::snapshot::{Gap, Memory, Reading};

use crate::sample::{RankSample, Sample};
use crate::{Report, Rules, Tally};

/// What is reported of a sample a second, with `change` made to each.
pub(super) fn run(seconds: u64, change: impl Fn(u64, &mut Sample)) -> Report {
    let mut tally = Tally::new(Rules::default(), Duration::from_secs(1));
    for second in 0..=seconds {
        let mut sample = Sample {
            at: Duration::from_secs(second),
            ..Sample::default()
        };
        change(second, &mut sample);
        tally.add(&sample);
    }
    tally.report()
}

/// A device that works so much, with all that belongs to it.
pub(super) fn device(index: u32, percent: u32) -> DeviceSample {
    DeviceSample {
        index,
        utilization_percent: percent.into(),
        memory: Memory {
            used_bytes: (2340 - u64::from(index) * 17) << 20,
            total_bytes: 97_887 << 20,
        }
        .into(),
        power_mw: (30_000 + percent * 2500).into(),
        power_limit_mw: 450_000.into(),
        temperature_c: (40 + percent / 4 + index).into(),
        sm_clock_mhz: (210 + percent * 18).into(),
        memory_clock_mhz: 10_501.into(),
        pcie_tx_bytes_s: (u64::from(percent) * 4_000_000).into(),
        pcie_rx_bytes_s: (u64::from(percent) * 9_000_000).into(),
        ..DeviceSample::default()
    }
}

/// A device of which nothing can be read.
pub(super) fn silent(index: u32, why: Gap) -> DeviceSample {
    DeviceSample {
        index,
        utilization_percent: Reading::missing(why.clone()),
        memory: Reading::missing(why.clone()),
        power_mw: Reading::missing(why),
        ..DeviceSample::default()
    }
}

pub(super) fn rank(rank: u32, pid: u32, cpu_s: f64) -> RankSample {
    RankSample {
        rank,
        pid: Some(pid),
        cpu: Duration::from_secs_f64(cpu_s).into(),
        resident_bytes: ((512 + u64::from(rank)) << 20).into(),
    }
}

/// Two cards at a sample a second for 1932.2 s: ten epochs, in which the second card often waits for the first, which
/// alone evaluates; both are busy at once in 895 of the seconds.
pub(super) fn two_gpus() -> String {
    let mut text = String::from(
        "at_s,kind,index,utilization_percent,memory_used_bytes,memory_total_bytes,power_mw,energy_mj,temperature_c\n",
    );
    let mut energy_mj = [81_203_417_u64, 79_552_806];
    let mut warmth = [0_u64; 2];
    for second in 0..=1932_u64 {
        let at = if second == 1932 {
            "1932.2".to_owned()
        } else {
            second.to_string()
        };
        let busy = two_busy(second);
        for gpu in 0..2 {
            // A number that looks like noise and is always the same.
            let noise = (second * 2 + gpu as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
            let percent = if busy[gpu] {
                78 + noise % 22
            } else {
                noise % 40 / 20
            };
            let power_mw = if busy[gpu] {
                180_000 + noise % 80_000
            } else {
                24_000 + noise % 9000
            };
            energy_mj[gpu] += if second == 0 { 0 } else { power_mw };
            warmth[gpu] = (warmth[gpu] * 29 + if busy[gpu] { 33_000 } else { 3000 }) / 30;
            let used_mb = match (gpu, second) {
                (_, ..32) => 561_u64,
                (0, _) if !busy[1] && busy[0] => 2340,
                (0, _) => 2212,
                _ => 2204,
            };
            let _ = writeln!(
                text,
                "{at},gpu,{gpu},{percent},{},{},{power_mw},{},{}",
                used_mb << 20,
                97_887_u64 << 20,
                energy_mj[gpu],
                34 + warmth[gpu] / 1000,
            );
        }
    }
    text
}

fn two_busy(second: u64) -> [bool; 2] {
    let Some(training) = second.checked_sub(32).filter(|past| *past < 1870) else {
        return [false; 2];
    };
    let (epoch, at) = (training / 187, training % 187);
    let end = if epoch % 2 == 0 { 160 } else { 153 };
    if !(8..180).contains(&at) {
        return [false; 2];
    }
    if at >= end {
        return [true, false];
    }
    match (at - 8) % 17 {
        0..10 => [true; 2],
        10..13 => [true, false],
        13 => [false, true],
        _ => [false; 2],
    }
}
