use paceline_rendezvous::page::{OpActivity, op};
use paceline_report::{Environment, Start, Straggler};
use serde_json::json;

use super::*;

/// A rank that has done nothing but this for so many seconds.
fn rank(number: usize, phase: Phase, waits_in: Option<u64>, seconds: u64) -> Rank {
    let op = waits_in.map(|seq| OpActivity {
        code: op::ALL_REDUCE,
        seq,
        bucket: None,
    });
    let activity = Activity { phase, step: 7, op };
    Rank {
        rank: number,
        pid: Some(4711),
        activity: Some((activity, Duration::from_secs(seconds))),
        has_moved: false,
        stat: None,
        cores: 0.0,
        differences: Differences::default(),
    }
}

fn facts<'a>(seen: Option<&'a Seen>, ranks: Vec<Rank>) -> Facts<'a> {
    Facts {
        folder: Some(Path::new("runs/a")),
        seen,
        failed: None,
        ranks,
        lang: Lang::En,
    }
}

/// The only finding.
fn only(facts: &Facts<'_>) -> Finding {
    let mut findings = judge(facts);
    assert_eq!(findings.len(), 1, "{findings:?}");
    findings.remove(0)
}

#[track_caller]
fn says(finding: &Finding, severity: Severity, check: &str, parts: &[&str]) {
    assert_eq!(
        (finding.severity, &*finding.check),
        (severity, check),
        "{finding}"
    );
    let text = finding.to_string();
    parts
        .iter()
        .for_each(|part| assert!(text.contains(part), "{part}: {text}"));
}

#[test]
fn the_rank_that_has_not_come_is_named_and_what_it_does() {
    let waiting = rank(0, Phase::Communication, Some(12), 42);
    let loading = rank(1, Phase::DataLoader, None, 43);
    let found = only(&facts(None, vec![waiting, loading]));
    let parts = [
        "rank 1 is in the data loader at step 7 for 43 s",
        "rank 0 waits in all-reduce #12 at step 7 for 42 s",
        "why: rank 1 has not come",
        "samples do not come",
    ];
    says(&found, Severity::Error, "waits forever", &parts);
}

#[test]
fn a_korean_reader_gets_the_same_in_korean() {
    let waiting = rank(0, Phase::Communication, Some(12), 42);
    let loading = rank(1, Phase::DataLoader, None, 43);
    let facts = Facts {
        lang: Lang::Ko,
        ..facts(None, vec![waiting, loading])
    };
    assert_eq!(facts.state(), "실행 중: 이 머신의 랭크 2개");
    let expect = "오류: 랭크 1: 스텝 7의 데이터 로더에 43초째 머무름; 랭크 0: 스텝 7의 all-reduce #12에서 42초째 대기 중\n  \
         이유: 랭크 1: 연산에 아직 오지 않음. 프로세스 상태: 없음, CPU 0.0코어 사용. \
         샘플이 오지 않습니다. 저장 장치나 데이터 로더의 워커가 멈췄습니다\n  \
         조치: 무엇을 하는지 확인하세요: `gdb -p 4711 -batch -ex 'thread apply all bt'`, \
         Python이라면 `py-spy dump --pid 4711`\n";
    assert_eq!(only(&facts).text(Lang::Ko), expect);
}

#[test]
fn ranks_in_different_operations_took_different_branches() {
    let [first, second] = [12, 13].map(|seq| rank(0, Phase::Communication, Some(seq), 60));
    let found = only(&facts(None, vec![first, second]));
    says(
        &found,
        Severity::Error,
        "waits forever",
        &["different operations"],
    );
    let found = only(&facts(None, vec![first, first]));
    says(
        &found,
        Severity::Error,
        "waits forever",
        &["a connection, is missing"],
    );
}

#[test]
fn a_job_that_moves_or_has_long_steps_does_not_wait_forever() {
    let waiting = rank(0, Phase::Communication, Some(12), 42);
    let moving = Rank {
        has_moved: true,
        ..rank(1, Phase::Forward, None, 42)
    };
    assert_eq!(judge(&facts(None, vec![waiting, moving])), []);
    let seen = Seen {
        step_seconds: Some(5.0),
        ..Seen::default()
    };
    let computing = rank(1, Phase::Forward, None, 42);
    assert_eq!(judge(&facts(Some(&seen), vec![waiting, computing])), []);
    let evaluating = Rank {
        cores: 1.0,
        ..rank(0, Phase::Evaluation, None, 600)
    };
    assert_eq!(judge(&facts(None, vec![evaluating; 2])), []);
    let found = only(&facts(None, vec![waiting, evaluating]));
    says(
        &found,
        Severity::Warning,
        "waits forever",
        &["It evaluates"],
    );
}

#[test]
fn a_stopped_process_explains_the_waits_of_the_others() {
    let mut stat = Stat::read(std::process::id()).expect("this process");
    stat.state = 'T';
    let held = Rank {
        stat: Some(stat),
        ..rank(1, Phase::Forward, None, 42)
    };
    let found = only(&facts(
        None,
        vec![rank(0, Phase::Communication, Some(1), 42), held],
    ));
    says(
        &found,
        Severity::Error,
        "waits forever",
        &[
            "rank 1 (pid 4711) is stopped by a signal",
            "kill -CONT 4711",
        ],
    );
}

