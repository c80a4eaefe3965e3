//! All algorithms on all worlds, shapes of hosts and lengths around a line; and plans that are wrong on purpose.

use std::sync::Arc;

use super::*;
use crate::plan::choose::fit;
use crate::plan::{Algorithm, Hosts, Kind, Planner, Round, Whose};

const PRIMES_AND_LINES: [usize; 9] = [0, 1, 3, 7, 15, 16, 17, 64, 97];

/// Lengths for a world: all of them for small ones, around a line for each rank for large ones.
fn lengths(world: usize) -> Vec<usize> {
    match world {
        ..=9 => PRIMES_AND_LINES.to_vec(),
        10..=20 => vec![1, 3, 4 * world + 1],
        _ => vec![3, 2 * world + 1],
    }
}

fn roots(world: usize) -> Vec<usize> {
    match world {
        ..=5 => (0..world).collect(),
        _ => vec![0, world / 2 + 1, world - 1],
    }
}

fn hosts(sizes: &[usize]) -> Hosts {
    let host = |(host, size): (usize, &usize)| std::iter::repeat_n(host, *size);
    Hosts::new(sizes.iter().enumerate().flat_map(host).collect())
}

/// Shapes of hosts for a world, mixed ones among them.
fn shapes(world: usize) -> Vec<Hosts> {
    let mut shapes = vec![Hosts::one(world), Hosts::apart(world)];
    let mixed: &[&[usize]] = &[
        &[2, 1],
        &[2, 2],
        &[3, 1],
        &[1, 3],
        &[1, 1, 2],
        &[2, 3],
        &[2, 2, 2],
        &[3, 1, 2],
        &[3, 3, 1],
        &[2, 4, 2],
        &[4, 4],
        &[5, 3],
        &[3, 3, 3],
        &[6, 5],
        &[4, 4, 4],
        &[5, 5, 4],
        &[4, 4, 4, 4],
        &[7, 8, 8],
        &[16, 16],
        &[8, 8, 8, 8, 8, 8, 8, 8],
    ];
    let fits = |sizes: &&&[usize]| sizes.iter().sum::<usize>() == world;
    shapes.extend(mixed.iter().filter(fits).map(|sizes| hosts(sizes)));
    if world == 4 {
        shapes.push(Hosts::new(vec![0, 1, 0, 1]));
    }
    shapes
}

/// Runs all algorithms that fit on every shape of hosts; returns how many runs there were.
fn check_all(tree: &Arc<Tree>, patterns: &[Pattern], lines: &[usize]) -> usize {
    let mut runs = 0;
    for hosts in shapes(tree.world()) {
        let hosts = Arc::new(hosts);
        for pattern in patterns {
            for algorithm in Algorithm::ALL {
                if fit(algorithm, pattern.kind, tree, &hosts).is_err() {
                    continue;
                }
                for line in lines {
                    let spec = Spec {
                        pattern: pattern.clone(),
                        algorithm,
                        tree: tree.clone(),
                        hosts: hosts.clone(),
                        line: *line,
                    };
                    check(&spec).unwrap_or_else(|error| panic!("{error}"));
                    runs += 1;
                }
            }
        }
    }
    runs
}

fn counts(world: usize) -> Vec<Counts> {
    let uneven = (0..world).map(|rank| (rank * 7 + 3) % 5).collect();
    let mut counts = vec![Counts::Same(3), Counts::Each(uneven)];
    if world <= 20 {
        counts.extend([Counts::Same(0), Counts::Same(1), Counts::Same(17)]);
    }
    counts
}

#[test]
fn all_reduces_follow_the_tree() {
    for world in 1..=64 {
        let tree = Tree::per_rank(world);
        let all: Vec<_> = lengths(world)
            .into_iter()
            .map(|len| Pattern::new(Kind::AllReduce, len))
            .collect();
        let lines: &[usize] = if world <= 9 { &[1, 4, 16] } else { &[1] };
        check_all(&tree, &all, lines);
    }
}

