//! Which of two sides goes on.

use super::*;

/// Whether `here` of agents `0..voters`, of which `dead` are known to be, go on with and without the job's store.
fn check(voters: u64, here: &[u64], dead: &[u64], expect: [bool; 2]) {
    let voters: Vec<_> = (0..voters).map(AgentId).collect();
    let dead = dead.iter().copied().map(AgentId).collect();
    let got = [true, false]
        .map(|has_store| is_quorate(&voters, &dead, |id| here.contains(&id.0), has_store));
    assert_eq!(got, expect, "{here:?} of {voters:?} without {dead:?}");
}

#[test]
fn of_two_sides_at_most_one_goes_on() {
    let (both, only_with_store, neither) = ([true, true], [true, false], [false, false]);
    check(3, &[0, 1], &[], both);
    check(3, &[0], &[], neither);
    check(4, &[0, 1], &[], only_with_store);
    check(2, &[1], &[], only_with_store);
    check(1, &[], &[], neither);
}

#[test]
fn who_is_known_to_be_dead_is_not_waited_for() {
    let both = [true, true];
    check(2, &[1], &[0], both);
    check(4, &[2, 3], &[0], both);
    check(5, &[4], &[0, 1, 2, 3], both);
}

#[test]
fn before_anything_was_started_the_store_alone_counts() {
    check(0, &[], &[], [true, false]);
}
