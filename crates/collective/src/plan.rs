//! What an operation does, as data: for every rank the rounds, and in each round what it folds or copies from where to where.
//!
//! A plan knows no memory, no sockets and no element type. One executor runs it: where a rank can map a peer's memory it
//! reads and writes there, elsewhere the peer sends what this rank's tasks read ([`Plan::lends`]) and what they give it
//! ([`Plan::gets`]). So every algorithm works over every transport, and one simulation checks them all.
//!
//! ```text
//!              round                                  round
//! meet  | take: read or receive inputs   | meet | take ...        | meet
//!       | fold: combine, in tree order   |      |                 |
//!       | give: store or send results    |      |                 |
//! ```

mod algorithm;
mod binomial;
mod choose;
mod direct;
mod hierarchical;
mod layout;
mod overrides;
mod parts;
mod pattern;
mod ring;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

pub use self::algorithm::Algorithm;
pub(crate) use self::algorithm::Hosts;
pub(crate) use self::choose::{INLINE_BYTES_MAX, Situation, Unfit, choose};
use self::hierarchical::ByHosts;
pub(crate) use self::layout::{Layout, Partition};
pub use self::overrides::Override;
use self::parts::Whose;
pub(crate) use self::pattern::{Counts, Kind, Pattern};
use crate::tree::Tree;

/// A plan that cannot be made, or a setting that names none.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The leaves cannot be dealt to that many ranks.
    #[error("a tree over {leaves} leaves cannot be dealt to {world} ranks")]
    Leaves {
        /// Leaves asked for.
        leaves: usize,
        /// Ranks that should share them.
        world: usize,
    },
    /// No algorithm has that name.
    #[error(
        "no algorithm is called {word:?}, expected direct, one-shot, ring, tree or hierarchical"
    )]
    Algorithm {
        /// What was given.
        word: String,
    },
    /// No operation has that name.
    #[error(
        "no operation is called {word:?}, expected allreduce, reduce, broadcast, allgather, reducescatter, gather, \
         scatter, alltoall or barrier"
    )]
    Operation {
        /// What was given.
        word: String,
    },
    /// An operation, or all of them, was given two algorithms.
    #[error("{word:?} gives an algorithm where one was given already")]
    Twice {
        /// What was given second.
        word: String,
    },
}

impl PlanError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Leaves { .. } => Some("give every rank at least one leaf".into()),
            Self::Algorithm { .. } | Self::Operation { .. } | Self::Twice { .. } => None,
        }
    }
}

paceline_rendezvous::debug_with_hint!(PlanError);

/// Which of a rank's memories a place is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Space {
    /// What the rank brings.
    In,
    /// What it gets. The same memory as `In` in operations that work in place; then slot 0 is slot 0.
    Out,
    /// Its own scratch memory: never read or written through a mapping, though peers may be sent it.
    Temp,
}

/// A place in a rank's memory: element `at` of a slot. How slots lie is the [`Layout`]'s business.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) space: Space,
    pub(crate) slot: usize,
    /// *Units*: elements.
    pub(crate) at: usize,
}

/// A place on some rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Spot {
    pub(crate) rank: usize,
    pub(crate) place: Place,
}

/// One thing that one rank does in a round: fold inputs of equal length, store the result.
///
/// In one round nobody reads what another task writes; a task may write exactly where it reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Task {
    /// Elements of every input and output; never 0.
    pub(crate) len: usize,
    /// In the order of the loads of `fold`'s program; a single one is copied.
    pub(crate) inputs: Vec<Spot>,
    /// How several inputs combine.
    pub(crate) fold: Option<Arc<Tree>>,
    /// Whether the result is finished by the division of an average.
    pub(crate) last: bool,
    /// Where the result goes.
    pub(crate) outputs: Vec<Spot>,
}

/// What one rank does between two meetings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Round {
    pub(crate) tasks: Vec<Task>,
}

/// Part of this rank's memory that a peer reads or writes in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) peer: usize,
    pub(crate) place: Place,
    pub(crate) len: usize,
}

