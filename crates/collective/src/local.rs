//! Threads as ranks: the engine of shared memory in one process, with calls in place of sockets.

use std::sync::{Arc, Weak};

use paceline_rendezvous::net::nodename;
use paceline_rendezvous::page::JobPage;

use crate::engine::Engine;
use crate::error::Error;
use crate::memory::{Allocator, Arena, Segment, Shown, segment_bytes};
use crate::message::Message;
use crate::options::GroupOptions;
use crate::p2p::PointToPoint;
use crate::plan::Hosts;
use crate::status::{Courier, PeerInfo, Status};
use crate::team::Team;
use crate::wiring::{Hub, Origin, Wiring};

/// Wires up the ranks of a generation, in rank order; `started` are their numbers in the first one.
pub(crate) fn connect(
    generation: u32,
    started: &[usize],
    options: &GroupOptions,
) -> Result<Vec<Wiring>, Error> {
    wire(statuses(generation, started)?, options)
}

/// On a page of their own.
fn statuses(generation: u32, started: &[usize]) -> Result<Vec<Arc<Status>>, Error> {
    let world = started.len();
    let page = JobPage::private(world).map_err(Arc::new)?;
    let pid = std::process::id();
    let host = nodename();
    let peer = |(rank, started): (usize, &usize)| PeerInfo {
        host: host.clone(),
        pid,
        slot: Some(rank),
        started: *started,
    };
    let peers: Vec<PeerInfo> = started.iter().enumerate().map(peer).collect();
    let status = |rank| {
        let status = Status::new(rank, peers.clone(), page.clone(), page.slot(rank));
        Arc::new(status.in_generation(generation))
    };
    Ok((0..world).map(status).collect())
}

/// Wires up the ranks with these statuses, in rank order.
pub(crate) fn wire(
    statuses: Vec<Arc<Status>>,
    options: &GroupOptions,
) -> Result<Vec<Wiring>, Error> {
    let segments = (0..statuses.len())
        .map(|rank| {
            Segment::create(segment_bytes(options.arena_bytes))
                .map(Arc::new)
                .map_err(|error| Error::system(rank, "create its shared memory", error))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let allocators: Vec<Allocator> = segments
        .iter()
        .map(|segment| Allocator::Arena(Arena::new(segment.clone(), statuses[0].generation())))
        .collect();
    let p2p = PointToPoint::local(&statuses, options.timeout, &allocators, &segments);
    let shown: Vec<Shown> = segments.into_iter().map(Shown::whole).collect();
    let hub = Arc::new(Hub::new(statuses.clone()));
    let world = statuses.len();
    let wirings = p2p.into_iter().enumerate().map(|(rank, p2p)| {
        let status = &statuses[rank];
        let peers = statuses.iter().map(Arc::downgrade).collect();
        status.set_courier(Box::new(Calls { rank, peers }));
        let team = Team::new(rank, world, (0..world).collect(), shown.clone());
        status.add_waiters(team.waiters());
        Wiring {
            transport: "local",
            status: status.clone(),
            engine: Engine::new(rank, Some(team), None, allocators[rank].clone()),
            hosts: Hosts::one(world),
            allocator: allocators[rank].clone(),
            watch: None,
            p2p,
            origin: Some(Origin::Hub(hub.clone())),
        }
    });
    Ok(wirings.collect())
}

/// Delivers a message by calling the peer. Weak, because the peers' couriers point back.
#[derive(Debug)]
struct Calls {
    rank: usize,
    peers: Vec<Weak<Status>>,
}

impl Courier for Calls {
    fn send(&self, to: usize, message: &Message) {
        // A peer that is gone has said goodbye or given up before.
        if let Some(peer) = self.peers[to].upgrade() {
            peer.receive(self.rank, message.clone());
        }
    }
}
