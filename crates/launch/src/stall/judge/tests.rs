//! Ranks second by second: what each does, and what is said when.

use std::collections::BTreeMap;

use super::super::sample::Thread;
use super::*;

/// What a rank does in a second.
#[derive(Clone, Copy, Default)]
struct Second {
    own_ms: u64,
    /// Of a process that it started.
    child_ms: u64,
    printed: u64,
    bytes: u64,
    /// Of a second thread.
    helper_ms: u64,
    has_ended: bool,
    is_paceline: bool,
    is_held_up: bool,
    waits_for_input: bool,
}

const HANGS: Second = Second {
    own_ms: 10,
    child_ms: 0,
    printed: 0,
    bytes: 100,
    helper_ms: 0,
    has_ended: false,
    is_paceline: false,
    is_held_up: false,
    waits_for_input: false,
};
const ASKS: Second = Second {
    waits_for_input: true,
    ..HANGS
};
const SPINS: Second = Second {
    own_ms: 990,
    bytes: 0,
    ..HANGS
};
const COMPUTES: Second = Second {
    own_ms: 900,
    helper_ms: 800,
    ..SPINS
};
const PRINTS: Second = Second {
    printed: 20,
    ..HANGS
};

/// Lets ranks do what `does` says for each (second, rank), and returns what is said with its second, at a limit of 10 s.
fn said(ranks: usize, seconds: u64, does: impl Fn(u64, usize) -> Second) -> Vec<(u64, String)> {
    let mut watched = Watched::new(Duration::from_secs(10), ranks);
    let mut totals = vec![(Second::default(), Duration::ZERO); ranks];
    let mut told = Vec::new();
    for second in 0..=seconds {
        let at = Duration::from_secs(second);
        let depths = watched.depths(at);
        let ranks = (totals.iter_mut().zip(&depths).enumerate())
            .map(|(rank, ((sum, _), depth))| {
                if second > 0 {
                    add(sum, does(second, rank));
                }
                sampled(sum, *depth)
            })
            .collect();
        if let Some(stall) = watched.judge(Sample { at, ranks }) {
            told.push((second, stall.words(0, Lang::En)));
        }
    }
    told
}

fn add(sum: &mut Second, now: Second) {
    *sum = Second {
        own_ms: sum.own_ms + now.own_ms,
        child_ms: sum.child_ms + now.child_ms,
        printed: sum.printed + now.printed,
        bytes: sum.bytes + now.bytes,
        helper_ms: sum.helper_ms + now.helper_ms,
        ..now
    };
}

fn sampled(sum: &Second, depth: Depth) -> RankSample {
    let millis = Duration::from_millis;
    let own_cpu = millis(sum.own_ms + sum.helper_ms);
    let thread = |ms| Thread {
        cpu: millis(ms / 2),
        runnable: millis(ms),
    };
    let threads = [(1, thread(sum.own_ms)), (2, thread(sum.helper_ms))];
    RankSample {
        is_running: !sum.has_ended,
        is_paceline: sum.is_paceline,
        is_held_up: sum.is_held_up,
        printed: sum.printed,
        own_cpu,
        tree: (depth != Depth::Own).then(|| Tree {
            cpu: own_cpu + millis(sum.child_ms),
            io_bytes: sum.bytes,
            waits_for_input: sum.waits_for_input,
            threads: match depth {
                Depth::Threads => threads.into(),
                _ => BTreeMap::new(),
            },
        }),
    }
}

