//! The process group: who belongs to it, its threads, its beginning and its end.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_rendezvous::env::WorkerEnv;
use paceline_rendezvous::page::{self, JobPage, Phase, Slot};
use paceline_rendezvous::store::{Client, StoreError};
use parking_lot::Mutex;

use crate::buffer::Buffer;
use crate::element::Element;
use crate::error::Error;
use crate::executor::Executor;
use crate::flight::{Dump, Flight, Formation, Identity, Mailbox, Membership};
use crate::memory::{Allocator, Gauges};
use crate::options::GroupOptions;
use crate::p2p::PointToPoint;
use crate::plan::{Hosts, Unfit};
use crate::status::{PeerInfo, Status};
use crate::tree::Tree;
use crate::watch::Watch;
use crate::wiring::{Origin, Wiring};
use crate::{bootstrap, local};

/// Largest world that a group can have: every rank holds a connection to every other one.
pub const WORLD_MAX: usize = 1024;

/// The ranks of a job, connected. Cheap to clone; all clones are the same member of the group.
///
/// All ranks must issue the same operations in the same order. An operation begins with a comparison of what the ranks
/// called, so that a difference is an error that names them and not a hang or a wrong number.
///
/// *Blocks*: every operation has the group's timeout from the moment it starts. Dropping the last clone tells the peers
/// goodbye, or, in a thread that panics, that this rank gave up, and joins the group's threads.
///
/// *Errors*: the first failure latches; every later call returns it. A rank that dies fails all others at once.
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
///             let mut data = [group.rank() as f32, 1.0];
///             group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
///             assert_eq!(data, [6.0, 4.0]);
///         });
///     }
/// });
/// # Ok::<(), paceline_collective::Error>(())
/// ```
#[derive(Clone)]
pub struct ProcessGroup(Arc<Member>);

/// One rank's side of a group.
pub(crate) struct Member {
    env: WorkerEnv,
    transport: &'static str,
    pub(crate) status: Arc<Status>,
    pub(crate) executor: Arc<Executor>,
    pub(crate) allocator: Allocator,
    /// Memory that the engine keeps.
    pub(crate) gauges: Arc<Gauges>,
    /// One leaf for each rank.
    pub(crate) tree: Arc<Tree>,
    pub(crate) hosts: Arc<Hosts>,
    /// Whether callers' own memory goes through shared memory, in pieces.
    pub(crate) stages: bool,
    /// Why algorithms that were asked for were not used, as far as it has been said.
    warned: Mutex<HashSet<Unfit>>,
    /// The communication thread; none in a world of one.
    comm: Option<JoinHandle<()>>,
    watch: Option<Watch>,
    pub(crate) p2p: Arc<PointToPoint>,
    /// As asked for, the environment's wishes included; sub-groups have the same.
    pub(crate) options: GroupOptions,
    /// Where sub-groups meet; none in a world of one.
    pub(crate) origin: Option<Origin>,
    /// How many times the group has been split.
    pub(crate) splits: AtomicU64,
    /// How many sub-groups have had a name.
    pub(crate) names: Mutex<HashMap<String, u64>>,
}

impl ProcessGroup {
    /// Joins the group that this process's environment describes; a world of one when it describes none.
    ///
    /// A process that the launcher has started in place of a lost rank gets a group that it [is not in yet](Self::is_joining).
    ///
    /// *Blocks*: until all ranks have joined, at most `options.timeout`.
    ///
    /// *Errors*: names the variable that is wrong, or the ranks that never came.
    pub fn init(options: &GroupOptions) -> Result<Self, Error> {
        let env = WorkerEnv::from_process().map_err(|error| Arc::new(error).into());
        let joined = env.and_then(|env| Self::connect(env, options));
        joined.inspect_err(|error| page::tell_misconfigured(error.is_configuration()))
    }

