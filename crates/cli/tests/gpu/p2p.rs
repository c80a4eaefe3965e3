//! `paceline gpu p2p` on machines that are not there: a fake driver whose links work, do not, or never end.

use std::process::{Command, Stdio};

use paceline_fake_cuda::Library;
use paceline_fake_nvml::Fixture;
use serde_json::Value;

use super::support::LAUNCHER;

/// How the command ended, and what it said.
struct End {
    code: Option<i32>,
    out: String,
    err: String,
}

/// `paceline-launcher gpu p2p WORDS` on a machine, with these variables and no others.
fn p2p_with(library: &Library, machine: &str, words: &[&str], variables: &[(&str, &str)]) -> End {
    let command = &["gpu", "p2p", "--size", "1"];
    launched(library, machine, &[command, words].concat(), &[], variables)
}

/// `paceline-launcher WORDS` with the variables of a machine and these.
fn launched(
    library: &Library,
    machine: &str,
    words: &[&str],
    of_machine: &[(String, String)],
    variables: &[(&str, &str)],
) -> End {
    let output = Command::new(LAUNCHER)
        .args(words)
        .env_clear()
        .env("PACELINE_CUDA_LIBRARY", library.driver())
        .envs([Library::variable(machine)])
        .envs(of_machine.iter().cloned())
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .output()
        .expect("the launcher runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    End {
        code: output.status.code(),
        out: text(output.stdout),
        err: text(output.stderr),
    }
}

fn p2p(machine: &str, words: &[&str]) -> End {
    p2p_with(&Library::whole(), machine, words, &[])
}

/// How each link went, `GPU0 to GPU1` first.
fn peers(end: &End) -> Vec<String> {
    let json: Value = serde_json::from_str(&end.out).expect("JSON");
    assert_eq!(json["paceline_gpu_p2p"], 1);
    let links = json["report"]["links"].as_array().expect("links");
    let is = |link: &Value| link["peer"]["is"].as_str().expect("an outcome").to_owned();
    links.iter().map(is).collect()
}

fn variables(end: &End) -> Value {
    let json: Value = serde_json::from_str(&end.out).expect("JSON");
    json["variables"].clone()
}

#[test]
fn links_that_work_are_measured_and_nothing_has_to_be_set() {
    let machine = r#"{"devices": 3}"#;
    let end = p2p(machine, &[]);
    assert_eq!((end.code, &*end.err), (Some(0), ""), "{}", end.out);
    assert!(
        end.out
            .starts_with("3 devices, driver for CUDA 12.8, copies of 1 MiB\n"),
        "{}",
        end.out
    );
    assert!(
        end.out
            .contains("\npeer-to-peer, GB/s from row to column\n      GPU0"),
        "{}",
        end.out
    );
    let json = p2p(machine, &["--json"]);
    assert_eq!(peers(&json), ["fine"; 6]);
    assert_eq!(variables(&json), Value::Array(Vec::new()));
    let report: Value = serde_json::from_str(&json.out).expect("JSON");
    let speed = report["report"]["links"][0]["peer"]["gb_per_second"].as_f64();
    assert!(speed.is_some_and(|speed| speed > 0.0), "{}", json.out);
}

#[test]
fn links_that_the_driver_does_not_offer_are_told_and_are_no_fault() {
    let machine = r#"{"devices": 2, "peers": "NS"}"#;
    let end = p2p(machine, &[]);
    assert_eq!(end.code, Some(0), "{}", end.out);
    assert!(
        end.out
            .contains("\nnote: no peer-to-peer between any two GPUs"),
        "{}",
        end.out
    );
    assert!(end.out.contains("\nGPU0  -     NS\n"), "{}", end.out);
    assert_eq!(peers(&p2p(machine, &["--json"])), ["not_supported"; 2]);
}

#[test]
fn a_link_that_corrupts_is_an_error_and_nccl_is_told_to_leave_it() {
    let machine = r#"{"devices": 2, "peers": ["X OK", "BAD X"]}"#;
    let end = p2p(machine, &[]);
    assert_eq!(end.code, Some(1), "{}", end.out);
    for words in [
        "\nGPU1  WRONG  -\n",
        "\nerror: peer-to-peer does not work though the driver says so: GPU 1 to 0 (",
        "\nNCCL_P2P_DISABLE=1\n",
    ] {
        assert!(end.out.contains(words), "{}", end.out);
    }
    let json = p2p(machine, &["--json"]);
    assert_eq!(peers(&json), ["fine", "wrong"]);
    assert_eq!(
        variables(&json),
        serde_json::json!([["NCCL_P2P_DISABLE", "1"]])
    );
}

#[test]
fn what_the_user_has_set_is_not_set_again() {
    let machine = r#"{"devices": 2, "peers": "BAD"}"#;
    let set = [("NCCL_P2P_DISABLE", "1")];
    let end = p2p_with(&Library::whole(), machine, &["--json"], &set);
    assert_eq!(end.code, Some(1));
    assert_eq!(variables(&end), Value::Array(Vec::new()));
}

#[test]
fn a_link_that_never_ends_is_stuck_and_the_others_are_tried() {
    let machine = r#"{"devices": 2, "peers": ["X STUCK", "OK X"]}"#;
    let end = p2p(machine, &["--json", "--timeout", "5"]);
    assert_eq!(end.code, Some(1), "{}", end.err);
    assert_eq!(peers(&end), ["stuck", "fine"]);
    assert_eq!(
        variables(&end),
        serde_json::json!([["NCCL_P2P_DISABLE", "1"]])
    );
}

