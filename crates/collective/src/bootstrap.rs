//! Forms a group: ranks publish where they are, choose a transport, and connect.

mod address;
mod exchange;
mod mpi;
mod notice;
mod reach;
mod record;
mod share;
mod swap;

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use paceline_rendezvous::env::WorkerEnv;
use paceline_rendezvous::net::nodename;
use paceline_rendezvous::page::{Activity, Generation, JobPage, Phase};
use paceline_rendezvous::store::{self, Client, Store as _, StoreError};
use parking_lot::Mutex;

use self::address::NoAddress;
use self::record::{Choice, PROTOCOL, Record, choose, data_lanes, namespace, shared_slot};
use crate::engine::Engine;
use crate::error::Error;
use crate::flight::Formation;
use crate::memory::{Allocator, Arena, Segment};
use crate::mesh::{Advice as _, Mesh};
use crate::options::{GroupOptions, Transport};
use crate::p2p::PointToPoint;
use crate::plan::Hosts;
use crate::socket::{Listener, Socket};
use crate::status::{PeerInfo, Status};
use crate::stream::{LANES_MAX, Streams};
use crate::watch::Watch;
use crate::wiring::{Origin, Subgroup, Wiring};

/// The first lane of a mesh: messages. The others are behind it, so that neither waits for the other.
const MESSAGES: usize = 0;
/// The second lane between hosts: what ranks send to one another beside the operations of all. Then come those for data.
const P2P: usize = 1;
/// The name under which ranks publish where they are. A rank with a record has arrived.
const RECORDS: &str = "record";
/// Lanes of each pair of ranks on different hosts, beside those for data.
const LANES_FOR_ALL: usize = 2;

/// Longest wait for another rank between two looks at the launcher's page.
const SLICE: Duration = Duration::from_millis(100);

/// The first phase of forming a group: the end of "could not ...".
const REACH_STORE: &str = "reach the job's store";

/// Connects a world of two or more.
///
/// `formation` says, if it fails, how far it came.
pub(crate) fn connect(
    env: &WorkerEnv,
    options: &GroupOptions,
    formation: &Formation,
) -> Result<Wiring, Error> {
    formation.enter(REACH_STORE);
    let started = Instant::now();
    let page = JobPage::for_worker(env).map_err(Arc::new)?;
    let slot = page.slot(env.local_rank.min(page.slots() - 1));
    slot.set_activity(&Activity {
        phase: Phase::Rendezvous,
        step: 0,
        op: None,
    });
    let reached = store::connect_or_host(env, options.timeout);
    let (server, client) = reached.map_err(|source| unreached(env, source))?;
    let forming = Forming::new(env, options, client, page, started, formation).numbered()?;
    let wiring = forming.connect().inspect_err(|_| {
        if server.is_some() {
            forming.await_notices();
        }
    })?;
    Ok(forming.done(wiring, server.map(Arc::new)).0)
}

/// Connects a sub-group of two or more through the store in which its parent formed; `env` has its numbers, and the
/// keys begin with `prefix`, which is its own.
pub(crate) fn connect_child(
    env: &WorkerEnv,
    options: &GroupOptions,
    subgroup: &Subgroup<'_>,
    (server, address, spare): (Option<Arc<store::Server>>, &str, &Mutex<Option<Client>>),
    prefix: String,
    formation: &Formation,
) -> Result<Wiring, Error> {
    formation.enter(REACH_STORE);
    let started = Instant::now();
    let left = spare.lock().take();
    let connect = || Client::connect_as(address, &env.token, env.tls, options.timeout);
    let client = left.map_or_else(connect, Ok);
    let client = client.map_err(|source| unreached(env, source))?;
    let page = subgroup.parent.page().clone();
    let forming = Forming {
        prefix,
        subgroup: Some(subgroup),
        ..Forming::new(env, options, client, page, started, formation)
    };
    let wiring = forming.connect()?;
    let (wiring, client) = forming.done(wiring, server);
    *spare.lock() = Some(client);
    Ok(wiring)
}