    /// Joins the group that `env` describes.
    ///
    /// *Blocks*: and *Errors*: as [`init`](Self::init).
    pub fn connect(env: WorkerEnv, options: &GroupOptions) -> Result<Self, Error> {
        let options = options.under(&env)?;
        if env.world == 0 || env.world > WORLD_MAX || env.rank >= env.world {
            return Err(Error::Setting {
                name: "RANK/WORLD_SIZE",
                value: format!("{}/{}", env.rank, env.world),
                expected: "a rank below a world size of 1 to 1024",
            });
        }
        if env.replacement > 0 {
            return Self::to_join(env, options);
        }
        let flight = Flight::new(&env, Identity::of(&env));
        let wiring = if env.world == 1 {
            alone(&env, &options)?
        } else {
            let formation = Formation::new();
            bootstrap::connect(&env, &options, &formation).inspect_err(|error| {
                let all = Membership {
                    name: "world".into(),
                    ranks: (0..env.world).collect(),
                    transport: "none",
                };
                flight.never_formed(all, &formation, error);
            })?
        };
        Self::assemble(env, options, wiring, flight)
    }

    /// A group of `world` ranks in this process, one for each thread that takes one: for tests and examples.
    ///
    /// Index `i` is rank `i`. *Blocks*: no.
    pub fn local(world: usize, options: &GroupOptions) -> Result<Vec<Self>, Error> {
        if world == 0 || world > WORLD_MAX {
            return Err(Error::Setting {
                name: "world",
                value: world.to_string(),
                expected: "1 to 1024",
            });
        }
        static GROUPS: AtomicU64 = AtomicU64::new(0);
        let job = format!(
            "local-{}-{}",
            std::process::id(),
            GROUPS.fetch_add(1, Ordering::Relaxed)
        );
        let started: Vec<usize> = (0..world).collect();
        let wirings = local::connect(0, &started, options)?;
        let members = wirings.into_iter().enumerate().map(|(rank, wiring)| {
            let mut env = WorkerEnv::alone();
            (env.rank, env.local_rank, env.world, env.local_world) = (rank, rank, world, world);
            let flight = Flight::new(&env, Identity::named(&env, job.clone()));
            Self::assemble(env, options.clone(), wiring, flight)
        });
        members.collect()
    }

    /// `flight` records the operations of all groups of a rank.
    pub(crate) fn assemble(
        env: WorkerEnv,
        options: GroupOptions,
        wiring: Wiring,
        flight: Arc<Flight>,
    ) -> Result<Self, Error> {
        let Wiring {
            transport,
            status,
            mut engine,
            hosts,
            allocator,
            watch,
            p2p,
            origin,
        } = wiring;
        if !status.is_subgroup() {
            status.slot().set_timeout(options.timeout);
        }
        let recorder = flight.recorder(Membership {
            name: status.name().into(),
            ranks: (0..env.world).map(|rank| status.started(rank)).collect(),
            transport,
        });
        let mailbox: Weak<dyn Mailbox> = Arc::downgrade(&(p2p.clone() as Arc<dyn Mailbox>));
        recorder.p2p.set_mailbox(mailbox);
        engine.count_in(flight.sent().clone());
        status.set_flight(flight, recorder.clone());
        let stages = engine.shares_memory();
        let gauges = engine.gauges.clone();
        let executor = Executor::new(status.clone(), recorder, engine, options.timeout);
        let executor = Arc::new(executor);
        let comm = if env.world == 1 {
            None
        } else {
            let served = executor.clone();
            Some(status.spawn("comm", move || served.serve())?)
        };
        let tree = Tree::per_rank(env.world);
        let member = Member {
            env,
            transport,
            status,
            executor,
            allocator,
            gauges,
            tree,
            hosts: Arc::new(hosts),
            stages,
            warned: Mutex::default(),
            comm,
            watch,
            p2p,
            options,
            origin,
            splits: AtomicU64::new(0),
            names: Mutex::default(),
        };
        Ok(Self(Arc::new(member)))
    }

    pub(crate) fn member(&self) -> &Member {
        &self.0
    }

    /// This rank's number, below [`world`](Self::world).
    pub fn rank(&self) -> usize {
        self.0.env.rank
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.0.env.world
    }

    /// What the group is called: "world", or for a [sub-group](Self::split) the name it was made with.
    pub fn name(&self) -> &str {
        self.0.status.name()
    }

    /// Whether it is a part of another group, so that its ranks have numbers of their own.
    pub fn is_subgroup(&self) -> bool {
        self.0.status.is_subgroup()
    }

