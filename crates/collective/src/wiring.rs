//! What a transport brings to a group, and where the group's ranks meet again to form sub-groups.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use paceline_rendezvous::store::Server;
use parking_lot::Mutex;

use crate::engine::Engine;
use crate::error::Error;
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
    },
    /// This process.
    Hub(Arc<Hub>),
}

/// Where ranks that are threads form sub-groups: the first to come connects all of them.
#[derive(Debug)]
pub(crate) struct Hub {
    statuses: Vec<Arc<Status>>,
    /// By the split's number and its colour, the wirings that members have not fetched yet.
    wirings: Mutex<HashMap<(u64, u32), Unfetched>>,
}

/// In the sub-group's order.
type Unfetched = Vec<Option<Wiring>>;

impl Hub {
    pub(crate) fn new(statuses: Vec<Arc<Status>>) -> Self {
        Self {
            statuses,
            wirings: Mutex::default(),
        }
    }

    /// The wiring of one member of the sub-group of `colour`; `wire` connects all its members.
    pub(crate) fn fetch(
        &self,
        split: u64,
        colour: u32,
        rank: usize,
        subgroup: &Subgroup<'_>,
        wire: impl FnOnce(Vec<Arc<Status>>) -> Result<Vec<Wiring>, Error>,
    ) -> Result<Wiring, Error> {
        let mut wirings = self.wirings.lock();
        let mut of_colour = match wirings.entry((split, colour)) {
            Entry::Occupied(of_colour) => of_colour,
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
        let wiring = of_colour.get_mut().get_mut(rank).and_then(Option::take);
        if of_colour.get().iter().all(Option::is_none) {
            of_colour.remove();
        }
        // Each member fetches once for each split.
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
