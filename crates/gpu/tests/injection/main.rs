//! Every error of the driver at every function, and answers that no driver should give: nothing panics, and all that does not
//! come from that function is still told.

mod difference;
mod garbage;
mod sources;

use std::path::Path;
use std::time::Duration;

use paceline_fake_nvml::{FUNCTIONS, Fixture, Library, names};
use paceline_gpu::places::Places;
use paceline_gpu::sampler::Sampler;
use paceline_gpu::snapshot::Snapshot;
use paceline_gpu::take::take;
use serde_json::{Value, json};

use difference::differences;
use sources::{BEGINNINGS, Source, source};

/// All of NVML's codes but success, and one that no version of it has.
const CODES: [u32; 32] = [
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26,
    27, 28, 29, 30, 999, 12345,
];

/// Codes that mean that the whole device is gone, whichever function says so.
const LOST: [u32; 2] = [15, 28];

/// A driver that has every function, and a device that has everything.
pub(crate) struct Machine {
    library: Library,
    places: Places,
}

impl Machine {
    pub(crate) fn new() -> Self {
        let library = Library::whole();
        let places = Places {
            library: Some(library.path().into()),
            root: "/nowhere".into(),
        };
        Self { library, places }
    }

    /// What it answers where nothing is wrong.
    pub(crate) fn description() -> Value {
        serde_json::from_str(include_str!("everything.json")).expect("a machine")
    }

    pub(crate) fn load(&self, description: &Value) {
        self.library.load(&description.to_string());
    }

    /// A snapshot as the JSON that it is saved as, without the time.
    pub(crate) fn snapshot(&self) -> Value {
        let mut snapshot = take(&self.places);
        snapshot.taken_unix_s = 0;
        serde_json::to_value(&snapshot).expect("encodes")
    }

    /// The last of some samples that are so far apart that everything is asked each time. Rates need two, and the two of PCIe
    /// take turns.
    fn sample(&self) -> Value {
        samples(&mut Sampler::open(&self.places), 0)
    }
}

/// The last of some samples; `from` counts those that came before.
fn samples(sampler: &mut Sampler, from: u64) -> Value {
    let sample = |turn| sampler.sample(Duration::from_secs(61 * turn));
    let last = (from..from + 5).map(sample).last().expect("a sample");
    serde_json::to_value(&last).expect("encodes")
}

/// The machine, one of whose functions fails.
fn failing(function: &str, failure: Value) -> Value {
    let mut description = Machine::description();
    description["fail"] = json!({ function: failure });
    description
}

/// Every difference is in what the function feeds; `all` where the whole device may differ.
fn check(what: &str, clean: &Value, found: &Value, source: &Source, may_be_all: bool) -> usize {
    let found = differences(clean, found);
    for path in &found {
        assert!(
            may_be_all || source.feeds(path),
            "{what}: {path} does not come from it"
        );
    }
    found.len()
}

#[test]
fn the_table_names_every_function_that_is_asked_and_no_other() {
    let machine = Machine::new();
    machine.load(&Machine::description());
    machine.snapshot();
    machine.sample();
    for function in FUNCTIONS {
        let is_asked = machine.library.calls(function) > 0;
        let is_end = ["nvmlShutdown", "nvmlGpmSampleFree"].contains(function);
        assert_eq!(
            is_asked,
            source(function).feeds_something() || is_end,
            "{function}"
        );
    }
}

#[test]
fn an_error_of_any_function_hides_only_what_comes_from_it_in_a_snapshot() {
    let machine = Machine::new();
    machine.load(&Machine::description());
    let clean = machine.snapshot();
    for function in FUNCTIONS {
        let source = source(function);
        for code in CODES {
            machine.load(&failing(function, json!(code)));
            let found = machine.snapshot();
            let what = format!("{function} fails with {code}");
            let count = check(&what, &clean, &found, &source, false);
            if BEGINNINGS.contains(function) {
                assert_ne!(found["driver"]["trouble"], Value::Null, "{what}");
            }
            let shows = code == 999 && source.shows() && machine.library.calls(function) > 0;
            assert!(!shows || count > 0, "{what} and nothing differs");
        }
    }
}

