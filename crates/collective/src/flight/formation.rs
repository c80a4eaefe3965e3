//! How far a group has come that is being formed: what its record says if it does not come about.

use std::collections::HashSet;
use std::time::Instant;

use parking_lot::Mutex;

use super::record::Forming;
use crate::error::Error;

/// Kept up to date while the group forms, in the group's own numbers.
#[derive(Debug)]
pub(crate) struct Formation {
    started: Instant,
    reached: Mutex<(&'static str, HashSet<usize>)>,
}

impl Formation {
    pub(crate) fn new() -> Self {
        Self {
            started: Instant::now(),
            reached: Mutex::new(("begin", HashSet::new())),
        }
    }

    /// A phase begins: the end of "could not ...".
    pub(crate) fn enter(&self, phase: &'static str) {
        let mut reached = self.reached.lock();
        reached.0 = phase;
    }

    /// These ranks have come so far.
    pub(crate) fn arrived(&self, ranks: impl Iterator<Item = usize>) {
        let mut reached = self.reached.lock();
        reached.1 = ranks.collect();
    }

    /// For the dump, in the job's numbers. `ranks` are those of the group.
    pub(super) fn recorded(&self, ranks: &[usize], error: &Error) -> Forming {
        let reached = self.reached.lock();
        let (phase, arrived) = &*reached;
        let has_come = |rank: &usize| match error {
            // Who names all that are missing knows of the others that they have come.
            Error::Absent { missing, .. } => arrived.contains(rank) || !missing.contains(rank),
            _ => arrived.contains(rank),
        };
        let arrived = ranks
            .iter()
            .enumerate()
            .filter(|(rank, _)| has_come(rank))
            .map(|(_, rank)| *rank)
            .collect();
        Forming {
            phase: (*phase).into(),
            arrived,
            waited_ns: self.started.elapsed().as_nanos() as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn ranks_are_told_in_the_numbers_of_the_job() {
        let formation = Formation::new();
        formation.enter("report in");
        formation.arrived(0..2);
        let given_up = Error::ThreadGone { rank: 0 };
        let absent = Error::Absent {
            rank: 0,
            missing: vec![1, 2],
            what: "connect",
            waited: Duration::ZERO,
            detail: String::new(),
        };
        // Rank 1 has come and is missed since.
        for (error, arrived) in [(given_up, vec![4, 5]), (absent, vec![4, 5, 7])] {
            let forming = formation.recorded(&[4, 5, 6, 7], &error);
            assert_eq!(
                (forming.phase.as_str(), &*forming.arrived),
                ("report in", &arrived[..])
            );
        }
    }
}