    /// The job's number of a rank of this group.
    ///
    /// *Panics*: when `rank` is not below [`world`](Self::world).
    pub fn global_rank(&self, rank: usize) -> usize {
        assert!(rank < self.world(), "rank {rank} of {}", self.world());
        self.0.status.global(rank)
    }

    /// The name of a rank's host; empty for ranks that are threads.
    ///
    /// *Panics*: when `rank` is not below [`world`](Self::world).
    pub fn host(&self, rank: usize) -> &str {
        assert!(rank < self.world(), "rank {rank} of {}", self.world());
        &self.0.status.peers()[rank].host
    }

    /// The name of a thread of this rank that works for this group, as its own ones are called: "rank5/comm", in a sub-group "rank5/dp1/comm".
    pub fn thread_name(&self, part: &str) -> String {
        self.0.status.thread_name(part)
    }

    /// The number that a rank of this group was started with, by which the launcher calls it. It differs from the rank's number
    /// if an earlier rank was lost.
    ///
    /// *Panics*: when `rank` is not below [`world`](Self::world).
    pub fn started_rank(&self, rank: usize) -> usize {
        assert!(rank < self.world(), "rank {rank} of {}", self.world());
        self.0.status.started(rank)
    }

    /// The job's numbers of all ranks of this group, in the group's order.
    pub fn ranks(&self) -> Vec<usize> {
        (0..self.world())
            .map(|rank| self.global_rank(rank))
            .collect()
    }

    /// This rank's number among the ranks of its host.
    pub fn local_rank(&self) -> usize {
        self.0.env.local_rank
    }

    /// Number of ranks on this host.
    pub fn local_world(&self) -> usize {
        self.0.env.local_world
    }

    /// How bytes travel: `"local"`, `"shm"`, `"tcp"`, `"hierarchical"` (shared memory within hosts, TCP between them), `"mpi"`
    /// (the same with MPI between them), or `"none"` in a world of one.
    pub fn transport(&self) -> &'static str {
        self.0.transport
    }

    /// The environment that this rank was started with; in a sub-group with the group's rank and world.
    pub fn env(&self) -> &WorkerEnv {
        &self.0.env
    }

    /// The page on which this host's ranks say what they are doing.
    pub fn page(&self) -> &JobPage {
        self.0.status.page()
    }

    /// This rank's slot on the page. Its number is that of the rank's first generation, so it may differ from
    /// [`local_rank`](Self::local_rank).
    pub fn slot(&self) -> Slot {
        self.0.status.slot()
    }

    /// Deadline of each operation.
    pub fn timeout(&self) -> Duration {
        self.0.executor.timeout()
    }

    /// Sets the deadline of each operation that starts from now on, until the next generation of the group. Messages between
    /// two ranks and groups made from this one keep that of the group's options.
    ///
    /// Ranks may differ in it: a rank whose deadline is the first to pass fails the group, and names the rank that is missing.
    pub fn set_timeout(&self, timeout: Duration) {
        self.0.executor.set_timeout(timeout);
        if !self.0.status.is_subgroup() {
            self.slot().set_timeout(timeout);
        }
    }

    /// The deadline of the group's options, if it holds only until [another one](Self::set_timeout) is set.
    pub fn auto_timeout(&self) -> Option<Duration> {
        let options = &self.0.options;
        options.auto_timeout.then_some(options.timeout)
    }

    /// A zeroed buffer of `len` elements that operations reduce in place.
    ///
    /// *Errors*: the arena is full. That does not break the group.
    pub fn buffer<T: Element>(&self, len: usize) -> Result<Buffer<T>, Error> {
        let bytes = len.saturating_mul(size_of::<T>());
        Ok(Buffer::new(self.0.allocator.allocate(bytes)?, len))
    }

    /// Bytes that this rank has sent to others since it joined, by operations and messages of all its groups, over shared
    /// memory or a network. Data that peers read in this rank's memory counts too. Not among them: headers, and what NCCL sends.
    pub fn sent_bytes(&self) -> u64 {
        let flight = self.0.status.flight();
        flight.map_or(0, |flight| flight.sent().load(Ordering::Relaxed))
    }

    /// Publishes what this rank is doing, for reports about ranks that are waited for. *Cost*: about 50 ns.
    pub fn set_phase(&self, phase: Phase, step: u64) {
        self.0.status.set_phase(phase, step);
    }

    /// The group's first failure, if it has one: what every further call would return.
    ///
    /// *Blocks*: no. Lets a rank that computes for long notice that the others are gone.
    pub fn health(&self) -> Result<(), Error> {
        self.0.status.health()
    }

    /// A new connection to the store in which the group formed, for what ranks tell each other beside their operations, and the prefix of the
    /// group's keys in it. None in a world of one, and where ranks are threads.
    ///
    /// *Blocks*: at most for `timeout`.
    pub fn store(&self, timeout: Duration) -> Result<Option<(Client, String)>, StoreError> {
        let Some(Origin::Store {
            address, prefix, ..
        }) = &self.0.origin
        else {
            return Ok(None);
        };
        let env = self.env();
        let client = Client::connect_as(address, &env.token, env.tls, timeout)?;
        Ok(Some((client, prefix.clone())))
    }

    /// What this rank's flight recorder holds: the last operations of all its groups. For reports on demand; on a
    /// failure it is written by itself, see [`flight`](crate::flight).
    pub fn dump_flight(&self) -> Dump {
        let dump = self.0.status.dump_flight();
        dump.expect("a group has a recorder from its beginning")
    }

    /// When the times in this rank's flight recorder begin.
    pub fn flight_origin(&self) -> Instant {
        let origin = self.0.status.flight_origin();
        origin.expect("a group has a recorder from its beginning")
    }

    /// Tells the launcher that this process fails because of `rank`, so that it reports that one as the cause.
    pub fn blame(&self, rank: usize) {
        self.0.status.blame(rank);
    }

    /// Gives up: fails the group here and on all peers, unless it has failed before. If another group of this rank has failed
    /// because of a rank that is in this one too, the error names that rank.
    pub fn abort(&self, why: &str) {
        if let Some(culprit) = self.0.status.blamed() {
            return self.abort_over(Some(culprit), why);
        }
        self.0.status.fail(Error::AbortedHere {
            rank: self.rank(),
            cause: why.into(),
        });
        self.0.status.announce();
    }

    /// As [`abort`](Self::abort), because of another rank: the error that all ranks get names that one.
    pub fn abort_over(&self, culprit: Option<usize>, why: &str) {
        self.0.status.fail(Error::Aborted {
            by: self.rank(),
            culprit: culprit
                .filter(|rank| *rank < self.world())
                .or(Some(self.rank())),
            cause: why.into(),
            deadline: false,
        });
        self.0.status.announce();
    }
}