#[test]
fn what_is_said_of_two_ranks() {
    let quiet = "rank 1 has printed nothing and used no processor time for 10 s";
    let check = |first: Second, second: Second, expect: Option<&str>| {
        let told = said(2, 30, |_, rank| [first, second][rank]);
        let expect: Vec<_> = expect
            .map(|text| (10, text.to_owned()))
            .into_iter()
            .collect();
        assert_eq!(told, expect);
    };
    check(COMPUTES, HANGS, Some(&format!("{quiet}; rank 0 works")));
    check(PRINTS, HANGS, Some(&format!("{quiet}; rank 0 works")));
    let asks = format!("{quiet}; rank 0 waits for input");
    check(ASKS, HANGS, Some(&asks));
    check(ASKS, PRINTS, None);
    let spins = "rank 0 spins: one thread uses a whole core and reads, writes and prints nothing";
    check(SPINS, HANGS, Some(&format!("{spins}; {quiet}")));
    let ended = Second {
        has_ended: true,
        ..HANGS
    };
    check(ended, HANGS, Some(&format!("{quiet}; rank 0 has ended")));
    let paceline = Second {
        is_paceline: true,
        ..HANGS
    };
    let deadlines = "rank 0 uses Paceline, whose operations have deadlines";
    check(paceline, HANGS, Some(&format!("{quiet}; {deadlines}")));
    let both = "ranks 0 and 1 have printed nothing and used no processor time for 10 s";
    check(HANGS, HANGS, Some(both));
    // Nothing is said where nobody hangs.
    check(COMPUTES, PRINTS, None);
    check(SPINS, SPINS, None);
    check(SPINS, PRINTS, None);
    check(paceline, paceline, None);
    check(ended, ended, None);
    let held_up = Second {
        is_held_up: true,
        ..HANGS
    };
    check(held_up, held_up, None);
    let waits_for_its_child = Second {
        child_ms: 500,
        ..HANGS
    };
    check(waits_for_its_child, COMPUTES, None);
    let reads = Second {
        bytes: 1_000_000,
        ..HANGS
    };
    check(reads, COMPUTES, None);
    let slow = Second {
        own_ms: 60,
        ..HANGS
    };
    check(slow, COMPUTES, None);
}

#[test]
fn a_spin_is_one_busy_thread_that_never_waits() {
    let is_spin = |first: Second| {
        let told = said(2, 10, |_, rank| [first, HANGS][rank]);
        told[0].1.contains("spins")
    };
    assert!(is_spin(SPINS));
    let check = |name, other: Second| assert!(!is_spin(other), "{name}");
    check("two threads", COMPUTES);
    check(
        "output",
        Second {
            printed: 1,
            ..SPINS
        },
    );
    check(
        "reads",
        Second {
            bytes: 100_000,
            ..SPINS
        },
    );
    check(
        "half a core",
        Second {
            own_ms: 500,
            ..SPINS
        },
    );
}

#[test]
fn a_stall_is_said_once_and_again_when_ranks_stall_again() {
    let told = said(2, 60, |second, rank| match (rank, second) {
        (1, 1..=30 | 36..) => HANGS,
        _ => COMPUTES,
    });
    let seconds: Vec<_> = told.iter().map(|(second, _)| *second).collect();
    assert_eq!(seconds, [10, 45]);
}

#[test]
fn ranks_that_follow_the_first_one_are_named_with_it() {
    let told = said(4, 20, |second, rank| match rank {
        0 => COMPUTES,
        rank if second > rank as u64 => HANGS,
        _ => COMPUTES,
    });
    let expect =
        "ranks 1 to 3 have printed nothing and used no processor time for 8 to 10 s; rank 0 works";
    assert_eq!(told, [(11, expect.to_owned())]);
}

#[test]
fn one_that_stalled_long_after_is_not_the_first_ones_company() {
    let told = said(3, 14, |second, rank| match rank {
        1 => HANGS,
        2 if second > 6 => HANGS,
        _ => COMPUTES,
    });
    assert!(told[0].1.ends_with("; ranks 0 and 2 work"), "{told:?}");
}

#[test]
fn only_ranks_that_are_quiet_are_looked_at_closely() {
    let mut watched = Watched::new(Duration::from_secs(10), 2);
    for second in 0..4 {
        let mut sums = [Second::default(); 2];
        add(
            &mut sums[0],
            Second {
                own_ms: 1000 * second,
                ..COMPUTES
            },
        );
        let at = Duration::from_secs(second);
        let depths = watched.depths(at);
        let ranks = sums
            .iter()
            .zip(depths)
            .map(|(sum, depth)| sampled(sum, depth));
        watched.judge(Sample {
            at,
            ranks: ranks.collect(),
        });
    }
    let depths = watched.depths(Duration::from_secs(4));
    assert_eq!(depths, [Depth::Own, Depth::Processes]);
    assert_eq!(watched.due(), Some(Duration::from_secs(5)));
}

#[test]
fn the_words_have_the_numbers_of_the_job() {
    let stall = Stall {
        quiet: vec![(1, Duration::from_secs(61))],
        others: vec![(0, Doing::Spins), (2, Doing::Spins)],
    };
    let expect = "ranks 4 and 6 spin: in each, one thread uses a whole core and reads, writes and prints nothing; rank 5 has \
                  printed nothing and used no processor time for 61 s";
    assert_eq!(stall.words(4, Lang::En), expect);
    assert_eq!(
        stall.culprit(),
        Some(1),
        "of two that spin it is not known which"
    );
}