/// A generation after the first, as one of its ranks forms it.
#[derive(Debug)]
pub(crate) struct Succession<'a> {
    pub(crate) generation: &'a Generation,
    /// This rank's slot on the page, and the number that its process was started with.
    pub(crate) slot: usize,
    pub(crate) started: usize,
    pub(crate) page: &'a JobPage,
    /// Address of the store in which it forms.
    pub(crate) store: &'a str,
    pub(crate) memory: &'a KeptMemory,
}

/// What a rank has of the generation before: its pages are in place, so the next one need not wait for them.
#[derive(Debug, Default)]
pub(crate) struct KeptMemory {
    /// This rank's own. All its operations have ended.
    pub(crate) own: Option<Arc<Arena>>,
    /// The arenas that it maps.
    pub(crate) mapped: Vec<Arc<Segment>>,
}

impl KeptMemory {
    /// The arena that a peer has sent.
    pub(crate) fn open(&self, fd: OwnedFd) -> io::Result<Arc<Segment>> {
        let known = self.mapped.iter().find(|segment| segment.is(fd.as_fd()));
        known.map_or_else(
            || Segment::open(fd).map(Arc::new),
            |known| Ok(known.clone()),
        )
    }
}

impl Succession<'_> {
    /// The number that the process of a rank on this page was started with.
    pub(crate) fn local(&self, rank: usize) -> Option<usize> {
        let place = rank.checked_sub(self.generation.first)?;
        let slot = self.generation.members.get(place)?;
        (self.started + slot).checked_sub(self.slot)
    }

    /// What only this generation's keys begin with: an earlier rank neither finds its records nor has its fingerprint.
    fn prefix(&self, env: &WorkerEnv) -> String {
        format!("{}/generation{}", keys(env), self.generation.number)
    }
}

/// Prefix of the keys of all groups of a job.
pub(crate) fn keys(env: &WorkerEnv) -> String {
    format!("paceline/collective/{}/{}", env.run_id, env.restart_count)
}

/// Connects a later generation of two ranks or more; `env` has its numbers.
pub(crate) fn connect_next(
    env: &WorkerEnv,
    options: &GroupOptions,
    succession: &Succession<'_>,
    formation: &Formation,
) -> Result<Wiring, Error> {
    formation.enter(REACH_STORE);
    let started = Instant::now();
    let reached = Client::connect_as(succession.store, &env.token, env.tls, options.timeout);
    let client = reached.map_err(|source| unreached(env, source))?;
    let page = succession.page.clone();
    let forming = Forming {
        prefix: succession.prefix(env),
        succession: Some(succession),
        ..Forming::new(env, options, client, page, started, formation)
    };
    let wiring = forming.connect()?;
    Ok(forming.done(wiring, None).0)
}

fn unreached(env: &WorkerEnv, source: StoreError) -> Error {
    Error::Store {
        rank: env.rank,
        doing: REACH_STORE.into(),
        source: Arc::new(source),
    }
}

fn deadline(started: Instant, timeout: Duration) -> Instant {
    let far = Duration::from_secs(365 * 24 * 3600);
    started.checked_add(timeout).unwrap_or(started + far)
}

/// Connections for messages and for p2p, by rank.
type Sockets = (Vec<Option<Socket>>, Vec<Option<Socket>>);

/// Where this rank listens, as far as the transport that is wished for needs it.
struct Listeners {
    unix: Option<Listener>,
    tcp: Option<Listener>,
}

/// A group on its way.
struct Forming<'a> {
    env: &'a WorkerEnv,
    options: &'a GroupOptions,
    client: Client,
    page: JobPage,
    started: Instant,
    deadline: Instant,
    /// Prefix of this group's keys: job, restart, and how many groups this rank has formed before.
    prefix: String,
    /// For a sub-group, what it has from its parent.
    subgroup: Option<&'a Subgroup<'a>>,
    /// For a generation after the first, where it comes from.
    succession: Option<&'a Succession<'a>>,
    formation: &'a Formation,
    /// The connection to the store for failure notices, made when it is first needed; none if the store cannot be reached.
    notices: OnceLock<Option<Client>>,
    /// Set when this rank has left its last notice.
    parted: OnceLock<()>,
}

