//! What the report prints.

use std::collections::BTreeMap;

use super::*;
use crate::nodes::card::tests::card;
use crate::nodes::{Measured, Miss, Reach, Row};

fn finding(severity: Severity, what: &str) -> Finding {
    Finding {
        severity,
        check: "check".into(),
        what: what.into(),
        why: "because".into(),
        fix: "mend it".into(),
        nodes: Vec::new(),
    }
}

fn fact() -> Fact {
    Fact {
        check: "cores",
        value: "8 cores".into(),
    }
}

fn printed(report: &Report, json: bool) -> String {
    let mut out = Vec::new();
    report.write(json, &mut out).expect("memory");
    String::from_utf8(out).expect("text")
}

fn pair() -> Nodes {
    let reach = |to, outcome| Reach {
        to,
        addr: "10.0.0.1".into(),
        at: None,
        outcome,
    };
    let there = Outcome::Reached(Measured {
        round_trip_us: 120,
        clock_offset_us: 0,
        clock_error_us: 50,
        bytes_per_second: Some(940 << 20),
    });
    let gone = Outcome::Failed(Miss {
        kind: MissKind::Silent,
        text: "no answer within 3 s".into(),
    });
    let mut cards = BTreeMap::from([(0, card("a", "10.0.0.1")), (1, card("b", "10.0.0.2"))]);
    cards.get_mut(&1).expect("there").findings = vec![finding(Severity::Warning, "low")];
    let row = |reach| Row {
        reaches: vec![reach],
    };
    Nodes {
        min: 2,
        expected: 2,
        me: 0,
        cards,
        rows: BTreeMap::from([(0, row(reach(1, there))), (1, row(reach(0, gone)))]),
        turned_away: 0,
    }
}

fn notes(findings: Vec<Finding>, facts: Vec<Fact>) -> Notes {
    Notes {
        findings,
        facts,
        ..Notes::default()
    }
}

#[test]
fn the_worst_comes_first_and_each_finding_says_why_and_what_to_do() {
    let found = vec![
        finding(Severity::Note, "small"),
        finding(Severity::Error, "large"),
    ];
    let report = Report::new("a".into(), 8, notes(found, vec![fact()]), None);
    let expect = "\
error: large
  why: because
  fix: mend it

note: small
  why: because
  fix: mend it

1 error, 0 warnings, 1 note on a for 8 ranks

  cores  8 cores
";
    assert_eq!(printed(&report, false), expect);
    assert_eq!(report.verdict(), Verdict::Fault);
}

#[test]
fn nothing_wrong_is_said_in_one_line() {
    let report = Report::new("a".into(), 1, notes(Vec::new(), vec![fact()]), None);
    assert_eq!(
        printed(&report, false),
        "nothing wrong found on a for 1 rank\n\n  cores  8 cores\n"
    );
    assert_eq!(report.verdict(), Verdict::Sound);
}

#[test]
fn equal_findings_of_several_nodes_are_said_once() {
    let own = vec![finding(Severity::Warning, "low")];
    let report = Report::new("a".into(), 8, notes(own, Vec::new()), Some(pair()));
    let [found] = &report.findings[..] else {
        panic!("{:?}", report.findings);
    };
    assert_eq!(found.nodes, ["node 0 (a)", "node 1 (b)"]);
    assert_eq!(report.verdict(), Verdict::Sound);
}

#[test]
fn a_korean_reader_gets_what_other_nodes_have_found_in_korean_too() {
    let reports = |nodes: &Nodes, lang| {
        let report = Report::new("a".into(), 8, Notes::new(lang), Some(nodes.clone()));
        [printed(&report, false), printed(&report, true)]
    };
    let mut nodes = pair();
    let [text, _] = reports(&nodes, Lang::Ko);
    assert!(text.starts_with("경고: low\n"), "an older version: {text}");
    for card in nodes.cards.values_mut() {
        card.korean = vec![finding(Severity::Warning, "낮음")];
    }
    let [text, _] = reports(&nodes, Lang::Ko);
    let expect = "경고: 낮음\n  노드: 노드 1(b)\n  이유: because\n  조치: mend it\n\n\
                  a, 랭크 8개: 오류 0개, 경고 1개, 참고 0개\n";
    assert!(text.starts_with(expect), "{text}");
    assert!(text.contains("실패: 응답 없음"), "{text}");
    let [_, json] = reports(&nodes, Lang::En);
    assert!(!json.contains("낮음") && !json.contains("korean"), "{json}");
}

#[test]
fn node_0_shows_who_reaches_whom() {
    let report = Report::new("a".into(), 8, notes(Vec::new(), Vec::new()), Some(pair()));
    let text = printed(&report, false);
    let expect = "
node  host  address   ranks  cores  memory  kernel
0*    a     10.0.0.1  8      8      16 GiB  6.8.0 x86_64
1     b     10.0.0.2  8      8      16 GiB  6.8.0 x86_64

from \\ to   node 0 (a)        node 1 (b)
node 0 (a)  -                 0.12 ms, 940 MiB/s
node 1 (b)  FAILS: no answer  -
round trip, and speed of a short sample while other nodes measure too
";
    assert!(text.ends_with(expect), "{text}");
}

#[test]
fn another_node_shows_its_own_connections() {
    let mut nodes = pair();
    nodes.me = 1;
    nodes.cards.insert(2, card("c", "10.0.0.3"));
    let report = Report::new("b".into(), 8, notes(Vec::new(), Vec::new()), Some(nodes));
    let text = printed(&report, false);
    let expect = "
from        to          it
node 0 (a)  node 1 (b)  0.12 ms, 940 MiB/s
node 1 (b)  node 0 (a)  FAILS: no answer
node 1 (b)  node 2 (c)  FAILS: not tried
node 2 (c)  node 1 (b)  ?
";
    assert!(text.contains(expect), "{text}");
}

#[test]
fn json_is_one_object_with_everything() {
    let found = vec![finding(Severity::Error, "large")];
    let report = Report::new("a".into(), 8, notes(found, vec![fact()]), Some(pair()));
    let text = printed(&report, true);
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(text.lines().count(), 1);
    assert_eq!(json["paceline_doctor"], 1);
    assert_eq!(json["findings"][0]["severity"], "error");
    assert_eq!(json["facts"][0]["check"], "cores");
    let reach = &json["nodes"]["rows"]["1"]["reaches"][0];
    assert_eq!(reach["failed"]["kind"], "silent");
}
