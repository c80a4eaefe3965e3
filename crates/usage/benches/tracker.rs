//! What an hour of tracking eight devices and eight ranks ten times a second costs: processor time and memory.
//!
//! `cargo bench -p paceline-usage --bench tracker`. Time is simulated, so the hour takes seconds. One JSON line for each way:
//! `totals` adds samples up that are made here; `driver` takes them from the library that stands for the driver's, so the
//! time has that library's in it and not a real driver's; `thread` runs the tracker's thread in real time for some seconds,
//! with a file of the samples. Run by `cargo test` it is a minute, and shows only that nothing is broken.

use std::path::Path;
use std::process;
use std::sync::mpsc;
use std::time::Duration;

use paceline_fake_nvml::Fixture;
use paceline_gpu::places::Places;
use paceline_gpu::sample::DeviceSample;
use paceline_gpu::snapshot::Memory;
use paceline_usage::sample::{RankSample, Sample};
use paceline_usage::{Machine, Options, RankPids, Replay, Rules, Source, Tally, Tracker};
use rustix::time::{ClockId, clock_gettime};

const PERIOD: Duration = Duration::from_millis(100);
const DEVICES: u32 = 8;
/// No deadline of a benchmark that works.
const LONG: Duration = Duration::from_secs(60);

fn main() {
    let is_bench = std::env::args().any(|argument| argument == "--bench");
    let samples = if is_bench { 36_000 } else { 600 };
    measure("totals", samples, &mut Made);
    let fixture = Fixture::open("nvswitch-8");
    let places = Places {
        library: Some(fixture.library().to_owned()),
        root: fixture.root().to_owned(),
    };
    let mut machine = Machine::open(&places, RankPids::default());
    measure("driver", samples, &mut machine);

    let folder = tempfile::tempdir().expect("a folder");
    let csv = folder.path().join("samples.csv");
    thread(if is_bench { 100 } else { 5 }, &csv);
    let bytes = std::fs::metadata(&csv).expect("the samples").len();
    let replay = Replay::open(&csv).expect("a header");
    let samples = replay.report(Rules::default()).expect("samples").samples;
    let each = bytes / samples;
    println!(r#"{{"bench":"file","samples":{samples},"bytes_per_sample":{each}}}"#);
}

/// Adds samples up on this thread.
fn measure(name: &str, samples: u32, source: &mut impl Source) {
    let mut tally = Tally::new(Rules::default(), PERIOD);
    let mut add = |numbers: std::ops::Range<u32>| {
        for number in numbers {
            let sample = source.sample(PERIOD * number);
            assert_eq!(sample.devices.len(), DEVICES as usize);
            tally.add(&sample);
        }
    };
    add(0..100);
    let (cpu_before, resident_before) = (cpu(), resident_kib());
    add(100..100 + samples);
    let spent = cpu().saturating_sub(cpu_before);
    let grown_kib = resident_kib().saturating_sub(resident_before);
    assert_eq!(tally.report().samples, u64::from(samples) + 100);
    let memory = format!(r#","grown_kib":{grown_kib}"#);
    tell(name, samples, spent, &memory);
}

/// Lets the tracker's own thread run in real time.
fn thread(samples: u32, csv: &Path) {
    let options = Options {
        period: PERIOD,
        csv: Some(csv.to_owned()),
        finish_wait: LONG,
        ..Options::default()
    };
    let (told, taken) = mpsc::channel();
    let tracker = Tracker::watch(options, RankPids::default(), |_| Told(told));
    let mut spent = Duration::ZERO;
    for _ in 0..samples {
        spent = taken.recv_timeout(LONG).expect("samples go on");
    }
    let report = tracker.finish();
    assert!(report.samples >= u64::from(samples) && report.notes.is_empty());
    tell("thread", samples, spent, "");
}

fn tell(name: &str, samples: u32, spent: Duration, rest: &str) {
    let spent_s = spent.as_secs_f64() / f64::from(samples);
    println!(
        r#"{{"bench":"{name}","devices":{DEVICES},"samples":{samples},"us_per_sample":{:.2},"core_percent_at_10_hz":{:.4}{rest}}}"#,
        spent_s * 1e6,
        100.0 * spent_s / PERIOD.as_secs_f64(),
    );
}

/// Samples that change all the time.
struct Made;

impl Source for Made {
    fn sample(&mut self, at: Duration) -> Sample {
        let moment = (at.as_millis() / 100) as u32;
        let device = |index: u32| DeviceSample {
            index,
            utilization_percent: ((moment * 7 + index * 31) % 101).into(),
            memory_utilization_percent: (moment % 60).into(),
            sm_active_percent: 88.4.into(),
            sm_occupancy_percent: 41.7.into(),
            tensor_active_percent: 52.1.into(),
            dram_active_percent: 47.5.into(),
            memory: Memory {
                used_bytes: u64::from(moment % 9000) << 20,
                total_bytes: 80 << 30,
            }
            .into(),
            power_mw: (90_000 + moment % 600_000).into(),
            power_limit_mw: 700_000.into(),
            energy_mj: (u64::from(moment) * 30_000).into(),
            temperature_c: (30 + moment % 50).into(),
            sm_clock_mhz: (1000 + moment % 980).into(),
            memory_clock_mhz: 2619.into(),
            pcie_tx_bytes_s: (u64::from(moment) * 1000).into(),
            pcie_rx_bytes_s: (u64::from(moment) * 2000).into(),
            nvlink_tx_bytes_s: (u64::from(moment) * 9000).into(),
            nvlink_rx_bytes_s: (u64::from(moment) * 9000).into(),
            throttles: Vec::new().into(),
            processes: Vec::new().into(),
        };
        let rank = |rank: u32| RankSample {
            rank,
            pid: Some(process::id() + rank),
            cpu: at.mul_f64(f64::from(rank + 1) / 8.0).into(),
            resident_bytes: (u64::from(moment) << 12).into(),
        };
        Sample {
            at,
            devices: (0..DEVICES).map(device).collect(),
            ranks: (0..8).map(rank).collect(),
        }
    }
}

/// The same on the tracker's thread; tells the processor time that the thread has used.
struct Told(mpsc::Sender<Duration>);

impl Source for Told {
    fn sample(&mut self, at: Duration) -> Sample {
        // Nobody listens any more at the end.
        let _ = self.0.send(cpu());
        Made.sample(at)
    }
}

/// Processor time of this thread.
fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn resident_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse().ok());
    kib.expect("the kernel counts memory")
}
