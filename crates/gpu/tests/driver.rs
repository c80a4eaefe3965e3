//! Snapshots and samples of machines that are not there: what the driver says is told whole, and what it does not say does not
//! hide the rest.

use std::path::Path;
use std::time::Duration;

use paceline_fake_nvml::{Fixture, Library};
use paceline_gpu::devices;
use paceline_gpu::places::Places;
use paceline_gpu::sampler::Sampler;
use paceline_gpu::snapshot::{DEVICES_MAX, DriverError, Gap, Reading, Snapshot, System};
use paceline_gpu::take::take;
use serde_json::{Value, json};

fn places(library: &Path, root: &Path) -> Places {
    Places {
        library: Some(library.to_owned()),
        root: root.to_owned(),
    }
}

fn of_fixture(fixture: &Fixture) -> Places {
    places(fixture.library(), fixture.root())
}

/// A machine without files.
fn of_library(library: &Library) -> Places {
    places(library.path(), Path::new("/nowhere"))
}

/// What the driver said, one thing a line.
fn lines(snapshot: &Snapshot) -> String {
    let mut lines = vec![serde_json::to_string(&snapshot.driver).expect("encodes")];
    let devices = snapshot.devices.iter().map(serde_json::to_string);
    let links = snapshot.links.iter().map(serde_json::to_string);
    lines.extend(devices.chain(links).map(|line| line.expect("encodes")));
    lines.join("\n") + "\n"
}

/// With `PACELINE_UPDATE_SNAPSHOTS=1` writes what is expected instead of comparing it.
fn check_snapshot(name: &str) {
    let fixture = Fixture::open(name);
    let snapshot = take(&of_fixture(&fixture));
    assert!(snapshot.taken_unix_s > 0);
    let found = lines(&snapshot);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/snapshots/{name}.jsonl"));
    if std::env::var_os("PACELINE_UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(&path, &found).expect("written");
    }
    let expect = std::fs::read_to_string(&path).expect("what is expected");
    for (number, (found, expect)) in found.lines().zip(expect.lines()).enumerate() {
        assert_eq!(found, expect, "line {}", number + 1);
    }
    assert_eq!(found.lines().count(), expect.lines().count());
}

#[test]
fn two_cards_without_peer_to_peer_are_told_whole() {
    check_snapshot("two-cards-ns");
}

#[test]
fn eight_devices_on_switches_are_told_whole() {
    check_snapshot("nvswitch-8");
}

#[test]
fn an_old_driver_is_told_as_far_as_it_goes() {
    check_snapshot("old-driver");
}

#[test]
fn parts_of_a_device_are_counted() {
    check_snapshot("mig");
}

#[test]
fn a_user_who_may_not_know_everything_is_told_the_rest() {
    check_snapshot("half-permitted");
}

#[test]
fn a_machine_has_the_name_that_its_files_say() {
    let fixture = Fixture::open("two-cards-ns");
    assert_eq!(take(&of_fixture(&fixture)).host, "gpu-box");
}

fn two_devices() -> Value {
    json!({
        "driver": "450.51",
        "devices": [
            {
                "name": "A", "uuid": "GPU-a", "pci": "0000:01:00.0",
                "memory": {"total_mib": 1000, "used_mib": 10, "reserved_mib": 5},
                "utilization": [50, 20], "power_mw": 100_000, "temperature_c": 50,
                "energy_mj": {"from": 1000, "per_tick": 10},
                "throttles": ["power_cap"], "clocks_mhz": [1, 2, 3, 4],
                "pcie_tx_kb_s": 1000, "pcie_rx_kb_s": 2000,
                "compute": [{"pid": 7, "memory_mib": 3}], "graphics": []
            },
            {
                "name": "B", "uuid": "GPU-b", "pci": "0000:02:00.0",
                "utilization": [60, 30], "power_mw": 110_000,
                "pcie_tx_kb_s": 3000, "pcie_rx_kb_s": 4000
            }
        ]
    })
}

#[test]
fn a_driver_that_lacks_functions_tells_the_rest() {
    let library = Library::without(&[
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetComputeRunningProcesses_v2",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
        "nvmlDeviceGetGraphicsRunningProcesses_v2",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetArchitecture",
        "nvmlDeviceGetP2PStatus",
        "nvmlDeviceGetMemoryAffinity",
    ]);
    library.load(&two_devices().to_string());
    let snapshot = take(&of_library(&library));
    let device = &snapshot.devices[0];
    let memory = device.memory.known().expect("by the older function");
    assert_eq!(memory.total_bytes, 1000 << 20);
    let processes = device.processes.known().expect("by the oldest function");
    assert_eq!((processes[0].pid, processes.len()), (7, 1));
    assert_eq!(processes[0].memory_bytes, Reading::Known(3 << 20));
    assert_eq!(device.now.power_mw, Reading::Known(100_000));
    assert_eq!(device.now.throttles.known().map(Vec::len), Some(1));
    assert_eq!(device.architecture.gap(), Some(&Gap::NoFunction));
    assert_eq!(device.numa_node.gap(), Some(&Gap::NoFunction));
    assert_eq!(snapshot.links[0].p2p[0].gap(), Some(&Gap::NoFunction));
}