impl<'a> Forming<'a> {
    fn new(
        env: &'a WorkerEnv,
        options: &'a GroupOptions,
        client: Client,
        page: JobPage,
        started: Instant,
        formation: &'a Formation,
    ) -> Self {
        Self {
            env,
            options,
            // It belongs to the launcher, or to a rank, and nothing takes its place.
            client: client.reconnecting(),
            page,
            started,
            deadline: deadline(started, options.timeout),
            prefix: String::new(),
            subgroup: None,
            succession: None,
            formation,
            notices: OnceLock::new(),
            parted: OnceLock::new(),
        }
    }

    /// With the prefix of the next group of all ranks.
    fn numbered(mut self) -> Result<Self, Error> {
        let env = self.env;
        let job = keys(env);
        // Every rank's n-th group is the same group, also where ranks are threads of one process.
        let round = self.client.add(&format!("{job}/groups/{}", env.rank), 1);
        let round = round.map_err(|error| self.store("count its groups", error))?;
        self.prefix = format!("{job}/{round}");
        Ok(self)
    }

    /// With where the group's ranks meet again, and the connection to the store.
    fn done(self, wiring: Wiring, server: Option<Arc<store::Server>>) -> (Wiring, Client) {
        let origin = Some(Origin::Store {
            server,
            address: self.client.server().to_owned(),
            prefix: self.prefix,
            spare: Arc::default(),
        });
        (Wiring { origin, ..wiring }, self.client)
    }

    fn connect(&self) -> Result<Wiring, Error> {
        self.attempt().inspect_err(|error| self.leave_notice(error))
    }

    fn attempt(&self) -> Result<Wiring, Error> {
        let (me, records, listeners) = self.report_in()?;
        match choose(&records) {
            Choice::Tcp => {}
            Choice::Share { or_tcp } => {
                if let Some(wiring) = self.try_sharing(&me, &records, &listeners, or_tcp)? {
                    return Ok(wiring);
                }
            }
            Choice::Impossible { reason } => return Err(self.impossible(reason)),
            Choice::Quarrel { rank, reason } => return Err(self.peer(rank, reason)),
        }
        self.tcp(&me, &records, &listeners)
    }

    /// Tells the others where this rank is, and learns it of them.
    fn report_in(&self) -> Result<(Record, Vec<Record>, Listeners), Error> {
        let wish = self.options.transport;
        let (mut unix, mut tcp, mut name) = (None, None, None);
        let (mut addresses, mut port) = (Vec::new(), 0);
        if wish != Transport::Tcp {
            let listening = self.listen_unix()?;
            (unix, name) = (Some(listening.0), Some(listening.1));
        }
        if wish != Transport::Shm {
            let listening = self.listen_tcp()?;
            (tcp, addresses, port) = (Some(listening.0), listening.1, listening.2);
        }
        let me = Record {
            protocol: PROTOCOL,
            rank: self.env.rank,
            world: self.env.world,
            transport: wish.name().into(),
            host: self.host(),
            boot: boot_id().into(),
            pid: std::process::id(),
            net: namespace("net"),
            pids: namespace("pid"),
            local_rank: self.own_slot(),
            page: self.page_identity(),
            unix: name,
            tcp: addresses,
            port,
            sockets: self.env.sockets_per_peer,
            mpi: self.mpi_library(),
            started: (self.succession).map_or(self.env.rank, |next| next.started),
        };
        let records = self.exchange(RECORDS, &me.encode(), "report in", |rank, bytes| {
            Record::decode(bytes, rank, self.env.world)
        })?;
        Ok((me, records, Listeners { unix, tcp }))
    }

    fn tcp(&self, me: &Record, records: &[Record], listeners: &Listeners) -> Result<Wiring, Error> {
        let hosts = Hosts::apart(me.world);
        let mates = Sockets::default();
        let (sockets, streams) = self.dial_all(me, records, &hosts, listeners, mates)?;
        let status = self.status(
            self.page.clone(),
            self.peers(records, |peer| shared_slot(me, peer)),
        );
        let engine = Engine::new(me.rank, None, Some(streams), Allocator::Heap);
        let memory = (Allocator::Heap, Vec::new());
        let transport = self.between_hosts("tcp");
        self.wiring(transport, status, engine, hosts, memory, sockets)
    }

