//! One thing happens: what follows, and within which time.

use super::*;
use crate::elastic::record::{Complaint, Ending, Phase, Why};
use crate::report::AlsoFailed;

/// `nodes` agents on hosts of their own, in their first round.
fn running(seed: u64, rules: Rules, nodes: usize) -> World {
    let arrivals: Vec<_> = (0..nodes)
        .map(|host| (host, ms(400 * host as u64)))
        .collect();
    let mut world = World::new(seed, rules, WORK, &arrivals);
    world.run(ms(10_000));
    assert!(world.whole_round().is_some(), "seed {seed}: no first round");
    world
}

/// The agents that take part, whatever the order of their ranks.
fn nodes_of(record: &Record) -> Vec<usize> {
    let mut nodes: Vec<_> = record
        .ids()
        .iter()
        .map(|id| (id.0 - 1000) as usize)
        .collect();
    nodes.sort_unstable();
    nodes
}

/// Strikes at ten seconds; a round of these nodes must run within `bound`.
fn check(rules: &Rules, nodes: usize, faults: &[Fault], members: &[usize], bound: Duration) {
    for seed in 0..40 {
        let mut world = running(seed, rules.clone(), nodes);
        let before = world.whole_round().expect("checked").0.id;
        for fault in faults {
            world.fault(ms(10_000), fault.clone());
        }
        world.run(ms(10_000) + bound);
        let (record, _) = world
            .whole_round()
            .unwrap_or_else(|| panic!("seed {seed}: no round within {bound:?} of {faults:?}"));
        assert_eq!(nodes_of(record), members, "seed {seed}: {faults:?}");
        assert_ne!(record.id, before, "seed {seed}: {faults:?}");
    }
}

#[test]
fn a_node_that_dies_is_left_out_within_its_lease() {
    let rules = rules(1, 4);
    check(&rules, 4, &[Fault::PowerOff(2)], &[0, 1, 3], ms(4500));
    check(&rules, 4, &[Fault::Kill(3)], &[0, 1, 2], ms(4500));
    check(&rules, 2, &[Fault::PowerOff(1)], &[0], ms(4500));
}

/// Of a job that recovers live, without restarts.
fn live_rules() -> Rules {
    Rules {
        recovers_live: true,
        max_restarts: 0,
        ..rules(1, 3)
    }
}

/// Of a job that recovers live: the next round has these nodes, and continues the first or starts all ranks anew.
fn check_live(faults: &[Fault], members: &[usize], ranks: Option<usize>) {
    let rules = live_rules();
    for seed in 0..40 {
        let mut world = running(seed, rules.clone(), 3);
        let before = world.whole_round().expect("checked").0.id;
        for fault in faults {
            world.fault(ms(10_000), fault.clone());
        }
        world.run(ms(17_000));
        let (record, _) = world.whole_round().expect("a round");
        let scene = format!("seed {seed}: {faults:?} {record:?}");
        assert_eq!(nodes_of(record), members, "{scene}");
        assert_eq!(record.continues, ranks.map(|_| before), "{scene}");
        assert!(ranks.is_none_or(|ranks| record.world() == ranks), "{scene}");
    }
}

#[test]
fn the_ranks_that_are_left_go_on_after_a_loss() {
    let rank = |node| Fault::RankFails {
        node,
        code: 7,
        victims: false,
    };
    // The nodes have one, two and three ranks.
    check_live(&[rank(2)], &[0, 1, 2], Some(5));
    check_live(&[rank(1), rank(2)], &[0, 1, 2], Some(4));
    // All ranks of a node: it does not come back without a restart.
    check_live(&[rank(0)], &[1, 2], Some(5));
    check_live(&[Fault::PowerOff(1)], &[0, 2], Some(4));
    check_live(&[Fault::CutOff(vec![2])], &[0, 1], Some(3));
    // The store moves at once.
    check_live(&[Fault::Kill(0)], &[1, 2], Some(5));
    // The others cannot tell which side is cut off, and end their ranks before they replace it.
    check_live(&[Fault::PowerOff(0)], &[1, 2], None);
}