#[test]
fn an_error_of_any_function_hides_only_what_comes_from_it_in_samples() {
    let machine = Machine::new();
    machine.load(&Machine::description());
    let clean = machine.sample();
    for function in FUNCTIONS {
        let source = source(function).of_a_sample();
        for code in CODES {
            machine.load(&failing(function, json!(code)));
            let found = machine.sample();
            let what = format!("{function} fails with {code}");
            let is_asked = machine.library.calls(function) > 0;
            // The sampler asks a lost device nothing more.
            let may_be_all = is_asked && LOST.contains(&code);
            let count = check(&what, &clean, &found, &source, may_be_all);
            let shows = code == 999 && source.shows() && is_asked;
            assert!(!shows || count > 0, "{what} and nothing differs");
        }
    }
}

#[test]
fn an_error_that_comes_and_goes_while_sampling_leaves_nothing_behind() {
    let machine = Machine::new();
    machine.load(&Machine::description());
    let clean = machine.sample();
    for function in FUNCTIONS {
        let source = source(function).of_a_sample();
        for code in CODES {
            machine.load(&Machine::description());
            let mut sampler = Sampler::open(&machine.places);
            assert_eq!(samples(&mut sampler, 0), clean);
            machine.load(&failing(function, json!(code)));
            let during = samples(&mut sampler, 5);
            let what = format!("{function} fails with {code} in between");
            check(&what, &clean, &during, &source, LOST.contains(&code));
            machine.load(&Machine::description());
            let after = samples(&mut sampler, 10);
            let left = differences(&clean, &after);
            assert!(left.is_empty(), "{what}, and then {left:?} stay different");
        }
    }
}

#[test]
fn an_error_of_one_device_hides_nothing_of_the_others() {
    let machine = Machine::new();
    machine.load(&Machine::description());
    let (clean, clean_sample) = (machine.snapshot(), machine.sample());
    for function in FUNCTIONS {
        for code in [3, 4, 15, 999, 12345] {
            machine.load(&failing(function, json!({"code": code, "device": 1})));
            let what = format!("{function} fails with {code} for device 1");
            let found = machine.snapshot();
            assert_eq!(found["devices"][0], clean["devices"][0], "{what}");
            assert_eq!(found["driver"], clean["driver"], "{what}");
            assert_eq!(machine.sample()[0], clean_sample[0], "{what}");
        }
    }
}

#[test]
fn an_error_of_every_function_at_once_is_trouble_and_no_more() {
    let machine = Machine::new();
    for code in CODES {
        machine.load(&failing("*", json!(code)));
        let found = machine.snapshot();
        assert_ne!(found["driver"]["trouble"], Value::Null, "{code}");
        assert_eq!(found["devices"], json!([]), "{code}");
        assert!(Sampler::open(&machine.places).trouble().is_some(), "{code}");
    }
}

#[test]
fn a_driver_that_dies_after_any_number_of_calls_is_survived() {
    let machine = Machine::new();
    for code in [1, 9, 15, 17, 999] {
        for after in 0..40 {
            machine.load(&failing("*", json!({"code": code, "after": after})));
            let found: Snapshot = serde_json::from_value(machine.snapshot()).expect("a snapshot");
            assert!(found.devices.len() == 2 || found.driver.trouble.is_some());
            machine.sample();
        }
    }
}

#[test]
fn every_function_may_be_missing() {
    let clean = {
        let machine = Machine::new();
        machine.load(&Machine::description());
        machine.snapshot()
    };
    for function in FUNCTIONS {
        let library = Library::without(&[function]);
        library.load(&Machine::description().to_string());
        let places = Places {
            library: Some(library.path().into()),
            root: "/nowhere".into(),
        };
        let machine = Machine { library, places };
        let what = format!("without {function}");
        // A library that cannot be ended is no NVML.
        let source = source(if *function == "nvmlShutdown" {
            BEGINNINGS[0]
        } else {
            function
        });
        check(&what, &clean, &machine.snapshot(), &source, false);
        machine.sample();
    }
}

#[test]
fn every_machine_of_the_fixtures_is_looked_at_whole() {
    for (name, _) in names() {
        let fixture = Fixture::open(&name);
        let places = Places {
            library: Some(fixture.library().into()),
            root: fixture.root().into(),
        };
        let snapshot = take(&places);
        let json = serde_json::to_vec(&snapshot).expect("encodes");
        assert_eq!(
            Snapshot::from_json(&json).expect("decodes"),
            snapshot,
            "{name}"
        );
        let mut sampler = Sampler::open(&places);
        for turn in 0..30 {
            let sample = sampler.sample(Duration::from_millis(100 * turn));
            assert_eq!(sample.len(), snapshot.devices.len(), "{name}");
        }
        assert!(Path::new(&places.root).is_dir());
    }
}
