//! Which of several failures is the cause, as a table.

use super::*;
use crate::elastic::clocks::Reading;
use crate::elastic::decide::{Ranks, Rules};
use crate::elastic::leases::Ages;
use crate::elastic::record::{Page, Ports, RoundId, Why};
use crate::report::{Failure, FailureKind, Node};
use std::collections::BTreeSet;

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const ROUND: RoundId = RoundId {
    number: 1,
    by: AgentId(0),
};

/// A failed rank on one of three nodes, with one rank each.
#[derive(Clone, Copy, Default)]
struct Fails {
    node: usize,
    /// By its own agent's clock.
    at_us: u64,
    /// Since its node started the round.
    after_us: u64,
    /// The ways between the first member and it, by both clocks; not known yet if absent.
    ways: Option<(i64, i64)>,
    is_later: bool,
    blames: Option<usize>,
    /// For how long it has been known.
    known: Duration,
}

fn report(fails: &Fails) -> Report {
    Report {
        failure: Failure {
            rank: fails.node,
            blames: fails.blames,
            after: Duration::from_micros(fails.after_us),
            node: Some(Node {
                rank: fails.node,
                host: format!("h{}", fails.node),
            }),
            ..Failure::example(FailureKind::ExitCode(1))
        },
        at_us: fails.at_us,
        is_later: fails.is_later,
        recovers: false,
    }
}

/// The cause and the ranks that failed too, as `1`, or `1; 2: 300 us later, 100 us` with the bound, or how long to
/// wait.
fn decide(fails: &[Fails]) -> String {
    let ids = [0, 1, 2].map(AgentId);
    let mut pages = pages();
    let mut ages = [Ages::default(); 3];
    for failed in fails {
        pages[failed.node].state = State::Failed(ROUND, Box::new(report(failed)));
        ages[failed.node].state = failed.known;
        if let Some((there, least_us)) = failed.ways {
            pages[0].ways.push((ids[failed.node], there));
            let round = ROUND;
            pages[failed.node].way = Some(Reading { round, least_us });
        }
    }
    let seen: Vec<_> = (pages.into_iter().zip(ages))
        .map(|(page, ages)| Seen { page, ages })
        .collect();
    with_known(&seen, |known, record| match known.first_failure(record) {
        Cause::None => "none".to_owned(),
        Cause::Wait(left) => format!("wait {} ms", left.as_millis()),
        Cause::Found(report) => {
            let also = report.failure.also.iter().map(|also| {
                let (rank, later) = (also.rank, also.later_us);
                match also.bound_us {
                    Some(bound) => format!("; {rank}: {later} us later, {bound} us"),
                    None => format!("; {rank}: not known"),
                }
            });
            format!("{}{}", report.failure.rank, also.collect::<String>())
        }
    })
}

/// Three agents in a round.
fn pages() -> [Page; 3] {
    [0, 1, 2].map(AgentId).map(|id| Page {
        noticed: Some(ROUND),
        state: State::Running(ROUND),
        ..Page::new(id)
    })
}

