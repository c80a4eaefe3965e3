//! Threads as ranks over real sockets, against a simulation of their plans in one memory.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Barrier};

use paceline_rendezvous::page::JobPage;

use super::*;
use crate::element::{DType, ReduceOp};
use crate::error::{OpKind, Operation};
use crate::plan::{Algorithm, Counts, Hosts, Layout, Pattern, Round, Share, Space, Spec};
use crate::status::{PeerInfo, Status};
use crate::tree::Tree;

/// By rank, lane and peer.
type Wires = Vec<Vec<Vec<Option<Socket>>>>;

fn unix_pair() -> (Socket, Socket) {
    let (a, b) = UnixStream::pair().unwrap();
    (Socket::Unix(a), Socket::Unix(b))
}

fn tcp_pair() -> (Socket, Socket) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let dialed = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (
        Socket::Tcp(dialed),
        Socket::Tcp(listener.accept().unwrap().0),
    )
}

/// Connects the ranks of different hosts.
fn wires(hosts: &Hosts, world: usize, lanes: usize, pair: fn() -> (Socket, Socket)) -> Wires {
    let nobody = || (0..world).map(|_| None).collect();
    let mut wires: Wires = (0..world)
        .map(|_| (0..lanes).map(|_| nobody()).collect())
        .collect();
    for a in 0..world {
        for b in (a + 1..world).filter(|b| hosts.host(a) != hosts.host(*b)) {
            for lane in 0..lanes {
                let (to_b, to_a) = pair();
                wires[a][lane][b] = Some(to_b);
                wires[b][lane][a] = Some(to_a);
            }
        }
    }
    wires
}

fn header(total: usize, world: usize) -> Header {
    Header {
        operation: Operation {
            kind: OpKind::AllReduce,
            seq: 1,
            bucket: None,
        },
        reduce: Some(ReduceOp::Sum),
        dtype: Some(DType::F32),
        total,
        first: 0,
        piece: total,
        mark: 0,
        leaves: world as u32,
    }
}

fn status(rank: usize, world: usize) -> Status {
    let page = JobPage::private(world).unwrap();
    let slot = page.slot(rank);
    let peer = PeerInfo {
        host: "b".into(),
        pid: 7,
        slot: None,
    };
    Status::new(rank, vec![peer; world], page, slot)
}

fn vigil<'a>(status: &'a Status, header: &Header, limit: Duration) -> Vigil<'a> {
    Vigil {
        status,
        operation: header.operation,
        started: Instant::now(),
        timeout: limit,
    }
}

const LONG: Duration = Duration::from_secs(60);

/// One rank's memory. Spaces `In`, `Out` and `Temp`, each a row of slots.
#[derive(Debug, Clone, PartialEq)]
struct Rows {
    spaces: [Vec<u32>; 3],
    layouts: [Layout; 3],
    in_place: bool,
}

impl Rows {
    fn index(&self, place: Place) -> (usize, usize) {
        let space = match place.space {
            Space::Out if !self.in_place => 1,
            Space::In | Space::Out => 0,
            Space::Temp => 2,
        };
        (space, self.layouts[space].start(place.slot) + place.at)
    }

    fn get(&self, place: Place, len: usize) -> &[u32] {
        let (space, start) = self.index(place);
        &self.spaces[space][start..start + len]
    }

    fn set(&mut self, place: Place, values: &[u32]) {
        let (space, start) = self.index(place);
        self.spaces[space][start..start + values.len()].copy_from_slice(values);
    }
}

/// A job: every rank's plan and memory.
struct Job {
    plans: Vec<Plan>,
    memory: Vec<Rows>,
    hosts: Arc<Hosts>,
}

