//! Which ranks really share a host: those that seem to try it out, and all ranks draw the same conclusion.
//!
//! Names do not settle it. Two containers may have one host name and one boot, and the identity of a network namespace is
//! not always readable. So each rank connects to the lower ranks of what seems to be its host, over the kind of Unix socket
//! that will carry the descriptors of shared memory, to names that cannot be guessed. Ranks share a host if all of them
//! reach each other.

use serde::{Deserialize, Serialize};

use super::record::read_json;
use crate::plan::Hosts;

/// What a rank found when it dialed the lower ranks of what seems to be its host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Reach {
    /// The ranks that it did not reach, ascending: almost always none, so that reports stay short in large worlds.
    pub(super) unreached: Vec<usize>,
    /// The first obstacle, if there was one.
    pub(super) obstacle: Option<Obstacle>,
}

/// Why a rank cannot share memory with another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Obstacle {
    /// The other rank's process has ended.
    Dead { rank: usize },
    /// The other rank is somewhere else.
    Unreached { rank: usize, reason: String },
    /// This rank has no memory to share.
    Unable { reason: String },
}

impl Reach {
    pub(super) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a report has string keys only")
    }

    /// The report of `rank`, or what is wrong with the bytes.
    pub(super) fn decode(bytes: &[u8], rank: usize) -> Result<Self, String> {
        let reach: Self = read_json(bytes, "report of unreached ranks")?;
        let blamed = match &reach.obstacle {
            Some(Obstacle::Dead { rank } | Obstacle::Unreached { rank, .. }) => Some(*rank),
            Some(Obstacle::Unable { .. }) | None => None,
        };
        let mut named = reach.unreached.iter().chain(&blamed);
        match named.find(|peer| **peer >= rank) {
            Some(peer) => Err(format!(
                "it reports on rank {peer}, expected only ranks below {rank}"
            )),
            None => Ok(reach),
        }
    }
}

/// The hosts as they are: each rank joins the first host of which it reaches all ranks, among those that seem to be its own.
pub(super) fn proven(seeming: &Hosts, reaches: &[Reach]) -> Hosts {
    // By number of the seeming host, the hosts that it turned out to be.
    let mut parts: Vec<Vec<usize>> = vec![Vec::new(); seeming.count()];
    let mut hosts = 0;
    let mut numbers: Vec<usize> = Vec::with_capacity(reaches.len());
    for (rank, reach) in reaches.iter().enumerate() {
        let is_able = !matches!(reach.obstacle, Some(Obstacle::Unable { .. }));
        let has_all_of = |host: &usize| {
            let mut unreached = reach.unreached.iter();
            is_able && unreached.all(|peer| numbers[*peer] != *host)
        };
        let own = &mut parts[seeming.host(rank)];
        let number = own.iter().copied().find(has_all_of).unwrap_or_else(|| {
            own.push(hosts);
            hosts += 1;
            hosts - 1
        });
        numbers.push(number);
    }
    Hosts::new(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::record::ENTRY_BYTES_MAX;

    fn reach(unreached: &[usize]) -> Reach {
        Reach {
            unreached: unreached.into(),
            obstacle: None,
        }
    }

    #[test]
    fn ranks_that_reach_each_other_share_a_host() {
        let check = |seeming: &[usize], unreached: &[&[usize]], expect: &[usize]| {
            let reaches: Vec<Reach> = unreached.iter().map(|ranks| reach(ranks)).collect();
            let hosts = proven(&Hosts::new(seeming.into()), &reaches);
            assert_eq!(
                hosts,
                Hosts::new(expect.into()),
                "{seeming:?}, {unreached:?}"
            );
        };
        let all: [&[usize]; 4] = [&[]; 4];
        check(&[0, 0, 0, 0], &all, &[0, 0, 0, 0]);
        check(&[0, 0, 1, 1], &all, &[0, 0, 1, 1]);
        // Two containers of one name.
        check(&[0, 0, 0, 0], &[&[], &[], &[0, 1], &[0, 1]], &[0, 0, 1, 1]);
        check(&[0, 0, 0, 0], &[&[], &[0], &[1], &[0, 2]], &[0, 1, 0, 1]);
        // Each alone in a container.
        check(&[0, 0, 0], &[&[], &[0], &[0, 1]], &[0, 1, 2]);
        // Rank 2 reaches only one rank of a host, which is not enough to join it.
        check(&[0, 0, 0], &[&[], &[], &[0]], &[0, 0, 1]);
    }

    #[test]
    fn a_rank_without_memory_to_share_is_alone() {
        let unable = Reach {
            unreached: Vec::new(),
            obstacle: Some(Obstacle::Unable {
                reason: "cannot create shared memory".into(),
            }),
        };
        let hosts = proven(&Hosts::one(3), &[reach(&[]), unable, reach(&[1])]);
        assert_eq!(hosts, Hosts::new(vec![0, 1, 0]));
    }

    #[test]
    fn reports_survive_and_those_about_impossible_ranks_are_refused() {
        let sound = Reach {
            obstacle: Some(Obstacle::Unreached {
                rank: 1,
                reason: "connection refused".into(),
            }),
            ..reach(&[0])
        };
        assert_eq!(Reach::decode(&sound.encode(), 2), Ok(sound.clone()));
        for (reach, words) in [
            (
                reach(&[0, 2]),
                "reports on rank 2, expected only ranks below 2",
            ),
            (
                Reach {
                    obstacle: Some(Obstacle::Dead { rank: 9 }),
                    ..reach(&[])
                },
                "reports on rank 9",
            ),
        ] {
            let error = Reach::decode(&reach.encode(), 2).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        assert!(Reach::decode(b"does not reach rank 0", 1).is_err());
        assert!(Reach::decode(&vec![b' '; ENTRY_BYTES_MAX + 1], 1).is_err());
    }
}
