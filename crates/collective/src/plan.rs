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
mod direct;
mod layout;
mod pattern;

use std::sync::Arc;

pub use self::algorithm::Algorithm;
pub(crate) use self::algorithm::Hosts;
pub(crate) use self::layout::{Layout, Partition};
pub(crate) use self::pattern::{Counts, Pattern};
use crate::tree::Tree;

/// Most that a rank lends by copying it next to its header instead of into a buffer.
///
/// *Units*: bytes.
pub(crate) const INLINE_BYTES_MAX: usize = 1024;

/// A plan that cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The leaves cannot be dealt to that many ranks.
    #[error("a tree over {leaves} leaves cannot be dealt to {world} ranks")]
    Leaves {
        /// Leaves asked for.
        leaves: usize,
        /// Ranks that should share them.
        world: usize,
    },
}

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
        match self.algorithm {
            Algorithm::OneShot => true,
            Algorithm::Direct => !matches!(
                self.pattern,
                Pattern::AllReduce { .. } | Pattern::Reduce { .. }
            ),
        }
    }

    /// Elements of `In` on the rank that brings the most.
    pub(crate) fn largest_input(&self) -> usize {
        let total = |rank| Layout::of(self, rank, Space::In).total();
        match &self.pattern {
            // Every rank but the root brings nothing.
            Pattern::Scatter { root, .. } => total(*root),
            Pattern::AllReduce { .. } | Pattern::Reduce { .. } => {
                (0..self.world()).map(total).max().unwrap_or(0)
            }
            Pattern::AllGather { counts } | Pattern::Gather { counts, .. } => counts.longest(),
            Pattern::AllToAll {
                counts: Counts::Each(_),
            } => (0..self.world()).map(total).max().unwrap_or(0),
            Pattern::Broadcast { .. }
            | Pattern::ReduceScatter { .. }
            | Pattern::AllToAll { .. }
            | Pattern::Barrier => total(0),
        }
    }

    /// The rounds of one rank, and the elements of its `Temp` slots.
    fn rounds(&self, rank: usize) -> (Vec<Round>, Vec<usize>) {
        let (mut rounds, temp) = match self.algorithm {
            Algorithm::Direct => (direct::direct(self, rank), Vec::new()),
            Algorithm::OneShot => (direct::one_shot(self, rank), Vec::new()),
        };
        for round in &mut rounds {
            round.tasks.retain(|task| task.len > 0);
        }
        (rounds, temp)
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
    /// *Cost*: makes the tasks of all ranks, because what others do with this rank's memory is in theirs. Kept by the
    /// engine for the next call with the same [`Spec`].
    pub(crate) fn new(spec: &Spec, rank: usize) -> Self {
        let (rounds, temp) = spec.rounds(rank);
        let mut lends = vec![Vec::new(); rounds.len()];
        let mut gets = vec![Vec::new(); rounds.len()];
        for peer in (0..spec.world()).filter(|peer| *peer != rank) {
            let (theirs, _) = spec.rounds(peer);
            for (i, task) in theirs
                .iter()
                .enumerate()
                .flat_map(|(i, round)| round.tasks.iter().map(move |task| (i, task)))
            {
                let share = |spot: &Spot| Share {
                    peer,
                    place: spot.place,
                    len: task.len,
                };
                let mine = |spot: &&Spot| spot.rank == rank;
                lends[i].extend(task.inputs.iter().filter(mine).map(share));
                gets[i].extend(task.outputs.iter().filter(mine).map(share));
            }
        }
        let in_place = spec.pattern.in_place();
        let lends_copies = rounds.iter().zip(&lends).any(|(round, lends)| {
            let outputs = round.tasks.iter().flat_map(|task| {
                let own = task.outputs.iter().filter(|spot| spot.rank == rank);
                own.map(|spot| (spot.place, task.len))
            });
            let mut written = outputs;
            written.any(|(place, len)| {
                lends
                    .iter()
                    .any(|share| overlap(in_place, (place, len), (share.place, share.len)))
            })
        });
        Self {
            rounds,
            lends,
            gets,
            temp,
            lends_copies,
        }
    }
}

/// Whether two ranges of one rank's memory have an element in common.
fn overlap(in_place: bool, (a, a_len): (Place, usize), (b, b_len): (Place, usize)) -> bool {
    let one_memory =
        a.space == b.space || in_place && a.space != Space::Temp && b.space != Space::Temp;
    one_memory && a.slot == b.slot && a.at < b.at + b_len && b.at < a.at + a_len
}
