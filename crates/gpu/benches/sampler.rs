//! What an hour of sampling eight devices ten times a second costs: processor time, memory, and how often the driver is asked.
//!
//! The time includes that of the library that stands for the driver's; what a real driver adds is its own time for the calls
//! that are counted here.

use std::time::Duration;

use paceline_fake_nvml::{FUNCTIONS, Fixture};
use paceline_gpu::places::Places;
use paceline_gpu::sampler::Sampler;

const PERIOD: Duration = Duration::from_millis(100);

fn main() {
    // As a test, which is without the flag, only a minute.
    let is_bench = std::env::args().any(|argument| argument == "--bench");
    let samples = if is_bench { 36_000 } else { 600 };
    let fixture = Fixture::open("nvswitch-8");
    let mut sampler = Sampler::open(&Places {
        library: Some(fixture.library().to_owned()),
        root: fixture.root().to_owned(),
    });
    fixture.load(&fixture.json());
    sample(&mut sampler, 0..100);
    let memory_before = resident_kib();
    let cpu_before = cpu();
    sample(&mut sampler, 100..100 + samples);
    let spent = cpu().saturating_sub(cpu_before);
    let simulated = PERIOD * samples;
    println!(
        "8 devices, {samples} samples: {:.1} us of processor time a sample, {:.3}% of one core at 10 Hz, {} KiB more memory",
        spent.as_secs_f64() * 1e6 / f64::from(samples),
        100.0 * spent.as_secs_f64() / simulated.as_secs_f64(),
        resident_kib().saturating_sub(memory_before),
    );
    let simulated = simulated + 100 * PERIOD;
    for function in FUNCTIONS {
        let calls = fixture.calls(function);
        if calls > 0 {
            let a_second = calls as f64 / simulated.as_secs_f64();
            println!("{a_second:8.2} calls a second of {function}");
        }
    }
}

fn sample(sampler: &mut Sampler, numbers: std::ops::Range<u32>) {
    for number in numbers {
        let sample = sampler.sample(PERIOD * number);
        assert_eq!(sample.len(), 8);
    }
}

/// Processor time of this thread.
fn cpu() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = text
        .split_whitespace()
        .next()
        .and_then(|first| first.parse().ok());
    Duration::from_nanos(nanos.expect("the kernel counts processor time"))
}

fn resident_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse().ok());
    kib.expect("the kernel counts memory")
}