impl Job {
    fn new(
        pattern: Pattern,
        algorithm: Algorithm,
        leaves: usize,
        hosts: Hosts,
        world: usize,
    ) -> Self {
        let in_place = pattern.in_place();
        let spec = Spec {
            pattern,
            algorithm,
            tree: Tree::split(leaves, world).unwrap(),
            hosts: Arc::new(hosts),
            line: 16,
        };
        let memory = (0..world).map(|rank| {
            let spaces = [Space::In, Space::Out, Space::Temp];
            Rows::new(
                rank,
                spaces.map(|space| Layout::of(&spec, rank, space)),
                in_place,
            )
        });
        Self {
            memory: memory.collect(),
            plans: (0..world).map(|rank| Plan::new(&spec, rank)).collect(),
            hosts: spec.hosts.clone(),
        }
    }

    /// Of hand-made tasks by round and rank, over one slot of `len` elements in each space.
    fn of_tasks(rounds: Vec<Vec<Vec<Task>>>, len: usize) -> Self {
        let world = rounds[0].len();
        let layout = Layout::Even {
            slots: 1,
            each: len,
        };
        let shares = |rank: usize, of: fn(&Task) -> &Vec<Spot>| -> Vec<Vec<Share>> {
            let round = |tasks: &Vec<Vec<Task>>| {
                let others = tasks.iter().enumerate().filter(|(peer, _)| *peer != rank);
                let tasks =
                    others.flat_map(|(peer, tasks)| tasks.iter().map(move |task| (peer, task)));
                let spots = tasks.flat_map(|(peer, task)| {
                    of(task).iter().map(move |spot| (peer, task.len, spot))
                });
                let mine = spots.filter(|(_, _, spot)| spot.rank == rank);
                mine.map(|(peer, len, spot)| Share {
                    peer,
                    place: spot.place,
                    len,
                })
                .collect()
            };
            rounds.iter().map(round).collect()
        };
        let plan = |rank: usize| Plan {
            rounds: rounds
                .iter()
                .map(|tasks| Round {
                    tasks: tasks[rank].clone(),
                })
                .collect(),
            lends: shares(rank, |task| &task.inputs),
            gets: shares(rank, |task| &task.outputs),
            temp: vec![len],
            lends_copies: false,
        };
        Self {
            plans: (0..world).map(plan).collect(),
            memory: (0..world)
                .map(|rank| {
                    Rows::new(
                        rank,
                        [layout.clone(), layout.clone(), layout.clone()],
                        false,
                    )
                })
                .collect(),
            hosts: Arc::new(Hosts::apart(world)),
        }
    }

    /// What the plans mean.
    fn simulated(&self) -> Vec<Rows> {
        let mut memory = self.memory.clone();
        for round in 0..self.plans[0].rounds.len() {
            let before = memory.clone();
            for task in self.plans.iter().flat_map(|plan| &plan.rounds[round].tasks) {
                let inputs = task.inputs.iter();
                let inputs: Vec<_> = inputs
                    .map(|spot| before[spot.rank].get(spot.place, task.len))
                    .collect();
                let result: Vec<u32> = (0..task.len)
                    .map(|i| combine(inputs.iter().map(|input| input[i])))
                    .collect();
                for spot in &task.outputs {
                    memory[spot.rank].set(spot.place, &result);
                }
            }
        }
        memory
    }

    /// What the ranks' threads make of it, `calls` times over the same connections.
    fn run(&self, lanes: usize, pair: fn() -> (Socket, Socket), calls: usize) -> Vec<Vec<Rows>> {
        let world = self.plans.len();
        let wires = wires(&self.hosts, world, lanes, pair);
        let mut streams: Vec<_> = wires
            .into_iter()
            .enumerate()
            .map(|(rank, sockets)| Streams::new(rank, sockets).unwrap())
            .collect();
        let mut outcomes = Vec::new();
        for _ in 0..calls {
            let mut memory = self.memory.clone();
            let lent = self.memory.clone();
            let all: Vec<Raw> = memory
                .iter_mut()
                .zip(lent)
                .map(|(own, lent)| Raw::new(own, lent))
                .collect();
            let meeting = Barrier::new(world);
            std::thread::scope(|scope| {
                for (rank, streams) in streams.iter_mut().enumerate() {
                    let (all, meeting) = (&all, &meeting);
                    scope.spawn(move || self.play(rank, streams, all, meeting));
                }
            });
            drop(all);
            outcomes.push(memory);
        }
        outcomes
    }

