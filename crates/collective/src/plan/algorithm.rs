//! The ways to do an operation, and where its ranks are.

use std::ops::Range;
use std::str::FromStr;

use super::PlanError;
use crate::named::named;

named! {
    /// How an operation's plan is made.
    ///
    /// A group picks one for each operation by a fixed table of pattern, bytes, ranks and hosts; `docs/algorithms.md` has the
    /// table, and the rounds, messages and bytes of each.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[non_exhaustive]
    pub enum Algorithm: 5 {
        /// The owner of a slice takes it from all ranks at once, combines it, and gives the result to all.
        Direct = 1, "direct";
        /// Every rank takes everything from all others and combines it by itself: one round.
        OneShot = 2, "one-shot";
        /// Slices go round from neighbour to neighbour.
        Ring = 4, "ring";
        /// A binomial tree: pairs of ranks, then pairs of pairs.
        Tree = 5, "tree";
        /// First within each host, then between hosts, then within each host again.
        Hierarchical = 6, "hierarchical";
    }
}

impl Algorithm {
    /// Whether additions follow the group's fixed tree, so that the sum has the same bytes as by any other one that does.
    ///
    /// *Numerics*: true of numbers of 32 and 64 bits. Those of 16 bits are rounded between rounds; only [`Direct`] and
    /// [`OneShot`], which have no partial sums, then agree with each other.
    ///
    /// [`Direct`]: Self::Direct
    /// [`OneShot`]: Self::OneShot
    pub fn keeps_order(self) -> bool {
        self != Self::Ring
    }

    /// Whether a reduction stores no partial sums between rounds, which numbers of 16 bits could not hold.
    pub(crate) fn rounds_once(self) -> bool {
        matches!(self, Self::Direct | Self::OneShot)
    }
}

impl FromStr for Algorithm {
    type Err = PlanError;

    fn from_str(word: &str) -> Result<Self, PlanError> {
        Self::ALL
            .into_iter()
            .find(|algorithm| algorithm.name() == word)
            .ok_or_else(|| PlanError::Algorithm { word: word.into() })
    }
}

/// Which ranks share a host's memory: the host of each rank, numbered in the order of their lowest ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hosts {
    host: Vec<usize>,
    /// The number of each rank among those of its host.
    local: Vec<usize>,
    /// The ranks of each host, ascending.
    ranks: Vec<Vec<usize>>,
    smallest: usize,
}

impl Hosts {
    /// All ranks on one host.
    pub(crate) fn one(world: usize) -> Self {
        Self::new(vec![0; world])
    }

    /// One host for each rank: nobody shares memory.
    pub(crate) fn apart(world: usize) -> Self {
        Self::new((0..world).collect())
    }

    /// `host[rank]`, numbered from 0 without gaps.
    pub(crate) fn new(host: Vec<usize>) -> Self {
        let count = host.iter().max().map_or(0, |last| last + 1);
        let mut ranks = vec![Vec::new(); count];
        let mut local = Vec::with_capacity(host.len());
        for (rank, host) in host.iter().enumerate() {
            local.push(ranks[*host].len());
            ranks[*host].push(rank);
        }
        let smallest = ranks.iter().map(Vec::len).min().unwrap_or(0);
        Self {
            host,
            local,
            ranks,
            smallest,
        }
    }

    pub(crate) fn host(&self, rank: usize) -> usize {
        self.host[rank]
    }

    pub(crate) fn count(&self) -> usize {
        self.ranks.len()
    }

    /// The ranks of a host, ascending.
    pub(crate) fn ranks(&self, host: usize) -> impl Iterator<Item = usize> + '_ {
        self.ranks[host].iter().copied()
    }

    /// The number of a rank among those of its host.
    pub(crate) fn local(&self, rank: usize) -> usize {
        self.local[rank]
    }

    /// How many ranks a host has.
    pub(crate) fn size(&self, host: usize) -> usize {
        self.ranks[host].len()
    }

    /// How many ranks every host has at least.
    pub(crate) fn smallest(&self) -> usize {
        self.smallest
    }

    /// The rank that is number `local` of its host.
    pub(crate) fn rank(&self, host: usize, local: usize) -> usize {
        self.ranks[host][local]
    }

    /// Whether some ranks share a host and others do not.
    pub(crate) fn mixed(&self) -> bool {
        self.count() > 1 && self.count() < self.host.len()
    }

    /// Each host's ranks as a range, unless some host's are not neighbours.
    pub(crate) fn ranges(&self) -> Option<Vec<Range<usize>>> {
        let range = |ranks: &Vec<usize>| {
            let (first, last) = (*ranks.first()?, *ranks.last()?);
            (last - first + 1 == ranks.len()).then_some(first..last + 1)
        };
        self.ranks.iter().map(range).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_and_code_is_parsed_back() {
        for algorithm in Algorithm::ALL {
            assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
            assert_eq!(Algorithm::from_code(algorithm.code()), Some(algorithm));
        }
    }

    #[test]
    fn an_unknown_name_is_quoted_beside_the_known_ones() {
        assert_eq!(
            "butterfly".parse::<Algorithm>().unwrap_err().to_string(),
            "no algorithm is called \"butterfly\", expected direct, one-shot, ring, tree or hierarchical"
        );
    }

    #[test]
    fn hosts_know_their_ranks() {
        let hosts = Hosts::new(vec![0, 0, 0, 1, 1]);
        assert_eq!((hosts.count(), hosts.smallest(), hosts.size(0)), (2, 2, 3));
        assert_eq!((hosts.host(4), hosts.local(4), hosts.rank(1, 1)), (1, 1, 4));
        assert_eq!(hosts.ranges(), Some(vec![0..3, 3..5]));
        assert!(hosts.mixed() && !Hosts::one(3).mixed() && !Hosts::apart(3).mixed());
    }

    #[test]
    fn scattered_ranks_are_no_range() {
        assert_eq!(Hosts::new(vec![0, 1, 0, 1]).ranges(), None);
    }
}
