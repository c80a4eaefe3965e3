//! Hosts first: what ranks of one host can do through its memory is done there, so that data crosses a network once.
//!
//! A reduction folds within each host what lies below one node of the fixed tree, then folds the hosts' nodes. Ranks with
//! the same number on their hosts deal with the same slice, so all of a host's connections carry data at once.
//!
//! *Source*: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, for
//! the exchange between hosts; the order of additions is the fixed [`Tree`]'s.

use std::ops::Range;
use std::sync::Arc;

use super::parts::{Whose, copy, fold, input, loads, output, slice, temp};
use super::{Counts, Hosts, Kind, Partition, Pattern, Round, Space, Spec, Spot, Task};
use crate::tree::Tree;

/// Patterns that go by hosts, and what the plans of all ranks have in common.
pub(super) struct ByHosts<'a> {
    spec: &'a Spec,
    /// Of reductions alone: other patterns need no hosts whose ranks are neighbours.
    tree: Option<HostTree<'a>>,
}

impl<'a> ByHosts<'a> {
    pub(super) fn new(spec: &'a Spec) -> Self {
        let tree = spec.pattern.kind.reduces().then(|| HostTree::new(spec));
        Self { spec, tree }
    }

    /// One rank's rounds, and the elements of its `Temp` slots.
    pub(super) fn rounds(&self, me: usize, whose: Whose) -> (Vec<Round>, Vec<usize>) {
        let spec = self.spec;
        let Pattern { kind, counts, root } = &spec.pattern;
        let (len, root) = (counts.longest(), *root);
        match (kind, &self.tree) {
            (Kind::AllReduce, Some(tree)) => all_reduce(spec, tree, me, len, whose),
            (Kind::Reduce, Some(tree)) => reduce(spec, tree, me, len, root, whose),
            (Kind::ReduceScatter, Some(tree)) => reduce_scatter(spec, tree, me, counts, whose),
            (Kind::Broadcast, _) => (broadcast(spec, me, len, root, whose), Vec::new()),
            (Kind::AllGather, _) => (all_gather(spec, me, counts, whose), Vec::new()),
            _ => unreachable!("`fit` lets only five patterns go by hosts"),
        }
    }

    /// Whether the tasks of `peer` may touch the memory of `rank`.
    pub(super) fn deals(&self, peer: usize, rank: usize) -> bool {
        let Spec { pattern, hosts, .. } = self.spec;
        let deputises = |a: usize, b: usize| deputy(hosts, hosts.host(a), b) == a;
        hosts.host(peer) == hosts.host(rank)
            || deputises(peer, rank)
            || deputises(rank, peer)
            || pattern.kind == Kind::Broadcast && rank == pattern.root
    }
}

/// The fixed tree, continued from the nodes that lie wholly within one host.
struct HostTree<'a> {
    tree: &'a Tree,
    hosts: &'a Hosts,
    /// Hosts in the place of ranks.
    over: Arc<Tree>,
}

impl<'a> HostTree<'a> {
    fn new(spec: &'a Spec) -> Self {
        let (tree, hosts) = (&*spec.tree, &*spec.hosts);
        let ranges = hosts
            .ranges()
            .expect("`fit` lets reductions go by hosts only where a host's ranks are neighbours");
        let leaves = |ranks: Range<usize>| {
            let last = tree.range(ranks.end - 1);
            tree.range(ranks.start).start..last.end
        };
        let over = Tree::over(tree.leaves(), ranges.into_iter().map(leaves));
        Self { tree, hosts, over }
    }

    /// The nodes of the host of `rank`, left to right.
    fn nodes(&self, rank: usize) -> &[Range<usize>] {
        self.over.blocks(self.hosts.host(rank))
    }

    /// The block of a rank that is all there is to a node, if so.
    fn block(&self, rank: usize, node: &Range<usize>) -> Option<usize> {
        self.tree.blocks(rank).iter().position(|own| own == node)
    }

    /// Makes the sum over a node of one host at `to`, from where each rank's block lies; no task where it lies at `to`
    /// already.
    fn gather(
        &self,
        node: &Range<usize>,
        len: usize,
        block: impl Fn(usize, usize) -> Spot,
        to: Spot,
    ) -> Option<Task> {
        let below = self.tree.below(node);
        let inputs = loads(&below, Whose::All, block);
        match inputs[..] {
            [only] if only == to => None,
            [only] => Some(copy(len, only, to)),
            _ => Some(fold(&below, len, inputs, false, to)),
        }
    }

    /// Finishes the sum from all hosts' nodes, wherever they lie.
    fn finish(
        &self,
        len: usize,
        whose: Whose,
        node: impl Fn(usize, usize) -> Spot,
        outputs: Vec<Spot>,
    ) -> Task {
        Task {
            len,
            inputs: loads(&self.over, whose.host_of(self.hosts), node),
            fold: Some(self.over.clone()),
            last: true,
            outputs,
        }
    }
}