#[test]
fn all_reduces_of_several_blocks_follow_the_tree() {
    for world in 1..=16 {
        for leaves in [world + 1, world + 2, 2 * world - 1, 2 * world, 3 * world] {
            let tree = Tree::split(leaves.max(world), world).unwrap();
            let lengths = [1, 33].map(|len| Pattern::new(Kind::AllReduce, len));
            check_all(&tree, &lengths, &[4]);
        }
    }
}

#[test]
fn reduces_follow_the_tree_to_every_root() {
    for world in 1..=64 {
        let tree = Tree::per_rank(world);
        for root in roots(world) {
            let reduce = |len| Pattern::rooted(Kind::Reduce, len, root);
            let all: Vec<_> = lengths(world).into_iter().map(reduce).collect();
            check_all(&tree, &all, &[4]);
        }
    }
}

#[test]
fn broadcasts_reach_all_ranks_from_every_root() {
    for world in 1..=64 {
        let tree = Tree::per_rank(world);
        for root in roots(world) {
            let broadcast = |len| Pattern::rooted(Kind::Broadcast, len, root);
            let all: Vec<_> = lengths(world).into_iter().map(broadcast).collect();
            check_all(&tree, &all, &[4]);
        }
    }
}

#[test]
fn all_gathers_give_all_ranks_all_slots() {
    for world in 1..=64 {
        let gather = |counts| Pattern::new(Kind::AllGather, counts);
        let all: Vec<_> = counts(world).into_iter().map(gather).collect();
        check_all(&Tree::per_rank(world), &all, &[4]);
    }
}

#[test]
fn reduce_scatters_follow_the_tree_and_keep_their_inputs() {
    for world in 1..=64 {
        let scatter = |counts| Pattern::new(Kind::ReduceScatter, counts);
        let all: Vec<_> = counts(world).into_iter().map(scatter).collect();
        check_all(&Tree::per_rank(world), &all, &[4]);
    }
}

#[test]
fn reduce_scatters_of_several_blocks_follow_the_tree() {
    for world in 1..=64 {
        for leaves in [world + 1, 2 * world - 1, 3 * world] {
            let tree = Tree::split(leaves.max(world), world).unwrap();
            let uneven = (0..world).map(|rank| (rank * 7 + 3) % 5).collect();
            let counts = [Counts::Same(5), Counts::Each(uneven)];
            let all = counts.map(|counts| Pattern::new(Kind::ReduceScatter, counts));
            check_all(&tree, &all, &[4]);
        }
    }
}

#[test]
fn gathers_scatters_and_exchanges_move_every_slot() {
    for world in 1..=64 {
        let mut all = vec![Pattern::new(Kind::Barrier, 0)];
        for counts in counts(world) {
            for root in roots(world) {
                let counts = counts.clone();
                all.push(Pattern::rooted(Kind::Gather, counts.clone(), root));
                all.push(Pattern::rooted(Kind::Scatter, counts, root));
            }
        }
        let pairs = (0..world * world).map(|pair| (pair * 5 + 2) % 4).collect();
        for counts in [Counts::Same(2), Counts::Each(pairs)] {
            all.push(Pattern::new(Kind::AllToAll, counts));
        }
        check_all(&Tree::per_rank(world), &all, &[1]);
    }
}

fn spec(algorithm: Algorithm, pattern: Pattern, hosts: Hosts, world: usize) -> Spec {
    Spec {
        pattern,
        algorithm,
        tree: Tree::per_rank(world),
        hosts: Arc::new(hosts),
        line: 4,
    }
}

#[test]
fn an_algorithm_that_does_not_fit_gives_the_plans_of_direct_exchange() {
    let pattern = Pattern::new(Kind::AllReduce, 24);
    let asked = spec(Algorithm::Hierarchical, pattern.clone(), Hosts::one(3), 3);
    let direct = spec(Algorithm::Direct, pattern, Hosts::one(3), 3);
    assert_eq!(Plan::all(&asked), Plan::all(&direct));
}

#[test]
fn a_rank_makes_the_plan_that_it_has_among_those_of_all() {
    for algorithm in Algorithm::ALL {
        let spec = spec(
            algorithm,
            Pattern::new(Kind::AllReduce, 50),
            hosts(&[2, 4, 2]),
            8,
        );
        let all = Plan::all(&spec);
        for (rank, plan) in all.iter().enumerate() {
            assert_eq!(*plan, Plan::new(&spec, rank));
        }
    }
}