    fn play(&self, rank: usize, streams: &mut Streams, all: &[Raw], meeting: &Barrier) {
        let plan = &self.plans[rank];
        let status = status(rank, self.plans.len());
        let header = header(9, self.plans.len());
        let memory = Map {
            job: self,
            rank,
            all,
        };
        let vigil = vigil(&status, &header, LONG);
        let has_neighbours = self.hosts.count() < self.plans.len();
        for index in 0..plan.rounds.len() {
            if has_neighbours {
                meeting.wait();
            }
            let step = RoundStep {
                header: &header,
                plan,
                index,
                element_bytes: 4,
                memory: &memory,
                spin: Duration::from_micros(20),
            };
            // SAFETY: the addresses are those of vectors that live until all threads are done; ranks that share memory
            // meet between rounds.
            unsafe { streams.round(&step, &mut fold, &vigil) }.unwrap();
        }
        if has_neighbours {
            meeting.wait();
        }
    }

    fn check(&self, lanes: usize, pair: fn() -> (Socket, Socket), words: &str) {
        let expected = self.simulated();
        for memory in self.run(lanes, pair, 2) {
            for (rank, (found, expected)) in memory.iter().zip(&expected).enumerate() {
                assert!(found == expected, "rank {rank}: {words}, {lanes} lanes");
            }
        }
    }
}

impl Rows {
    fn new(rank: usize, layouts: [Layout; 3], in_place: bool) -> Self {
        let mut next = rank as u32 * 0x0100_0193;
        let spaces = layouts.each_ref().map(|layout| {
            let values = (0..layout.total().max(match layout {
                Layout::Even { each, .. } => *each,
                Layout::Uneven { .. } => 0,
            }))
                .map(|_| {
                    next = next.wrapping_mul(0x9E37_79B1).wrapping_add(0x7F4A_7C15);
                    next
                });
            values.collect()
        });
        Self {
            spaces,
            layouts,
            in_place,
        }
    }
}

/// Not commutative, so that the order of inputs shows.
fn combine(inputs: impl Iterator<Item = u32>) -> u32 {
    let mut inputs = inputs.peekable();
    let first = inputs.next().unwrap();
    inputs.fold(first, |sum, input| sum.wrapping_mul(31).wrapping_add(input))
}

fn fold(_: &Task, inputs: &[*const u8], _: usize, len: usize, outputs: &[*mut u8]) {
    for i in 0..len {
        // SAFETY: every address holds `len` elements by the contract of `round`.
        unsafe {
            let result = combine(inputs.iter().map(|input| input.cast::<u32>().add(i).read()));
            outputs
                .iter()
                .for_each(|output| output.cast::<u32>().add(i).write(result));
        }
    }
}

/// One rank's memory as addresses, and a copy of what it lends.
struct Raw {
    spaces: [*mut u32; 3],
    lent: Rows,
}

// SAFETY: threads touch what the plan gives them, as processes that map each other's memory do.
unsafe impl Sync for Raw {}

impl Raw {
    fn new(rows: &mut Rows, lent: Rows) -> Self {
        let spaces = rows.spaces.each_mut().map(Vec::as_mut_ptr);
        Self { spaces, lent }
    }
}

struct Map<'a> {
    job: &'a Job,
    rank: usize,
    all: &'a [Raw],
}

