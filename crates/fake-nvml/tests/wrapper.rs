//! The fake library through nvml-wrapper, as a program meets it.

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{TemperatureSensor, TopologyLevel};
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::gpm_metrics_get;
use nvml_wrapper::structs::device::FieldId;
use paceline_fake_nvml::{FUNCTIONS, Fixture, Library};
use serde_json::json;

fn open(library: &std::path::Path) -> Result<Nvml, NvmlError> {
    Nvml::builder().lib_path(library.as_os_str()).init()
}

#[test]
fn a_machine_answers_as_its_file_says() {
    let machine = Fixture::open("nvswitch-8");
    let nvml = open(machine.library()).expect("the fake library");
    assert_eq!(nvml.sys_driver_version().expect("a version"), "570.172.08");
    assert_eq!(nvml.sys_cuda_driver_version().expect("a version"), 12080);
    assert_eq!(nvml.device_count().expect("a count"), 8);
    let [first, last] = [0, 7].map(|index| nvml.device_by_index(index).expect("a device"));
    assert_eq!(first.name().expect("a name"), "NVIDIA H100 80GB HBM3");
    let pci = first.pci_info().expect("a place");
    assert_eq!((pci.bus_id.as_str(), pci.bus), ("00000000:1B:00.0", 0x1b));
    assert_eq!(first.memory_info().expect("memory").total, 81_559 << 20);
    assert_eq!(first.utilization_rates().expect("shares").gpu, 99);
    assert_eq!(first.utilization_rates().expect("shares").gpu, 100);
    assert_eq!(first.temperature(TemperatureSensor::Gpu).expect("warm"), 60);
    let processes = first.running_compute_processes().expect("processes");
    assert_eq!(
        processes
            .iter()
            .map(|process| process.pid)
            .collect::<Vec<_>>(),
        [3101]
    );
    assert!(first.link_wrapper_for(17).is_active().expect("a link"));
    assert!(matches!(
        first.link_wrapper_for(18).is_active(),
        Err(NvmlError::InvalidArg)
    ));
    let level = first.topology_common_ancestor(last).expect("a level");
    assert_eq!(level, TopologyLevel::System);
    let fields = first
        .field_values_for(&[FieldId(91), FieldId(7)])
        .expect("values");
    assert!(fields[0].as_ref().is_ok_and(|field| field.value.is_ok()));
    assert!(fields[1].as_ref().is_ok_and(|field| field.value.is_err()));
    assert_eq!(machine.calls("nvmlDeviceGetUtilizationRates"), 2);
}

#[test]
fn two_samples_of_performance_counters_are_a_share() {
    let machine = Fixture::open("nvswitch-8");
    let nvml = open(machine.library()).expect("the fake library");
    let [device, other] = [0, 1].map(|index| nvml.device_by_index(index).expect("a device"));
    assert!(device.gpm_support().expect("an answer"));
    let samples = [(); 2].map(|()| device.gpm_sample().expect("a sample"));
    let asked = [GpmMetricId::SmUtil, GpmMetricId::Fp64Util];
    let answers = gpm_metrics_get(&nvml, &samples[0], &samples[1], &asked).expect("answers");
    assert_eq!(
        answers[0].as_ref().map(|answer| answer.value).ok(),
        Some(88.4)
    );
    assert!(matches!(answers[1], Err(NvmlError::NotSupported)));
    let other = other.gpm_sample().expect("a sample");
    for [one, two] in [[&samples[1], &samples[0]], [&samples[0], &other]] {
        let answer = gpm_metrics_get(&nvml, one, two, &asked);
        assert!(matches!(answer, Err(NvmlError::InvalidArg)));
    }
    let older = Fixture::open("lost-mid-run");
    let nvml = open(older.library()).expect("the fake library");
    let device = nvml.device_by_index(0).expect("a device");
    assert!(!device.gpm_support().expect("an answer"));
    assert!(matches!(device.gpm_sample(), Err(NvmlError::NotSupported)));
}

#[test]
fn each_copy_has_a_machine_of_its_own() {
    let [one, other] = [(); 2].map(|()| Fixture::open("two-cards-ns"));
    let mut changed = other.json();
    changed["devices"] = json!([{"name": "Another"}]);
    other.load(&changed);
    let count = |machine: &Fixture| {
        let nvml = open(machine.library()).expect("the fake library");
        nvml.device_count().expect("a count")
    };
    assert_eq!((count(&one), count(&other)), (2, 1));
}

#[test]
fn a_function_that_was_taken_out_is_not_found_and_the_others_are() {
    let library = Library::without(&["nvmlDeviceGetName", "nvmlDeviceGetCount_v2"]);
    library.load(r#"{"driver": "450.80.02", "devices": [{"name": "A card", "minor": 3}]}"#);
    let nvml = open(library.path()).expect("the fake library");
    assert!(matches!(
        nvml.device_count(),
        Err(NvmlError::FailedToLoadSymbol(_))
    ));
    let device = nvml.device_by_index(0).expect("a device");
    assert!(matches!(
        device.name(),
        Err(NvmlError::FailedToLoadSymbol(_))
    ));
    assert_eq!(device.minor_number().expect("a number"), 3);
}

#[test]
fn every_function_can_be_taken_out_and_every_other_stays() {
    for gone in FUNCTIONS {
        let library = Library::without(&[gone]);
        // SAFETY: nothing runs when this library is loaded.
        #[allow(unsafe_code)]
        let loaded = unsafe { libloading::Library::new(library.path()) }.expect("a library");
        for function in FUNCTIONS {
            // SAFETY: the function is looked up, and not called.
            #[allow(unsafe_code)]
            let found = unsafe { loaded.get::<extern "C" fn()>(function.as_bytes()) };
            assert_eq!(found.is_ok(), function != gone, "{function} without {gone}");
        }
    }
}

#[test]
fn initializing_fails_as_it_is_told_to() {
    let check = |code: u32, expect: &str| {
        let library = Library::whole();
        let json = json!({"fail": {"nvmlInit_v2": code}}).to_string();
        std::fs::write(library.machine(), json).expect("written");
        let error = open(library.path()).expect_err("it fails");
        assert_eq!(error.to_string(), expect);
        assert_eq!(library.calls("nvmlInit_v2"), 1);
    };
    check(9, "NVIDIA driver is not loaded");
    check(18, "RM detects a driver/library version mismatch");
    check(12345, "unexpected enum variant value: 12345");
}