#[test]
fn a_node_whose_ranks_have_failed_does_not_come_back_with_a_newcomer() {
    let rules = live_rules();
    for seed in 0..40 {
        let mut world = running(seed, rules.clone(), 3);
        let fails = Fault::RankFails {
            node: 0,
            code: 7,
            victims: false,
        };
        world.fault(ms(10_000), fails);
        world.fault(ms(15_000), Fault::Arrive { host: 9 });
        world.run(ms(20_000));
        let (record, _) = world.whole_round().expect("a round");
        assert_eq!(nodes_of(record), [1, 2, 3], "seed {seed}: {record:?}");
        assert_eq!(record.why, Why::Admission, "seed {seed}");
    }
}

const fn loses_a_rank(node: usize) -> Fault {
    Fault::RankFails {
        node,
        code: 7,
        victims: false,
    }
}

/// A job of three nodes with one, two and three ranks that recovers live and has so many restarts. Faults strike so many
/// milliseconds after ten seconds. At `end` the next one has these nodes and so many ranks, and so many restarts are spent. The
/// processes of the first round have worked on.
fn check_replaced(
    max_restarts: u32,
    newcomers_die: u64,
    faults: impl Fn(u64) -> Vec<(u64, Fault)>,
    expect: (&[usize], usize, u32),
) {
    let rules = Rules {
        max_restarts,
        ..live_rules()
    };
    check_joined(&rules, newcomers_die, faults, expect);
}

/// The same by these rules.
fn check_joined(
    rules: &Rules,
    newcomers_die: u64,
    faults: impl Fn(u64) -> Vec<(u64, Fault)>,
    expect: (&[usize], usize, u32),
) {
    for seed in 0..60 {
        let mut world = running(seed, rules.clone(), 3);
        world.newcomers_die = newcomers_die;
        let before = world.whole_round().expect("checked").0.id;
        let faults = faults(seed);
        for (after, fault) in &faults {
            world.fault(ms(10_000 + after), fault.clone());
        }
        world.run(ms(40_000));
        let (record, _) = world.whole_round().expect("a round");
        let scene = format!("seed {seed}: {faults:?} {record:?}");
        let (nodes, ranks, restarts) = expect;
        assert_eq!(nodes_of(record), nodes, "{scene}");
        assert_eq!(record.world(), ranks, "{scene}");
        assert_eq!(record.restarts, restarts, "{scene}");
        assert_eq!(record.continues, Some(before), "{scene}");
        let works = |node: &usize| {
            let ranks = world.nodes[*node].ranks.as_ref();
            ranks.is_some_and(|ranks| ranks.has_begun == record.id)
        };
        assert!(nodes.iter().all(works), "{scene}");
    }
}

#[test]
fn lost_ranks_are_replaced_while_the_others_go_on_and_restarts_are_left() {
    let all = &[0, 1, 2][..];
    let lost = |nodes: &'static [usize]| {
        move |_| nodes.iter().map(|node| (0, loses_a_rank(*node))).collect()
    };
    check_replaced(3, 0, lost(&[2]), (all, 6, 1));
    check_replaced(2, 0, lost(&[1, 2]), (all, 6, 2));
    check_replaced(1, 0, lost(&[1, 2]), (all, 5, 1));
    let again = |_| {
        vec![
            (0, loses_a_rank(2)),
            (9000, loses_a_rank(2)),
            (18_000, loses_a_rank(1)),
        ]
    };
    check_replaced(3, 0, again, (all, 6, 3));
    check_replaced(2, 0, again, (all, 5, 2));
}

#[test]
fn replacements_that_die_are_replaced_until_no_restart_is_left() {
    let lost = |_| vec![(0, loses_a_rank(2))];
    check_replaced(3, 100, lost, (&[0, 1, 2], 5, 3));
}

#[test]
fn losses_while_a_replacement_joins_leave_the_others_at_work() {
    // From the loss to some time after the replacement has joined.
    let at = |seed: u64| 60 * seed;
    let rank = |seed| vec![(0, loses_a_rank(2)), (at(seed), loses_a_rank(1))];
    check_replaced(3, 0, rank, (&[0, 1, 2], 6, 2));
    let node = |seed| vec![(0, loses_a_rank(2)), (at(seed), Fault::PowerOff(1))];
    check_replaced(3, 0, node, (&[0, 2], 4, 1));
    let cut_off = |seed| vec![(0, loses_a_rank(1)), (at(seed), Fault::CutOff(vec![2]))];
    check_replaced(3, 0, cut_off, (&[0, 1], 3, 1));
    let store = |seed| vec![(0, loses_a_rank(2)), (at(seed), Fault::Kill(0))];
    check_replaced(3, 0, store, (&[1, 2], 5, 1));
}