impl Memory for Map<'_> {
    fn own(&self, place: Place) -> *mut u8 {
        let raw = &self.all[self.rank];
        let (space, start) = raw.lent.index(place);
        raw.spaces[space].wrapping_add(start).cast()
    }

    fn lent(&self, place: Place) -> *const u8 {
        if self.job.plans[self.rank].lends_copies {
            self.all[self.rank].lent.get(place, 0).as_ptr().cast()
        } else {
            self.own(place).cast_const()
        }
    }

    fn mapped_input(&self, spot: Spot) -> Option<*const u8> {
        let map = self.of(spot.rank)?;
        Some(match spot.rank == self.rank {
            true => map.own(spot.place).cast_const(),
            false => map.lent(spot.place),
        })
    }

    fn mapped_output(&self, spot: Spot) -> Option<*mut u8> {
        Some(self.of(spot.rank)?.own(spot.place))
    }
}

impl Map<'_> {
    /// What a rank on the same host sees as its own.
    fn of(&self, rank: usize) -> Option<Map<'_>> {
        let hosts = &self.job.hosts;
        (hosts.host(rank) == hosts.host(self.rank)).then_some(Map { rank, ..*self })
    }
}

fn patterns(len: usize, world: usize) -> Vec<Pattern> {
    let each = |many: usize| Counts::Each((0..many).map(|i| len * ((i + 1) % 3)).collect());
    let root = world - 1;
    vec![
        Pattern::AllReduce { len },
        Pattern::Reduce { len, root },
        Pattern::Broadcast { len, root: 0 },
        Pattern::AllGather {
            counts: Counts::Same(len),
        },
        Pattern::AllGather {
            counts: each(world),
        },
        Pattern::ReduceScatter {
            counts: each(world),
        },
        Pattern::Gather {
            counts: each(world),
            root,
        },
        Pattern::Scatter {
            counts: Counts::Same(len),
            root,
        },
        Pattern::AllToAll {
            counts: Counts::Same(len),
        },
        Pattern::AllToAll {
            counts: each(world * world),
        },
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
            for pattern in [Pattern::AllReduce { len }, Pattern::Reduce { len, root: 0 }] {
                let job = Job::new(pattern, Algorithm::Direct, 2, Hosts::apart(2), 2);
                job.check(lanes, tcp_pair, &format!("{len} elements"));
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
                let job = Job::new(Pattern::AllReduce { len }, algorithm, leaves, hosts, world);
                job.check(
                    2,
                    unix_pair,
                    &format!("{len} elements of {leaves} leaves on {world}"),
                );
            }
        }
    }
}

fn spot(rank: usize, space: Space) -> Spot {
    let place = Place {
        space,
        slot: 0,
        at: 0,
    };
    Spot { rank, place }
}

fn task(len: usize, inputs: Vec<Spot>, outputs: Vec<Spot>) -> Task {
    let fold = (inputs.len() > 1).then(|| Tree::per_rank(inputs.len()));
    Task {
        len,
        inputs,
        fold,
        last: false,
        outputs,
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
        Pattern::Broadcast { len: 100, root: 3 },
        Pattern::AllReduce { len: 40 },
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
        Pattern::AllReduce { len },
        Algorithm::Direct,
        2,
        Hosts::apart(2),
        2,
    );
    let mut streams: Vec<_> = wires(&job.hosts, 2, 1, unix_pair)
        .into_iter()
        .enumerate()
        .map(|(rank, sockets)| Streams::new(rank, sockets).unwrap())
        .collect();
    let mut memory = job.memory.clone();
    let all: Vec<Raw> = memory
        .iter_mut()
        .zip(job.memory.clone())
        .map(|(own, lent)| Raw::new(own, lent))
        .collect();
    let meeting = Barrier::new(2);
    std::thread::scope(|scope| {
        for (rank, streams) in streams.iter_mut().enumerate() {
            let (job, all, meeting) = (&job, &all, &meeting);
            scope.spawn(move || job.play(rank, streams, all, meeting));
        }
    });
    for streams in streams {
        let bytes = streams.board.scratch_bytes();
        assert!((1..=1 << 20).contains(&bytes), "{bytes} bytes");
    }
}

