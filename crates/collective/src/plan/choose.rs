//! Which algorithm an operation is done by: a table, and what a user asked for in its place.

use super::overrides::Wanted;
use super::{Algorithm, Hosts, Kind};
use crate::tree::Tree;

/// Up to here a reduction in shared memory is one-shot: its bytes travel with the call's header, without a second meeting.
///
/// *Units*: bytes, as in all limits here.
pub(crate) const INLINE_BYTES_MAX: usize = 1 << 10;

/// Groups of at most so many ranks send small reductions from each to all. Measured over loopback on 4 cores, 1 KiB: one-shot takes
/// 61 us where a tree takes 119 on 4 ranks, 170 and 318 on 8, and no less than the tree on 16.
const SMALL_WORLD: usize = 8;

/// Up to here a reduction over streams is one-shot in a small group: 7 times 8 KiB are on a wire of 10 Gbit/s in 46 us, about
/// the round trip that one round less saves. Over loopback it wins on 8 ranks up to here (248 us against 378 by direct
/// exchange) and loses at 32 KiB (498 against 480).
const ONE_SHOT_BYTES_MAX: usize = 8 << 10;

/// Groups of more ranks than this send small reductions up and down a tree: `2 log2 W` rounds instead of `2 (W - 1)` messages of
/// each rank. Measured between network namespaces with a delay of 200 us, all on 4 cores, 8 B: direct exchange takes 0.9 ms
/// on 8 ranks where a tree takes 2.3, 2.2 and 4.2 on 16, 5.7 and 11.9 on 32. Larger groups are not measured.
const DIRECT_WORLD_MAX: usize = 64;

/// Up to here that tree is used; above, bytes cost more than messages, and direct exchange sends the fewest.
const TREE_BYTES_MAX: usize = 32 << 10;

/// From here on the root of a broadcast over streams deals a part to each host, and the hosts give each other the rest: the root
/// sends the data once, not `log2 W` times. Measured between 8 network namespaces with 200 us and 1 Gbit/s: 256 KiB take 5 ms
/// in parts, 8 by a tree and 15 from the root to all; 4 MiB take 110, 194 and 260.
const DEAL_BROADCAST_BYTES_MIN: usize = 256 << 10;

/// Fewest ranks of a broadcast by a tree or in parts: up to 3 the root sends no more by itself than it would in them.
const RELAY_WORLD_MIN: usize = 4;

/// From here on an operation goes by hosts where several ranks share some: what is saved between hosts is worth more than
/// the meetings within them. Not measured: it takes several machines.
const HIERARCHICAL_BYTES_MIN: usize = 64 << 10;

/// All that the choice depends on; equal on all ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Situation<'a> {
    pub(crate) kind: Kind,
    /// The longest that one rank brings or gets: of an all-gather or a reduce-scatter all ranks' slots together.
    ///
    /// *Units*: bytes.
    pub(crate) bytes: usize,
    pub(crate) tree: &'a Tree,
    pub(crate) hosts: &'a Hosts,
    /// Whether elements have 16 bits: their partial sums lose bits whenever they are stored.
    pub(crate) sixteen_bit: bool,
    /// Whether the sum must be that of the fixed tree. Never needed for integers, or for minima and maxima.
    pub(crate) ordered: bool,
    /// What the user asked for.
    pub(crate) wanted: Option<Wanted>,
}

/// The algorithm, and why it is not the one that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) algorithm: Algorithm,
    /// To be said to the user once.
    pub(crate) refused: Option<Unfit>,
}

/// Why an operation cannot be done by an algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub(crate) enum Unfit {
    #[error("{} is not done by {algorithm}", kind.name())]
    NoSuch { algorithm: Algorithm, kind: Kind },
    #[error("{algorithm} needs ranks whose leaves are one node of the tree each")]
    Blocks { algorithm: Algorithm },
    #[error(
        "{algorithm} needs each rank on a host of its own for a reduce-scatter: its partial sums cannot be shared in memory"
    )]
    Shared { algorithm: Algorithm },
    #[error("{algorithm} needs several hosts, and several ranks on some")]
    Hosts { algorithm: Algorithm },
    #[error("{algorithm} needs hosts whose ranks are neighbours, to keep the order of additions")]
    Scattered { algorithm: Algorithm },
    #[error("{algorithm} does not keep the order of additions, which is asked for")]
    Order { algorithm: Algorithm },
    #[error(
        "{algorithm} rounds partial sums to 16 bits, and the order of additions, which is asked for, has no such roundings"
    )]
    Rounding { algorithm: Algorithm },
}

