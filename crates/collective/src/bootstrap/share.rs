//! Forms a group whose ranks share memory, all of them or those of each host: who reaches whom, and the handing over of
//! segments and page.

use std::io;
use std::sync::Arc;

use paceline_rendezvous::page::JobPage;

use super::address;
use super::notice::Behind;
use super::reach::{Obstacle, Reach, proven};
use super::record::{END_TIMEOUT, Record, hosts, shared_slot};
use super::swap::{Swap, lost};
use super::{Forming, Listeners, MESSAGES, Sockets};
use crate::engine::Engine;
use crate::error::Error;
use crate::memory::{Allocator, Arena, Segment, Shown, segment_bytes};
use crate::options::Transport;
use crate::plan::Hosts;
use crate::socket::{Listener, Socket};
use crate::status::Status;
use crate::stream::Streams;
use crate::team::Team;
use crate::wiring::Wiring;

/// What a rank needs to share memory with those of its host.
pub(super) struct Prepared<'a> {
    /// The ranks of this host, ascending.
    team: Vec<usize>,
    listener: &'a Listener,
    /// Connections to the lower ones of them, by rank.
    dialed: Vec<Option<Socket>>,
    shown: Shown,
}

/// The connections for messages by rank, the ranks of this host, and this rank's memory.
type Met = (Vec<Option<Socket>>, Vec<usize>, Shown);

/// What a rank shares with those of its host.
struct Shared {
    team: Vec<usize>,
    /// In the team's order.
    shown: Vec<Shown>,
    /// The connections to the others, by rank.
    messages: Vec<Option<Socket>>,
    p2p: Vec<Option<Socket>>,
    status: Arc<Status>,
    allocator: Allocator,
}

