//! How what a rank does by itself grows with the world, to 10,000 ranks and beyond what one machine can start. By hand:
//! `cargo test -p paceline-collective --release growth -- --ignored --nocapture`.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use crate::bootstrap::simulated;
use crate::error::Ranks;
use crate::plan::{Algorithm, Hosts, Kind, Pattern, Plan, Spec};
use crate::settle::{Place, Standing, settle};
use crate::tree::Tree;

const WORLDS: [usize; 4] = [8, 128, 1_000, 10_000];
/// Ranks of a host, where there are several.
const MATES: usize = 8;

/// Milliseconds of the fastest of some runs.
fn milliseconds<T>(mut run: impl FnMut() -> T) -> f64 {
    let once = |_| {
        let started = Instant::now();
        black_box(run());
        started.elapsed().as_secs_f64() * 1e3
    };
    (0..3).map(once).fold(f64::MAX, f64::min)
}

fn row(what: &str, of_world: impl Fn(usize) -> f64) {
    let cells = WORLDS.map(|world| format!("{:.3}", of_world(world)));
    println!("| {what} | {} |", cells.join(" | "));
}

fn plan(kind: Kind, algorithm: Algorithm, mates: usize) -> impl Fn(usize) -> f64 {
    move |world| {
        let spec = Spec {
            pattern: Pattern::new(kind, 64 * world),
            algorithm,
            tree: Tree::per_rank(world),
            hosts: Arc::new(Hosts::new((0..world).map(|rank| rank / mates).collect())),
            line: 16,
        };
        milliseconds(|| Plan::new(&spec, world / 2))
    }
}

#[test]
#[ignore = "measures; by hand"]
fn what_a_rank_does_by_itself() {
    println!(
        "| ms | {} |",
        WORLDS.map(|world| world.to_string()).join(" | ")
    );
    println!("|---|{}", "---|".repeat(WORLDS.len()));
    row("records of all ranks, hosts", |world| {
        let records = simulated(world, MATES);
        milliseconds(|| records.hosts())
    });
    row("tree", |world| milliseconds(|| Tree::per_rank(world)));
    row(
        "all-reduce, direct",
        plan(Kind::AllReduce, Algorithm::Direct, 1),
    );
    row(
        "all-reduce, tree",
        plan(Kind::AllReduce, Algorithm::Tree, 1),
    );
    row(
        "all-reduce, ring",
        plan(Kind::AllReduce, Algorithm::Ring, 1),
    );
    let by_hosts = |kind| plan(kind, Algorithm::Hierarchical, MATES);
    row("all-reduce, hierarchical", by_hosts(Kind::AllReduce));
    row(
        "all-gather, direct",
        plan(Kind::AllGather, Algorithm::Direct, 1),
    );
    row("all-gather, hierarchical", by_hosts(Kind::AllGather));
    row(
        "reduce-scatter, direct",
        plan(Kind::ReduceScatter, Algorithm::Direct, 1),
    );
    row(
        "reduce-scatter, hierarchical",
        by_hosts(Kind::ReduceScatter),
    );
    row("settling after a loss", |world| {
        let standing = |rank| Standing {
            place: if rank % 100 == 99 {
                Place::New
            } else {
                Place::Within
            },
            completed: 7 + u64::from(rank < world / 2),
        };
        let all: Vec<Standing> = (0..world).map(standing).collect();
        milliseconds(|| settle(&all))
    });
    row("naming all ranks but one", |world| {
        let ranks: Vec<usize> = (0..world).filter(|rank| *rank != world / 2).collect();
        milliseconds(|| Ranks(&ranks).to_string())
    });
}