/// What all ranks agree on about an operation, or a piece of one; enough to make every rank's plan.
#[derive(Debug, Clone)]
pub(crate) struct Spec {
    pub(crate) pattern: Pattern,
    pub(crate) algorithm: Algorithm,
    /// The order of reductions, and how many blocks each rank brings to an all-reduce. Its world is the group's.
    pub(crate) tree: Arc<Tree>,
    /// Which ranks share a host.
    pub(crate) hosts: Arc<Hosts>,
    /// Elements of one cache line: boundaries of slices fall on multiples of it.
    pub(crate) line: usize,
}

impl Spec {
    pub(crate) fn world(&self) -> usize {
        self.tree.world()
    }

    /// Whether `other` leads to the same plans. Trees and hosts are compared by identity: a group keeps its own.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.algorithm == other.algorithm
            && self.line == other.line
            && Arc::ptr_eq(&self.tree, &other.tree)
            && Arc::ptr_eq(&self.hosts, &other.hosts)
            && self.pattern == other.pattern
    }

    /// Whether one meeting is enough when what ranks lend is copied: one round in which nobody stores into another
    /// rank's memory. The same on all ranks.
    pub(crate) fn is_one_pull(&self) -> bool {
        match self.fitting() {
            Algorithm::OneShot => true,
            Algorithm::Direct => !matches!(self.pattern.kind, Kind::AllReduce | Kind::Reduce),
            _ => false,
        }
    }

    /// Elements of `In` on the rank that brings the most.
    pub(crate) fn largest_input(&self) -> usize {
        let total = |rank| Layout::of(self, rank, Space::In).total();
        (0..self.world()).map(total).max().unwrap_or(0)
    }

    /// The algorithm that plans are made by: where the one asked for does not fit, direct exchange, which always does.
    fn fitting(&self) -> Algorithm {
        let fits = choose::fit(self.algorithm, self.pattern.kind, &self.tree, &self.hosts);
        match fits {
            Ok(()) if self.world() > 1 => self.algorithm,
            _ => Algorithm::Direct,
        }
    }
}

/// Makes the rounds of ranks by an algorithm that fits.
struct Planner<'a> {
    spec: &'a Spec,
    algorithm: Algorithm,
    by_hosts: Option<ByHosts<'a>>,
}

impl<'a> Planner<'a> {
    fn new(spec: &'a Spec) -> Self {
        let algorithm = spec.fitting();
        let by_hosts = (algorithm == Algorithm::Hierarchical).then(|| ByHosts::new(spec));
        Self {
            spec,
            algorithm,
            by_hosts,
        }
    }

    /// The rounds of one rank, and the elements of its `Temp` slots. Of its tasks there may be only the places that count.
    fn rounds(&self, rank: usize, whose: Whose) -> (Vec<Round>, Vec<usize>) {
        let spec = self.spec;
        let (mut rounds, temp) = match (self.algorithm, &self.by_hosts) {
            (_, Some(by_hosts)) => by_hosts.rounds(rank, whose),
            (Algorithm::OneShot, _) => (direct::one_shot(spec, rank, whose), Vec::new()),
            (Algorithm::Ring, _) => ring::ring(spec, rank),
            (Algorithm::Tree, _) => (binomial::tree(spec, rank), Vec::new()),
            _ => (direct::direct(spec, rank, whose), Vec::new()),
        };
        for round in &mut rounds {
            round.tasks.retain(|task| task.len > 0);
        }
        (rounds, temp)
    }

    /// Whether the tasks of `peer` may touch the memory of `rank`.
    fn deals(&self, peer: usize, rank: usize) -> bool {
        match (self.algorithm, &self.by_hosts) {
            (_, Some(by_hosts)) => by_hosts.deals(peer, rank),
            (Algorithm::Ring, _) => peer == (rank + 1) % self.spec.world(),
            _ => true,
        }
    }
}

/// One rank's part in an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    /// As many on every rank.
    pub(crate) rounds: Vec<Round>,
    /// By round: what peers read of this rank's memory, by peer and in the order of the peer's tasks and inputs.
    pub(crate) lends: Vec<Vec<Share>>,
    /// By round: what peers store into this rank's memory, by peer and in the order of the peer's tasks and outputs.
    pub(crate) gets: Vec<Vec<Share>>,
    /// Elements of each `Temp` slot.
    pub(crate) temp: Vec<usize>,
    /// Whether peers read, in the same round, what this rank writes: they must be lent a copy then.
    pub(crate) lends_copies: bool,
}

