use std::path::Path;

use paceline_fake_nvml::{Fixture, Library as Fake};
use serde_json::{Value, json};

use super::*;
use crate::snapshot::Reading;

const MS: Duration = Duration::from_millis(1);
const US: Duration = Duration::from_micros(1);

fn pace(soonest: Duration, latest_s: u64, share: u32) -> Pace {
    Pace {
        soonest,
        latest: Duration::from_secs(latest_s),
        share,
    }
}

#[test]
fn dear_values_are_asked_less_often() {
    let check = |cost: Duration, devices: usize, expect: Duration| {
        let pause = usual_pause(pace(1000 * MS, 60, 10), cost, devices);
        assert_eq!(pause, expect, "{cost:?} on {devices}");
    };
    check(3 * US, 8, 1000 * MS);
    check(500 * US, 8, 4000 * MS);
    check(9 * MS, 2, 18_000 * MS);
    check(9 * MS, 8, 60_000 * MS);
    check(Duration::MAX, usize::MAX, 60_000 * MS);
}

#[test]
fn cheap_values_are_asked_with_every_sample() {
    let pause = usual_pause(Pace::of(Group::ALL[0].1), 3 * US, 8);
    assert!(pause < 100 * MS, "{pause:?}");
}

#[test]
fn what_the_device_does_not_have_is_asked_again_after_a_minute() {
    let check = |answer: Answer, expect: Duration| {
        let found = pause(&answer, pace(Duration::ZERO, 2, 10), Duration::ZERO, 1);
        assert_eq!(found, expect, "{answer:?}");
    };
    check(Answer::Known, Duration::ZERO);
    check(Answer::NextSample, Duration::ZERO);
    check(Answer::Missing(Gap::NotSupported), 60_000 * MS);
    check(Answer::Missing(Gap::NoFunction), 60_000 * MS);
    check(Answer::Missing(Gap::Other("odd".to_owned())), 1000 * MS);
}

#[test]
fn one_slow_call_does_not_make_a_value_rare() {
    let after = settled(10 * US, 50 * MS);
    assert_eq!(after, 20 * US);
    assert_eq!(settled(after, 4 * US), 12 * US);
    let many = (0..20).fold(10 * US, |cost, _| settled(cost, 3 * MS));
    assert_eq!(many, 3 * MS, "what is always slow is known to be");
}

#[test]
fn without_a_driver_there_are_no_devices_and_a_reason() {
    let places = Places {
        library: Some("/nowhere/libnvidia-ml.so.1".into()),
        ..Places::default()
    };
    let mut sampler = Sampler::open(&places).only(&[0, 1]);
    assert!(matches!(sampler.trouble(), Some(DriverError::NoLibrary(_))));
    for at in [0, 100, 200] {
        let sample = sampler.sample(at * MS);
        assert!(sample.is_empty());
    }
}

#[test]
fn a_sampler_may_live_on_a_thread_of_its_own() {
    fn check<T: Send + 'static>() {}
    check::<Sampler>();
}

/// A sampler for which every call takes no time: what is asked when depends on nothing but the samples.
fn sampler(library: &Path) -> Sampler {
    let places = Places {
        library: Some(library.to_owned()),
        ..Places::default()
    };
    Sampler {
        clock: || Duration::ZERO,
        ..Sampler::open(&places)
    }
}

fn samples(sampler: &mut Sampler, count: u32) -> Vec<Vec<DeviceSample>> {
    (0..count)
        .map(|number| sampler.sample(100 * MS * number))
        .collect()
}

fn two_devices() -> Value {
    let device = |power_mw: u32| {
        json!({
            "utilization": [50, 20], "power_mw": power_mw, "compute": [], "graphics": [],
            "pcie_tx_kb_s": 1000, "pcie_rx_kb_s": 2000
        })
    };
    json!({"devices": [device(100_000), device(110_000)]})
}

#[test]
fn what_nobody_supports_is_hardly_asked() {
    let library = Fake::whole();
    library.load(&json!({"devices": [{}]}).to_string());
    let mut sampler = sampler(library.path());
    let samples = samples(&mut sampler, 601);
    let last = &samples[600][0];
    assert_eq!(last.utilization_percent.gap(), Some(&Gap::NotSupported));
    assert_eq!(last.pcie_tx_bytes_s.gap(), Some(&Gap::NotSupported));
    assert_eq!(last.pcie_rx_bytes_s.gap(), Some(&Gap::NotSupported));
    for function in [
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetMemoryInfo_v2",
    ] {
        // At the beginning and after a minute.
        assert_eq!(library.calls(function), 2, "{function}");
    }
}

