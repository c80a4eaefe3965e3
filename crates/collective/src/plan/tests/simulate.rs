//! Runs the plans of all ranks on symbols instead of numbers, over memory and over streams, and checks every rule on the way.
//!
//! A symbol is the fingerprint of an expression: which leaf, or which two expressions were added in which order. So one
//! run shows that each result is the fixed tree's, to the last addition, on any data.

mod tests;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use crate::plan::{Counts, Kind, Layout, Pattern, Place, Plan, Share, Space, Spec, Spot, Task};
use crate::tree::{Step, Tree};

/// How ranks of one host reach each other; ranks of different hosts always use streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Links {
    Memory,
    Streams,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Symbol {
    /// Depends on the order of additions; 0 where nothing was ever stored.
    expression: u64,
    /// Does not.
    sum: u64,
    /// Whether the division of an average was done.
    finished: bool,
}

const NOTHING: Symbol = Symbol {
    expression: 0,
    sum: 0,
    finished: false,
};

fn mix(a: u64, b: u64) -> u64 {
    let mut word = a ^ b.rotate_left(32).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    word = (word ^ word >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ word >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ word >> 31
}

/// What `rank` brings as element `at` of `slot`.
fn leaf(rank: usize, slot: usize, at: usize) -> Symbol {
    let expression = mix(mix(rank as u64 + 1, slot as u64 + 1), at as u64 + 1) | 1;
    Symbol {
        expression,
        sum: expression,
        finished: false,
    }
}

fn add(left: Symbol, right: Symbol) -> Symbol {
    Symbol {
        expression: mix(left.expression, right.expression.wrapping_add(0x51)) | 1,
        sum: left.sum.wrapping_add(right.sum),
        finished: false,
    }
}

type Check<T = ()> = Result<T, String>;

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Check {
    if holds { Ok(()) } else { Err(what()) }
}

/// One rank's memory: all slots of all spaces in one vector.
struct Memory {
    cells: Vec<Symbol>,
    /// First cell of each slot of `In`, `Out` and `Temp`, and the end of the last one.
    bounds: [Vec<usize>; 3],
    /// Which task of the round wrote a cell, and as which of its elements.
    writer: Vec<(usize, usize)>,
    /// The round after the last one in which a rank of the same host stored to the cell.
    pushed: Vec<usize>,
    /// The round after the last one in which a rank of the same host was lent the cell and a task wrote it.
    rewritten: Vec<usize>,
}

impl Memory {
    fn new(spec: &Spec, rank: usize, temp: &[usize]) -> Self {
        let mut end = 0;
        let mut slots = |lens: &mut dyn Iterator<Item = usize>| {
            let mut bounds = vec![end];
            for len in lens {
                end += len;
                bounds.push(end);
            }
            bounds
        };
        let lens = |layout: &Layout| -> Vec<usize> {
            let slots = match layout {
                Layout::Even { slots, .. } => *slots,
                Layout::Uneven { bounds } => bounds.len() - 1,
            };
            (0..slots)
                .map(|slot| layout.start(slot + 1) - layout.start(slot))
                .collect()
        };
        let input = slots(&mut lens(&Layout::of(spec, rank, Space::In)).into_iter());
        let output = if spec.pattern.in_place() {
            input[..2].to_vec()
        } else {
            slots(&mut lens(&Layout::of(spec, rank, Space::Out)).into_iter())
        };
        let temp = slots(&mut temp.iter().copied());
        let mut cells = vec![NOTHING; end];
        for slot in 0..input.len() - 1 {
            for (at, cell) in (input[slot]..input[slot + 1]).enumerate() {
                cells[cell] = leaf(rank, slot, at);
            }
        }
        Self {
            bounds: [input, output, temp],
            writer: vec![(0, 0); end],
            pushed: vec![0; end],
            rewritten: vec![0; end],
            cells,
        }
    }

    fn range(&self, place: Place, len: usize) -> Check<Range<usize>> {
        let bounds = &self.bounds[place.space as usize];
        let end = bounds.get(place.slot + 1).copied().unwrap_or(0);
        let start = bounds.get(place.slot).copied().unwrap_or(0) + place.at;
        ensure(start + len <= end, || {
            format!("{place:?} has no {len} elements")
        })?;
        Ok(start..start + len)
    }

    fn slot(&self, space: Space, slot: usize) -> &[Symbol] {
        let bounds = &self.bounds[space as usize];
        &self.cells[bounds[slot]..bounds[slot + 1]]
    }
}

struct Simulation<'a> {
    spec: &'a Spec,
    plans: &'a [Plan],
    links: Links,
    memory: Vec<Memory>,
    /// Rank of each task so far; task 0 is nobody's.
    tasks: Vec<usize>,
}