impl Plan {
    /// *Cost*: grows with the world, because what others do with this rank's memory is in their tasks. Kept by the engine for
    /// the next call with the same [`Spec`].
    pub(crate) fn new(spec: &Spec, rank: usize) -> Self {
        let planner = Planner::new(spec);
        let (rounds, temp) = planner.rounds(rank, Whose::All);
        let mut plan = Self::alone(rounds, temp);
        let peers = (0..spec.world()).filter(|peer| *peer != rank);
        for peer in peers.filter(|peer| planner.deals(*peer, rank)) {
            let (theirs, _) = planner.rounds(peer, Whose::Rank(rank));
            for_each_share(peer, &theirs, |round, access, owner, share| {
                if owner == rank {
                    plan.shares(access)[round].push(share);
                }
            });
        }
        plan.mark_copies(spec, rank);
        plan
    }

    /// The plans of all ranks. *Cost*: that of two plans.
    #[cfg(test)]
    fn all(spec: &Spec) -> Vec<Self> {
        let planner = Planner::new(spec);
        let rounds = |rank| planner.rounds(rank, Whose::All);
        let all: Vec<_> = (0..spec.world()).map(rounds).collect();
        let mut plans: Vec<Self> = all
            .iter()
            .map(|(rounds, temp)| Self::alone(rounds.clone(), temp.clone()))
            .collect();
        for (peer, (theirs, _)) in all.iter().enumerate() {
            for_each_share(peer, theirs, |round, access, owner, share| {
                plans[owner].shares(access)[round].push(share);
            });
        }
        for (rank, plan) in plans.iter_mut().enumerate() {
            plan.mark_copies(spec, rank);
        }
        plans
    }

    fn alone(rounds: Vec<Round>, temp: Vec<usize>) -> Self {
        let none = vec![Vec::new(); rounds.len()];
        Self {
            lends: none.clone(),
            gets: none,
            rounds,
            temp,
            lends_copies: false,
        }
    }

    fn shares(&mut self, access: Access) -> &mut Vec<Vec<Share>> {
        match access {
            Access::Read => &mut self.lends,
            Access::Write => &mut self.gets,
        }
    }

    fn mark_copies(&mut self, spec: &Spec, rank: usize) {
        let in_place = spec.pattern.in_place();
        let memory = |place: Place| match place.space {
            Space::Out if in_place => (Space::In, place.slot),
            space => (space, place.slot),
        };
        self.lends_copies = self.rounds.iter().zip(&self.lends).any(|(round, lends)| {
            let mut lent: HashMap<(Space, usize), Vec<Range<usize>>> = HashMap::new();
            for share in lends {
                let range = share.place.at..share.place.at + share.len;
                lent.entry(memory(share.place)).or_default().push(range);
            }
            let mut written = round.tasks.iter().flat_map(|task| {
                let own = task.outputs.iter().filter(|spot| spot.rank == rank);
                own.map(|spot| (spot.place, task.len))
            });
            written.any(|(place, len)| {
                let mut lent = lent.get(&memory(place)).into_iter().flatten();
                lent.any(|lent| place.at < lent.end && lent.start < place.at + len)
            })
        });
    }
}

/// What a task does with memory of another rank.
#[derive(Debug, Clone, Copy)]
enum Access {
    Read,
    Write,
}

/// Calls `note(round, access, owner, share)` for all that a rank's tasks do with memory of others, in their order.
fn for_each_share(
    rank: usize,
    rounds: &[Round],
    mut note: impl FnMut(usize, Access, usize, Share),
) {
    for (i, round) in rounds.iter().enumerate() {
        for task in &round.tasks {
            let mut each = |access, spots: &[Spot]| {
                for spot in spots.iter().filter(|spot| spot.rank != rank) {
                    let share = Share {
                        peer: rank,
                        place: spot.place,
                        len: task.len,
                    };
                    note(i, access, spot.rank, share);
                }
            };
            each(Access::Read, &task.inputs);
            each(Access::Write, &task.outputs);
        }
    }
}
