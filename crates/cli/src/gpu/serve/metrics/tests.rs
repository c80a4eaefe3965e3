//! The page, read back by a reader that believes nothing.

use std::collections::{BTreeMap, HashMap, HashSet};

use paceline_gpu::snapshot::Gap;

use super::super::super::live::RankUse;
use super::super::super::live::tests::{counting, device, devices, idle, job, jobs, without};
use super::*;

type Labels = BTreeMap<String, String>;

/// What a page says, checked against every rule of the format that a scraper may rely on.
fn read(text: &str) -> HashMap<(String, Labels), f64> {
    let mut types: HashMap<&str, &str> = HashMap::new();
    let mut helps: HashSet<&str> = HashSet::new();
    let mut finished: HashSet<String> = HashSet::new();
    let mut family = "";
    let mut values = HashMap::new();
    assert!(text.ends_with('\n'));
    for line in text.strip_suffix('\n').expect("a last line").split('\n') {
        if let Some(rest) = line.strip_prefix("# ") {
            let (what, rest) = rest.split_once(' ').expect("HELP or TYPE");
            let (name, said) = rest.split_once(' ').expect("a name and words");
            assert!(is_name(name), "{line}");
            if name != family {
                assert!(finished.insert(name.to_owned()), "{name} comes twice");
                family = name;
            }
            match what {
                "HELP" => assert!(helps.insert(name) && said.ends_with('.'), "{line}"),
                "TYPE" => {
                    assert!(["gauge", "counter"].contains(&said), "{line}");
                    assert_eq!(said == "counter", name.ends_with("_total"), "{line}");
                    assert!(types.insert(name, said).is_none(), "{line}");
                }
                other => panic!("{other}"),
            }
            continue;
        }
        let end = line.find(['{', ' ']).expect("a name and a value");
        let (name, rest) = line.split_at(end);
        assert!(
            name == family && types.contains_key(name) && helps.contains(name),
            "{line}"
        );
        let (labels, value) = match rest.strip_prefix('{') {
            Some(rest) => labels(rest),
            None => (Labels::new(), rest),
        };
        let value = value
            .strip_prefix(' ')
            .expect("one blank")
            .parse::<f64>()
            .expect("a number");
        assert!(value.is_finite() && value >= 0.0, "{line}");
        assert!(
            values.insert((name.to_owned(), labels), value).is_none(),
            "twice: {line}"
        );
    }
    values
}

fn is_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    name.starts_with("paceline_") && name.chars().all(is_plain)
}

/// The labels up to the closing brace, and what follows it.
fn labels(mut rest: &str) -> (Labels, &str) {
    let mut labels = Labels::new();
    loop {
        let (name, after) = rest.split_once("=\"").expect("a label");
        assert!(
            name.chars().all(|c| c.is_ascii_lowercase() || c == '_'),
            "{name}"
        );
        let mut value = String::new();
        let mut chars = after.char_indices();
        let end = loop {
            match chars.next().expect("a closing quotation mark") {
                (_, '\\') => value.push(match chars.next().expect("an escaped character").1 {
                    'n' => '\n',
                    c @ ('"' | '\\') => c,
                    other => panic!("\\{other}"),
                }),
                (at, '"') => break at + 1,
                (_, c) => value.push(c),
            }
        };
        assert!(
            labels.insert(name.to_owned(), value).is_none(),
            "{name} twice"
        );
        let next = &after[end..];
        if let Some(after) = next.strip_prefix('}') {
            return (labels, after);
        }
        rest = next.strip_prefix(',').expect("a comma");
    }
}

fn of(values: &HashMap<(String, Labels), f64>, name: &str, label: (&str, &str)) -> Option<f64> {
    let has = |labels: &Labels| labels.get(label.0).is_some_and(|value| value == label.1);
    let found = values
        .iter()
        .find(|((own, labels), _)| own == name && has(labels));
    found.map(|(_, value)| *value)
}

#[test]
fn devices_are_told_in_base_units() {
    let mut hot = device(0, 62);
    hot.now.throttles = vec![Throttle::PowerCap].into();
    let values = read(&text(
        Some(&devices(1.0, vec![hot, without(1, &Gap::Lost)])),
        None,
    ));
    let check = |name: &str, expect| {
        let value = of(&values, &format!("paceline_gpu_{name}"), ("gpu", "0"));
        assert_eq!(value, Some(expect), "{name}");
    };
    check("utilization_ratio", 0.62);
    check("memory_used_bytes", (2340_u64 << 20) as f64);
    check("power_watts", 312.4);
    check("energy_joules_total", 12_345.678);
    check("temperature_celsius", 54.0);
    check("clock_hertz", 1.98e9);
    check("pcie_transmit_bytes_per_second", 1.2e9);
    check("nvlink_receive_bytes_per_second", 2.4e10);
    check("lost", 0.0);
    let throttled = |reason| of(&values, "paceline_gpu_throttled", ("reason", reason));
    assert_eq!(
        [throttled("power_cap"), throttled("thermal")],
        [Some(1.0), Some(0.0)]
    );
    assert_eq!(of(&values, "paceline_gpu_lost", ("gpu", "1")), Some(1.0));
    assert_eq!(of(&values, "paceline_gpu_power_watts", ("gpu", "1")), None);
    assert_eq!(
        of(
            &values,
            "paceline_gpu_power_watts",
            ("name", "NVIDIA H100 80GB HBM3")
        ),
        Some(312.4)
    );
}

