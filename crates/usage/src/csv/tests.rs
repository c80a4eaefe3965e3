use paceline_gpu::sample::Throttle;

use super::*;
use crate::Replay;

fn written(samples: &[Sample]) -> String {
    let mut bytes = Vec::new();
    let mut writer = CsvWriter::new(&mut bytes).expect("a header");
    for sample in samples {
        writer.write(sample).expect("memory takes everything");
    }
    drop(writer);
    String::from_utf8(bytes).expect("text")
}

fn full() -> DeviceSample {
    DeviceSample {
        index: 3,
        utilization_percent: 87.into(),
        memory_utilization_percent: 41.into(),
        sm_active_percent: 61.53.into(),
        sm_occupancy_percent: 0.0.into(),
        tensor_active_percent: 27.2.into(),
        dram_active_percent: 100.0.into(),
        memory: Memory {
            used_bytes: 5,
            total_bytes: 9,
        }
        .into(),
        power_mw: 1.into(),
        power_limit_mw: 2.into(),
        energy_mj: u64::MAX.into(),
        temperature_c: 61.into(),
        sm_clock_mhz: 1980.into(),
        memory_clock_mhz: 10_501.into(),
        pcie_tx_bytes_s: 11.into(),
        pcie_rx_bytes_s: 12.into(),
        nvlink_tx_bytes_s: 13.into(),
        nvlink_rx_bytes_s: 14.into(),
        throttles: Throttle::NAMED
            .map(|(throttle, _)| throttle)
            .to_vec()
            .into(),
        processes: vec![
            ProcessMemory {
                pid: 77,
                used_bytes: 123.into(),
            },
            ProcessMemory {
                pid: 78,
                used_bytes: Reading::default(),
            },
        ]
        .into(),
    }
}

fn silent(index: u32, why: Gap) -> DeviceSample {
    fn gap<T>(why: &Gap) -> Reading<T> {
        Reading::missing(why.clone())
    }
    DeviceSample {
        index,
        utilization_percent: gap(&why),
        memory_utilization_percent: gap(&why),
        sm_active_percent: gap(&why),
        sm_occupancy_percent: gap(&why),
        tensor_active_percent: gap(&why),
        dram_active_percent: gap(&why),
        memory: gap(&why),
        power_mw: gap(&why),
        power_limit_mw: gap(&why),
        energy_mj: gap(&why),
        temperature_c: gap(&why),
        sm_clock_mhz: gap(&why),
        memory_clock_mhz: gap(&why),
        pcie_tx_bytes_s: gap(&why),
        pcie_rx_bytes_s: gap(&why),
        nvlink_tx_bytes_s: gap(&why),
        nvlink_rx_bytes_s: gap(&why),
        throttles: gap(&why),
        processes: gap(&why),
    }
}

#[test]
fn what_is_written_is_read_again() {
    let mut mixed = full();
    mixed.power_mw = Err(Gap::NotSupported).into();
    mixed.energy_mj = Reading::default();
    mixed.throttles = Vec::new().into();
    mixed.processes = Err(Gap::other("odd, \"quoted\" words")).into();
    let ranks = vec![
        RankSample {
            rank: 0,
            pid: Some(4711),
            cpu: Duration::from_millis(1250).into(),
            resident_bytes: 99.into(),
        },
        RankSample {
            rank: 1,
            pid: None,
            cpu: Err(Gap::NoPermission).into(),
            resident_bytes: Err(Gap::NoPermission).into(),
        },
    ];
    let samples = [
        Sample::default(),
        Sample {
            at: Duration::from_micros(100_001),
            devices: vec![
                full(),
                mixed,
                silent(5, Gap::Lost),
                silent(6, Gap::other("who, me")),
            ],
            ranks,
        },
        Sample {
            at: Duration::from_secs(604_800),
            devices: vec![DeviceSample::default()],
            ranks: Vec::new(),
        },
    ];
    let text = written(&samples);
    let back: Vec<Sample> = Replay::new(std::io::Cursor::new(text))
        .expect("a header")
        .map(|sample| sample.expect("a sample"))
        .collect();
    assert_eq!(back, samples);
}

#[test]
fn lines_say_what_is_missing_and_why() {
    let check = |device: DeviceSample, expect: &str| {
        let sample = Sample {
            at: Duration::from_millis(12_300),
            devices: vec![device],
            ranks: Vec::new(),
        };
        let text = written(&[sample]);
        assert_eq!(text.lines().nth(1), Some(expect));
    };
    check(
        silent(1, Gap::Lost),
        "12.300000,gpu,1,,,,,,,,,,,,,,,,,,,,,,,,*=lost",
    );
    let mut device = full();
    device.energy_mj = Err(Gap::NoFunction).into();
    device.memory = Err(Gap::other("a, b")).into();
    check(
        device,
        "12.300000,gpu,3,87,41,61.53,0.0,27.2,100.0,,,1,2,,61,1980,10501,11,12,13,14,power_cap thermal hardware_thermal power_brake hardware \
         sync_boost clocks_setting display_clock,77:123 78,,,,\"memory_used_bytes=a, b;energy_mj=no_function\"",
    );
}

#[test]
fn one_reason_for_all_counters_stands_once() {
    let check = |device: &DeviceSample, expect: &str| {
        let sample = Sample {
            devices: vec![device.clone()],
            ..Sample::default()
        };
        let text = written(std::slice::from_ref(&sample));
        let missing = text.lines().nth(1).and_then(|line| line.rsplit(',').next());
        assert_eq!(missing, Some(expect));
        let mut back = CsvSamples::new(text.as_bytes()).expect("a header");
        assert_eq!(back.next().expect("a row").expect("a sample"), sample);
    };
    let mut device = full();
    let counters = [
        &mut device.sm_active_percent,
        &mut device.sm_occupancy_percent,
        &mut device.tensor_active_percent,
        &mut device.dram_active_percent,
    ];
    for counter in counters {
        *counter = Err(Gap::NotSupported).into();
    }
    device.nvlink_tx_bytes_s = Err(Gap::NotSupported).into();
    check(
        &device,
        "counters=not_supported;nvlink_tx_bytes_s=not_supported",
    );
    device.tensor_active_percent = 5.0.into();
    check(
        &device,
        "sm_active_percent=not_supported;sm_occupancy_percent=not_supported;dram_active_percent=not_supported;\
         nvlink_tx_bytes_s=not_supported",
    );
}

#[test]
fn columns_may_be_fewer_and_in_any_order() {
    let text = "index, kind ,utilization_percent,colour,at_s\n4,gpu,55,blue,1.5\n";
    let mut samples = CsvSamples::new(text.as_bytes()).expect("a header");
    let sample = samples.next().expect("a row").expect("a sample");
    let device = &sample.devices[0];
    assert_eq!(sample.at, Duration::from_millis(1500));
    assert_eq!((device.index, &device.utilization_percent), (4, &55.into()));
    assert_eq!(device.power_mw, Reading::default());
}
