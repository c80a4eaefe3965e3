//! Forms a group whose ranks share memory, all of them or those of each host: who reaches whom, and the handing over of
//! segments and page.

use std::sync::Arc;
use std::time::Duration;

use paceline_rendezvous::page::JobPage;

use super::address;
use super::record::{Record, hosts, shared_slot};
use super::swap::{Swap, lost};
use super::words::Behind;
use super::{Forming, LANES_FOR_ALL, Listeners, MESSAGES, PARCELS, peers};
use crate::engine::Engine;
use crate::error::Error;
use crate::memory::{Allocator, Arena, Segment, segment_bytes};
use crate::mesh::Connections;
use crate::parcel::Parcels;
use crate::plan::Hosts;
use crate::socket::{Listener, Socket};
use crate::status::Status;
use crate::stream::Streams;
use crate::team::Team;
use crate::watch::Watch;
use crate::wiring::Wiring;

/// How a rank reports that another one is dead; its number follows. Said by whoever dials it in vain, before anybody can
/// have ended because of such a report.
const DEAD: &str = "finds the end of rank ";
/// How long a process may take to end whose socket has closed.
pub(super) const END_TIMEOUT: Duration = Duration::from_millis(100);

/// What a rank needs to share memory with those of its host.
pub(super) struct Prepared<'a> {
    /// The ranks of this host, ascending.
    team: Vec<usize>,
    listener: &'a Listener,
    /// Connections to the lower ones of them, by rank.
    dialed: Vec<Option<Socket>>,
    segment: Arc<Segment>,
}

/// What a rank shares with those of its host.
struct Shared {
    team: Vec<usize>,
    /// In the team's order.
    segments: Vec<Arc<Segment>>,
    connections: Connections,
    status: Arc<Status>,
    allocator: Allocator,
}

