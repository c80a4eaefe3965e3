//! The ways to do an operation.

/// How an operation's plan is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// Whoever owns a slice takes it from all ranks at once, combines it, and gives the result to all.
    Direct,
    /// Every rank takes everything from all others and combines it by itself: one round.
    OneShot,
}

impl Algorithm {
    const ALL: [Self; 2] = [Self::Direct, Self::OneShot];

    /// The name in settings and documents.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::OneShot => "one-shot",
        }
    }

    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Direct => 1,
            Self::OneShot => 2,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.code() == code)
    }
}

/// Which ranks share a host's memory: the host of each rank, numbered in the order of their lowest ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hosts {
    host: Vec<usize>,
}

impl Hosts {
    /// All ranks on one host.
    pub(crate) fn one(world: usize) -> Self {
        Self {
            host: vec![0; world],
        }
    }

    /// One host for each rank: nobody shares memory.
    pub(crate) fn apart(world: usize) -> Self {
        Self {
            host: (0..world).collect(),
        }
    }

    /// `host[rank]`, numbered from 0 without gaps.
    pub(crate) fn new(host: Vec<usize>) -> Self {
        Self { host }
    }

    pub(crate) fn host(&self, rank: usize) -> usize {
        self.host[rank]
    }

    pub(crate) fn count(&self) -> usize {
        self.host.iter().max().map_or(0, |last| last + 1)
    }

    /// The ranks of a host, ascending.
    pub(crate) fn ranks(&self, host: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.host.len()).filter(move |rank| self.host[*rank] == host)
    }
}