#[test]
fn only_the_ring_adds_in_another_order() {
    for (algorithm, same) in [(Algorithm::Ring, false), (Algorithm::Tree, true)] {
        let spec = spec(
            algorithm,
            Pattern::new(Kind::AllReduce, 16),
            Hosts::apart(4),
            4,
        );
        let plans = Plan::all(&spec);
        let simulation = Simulation::run(&spec, &plans, Links::Streams).unwrap();
        let want = Expected::default().sums(&spec, 0, 16);
        let got = simulation.memory[0].slot(Space::Out, 0);
        assert_eq!(got == want, same, "{algorithm}");
    }
}

/// Spoils the plans of a sound specification; the error that the simulation finds.
fn spoiled(
    algorithm: Algorithm,
    pattern: Pattern,
    hosts: Hosts,
    links: Links,
    spoil: impl Fn(&mut Vec<Plan>),
) -> String {
    let spec = spec(algorithm, pattern, hosts, 4);
    assert_eq!(check(&spec), Ok(()));
    let mut plans = Plan::all(&spec);
    spoil(&mut plans);
    Simulation::run(&spec, &plans, links)
        .and_then(|simulation| verify(&simulation, &mut Expected::default()))
        .unwrap_err()
}

#[test]
fn spoiled_plans_are_noticed() {
    let sum = || Pattern::new(Kind::AllReduce, 32);
    let (one, apart) = (|| Hosts::one(4), || Hosts::apart(4));
    let error = spoiled(Algorithm::Direct, sum(), one(), Links::Memory, |plans| {
        plans[1].rounds[0].tasks[0].inputs.swap(0, 1);
    });
    assert_eq!(error, "slot 0 of rank 0 is wrong");

    let error = spoiled(Algorithm::OneShot, sum(), one(), Links::Memory, |plans| {
        plans[2].lends_copies = false;
    });
    assert!(error.contains("while it is written"), "{error}");

    let error = spoiled(Algorithm::Tree, sum(), apart(), Links::Streams, |plans| {
        plans[0].rounds[0].tasks.clear();
    });
    assert!(
        error.contains("is lent what it does not read") || error.contains("waits"),
        "{error}"
    );

    let gathered = Pattern::new(Kind::AllGather, Counts::Each([1, 2, 3, 4].into()));
    let error = spoiled(
        Algorithm::Ring,
        gathered,
        apart(),
        Links::Streams,
        |plans| plans[2].lends[1][0].len = 1,
    );
    assert!(error.contains("expects"), "{error}");

    let error = spoiled(Algorithm::Direct, sum(), one(), Links::Memory, |plans| {
        let round = plans[0].rounds[0].clone();
        plans[1].rounds[0] = round;
    });
    assert!(error.contains("two tasks write"), "{error}");
}

/// Runs the rounds of a plan twice, one after the other; the error that the simulation finds.
fn repeated(algorithm: Algorithm) -> String {
    let spec = spec(
        algorithm,
        Pattern::new(Kind::AllReduce, 32),
        Hosts::one(4),
        4,
    );
    let mut plans = Plan::all(&spec);
    for plan in &mut plans {
        plan.rounds.push(plan.rounds[0].clone());
        plan.lends.push(plan.lends[0].clone());
        plan.gets.push(plan.gets[0].clone());
    }
    let run = Simulation::run(&spec, &plans, Links::Memory);
    run.err().unwrap_or_default()
}

#[test]
fn copies_are_not_renewed_while_they_are_in_use() {
    let error = repeated(Algorithm::Direct);
    assert!(
        error.contains("stored by a peer one round before"),
        "{error}"
    );
    let error = repeated(Algorithm::OneShot);
    assert!(error.contains("read by a peer one round before"), "{error}");
}