/// An all-reduce or reduce cut into one slice for each local rank of the smallest host.
struct Slices<'a> {
    tree: &'a HostTree<'a>,
    slices: Partition,
}

impl<'a> Slices<'a> {
    fn new(spec: &Spec, tree: &'a HostTree<'a>, len: usize) -> Self {
        let slices = Partition::even(len, spec.hosts.smallest(), spec.line);
        Self { tree, slices }
    }

    /// The slice that the ranks numbered `local` on their hosts deal with.
    fn of(&self, local: usize) -> Range<usize> {
        if local < self.tree.hosts.smallest() {
            self.slices.range(local)
        } else {
            0..0
        }
    }

    /// Where a rank has the sum of its slice over its host's node `index`, `at` elements into the slice.
    ///
    /// A block that is a node lies where the rank brought it. One sum replaces the rank's own first block, which no
    /// other sum reads; the others need scratch memory.
    fn partial(&self, rank: usize, index: usize, at: usize) -> Spot {
        let first = self.of(self.tree.hosts.local(rank)).start + at;
        let node = &self.tree.nodes(rank)[index];
        if let Some(block) = self.tree.block(rank, node) {
            return input(rank, block, first);
        }
        if node.contains(&self.tree.tree.range(rank).start) {
            output(rank, 0, first)
        } else {
            temp(rank, index, at)
        }
    }

    /// The round within hosts, and the scratch memory that it needs.
    fn within(&self, me: usize) -> (Round, Vec<usize>) {
        let slice = self.of(self.tree.hosts.local(me));
        let (mut tasks, mut scratch) = (Vec::new(), Vec::new());
        for (index, node) in self.tree.nodes(me).iter().enumerate() {
            let to = self.partial(me, index, 0);
            let block = |rank, block| input(rank, block, slice.start);
            tasks.extend(self.tree.gather(node, slice.len(), block, to));
            let kept = to.place.space == Space::Temp;
            scratch.push(if kept { slice.len() } else { 0 });
        }
        (Round { tasks }, scratch)
    }
}

/// Within hosts each local rank folds its slice; between hosts it is folded and handed out by direct exchange; then the
/// local ranks gather the slices.
fn all_reduce(
    spec: &Spec,
    tree: &HostTree<'_>,
    me: usize,
    len: usize,
    whose: Whose,
) -> (Vec<Round>, Vec<usize>) {
    let hosts = &*spec.hosts;
    let (host, local) = (hosts.host(me), hosts.local(me));
    let cut = Slices::new(spec, tree, len);
    let (within, scratch) = cut.within(me);

    let slice = cut.of(local);
    let part = Partition::even(slice.len(), hosts.count(), spec.line).range(host);
    let mut between = Round::default();
    if !part.is_empty() {
        let node = |host, index| cut.partial(hosts.rank(host, local), index, part.start);
        let at = slice.start + part.start;
        let all = whose.host_of(hosts).among(0..hosts.count());
        let ranks = all.map(|host| hosts.rank(host, local));
        let outputs = ranks.map(|rank| output(rank, 0, at)).collect();
        let finish = tree.finish(part.len(), whose, node, outputs);
        between.tasks.push(finish);
    }

    let take = |from: usize| {
        let slice = cut.of(hosts.local(from));
        let at = slice.start;
        copy(slice.len(), output(from, 0, at), output(me, 0, at))
    };
    let others = hosts.ranks(host).filter(|rank| *rank != me);
    let tasks = others.map(take).collect();
    (vec![within, between, Round { tasks }], scratch)
}

/// As an all-reduce, but the ranks of the root's host finish the slices, and store them at the root.
fn reduce(
    spec: &Spec,
    tree: &HostTree<'_>,
    me: usize,
    len: usize,
    root: usize,
    whose: Whose,
) -> (Vec<Round>, Vec<usize>) {
    let hosts = &*spec.hosts;
    let local = hosts.local(me);
    let cut = Slices::new(spec, tree, len);
    let (within, scratch) = cut.within(me);
    let slice = cut.of(local);
    let mut between = Round::default();
    if hosts.host(me) == hosts.host(root) && !slice.is_empty() {
        let node = |host, index| cut.partial(hosts.rank(host, local), index, 0);
        let outputs = vec![output(root, 0, slice.start)];
        let finish = tree.finish(slice.len(), whose, node, outputs);
        between.tasks.push(finish);
    }
    (vec![within, between], scratch)
}