/// What is under way from one rank to another.
type Queues = HashMap<(usize, usize), VecDeque<Vec<Symbol>>>;

impl<'a> Simulation<'a> {
    fn run(spec: &'a Spec, plans: &'a [Plan], links: Links) -> Check<Self> {
        let memory = plans.iter().enumerate();
        let mut simulation = Self {
            spec,
            plans,
            links,
            memory: memory
                .map(|(rank, plan)| Memory::new(spec, rank, &plan.temp))
                .collect(),
            tasks: vec![usize::MAX],
        };
        let rounds = plans[0].rounds.len();
        for (rank, plan) in plans.iter().enumerate() {
            ensure(
                [plan.rounds.len(), plan.lends.len(), plan.gets.len()] == [rounds; 3],
                || format!("rank {rank} has other rounds than rank 0"),
            )?;
        }
        for round in 0..rounds {
            simulation
                .check(round)
                .and_then(|()| simulation.step(round))
                .map_err(|error| format!("round {round}: {error}"))?;
        }
        Ok(simulation)
    }

    fn by_memory(&self, a: usize, b: usize) -> bool {
        self.links == Links::Memory && self.spec.hosts.host(a) == self.spec.hosts.host(b)
    }

    fn tasks(&self, round: usize) -> impl Iterator<Item = (usize, &'a Task)> + use<'a> {
        let plans = self.plans.iter().enumerate();
        plans.flat_map(move |(rank, plan)| {
            let tasks = plan.rounds[round].tasks.iter();
            tasks.map(move |task| (rank, task))
        })
    }

    /// The rules of a round that do not depend on what is in memory.
    fn check(&mut self, round: usize) -> Check {
        let first = self.tasks.len();
        for (rank, task) in self.tasks(round) {
            let id = self.tasks.len();
            self.tasks.push(rank);
            ensure(task.len > 0, || format!("rank {rank} has an empty task"))?;
            for spot in &task.outputs {
                self.reachable(rank, spot)?;
                let memory = &mut self.memory[spot.rank];
                for (k, cell) in memory.range(spot.place, task.len)?.enumerate() {
                    let writer = &mut memory.writer[cell];
                    ensure(writer.0 < first, || {
                        format!("two tasks write {spot:?}, one on rank {rank}")
                    })?;
                    *writer = (id, k);
                }
            }
        }
        for (id, (rank, task)) in (first..).zip(self.tasks(round)) {
            for spot in &task.inputs {
                self.reachable(rank, spot)?;
                let memory = &self.memory[spot.rank];
                let copied = spot.rank != rank && self.plans[spot.rank].lends_copies;
                for (k, cell) in memory.range(spot.place, task.len)?.enumerate() {
                    let writer = memory.writer[cell];
                    let quiet = writer.0 < first || writer == (id, k);
                    let lent = copied && self.tasks[writer.0] == spot.rank;
                    ensure(quiet || lent, || {
                        format!("rank {rank} reads {spot:?} while it is written")
                    })?;
                }
            }
        }
        self.check_staging(round, first)
    }

    /// What is lent through memory may be a copy. It is renewed for the next round while peers still read and store in
    /// this one, and what they stored there is taken back while they store in the next one.
    fn check_staging(&mut self, round: usize, first: usize) -> Check {
        for (rank, plan) in self.plans.iter().enumerate() {
            let shared = |peer| self.by_memory(rank, peer);
            for share in plan.lends[round].iter().filter(|share| shared(share.peer)) {
                let memory = &self.memory[rank];
                for cell in memory.range(share.place, share.len)? {
                    ensure(round == 0 || memory.pushed[cell] != round, || {
                        format!("rank {rank} lends {share:?}, stored by a peer one round before")
                    })?;
                    ensure(round == 0 || memory.rewritten[cell] != round, || {
                        format!("rank {rank} lends {share:?} anew, read by a peer one round before")
                    })?;
                }
            }
            for share in plan.gets[round].iter().filter(|share| shared(share.peer)) {
                let memory = &self.memory[rank];
                for cell in memory.range(share.place, share.len)? {
                    ensure(round == 0 || memory.pushed[cell] != round, || {
                        format!("rank {rank} gets {share:?} in two rounds, one after the other")
                    })?;
                }
            }
        }
        for (rank, plan) in self.plans.iter().enumerate() {
            for (shares, pushed) in [(&plan.lends[round], false), (&plan.gets[round], true)] {
                for share in shares {
                    if !self.by_memory(rank, share.peer) {
                        continue;
                    }
                    let memory = &mut self.memory[rank];
                    for cell in memory.range(share.place, share.len)? {
                        if pushed {
                            memory.pushed[cell] = round + 1;
                        } else if memory.writer[cell].0 >= first {
                            memory.rewritten[cell] = round + 1;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn reachable(&self, rank: usize, spot: &Spot) -> Check {
        let hidden = spot.place.space == Space::Temp
            && spot.rank != rank
            && self.spec.hosts.host(rank) == self.spec.hosts.host(spot.rank);
        ensure(!hidden, || {
            format!("rank {rank} reaches into scratch memory: {spot:?}")
        })
    }

    /// What a rank is lent or given first of all by another one: it must be as long as the task says.
    fn receive(queues: &mut Queues, from: usize, to: usize, len: usize) -> Check<Vec<Symbol>> {
        let message = queues.get_mut(&(from, to)).and_then(VecDeque::pop_front);
        match message {
            Some(message) if message.len() == len => Ok(message),
            Some(message) => Err(format!(
                "rank {to} expects {len} elements of rank {from}, gets {}",
                message.len()
            )),
            None => Err(format!("rank {to} waits for rank {from}")),
        }
    }

    fn step(&mut self, round: usize) -> Check {
        let mut lent = Queues::new();
        for (rank, plan) in self.plans.iter().enumerate() {
            for share in &plan.lends[round] {
                if !self.by_memory(rank, share.peer) {
                    let cells = self.memory[rank].range(share.place, share.len)?;
                    let message = self.memory[rank].cells[cells].to_vec();
                    lent.entry((rank, share.peer))
                        .or_default()
                        .push_back(message);
                }
            }
        }
        let mut results = Vec::new();
        for (rank, task) in self.tasks(round) {
            let mut inputs = Vec::with_capacity(task.inputs.len());
            for spot in &task.inputs {
                inputs.push(if spot.rank == rank || self.by_memory(rank, spot.rank) {
                    let cells = self.memory[spot.rank].range(spot.place, task.len)?;
                    self.memory[spot.rank].cells[cells].to_vec()
                } else {
                    Self::receive(&mut lent, spot.rank, rank, task.len)?
                });
            }
            results.push(self.combine(task, &inputs)?);
        }
        let mut given = Queues::new();
        for ((rank, task), result) in self.tasks(round).zip(results) {
            for spot in &task.outputs {
                if spot.rank == rank || self.by_memory(rank, spot.rank) {
                    let cells = self.memory[spot.rank].range(spot.place, task.len)?;
                    self.memory[spot.rank].cells[cells].copy_from_slice(&result);
                } else {
                    given
                        .entry((rank, spot.rank))
                        .or_default()
                        .push_back(result.clone());
                }
            }
        }
        for (rank, plan) in self.plans.iter().enumerate() {
            for share in &plan.gets[round] {
                if !self.by_memory(rank, share.peer) {
                    let message = Self::receive(&mut given, share.peer, rank, share.len)?;
                    let cells = self.memory[rank].range(share.place, share.len)?;
                    self.memory[rank].cells[cells].copy_from_slice(&message);
                }
            }
        }
        ensure(lent.values().all(VecDeque::is_empty), || {
            "a rank is lent what it does not read".into()
        })?;
        ensure(given.values().all(VecDeque::is_empty), || {
            "a rank is given what it does not expect".into()
        })
    }

    fn combine(&self, task: &Task, inputs: &[Vec<Symbol>]) -> Check<Vec<Symbol>> {
        let read = inputs.iter().flatten();
        ensure(read.clone().all(|symbol| *symbol != NOTHING), || {
            format!("{task:?} reads what nobody stored")
        })?;
        let Some(tree) = &task.fold else {
            ensure(inputs.len() == 1 && !task.last, || {
                format!("{task:?} copies several inputs")
            })?;
            return Ok(inputs[0].clone());
        };
        ensure(read.clone().all(|symbol| !symbol.finished), || {
            format!("{task:?} adds to a finished sum")
        })?;
        let all = self.spec.tree.leaves();
        ensure(tree.leaves() == all, || {
            format!("{task:?} counts {} leaves of {all}", tree.leaves())
        })?;
        let mut stack: Vec<Vec<Symbol>> = Vec::new();
        let mut loads = inputs.iter();
        for step in tree.program() {
            match step {
                Step::Load { .. } => {
                    let input = loads.next().ok_or("a program loads more than there is")?;
                    stack.push(input.clone());
                }
                Step::Merge => {
                    let right = stack.pop().ok_or("nothing to merge")?;
                    let left = stack.last_mut().ok_or("nothing to merge with")?;
                    for (left, right) in left.iter_mut().zip(right) {
                        *left = add(*left, right);
                    }
                }
            }
        }
        ensure(loads.next().is_none() && stack.len() == 1, || {
            format!("{task:?} has more inputs than its program")
        })?;
        let mut result = stack.remove(0);
        for symbol in &mut result {
            symbol.finished = task.last;
        }
        Ok(result)
    }
}

/// Whose block a node is, by its first leaf and its end.
type Owners = HashMap<(usize, usize), (usize, usize)>;

/// The sum over the fixed tree below `node`, straight from its definition, of blocks that `brought` names.
fn sum(node: Range<usize>, owners: &Owners, brought: &dyn Fn(usize, usize) -> Symbol) -> Symbol {
    if let Some((rank, block)) = owners.get(&(node.start, node.end)) {
        return brought(*rank, *block);
    }
    let mut left = 1;
    while 2 * left < node.len() {
        left *= 2;
    }
    let middle = node.start + left;
    let left = sum(node.start..middle, owners, brought);
    add(left, sum(middle..node.end, owners, brought))
}

/// Compares all results with what the operation promises.
fn verify(simulation: &Simulation<'_>, expected: &mut Expected) -> Check {
    let spec = simulation.spec;
    let world = spec.world();
    let leaves = |from: usize, slot: usize, len: usize| -> Vec<Symbol> {
        (0..len).map(|at| leaf(from, slot, at)).collect()
    };
    let out = |rank: usize, slot: usize| simulation.memory[rank].slot(Space::Out, slot);
    let same = |rank: usize, slot: usize, want: &[Symbol]| {
        ensure(out(rank, slot) == want, || {
            format!("slot {slot} of rank {rank} is wrong")
        })
    };
    let reduced = |rank: usize, want: &[Symbol], first: &[Symbol]| {
        if spec.fitting().keeps_order() {
            return same(rank, 0, want);
        }
        let sums = out(rank, 0).iter().zip(want);
        ensure(
            sums.into_iter()
                .all(|(got, want)| got.sum == want.sum && got.finished),
            || format!("rank {rank} has not added each leaf once"),
        )?;
        ensure(out(rank, 0) == first, || {
            format!("rank {rank} has other bytes than rank 0")
        })
    };
    let Pattern { kind, counts, root } = &spec.pattern;
    let len = counts.longest();
    if *kind == Kind::ReduceScatter {
        for (rank, plan) in simulation.plans.iter().enumerate() {
            let own = |share: &Share| (share.place.space, share.place.slot) == (Space::In, rank);
            ensure(!plan.lends.iter().flatten().any(own), || {
                format!("a peer reads the slice that the result of rank {rank} may replace")
            })?;
        }
    }
    if !spec.pattern.in_place() {
        for (rank, memory) in simulation.memory.iter().enumerate() {
            let before = Memory::new(spec, rank, &[]);
            let end = *before.bounds[0].last().unwrap_or(&0);
            ensure(memory.cells[..end] == before.cells[..end], || {
                format!("what rank {rank} brought is lost")
            })?;
        }
    }
    for rank in 0..world {
        match kind {
            Kind::AllReduce => {
                reduced(rank, &expected.sums(spec, 0, len), out(0, 0))?;
            }
            Kind::Reduce if rank == *root => {
                reduced(rank, &expected.sums(spec, 0, len), out(rank, 0))?;
            }
            Kind::Reduce if spec.algorithm.rounds_once() => {
                same(rank, 0, &leaves(rank, 0, len))?;
            }
            Kind::ReduceScatter => {
                let want = expected.sums(spec, rank, counts.of(rank));
                reduced(rank, &want, out(rank, 0))?;
            }
            Kind::Broadcast => same(rank, 0, &leaves(*root, 0, len))?,
            Kind::AllGather => {
                for from in 0..world {
                    same(rank, from, &leaves(from, 0, counts.of(from)))?;
                }
            }
            Kind::Gather if rank == *root => {
                for from in 0..world {
                    same(rank, from, &leaves(from, 0, counts.of(from)))?;
                }
            }
            Kind::Scatter => {
                same(rank, 0, &leaves(*root, rank, counts.of(rank)))?;
            }
            Kind::AllToAll => {
                for from in 0..world {
                    let len = match counts {
                        Counts::Same(each) => *each,
                        Counts::Each(counts) => counts[from * world + rank],
                    };
                    same(rank, from, &leaves(from, rank, len))?;
                }
            }
            Kind::Reduce | Kind::Gather | Kind::Barrier => {}
        }
    }
    Ok(())
}

/// Sums over the fixed tree, made once for all runs of a specification.
#[derive(Default)]
struct Expected {
    made: HashMap<usize, Vec<Symbol>>,
}

impl Expected {
    /// Of `len` elements; of a reduce-scatter those of `slot`.
    fn sums(&mut self, spec: &Spec, slot: usize, len: usize) -> Vec<Symbol> {
        let scattered = spec.pattern.kind == Kind::ReduceScatter;
        let make = || {
            let tree = &spec.tree;
            let mut owners = Owners::new();
            for rank in 0..tree.world() {
                for (block, leaves) in tree.blocks(rank).iter().enumerate() {
                    owners.insert((leaves.start, leaves.end), (rank, block));
                }
            }
            let element = |at| {
                let of_block = |block| block * tree.world() + slot;
                let brought =
                    |rank, block| leaf(rank, if scattered { of_block(block) } else { block }, at);
                let mut sum = sum(0..tree.leaves(), &owners, &brought);
                sum.finished = true;
                sum
            };
            (0..len).map(element).collect()
        };
        self.made.entry(slot).or_insert_with(make).clone()
    }
}

/// Checks one specification over all links that it may meet.
fn check(spec: &Spec) -> Check {
    let plans = Plan::all(spec);
    // A rank makes of the others' plans only what concerns it.
    for rank in [0, spec.world() / 2, spec.world() - 1] {
        ensure(plans[rank] == Plan::new(spec, rank), || {
            format!("rank {rank} makes another plan by itself: {spec:?}")
        })?;
    }
    let mut expected = Expected::default();
    let links = match spec.hosts.count() == spec.world() {
        true => &[Links::Streams][..],
        false => &[Links::Memory, Links::Streams],
    };
    for links in links {
        Simulation::run(spec, &plans, *links)
            .and_then(|simulation| verify(&simulation, &mut expected))
            .map_err(|error| {
                let (leaves, line) = (spec.tree.leaves(), spec.line);
                format!(
                    "{} {:?}, {leaves} leaves, lines of {line}, {:?}, {links:?}: {error}",
                    spec.algorithm, spec.pattern, spec.hosts
                )
            })?;
    }
    Ok(())
}