/// Picks the algorithm of an operation: the user's, if it can be, else the table's.
pub(crate) fn choose(situation: &Situation<'_>) -> Choice {
    let mut refused = None;
    if let Some(wanted) = situation.wanted {
        match situation.allows(wanted.algorithm) {
            Ok(()) => {
                return Choice {
                    algorithm: wanted.algorithm,
                    refused: None,
                };
            }
            // One algorithm for all operations means those that have it; a single rank has no choice at all.
            Err(Unfit::NoSuch { .. }) if !wanted.named => {}
            Err(_) if situation.tree.world() == 1 => {}
            Err(reason) => refused = Some(reason),
        }
    }
    let mut candidates = table(situation).into_iter();
    let algorithm = candidates.find(|algorithm| situation.allows(*algorithm).is_ok());
    Choice {
        algorithm: algorithm.unwrap_or(Algorithm::Direct),
        refused,
    }
}

/// What suits best, first; then direct exchange, which always fits.
fn table(situation: &Situation<'_>) -> [Algorithm; 2] {
    use Algorithm::{Direct, Hierarchical, OneShot, Tree};
    let Situation { kind, bytes, .. } = *situation;
    let world = situation.tree.world();
    let reduces_whole = matches!(kind, Kind::AllReduce | Kind::Reduce);
    if world == 1 {
        return [Direct, Direct];
    }
    if situation.hosts.count() == 1 {
        return match reduces_whole && bytes <= INLINE_BYTES_MAX {
            true => [OneShot, Direct],
            false => [Direct, Direct],
        };
    }
    if situation.hosts.mixed() && bytes >= HIERARCHICAL_BYTES_MIN {
        return [Hierarchical, Direct];
    }
    let tree = world > DIRECT_WORLD_MAX && bytes <= TREE_BYTES_MAX;
    match kind {
        _ if reduces_whole && world <= SMALL_WORLD && bytes <= ONE_SHOT_BYTES_MAX => {
            [OneShot, Direct]
        }
        _ if reduces_whole && tree => [Tree, Direct],
        Kind::Broadcast if world >= RELAY_WORLD_MIN && bytes >= DEAL_BROADCAST_BYTES_MIN => {
            [Hierarchical, Direct]
        }
        Kind::Broadcast if world >= RELAY_WORLD_MIN => [Tree, Direct],
        _ => [Direct, Direct],
    }
}

impl Situation<'_> {
    /// Whether the operation can be done so, with the sum that is asked for.
    fn allows(&self, algorithm: Algorithm) -> Result<(), Unfit> {
        fit(algorithm, self.kind, self.tree, self.hosts)?;
        if !self.ordered || !self.kind.reduces() {
            return Ok(());
        }
        if !algorithm.keeps_order() {
            return Err(Unfit::Order { algorithm });
        }
        if self.sixteen_bit && !algorithm.rounds_once() {
            return Err(Unfit::Rounding { algorithm });
        }
        Ok(())
    }
}

/// Whether there is a plan for that, whatever it does to the order of additions.
pub(super) fn fit(
    algorithm: Algorithm,
    kind: Kind,
    tree: &Tree,
    hosts: &Hosts,
) -> Result<(), Unfit> {
    use Algorithm::{Direct, Hierarchical, OneShot, Ring, Tree};
    use Kind::{AllGather, AllReduce, Broadcast, Reduce, ReduceScatter};
    let world = tree.world();
    let known = match algorithm {
        Direct => true,
        OneShot => matches!(kind, AllReduce | Reduce),
        Ring => matches!(kind, AllReduce | AllGather | ReduceScatter),
        Tree => matches!(kind, AllReduce | Reduce | Broadcast),
        Hierarchical => matches!(
            kind,
            AllReduce | Reduce | Broadcast | AllGather | ReduceScatter
        ),
    };
    if !known {
        return Err(Unfit::NoSuch { algorithm, kind });
    }
    // A broadcast needs no ranks that share a host: its parts go round between hosts.
    let apart = kind == Broadcast && hosts.count() > 1;
    if algorithm == Hierarchical && !hosts.mixed() && !apart {
        return Err(Unfit::Hosts { algorithm });
    }
    if !kind.reduces() {
        return Ok(());
    }
    match algorithm {
        Tree if !tree.is_plain() => Err(Unfit::Blocks { algorithm }),
        Ring if kind == ReduceScatter && hosts.count() < world => Err(Unfit::Shared { algorithm }),
        Hierarchical if hosts.ranges().is_none() => Err(Unfit::Scattered { algorithm }),
        _ => Ok(()),
    }
}