    /// `memory`: where buffers come from, and by rank the segments that are mapped, if any.
    fn wiring(
        &self,
        transport: &'static str,
        status: Arc<Status>,
        engine: Engine,
        hosts: Hosts,
        (allocator, segments): (Allocator, Vec<Option<Arc<Segment>>>),
        (messages, p2p): Sockets,
    ) -> Result<Wiring, Error> {
        let timeout = self.options.timeout;
        let p2p = PointToPoint::connected(&status, timeout, allocator.clone(), segments, p2p)?;
        let watch = Watch::start(&status, messages, &p2p)?;
        Ok(Wiring {
            transport,
            engine,
            hosts,
            allocator,
            watch: Some(watch),
            p2p,
            origin: None,
            status,
        })
    }

    /// What a transport is called that has MPI between hosts if that was asked for.
    fn between_hosts(&self, or: &'static str) -> &'static str {
        match self.options.transport {
            Transport::Mpi => Transport::Mpi.name(),
            _ => or,
        }
    }

    /// Connections to all ranks, for messages and for p2p, and what carries data to those on other hosts. `mates` are the
    /// connections to the ranks of this host, if they share memory.
    fn dial_all(
        &self,
        me: &Record,
        records: &[Record],
        hosts: &Hosts,
        listeners: &Listeners,
        mates: Sockets,
    ) -> Result<(Sockets, Streams), Error> {
        let Some(listener) = &listeners.tcp else {
            return Err(self.impossible("the ranks do not share a host".into()));
        };
        let over_mpi = self.options.transport == Transport::Mpi;
        let lanes = (0..me.world).map(|peer| match hosts.host(peer) == hosts.host(me.rank) {
            true => 0,
            false if over_mpi => LANES_FOR_ALL,
            false => LANES_FOR_ALL + data_lanes(records),
        });
        let lanes: Vec<usize> = lanes.collect();
        let mesh = self.mesh(&lanes);
        self.formation.enter("connect to all ranks");
        let connections = mesh.connect(listener, |peer, attempt| {
            let peer = &records[peer];
            peer.tcp
                .get(attempt)
                .map(|ip| address::dial_tcp(*ip, peer.port, self.deadline))
        });
        // Those of this host have shared memory with this rank and will read what it says.
        let mut connections = connections.inspect_err(|error| self.part(&mates.0, error))?;
        let data = connections.split_off(LANES_FOR_ALL);
        let mut p2p = connections.swap_remove(P2P);
        let mut messages = connections.swap_remove(MESSAGES);
        for (all, mates) in [(&mut messages, mates.0), (&mut p2p, mates.1)] {
            for (rank, mate) in mates
                .into_iter()
                .enumerate()
                .filter(|(_, mate)| mate.is_some())
            {
                all[rank] = mate;
            }
        }
        let streams = match over_mpi {
            true => Streams::new(me.rank, vec![self.mpi_lines(records, hosts, &messages)?]),
            false => Streams::new(me.rank, data),
        };
        let streams = streams.map_err(|error| self.system("prepare its connections", &error))?;
        Ok(((messages, p2p), streams.on(self.env.cores())))
    }

    /// What this rank's host is called.
    fn host(&self) -> String {
        self.env.host_id.clone().unwrap_or_else(nodename)
    }

    fn status(&self, page: JobPage, peers: Vec<PeerInfo>) -> Arc<Status> {
        if let Some(subgroup) = self.subgroup {
            return subgroup.status(self.env.rank);
        }
        let own = peers[self.env.rank]
            .slot
            .unwrap_or(self.own_slot())
            .min(page.slots() - 1);
        let slot = page.slot(own);
        let status = Status::new(self.env.rank, peers, page, slot);
        Arc::new(status.in_generation(self.generation()))
    }

    /// This rank's slot on the launcher's page.
    fn own_slot(&self) -> usize {
        let successor = self.succession.map(|next| next.slot);
        successor.unwrap_or(self.env.local_rank)
    }

    fn generation(&self) -> u32 {
        let parent = self.subgroup.map(|subgroup| subgroup.parent.generation());
        let own = self.succession.map(|next| next.generation.number);
        own.or(parent).unwrap_or(0)
    }

    fn peers(&self, records: &[Record], slot: impl Fn(&Record) -> Option<usize>) -> Vec<PeerInfo> {
        let peer = |record: &Record| PeerInfo {
            host: record.host.clone(),
            pid: record.pid,
            slot: slot(record),
            started: record.started,
        };
        records.iter().map(peer).collect()
    }

    /// `lanes` are by rank.
    fn mesh<'b>(&'b self, lanes: &'b [usize]) -> Mesh<'b> {
        Mesh {
            rank: self.env.rank,
            world: self.env.world,
            group: fingerprint(&self.prefix),
            lanes,
            token: &self.env.token,
            tls: self.env.tls,
            deadline: self.deadline,
            advice: self,
        }
    }

    /// The launcher's reason, if it has ended this generation or the job. It names ranks by the numbers that their processes
    /// were started with, which a sub-group does not have. Those on other nodes are not known yet.
    fn health(&self) -> Result<(), Error> {
        let Some(cause) = self.page.end_of_generation(self.generation()) else {
            return Ok(());
        };
        let own = |rank| match self.succession {
            Some(next) => (0..self.env.world).find(|own| next.local(*own) == Some(rank)),
            None => Some(rank),
        };
        Err(Error::Revoked {
            culprit: cause.rank.filter(|_| self.subgroup.is_none()).and_then(own),
            text: cause.text,
        })
    }

    fn listen_unix(&self) -> Result<(Listener, String), Error> {
        let (listener, name) = address::listen_unix()
            .map_err(|error| self.system("listen at a Unix socket", &error))?;
        Ok((self.prepared(Listener::Unix(listener), 1)?, name))
    }

    fn listen_tcp(&self) -> Result<(Listener, Vec<IpAddr>, u16), Error> {
        let route = self
            .client
            .local_addr()
            .map_or(IpAddr::from(Ipv4Addr::LOCALHOST), |addr| addr.ip());
        let bound = address::listen_tcp(self.env, route);
        let (listener, addresses) = bound.map_err(|error| match error {
            NoAddress::Interface { wanted, found } => Error::Interface { wanted, found },
            NoAddress::System(error) => self.system("listen at a port", &error),
        })?;
        let port = listener
            .local_addr()
            .map_err(|error| self.system("learn its port", &error))?
            .port();
        Ok((
            self.prepared(Listener::Tcp(listener), LANES_FOR_ALL + LANES_MAX)?,
            addresses,
            port,
        ))
    }

    fn prepared(&self, listener: Listener, lanes: usize) -> Result<Listener, Error> {
        let prepared = listener.prepare(lanes * self.env.world + 64);
        prepared.map_err(|error| self.system("prepare its listener", &error))?;
        Ok(listener)
    }

    /// Tells one launcher's page from another's, so that ranks know whose slots they see.
    fn page_identity(&self) -> Option<(u64, u64)> {
        let fd = self.env.page_fd?;
        // The page has been mapped from this descriptor, so it is open; the link is read instead of borrowing a number.
        let stat = rustix::fs::stat(format!("/proc/self/fd/{fd}")).ok()?;
        Some((stat.st_dev, stat.st_ino))
    }

    /// The rank that hosts the store, where one of them does.
    fn hosts_store(&self) -> Option<usize> {
        let is_ranks = self.subgroup.is_none() && self.env.store.is_none();
        is_ranks.then_some(0)
    }

    fn store(&self, doing: &str, source: StoreError) -> Error {
        Error::Store {
            rank: self.env.rank,
            doing: doing.into(),
            source: Arc::new(source),
        }
    }

    fn system(&self, doing: &str, error: &io::Error) -> Error {
        Error::system(self.env.rank, doing, error)
    }

    fn peer(&self, peer: usize, reason: String) -> Error {
        let rank = self.env.rank;
        Error::Peer { rank, peer, reason }
    }

    fn impossible(&self, reason: String) -> Error {
        let wanted = self.options.transport.name();
        Error::Transport { wanted, reason }
    }
}

/// Tells one start of a machine from another.
fn boot_id() -> &'static str {
    static ID: OnceLock<String> = OnceLock::new();
    ID.get_or_init(|| {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        id.unwrap_or_default().trim().to_owned()
    })
}

/// FNV-1a: the same number in every build, which the standard library's hashers do not promise.
fn fingerprint(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    })
}

#[cfg(test)]
pub(crate) use self::record::simulated;
#[cfg(test)]
mod tests;
