//! Hundreds of schedules of everything that can go wrong, from seeds; `PACELINE_SIMULATION_SEEDS` says how many.

use super::*;
use crate::elastic::record::Ending;

/// All faults fall before this.
const CALM: Duration = ms(60_000);
/// Everything is over by then: the longest wait for others, several times.
const END: Duration = ms(600_000);

#[test]
fn every_schedule_keeps_the_promises_and_ends() {
    check_all(false);
}

#[test]
fn every_schedule_with_a_store_outside_of_the_job_keeps_the_promises_and_ends() {
    check_all(true);
}

fn check_all(is_outside: bool) {
    let seeds = std::env::var("PACELINE_SIMULATION_SEEDS");
    let seeds = seeds.ok().and_then(|text| text.parse().ok());
    // A soak takes thousands.
    for seed in 0..seeds.unwrap_or(500) {
        let outcome = std::panic::catch_unwind(|| check(seed, is_outside));
        if let Err(panic) = outcome {
            eprintln!("schedule {seed} broke a promise; store outside of the job: {is_outside}");
            std::panic::resume_unwind(panic);
        }
    }
}

fn check(seed: u64, is_outside: bool) {
    let mut dice = Dice(seed ^ 0x5eed);
    let nodes = 2 + dice.below(6) as usize;
    let nodes_min = 1 + dice.below(nodes as u64 / 2 + 1) as usize;
    let nodes_max = nodes_min + dice.below((nodes - nodes_min) as u64 + 2) as usize;
    let mut rules = rules(nodes_min, nodes_max);
    rules.max_restarts = dice.below(4) as u32;
    rules.outage = is_outside.then_some(ms(15_000));
    rules.recovers_live = seed % 2 == 1;
    let hosts = 1 + dice.below(nodes as u64);
    let arrivals: Vec<_> = (0..nodes as u64)
        .map(|node| {
            let late = dice.chance(25);
            let at = if late {
                dice.below(30_000)
            } else {
                dice.below(500)
            };
            (
                (node % hosts) as usize,
                if node == 0 { Duration::ZERO } else { ms(at) },
            )
        })
        .collect();
    let work = ms(2000 + dice.below(60_000));
    let mut world = World::new(seed, rules, work, &arrivals);
    world.slow_ends = true;
    world.some_are_unable = true;
    world.newcomers_die = 25;
    world.admits = seed % 8 != 1;
    // Faults name agents by the order in which they come.
    let mut struck = BTreeSet::new();
    for _ in 0..dice.below(6) {
        let at = ms(dice.below(CALM.as_millis() as u64));
        let node = dice.below(nodes as u64) as usize;
        match dice.below(9) {
            0 if struck.len() + 1 < nodes && struck.insert(node) => {
                world.fault(at, Fault::Kill(node));
                if dice.chance(50) {
                    let host = arrivals[node].0;
                    world.fault(at + ms(dice.below(20_000)), Fault::Arrive { host });
                }
            }
            1 if struck.len() + 1 < nodes && struck.insert(node) => {
                world.fault(at, Fault::PowerOff(node))
            }
            2 => {
                world.fault(at, Fault::Stop(node));
                world.fault(at + ms(dice.below(20_000)), Fault::Continue(node));
            }
            3 | 4 => {
                let cut: Vec<_> = (0..nodes).filter(|_| dice.chance(40)).collect();
                world.fault(at, Fault::CutOff(cut));
                world.fault(at + ms(dice.below(25_000)), Fault::Heal);
            }
            5 | 6 => world.fault(
                at,
                Fault::RankFails {
                    node,
                    code: 7,
                    victims: dice.chance(50),
                },
            ),
            7 => world.fault(at, Fault::Notice(node)),
            _ => world.fault(at, Fault::Signal(node)),
        }
    }
    for _ in 0..if is_outside { dice.below(3) } else { 0 } {
        let at = ms(dice.below(CALM.as_millis() as u64));
        world.fault(at, Fault::StoreDown);
        // Not empty: an agent that comes for the first time cannot know that there is a job.
        let up = Fault::StoreUp { empty: false };
        world.fault(at + ms(dice.below(25_000)), up);
    }
    world.fault(CALM + ms(25_000), Fault::Heal);
    world.run(END);
    for (place, node) in world.nodes.iter().enumerate() {
        assert!(
            node.exit.is_some() || !node.alive,
            "node {place} of {nodes} (min {nodes_min}, max {nodes_max}) has not ended: {:#?}",
            node.agent
        );
    }
    // All agents that know how a round ended agree on it. (Nodes that could not be told of the end may run the job again.)
    let mut endings = BTreeMap::new();
    for node in &world.nodes {
        let ending = match &node.exit {
            Some((_, Exit::Job(Ending::Finished))) => None,
            Some((_, Exit::Job(Ending::Failed(report)))) => Some(report.failure.rank),
            _ => continue,
        };
        let round = node.agent.memory().map(|record| record.id);
        let first = endings.entry(round).or_insert(ending);
        assert_eq!(*first, ending, "round {round:?}");
    }
}