#[test]
fn a_node_that_comes_joins_the_ranks_that_run() {
    let comes = |after| (after, Fault::Arrive { host: 9 });
    let lost = |node| (0, Fault::PowerOff(node));
    // The newcomer has one rank. It takes the place of a lost node, before and after it has come; of two, the first to come.
    check_replaced(0, 0, |_| vec![lost(2), comes(6000)], (&[0, 1, 3], 4, 0));
    check_replaced(
        0,
        0,
        |_| vec![comes(0), (4000, Fault::PowerOff(1))],
        (&[0, 2, 3], 5, 0),
    );
    let two = |seed| {
        vec![
            lost(2),
            comes(6000),
            (6500 + seed, Fault::Arrive { host: 10 }),
        ]
    };
    check_replaced(0, 0, two, (&[0, 1, 3], 4, 0));
    // A node that was cut off, and one whose only rank was lost, at the price of a restart.
    let healed = |_| vec![(0, Fault::CutOff(vec![2])), (6000, Fault::Heal)];
    check_replaced(0, 0, healed, (&[0, 1, 2], 6, 0));
    check_replaced(1, 0, |_| vec![(0, loses_a_rank(0))], (&[0, 1, 2], 6, 1));
    check_replaced(0, 0, |_| vec![(0, loses_a_rank(0))], (&[1, 2], 5, 0));
}

#[test]
fn losses_while_a_node_joins_leave_the_others_at_work() {
    // From its arrival to some time after it has joined.
    let at = |seed: u64| 6000 + 60 * seed;
    let scene = move |seed, fault| {
        vec![
            (0, Fault::PowerOff(2)),
            (6000, Fault::Arrive { host: 9 }),
            (at(seed), fault),
        ]
    };
    let joined = (&[0, 1, 3][..], 3, 0);
    check_replaced(0, 0, move |seed| scene(seed, loses_a_rank(1)), joined);
    let alone = (&[0, 1][..], 3, 0);
    check_replaced(0, 0, move |seed| scene(seed, Fault::PowerOff(3)), alone);
    check_replaced(0, 0, move |seed| scene(seed, Fault::CutOff(vec![3])), alone);
    check_replaced(0, 100, move |seed| scene(seed, Fault::Heal), alone);
}

#[test]
fn ranks_that_lose_each_other_and_live_go_on_together_but_not_again_and_again() {
    // Ranks 0 and 1 are the first of the first two nodes.
    let blame = |world: &mut World, step| {
        for (node, by, of) in [(0, 0, 1), (1, 1, 0)] {
            let round = RoundId::default();
            let complaint = Complaint {
                round,
                by,
                of,
                step,
            };
            world.give(node, Input::Complaints(vec![complaint]));
        }
    };
    for seed in 0..40 {
        let mut world = running(seed, live_rules(), 3);
        let before = world.whole_round().expect("checked").0.id;
        for step in [7, 8] {
            blame(&mut world, step);
            world.run(world.now + ms(2000));
            let (record, _) = world.whole_round().expect("a round");
            assert_eq!(record.world(), 6, "seed {seed}: {record:?}");
            assert_eq!(record.continues, Some(before), "seed {seed}");
            let is_cut = matches!(record.why, Why::Cut(cut) if cut.step == step);
            assert!(is_cut, "seed {seed}: {record:?}");
        }
        blame(&mut world, 8);
        world.run(world.now + ms(3000));
        let (record, _) = world.whole_round().expect("a round");
        assert!(
            matches!(record.why, Why::Hung(_)),
            "seed {seed}: {record:?}"
        );
    }
}

/// Of a job that takes all of its three nodes.
fn full_rules(max_restarts: u32) -> Rules {
    Rules {
        nodes_min: 3,
        max_restarts,
        ..live_rules()
    }
}

