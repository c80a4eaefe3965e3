//! What people are told of failures.

use super::*;

impl Failure {
    /// Rank 1's, a moment after the start.
    pub(crate) fn example(kind: FailureKind) -> Self {
        Self {
            rank: 1,
            local_rank: 1,
            pid: 4711,
            kind,
            is_misconfigured: false,
            reported_by: None,
            after: Duration::from_millis(3_214),
            error: None,
            last_lines: Vec::new(),
            are_on_console: false,
            activity: None,
            log: None,
            victims: Vec::new(),
            is_common: false,
            node: None,
            blames: None,
            also: Vec::new(),
        }
    }
}

fn check(failure: &Failure, expect: &str) {
    assert_eq!(failure.to_string(), expect);
}

#[test]
fn a_report_says_who_what_when_where_and_who_suffered() {
    let full = Failure {
        last_lines: vec!["step 41".to_owned(), "out of memory".to_owned()],
        activity: Some(Text::new(|lang| {
            say!(lang, "in the backward pass at step 42", "스텝 42의 역전파")
        })),
        log: Some("runs/x/logs/rank1.log".into()),
        victims: vec![0, 2, 3],
        ..Failure::example(FailureKind::signal(9, false))
    };
    check(
        &full,
        "rank 1 (pid 4711) was killed by signal 9 (SIGKILL) after 3.214 s\n  \
         it was in the backward pass at step 42\n  \
         last lines of its log (runs/x/logs/rank1.log):\n    \
         step 41\n    \
         out of memory\n  \
         ranks 0, 2 and 3 were stopped because of it",
    );
    let korean = "랭크 1(pid 4711): 시작 3.214초 후 시그널 9(SIGKILL)에 의해 종료됨\n  \
         하던 일: 스텝 42의 역전파\n  \
         로그의 마지막 줄(runs/x/logs/rank1.log):\n    \
         step 41\n    \
         out of memory\n  \
         이 때문에 중단된 랭크: 0, 2, 3";
    assert_eq!(full.text(Lang::Ko), korean);
    assert!(
        full.hint(Lang::En)
            .is_some_and(|hint| hint.contains("memory"))
    );
}

#[test]
fn an_error_that_the_last_lines_do_not_show_is_said_before_them() {
    let error = RankError {
        message: "ValueError: no data".to_owned(),
        traceback: vec![
            "Traceback (most recent call last):".to_owned(),
            "  File \"a.py\"".to_owned(),
        ],
    };
    let mut full = Failure {
        error: Some(error),
        last_lines: vec!["a warning".to_owned()],
        ..Failure::example(FailureKind::ExitCode(1))
    };
    check(
        &full,
        "rank 1 (pid 4711) exited with code 1 after 3.214 s\n  \
         its error: ValueError: no data\n    \
         Traceback (most recent call last):\n      \
         File \"a.py\"\n  \
         its last lines:\n    \
         a warning",
    );
    full.last_lines
        .push("[rank1]: ValueError: no data".to_owned());
    assert!(!full.to_string().contains("its error"), "{full}");
}

#[test]
fn no_rank_is_blamed_for_wrong_input_or_an_error_of_all_ranks() {
    let error = RankError {
        message: "no valid checkpoint in a\n  a/step-1: state.json is missing\nhint: remove a"
            .to_owned(),
        traceback: Vec::new(),
    };
    let input = Failure {
        error: Some(error),
        log: Some("logs/1/stderr.log".into()),
        ..Failure::example(FailureKind::ExitCode(2))
    };
    check(
        &input,
        "no valid checkpoint in a\n  a/step-1: state.json is missing\n  \
         so rank 1 (pid 4711) exited with code 2 after 3.214 s",
    );
    assert_eq!(input.hint(Lang::En).as_deref(), Some("remove a"));
    let common = Failure {
        last_lines: vec!["Error: no valid checkpoint in a".to_owned()],
        is_common: true,
        ..Failure::example(FailureKind::ExitCode(1))
    };
    check(
        &common,
        "all ranks exited with code 1 with the same error, first rank 1 (pid 4711) after 3.214 s\n  \
         its last lines:\n    Error: no valid checkpoint in a",
    );
}