#[test]
fn a_meeting_ends_when_all_have_come() {
    let world = 4;
    let came = std::sync::atomic::AtomicUsize::new(0);
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
                    came.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                    streams
                        .meet(&header, Duration::ZERO, &vigil(&status, &header, LONG))
                        .unwrap();
                    assert!(came.load(std::sync::atomic::Ordering::SeqCst) >= turn * world);
                }
            });
        }
    });
}

/// Every rank calls with its own total; what each of them is told.
fn quarrel(totals: &[usize], pattern: impl Fn(usize) -> Pattern + Sync) -> Vec<Error> {
    let world = totals.len();
    let wires = wires(&Hosts::apart(world), world, 2, unix_pair);
    std::thread::scope(|scope| {
        let ranks = wires.into_iter().enumerate().map(|(rank, sockets)| {
            let pattern = &pattern;
            scope.spawn(move || {
                let job = Job::new(
                    pattern(totals[rank]),
                    Algorithm::Direct,
                    world,
                    Hosts::apart(world),
                    world,
                );
                let mut memory = job.memory.clone();
                let all: Vec<Raw> = memory
                    .iter_mut()
                    .zip(job.memory.clone())
                    .map(|(own, lent)| Raw::new(own, lent))
                    .collect();
                let mut streams = Streams::new(rank, sockets).unwrap();
                let (status, header) = (status(rank, world), header(totals[rank], world));
                let step = RoundStep {
                    header: &header,
                    plan: &job.plans[rank],
                    index: 0,
                    element_bytes: 4,
                    memory: &Map {
                        job: &job,
                        rank,
                        all: &all,
                    },
                    spin: Duration::ZERO,
                };
                // SAFETY: the addresses are those of vectors that live until the end of this closure.
                let error =
                    unsafe { streams.round(&step, &mut fold, &vigil(&status, &header, LONG)) };
                // Kept until all are done: a connection that ends is another error.
                (error.unwrap_err(), streams)
            })
        });
        let ranks: Vec<_> = ranks.collect();
        let outcomes: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        outcomes.into_iter().map(|(error, _)| error).collect()
    })
}

#[test]
fn different_calls_are_the_same_mismatch_on_every_rank() {
    for len in [10, 2_000_000] {
        let errors = quarrel(&[len, len, len + 1], |len| Pattern::AllReduce { len });
        for error in &errors {
            assert!(
                matches!(
                    error,
                    Error::Mismatch {
                        culprit: Some(2),
                        ..
                    }
                ),
                "{error}"
            );
            assert_eq!(error.to_string(), errors[0].to_string());
        }
    }
    // A rank that neither sends to the odd one nor gets anything from it hears of it all the same.
    let errors = quarrel(&[5, 5, 6, 5], |len| Pattern::Broadcast { len, root: 0 });
    assert!(
        errors.iter().all(|error| error.culprit() == Some(2)),
        "{errors:?}"
    );
}

const LEN: usize = 100;

fn all_reduce() -> Job {
    Job::new(
        Pattern::AllReduce { len: LEN },
        Algorithm::Direct,
        2,
        Hosts::apart(2),
        2,
    )
}

/// What rank 0 of 2 makes of a peer that sends `bytes` and then says nothing, or leaves.
fn against(bytes: &[u8], leaves: bool) -> Error {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut streams = Streams::new(0, vec![vec![None, Some(Socket::Unix(ours))]]).unwrap();
    theirs.write_all(bytes).unwrap();
    let theirs = (!leaves).then_some(theirs);
    let job = all_reduce();
    let mut memory = job.memory.clone();
    let all: Vec<Raw> = memory
        .iter_mut()
        .zip(job.memory.clone())
        .map(|(own, lent)| Raw::new(own, lent))
        .collect();
    let (status, header) = (status(0, 2), header(LEN, 2));
    let step = RoundStep {
        header: &header,
        plan: &job.plans[0],
        index: 0,
        element_bytes: 4,
        memory: &Map {
            job: &job,
            rank: 0,
            all: &all,
        },
        spin: Duration::ZERO,
    };
    let vigil = vigil(&status, &header, Duration::from_millis(400));
    // SAFETY: the addresses are those of vectors that live until the end of this function.
    let error = unsafe { streams.round(&step, &mut fold, &vigil) }.unwrap_err();
    drop(theirs);
    error
}