#[cfg(test)]
impl<'a> Situation<'a> {
    /// Of `f32`, in order, with the table alone.
    pub(crate) fn plain(kind: Kind, bytes: usize, tree: &'a Tree, hosts: &'a Hosts) -> Self {
        Self {
            kind,
            bytes,
            tree,
            hosts,
            sixteen_bit: false,
            ordered: true,
            wanted: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Override;

    /// The choice for `f32`, in order, with the table alone.
    fn picked(kind: Kind, bytes: usize, hosts: &Hosts, world: usize) -> Algorithm {
        let choice = choose(&Situation::plain(
            kind,
            bytes,
            &Tree::per_rank(world),
            hosts,
        ));
        assert_eq!(choice.refused, None);
        choice.algorithm
    }

    fn pairs(world: usize) -> Hosts {
        Hosts::new((0..world).map(|rank| rank / 2).collect())
    }

    #[test]
    fn one_host_folds_directly_unless_the_data_fits_beside_the_header() {
        use Algorithm::{Direct, OneShot};
        for (kind, bytes, expected) in [
            (Kind::AllReduce, 0, OneShot),
            (Kind::AllReduce, 1024, OneShot),
            (Kind::AllReduce, 1025, Direct),
            (Kind::AllReduce, 1 << 30, Direct),
            (Kind::Reduce, 1024, OneShot),
            (Kind::Broadcast, 8, Direct),
            (Kind::Broadcast, 1 << 30, Direct),
            (Kind::ReduceScatter, 8, Direct),
            (Kind::Barrier, 0, Direct),
        ] {
            for world in [2, 3, 8, 64] {
                let hosts = Hosts::one(world);
                assert_eq!(picked(kind, bytes, &hosts, world), expected, "{kind:?}");
            }
        }
    }

    #[test]
    fn streams_trade_rounds_for_messages_and_bytes() {
        use Algorithm::{Direct, Hierarchical, OneShot, Tree};
        for (kind, bytes, world, expected) in [
            (Kind::AllReduce, 8 << 10, 2, OneShot),
            (Kind::AllReduce, 8 << 10, 8, OneShot),
            (Kind::AllReduce, (8 << 10) + 1, 8, Direct),
            (Kind::AllReduce, 8, 16, Direct),
            (Kind::AllReduce, 8, 64, Direct),
            (Kind::AllReduce, 32 << 10, 65, Tree),
            (Kind::AllReduce, (32 << 10) + 1, 65, Direct),
            (Kind::Reduce, 8 << 10, 8, OneShot),
            (Kind::Reduce, 8 << 10, 9, Direct),
            (Kind::Reduce, 8 << 10, 80, Tree),
            (Kind::Reduce, 1 << 20, 80, Direct),
            (Kind::Broadcast, 8, 3, Direct),
            (Kind::Broadcast, 1 << 20, 3, Direct),
            (Kind::Broadcast, 8, 4, Tree),
            (Kind::Broadcast, 1 << 20, 4, Hierarchical),
            (Kind::AllGather, 8 << 10, 8, Direct),
            (Kind::AllGather, 8 << 10, 12, Direct),
            (Kind::AllGather, 1 << 20, 12, Direct),
            (Kind::ReduceScatter, 8 << 10, 16, Direct),
            (Kind::ReduceScatter, 8 << 10, 12, Direct),
            (Kind::ReduceScatter, 1 << 20, 16, Direct),
            (Kind::Gather, 8, 64, Direct),
            (Kind::Scatter, 8, 64, Direct),
            (Kind::AllToAll, 8, 64, Direct),
            (Kind::Barrier, 0, 64, Direct),
        ] {
            let hosts = Hosts::apart(world);
            assert_eq!(
                picked(kind, bytes, &hosts, world),
                expected,
                "{kind:?} of {bytes} bytes on {world} ranks"
            );
        }
    }

    #[test]
    fn hosts_of_several_ranks_are_used_for_large_data() {
        use Algorithm::{Direct, Hierarchical, OneShot};
        for kind in [
            Kind::AllReduce,
            Kind::Reduce,
            Kind::Broadcast,
            Kind::AllGather,
            Kind::ReduceScatter,
        ] {
            assert_eq!(picked(kind, 64 << 10, &pairs(8), 8), Hierarchical);
        }
        assert_eq!(picked(Kind::AllReduce, 8 << 10, &pairs(8), 8), OneShot);
        assert_eq!(picked(Kind::AllReduce, 9 << 10, &pairs(8), 8), Direct);
        assert_eq!(picked(Kind::AllToAll, 1 << 20, &pairs(8), 8), Direct);
        let scattered = Hosts::new(vec![0, 1, 0, 1]);
        assert_eq!(picked(Kind::AllReduce, 1 << 20, &scattered, 4), Direct);
        assert_eq!(
            picked(Kind::Broadcast, 1 << 20, &scattered, 4),
            Hierarchical
        );
    }

    #[test]
    fn sixteen_bits_in_order_are_rounded_once() {
        let tree = Tree::per_rank(16);
        for hosts in [Hosts::one(16), Hosts::apart(16), pairs(16)] {
            for kind in Kind::ALL.into_iter().filter(|kind| kind.reduces()) {
                for bytes in [8, 4 << 10, 20 << 10, 1 << 20] {
                    let mut situation = Situation {
                        kind,
                        bytes,
                        tree: &tree,
                        hosts: &hosts,
                        sixteen_bit: true,
                        ordered: true,
                        wanted: None,
                    };
                    assert!(choose(&situation).algorithm.rounds_once());
                    situation.ordered = false;
                    assert!(choose(&situation).algorithm.keeps_order());
                }
            }
        }
    }

    #[test]
    fn leaves_that_are_no_nodes_are_folded_at_once() {
        let tree = Tree::split(20, 16).unwrap();
        let hosts = Hosts::apart(16);
        let situation = Situation {
            kind: Kind::AllReduce,
            bytes: 4 << 10,
            tree: &tree,
            hosts: &hosts,
            sixteen_bit: false,
            ordered: true,
            wanted: None,
        };
        assert_eq!(choose(&situation).algorithm, Algorithm::Direct);
    }

    /// What is said when `text` is asked for, or the algorithm that is taken then.
    fn asked(text: &str, kind: Kind, world: usize, ordered: bool) -> Result<Algorithm, String> {
        let (tree, hosts) = (Tree::per_rank(world), Hosts::apart(world));
        let choice = choose(&Situation {
            kind,
            bytes: 1 << 20,
            tree: &tree,
            hosts: &hosts,
            sixteen_bit: false,
            ordered,
            wanted: Override::parse(text).unwrap().of(kind),
        });
        match choice.refused {
            None => Ok(choice.algorithm),
            Some(reason) => Err(reason.to_string()),
        }
    }

    #[test]
    fn what_is_asked_for_wins_over_the_table() {
        use Algorithm::{Direct, OneShot, Ring, Tree};
        for (text, kind, expected) in [
            ("ring", Kind::AllReduce, Ring),
            ("allreduce:one-shot", Kind::AllReduce, OneShot),
            ("tree", Kind::Reduce, Tree),
            ("broadcast:direct", Kind::Broadcast, Direct),
            ("ring", Kind::AllGather, Ring),
            ("ring", Kind::AllToAll, Direct),
        ] {
            assert_eq!(asked(text, kind, 4, false), Ok(expected), "{text}");
        }
        assert_eq!(asked("ring", Kind::AllReduce, 1, true), Ok(Direct));
    }

    #[test]
    fn a_refusal_says_why() {
        for (text, kind, world, expected) in [
            (
                "ring",
                Kind::AllReduce,
                4,
                "ring does not keep the order of additions, which is asked for",
            ),
            (
                "alltoall:ring",
                Kind::AllToAll,
                4,
                "all-to-all is not done by ring",
            ),
            (
                "hierarchical",
                Kind::AllReduce,
                4,
                "hierarchical needs several hosts, and several ranks on some",
            ),
        ] {
            assert_eq!(asked(text, kind, world, true), Err(expected.into()));
        }
    }
}