#[test]
fn lines_that_are_right_above_the_report_are_not_repeated_and_a_log_is_on_its_host() {
    let mut failure = Failure {
        last_lines: vec!["no data".to_owned()],
        are_on_console: true,
        node: Some(Node {
            rank: 1,
            host: "b".to_owned(),
        }),
        ..Failure::example(FailureKind::ExitCode(1))
    };
    let head = "rank 1 (node 1, host b, pid 4711) exited with code 1 after 3.214 s\n  ";
    let check_tail = |failure: &Failure, tail: &str| check(failure, &format!("{head}{tail}"));
    check_tail(&failure, "its last lines are above");
    failure.log = Some("logs/1.log".into());
    let expect = "its last lines are above, and in its log (logs/1.log on host b)";
    check_tail(&failure, expect);
    failure.are_on_console = false;
    let expect = "last lines of its log (logs/1.log on host b):\n    no data";
    check_tail(&failure, expect);
}

#[test]
fn each_kind_has_its_words_and_its_exit_code() {
    let check = |failure: Failure, text: &str, code: u8| {
        check(&failure, text);
        assert_eq!(failure.kind.exit_code(), code, "{text}");
    };
    check(
        Failure::example(FailureKind::ExitCode(7)),
        "rank 1 (pid 4711) exited with code 7 after 3.214 s",
        7,
    );
    check(
        Failure::example(FailureKind::signal(11, true)),
        "rank 1 (pid 4711) was killed by signal 11 (SIGSEGV, core dumped) after 3.214 s",
        139,
    );
    check(
        Failure {
            reported_by: Some(0),
            ..Failure::example(FailureKind::LeftEarly)
        },
        "rank 1 (pid 4711) left early after 3.214 s: it exited with code 0 while rank 0 still needed it",
        1,
    );
    check(
        Failure::example(FailureKind::LeftEarly),
        "rank 1 (pid 4711) left early after 3.214 s: it exited with code 0 before its work was done",
        1,
    );
    check(
        Failure {
            reported_by: Some(0),
            ..Failure::example(FailureKind::Stalled {
                state: Text::new(|_| "stopped by a signal (T)".to_owned()),
            })
        },
        "rank 1 (pid 4711) stalled after 3.214 s: rank 0 gave up waiting for it; its process is stopped by a \
         signal (T)",
        4,
    );
}

#[test]
fn another_failure_is_told_with_what_the_clocks_can_tell() {
    let check = |later_us, bound_us, expect: &str| {
        let also = AlsoFailed {
            rank: 3,
            node_rank: 1,
            host: "b".to_owned(),
            later_us,
            bound_us,
        };
        let text = also.text(Lang::En);
        assert_eq!(
            text.strip_prefix("rank 3 (node 1, host b) failed "),
            Some(expect)
        );
    };
    check(12_340, Some(400), "12.3 ms later, give or take 0.4 ms");
    let within = "within 0.7 ms of it; the nodes' clocks cannot tell which was first";
    check(300, Some(400), within);
    check(
        5,
        None,
        "too; the nodes' clocks were not compared, so it may have been first",
    );
}

#[test]
fn ranks_are_listed_for_people() {
    let check = |ranks: &[usize], expect: &str| assert_eq!(Ranks(ranks).text(Lang::En), expect);
    check(&[3], "3");
    check(&[0, 1], "0 and 1");
    check(&[0, 2, 3], "0, 2 and 3");
    check(&[0, 1, 2, 3, 5], "0 to 3 and 5");
    check(&[1, 2, 3, 5, 7, 8, 9], "1 to 3, 5 and 7 to 9");
}
