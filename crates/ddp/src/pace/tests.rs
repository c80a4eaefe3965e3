//! Ranks of given speeds, in virtual time.

use super::*;

/// Hears so many intervals of this many milliseconds.
fn hear(intervals: &mut Intervals, count: usize, millis: f32) {
    for _ in 0..count {
        intervals.hear(millis / 1e3);
    }
}

fn seconds(intervals: &Intervals) -> Option<u64> {
    intervals.timeout().map(|timeout| timeout.as_secs())
}

#[test]
fn the_deadline_follows_the_longest_recent_step_within_bounds() {
    for (millis, expect) in [
        (0.01, 20),
        (8.0, 20),
        (4_096.0, 20),
        (4_100.0, 32),
        (30_000.0, 131),
        (300_000.0, 1800),
        (1e9, 1800),
    ] {
        let mut intervals = Intervals::default();
        hear(&mut intervals, 9, millis);
        assert_eq!(seconds(&intervals), None);
        hear(&mut intervals, 1, millis);
        assert_eq!(seconds(&intervals), Some(expect), "{millis} ms");
    }
}

#[test]
fn an_evaluation_is_remembered_for_a_thousand_times_its_length() {
    let mut intervals = Intervals::default();
    hear(&mut intervals, 100, 100.0);
    hear(&mut intervals, 1, 30_000.0);
    // Rounded up to 32.8 s.
    hear(&mut intervals, 300_000, 100.0);
    assert_eq!(seconds(&intervals), Some(131));
    hear(&mut intervals, 40_000, 100.0);
    assert_eq!(seconds(&intervals), Some(20));
}

#[test]
fn what_is_no_interval_changes_nothing() {
    let mut intervals = Intervals::default();
    for none in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        (0..100).for_each(|_| intervals.hear(none));
    }
    assert_eq!(intervals.timeout(), None);
}

#[test]
fn after_the_ranks_have_changed_the_deadline_waits_and_the_memory_stays() {
    let mut pace = Pace::default();
    hear(&mut pace.intervals, 10, 30_000.0);
    pace.restart();
    assert_eq!(pace.intervals.timeout(), None);
    hear(&mut pace.intervals, 10, 10.0);
    assert_eq!(seconds(&pace.intervals), Some(131));
}

#[test]
fn the_deadline_is_told_once_and_when_it_changes() {
    let mut intervals = Intervals::default();
    let mut told = Vec::new();
    for (count, millis) in [
        (100, 12.0),
        (100, 15.0),
        (1, 9_000.0),
        (100, 12.0),
        (3, 8_000.0),
    ] {
        for _ in 0..count {
            hear(&mut intervals, 1, millis);
            told.extend(intervals.news());
        }
    }
    let sentence = |seconds: u64, longest: &str| {
        format!(
            "ranks wait {seconds} s for one another from now on, because the longest of the recent steps took up to {longest}, \
             evaluation and saving included"
        )
    };
    assert_eq!(told, [sentence(20, "16 ms"), sentence(66, "16.4 s")]);
}

/// Steps of ranks that need these milliseconds for a shard. Returns whom they name, with the step.
fn play(
    stragglers: &mut Stragglers,
    world: usize,
    steps: usize,
    of: impl Fn(usize, usize) -> f32,
) -> Vec<Straggler> {
    let started: Vec<usize> = (0..world).collect();
    let mut told = Vec::new();
    for step in 0..steps {
        let busy: Vec<f32> = (0..world).map(|rank| of(rank, step) / 1e3).collect();
        told.extend(stragglers.hear(&busy, &started).0);
    }
    told
}

#[test]
fn a_rank_that_stays_slow_is_named_once_with_numbers() {
    for world in [2, 3, 8] {
        let mut stragglers = Stragglers::default();
        let slow = |rank, _| if rank == 1 { 30.0 } else { 10.0 };
        let told = play(&mut stragglers, world, 10_000, slow);
        let [one] = &told[..] else {
            panic!("{told:?}");
        };
        assert_eq!(
            one.to_string(),
            "rank 1 is slow: 30.0 ms for a shard, 3.0 times the others' median of 10.0 ms, over 102 steps"
        );
        // Much slower, as fast as the others, and slow again.
        let much = |rank, _| if rank == 1 { 90.0 } else { 10.0 };
        let told = play(&mut stragglers, world, 1000, much);
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].times() > 6.0);
        let told = play(&mut stragglers, world, 10_000, |_, _| 10.0);
        // The window in which it becomes faster may be news of its own.
        assert!((1..=2).contains(&told.len()), "{told:?}");
        let last = told.last().map(Straggler::to_string).unwrap_or_default();
        assert!(last.starts_with("rank 1 is no longer slow"), "{last}");
        assert_eq!(play(&mut stragglers, world, 1000, slow).len(), 1);
        assert_eq!(stragglers.named().len(), 1);
    }
}

