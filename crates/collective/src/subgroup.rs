//! Sub-groups: some ranks of a group as a group of their own.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::Ordering;

use paceline_rendezvous::env::WorkerEnv;

use crate::error::Error;
use crate::flight::{Formation, Membership};
use crate::group::ProcessGroup;
use crate::wiring::{Origin, Subgroup, Wiring};
use crate::{bootstrap, local};

impl ProcessGroup {
    /// Makes sub-groups: the ranks that give the same colour form one, in the order of `key` and, where keys are equal,
    /// of their numbers here. A rank without a colour is in none and gets nothing.
    ///
    /// All ranks of this group must call it, like any collective operation. A sub-group has its own threads,
    /// connections and memory, so several work at the same time from several threads, and its own failures: what breaks
    /// it leaves the others whole, but the death of a rank breaks all groups that the rank is in. It chooses its
    /// transport anew, so ranks of one host share memory also where the whole group does not. Its ranks have numbers of
    /// their own, from 0; where an error names one of them, the group's name and the job's number of the rank stand
    /// beside it. It is called "world/3" for colour 3 of "world", and
    /// "world/3#2" when that name is given for the second time.
    ///
    /// *Blocks*: until all ranks have called it and those of this colour are connected, at most the group's timeout each.
    ///
    /// *Cost*: one all-gather, and what [`connect`](Self::connect) costs.
    ///
    /// *Source*: MPI_Comm_split.
    ///
    /// # Example
    ///
    /// ```
    /// use paceline_collective::{GroupOptions, ProcessGroup, ReduceOp};
    ///
    /// let groups = ProcessGroup::local(4, &GroupOptions::default())?;
    /// std::thread::scope(|scope| {
    ///     for group in groups {
    ///         scope.spawn(move || {
    ///             let rank = group.rank();
    ///             let parity = group.split(Some(rank as u32 % 2), 0).unwrap().unwrap();
    ///             let mut data = [rank as f32];
    ///             parity.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    ///             assert_eq!(data, [if rank % 2 == 0 { 2.0 } else { 4.0 }]);
    ///         });
    ///     }
    /// });
    /// # Ok::<(), paceline_collective::Error>(())
    /// ```
    pub fn split(&self, colour: Option<u32>, key: i64) -> Result<Option<Self>, Error> {
        let name = |colour: u32| format!("{}/{colour}", self.name());
        self.split_as(colour, key, name)
    }

    /// [`split`](Self::split) with names of the caller's choice, the same on all ranks of one colour.
    pub(crate) fn split_as(
        &self,
        colour: Option<u32>,
        key: i64,
        name: impl Fn(u32) -> String,
    ) -> Result<Option<Self>, Error> {
        let mine = [
            i64::from(colour.is_some()),
            i64::from(colour.unwrap_or(0)),
            key,
        ];
        let mut all = vec![0; mine.len() * self.world()];
        self.all_gather(&mine, &mut all)?;
        let member = self.member();
        let split = member.splits.fetch_add(1, Ordering::Relaxed);
        let Some(colour) = colour else {
            count(&mut member.names.lock(), &all, &name);
            return Ok(None);
        };
        let members = members(&all, colour);
        let Some(rank) = members.iter().position(|member| *member == self.rank()) else {
            // Only a peer that answers for this rank could do that.
            let reason = "the ranks do not agree on the members of the sub-group".into();
            let (rank, peer) = (self.rank(), members.first().copied().unwrap_or(0));
            return Err(self.give_up(Error::Peer { rank, peer, reason }));
        };
        let name = {
            let mut names = member.names.lock();
            count(&mut names, &all, &name);
            numbered(&names, name(colour))
        };
        let place = format!("split{split}/{colour}");
        self.connect_members(&place, &name, &members, rank)
            .map(Some)
    }

    /// Makes a sub-group of the ranks that call it, all with the same list; the other ranks of this group take no part.
    ///
    /// `members` are their numbers here, in the order of their new numbers. No other sub-group of this one has had the name. Otherwise
    /// as [`split`](Self::split).
    ///
    /// *Blocks*: until all members are connected, at most for the group's timeout. *Cost*: what [`connect`](Self::connect) costs.
    ///
    /// *Errors*: a list that does not have this rank once, or others twice; that does not break this group.
    pub fn subgroup(&self, name: &str, members: &[usize]) -> Result<Self, Error> {
        self.health()?;
        let distinct: BTreeSet<usize> = members.iter().copied().collect();
        let place = members.iter().position(|member| *member == self.rank());
        let reason = match place {
            _ if distinct.len() < members.len() => "a rank is in the list twice".into(),
            _ if distinct.last().is_some_and(|last| *last >= self.world()) => {
                let world = self.world();
                format!("a rank of the list {members:?} is not below {world}, the number of ranks")
            }
            None => format!("rank {} is not in the list {members:?}", self.rank()),
            Some(rank) => {
                return self.connect_members(&format!("named/{name}"), name, members, rank);
            }
        };
        Err(Error::Members {
            name: name.into(),
            group: self.name().into(),
            reason,
        })
    }