impl Member {
    /// Says once that an algorithm that was asked for cannot be used, and why.
    pub(crate) fn warn(&self, reason: Unfit) {
        let mut warned = self.warned.lock();
        if warned.insert(reason) && self.env.rank == 0 {
            paceline_rendezvous::notice!(WARN, "{reason}; the table's choice is used");
        }
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("name", &self.name())
            .field("rank", &self.rank())
            .field("world", &self.world())
            .field("transport", &self.transport())
            .finish_non_exhaustive()
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        // Any clone will do: a rank that panics holding one is not going to take part in the next operation.
        if std::thread::panicking() {
            self.abort("it panicked");
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.executor.close();
        if let Some(comm) = self.comm.take() {
            // A panic in there has settled its tickets with an error; there is nobody left to tell.
            let _ = comm.join();
        }
        // What is still queued goes out before the goodbye; after a failure nothing does.
        self.p2p.finish();
        self.status.part(self.executor.last());
        // Joins the watch thread and closes the sockets; only now, so that the goodbye is on its way first.
        self.p2p.close();
        drop(self.watch.take());
        if let Some(Origin::Hub(hub)) = &self.origin {
            hub.leave(self.status.rank);
        }
    }
}

/// A world of one rank: no sockets, no threads, no shared memory.
fn alone(env: &WorkerEnv, options: &GroupOptions) -> Result<Wiring, Error> {
    let page = JobPage::for_worker(env).map_err(Arc::new)?;
    let slot = page.slot(env.local_rank.min(page.slots() - 1));
    let me = PeerInfo {
        host: String::new(),
        pid: std::process::id(),
        slot: None,
        started: 0,
    };
    Ok(Wiring::alone(
        Arc::new(Status::new(0, vec![me], page, slot)),
        options,
    ))
}
