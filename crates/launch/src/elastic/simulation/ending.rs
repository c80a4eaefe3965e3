//! Jobs that end on all nodes: well, when they are asked to, or by a failure after that.

use super::*;
use crate::elastic::record::Ending;

/// Three nodes with `rules` and ranks that work for `work`; the exits of those that live after these faults.
fn exits_after(rules: &Rules, work: Duration, faults: &[Fault]) -> Vec<Vec<Exit>> {
    let exits = |seed| {
        let arrivals = [0, 1, 2].map(|host| (host, ms(400 * host as u64)));
        let mut world = World::new(seed, rules.clone(), work, &arrivals);
        for fault in faults {
            world.fault(ms(10_000), fault.clone());
        }
        world.run(ms(60_000));
        world.exits().into_iter().cloned().collect()
    };
    (0..40).map(exits).collect()
}

#[test]
fn a_job_that_was_asked_to_stop_ends_as_stopped_on_all_nodes() {
    let stopped = || Exit::Job(Ending::Stopped(NOTICE));
    for exits in exits_after(&rules(1, 3), ms(12_000), &[Fault::Notice(1)]) {
        assert_eq!(exits, [stopped(), stopped(), stopped()]);
    }
    // Without the request, the other two would begin another round.
    let faults = [Fault::Notice(1), Fault::Kill(2)];
    for exits in exits_after(&rules(1, 3), WORK, &faults) {
        assert_eq!(exits, [stopped(), stopped()]);
    }
}

#[test]
fn after_a_request_to_stop_a_failure_is_the_end() {
    let fails = Fault::RankFails {
        node: 0,
        code: 7,
        victims: false,
    };
    for exits in exits_after(&rules(1, 3), WORK, &[Fault::Notice(1), fails]) {
        let failed = |exit: &Exit| matches!(exit, Exit::Job(Ending::Failed(_)));
        assert!(exits.len() == 3 && exits.iter().all(failed), "{exits:?}");
    }
}

#[test]
fn where_nodes_cannot_change_one_that_is_to_go_ends_the_job_as_stopped() {
    let mut rules = rules(3, 3);
    rules.is_static = true;
    for leaver in [0, 2] {
        for exits in exits_after(&rules, WORK, &[Fault::Signal(leaver)]) {
            let stop = Stop {
                signal: 15,
                step: None,
            };
            let mut expect = vec![Exit::Job(Ending::Stopped(stop)); 3];
            expect[leaver] = Exit::Signal(15);
            assert_eq!(exits, expect);
        }
    }
}

#[test]
fn a_job_that_ends_well_ends_on_all_nodes() {
    for seed in 0..40 {
        let arrivals: Vec<_> = (0..5).map(|host| (host, Duration::ZERO)).collect();
        let mut world = World::new(seed, rules(2, 4), ms(5000), &arrivals);
        world.run(ms(20_000));
        assert_eq!(world.exits().len(), 5, "seed {seed}: the spare too");
        for exit in world.exits() {
            assert_eq!(exit, &Exit::Job(Ending::Finished), "seed {seed}");
        }
    }
}