impl Forming<'_> {
    /// Shared memory within hosts, or nothing if no two ranks share any and TCP will do.
    pub(super) fn try_sharing(
        &self,
        me: &Record,
        records: &[Record],
        listeners: &Listeners,
        or_tcp: bool,
    ) -> Result<Option<Wiring>, Error> {
        let seeming = hosts(records);
        // Every rank dials all lower ones before any rank decides.
        let (reach, prepared) = self.prepare(records, &seeming, listeners.unix.as_ref());
        let reaches = self.exchange(
            "reach",
            &reach.encode(),
            "say which ranks they reach",
            |rank, bytes| Reach::decode(bytes, rank),
        )?;
        let obstacles = reaches.iter().enumerate();
        let mut obstacles =
            obstacles.filter_map(|(rank, reach)| Some((rank, reach.obstacle.as_ref()?)));
        if let Some((rank, obstacle)) = obstacles.next() {
            let is_elsewhere = |obstacle: &Obstacle| matches!(obstacle, Obstacle::Unreached { .. });
            let is_shm = self.options.transport == Transport::Shm;
            if !or_tcp && (is_shm || !is_elsewhere(obstacle)) {
                return Err(self.unshared(records, rank, obstacle));
            }
            if !is_elsewhere(obstacle) || !obstacles.all(|(_, obstacle)| is_elsewhere(obstacle)) {
                return Ok(None);
            }
            if me.rank == 0 {
                paceline_rendezvous::notice!(
                    WARN,
                    "{}: memory is shared only between ranks that reach each other",
                    in_words(rank, obstacle)
                );
            }
        }
        let hosts = proven(&seeming, &reaches);
        let Some(prepared) = prepared.filter(|_| hosts.count() < me.world) else {
            return Ok(None);
        };
        let prepared = prepared.on(hosts.ranks(hosts.host(me.rank)).collect());
        if hosts.count() == 1 {
            return self.shm(me, records, hosts, prepared).map(Some);
        }
        let wiring = self.hierarchical(me, records, hosts, prepared, listeners)?;
        Ok(Some(wiring))
    }

    /// Why memory cannot be shared, as rank `rank` has found: a dead rank does not make its host's setup wrong.
    fn unshared(&self, records: &[Record], rank: usize, obstacle: &Obstacle) -> Error {
        match obstacle {
            Obstacle::Dead { rank } => match self.behind_the_end_of(*rank) {
                Behind::Cause(error) => error,
                Behind::Itself | Behind::Unknown => lost(&records[*rank]),
            },
            obstacle => self.impossible(in_words(rank, obstacle)),
        }
    }

    pub(super) fn prepare<'a>(
        &self,
        records: &[Record],
        hosts: &Hosts,
        listener: Option<&'a Listener>,
    ) -> (Reach, Option<Prepared<'a>>) {
        let unable = |reason: String| {
            let reach = Reach {
                unreached: Vec::new(),
                obstacle: Some(Obstacle::Unable { reason }),
            };
            (reach, None)
        };
        let Some(listener) = listener else {
            return unable("does not listen".into());
        };
        let arena = self.kept_arena();
        let bytes = arena.map_or_else(|| segment_bytes(self.options.arena_bytes), |_| 0);
        let mut shown = match Segment::create(bytes) {
            Ok(segment) => Shown::whole(Arc::new(segment)),
            Err(error) => return unable(format!("cannot create shared memory: {error}")),
        };
        if let Some(arena) = arena {
            shown.arena = arena.segment().clone();
        }
        let rank = self.env.rank;
        let team: Vec<usize> = hosts.ranks(hosts.host(rank)).collect();
        let mut reach = Reach::default();
        let dialed = records[..rank].iter().map(|peer| {
            if hosts.host(peer.rank) != hosts.host(rank) {
                return None;
            }
            let dialed = match &peer.unix {
                Some(name) => address::dial_unix(name),
                None => Err(io::Error::other("it does not listen")),
            };
            match dialed {
                Ok(socket) => Some(socket),
                Err(error) => {
                    reach.unreached.push(peer.rank);
                    let obstacle = match records[rank].sees_the_end_of(peer, END_TIMEOUT) {
                        true => Obstacle::Dead { rank: peer.rank },
                        false => Obstacle::Unreached {
                            rank: peer.rank,
                            reason: error.to_string(),
                        },
                    };
                    reach.obstacle.get_or_insert(obstacle);
                    None
                }
            }
        });
        let dialed = dialed.collect();
        let prepared = Prepared {
            team,
            listener,
            dialed,
            shown,
        };
        (reach, Some(prepared))
    }

    fn shm(
        &self,
        me: &Record,
        records: &[Record],
        hosts: Hosts,
        prepared: Prepared<'_>,
    ) -> Result<Wiring, Error> {
        let mut shared = self.share(me, records, prepared)?;
        let sockets = shared.take_sockets();
        let engine = shared.engine(me, self.env.cores(), None);
        self.shared_wiring("shm", shared, engine, hosts, sockets)
    }

    /// Memory within this host, and TCP to the ranks of others.
    fn hierarchical(
        &self,
        me: &Record,
        records: &[Record],
        hosts: Hosts,
        prepared: Prepared<'_>,
        listeners: &Listeners,
    ) -> Result<Wiring, Error> {
        let mut shared = self.share(me, records, prepared)?;
        let mates = shared.take_sockets();
        let (sockets, streams) = self.dial_all(me, records, &hosts, listeners, mates)?;
        let engine = shared.engine(me, self.env.cores(), Some(streams));
        let transport = self.between_hosts("hierarchical");
        self.shared_wiring(transport, shared, engine, hosts, sockets)
    }

    fn shared_wiring(
        &self,
        transport: &'static str,
        shared: Shared,
        engine: Engine,
        hosts: Hosts,
        sockets: Sockets,
    ) -> Result<Wiring, Error> {
        let mut by_rank = vec![None; self.env.world];
        for (rank, shown) in shared.team.into_iter().zip(shared.shown) {
            by_rank[rank] = Some(shown.arena);
        }
        let memory = (shared.allocator, by_rank);
        self.wiring(transport, shared.status, engine, hosts, memory, sockets)
    }

    /// Connects the ranks of this host and has them map each other's memory.
    fn share(
        &self,
        me: &Record,
        records: &[Record],
        prepared: Prepared<'_>,
    ) -> Result<Shared, Error> {
        let (messages, team, own) = self.meet(records, prepared)?;
        // Without a launcher the lowest rank of a host makes a page for it, so that deadlines can tell what the missing
        // are doing.
        let is_first = self.subgroup.is_none() && self.succession.is_none();
        let no_launcher = is_first && team.iter().all(|rank| records[*rank].page.is_none());
        let made = match no_launcher && me.rank == team[0] {
            true => Some(JobPage::create_memfd(team.len()).map_err(Arc::new)?),
            false => None,
        };
        let swap = Swap {
            forming: self,
            records,
            team: &team,
            sockets: &messages,
        };
        let swapped = swap.run(&own, made.as_ref())?;
        let (page, peers) = match made.or(swapped.page).filter(|_| no_launcher) {
            Some(page) if page.slots() == team.len() => {
                let slot = |peer: &Record| team.iter().position(|rank| *rank == peer.rank);
                (page, self.peers(records, slot))
            }
            _ => (
                self.page.clone(),
                self.peers(records, |peer| shared_slot(me, peer)),
            ),
        };
        let arena = match self.kept_arena() {
            Some(arena) => {
                arena.succeed(self.generation());
                arena.clone()
            }
            None => Arena::new(own.arena, self.generation()),
        };
        Ok(Shared {
            team,
            shown: swapped.shown,
            messages,
            p2p: swapped.p2p,
            status: self.status(page, peers),
            allocator: Allocator::Arena(arena),
        })
    }

    /// This rank's arena in the generation before.
    fn kept_arena(&self) -> Option<&Arc<Arena>> {
        self.succession?.memory.own.as_ref()
    }

    /// Connects the ranks of this host.
    pub(super) fn meet(&self, records: &[Record], prepared: Prepared<'_>) -> Result<Met, Error> {
        let Prepared {
            team,
            listener,
            mut dialed,
            shown,
        } = prepared;
        let mut lanes = vec![0; self.env.world];
        team.iter().for_each(|rank| lanes[*rank] = 1);
        let mesh = self.mesh(&lanes);
        self.formation.enter("connect to the ranks of its host");
        let mut connections =
            mesh.connect(listener, |peer, attempt| match dialed[peer].take() {
                _ if attempt > 0 => None,
                Some(socket) => Some(Ok(socket)),
                None => {
                    let name = records[peer].unix.as_deref().unwrap_or_default();
                    Some(address::dial_unix(name).map_err(|error| error.to_string()))
                }
            })?;
        Ok((connections.swap_remove(MESSAGES), team, shown))
    }
}

