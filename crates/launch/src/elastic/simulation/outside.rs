//! A store outside of the job: lost, back, empty; and agents that are lost while it is there.

use super::*;
use crate::elastic::record::{Ending, Why};

const OUTAGE: Duration = ms(20_000);

fn outside(nodes_min: usize, nodes_max: usize) -> Rules {
    Rules {
        outage: Some(OUTAGE),
        ..rules(nodes_min, nodes_max)
    }
}

/// Strikes at ten seconds. Then, after `wait`, a round of these nodes must run: the first one still, or another.
fn check(nodes: usize, faults: &[(u64, Fault)], wait: Duration, members: &[usize], is_first: bool) {
    for seed in 0..40 {
        let arrivals: Vec<_> = (0..nodes)
            .map(|host| (host, ms(400 * host as u64)))
            .collect();
        let mut world = World::new(seed, outside(1, nodes), WORK, &arrivals);
        world.run(ms(10_000));
        let before = world.whole_round().expect("a first round").0.id;
        for (after, fault) in faults {
            world.fault(ms(10_000 + after), fault.clone());
        }
        world.run(ms(10_000) + wait);
        let (record, _) = world
            .whole_round()
            .unwrap_or_else(|| panic!("seed {seed}: no round after {wait:?} of {faults:?}"));
        let mut found: Vec<_> = record
            .ids()
            .iter()
            .map(|id| (id.0 - 1000) as usize)
            .collect();
        found.sort_unstable();
        assert_eq!(found, members, "seed {seed}: {faults:?}");
        assert_eq!(record.id == before, is_first, "seed {seed}: {faults:?}");
    }
}

#[test]
fn ranks_run_on_while_the_store_is_away() {
    let faults = [
        (0, Fault::StoreDown),
        (15_000, Fault::StoreUp { empty: false }),
    ];
    check(3, &faults, ms(14_000), &[0, 1, 2], true);
    check(3, &faults, ms(60_000), &[0, 1, 2], true);
}

#[test]
fn ranks_are_ended_when_it_is_away_for_too_long_and_start_again_when_it_is_back() {
    let faults = [
        (0, Fault::StoreDown),
        (30_000, Fault::StoreUp { empty: false }),
    ];
    check(3, &faults, ms(45_000), &[0, 1, 2], false);
}

#[test]
fn a_store_that_has_forgotten_everything_is_told_again() {
    let faults = [
        (0, Fault::StoreDown),
        (1000, Fault::StoreUp { empty: true }),
    ];
    check(3, &faults, ms(20_000), &[0, 1, 2], false);
}

#[test]
fn a_node_that_dies_is_left_out_within_its_lease() {
    check(3, &[(0, Fault::Kill(0))], ms(4500), &[1, 2], false);
    check(2, &[(0, Fault::PowerOff(0))], ms(4500), &[1], false);
    check(2, &[(0, Fault::CutOff(vec![0]))], ms(4500), &[1], false);
    check(3, &[(0, Fault::Stop(1))], ms(4500), &[0, 2], false);
}

#[test]
fn who_is_cut_off_from_the_store_comes_back_when_healed() {
    let faults = [(0, Fault::CutOff(vec![0])), (8000, Fault::Heal)];
    check(2, &faults, ms(20_000), &[0, 1], false);
    // No agent could decide without them, so nothing has happened.
    let faults = [(0, Fault::CutOff(vec![0, 1, 2])), (8000, Fault::Heal)];
    check(3, &faults, ms(20_000), &[0, 1, 2], true);
}

#[test]
fn when_most_die_together_the_rest_goes_on_once_their_ranks_must_have_ended() {
    let faults = [(0, Fault::PowerOff(0)), (0, Fault::PowerOff(1))];
    check(3, &faults, OUTAGE * 5 / 4 + ms(4500), &[2], false);
    let all_but_one = [0, 1, 2, 3].map(|node| (0, Fault::Kill(node)));
    check(5, &all_but_one, OUTAGE * 5 / 4 + ms(4500), &[4], false);
}

#[test]
fn a_job_that_has_ended_leaves_nothing_in_the_store() {
    for seed in 0..40 {
        let arrivals: Vec<_> = (0..5).map(|host| (host, Duration::ZERO)).collect();
        let mut world = World::new(seed, outside(2, 4), ms(5000), &arrivals);
        world.run(ms(30_000));
        assert_eq!(world.exits().len(), 5, "seed {seed}: the spare too");
        for exit in world.exits() {
            assert_eq!(exit, &Exit::Job(Ending::Finished), "seed {seed}");
        }
        let store = &world.stores["outside"];
        assert!(
            store.record.is_none() && store.pages.is_empty(),
            "seed {seed}"
        );
    }
}

#[test]
fn a_lost_record_is_why_a_round_was_begun() {
    let arrivals = [(0, Duration::ZERO), (1, Duration::ZERO)];
    let mut world = World::new(5, outside(1, 2), WORK, &arrivals);
    world.fault(ms(10_000), Fault::StoreDown);
    world.fault(ms(11_000), Fault::StoreUp { empty: true });
    world.run(ms(30_000));
    let (record, _) = world.whole_round().expect("a round");
    assert_eq!(record.why, Why::StoreLost);
}