#[test]
fn a_rank_without_a_process_and_one_with_other_weights_are_named() {
    let gone = Rank {
        pid: None,
        ..rank(3, Phase::Forward, None, 1)
    };
    let found = only(&facts(None, vec![rank(0, Phase::Forward, None, 1), gone]));
    says(
        &found,
        Severity::Warning,
        "only some work",
        &["of 2 ranks, these have no process: 3"],
    );
    let differing = Rank {
        differences: Differences {
            times: 2,
            step: 30,
            odd: Some(1),
        },
        ..rank(0, Phase::Forward, None, 1)
    };
    let found = only(&facts(None, vec![differing]));
    says(
        &found,
        Severity::Error,
        "not in step",
        &["at step 30: rank 1 against the others; 2 times"],
    );
}

/// A job that is done, whose two ranks were busy for these shares of 10 s and one of which waited so long for data.
fn done(busy: [u64; 2], at_once: u64, data: u64) -> Seen {
    let second = 1_000_000_000_u64;
    let rank = |waited: u64| json!({"waited_for_ranks_ns": 0, "waited_for_data_ns": waited * second, "peak_bytes": null, "sent_bytes": 0});
    let end = json!({
        "weights_sha256": "", "ranks": [rank(data), rank(0)],
        "usage": {"total_ns": 10 * second, "busy_ns": busy.map(|busy| busy * second), "at_once_ns": [0, (10 - at_once) * second, at_once * second]},
    });
    Seen {
        end: Some(serde_json::from_value(end).expect("an end")),
        ..Seen::default()
    }
}

#[test]
fn time_that_was_lost_has_a_reason() {
    assert_eq!(judge(&facts(Some(&done([9, 9], 8, 0)), vec![])), []);
    let check = |seen: &Seen, part| {
        says(
            &only(&facts(Some(seen), vec![])),
            Severity::Warning,
            "slow",
            &[part],
        )
    };
    check(&done([5, 5], 4, 4), "waited for data in 40 %");
    check(
        &done([5, 9], 4, 0),
        "rank 1 was busy for 90 %, another one for 50 %",
    );
    check(&done([5, 5], 4, 0), "waited for each other equally");
}

#[test]
fn a_job_that_is_over_too_early_says_why_and_how_it_goes_on() {
    let start = Start {
        step: 0,
        world: 2,
        epochs: 1,
        steps: 100,
        ..Start::default()
    };
    let mut seen = Seen {
        steps: 40,
        start: Some(start),
        ..Seen::default()
    };
    let found = only(&facts(Some(&seen), vec![]));
    says(
        &found,
        Severity::Error,
        "ended early",
        &["after step 40 without a word", "--resume runs/a"],
    );
    let failed = JobFailure {
        cause: "rank 1 panicked".into(),
        error: Some("no memory".into()),
        hint: Some("less".into()),
        ..JobFailure::default()
    };
    let of_launcher = Facts {
        failed: Some(&failed),
        ..facts(Some(&seen), vec![])
    };
    says(
        &only(&of_launcher),
        Severity::Error,
        "ended early",
        &["rank 1 panicked: no memory", "fix: less"],
    );
    seen.incidents.push(Incident::Stopped {
        step: 40,
        signal: "SIGTERM".into(),
    });
    let stopped = facts(Some(&seen), vec![]);
    says(
        &only(&stopped),
        Severity::Note,
        "ended early",
        &["SIGTERM asked it to"],
    );
    assert_eq!(stopped.state(), "stopped on request: step 40 of 100");
}

#[test]
fn a_single_rank_and_skipped_steps_are_worth_a_word() {
    let slow = Straggler {
        rank: 0,
        seconds: 1.0,
        others_seconds: 0.5,
    };
    let on = |device: &str, threads| {
        let environment = Environment {
            cores: Some(2),
            ..Environment::default()
        };
        let start = Start {
            world: 1,
            device: Some(device.to_owned()),
            threads: Some(threads),
            environment,
            ..Start::default()
        };
        let seen = Seen {
            start: Some(start),
            ranks: Some(1),
            incidents: vec![Incident::Skipped { step: 3 }, Incident::Slow(slow)],
            ..done([9, 9], 8, 0)
        };
        let found = judge(&facts(Some(&seen), vec![]));
        let checks = found.into_iter().map(|finding| finding.check);
        checks.collect::<Vec<String>>()
    };
    assert_eq!(on("CPU", 1), ["wrong numbers", "only some work"]);
    assert_eq!(on("CPU", 2), ["wrong numbers"]);
    assert_eq!(on("CUDA", 2), ["wrong numbers", "only some work"]);
}

#[test]
fn ranks_that_were_lost_are_told_after_the_end() {
    let lost = |why: Option<&str>, now| {
        let ranks = |before, now, why: Option<&str>| Incident::Ranks {
            step: 15,
            before,
            now,
            why: why.map(str::to_owned),
        };
        let mut incidents = vec![ranks(2, 1, why)];
        if now == 2 {
            incidents.push(ranks(1, 2, None));
        }
        let start = Start {
            world: 2,
            ..Start::default()
        };
        let seen = Seen {
            start: Some(start),
            ranks: Some(now),
            incidents,
            ..done([9, 9], 8, 0)
        };
        judge(&facts(Some(&seen), vec![]))
    };
    let killed = "rank 1 was killed by signal 9 (SIGKILL)";
    let found = &lost(Some(killed), 1)[..];
    let [finding] = found else {
        panic!("{found:?}");
    };
    let parts = ["began with 2 ranks, and has 1 since step 15", killed];
    says(finding, Severity::Warning, "only some work", &parts);
    assert!(lost(None, 1)[0].why.contains("not replaced"));
    assert!(lost(None, 2).is_empty(), "a replacement came");
}