#[test]
fn a_device_that_cannot_be_opened_stays_in_the_list() {
    let library = Library::whole();
    let mut machine = two_devices();
    machine["fail"] = json!({
        "nvmlDeviceGetHandleByIndex_v2": {"code": "NO_PERMISSION", "device": 0}
    });
    library.load(&machine.to_string());
    let snapshot = take(&of_library(&library));
    assert_eq!(snapshot.devices[0].name.gap(), Some(&Gap::NoPermission));
    assert_eq!(snapshot.devices[1].name, Reading::Known("B".to_owned()));
    assert_eq!(snapshot.links[0].p2p[0].gap(), Some(&Gap::NoPermission));
    let mut sampler = Sampler::open(&of_library(&library));
    let sample = sampler.sample(Duration::ZERO);
    let gaps = sample.iter().map(|device| device.power_mw.gap().cloned());
    assert_eq!(gaps.collect::<Vec<_>>(), [Some(Gap::NoPermission), None]);
}

#[test]
fn a_driver_that_does_not_start_is_trouble_for_everyone() {
    let check = |code: &str, expect: DriverError| {
        let library = Library::whole();
        let machine = json!({"devices": [{}], "fail": {"nvmlInit_v2": code}});
        library.load(&machine.to_string());
        let places = of_library(&library);
        let snapshot = take(&places);
        assert_eq!(snapshot.driver.trouble.as_ref(), Some(&expect));
        assert!(snapshot.devices.is_empty());
        let mut sampler = Sampler::open(&places);
        assert_eq!(sampler.trouble(), Some(&expect));
        assert!(sampler.sample(Duration::ZERO).is_empty());
        assert_eq!(devices::list(&places), Err(expect));
    };
    check("DRIVER_NOT_LOADED", DriverError::NoDriver);
    check("NO_PERMISSION", DriverError::NoPermission);
    check("LIB_RM_VERSION_MISMATCH", DriverError::VersionMismatch);
    let words = "the driver failed for a reason that it does not know";
    check("UNKNOWN", DriverError::Other(words.to_owned()));
}

