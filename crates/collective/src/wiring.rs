//! What a transport brings to a group, and where the group's ranks meet again to form sub-groups.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Instant;

use paceline_rendezvous::page::Revocation;
use paceline_rendezvous::store::{Client, Server};
use parking_lot::{Condvar, Mutex};

use crate::engine::Engine;
use crate::error::Error;
use crate::local;
use crate::memory::Allocator;
use crate::options::GroupOptions;
use crate::p2p::PointToPoint;
use crate::plan::Hosts;
use crate::status::Status;
use crate::watch::Watch;

/// What a transport brings to a group.
#[derive(Debug)]
pub(crate) struct Wiring {
    pub(crate) transport: &'static str,
    pub(crate) status: Arc<Status>,
    pub(crate) engine: Engine,
    pub(crate) hosts: Hosts,
    pub(crate) allocator: Allocator,
    pub(crate) watch: Option<Watch>,
    pub(crate) p2p: Arc<PointToPoint>,
    pub(crate) origin: Option<Origin>,
}

impl Wiring {
    /// One rank without peers.
    pub(crate) fn alone(status: Arc<Status>, options: &GroupOptions) -> Self {
        Self {
            transport: "none",
            engine: Engine::new(0, None, None, Allocator::Heap),
            hosts: Hosts::one(1),
            allocator: Allocator::Heap,
            watch: None,
            p2p: PointToPoint::alone(&status, options.timeout),
            origin: None,
            status,
        }
    }
}

/// Where the ranks of a group meet again to form sub-groups.
#[derive(Debug, Clone)]
pub(crate) enum Origin {
    /// The job's store, as this rank reached it. A rank that hosts it goes on doing so.
    Store {
        server: Option<Arc<Server>>,
        address: String,
        /// Prefix of the group's keys.
        prefix: String,
        /// A connection to it that the last sub-group has left.
        spare: Arc<Mutex<Option<Client>>>,
    },
    /// This process.
    Hub(Arc<Hub>),
}

/// Where ranks that are threads form sub-groups: the first to come connects all of them.
#[derive(Debug)]
pub(crate) struct Hub {
    statuses: Vec<Arc<Status>>,
    /// By the place where a sub-group meets, the wirings that its members have not fetched yet.
    wirings: Mutex<HashMap<String, Unfetched>>,
    succession: Mutex<Succession>,
    /// A rank has left, or waits for the next generation.
    changed: Condvar,
}

/// How a group of threads comes to its end.
#[derive(Debug)]
struct Succession {
    fates: Vec<Fate>,
    /// By old rank, the wirings of the next generation that its members have not fetched yet, once it has been formed.
    next: Option<Unfetched>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Member,
    /// It waits for the next generation.
    Waits,
    /// It has left, or was given up.
    Lost,
}

/// In the sub-group's order.
type Unfetched = Vec<Option<Wiring>>;

impl Hub {
    pub(crate) fn new(statuses: Vec<Arc<Status>>) -> Self {
        let succession = Succession {
            fates: vec![Fate::Member; statuses.len()],
            next: None,
        };
        Self {
            statuses,
            wirings: Mutex::default(),
            succession: Mutex::new(succession),
            changed: Condvar::new(),
        }
    }

    /// A rank has dropped its group.
    pub(crate) fn leave(&self, rank: usize) {
        let mut succession = self.succession.lock();
        if succession.fates[rank] == Fate::Member {
            succession.fates[rank] = Fate::Lost;
            self.changed.notify_all();
        }
    }

    /// The wiring of this rank in the generation of the ranks that are left, which it is the first to connect or not.
    ///
    /// *Blocks*: until all ranks have left or called this, at most for the timeout, after which the others are lost.
    pub(crate) fn succeed(&self, rank: usize, options: &GroupOptions) -> Result<Wiring, Error> {
        let status = &self.statuses[rank];
        let mut succession = self.succession.lock();
        if succession.fates[rank] == Fate::Member {
            succession.fates[rank] = Fate::Waits;
            self.changed.notify_all();
        }
        let deadline = Instant::now().checked_add(options.timeout);
        let undecided = |succession: &mut Succession| {
            succession.next.is_none() && succession.fates.contains(&Fate::Member)
        };
        match deadline {
            Some(deadline) => {
                let changed = &self.changed;
                changed.wait_while_until(&mut succession, undecided, deadline);
            }
            None => self.changed.wait_while(&mut succession, undecided),
        }
        let generation = status.generation() + 1;
        if succession.next.is_none() {
            let next = self.wire_next(&mut succession.fates, generation, options)?;
            succession.next = Some(next);
            self.changed.notify_all();
        }
        let wiring = succession.next.as_mut().and_then(|next| next[rank].take());
        wiring.ok_or(Error::Fenced {
            rank,
            generation: generation.into(),
        })
    }

    /// Connects the ranks that wait, and gives up the others.
    fn wire_next(
        &self,
        fates: &mut [Fate],
        generation: u32,
        options: &GroupOptions,
    ) -> Result<Unfetched, Error> {
        for fate in fates.iter_mut().filter(|fate| **fate == Fate::Member) {
            *fate = Fate::Lost;
        }
        self.statuses[0].page().revoke(&Revocation {
            rank: None,
            text: format!("generation {generation} goes on without the lost ranks"),
        });
        let left: Vec<usize> = (0..fates.len())
            .filter(|rank| fates[*rank] == Fate::Waits)
            .collect();
        let started = left.iter().map(|rank| self.statuses[0].started(*rank));
        let wirings = local::connect(generation, &started.collect::<Vec<_>>(), options)?;
        let mut next: Unfetched = fates.iter().map(|_| None).collect();
        for (rank, wiring) in left.into_iter().zip(wirings) {
            next[rank] = Some(wiring);
        }
        Ok(next)
    }

    /// The wiring of one member of the sub-group that meets at `place`; `wire` connects all its members.
    pub(crate) fn fetch(
        &self,
        place: &str,
        rank: usize,
        subgroup: &Subgroup<'_>,
        wire: impl FnOnce(Vec<Arc<Status>>) -> Result<Vec<Wiring>, Error>,
    ) -> Result<Wiring, Error> {
        let mut wirings = self.wirings.lock();
        let mut unfetched = match wirings.entry(place.into()) {
            Entry::Occupied(unfetched) => unfetched,
            Entry::Vacant(vacant) => {
                let members = subgroup.members.iter().enumerate();
                let statuses = members.map(|(rank, member)| {
                    let parent = &self.statuses[*member];
                    Arc::new(parent.child(rank, subgroup.members, subgroup.name))
                });
                let made = wire(statuses.collect())?;
                vacant.insert_entry(made.into_iter().map(Some).collect())
            }
        };
        let wiring = unfetched.get_mut().get_mut(rank).and_then(Option::take);
        if unfetched.get().iter().all(Option::is_none) {
            unfetched.remove();
        }
        // Each member fetches once at each place.
        wiring.ok_or(Error::ThreadGone { rank })
    }
}

/// A sub-group that is being formed, as one of its ranks sees it.
#[derive(Debug)]
pub(crate) struct Subgroup<'a> {
    pub(crate) parent: &'a Status,
    /// The parent's numbers of its ranks, in its own order.
    pub(crate) members: &'a [usize],
    pub(crate) name: &'a str,
}

impl Subgroup<'_> {
    pub(crate) fn status(&self, rank: usize) -> Arc<Status> {
        Arc::new(self.parent.child(rank, self.members, self.name))
    }
}