fn frame(total: usize, round: u32, payload: u64) -> Vec<u8> {
    let header = header(total, 2);
    Frame {
        header,
        round,
        payload,
    }
    .encode()
    .to_vec()
}

/// What rank 1 sends in the whole round: its part of rank 0's slice, and the result of its own.
const PAYLOAD: u64 = LEN as u64 * 4;

#[test]
fn nonsense_is_the_peers_fault() {
    for (bytes, words) in [
        (vec![0xAA; 72], "a frame begins with [aa"),
        (
            frame(LEN, 0, u64::MAX),
            "a payload of 18446744073709551615 bytes, expected 400",
        ),
        (
            frame(LEN, 0, PAYLOAD - 4),
            "a payload of 396 bytes, expected 400",
        ),
        (frame(LEN, 1, PAYLOAD), "a frame of round 1, expected 0"),
        (
            frame(LEN, MEETING, 0),
            "a frame of round 4294967295, expected 0",
        ),
    ] {
        let error = against(&bytes, false);
        assert!(matches!(error, Error::Wire { peer: 1, .. }), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn another_call_is_a_mismatch_whatever_else_its_frame_says() {
    for bytes in [frame(LEN - 1, 0, 1), frame(LEN + 1, MEETING, 0)] {
        let error = against(&bytes, false);
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    }
}

#[test]
fn a_truncated_frame_is_a_deadline_or_a_death() {
    let whole = frame(LEN, 0, PAYLOAD);
    let mut longer = whole.clone();
    longer.extend([0; 50]);
    for bytes in [&whole[..0], &whole[..40], &whole, &longer] {
        let error = against(bytes, false);
        assert!(error.is_deadline() && error.culprit() == Some(1), "{error}");
        let error = against(bytes, true);
        assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
    }
}

#[test]
fn a_later_round_of_another_call_is_the_peers_fault() {
    use Space::{In, Out};
    let rounds = vec![
        vec![vec![], vec![]],
        vec![
            vec![task(LEN, vec![spot(1, In)], vec![spot(0, Out)])],
            vec![],
        ],
    ];
    let job = Job::of_tasks(rounds, LEN);
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut streams = Streams::new(0, vec![vec![None, Some(Socket::Unix(ours))]]).unwrap();
    theirs.write_all(&frame(LEN, 0, 0)).unwrap();
    theirs.write_all(&frame(LEN + 1, 1, PAYLOAD)).unwrap();
    let mut memory = job.memory.clone();
    let all: Vec<Raw> = memory
        .iter_mut()
        .zip(job.memory.clone())
        .map(|(own, lent)| Raw::new(own, lent))
        .collect();
    let (status, header) = (status(0, 2), header(LEN, 2));
    let outcomes = [0, 1].map(|index| {
        let step = RoundStep {
            header: &header,
            plan: &job.plans[0],
            index,
            element_bytes: 4,
            memory: &Map {
                job: &job,
                rank: 0,
                all: &all,
            },
            spin: Duration::ZERO,
        };
        // SAFETY: the addresses are those of vectors that live until the end of this function.
        unsafe { streams.round(&step, &mut fold, &vigil(&status, &header, LONG)) }
    });
    assert!(outcomes[0].is_ok());
    let error = outcomes[1].as_ref().unwrap_err();
    assert!(matches!(error, Error::Wire { peer: 1, .. }), "{error}");
    assert!(
        error
            .to_string()
            .contains("round 1 of all-reduce (sum) of 101 f32"),
        "{error}"
    );
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
    assert!(Streams::new(0, Vec::new()).is_err());
    let uneven = vec![vec![None, Some(unix_pair().0)], vec![None, None]];
    assert!(Streams::new(0, uneven).is_err());
}