#[test]
fn a_library_that_is_none_is_trouble() {
    let library = Library::without(&["nvmlInit_v2"]);
    match take(&of_library(&library)).driver.trouble {
        Some(DriverError::Other(words)) => {
            assert!(words.starts_with("this is no NVML library"), "{words}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn numbers_beyond_reason_are_not_believed() {
    let library = Library::whole();
    let machine = json!({
        "count": 4_000_000_000u32,
        "cuda": [0, 0],
        "devices": [{
            "name": {"endless": "x"}, "uuid": {"bytes": [71, 255, 27, 0]}, "pci": {"endless": "0"},
            "utilization": [101, 4_000_000_000u32], "power_mw": u32::MAX, "temperature_c": 4_000_000,
            "energy_mj": u64::MAX, "clocks_mhz": [0, u32::MAX, u32::MAX, 0],
            "pcie_generation": 77, "pcie_lanes": 16, "capability": [-1, 0],
            "compute": [{"pid": 1, "memory_mib": 2}], "process_count": u32::MAX, "graphics": [],
            "retired_pages": [3, 4], "mig_max": u32::MAX
        }]
    });
    library.load(&machine.to_string());
    let snapshot = take(&of_library(&library));
    assert_eq!(snapshot.devices.len(), DEVICES_MAX);
    assert!(snapshot.driver.cuda.gap().is_some());
    let device = &snapshot.devices[0];
    assert_eq!(device.name.known().map(String::len), Some(96));
    assert_eq!(device.uuid, Reading::Known("G\u{fffd}".to_owned()));
    let check = |what: &str, is_missing: bool| assert!(is_missing, "{what}");
    let now = &device.now;
    check("utilization", now.utilization_percent.gap().is_some());
    check(
        "memory utilization",
        now.memory_utilization_percent.gap().is_some(),
    );
    check("power", now.power_mw.gap().is_some());
    check("temperature", now.temperature_c.gap().is_some());
    check("energy", now.energy_mj.gap().is_some());
    check("clock", now.sm_clock_mhz.gap().is_some());
    check("capability", device.capability.gap().is_some());
    let link = device.pcie.known().expect("the lanes");
    assert_eq!((link.generation, link.lanes), (0, 16));
    assert_eq!(device.errors.retired_pages, Reading::Known(7));
    let processes = device.processes.known().map_or(0, Vec::len);
    assert!(processes <= 4096, "{processes} processes");
}

/// What the counters say of the first device, sample by sample.
fn counters(sampler: &mut Sampler, samples: std::ops::Range<u64>) -> Vec<[Option<f64>; 4]> {
    let mut sample = |second| {
        let now = sampler.sample(Duration::from_secs(second)).swap_remove(0);
        let shares = [
            now.sm_active_percent,
            now.sm_occupancy_percent,
            now.tensor_active_percent,
            now.dram_active_percent,
        ];
        shares.map(|share| share.known().copied())
    };
    samples.map(&mut sample).collect()
}

fn with_counters(counters: Value) -> String {
    json!({"devices": [{"utilization": [100, 50], "gpm": counters}, {"utilization": [100, 50]}]})
        .to_string()
}

#[test]
fn counters_say_from_the_second_sample_on_how_busy_the_multiprocessors_are() {
    let fixture = Fixture::open("nvswitch-8");
    let mut sampler = Sampler::open(&of_fixture(&fixture));
    let first = counters(&mut sampler, 0..3);
    // The fixture's shares change with each sample of the utilisation.
    let second = [91.2, 43.3, 54.6, 49.0].map(Some);
    let third = [86.9, 40.8, 51.3, 46.2].map(Some);
    assert_eq!(first, [[None; 4], second, third]);
    drop(sampler);
    let calls = ["nvmlGpmSampleAlloc", "nvmlGpmSampleFree"].map(|name| fixture.calls(name));
    assert_eq!(
        calls,
        [16, 16],
        "two for each device, and none is left behind"
    );
}

#[test]
fn devices_and_drivers_without_counters_have_a_gap() {
    let check = |without: &[&str], expect: &Gap| {
        let library = Library::without(without);
        library.load(&with_counters(json!({"2": 50})));
        let mut sampler = Sampler::open(&of_library(&library));
        let samples = [0, 2, 4].map(|second| sampler.sample(Duration::from_secs(second)));
        let has = without.is_empty().then_some(50.0);
        assert_eq!(samples[2][0].sm_active_percent.known().copied(), has);
        assert_eq!(samples[2][1].sm_active_percent.gap(), Some(expect));
        assert_eq!(samples[2][1].utilization_percent, Reading::Known(100));
    };
    check(&[], &Gap::NotSupported);
    check(&["nvmlGpmQueryDeviceSupport"], &Gap::NoFunction);
    // Without these the second device is not even asked.
    for function in [
        "nvmlGpmSampleAlloc",
        "nvmlGpmSampleFree",
        "nvmlGpmSampleGet",
        "nvmlGpmMetricsGet",
    ] {
        check(&[function], &Gap::NotSupported);
    }
}

#[test]
fn one_counter_that_is_missing_or_odd_hides_no_other() {
    let library = Library::whole();
    let machine = json!({"2": -1, "3": 1e300, "5": {"error": "NO_DATA"}, "10": 12.5});
    library.load(&with_counters(machine));
    let mut sampler = Sampler::open(&of_library(&library));
    let found = counters(&mut sampler, 0..2);
    assert_eq!(found[1], [None, None, None, Some(12.5)]);
}

#[test]
fn an_error_between_two_samples_of_counters_begins_anew() {
    let library = Library::whole();
    let fail = |failure: Value| {
        let mut machine: Value =
            serde_json::from_str(&with_counters(json!({"2": 50}))).expect("JSON");
        machine["fail"] = json!({ "nvmlGpmSampleGet": failure });
        library.load(&machine.to_string());
    };
    fail(json!({"code": 999, "after": 0, "times": 0}));
    let mut sampler = Sampler::open(&of_library(&library));
    let mut active = |seconds| counters(&mut sampler, seconds).pop().and_then(|all| all[0]);
    assert_eq!(active(0..2), Some(50.0));
    fail(json!(999));
    assert_eq!(active(2..4), None);
    fail(json!({"code": 999, "after": 0, "times": 0}));
    assert_eq!(active(4..5), None, "the first sample again");
    assert_eq!(active(5..6), Some(50.0));
}

#[test]
fn only_some_devices_may_be_watched() {
    let fixture = Fixture::open("nvswitch-8");
    let check = |wanted: &[u32], expect: &[u32]| {
        let mut sampler = Sampler::open(&of_fixture(&fixture)).only(wanted);
        let sample = sampler.sample(Duration::ZERO);
        let found: Vec<u32> = sample.iter().map(|device| device.index).collect();
        assert_eq!(found, expect, "{wanted:?}");
        assert_eq!(sampler.devices().collect::<Vec<_>>(), expect);
    };
    check(&[5, 2], &[5, 2]);
    check(&[1, 1, 99], &[1]);
    check(&[], &[]);
}

#[test]
fn gpus_have_the_names_that_cuda_knows() {
    let fixture = Fixture::open("two-cards-ns");
    let gpus = devices::list(&of_fixture(&fixture)).expect("a driver");
    let variable = |name: &str| (name == "CUDA_VISIBLE_DEVICES").then(|| "GPU-8c0d".to_owned());
    assert_eq!(devices::visible(&gpus, &variable), Ok(vec![1]));
    assert_eq!(gpus[0].pci, "0000:01:00.0");
}

#[test]
fn a_snapshot_is_read_again_elsewhere() {
    let fixture = Fixture::open("nvswitch-8");
    let mut snapshot = take(&of_fixture(&fixture));
    snapshot.system = System::default();
    let json = serde_json::to_vec(&snapshot).expect("encodes");
    assert_eq!(Snapshot::from_json(&json).expect("decodes"), snapshot);
}