#[test]
fn the_ranks_that_are_left_wait_in_memory_until_there_are_enough_nodes() {
    let all = &[0, 1, 2][..];
    let comes = |after| (after, Fault::Arrive { host: 9 });
    let off = |node| (0, Fault::PowerOff(node));
    let check = |restarts, faults: &dyn Fn(u64) -> Vec<(u64, Fault)>, expect| {
        check_joined(&full_rules(restarts), 0, faults, expect);
    };
    check(0, &|_| vec![off(2), comes(6000)], (&[0, 1, 3], 4, 0));
    let killed = |_| vec![(0, Fault::Kill(0)), (6000, Fault::Return)];
    check(0, &killed, (&[1, 2, 3], 6, 0));
    let healed = |_| vec![(0, Fault::CutOff(vec![2])), (6000, Fault::Heal)];
    check(0, &healed, (all, 6, 0));
    // All ranks of a node, which comes back at the price of a restart.
    check(1, &|_| vec![(0, loses_a_rank(0))], (all, 6, 1));
    // Losses while the others wait, and while the node comes that they wait for.
    let at = |seed: u64| 100 + 120 * seed;
    let rank = |seed| vec![off(2), comes(5000), (at(seed), loses_a_rank(1))];
    check(0, &rank, (&[0, 1, 3], 3, 0));
    // Before that node is left out, the other one alone could be the smaller side.
    let killed = |seed| (5000 + 60 * seed, Fault::Kill(1));
    let two = |seed| vec![off(2), comes(5000), killed(seed), comes(9000)];
    check(0, &two, (&[0, 3, 4], 3, 0));
}

#[test]
fn a_job_that_waits_for_more_nodes_trains_no_further_and_ends_after_its_time() {
    for seed in 0..40 {
        let mut world = running(seed, full_rules(0), 3);
        world.work = ms(1000);
        world.fault(ms(10_000), Fault::PowerOff(2));
        world.run(ms(60_000));
        let (record, _) = world.whole_round().expect("a round");
        assert_eq!(nodes_of(record), [0, 1], "seed {seed}: {record:?}");
        assert!(record.continues.is_some() && world.exits().is_empty());
        world.run(ms(90_000));
        assert_eq!(world.exits().len(), 2, "seed {seed}");
        for exit in world.exits() {
            let Exit::Job(Ending::Lost(why)) = exit else {
                panic!("seed {seed}: {exit:?}");
            };
            let why = why.to_string();
            assert!(why.ends_with("2 of at least 3 nodes came within 60 s"));
        }
    }
}

#[test]
fn a_failure_after_which_nodes_cannot_come_is_the_end() {
    for seed in 0..40 {
        let mut world = running(seed, full_rules(0), 3);
        world.fault(ms(10_000), loses_a_rank(0));
        world.run(ms(30_000));
        let failed = |exit: &&Exit| matches!(exit, Exit::Job(Ending::Failed(_)));
        let exits = world.exits();
        assert!(exits.len() == 3 && exits.iter().all(failed), "{exits:?}");
    }
}

#[test]
fn a_job_that_waits_for_more_nodes_can_be_asked_to_stop() {
    for seed in 0..40 {
        let arrivals = [0, 1, 2].map(|host| (host, ms(400 * host as u64)));
        let mut world = World::new(seed, full_rules(0), ms(12_000), &arrivals);
        world.fault(ms(10_000), Fault::PowerOff(2));
        world.fault(ms(30_000), Fault::Notice(1));
        world.run(ms(40_000));
        let stopped = Exit::Job(Ending::Stopped(NOTICE));
        assert_eq!(world.exits(), [&stopped, &stopped], "seed {seed}");
    }
}

#[test]
fn a_node_whose_ranks_never_join_gives_up_whatever_it_sees_of_the_others() {
    let rules = Rules {
        max_restarts: 2,
        ..live_rules()
    };
    for seed in 0..60 {
        let mut world = running(seed, rules.clone(), 2);
        world.newcomers_die = 100;
        world.fault(ms(10_000), Fault::Arrive { host: 9 });
        world.fault(ms(10_000 + 100 * seed), Fault::CutOff(vec![2]));
        world.fault(ms(25_000), Fault::Heal);
        world.run(ms(40_000));
        // Those that were ended when it was cut off have not failed.
        assert!(world.nodes[2].joins <= 4, "seed {seed}");
        assert_eq!(nodes_of(world.whole_round().expect("a round").0), [0, 1]);
    }
}

