//! Answers that no driver should give.

use paceline_gpu::snapshot::{DEVICES_MAX, Gap, Snapshot};
use serde_json::{Value, json};

use crate::Machine;
use crate::difference::differences;

/// Most processes of a device that anybody believes.
const PROCESSES_MAX: usize = 4096;

/// One field of every device is garbage: only what is made of it may differ, and the snapshot can be read again.
fn check(machine: &Machine, clean: &Value, field: &str, garbage: &Value, paths: &[&str]) {
    let mut description = Machine::description();
    description["common"][field] = garbage.clone();
    for device in description["devices"].as_array_mut().expect("devices") {
        device.as_object_mut().expect("a device").remove(field);
    }
    machine.load(&description);
    let found = machine.snapshot();
    for path in differences(clean, &found) {
        let own = path.strip_prefix("devices/*/");
        let is_of_it = own.is_some_and(|own| paths.iter().any(|path| own.starts_with(path)));
        assert!(
            is_of_it,
            "{field} is {garbage}: {path} does not come from it"
        );
    }
    let bytes = serde_json::to_vec(&found).expect("encodes");
    assert!(
        bytes.len() < 4 << 20,
        "{field} is {garbage}: {} bytes",
        bytes.len()
    );
    let snapshot = Snapshot::from_json(&bytes).expect("decodes");
    for device in &snapshot.devices {
        let texts = [
            &device.name,
            &device.uuid,
            &device.pci,
            &device.architecture,
        ];
        for text in texts.into_iter().filter_map(|text| text.known()) {
            assert!(
                text.chars().count() <= Gap::CHARS_MAX,
                "{field} is {garbage}"
            );
            assert!(!text.contains(char::is_control), "{field} is {garbage}");
        }
        let processes = device.processes.known().map_or(0, Vec::len);
        assert!(
            processes <= PROCESSES_MAX,
            "{field} is {garbage}: {processes} processes"
        );
    }
    machine.sample();
}

#[test]
fn one_answer_that_is_garbage_changes_nothing_else() {
    let machine = Machine::new();
    machine.load(&Machine::description());
    let clean = machine.snapshot();
    let largest = u32::MAX;
    let odd_texts = [
        json!({"bytes": [255, 254, 27, 91, 109, 195]}),
        json!({"endless": "x"}),
        json!({"endless": "\u{1b}[2J\u{7}"}),
        json!({"bytes": []}),
        json!("x".repeat(500)),
    ];
    let odd_numbers = [json!(largest), json!(1_u32 << 31), json!(77)];
    let odd_pairs = [
        json!([largest, largest]),
        json!([0, largest]),
        json!([77, 2]),
    ];
    let cases: &[(&str, &[Value], &[&str])] = &[
        ("name", &odd_texts, &["name"]),
        ("uuid", &odd_texts, &["uuid"]),
        ("pci", &odd_texts, &["pci"]),
        ("pci", &[json!("ffff:ff:1f.7"), json!("zz:1:2.3")], &["pci"]),
        ("architecture", &odd_numbers, &["architecture"]),
        ("compute_mode", &odd_numbers, &["compute_mode"]),
        ("persistence", &odd_numbers, &["persistence"]),
        ("display_connected", &odd_numbers, &["has_display"]),
        ("temperature_c", &odd_numbers, &["now/temperature_c"]),
        ("power_mw", &odd_numbers, &["now/power_mw"]),
        (
            "power_limit_mw",
            &odd_numbers,
            &["now/power_limit_mw", "power_default_mw"],
        ),
        ("pcie_generation", &odd_numbers, &["pcie"]),
        ("pcie_generation_max", &odd_numbers, &["pcie"]),
        ("pcie_lanes", &odd_numbers, &["pcie"]),
        ("pcie_lanes_max", &odd_numbers, &["pcie"]),
        ("pcie_replays", &odd_numbers, &["errors/pcie_replays"]),
        ("mig_max", &odd_numbers, &["mig_devices"]),
        ("numa_node", &odd_numbers, &["numa_node"]),
        (
            "process_count",
            &[json!(largest), json!(0), json!(5000)],
            &["processes", "now/processes"],
        ),
        (
            "processes_grow",
            &[json!(true)],
            &["processes", "now/processes"],
        ),
        ("mig", &odd_pairs, &["mig"]),
        ("ecc", &odd_pairs, &["ecc"]),
        (
            "utilization",
            &odd_pairs,
            &["now/utilization_percent", "now/memory_utilization_percent"],
        ),
        (
            "capability",
            &[json!([-1, -1]), json!([i32::MAX, 0]), json!([0, i32::MIN])],
            &["capability"],
        ),
        ("retired_pages", &odd_pairs, &["errors/retired_pages"]),
        (
            "retirement_pending",
            &odd_numbers,
            &["errors/retirement_pending"],
        ),
        (
            "ecc_corrected",
            &[json!([u64::MAX, u64::MAX])],
            &["errors/corrected"],
        ),
        (
            "ecc_uncorrected",
            &[json!([u64::MAX, 1]), json!([u64::MAX - 1, u64::MAX])],
            &["errors/uncorrected"],
        ),
        (
            "remapped_rows",
            &[json!([largest, largest, 7, largest])],
            &["errors/retire"],
        ),
        (
            "energy_mj",
            &[json!(u64::MAX), json!(0)],
            &["now/energy_mj"],
        ),
        (
            "clocks_mhz",
            &[json!([largest, largest, largest, largest])],
            &["now/sm_clock_mhz", "now/memory_clock_mhz"],
        ),
        (
            "throttles",
            &[json!(u64::MAX), json!(1_u64 << 63)],
            &["now/throttles"],
        ),
        (
            "temperature_limits_c",
            &[json!([largest, largest, largest, largest])],
            &["slowdown_c"],
        ),
        ("cpus", &[json!("8000-9000"), json!("")], &["cpus"]),
        (
            "memory",
            &[
                json!({"total_mib": 0, "used_mib": 0}),
                json!({"total_mib": 10, "used_mib": 20, "reserved_mib": 5}),
                json!({"total_mib": u64::MAX >> 20, "used_mib": u64::MAX >> 20}),
            ],
            &["memory", "now/memory"],
        ),
        (
            "nvlinks",
            &[
                json!([]),
                json!([{"active": 77, "version": largest, "remote": 200, "remote_pci": {"endless": "x"}, "errors": [u64::MAX, u64::MAX, 1, 1, 1]}]),
                json!([{"times": 40, "active": true}]),
            ],
            &["nvlinks"],
        ),
        (
            "fields",
            &[
                json!({"90": u64::MAX, "91": u64::MAX, "138": u64::MAX, "139": 0, "186": u64::MAX, "197": u64::MAX, "198": 3}),
            ],
            &["nvlinks", "now/power_mw"],
        ),
        (
            "compute",
            &[
                json!([{"pid": 0}, {"pid": largest, "memory_mib": u64::MAX >> 20}, {"pid": 100}, {"pid": 100}]),
                json!(
                    (0..5000)
                        .map(|pid| json!({"pid": pid, "memory_mib": 1}))
                        .collect::<Vec<_>>()
                ),
            ],
            &["processes", "now/processes"],
        ),
    ];
    for (field, garbage, paths) in cases {
        for garbage in *garbage {
            check(&machine, &clean, field, garbage, paths);
        }
    }
}

