use super::*;

fn row(at: f64, fault: Fault, fate: Option<Fate>, recovery: Option<f64>) -> Dealt {
    let held = fault.lasts().then_some(Duration::from_millis(500));
    Dealt {
        index: 0,
        at: Duration::from_secs_f64(at),
        fault,
        rank: (fault != Fault::Agent).then_some(2),
        pid: 7,
        during: None,
        held,
        fate,
        found: None,
        recovery: recovery.map(Duration::from_secs_f64),
        ranks: 3,
    }
}

fn evidence(value: Option<&str>) -> Vec<Evidence> {
    vec![Evidence {
        name: "line".to_owned(),
        value: value.map(str::to_owned),
    }]
}

fn report() -> Report {
    let trial = Trial {
        took: Duration::from_secs_f64(12.3456),
        dealt: vec![
            row(0.25, Fault::Kill, Some(Fate::WentOn), Some(0.012)),
            row(1.5, Fault::Stop, Some(Fate::Continued), Some(0.51)),
            row(2.0, Fault::Kill, Some(Fate::WentOn), Some(0.03)),
            row(3.0, Fault::Agent, None, None),
        ],
        ended: "exited with code 0".to_owned(),
        is_success: true,
        saw_ranks: true,
        ..Trial::default()
    };
    Report {
        version: VERSION,
        program: "x".to_owned(),
        seed: 7,
        faults: 4,
        reference_took: None,
        trial,
        compared: None,
        survived: true,
        folder: "/logs".to_owned(),
    }
}

#[test]
fn a_report_has_a_row_for_each_fault_and_sentences_below() {
    let expect = "
     at  fault  rank      for     the job          recovery  ranks
 250 ms  kill   2         -       went on without it  12 ms     3
";
    let text = report().text();
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let lines: Vec<String> = text.lines().map(words).collect();
    let expect: Vec<String> = expect.trim().lines().map(words).collect();
    assert_eq!(lines[..2], expect);
    assert_eq!(lines[4], "3.00 s agent launcher - - - 3");
    for says in [
        "faults        4 of 4 dealt, by the plan of seed 7\n",
        "went on without it 2 times (median 12 ms, most 30 ms); continued 1 time (median 510 ms, most 510 ms)\n",
        "job           exited with code 0 after 12.35 s\n",
        "left behind   no process, no shared memory\n",
        "same bits     not compared: there was no --reference\n",
        "survived      yes\n",
    ] {
        assert!(text.contains(says), "{text}");
    }
}

#[test]
fn what_was_not_as_it_should_be_is_said() {
    let mut report = report();
    report.trial.missed = [
        "too few ranks were left",
        "the job ended before",
        "too few ranks were left",
    ]
    .map(|why| Missed {
        fault: Fault::Kill,
        why: why.to_owned(),
    })
    .into();
    report.trial.has_hung = true;
    report.trial.resumed = 2;
    report.trial.left_behind = vec!["process 7 (sleep)".to_owned()];
    report.survived = false;
    for (reference, result, says) in [
        (Some("a"), Some("a"), "yes (a)"),
        (Some("a"), Some("b"), "no: expected a, got b"),
        (Some("a"), None, "no: expected a, got nothing"),
        (
            None,
            Some("b"),
            "unknown: the undisturbed run left no line; see --compare and --same",
        ),
    ] {
        let (reference, result) = (evidence(reference), evidence(result));
        report.compared = Some(Compared {
            same_bits: super::super::evidence::is_same(&reference, &result),
            reference,
            result,
        });
        let text = report.text();
        assert!(text.contains(&format!("same bits     {says}\n")), "{text}");
    }
    let text = report.text();
    for says in [
        "; 1 not, because the job ended before; 2 not, because too few ranks were left\n",
        "job           hung, and was ended: it exited with code 0 after 12.35 s, started again 2 times\n",
        "left behind   process 7 (sleep)\n",
        "survived      no\n",
    ] {
        assert!(text.contains(says), "{text}");
    }
}

#[test]
fn a_flipped_bit_is_told_by_who_was_named_and_when() {
    let mut row = row(1.0, Fault::Corrupt, Some(Fate::Repaired), Some(0.2));
    let mut told = |fate, found: Option<(u64, Option<usize>)>| {
        row.fate = fate;
        row.found = found.map(|(after_steps, named)| Found { after_steps, named });
        row.outcome()
    };
    let check = |told: Option<String>, expect| assert_eq!(told.as_deref(), expect);
    check(told(None, None), None);
    check(told(Some(Fate::Unnoticed), None), Some("unnoticed"));
    check(
        told(Some(Fate::Repaired), Some((12, Some(2)))),
        Some("repaired: rank 2 named after 12 steps"),
    );
    check(
        told(Some(Fate::Failed), Some((1, None))),
        Some("failed: found after 1 step"),
    );
    let json = serde_json::to_value(&row).expect("plain data");
    assert_eq!(json["found"]["after_steps"], 1);
}

#[test]
fn json_has_every_fault() {
    let json: serde_json::Value = serde_json::from_str(&report().json()).expect("JSON");
    assert_eq!(json["paceline_chaos"], VERSION);
    assert_eq!(json["dealt"][0]["fate"], "went_on");
    assert_eq!(json["dealt"][0]["fault"], "kill");
    assert_eq!(json["dealt"][0]["recovery_s"], 0.012);
    assert_eq!(json["dealt"][1]["held_s"], 0.5);
    assert_eq!(json["took_s"], 12.3456);
    assert_eq!(json["dealt"][3]["rank"], serde_json::Value::Null);
    assert_eq!(json["survived"], true);
}
