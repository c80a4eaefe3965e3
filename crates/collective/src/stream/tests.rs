//! Threads as ranks over real sockets, against a simulation of their plans in one memory.

mod failures;
mod job;

use std::sync::atomic::{AtomicUsize, Ordering};

use self::job::{
    Job, LONG, header, spot, status, task, tcp_pair, tls_pair, unix_pair, wait, wires,
};
use super::*;
use crate::mpi::tests::pair as mpi_pair;
use crate::plan::{Algorithm, Counts, Hosts, Kind, Pattern, Space};
use crate::socket::Socket;

fn patterns(len: usize, world: usize) -> Vec<Pattern> {
    let each = |many: usize| Counts::Each((0..many).map(|i| len * ((i + 1) % 3)).collect());
    let root = world - 1;
    vec![
        Pattern::new(Kind::AllReduce, len),
        Pattern::rooted(Kind::Reduce, len, root),
        Pattern::rooted(Kind::Broadcast, len, 0),
        Pattern::new(Kind::AllGather, Counts::Same(len)),
        Pattern::new(Kind::AllGather, each(world)),
        Pattern::new(Kind::ReduceScatter, each(world)),
        Pattern::rooted(Kind::Gather, each(world), root),
        Pattern::rooted(Kind::Scatter, Counts::Same(len), root),
        Pattern::new(Kind::AllToAll, Counts::Same(len)),
        Pattern::new(Kind::AllToAll, each(world * world)),
    ]
}

#[test]
fn every_pattern_over_every_number_of_lanes_means_what_the_plan_says() {
    for (world, lanes, len) in [
        (2, 1, 1),
        (2, 2, 70_001),
        (3, 3, 33_000),
        (4, 4, 12),
        (5, 1, 20_000),
    ] {
        for pattern in patterns(len, world) {
            for algorithm in [Algorithm::Direct, Algorithm::OneShot] {
                let words = format!("{pattern:?} {algorithm:?} of {world}");
                let job = Job::new(
                    pattern.clone(),
                    algorithm,
                    world,
                    Hosts::apart(world),
                    world,
                );
                job.check(lanes, unix_pair, &words);
                job.check(1, mpi_pair, &format!("{words} over MPI"));
            }
        }
    }
}

#[test]
fn lengths_around_the_bounds_of_pieces_and_portions() {
    for len in [
        8191,
        8192,
        8193,
        4 * 8192 + 1,
        65_536,
        262_144,
        262_145,
        600_000,
    ] {
        for lanes in [1, 2, 4] {
            for pattern in [
                Pattern::new(Kind::AllReduce, len),
                Pattern::rooted(Kind::Reduce, len, 0),
            ] {
                let job = Job::new(pattern, Algorithm::Direct, 2, Hosts::apart(2), 2);
                job.check(lanes, tcp_pair, &format!("{len} elements"));
                job.check(lanes, tls_pair, &format!("{len} elements through TLS"));
                job.check(lanes, mpi_pair, &format!("{len} elements over MPI"));
            }
        }
    }
}

#[test]
fn ranks_with_several_blocks_and_ranks_that_share_memory_take_part() {
    for (leaves, world, host) in [
        (7, 3, vec![0, 1, 2]),
        (4, 4, vec![0, 0, 1, 1]),
        (11, 5, vec![0, 1, 1, 0, 2]),
    ] {
        for len in [5, 50_000] {
            for algorithm in [Algorithm::Direct, Algorithm::OneShot] {
                let hosts = Hosts::new(host.clone());
                let job = Job::new(
                    Pattern::new(Kind::AllReduce, len),
                    algorithm,
                    leaves,
                    hosts,
                    world,
                );
                job.check(
                    2,
                    unix_pair,
                    &format!("{len} elements of {leaves} leaves on {world}"),
                );
            }
        }
    }
}