#[test]
fn a_node_whose_ranks_have_failed_does_not_come_back_for_free_with_a_round_that_loses_a_member() {
    let rules = live_rules();
    for seed in 0..60 {
        let mut world = running(seed, rules.clone(), 3);
        // So all ranks start again with the newcomer.
        world.admits = false;
        world.fault(ms(10_000), loses_a_rank(0));
        world.fault(ms(15_000), Fault::Arrive { host: 9 });
        world.fault(ms(16_000 + 5 * seed), Fault::PowerOff(2));
        world.run(ms(30_000));
        let (record, _) = world.whole_round().expect("a round");
        assert_eq!(nodes_of(record), [1, 3], "seed {seed}: {record:?}");
    }
}

#[test]
fn a_stopped_agent_is_left_out_within_its_lease() {
    check(&rules(1, 3), 3, &[Fault::Stop(1)], &[0, 2], ms(4500));
}

#[test]
fn a_node_that_is_cut_off_is_left_out_within_its_lease() {
    check(
        &rules(1, 4),
        4,
        &[Fault::CutOff(vec![3])],
        &[0, 1, 2],
        ms(4500),
    );
    check(
        &rules(1, 4),
        4,
        &[Fault::CutOff(vec![2, 3])],
        &[0, 1],
        ms(4500),
    );
}

#[test]
fn two_nodes_that_die_together_are_left_out_together() {
    let both = [Fault::PowerOff(1), Fault::PowerOff(2)];
    check(&rules(1, 5), 5, &both, &[0, 3, 4], ms(4500));
}

#[test]
fn a_store_that_dies_with_its_agent_is_replaced_at_once() {
    check(&rules(1, 3), 3, &[Fault::Kill(0)], &[1, 2], ms(3000));
    check(&rules(1, 2), 2, &[Fault::Kill(0)], &[1], ms(3000));
}

#[test]
fn a_store_that_falls_silent_is_replaced_by_the_greater_part() {
    check(&rules(1, 3), 3, &[Fault::PowerOff(0)], &[1, 2], ms(7000));
    check(&rules(1, 4), 4, &[Fault::Stop(0)], &[1, 2, 3], ms(7000));
    check(
        &rules(1, 5),
        5,
        &[Fault::CutOff(vec![0, 1])],
        &[2, 3, 4],
        ms(7000),
    );
}

#[test]
fn the_stores_agent_and_the_first_candidate_die_together() {
    check(
        &rules(1, 4),
        4,
        &[Fault::Kill(0), Fault::Kill(1)],
        &[2, 3],
        ms(4500),
    );
    check(
        &rules(1, 5),
        5,
        &[Fault::PowerOff(0), Fault::PowerOff(1)],
        &[2, 3, 4],
        ms(9000),
    );
}

#[test]
fn a_spare_steps_in() {
    check(&rules(2, 2), 3, &[Fault::PowerOff(1)], &[0, 2], ms(4500));
}

#[test]
fn a_late_node_joins_at_a_new_round() {
    check(
        &rules(1, 3),
        2,
        &[Fault::Arrive { host: 9 }],
        &[0, 1, 2],
        ms(1500),
    );
}

#[test]
fn a_failed_rank_restarts_the_round_on_all_nodes() {
    let failure = Fault::RankFails {
        node: 1,
        code: 7,
        victims: true,
    };
    check(&rules(3, 3), 3, &[failure], &[0, 1, 2], ms(14_000));
}

#[test]
fn a_healed_node_comes_back_and_the_half_without_the_store_waits() {
    for seed in 0..40 {
        let mut world = running(seed, rules(1, 2), 2);
        world.fault(ms(10_000), Fault::CutOff(vec![1]));
        world.run(ms(30_000));
        let (record, _) = world.whole_round().expect("the store's side goes on");
        assert_eq!(nodes_of(record), [0], "seed {seed}");
        assert!(world.nodes[1].ranks.is_none(), "its ranks are ended");
        assert!(world.nodes[1].exit.is_none(), "it waits");
        world.fault(ms(30_000), Fault::Heal);
        world.run(ms(36_000));
        let (record, _) = world.whole_round().expect("both");
        assert_eq!(nodes_of(record), [0, 1], "seed {seed}");
    }
}