#[test]
fn a_device_that_is_lost_goes_silent_and_the_others_go_on() {
    let library = Fake::whole();
    let mut machine = two_devices();
    let gone = |at: u64, code: Value| json!({"at": at, "device": 1, "set": {"lost": code}});
    machine["timeline"] = json!([gone(20, json!("GPU_IS_LOST")), gone(90, Value::Null)]);
    library.load(&machine.to_string());
    let mut sampler = sampler(library.path());
    let samples = samples(&mut sampler, 150);
    let power = |number: usize, device: usize| samples[number][device].power_mw.clone();
    let lost = Reading::missing(Gap::Lost);
    assert_eq!(power(19, 1), Reading::Known(110_000));
    let gone = samples.iter().enumerate().take(90).skip(20);
    for (number, sample) in gone {
        assert_eq!(sample[1].power_mw, lost, "sample {number}");
        assert_eq!(sample[1].processes.gap(), Some(&Gap::Lost));
        assert_eq!(power(number, 0), Reading::Known(100_000), "sample {number}");
    }
    // It is looked for every five seconds.
    assert_eq!(power(119, 1), lost);
    assert_eq!(power(120, 1), Reading::Known(110_000));
    assert_eq!(samples[149][1].index, 1);
}

#[test]
fn processes_are_asked_once_a_second_and_throughput_once_a_sample() {
    let fixture = Fixture::open("two-cards-ns");
    let mut sampler = sampler(fixture.library());
    fixture.load(&fixture.json());
    let samples = samples(&mut sampler, 101);
    let lists = fixture.calls("nvmlDeviceGetComputeRunningProcesses_v3");
    // Two devices, eleven times each.
    assert_eq!(lists, 22);
    let waits = fixture.calls("nvmlDeviceGetPcieThroughput");
    // The second device begins one sample later.
    assert_eq!(waits, 21);
    let last = &samples[100];
    for device in last {
        assert!(device.pcie_tx_bytes_s.known().is_some());
        assert!(device.pcie_rx_bytes_s.known().is_some());
        assert_eq!(device.processes.known().map(Vec::len), Some(1));
    }
}

#[test]
fn throughput_comes_from_counters_where_there_are_some() {
    let fixture = Fixture::open("nvswitch-8");
    let mut machine = fixture.json();
    let fields = &mut machine["common"]["fields"];
    fields["197"] = json!({"from": 5, "per_tick": 400_000_000});
    fields["198"] = json!({"from": 5, "per_tick": 100_000_000});
    let mut sampler = sampler(fixture.library());
    fixture.load(&machine);
    let samples = samples(&mut sampler, 31);
    // A tick of the machine is a sample.
    let is_one_of = |reading: &Reading<u64>, bytes_s: u64| match reading {
        Reading::Known(found) => *found == bytes_s,
        Reading::Missing { .. } => false,
    };
    let device: &DeviceSample = &samples[30][0];
    assert!(
        is_one_of(&device.pcie_tx_bytes_s, 4_000_000_000),
        "{device:?}"
    );
    assert!(
        is_one_of(&device.pcie_rx_bytes_s, 1_000_000_000),
        "{device:?}"
    );
    assert!(
        is_one_of(&device.nvlink_tx_bytes_s, 1_310_720 * 1024 * 10),
        "{device:?}"
    );
    assert_eq!(fixture.calls("nvmlDeviceGetPcieThroughput"), 0);
    assert_eq!(samples[0][0].nvlink_tx_bytes_s.gap(), Some(&Gap::NotRead));
}

#[test]
fn a_sample_waits_for_one_throughput_at_most() {
    let fixture = Fixture::open("nvswitch-8");
    let mut sampler = sampler(fixture.library());
    fixture.load(&fixture.json());
    for number in 0..8 {
        sampler.sample(100 * MS * number);
        let waits = fixture.calls("nvmlDeviceGetPcieThroughput");
        assert_eq!(waits, u64::from(number) + 1);
    }
}

#[test]
fn the_card_that_falls_off_the_bus_is_seen_until_then() {
    let fixture = Fixture::open("lost-mid-run");
    let mut sampler = sampler(fixture.library());
    fixture.load(&fixture.json());
    let samples = samples(&mut sampler, 40);
    let is_seen = |device: usize| -> Vec<usize> {
        let seen = samples.iter().enumerate();
        let seen = seen.filter(|(_, sample)| sample[device].memory.known().is_some());
        seen.map(|(number, _)| number).collect()
    };
    assert_eq!(is_seen(0), (0..40).collect::<Vec<_>>());
    assert_eq!(is_seen(1), (0..20).collect::<Vec<_>>());
}
