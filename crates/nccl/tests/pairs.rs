//! The child's side of the self-test of links, on machines that are not there.

use paceline_fake_cuda::Library;
use paceline_nccl::Places;
use paceline_nccl::pairs::{PairTest, serve};

/// What the child tells on a machine, with its steps from one on.
fn told(library: &Library, first: usize) -> Vec<serde_json::Value> {
    let mut places = Places::from_lookup(&|_| None);
    places.cuda = Some(library.driver());
    let test = PairTest {
        message_bytes: 64 << 10,
        places,
        ..PairTest::default()
    };
    let mut out = Vec::new();
    serve(&test, first, &mut out).expect("memory takes what is written");
    let lines = out
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty());
    lines
        .map(|line| serde_json::from_slice(line).expect("JSON"))
        .collect()
}

/// How each step ended.
fn outcomes(lines: &[serde_json::Value]) -> Vec<(u64, String)> {
    let ends = lines.iter().filter_map(|line| line.get("end"));
    let outcome = |end: &serde_json::Value| {
        let is = end[1]["is"].as_str().expect("an outcome");
        (end[0].as_u64().expect("a number"), is.to_owned())
    };
    ends.map(outcome).collect()
}

fn on(machine: &str, expect: [&str; 4]) {
    let library = Library::whole();
    library.load(machine);
    let lines = told(&library, 0);
    let expect: Vec<_> = (0..).zip(expect.map(str::to_owned)).collect();
    assert_eq!(outcomes(&lines), expect, "{machine}");
    assert_eq!(lines.last(), Some(&serde_json::json!("done")));
}

#[test]
fn ways_end_as_the_links_are() {
    on(r#"{"devices": 2}"#, ["fine"; 4]);
    on(
        r#"{"devices": 2, "peers": "NS"}"#,
        ["fine", "fine", "not_supported", "not_supported"],
    );
    on(
        r#"{"devices": 2, "peers": ["X OK", "BAD X"]}"#,
        ["fine", "fine", "fine", "wrong"],
    );
    on(
        r#"{"devices": 2, "peers": ["X BAD_KERNEL", "OK X"]}"#,
        ["fine", "fine", "wrong", "fine"],
    );
}

#[test]
fn an_error_that_may_have_spoiled_the_process_ends_it() {
    for code in [700, 719, 999] {
        let library = Library::whole();
        library.load(&format!(
            r#"{{"devices": 2, "faults": [{{"call": "cuMemcpyPeerAsync", "after": 2, "times": 1, "does": {{"code": {code}}}}}]}}"#
        ));
        let lines = told(&library, 0);
        let expect = [(0, "fine"), (1, "failed")].map(|(step, is)| (step, is.to_owned()));
        assert_eq!(outcomes(&lines), expect);
        assert_eq!(lines.last(), Some(&serde_json::json!("spent")));
    }
}

#[test]
fn a_refusal_of_the_driver_is_an_outcome_and_others_are_tried() {
    on(
        r#"{"devices": 2, "faults": [{"call": "cuMemcpyPeerAsync", "times": 1, "does": {"code": 801}}]}"#,
        ["failed", "fine", "fine", "fine"],
    );
    on(
        r#"{"devices": 2, "faults": [{"call": "cuCtxEnablePeerAccess", "does": {"code": 217}}]}"#,
        ["fine", "fine", "failed", "failed"],
    );
}

#[test]
fn the_first_error_of_a_way_is_the_one_that_is_told() {
    let library = Library::whole();
    let faults = r#"[{"call": "cuMemcpyPeerAsync", "after": 4, "does": {"code": 801}},
        {"call": "cuCtxDisablePeerAccess", "does": {"code": 705}}]"#;
    library.load(&format!(r#"{{"devices": 2, "faults": {faults}}}"#));
    let lines = told(&library, 0);
    let end = lines.iter().find(|line| line["end"][0] == 2);
    let reason = end.expect("a step")["end"][1]["reason"].as_str();
    assert!(
        reason.is_some_and(|reason| reason.starts_with("cuMemcpyPeerAsync failed")),
        "{lines:?}"
    );
}

#[test]
fn a_child_begins_where_it_is_told_to() {
    let library = Library::whole();
    library.load(r#"{"devices": 2}"#);
    let numbers: Vec<_> = outcomes(&told(&library, 3))
        .into_iter()
        .map(|(number, _)| number)
        .collect();
    assert_eq!(numbers, [3]);
}

#[test]
fn one_device_has_no_ways_and_none_is_said_by_the_driver() {
    let library = Library::whole();
    let lines = told(&library, 0);
    assert_eq!((lines.len(), outcomes(&lines)), (2, Vec::new()));
    let library = Library::whole();
    library.load(r#"{"devices": 0}"#);
    let lines = told(&library, 0);
    let failed = lines[0]["failed"].as_array().expect("a failure");
    assert!(
        failed[0]
            .as_str()
            .is_some_and(|reason| reason.contains("CUDA_ERROR_NO_DEVICE")),
        "{lines:?}"
    );
}

#[test]
fn a_driver_without_peer_to_peer_offers_none() {
    let library = Library::without(&["cuDeviceCanAccessPeer", "cuDeviceGetP2PAttribute"]);
    library.load(r#"{"devices": 2}"#);
    let ends: Vec<_> = outcomes(&told(&library, 0))
        .into_iter()
        .map(|(_, is)| is)
        .collect();
    assert_eq!(ends, ["fine", "fine", "not_supported", "not_supported"]);
}