fn with_known<T>(seen: &[Seen], ask: impl FnOnce(&Known<'_>, &Record) -> T) -> T {
    let record = Record {
        id: ROUND,
        phase: Phase::Running(Ports::default()),
        continues: None,
        members: seen.iter().map(|seen| seen.page.as_member()).collect(),
        before: Vec::new(),
        taken_over: false,
        restarts: 0,
        restarts_before: 0,
        why: Why::Start,
    }
    .with_new_processes();
    let rules = Rules {
        nodes_min: 3,
        nodes_max: 3,
        ..Rules::example()
    };
    let own = Page {
        accepted: ROUND,
        ..Page::new(AgentId(0))
    };
    let known = Known {
        rules: &rules,
        me: AgentId(0),
        own: &own,
        ranks: Ranks::None,
        is_attached: true,
        is_host: true,
        record: Some(&record),
        record_age: ms(0),
        memory: Some(&record),
        pages: seen,
        dead: &BTreeSet::new(),
        highest: 1,
        lost: None,
        contact: ms(0),
        was_away: false,
        waited: ms(0),
        is_publishing: false,
        unreached: None,
        refused: None,
    };
    ask(&known, &record)
}

/// Which rank is blamed, and for how long it may end by itself if it does not wait too, if these ranks wait for `ms(waited)` and
/// each blames another.
fn hung(complaints: &[(usize, usize)], waited: u64) -> Option<(usize, Option<Duration>)> {
    let mut pages = pages();
    for (by, of) in complaints {
        pages[by % 3].complaints.push(Complaint {
            round: ROUND,
            by: *by,
            of: *of,
            step: 7,
        });
    }
    let ages = Ages {
        complaints: ms(waited),
        ..Ages::default()
    };
    let seen = pages.map(|page| Seen { page, ages });
    let hung = with_known(&seen, |known, record| known.hung(record));
    hung.map(|blame| (blame.complaint.of, (!blame.is_cut).then_some(blame.left)))
}

#[test]
fn a_rank_that_others_wait_for_hangs_and_one_that_waits_itself_does_not() {
    assert_eq!(hung(&[], 9000), None);
    assert_eq!(hung(&[(0, 2)], 300), Some((2, Some(ms(700)))));
    for complaints in [
        &[(0, 2), (1, 2)][..],
        &[(0, 1), (1, 2)],
        // Some know no cause, or blame each other because of it.
        &[(0, 0), (1, 2)],
        &[(0, 1), (1, 0), (3, 2)],
    ] {
        assert_eq!(hung(complaints, 5000), Some((2, Some(ms(0)))));
    }
    // All that are blamed wait themselves.
    assert_eq!(hung(&[(0, 1), (1, 0)], 0), Some((1, None)));
    assert_eq!(hung(&[(0, 1), (1, 1), (2, 1)], 0), Some((1, None)));
    assert_eq!(hung(&[(0, 0), (1, 1)], 5000), None);
}

fn check(fails: &[Fails], expect: &str) {
    assert_eq!(decide(fails), expect);
}

/// On the first node, by whose clock all is compared.
const FIRST: Fails = Fails {
    node: 0,
    at_us: 5_000_000,
    after_us: 900,
    ways: None,
    is_later: false,
    blames: None,
    known: Duration::ZERO,
};

/// On a node whose clock is a second behind, 400 us earlier; the ways take 100 and 300 us.
const SECOND: Fails = Fails {
    node: 1,
    at_us: 3_999_600,
    // Its node started the round later, so that this does not tell.
    after_us: 200,
    ways: Some((1_000_100, -999_700)),
    ..FIRST
};

#[test]
fn one_failure_needs_no_clock() {
    check(&[], "none");
    check(&[FIRST], "0");
    check(
        &[Fails {
            ways: None,
            ..SECOND
        }],
        "1",
    );
}

#[test]
fn failures_are_ordered_by_one_clock_with_a_bound() {
    check(&[FIRST, SECOND], "1; 0: 500 us later, 200 us");
    let later = Fails {
        at_us: SECOND.at_us + 800,
        ..SECOND
    };
    check(&[FIRST, later], "0; 1: 300 us later, 200 us");
    let third = Fails {
        node: 2,
        at_us: 77_004_999_900,
        ways: Some((-77_000_000_000 + 50, 77_000_000_000 + 50)),
        ..FIRST
    };
    check(
        &[FIRST, SECOND, third],
        "1; 2: 400 us later, 250 us; 0: 500 us later, 200 us",
    );
}

#[test]
fn a_rank_that_failed_because_of_another_or_after_it_is_not_in_question() {
    let is_later = Fails {
        is_later: true,
        ..SECOND
    };
    check(&[FIRST, is_later], "0");
    let victim = Fails {
        blames: Some(0),
        ..SECOND
    };
    check(&[FIRST, victim], "0");
}

#[test]
fn clocks_that_were_not_compared_are_waited_for_no_longer_than_a_lease() {
    let unknown = Fails {
        ways: None,
        ..SECOND
    };
    check(&[FIRST, unknown], "wait 500 ms");
    let old = |fails| Fails {
        known: ms(3000),
        ..fails
    };
    check(&[old(FIRST), unknown], "wait 500 ms");
    check(&[old(FIRST), old(unknown)], "1; 0: not known");
}