#[test]
fn results_are_pushed_and_copies_passed_on_without_a_place_of_their_own() {
    use Space::{In, Out, Temp};
    for len in [3, 400_000] {
        let rounds = vec![
            vec![
                // A copy pushed out of own memory, and a fold whose result is nowhere here.
                vec![task(len, vec![spot(0, In)], vec![spot(2, Out)])],
                vec![task(
                    len,
                    vec![spot(0, In), spot(1, In), spot(2, In)],
                    vec![spot(0, Out)],
                )],
                // Passed on from rank 0 to rank 1, through a ring alone.
                vec![task(len, vec![spot(0, In)], vec![spot(1, Out)])],
            ],
            vec![
                // Kept and passed on.
                vec![task(
                    len,
                    vec![spot(1, Out)],
                    vec![spot(0, Temp), spot(2, Temp)],
                )],
                vec![],
                // To two others at once.
                vec![task(
                    len,
                    vec![spot(0, In), spot(1, In)],
                    vec![spot(0, Out), spot(1, Temp)],
                )],
            ],
        ];
        for lanes in [1, 3] {
            Job::of_tasks(rounds.clone(), len).check(lanes, unix_pair, &format!("{len} elements"));
        }
    }
}

#[test]
fn ranks_that_all_push_through_rings_do_not_wait_in_a_circle() {
    use Space::{In, Out};
    let len = 1_500_000;
    let world = 3;
    // Everybody folds for somebody else, and nobody keeps anything.
    let tasks = |rank: usize| {
        let inputs = (0..world).map(|rank| spot(rank, In)).collect();
        vec![task(len, inputs, vec![spot((rank + 1) % world, Out)])]
    };
    let job = Job::of_tasks(vec![(0..world).map(tasks).collect()], len);
    job.check(1, unix_pair, "a ring of results");
}

#[test]
fn a_large_world_speaks_only_where_there_is_something_to_say() {
    let world = COMPARED_WORLD_MAX + 2;
    for pattern in [
        Pattern::rooted(Kind::Broadcast, 100, 3),
        Pattern::new(Kind::AllReduce, 40),
    ] {
        let words = format!("{pattern:?}");
        let job = Job::new(
            pattern,
            Algorithm::Direct,
            world,
            Hosts::apart(world),
            world,
        );
        job.check(1, unix_pair, &words);
    }
}

#[test]
fn scratch_memory_holds_pieces_and_not_the_message() {
    let len = 4 << 20;
    let job = Job::new(
        Pattern::new(Kind::AllReduce, len),
        Algorithm::Direct,
        2,
        Hosts::apart(2),
        2,
    );
    let (_, streams) = job.run(1, unix_pair, 1);
    for streams in streams {
        let bytes = streams.board.scratch_bytes();
        assert!((1..=1 << 20).contains(&bytes), "{bytes} bytes");
    }
}

#[test]
fn a_meeting_ends_when_all_have_come() {
    let world = 4;
    let came = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for (rank, sockets) in wires(&Hosts::apart(world), world, 1, unix_pair)
            .into_iter()
            .enumerate()
        {
            let came = &came;
            scope.spawn(move || {
                let mut streams = Streams::new(rank, sockets).unwrap();
                let (status, header) = (status(rank, world), header(0, world));
                for turn in 1..=3 {
                    came.fetch_add(1, Ordering::SeqCst);
                    streams
                        .meet(&header, Runner::CommThread, &wait(&status, &header, LONG))
                        .unwrap();
                    assert!(came.load(Ordering::SeqCst) >= turn * world);
                }
            });
        }
    });
}

#[test]
fn missing_and_too_many_connections_are_refused() {
    let pairs: Vec<_> = (0..LANES_MAX + 1).map(|_| unix_pair()).collect();
    let mut kept = Vec::new();
    let mut sockets: Vec<Vec<Option<Socket>>> = Vec::new();
    for (ours, theirs) in pairs {
        kept.push(theirs);
        sockets.push(vec![None, Some(ours)]);
    }
    assert!(Streams::new(0, sockets).is_err());
    assert!(Streams::new(0, Vec::<Vec<Option<Socket>>>::new()).is_err());
    let uneven = vec![vec![None, Some(unix_pair().0)], vec![None, None]];
    assert!(Streams::new(0, uneven).is_err());
}