#[test]
fn two_stragglers_do_not_hide_each_other() {
    let slow = |rank, _| if rank < 2 { 25.0 } else { 10.0 };
    let told = play(&mut Stragglers::default(), 5, 1000, slow);
    let ranks: Vec<usize> = told.iter().map(|straggler| straggler.rank).collect();
    assert_eq!(ranks, [0, 1]);
}

#[test]
fn small_short_and_common_delays_name_none() {
    let check = |world, of: &dyn Fn(usize, usize) -> f32| {
        assert_eq!(play(&mut Stragglers::default(), world, 20_000, of), []);
    };
    check(4, &|rank, _| 10.0 + rank as f32);
    check(4, &|_, step| if step % 50 < 25 { 10.0 } else { 90.0 });
    // Twice as slow, but by half a millisecond.
    check(4, &|rank, _| if rank == 0 { 1.0 } else { 0.5 });
    // Each rank in turn, for more than a second.
    let turns = |rank: usize, step: usize| rank == step / 1000 % 4 && step % 1000 < 45;
    check(4, &|rank, step| if turns(rank, step) { 30.0 } else { 10.0 });
    // One pause of 20 s.
    check(4, &|rank, step| {
        if rank == 2 && step == 777 {
            20_000.0
        } else {
            10.0
        }
    });
    check(1, &|_, _| 10.0);
}

#[test]
fn other_ranks_begin_other_windows() {
    let mut pace = Pace::default();
    let slow = |rank, _| if rank == 1 { 30.0 } else { 10.0 };
    for _ in 0..10 {
        assert_eq!(play(&mut pace.stragglers, 3, 100, slow), []);
        pace.restart();
    }
    // With the numbers that the ranks were started with.
    let mut told = Vec::new();
    for _ in 0..200 {
        told.extend(pace.stragglers.hear(&[0.01, 0.03], &[0, 3]).0);
    }
    assert_eq!(told.iter().map(|one| one.rank).collect::<Vec<_>>(), [3]);
}

/// Whether the last of `world` ranks should leave if it needs this many times as long as the others.
fn leaves(world: usize, shards: usize, times: f32, least: usize) -> bool {
    let mut stragglers = Stragglers::default();
    let slow = |rank, _| {
        if rank + 1 == world {
            10.0 * times
        } else {
            10.0
        }
    };
    play(&mut stragglers, world, 1000, slow);
    stragglers.should_leave(shards, least)
}

#[test]
fn a_straggler_leaves_only_if_the_others_are_faster_without_it() {
    for (world, shards, times, expect) in [
        // Then one rank computes two shards.
        (4, 4, 2.0, false),
        (4, 4, 2.6, true),
        // Three shards instead of two.
        (4, 8, 1.6, false),
        (4, 8, 2.0, true),
        // Of two ranks, the other one does all the work.
        (2, 2, 1.8, false),
        (2, 8, 2.2, false),
        (2, 8, 3.0, true),
        (8, 64, 1.6, true),
    ] {
        assert_eq!(
            leaves(world, shards, times, 1),
            expect,
            "{world} ranks, {shards} shards, {times} times"
        );
    }
}

#[test]
fn no_straggler_leaves_if_too_few_ranks_would_be_left() {
    assert!(leaves(4, 8, 10.0, 3));
    assert!(!leaves(4, 8, 10.0, 4));
    assert!(leaves(2, 8, 10.0, 1));
    assert!(!leaves(2, 8, 10.0, 2));
}

#[test]
fn a_straggler_that_left_is_named_again_if_its_replacement_is_slow() {
    let mut stragglers = Stragglers::default();
    let slow = |rank, _| if rank == 1 { 30.0 } else { 10.0 };
    assert_eq!(play(&mut stragglers, 3, 200, slow).len(), 1);
    let left = stragglers.has_left(1).expect("it was named");
    assert!(
        left.to_string()
            .starts_with("rank 1 was slow and left: 30.0 ms")
    );
    assert_eq!(play(&mut stragglers, 3, 200, slow).len(), 1);
    assert_eq!(stragglers.has_left(2), None);
}