#[test]
fn the_smaller_half_with_the_store_gives_way_and_comes_back() {
    for seed in 0..40 {
        let mut world = running(seed, rules(1, 3), 3);
        world.fault(ms(10_000), Fault::CutOff(vec![0]));
        world.run(ms(20_000));
        let (record, _) = world.whole_round().expect("the greater part goes on");
        assert_eq!(nodes_of(record), [1, 2], "seed {seed}");
        assert!(world.nodes[0].ranks.is_none(), "its ranks are ended");
        world.fault(ms(20_000), Fault::Heal);
        world.run(ms(30_000));
        let (record, _) = world.whole_round().expect("all");
        assert_eq!(record.members.len(), 3, "seed {seed}");
    }
}

#[test]
fn an_agent_started_again_at_the_endpoint_finds_the_job_elsewhere() {
    for seed in 0..40 {
        let mut rules = rules(1, 3);
        rules.last_call = ms(5000);
        let mut world = running(seed, rules, 3);
        world.fault(ms(15_000), Fault::Kill(0));
        world.fault(ms(25_000), Fault::Return);
        world.run(ms(45_000));
        let (record, _) = world.whole_round().expect("one round");
        assert_eq!(nodes_of(record), [1, 2, 3], "seed {seed}");
    }
}

#[test]
fn nodes_that_cannot_go_on_without_the_stores_agent_wait_for_another_at_the_endpoint() {
    for seed in 0..300 {
        let mut world = running(seed, rules(2, 2), 2);
        // Nothing refuses connections there once it has ended.
        world.address_goes = true;
        world.fault(ms(10_000), Fault::Signal(0));
        world.fault(ms(12_000), Fault::Return);
        world.run(ms(14_000));
        let (record, _) = world
            .whole_round()
            .unwrap_or_else(|| panic!("seed {seed}: no round"));
        assert_eq!(nodes_of(record), [1, 2], "seed {seed}");
    }
}

#[test]
fn those_that_are_left_meet_a_newcomer_at_the_endpoint_of_a_silent_store() {
    for seed in 0..300 {
        let mut world = running(seed, rules(2, 3), 3);
        world.fault(ms(10_000), Fault::PowerOff(0));
        world.fault(ms(10_500 + 10 * seed), Fault::Return);
        world.run(ms(20_000));
        let (record, _) = world
            .whole_round()
            .unwrap_or_else(|| panic!("seed {seed}: no round"));
        assert_eq!(nodes_of(record), [1, 2, 3], "seed {seed}");
    }
}

#[test]
fn two_nodes_go_on_when_the_stores_agent_is_killed_and_started_again_at_once() {
    for seed in 0..60 {
        let mut world = running(seed, rules(1, 2), 2);
        world.fault(ms(10_000), Fault::Kill(0));
        world.fault(ms(10_000 + seed), Fault::Return);
        world.run(ms(20_000));
        let (record, _) = world.whole_round().expect("a round");
        assert_eq!(nodes_of(record), [1, 2], "seed {seed}");
    }
}

#[test]
fn a_member_that_dies_while_the_round_forms_is_left_out() {
    for seed in 0..60 {
        let arrivals: Vec<_> = (0..4).map(|host| (host, Duration::ZERO)).collect();
        let mut world = World::new(seed, rules(2, 4), WORK, &arrivals);
        world.fault(ms(1 + seed), Fault::PowerOff(2));
        world.run(ms(10_000));
        let (record, _) = world.whole_round().expect("a round");
        assert_eq!(record.members.len(), 3, "seed {seed}");
    }
}

#[test]
fn fifty_nodes_come_at_once() {
    let arrivals: Vec<_> = (0..50)
        .map(|node| (node / 4, ms((node / 10) as u64)))
        .collect();
    for seed in 0..3 {
        let mut world = World::new(seed, rules(40, 50), WORK, &arrivals);
        world.run(ms(5000));
        let (record, at) = world.whole_round().expect("a round");
        assert_eq!(record.members.len(), 50);
        assert!(at < ms(4000), "seed {seed}: {at:?}");
    }
}