#[test]
fn scratch_memory_is_out_of_reach_on_a_host() {
    let counts = Counts::Same(4);
    let ring = |hosts| {
        spec(
            Algorithm::Ring,
            Pattern::new(Kind::ReduceScatter, counts.clone()),
            hosts,
            4,
        )
    };
    let plans = Plan::all(&ring(Hosts::apart(4)));
    let together = ring(Hosts::one(4));
    let run = Simulation::run(&together, &plans, Links::Memory);
    let error = run.err().unwrap_or_default();
    assert!(error.contains("reaches into scratch memory"), "{error}");
}

#[test]
fn every_algorithm_is_run_for_every_operation_that_has_it() {
    let tree = Tree::per_rank(4);
    let mut pairs = 0;
    for kind in Kind::ALL {
        for algorithm in Algorithm::ALL {
            let mut shapes = shapes(4).into_iter();
            pairs += usize::from(shapes.any(|hosts| fit(algorithm, kind, &tree, &hosts).is_ok()));
        }
    }
    assert_eq!(pairs, 22);
}

#[test]
fn only_one_shot_lends_copies() {
    for algorithm in Algorithm::ALL {
        let spec = spec(
            algorithm,
            Pattern::new(Kind::AllReduce, 50),
            hosts(&[2, 2]),
            4,
        );
        for plan in Plan::all(&spec) {
            assert_eq!(plan.lends_copies, algorithm == Algorithm::OneShot);
        }
    }
}

/// Also where a rank has no part in it: who needs no second meeting must be the same everywhere.
#[test]
fn one_pull_is_one_round_in_which_nobody_stores_at_others() {
    let (counts, root) = (|| Counts::Same(2), 1);
    for pattern in [
        Pattern::new(Kind::AllReduce, 3),
        Pattern::rooted(Kind::Reduce, 3, root),
        Pattern::rooted(Kind::Broadcast, 3, root),
        Pattern::new(Kind::AllGather, counts()),
        Pattern::new(Kind::ReduceScatter, counts()),
        Pattern::rooted(Kind::Gather, counts(), root),
        Pattern::new(Kind::AllToAll, counts()),
    ] {
        for algorithm in Algorithm::ALL {
            for hosts in [Hosts::one(4), Hosts::apart(4), hosts(&[2, 2])] {
                let spec = spec(algorithm, pattern.clone(), hosts, 4);
                let plans = Plan::all(&spec);
                let pulls = |plan: &Plan| plan.gets.iter().all(Vec::is_empty);
                let one = plans
                    .iter()
                    .all(|plan| plan.rounds.len() == 1 && pulls(plan));
                assert!(!spec.is_one_pull() || one, "{algorithm} {pattern:?}");
                if algorithm.rounds_once() {
                    assert_eq!(spec.is_one_pull(), one, "{algorithm} {pattern:?}");
                }
            }
        }
    }
}

/// With the places of all ranks, of which one has a linear number, they would grow with the square.
#[test]
fn the_places_that_a_rank_makes_plans_of_grow_with_the_world() {
    let world = 2048;
    let tree = Tree::per_rank(world);
    let places = |rounds: &[Round]| -> usize {
        let tasks = rounds.iter().flat_map(|round| &round.tasks);
        tasks
            .map(|task| task.inputs.len() + task.outputs.len())
            .sum()
    };
    let by_8 = Hosts::new((0..world).map(|rank| rank / 8).collect());
    for hosts in [Hosts::one(world), Hosts::apart(world), by_8] {
        let hosts = Arc::new(hosts);
        for kind in Kind::ALL {
            for algorithm in Algorithm::ALL {
                if fit(algorithm, kind, &tree, &hosts).is_err() {
                    continue;
                }
                let spec = Spec {
                    pattern: Pattern::new(kind, 3 * world),
                    algorithm,
                    tree: tree.clone(),
                    hosts: hosts.clone(),
                    line: 1,
                };
                let (planner, rank) = (Planner::new(&spec), world / 2);
                let dealers = (0..world).filter(|peer| planner.deals(*peer, rank));
                let theirs = dealers.map(|peer| planner.rounds(peer, Whose::Rank(rank)));
                let made: usize = theirs.map(|(rounds, _)| places(&rounds)).sum();
                assert!(made <= 40 * world, "{kind:?} by {algorithm}: {made}");
            }
        }
    }
}
