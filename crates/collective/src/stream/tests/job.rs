//! A job of threads: every rank's plan, memory and sockets, and a simulation that says what is right.

use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use paceline_rendezvous::auth::Side;
use paceline_rendezvous::page::JobPage;
use paceline_rendezvous::tls::Tls;

use super::super::*;
use crate::element::{DType, ReduceOp};
use crate::error::{OpKind, Operation};
use crate::plan::{Algorithm, Hosts, Layout, Pattern, Round, Share, Space, Spec};
use crate::socket::Socket;
use crate::status::{PeerInfo, Status};
use crate::tree::Tree;

/// By rank, lane and peer.
pub(super) type Wires<W> = Vec<Vec<Vec<Option<W>>>>;

pub(super) fn unix_pair() -> (Socket, Socket) {
    let (a, b) = UnixStream::pair().unwrap();
    (Socket::Unix(a), Socket::Unix(b))
}

pub(super) fn tcp_pair() -> (Socket, Socket) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let dialed = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (
        Socket::Tcp(dialed),
        Socket::Tcp(listener.accept().unwrap().0),
    )
}

pub(super) fn tls_pair() -> (Socket, Socket) {
    let (Socket::Tcp(dialed), Socket::Tcp(accepted)) = tcp_pair() else {
        unreachable!("they are TCP's")
    };
    let shaken = |stream, side| {
        let tls = Tls::handshake(stream, side, Instant::now() + LONG).unwrap();
        Socket::Tls(Box::new(tls))
    };
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| shaken(accepted, Side::Listener));
        (shaken(dialed, Side::Dialer), accepted.join().unwrap())
    })
}

/// Connects the ranks of different hosts.
pub(super) fn wires<W>(
    hosts: &Hosts,
    world: usize,
    lanes: usize,
    pair: fn() -> (W, W),
) -> Wires<W> {
    let nobody = || (0..world).map(|_| None).collect();
    let mut wires: Wires<W> = (0..world)
        .map(|_| (0..lanes).map(|_| nobody()).collect())
        .collect();
    let pairs = (0..world).flat_map(|a| (a + 1..world).map(move |b| (a, b)));
    let apart = pairs.filter(|(a, b)| hosts.host(*a) != hosts.host(*b));
    for (a, b, lane) in apart.flat_map(|(a, b)| (0..lanes).map(move |lane| (a, b, lane))) {
        let (to_b, to_a) = pair();
        wires[a][lane][b] = Some(to_b);
        wires[b][lane][a] = Some(to_a);
    }
    wires
}

pub(super) fn header(total: usize, world: usize) -> Header {
    Header {
        operation: Operation {
            kind: OpKind::AllReduce,
            seq: 1,
            bucket: None,
        },
        reduce: Some(ReduceOp::Sum),
        dtype: Some(DType::F32),
        algorithm: Algorithm::Direct,
        total,
        piece: total,
        counts: 0,
        mark: 0,
        leaves: world as u32,
    }
}

pub(super) fn status(rank: usize, world: usize) -> Status {
    let page = JobPage::private(world).unwrap();
    let slot = page.slot(rank);
    let peer = PeerInfo {
        host: "b".into(),
        pid: 7,
        slot: None,
        started: rank,
    };
    Status::new(rank, vec![peer; world], page, slot)
}

pub(super) fn wait<'a>(status: &'a Status, header: &Header, limit: Duration) -> OpWait<'a> {
    OpWait::new(status, header.operation, Instant::now(), limit)
}

pub(super) const LONG: Duration = Duration::from_secs(60);

/// One rank's memory. Spaces `In`, `Out` and `Temp`, each a row of slots.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Rows {
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
pub(super) struct Job {
    pub(super) plans: Vec<Plan>,
    pub(super) memory: Vec<Rows>,
    pub(super) hosts: Arc<Hosts>,
}

impl Job {
    pub(super) fn new(
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
    pub(super) fn of_tasks(rounds: Vec<Vec<Vec<Task>>>, len: usize) -> Self {
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
    pub(super) fn simulated(&self) -> Vec<Rows> {
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

    /// What the ranks' threads make of it, `calls` times over the same connections, and these.
    pub(super) fn run<W: Into<Wire>>(
        &self,
        lanes: usize,
        pair: fn() -> (W, W),
        calls: usize,
    ) -> (Vec<Vec<Rows>>, Vec<Streams>) {
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
            let all = Raw::all(&mut memory);
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
        (outcomes, streams)
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
        let wait = wait(&status, &header, LONG);
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
                runner: Runner::Caller,
            };
            // SAFETY: the addresses are those of vectors that live until all threads are done; ranks that share memory
            // meet between rounds.
            unsafe { streams.round(&step, &mut fold, &wait) }.unwrap();
        }
        if has_neighbours {
            meeting.wait();
        }
    }

    pub(super) fn check<W: Into<Wire>>(&self, lanes: usize, pair: fn() -> (W, W), words: &str) {
        let expected = self.simulated();
        for memory in self.run(lanes, pair, 2).0 {
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

pub(super) fn fold(_: &Task, inputs: &[*const u8], _: usize, len: usize, outputs: &[*mut u8]) {
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
    /// Of all ranks' memory.
    fn all(memory: &mut [Rows]) -> Vec<Self> {
        let raw = |rows: &mut Rows| Self {
            lent: rows.clone(),
            spaces: rows.spaces.each_mut().map(Vec::as_mut_ptr),
        };
        memory.iter_mut().map(raw).collect()
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

pub(super) fn spot(rank: usize, space: Space) -> Spot {
    let place = Place {
        space,
        slot: 0,
        at: 0,
    };
    Spot { rank, place }
}

pub(super) fn task(len: usize, inputs: Vec<Spot>, outputs: Vec<Spot>) -> Task {
    let fold = (inputs.len() > 1).then(|| Tree::per_rank(inputs.len()));
    Task {
        len,
        inputs,
        fold,
        last: false,
        outputs,
    }
}

/// What one rank alone makes of a round of the job.
pub(super) fn alone(
    job: &Job,
    (rank, index): (usize, usize),
    streams: &mut Streams,
    header: &Header,
    limit: Duration,
) -> Result<Instant, Error> {
    let mut memory = job.memory.clone();
    let all = Raw::all(&mut memory);
    let status = status(rank, job.plans.len());
    let step = RoundStep {
        header,
        plan: &job.plans[rank],
        index,
        element_bytes: 4,
        memory: &Map {
            job,
            rank,
            all: &all,
        },
        runner: Runner::CommThread,
    };
    // SAFETY: the addresses are those of vectors that live until the end of this function.
    unsafe { streams.round(&step, &mut fold, &wait(&status, header, limit)) }
}