#[test]
fn the_first_failure_of_all_nodes_is_everybodys_cause() {
    let mut right = 0;
    for seed in 0..100 {
        let mut rules = rules(4, 4);
        rules.max_restarts = 0;
        let mut world = running(seed, rules, 4);
        let node = (seed % 4) as usize;
        world.fault(
            ms(10_000),
            Fault::RankFails {
                node,
                code: 7,
                victims: true,
            },
        );
        world.run(ms(40_000));
        assert_eq!(world.exits().len(), 4, "seed {seed}");
        for exit in world.exits() {
            let Exit::Job(Ending::Failed(report)) = exit else {
                panic!("seed {seed}: {exit:?}");
            };
            let other = |also: &&AlsoFailed| also.host == format!("h{node}");
            match report.failure.also.iter().find(other) {
                None => right += 1,
                Some(also) => assert!(!also.is_later(), "seed {seed}: {report:?}"),
            }
            assert_eq!(report.failure.last_lines, ["the last line"], "seed {seed}");
        }
    }
    // Clocks that are a day apart change nothing; ways of many milliseconds leave a few open.
    assert!(right >= 380, "{right} of 400");
}

#[test]
fn of_two_failures_in_one_moment_both_are_named() {
    for seed in 0..40 {
        let mut rules = rules(4, 4);
        rules.max_restarts = 0;
        let mut world = running(seed, rules, 4);
        for node in [seed % 4, (seed + 1 + seed / 20) % 4] {
            let node = node as usize;
            let failure = Fault::RankFails {
                node,
                code: 7,
                victims: false,
            };
            world.fault(ms(10_000), failure);
        }
        world.run(ms(40_000));
        assert_eq!(world.exits().len(), 4, "seed {seed}");
        for exit in world.exits() {
            let Exit::Job(Ending::Failed(report)) = exit else {
                panic!("seed {seed}: {exit:?}");
            };
            let [also] = &report.failure.also[..] else {
                panic!("seed {seed}: {report:?}");
            };
            assert!(!also.is_later(), "seed {seed}: {also:?}");
            assert!(also.bound_us.is_some(), "seed {seed}: {also:?}");
        }
    }
}

#[test]
fn the_budget_is_the_jobs_and_the_last_failure_ends_it() {
    let mut world = running(1, rules(3, 3), 3);
    for k in 0..4 {
        let node = (k % 3) as usize;
        world.fault(
            ms(10_000 + 20_000 * k),
            Fault::RankFails {
                node,
                code: 7,
                victims: false,
            },
        );
    }
    world.run(ms(120_000));
    assert_eq!(world.started.len(), 4, "three restarts");
    let last = world.started.values().last().expect("a round");
    assert_eq!(last.record.restarts, 3);
    assert!(matches!(last.record.why, Why::Failure(_)));
    assert_eq!(world.exits().len(), 3);
    for exit in world.exits() {
        assert!(matches!(exit, Exit::Job(Ending::Failed(_))), "{exit:?}");
    }
}

#[test]
fn nodes_that_do_not_come_end_the_job_with_a_clear_word() {
    let arrivals = [(0, Duration::ZERO), (1, ms(100))];
    let mut world = World::new(7, rules(3, 4), WORK, &arrivals);
    world.run(ms(120_000));
    assert_eq!(world.exits().len(), 2);
    for exit in world.exits() {
        let Exit::Job(Ending::TooFew(why)) = exit else {
            panic!("{exit:?}");
        };
        assert_eq!(why.to_string(), "2 of at least 3 nodes came within 60 s");
    }
}

#[test]
fn a_static_job_ends_when_a_node_is_lost() {
    let mut rules = rules(3, 3);
    rules.is_static = true;
    let mut world = running(3, rules, 3);
    let (record, _) = world.whole_round().expect("a round");
    assert!(matches!(record.phase, Phase::Running(_)));
    world.fault(ms(10_000), Fault::PowerOff(2));
    world.run(ms(30_000));
    assert_eq!(world.exits().len(), 2);
    for exit in world.exits() {
        let Exit::Job(Ending::Lost(why)) = exit else {
            panic!("{exit:?}");
        };
        assert!(
            why.to_string()
                .starts_with("host h2 has given no sign of life for 3."),
            "{why}"
        );
    }
}

#[test]
fn a_signalled_agent_leaves_at_once_and_the_others_go_on() {
    check(&rules(1, 3), 3, &[Fault::Signal(1)], &[0, 2], ms(12_000));
    check(&rules(1, 3), 3, &[Fault::Signal(0)], &[1, 2], ms(12_000));
}