/// What a rank has reported, as the end of a sentence about both ranks.
fn in_words(rank: usize, obstacle: &Obstacle) -> String {
    match obstacle {
        Obstacle::Dead { rank: peer } => format!("rank {rank} sees that rank {peer} is dead"),
        Obstacle::Unreached { rank: peer, reason } => {
            format!("rank {rank} does not reach rank {peer}: {reason}")
        }
        Obstacle::Unable { reason } => format!("rank {rank} {reason}"),
    }
}

impl Prepared<'_> {
    /// For the ranks that turned out to share this host; connections to others end.
    fn on(mut self, team: Vec<usize>) -> Self {
        for (rank, socket) in self.dialed.iter_mut().enumerate() {
            if team.binary_search(&rank).is_err() {
                *socket = None;
            }
        }
        self.team = team;
        self
    }
}

impl Shared {
    /// The connections for messages and for p2p.
    fn take_sockets(&mut self) -> Sockets {
        (
            std::mem::take(&mut self.messages),
            std::mem::take(&mut self.p2p),
        )
    }

    fn engine(&self, me: &Record, cores: usize, streams: Option<Streams>) -> Engine {
        let team = Team::new(me.rank, me.world, self.team.clone(), self.shown.clone());
        self.status.add_waiters(team.waiters());
        Engine::new(
            me.rank,
            Some(team.on(cores)),
            streams,
            self.allocator.clone(),
        )
    }
}