    /// Connects the members of a sub-group, in which this rank has the number `rank`. No other sub-group meets at `place`.
    fn connect_members(
        &self,
        place: &str,
        name: &str,
        members: &[usize],
        rank: usize,
    ) -> Result<Self, Error> {
        let member = self.member();
        let subgroup = Subgroup {
            parent: &member.status,
            members,
            name,
        };
        let env = WorkerEnv {
            rank,
            world: members.len(),
            ..self.env().clone()
        };
        let options = &member.options;
        let flight = member.status.flight().cloned();
        let flight = flight.expect("a group that works has a recorder");
        let wiring = match &member.origin {
            Some(Origin::Hub(hub)) => hub.fetch(place, rank, &subgroup, |statuses| {
                local::wire(statuses, options)
            })?,
            Some(origin @ Origin::Store { .. }) if members.len() == 1 => Wiring {
                origin: Some(origin.clone()),
                ..Wiring::alone(subgroup.status(rank), options)
            },
            Some(Origin::Store {
                server,
                address,
                prefix,
                spare,
            }) => {
                let prefix = format!("{prefix}/{place}");
                let store = (server.clone(), address.as_str(), &**spare);
                let formation = Formation::new();
                bootstrap::connect_child(&env, options, &subgroup, store, prefix, &formation)
                    .inspect_err(|error| {
                        let membership = Membership {
                            name: name.into(),
                            ranks: members.iter().map(|rank| self.global_rank(*rank)).collect(),
                            transport: "none",
                        };
                        flight.never_formed(membership, &formation, error);
                    })?
            }
            None => Wiring::alone(subgroup.status(rank), options),
        };
        Self::assemble(env, options.clone(), wiring, flight)
    }
}

/// Counts the sub-groups of one split by their names. All ranks of the parent count those of all colours, so that
/// they agree on the numbers.
fn count(names: &mut HashMap<String, u64>, all: &[i64], name: impl Fn(u32) -> String) {
    let said = all.chunks_exact(3).filter(|said| said[0] == 1);
    let colours: BTreeSet<i64> = said.map(|said| said[1]).collect();
    for colour in colours {
        // Only a peer that answers for another one says a colour that is none.
        let colour = u32::try_from(colour).unwrap_or(u32::MAX);
        *names.entry(name(colour)).or_default() += 1;
    }
}

/// A sub-group's name with its number, from the second one of that name on.
fn numbered(names: &HashMap<String, u64>, name: String) -> String {
    match names.get(&name) {
        Some(number @ 2..) => format!("{name}#{number}"),
        _ => name,
    }
}

/// The ranks of one colour in the order of their keys, of what all ranks said: whether they have a colour, which, and
/// their key.
fn members(all: &[i64], colour: u32) -> Vec<usize> {
    let ranks = all.chunks_exact(3).enumerate();
    let mut members: Vec<(i64, usize)> = ranks
        .filter(|(_, said)| said[0] == 1 && said[1] == i64::from(colour))
        .map(|(rank, said)| (said[2], rank))
        .collect();
    members.sort_unstable();
    members.into_iter().map(|(_, rank)| rank).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_given_again_has_a_number_on_which_all_agree() {
        let mut names = HashMap::new();
        let name = |colour: u32| format!("world/{colour}");
        // Colour 3 has other ranks each time; members and others have the same count.
        for (said, three, seven) in [
            ([[1, 3, 0], [1, 7, 0]], "world/3", "world/7"),
            ([[1, 3, 0], [1, 3, 0]], "world/3#2", "world/7"),
            ([[0, 0, 0], [1, 3, 0]], "world/3#3", "world/7"),
            ([[1, 7, 0], [0, 3, 0]], "world/3#3", "world/7#2"),
        ] {
            count(&mut names, &said.concat(), name);
            assert_eq!(numbered(&names, name(3)), three);
            assert_eq!(numbered(&names, name(7)), seven);
        }
    }

    #[test]
    fn members_come_in_the_order_of_their_keys_and_then_of_their_ranks() {
        let said = [
            [1, 7, 0],
            [1, 7, -5],
            [0, 0, 0],
            [1, 0, 9],
            [1, 7, 0],
            [1, 7, i64::MIN],
        ];
        let all = said.concat();
        assert_eq!(members(&all, 7), [5, 1, 0, 4]);
        assert_eq!(members(&all, 0), [3], "no colour is not colour 0");
        assert!(members(&all, 1).is_empty());
    }
}