#[test]
fn counters_are_ratios_where_a_device_has_them() {
    let values = read(&text(
        Some(&devices(1.0, vec![counting(0, 99), device(1, 99)])),
        None,
    ));
    let check = |name: &str, expect: f64| {
        let of_gpu = |gpu| of(&values, &format!("paceline_gpu_{name}"), ("gpu", gpu));
        let ratio = of_gpu("0").expect("known");
        assert!((ratio - expect).abs() < 1e-9, "{name}: {ratio}");
        assert_eq!(of_gpu("1"), None, "{name}");
    };
    check("sm_active_ratio", 0.6153);
    check("sm_occupancy_ratio", 0.385);
    check("tensor_active_ratio", 0.272);
    check("dram_active_ratio", 0.44);
}

#[test]
fn devices_that_do_nothing_are_marked() {
    let all = vec![
        device(0, 99),
        idle(1, &[4711]),
        idle(2, &[]),
        without(3, &Gap::NotSupported),
    ];
    let values = read(&text(Some(&devices(1.0, all)), None));
    let check = |gpu: &str, expect: [Option<f64>; 2]| {
        let found = ["paceline_gpu_held_idle", "paceline_gpu_unused"]
            .map(|name| of(&values, name, ("gpu", gpu)));
        assert_eq!(found, expect, "GPU {gpu}");
    };
    check("0", [Some(0.0), Some(0.0)]);
    check("1", [Some(1.0), Some(0.0)]);
    check("2", [Some(0.0), Some(1.0)]);
    check("3", [None, None]);
}

#[test]
fn ranks_are_told_apart_whatever_they_call_themselves() {
    let mut odd = job(1, 3, 812, 97.5);
    odd.label = "a \"b\"\\\n한국어".to_owned();
    for rank in &mut odd.running.ranks {
        rank.rank = Some(0);
    }
    odd.running.ranks[1].activity = None;
    odd.running.ranks[2].pid = None;
    odd.uses[2] = RankUse::default();
    let values = read(&text(None, Some(&jobs(1.0, vec![odd, job(2, 2, 7, 1.0)]))));
    let job = ("job", "a \"b\"\\\n한국어");
    let count = |name: &str| {
        let is_it = |(own, labels): &&(String, Labels)| own == name && labels["job"] == job.1;
        values.keys().filter(is_it).count()
    };
    assert_eq!(count("paceline_rank_up"), 3);
    assert_eq!(count("paceline_rank_step"), 2);
    assert_eq!(count("paceline_rank_cpu_seconds_total"), 2);
    assert_eq!(of(&values, "paceline_rank_step", job), Some(812.0));
    assert_eq!(
        of(&values, "paceline_rank_phase", ("phase", "backward")),
        Some(1.0)
    );
    assert_eq!(
        of(&values, "paceline_rank_up", ("local_rank", "2")),
        Some(0.0)
    );
    assert_eq!(of(&values, "paceline_driver_up", ("x", "y")), None);
}

#[test]
fn a_page_of_nothing_says_that_the_driver_does_not_answer() {
    let values = read(&text(None, None));
    assert_eq!(values.len(), 1);
    assert_eq!(
        values[&("paceline_driver_up".to_owned(), Labels::new())],
        0.0
    );
    let values = read(&text(
        Some(&devices(1.0, Vec::new())),
        Some(&jobs(1.0, Vec::new())),
    ));
    assert_eq!(
        values[&("paceline_driver_up".to_owned(), Labels::new())],
        1.0
    );
}

#[test]
fn numbers_of_a_driver_that_hangs_are_old_after_a_while() {
    let check = |latest: bool, elapsed: u64, looking_for: Option<u64>, expect| {
        let newest = Newest {
            latest: latest.then(|| devices(1.0, Vec::new())),
            looking_for: looking_for.map(Duration::from_secs),
        };
        assert_eq!(is_silent(Duration::from_secs(elapsed), &newest), expect);
    };
    check(true, 100, None, false);
    check(true, 100, Some(3), false);
    check(true, 100, Some(11), true);
    check(false, 3, Some(3), false);
    check(false, 11, Some(11), true);
}