#[test]
fn a_count_of_devices_that_no_machine_has_is_not_believed() {
    let machine = Machine::new();
    for count in [u32::MAX, 100_000, 257] {
        let mut description = Machine::description();
        description["count"] = json!(count);
        machine.load(&description);
        let found: Snapshot = serde_json::from_value(machine.snapshot()).expect("a snapshot");
        assert_eq!(found.devices.len(), DEVICES_MAX);
        assert!(found.devices[1].name.known().is_some());
        assert!(found.devices[2].name.known().is_none());
    }
}

#[test]
fn a_list_of_processes_that_grows_while_it_is_read_is_read_whole_or_is_a_gap() {
    let machine = Machine::new();
    for count in [1, 63, 64, 65, 4094, 4095, 4096, 4097] {
        let mut description = Machine::description();
        let processes = (1..=count).map(|pid| json!({"pid": pid, "memory_mib": 1}));
        description["common"]["compute"] = processes.collect();
        description["common"]["graphics"] = json!([]);
        description["common"]["processes_grow"] = json!(true);
        machine.load(&description);
        let found: Snapshot = serde_json::from_value(machine.snapshot()).expect("a snapshot");
        for device in &found.devices {
            let read = device.processes.known().map(Vec::len);
            let is_whole = read.is_some_and(|read| (count..=PROCESSES_MAX).contains(&read));
            assert!(
                is_whole || count >= 4094 && read.is_none(),
                "{read:?} of {count}"
            );
        }
    }
}

#[test]
fn codes_between_devices_that_nobody_knows_are_gaps() {
    let machine = Machine::new();
    machine.load(&Machine::description());
    let clean = machine.snapshot();
    let check = |field: &str, garbage: Value, expect: &str| {
        let mut description = Machine::description();
        description[field] = garbage;
        machine.load(&description);
        let found = differences(&clean, &machine.snapshot());
        let all_expected = found.iter().all(|path| path.starts_with(expect));
        assert!(all_expected && !found.is_empty(), "{found:?}");
    };
    check("p2p", json!({"all": "77"}), "links/*/p2p");
    check("p2p", json!({"all": "4294967295"}), "links/*/p2p");
    check("ancestors", json!("35"), "links/*/ancestor");
    check("driver", json!({"endless": "9"}), "driver/version");
    check("nvml", json!({"bytes": [255]}), "driver/nvml");
    check("cuda", json!([4_000_000, 4_000_000]), "driver/cuda");
}