#[test]
fn one_device_has_no_links() {
    let end = p2p("{}", &[]);
    assert_eq!((end.code, &*end.err), (Some(0), ""));
    assert!(
        end.out
            .ends_with("nothing to test between fewer than two devices\n"),
        "{}",
        end.out
    );
}

#[test]
fn devices_are_those_that_programs_see() {
    let machine = r#"{"devices": 3, "peers": ["X NS OK", "NS X OK", "OK OK X"]}"#;
    let visible = [("CUDA_VISIBLE_DEVICES", "2,0")];
    let end = p2p_with(&Library::whole(), machine, &["--json"], &visible);
    assert_eq!(peers(&end), ["fine"; 2]);
}

#[test]
fn a_driver_that_is_missing_or_lacks_something_is_told() {
    let check = |library: &Library, machine: &str, variables: &[(&str, &str)], expect: &str| {
        let end = p2p_with(library, machine, &[], variables);
        assert_eq!((end.code, &*end.out), (Some(3), ""), "{}", end.err);
        let begin = "error: links between devices cannot be tested: ";
        assert!(
            end.err.starts_with(begin) && end.err.contains(expect),
            "{}",
            end.err
        );
    };
    let whole = Library::whole();
    let nowhere = [("PACELINE_CUDA_LIBRARY", "/nowhere/libcuda.so.1")];
    check(
        &whole,
        "{}",
        &nowhere,
        "libcuda.so.1 cannot be loaded; looked for /nowhere/libcuda.so.1",
    );
    check(&whole, "{}", &nowhere, "\nhint: install NVIDIA's driver");
    check(&whole, r#"{"devices": 0}"#, &[], "CUDA_ERROR_NO_DEVICE");
    check(
        &Library::without(&["cuStreamCreateWithPriority"]),
        "{}",
        &[],
        "has no function cuStreamCreateWithPriority",
    );
    let crashing = r#"{"faults": [{"call": "cuInit", "does": {"exit": 7}}]}"#;
    check(&whole, crashing, &[], "ended early (exit status: 7)");
}

#[test]
fn a_driver_that_takes_its_process_along_is_found_out() {
    let machine =
        r#"{"devices": 2, "faults": [{"call": "cuCtxEnablePeerAccess", "does": {"exit": 139}}]}"#;
    let end = p2p(machine, &["--json"]);
    assert_eq!(peers(&end), ["failed"; 2], "{}", end.err);
    assert_eq!(end.code, Some(1));
}

#[test]
fn a_driver_that_does_not_answer_holds_nobody() {
    let silent = r#"{"faults": [{"call": "cuInit", "does": "block"}]}"#;
    let end = p2p(silent, &["--timeout", "1"]);
    assert_eq!((end.code, &*end.out), (Some(3), ""), "{}", end.err);
    let expect =
        "error: links between devices cannot be tested: the driver has not answered for 3 s\n";
    assert!(end.err.starts_with(expect), "{}", end.err);
}

/// `paceline-launcher run` of a program that says what NCCL is told, on a machine of two cards.
fn run_on(machine: &str, ranks: &str, variables: &[(&str, &str)]) -> End {
    let fixture = Fixture::open("two-cards-ns");
    let program = ["sh", "-c", "echo peers:$NCCL_P2P_DISABLE"];
    let words = [&["run", "--nproc-per-node", ranks][..], &program].concat();
    let path = [("PATH".to_owned(), "/usr/bin:/bin".to_owned())];
    let of_machine = [fixture.variables(), path.into()].concat();
    launched(&Library::whole(), machine, &words, &of_machine, variables)
}

#[test]
fn links_are_tested_before_a_program_is_started_on_several_devices() {
    let bad = r#"{"devices": 2, "peers": ["X OK", "BAD X"]}"#;
    let tested = run_on(bad, "2", &[]);
    assert_eq!(tested.code, Some(0), "{}", tested.err);
    assert_eq!(tested.out, "[ranks 0-1] peers:1\n");
    for words in [
        "warning: peer-to-peer does not work though the driver says so: GPU 1 to 0 (",
        "warning: NCCL_P2P_DISABLE=1 is set for the ranks\n",
    ] {
        assert!(tested.err.contains(words), "{}", tested.err);
    }
    let left_alone = [
        run_on(r#"{"devices": 2}"#, "2", &[]),
        run_on(bad, "1", &[]),
        run_on(bad, "2", &[("CUDA_VISIBLE_DEVICES", "")]),
        run_on(bad, "2", &[("NCCL_P2P_DISABLE", "")]),
    ];
    for end in left_alone {
        assert!(!end.out.contains("peers:1"), "{}", end.out);
        // How fast links of memory are is chance.
        assert!(!end.err.contains("does not work"), "{}", end.err);
    }
}

#[test]
fn a_program_is_started_where_links_cannot_be_tested() {
    let nowhere = [("PACELINE_CUDA_LIBRARY", "/nowhere/libcuda.so.1")];
    let end = run_on("{}", "2", &nowhere);
    assert_eq!(end.code, Some(0), "{}", end.err);
    assert_eq!(end.out, "[ranks 0-1] peers:\n");
    let told = "links between devices cannot be tested: ";
    assert!(end.err.contains(told), "{}", end.err);
}