/// The local rank of `rank`'s host that deals with what belongs to a rank of another host.
fn deputy(hosts: &Hosts, host: usize, other: usize) -> usize {
    hosts.rank(host, hosts.local(other) % hosts.size(host))
}

/// Each host folds every rank's slot over its own ranks; the slot's owner finishes it. Sums stay in scratch memory, which
/// only other hosts are sent.
fn reduce_scatter(
    spec: &Spec,
    tree: &HostTree<'_>,
    me: usize,
    counts: &Counts,
    whose: Whose,
) -> (Vec<Round>, Vec<usize>) {
    let hosts = &*spec.hosts;
    let deals = |slot: usize| {
        let host = hosts.host(me);
        if hosts.host(slot) == host {
            slot == me
        } else {
            deputy(hosts, host, slot) == me
        }
    };
    let partial = |rank: usize, slot: usize, index: usize| {
        let nodes = tree.nodes(rank);
        match tree.block(rank, &nodes[index]) {
            Some(block) => slice(spec, rank, block, slot),
            None => temp(rank, slot * nodes.len() + index, 0),
        }
    };

    let (mut within, mut scratch) = (Round::default(), Vec::new());
    let is_apart = |rank: usize| hosts.host(rank) != hosts.host(me);
    let slots = match whose {
        // Within a host nothing of other hosts is touched.
        Whose::Rank(rank) if is_apart(rank) => 0..0,
        _ => 0..spec.world(),
    };
    for slot in slots {
        for (index, node) in tree.nodes(me).iter().enumerate() {
            if !deals(slot) {
                scratch.push(0);
                continue;
            }
            let to = partial(me, slot, index);
            let block = |rank, block| slice(spec, rank, block, slot);
            within
                .tasks
                .extend(tree.gather(node, counts.of(slot), block, to));
            let kept = to.place.space == Space::Temp;
            scratch.push(if kept { counts.of(slot) } else { 0 });
        }
    }
    let node = |host, index| {
        let rank = if host == hosts.host(me) {
            me
        } else {
            deputy(hosts, host, me)
        };
        partial(rank, me, index)
    };
    let tasks = vec![tree.finish(counts.of(me), whose, node, vec![output(me, 0, 0)])];
    (vec![within, Round { tasks }], scratch)
}

/// The root's host reads it all. The other hosts each take one part of every slice from the root and the rest from each
/// other, so that no host sends the data more than twice; then local ranks gather the slices.
fn broadcast(spec: &Spec, me: usize, len: usize, root: usize, whose: Whose) -> Vec<Round> {
    let hosts = &*spec.hosts;
    let (host, local) = (hosts.host(me), hosts.local(me));
    let take = |from: usize, range: Range<usize>| {
        let (from, to) = (input(from, 0, range.start), output(me, 0, range.start));
        copy(range.len(), from, to)
    };
    let mut rounds = vec![Round::default(); 3];
    if host == hosts.host(root) {
        if me != root {
            rounds[0].tasks.push(take(root, 0..len));
        }
        return rounds;
    }
    let slices = Partition::even(len, hosts.smallest(), spec.line);
    if local < hosts.smallest() {
        let slice = slices.range(local);
        let parts = Partition::even(slice.len(), hosts.count(), spec.line);
        let part = |host: usize| {
            let part = parts.range(host);
            slice.start + part.start..slice.start + part.end
        };
        rounds[0].tasks.push(take(root, part(host)));
        let all = whose.host_of(hosts).among(0..hosts.count());
        let others = all.filter(|other| *other != host);
        rounds[1].tasks = others
            .map(|other| take(hosts.rank(other, local), part(other)))
            .collect();
    }
    let others = (0..hosts.smallest()).filter(|other| *other != local);
    rounds[2].tasks = others
        .map(|other| take(hosts.rank(host, other), slices.range(other)))
        .collect();
    rounds
}

/// Each host takes every slot of another host once, dealt to its local ranks; these then read each other's.
fn all_gather(spec: &Spec, me: usize, counts: &Counts, whose: Whose) -> Vec<Round> {
    let hosts = &*spec.hosts;
    let host = hosts.host(me);
    let (mut first, mut second) = (Round::default(), Round::default());
    let slots = match whose {
        // Of another host's rank nothing is read but its own slot.
        Whose::Rank(rank) if hosts.host(rank) != host => rank..rank + 1,
        _ => 0..spec.world(),
    };
    for slot in slots {
        let to = output(me, slot, 0);
        let deputy = deputy(hosts, host, slot);
        if hosts.host(slot) == host || deputy == me {
            first
                .tasks
                .push(copy(counts.of(slot), input(slot, 0, 0), to));
        } else {
            let from = output(deputy, slot, 0);
            second.tasks.push(copy(counts.of(slot), from, to));
        }
    }
    vec![first, second]
}
