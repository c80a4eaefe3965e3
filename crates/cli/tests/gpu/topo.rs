//! `paceline gpu topo` on every machine of the fixtures.

use paceline_fake_nvml::{Fixture, names};

use super::support::{expect, expected, gpu, gpu_with};

#[test]
fn every_machine_is_shown_as_expected() {
    let shown = |(name, _): (String, String)| {
        let end = gpu(&Fixture::open(&name), &["topo"]);
        (format!("topo/{name}.txt"), end.transcript())
    };
    expect(names().into_iter().map(shown));
    let machines: Vec<String> = names().into_iter().map(|(name, _)| name).collect();
    assert_eq!(expected("topo"), machines);
}

#[test]
fn json_has_what_the_text_has() {
    let end = gpu(&Fixture::open("two-cards-ns"), &["topo", "--json"]);
    assert_eq!(end.code, Some(0), "{}", end.err);
    assert_eq!(end.out.lines().count(), 1);
    let json: serde_json::Value = serde_json::from_str(&end.out).expect("JSON");
    assert_eq!(json["paceline_topology"], 1);
    assert_eq!(json["ends"][0]["label"], "GPU0");
    assert_eq!(json["p2p"].as_array().map(Vec::len), Some(5));
    assert_eq!(json["connections"][0][0], "X");
}

#[test]
fn visible_devices_hide_none_and_are_told() {
    let machine = Fixture::open("two-cards-ns");
    let end = gpu_with(&machine, &["topo"], &[("CUDA_VISIBLE_DEVICES", "1")]);
    let sentence = "CUDA_VISIBLE_DEVICES=1: a program started with it sees GPU1 (as its 0)\n";
    assert!(end.out.contains(sentence), "{}", end.out);
    assert!(end.out.contains("\n  GPU0  "), "{}", end.out);
}

#[test]
fn a_library_and_a_root_may_be_given_as_options() {
    let machine = Fixture::open("two-cards-ns");
    let library = machine.library().display().to_string();
    let root = machine.root().display().to_string();
    let words = ["topo", "--nvml-library", &library, "--root", &root];
    let nowhere = [
        ("PACELINE_NVML_LIBRARY", "/nowhere"),
        ("PACELINE_SYSTEM_ROOT", "/nowhere"),
    ];
    let end = gpu_with(&machine, &words, &nowhere);
    assert_eq!(end.out, gpu(&machine, &["topo"]).out);
}

#[test]
fn what_is_no_snapshot_is_wrong_usage() {
    let machine = Fixture::open("two-cards-ns");
    let end = gpu(&machine, &["topo", "--snapshot", "/nowhere/a.json"]);
    assert_eq!((end.code, &*end.out), (Some(2), ""));
    assert!(
        end.err.starts_with("error: cannot read /nowhere/a.json: "),
        "{}",
        end.err
    );
}