impl Forming<'_> {
    /// Shared memory within hosts, or nothing when some rank cannot reach another one of its host and TCP will do.
    pub(super) fn try_sharing(
        &self,
        me: &Record,
        records: &[Record],
        listeners: &Listeners,
        or_tcp: bool,
    ) -> Result<Option<Wiring>, Error> {
        let hosts = hosts(records);
        // Every rank dials all lower ones before anybody decides: only who has tried knows.
        let prepared = self.prepare(records, &hosts, listeners.unix.as_ref());
        let report = prepared.as_ref().err().cloned().unwrap_or_default();
        let reports = self.exchange(
            "reach",
            report.as_bytes(),
            "say whom they reach",
            |_, bytes| Ok(String::from_utf8_lossy(bytes).into_owned()),
        )?;
        let failed = reports
            .iter()
            .enumerate()
            .find(|(_, report)| !report.is_empty());
        match (failed, prepared) {
            (None, Ok(prepared)) if hosts.count() == 1 => {
                self.shm(me, records, hosts, prepared).map(Some)
            }
            (None, Ok(prepared)) => {
                let wiring = self.hierarchical(me, records, hosts, prepared, listeners)?;
                Ok(Some(wiring))
            }
            (Some((rank, reason)), _) if !or_tcp => Err(self.unreached(records, rank, reason)),
            _ => Ok(None),
        }
    }

    /// Why memory cannot be shared, as rank `rank` has found: a rank that is dead is not a host that is set up wrongly.
    fn unreached(&self, records: &[Record], rank: usize, reason: &str) -> Error {
        let dead = reason
            .strip_prefix(DEAD)
            .and_then(|rank| records.get(rank.parse::<usize>().ok()?));
        match dead {
            Some(peer) => match self.behind_the_end_of(peer.rank) {
                Behind::Cause(error) => error,
                Behind::Itself | Behind::Unknown => lost(peer),
            },
            None => Error::Transport {
                wanted: self.options.transport.name(),
                reason: format!("rank {rank} {reason}"),
            },
        }
    }

    pub(super) fn prepare<'a>(
        &self,
        records: &[Record],
        hosts: &Hosts,
        listener: Option<&'a Listener>,
    ) -> Result<Prepared<'a>, String> {
        let rank = self.env.rank;
        let listener = listener.ok_or("does not listen")?;
        let team: Vec<usize> = hosts.ranks(hosts.host(rank)).collect();
        let dialed = records[..rank].iter().map(|peer| {
            if !team.contains(&peer.rank) {
                return Ok(None);
            }
            let name = peer
                .unix
                .as_deref()
                .ok_or_else(|| format!("finds that rank {} does not listen", peer.rank))?;
            address::dial_unix(name).map(Some).map_err(|error| {
                match records[rank].sees_the_end_of(peer, END_TIMEOUT) {
                    true => format!("{DEAD}{}", peer.rank),
                    false => format!("does not reach rank {}: {error}", peer.rank),
                }
            })
        });
        let dialed = dialed.collect::<Result<Vec<_>, _>>()?;
        let segment = Segment::create(segment_bytes(self.options.arena_bytes))
            .map_err(|error| format!("cannot create shared memory: {error}"))?;
        Ok(Prepared {
            team,
            listener,
            dialed,
            segment: Arc::new(segment),
        })
    }

    fn shm(
        &self,
        me: &Record,
        records: &[Record],
        hosts: Hosts,
        prepared: Prepared<'_>,
    ) -> Result<Wiring, Error> {
        let mut shared = self.share(me, records, LANES_FOR_ALL, prepared)?;
        let parcels = shared.connections.swap_remove(PARCELS);
        let messages = shared.connections.swap_remove(MESSAGES);
        let engine = shared.engine(me, self.env.cores(), None);
        self.wiring("shm", shared, engine, hosts, (messages, parcels))
    }

    /// Memory within this host, TCP to all ranks: those of this host can die too, and be sent messages.
    fn hierarchical(
        &self,
        me: &Record,
        records: &[Record],
        hosts: Hosts,
        prepared: Prepared<'_>,
        listeners: &Listeners,
    ) -> Result<Wiring, Error> {
        // Over the Unix sockets go the descriptors and nothing else.
        let shared = self.share(me, records, 1, prepared)?;
        let (messages, parcels, streams) = self.dial_all(me, records, &hosts, listeners)?;
        let engine = shared.engine(me, self.env.cores(), Some(streams));
        self.wiring("hierarchical", shared, engine, hosts, (messages, parcels))
    }

    fn wiring(
        &self,
        transport: &'static str,
        shared: Shared,
        engine: Engine,
        hosts: Hosts,
        (messages, parcels): (Vec<Option<Socket>>, Vec<Option<Socket>>),
    ) -> Result<Wiring, Error> {
        let Shared {
            team,
            segments,
            status,
            allocator,
            ..
        } = shared;
        let mut by_rank = vec![None; self.env.world];
        for (rank, segment) in team.into_iter().zip(segments) {
            by_rank[rank] = Some(segment);
        }
        let timeout = self.options.timeout;
        let parcels = Parcels::connected(&status, timeout, allocator.clone(), by_rank, parcels)?;
        let watch = Watch::start(&status, messages, &parcels)?;
        Ok(Wiring {
            transport,
            engine,
            hosts,
            allocator,
            watch: Some(watch),
            parcels,
            origin: None,
            status,
        })
    }

    /// Connects the ranks of this host and has them map each other's memory.
    fn share(
        &self,
        me: &Record,
        records: &[Record],
        lanes: usize,
        prepared: Prepared<'_>,
    ) -> Result<Shared, Error> {
        let (connections, team, segment) = self.meet(records, lanes, prepared)?;
        // Without a launcher the lowest rank of a host makes a page for it, so that deadlines can tell what the missing
        // are doing.
        let no_launcher =
            self.subgroup.is_none() && team.iter().all(|rank| records[*rank].page.is_none());
        let made = match no_launcher && me.rank == team[0] {
            true => Some(JobPage::create_memfd(team.len()).map_err(Arc::new)?),
            false => None,
        };
        let swap = Swap {
            forming: self,
            records,
            team: &team,
            sockets: &connections[MESSAGES],
        };
        let (segments, received) = swap.run(&segment, made.as_ref())?;
        let (page, peers) = match made.or(received).filter(|_| no_launcher) {
            Some(page) if page.slots() == team.len() => {
                let slot = |peer: &Record| team.iter().position(|rank| *rank == peer.rank);
                (page, peers(records, slot))
            }
            _ => (
                self.page.clone(),
                peers(records, |peer| shared_slot(me, peer)),
            ),
        };
        Ok(Shared {
            team,
            segments,
            connections,
            status: self.status(page, peers),
            allocator: Allocator::Arena(Arena::new(segment)),
        })
    }

    /// Connects the ranks of this host.
    pub(super) fn meet(
        &self,
        records: &[Record],
        lanes: usize,
        prepared: Prepared<'_>,
    ) -> Result<(Connections, Vec<usize>, Arc<Segment>), Error> {
        let Prepared {
            team,
            listener,
            mut dialed,
            segment,
        } = prepared;
        let lanes = |rank| if team.contains(&rank) { lanes } else { 0 };
        let lanes: Vec<usize> = (0..self.env.world).map(lanes).collect();
        let mesh = self.mesh(&lanes);
        self.formation.enter("connect to the ranks of its host");
        let connections = mesh.connect(listener, |peer, attempt| match dialed[peer].take() {
            _ if attempt > 0 => None,
            Some(socket) => Some(Ok(socket)),
            None => {
                let name = records[peer].unix.as_deref().unwrap_or_default();
                Some(address::dial_unix(name).map_err(|error| error.to_string()))
            }
        })?;
        Ok((connections, team, segment))
    }
}

impl Shared {
    fn engine(&self, me: &Record, cores: usize, streams: Option<Streams>) -> Engine {
        let team = Team::new(me.rank, me.world, self.team.clone(), self.segments.clone());
        Engine::new(
            me.rank,
            Some(team.on(cores)),
            streams,
            self.allocator.clone(),
        )
    }
}
