//! Generations: a group that has lost ranks is followed by one of the ranks that are left, and that one by a group with their
//! replacements.
//!
//! ```text
//!  rank 0            rank 1            rank 2        launcher
//!  all-reduce ...    all-reduce ...    killed        reaps rank 2
//!  error: rank 2 died                                ends generation 0 on the page
//!  next_generation:  the same                        publishes generation 1: slots 0, 1
//!    connect ------- connect                         "rank 2 was killed ...; 2 ranks go on"
//!  all-reduce ...    all-reduce ...    starts        starts a replacement
//!  ...               ...               next_generation: is ready
//!  is_invited: yes   yes                             invites to generation 2: slots 0, 1, 2
//!  the ranks agree, for example by a sum that they need anyway
//!  admit:            admit:
//!    connect ------- connect --------- connect
//! ```
//!
//! The launcher alone decides which ranks are left, so no two ranks can go on with different ones. A generation is fenced off
//! from earlier ones in three ways. The page says that they are over, so their operations fail. The keys in the store and the
//! fingerprint of the connections have the generation's number, so no earlier rank can join. A rank that was given up is
//! killed before its successors are told.
//!
//! An invitation ends nothing: the ranks work on until they have agreed, so a replacement costs them no time while it starts.

use std::sync::Arc;
use std::time::Duration;

use paceline_rendezvous::env::WorkerEnv;
use paceline_rendezvous::page::{Generation, JobPage};

use crate::bootstrap::{self, KeptMemory, Succession};
use crate::error::Error;
use crate::flight::{Flight, Formation, Identity, Membership};
use crate::group::ProcessGroup;
use crate::options::GroupOptions;
use crate::plan::Hosts;
use crate::status::{PeerInfo, Status};
use crate::wiring::{Origin, Wiring};

/// How long the launcher may take, beside the group's timeout, to give up a rank that hangs and to see its end.
const LAUNCHER_TIMEOUT: Duration = Duration::from_secs(10);

impl ProcessGroup {
    /// How many groups came before this one: 0 for a group that the job began with, and one or more for its successors. A
    /// sub-group has the generation of the group that it was split from.
    pub fn generation(&self) -> u64 {
        self.member().status.generation().into()
    }

    /// Why the ranks before this generation were lost, in the launcher's words, if it has said that and no later generation has begun.
    pub fn why_generation(&self) -> Option<String> {
        self.page()
            .why_generation(self.member().status.generation())
    }

    /// Says that this program goes on with [`next_generation`](Self::next_generation) when other ranks are lost, and returns
    /// whether its launcher does so too. Without this word from every rank, the launcher ends the job after a failure, or
    /// restarts it.
    ///
    /// *Blocks*: no.
    pub fn declare_recovery(&self) -> bool {
        self.slot().set_recovers();
        matches!(self.member().origin, Some(Origin::Hub(_))) || self.page().recovers()
    }

    /// Says that this program takes in replacements of lost ranks: its ranks look at [`is_invited`](Self::is_invited), agree, and
    /// call [`admit`](Self::admit). Without this word from every rank, the launcher starts no replacements.
    pub fn declare_admission(&self) {
        self.slot().set_admits();
    }

    /// Says that this program sets [`Phase::Finished`](paceline_rendezvous::page::Phase::Finished) when its work is done. If a rank
    /// exits with code 0 before that, the launcher takes it for lost. Without this word, an exit with code 0 is a good end unless
    /// other ranks need that rank.
    ///
    /// *Blocks*: no.
    pub fn declare_finish(&self) {
        self.slot().set_finishes();
    }

    /// Whether this process replaces a lost rank and has not [joined](Self::declare_joined) the others.
    ///
    /// The group that it gets from [`init`](Self::init) has the lost rank's number, and nobody else in it: every operation fails.
    /// [`next_generation`](Self::next_generation) waits for the others.
    pub fn is_joining(&self) -> bool {
        self.env().replacement > 0 && !self.slot().has_joined()
    }

    /// Says that this process, a replacement, has the state of the others by now, and counts as one of them.
    pub fn declare_joined(&self) {
        self.slot().set_joined();
    }

    /// Whether replacements of lost ranks wait for this group's ranks to [admit](Self::admit) them. Ranks may see it at
    /// different moments.
    ///
    /// *Cost*: two loads.
    pub fn is_invited(&self) -> bool {
        let status = &self.member().status;
        !status.is_subgroup() && self.page().is_invited(status.generation())
    }

    /// The group of this one's ranks and the replacements that wait. All ranks call it after the same operation, once one of them
    /// [is invited](Self::is_invited). If a rank is lost meanwhile, the group of the ranks that are left is returned instead,
    /// without the replacements that have not joined.
    ///
    /// This group stays as it is until it is dropped.
    ///
    /// *Blocks*: until all ranks have called this and connected, at most as [`next_generation`](Self::next_generation).
    ///
    /// *Errors*: as [`next_generation`](Self::next_generation).
    pub fn admit(&self) -> Result<Self, Error> {
        let member = self.member();
        match &member.origin {
            Some(Origin::Store { address, .. }) if self.slot().admits() => {
                // The launchers of several nodes do not invite at the same moment.
                let invited = member.status.generation();
                let next = self.page().wait_invitation(invited, self.patience());
                self.page().begin_generation(next.unwrap_or(invited));
                self.await_successor(address)
            }
            _ => Err(Error::NoRecovery {
                reason: "this rank has not declared that it takes in replacements",
            }),
        }
    }

    /// The group of the ranks that are left, after this one has failed. Ranks keep their order and are numbered anew from 0,
    /// and so are local ranks; replacements come last.
    ///
    /// A group that has not failed is given up first, as by [`abort`](Self::abort). If another rank is lost while the next
    /// generation forms, the one after it is returned. This group stays failed; drop it, with all its buffers, tickets and
    /// sub-groups, to free its memory.
    ///
    /// A replacement that [is joining](Self::is_joining) gets the group in which the others have admitted it.
    ///
    /// Ranks that are threads ([`local`](Self::local)) have no launcher: a thread that has dropped its group is lost, and the
    /// others go on when all of them have called this.
    ///
    /// *Blocks*: until the launcher has published a generation after this one and its ranks have connected, at most for the
    /// group's timeout each, and 10 s more where the launcher has to kill a rank that hangs. A replacement waits as long as the
    /// job runs.
    ///
    /// *Errors*: nothing recovers this job, or this rank has not [declared](Self::declare_recovery) that it goes on; the
    /// launcher has ended the job; this rank was given up; the deadline.
    pub fn next_generation(&self) -> Result<Self, Error> {
        let member = self.member();
        let status = &member.status;
        if status.is_subgroup() {
            return Err(Error::NoRecovery {
                reason: "a sub-group has no next generation; ask the group of all ranks",
            });
        }
        match status.health() {
            Err(Error::NotJoined { .. }) => {
                self.slot().set_recovers();
                self.slot().set_ready_to_join();
            }
            Err(error) => {
                status.fail(error);
                status.announce();
            }
            Ok(()) => self.abort("it goes on to the next generation"),
        }
        match &member.origin {
            Some(Origin::Hub(hub)) => {
                let wiring = hub.succeed(status.rank, &member.options)?;
                let (rank, world) = (wiring.status.rank, wiring.status.world());
                let env = WorkerEnv {
                    rank,
                    world,
                    local_rank: rank,
                    local_world: world,
                    ..self.env().clone()
                };
                self.successor(env, wiring)
            }
            Some(Origin::Store { .. }) if !self.slot().recovers() => Err(Error::NoRecovery {
                reason: "this rank has not declared that it recovers",
            }),
            Some(Origin::Store { address, .. }) if self.page().recovers() => {
                self.await_successor(address)
            }
            _ => Err(Error::NoRecovery {
                reason: "its launcher does not recover live (`--recovery live`)",
            }),
        }
    }

    /// The group of a process that replaces a lost rank, before it has joined.
    pub(crate) fn to_join(env: WorkerEnv, options: GroupOptions) -> Result<Self, Error> {
        let page = JobPage::for_worker(&env).map_err(Arc::new)?;
        let store = env.store.clone().filter(|_| page.recovers());
        let Some(address) = store else {
            return Err(Error::NoRecovery {
                reason: "PACELINE_REPLACEMENT is set, but no launcher recovers this job live",
            });
        };
        let slot = page.slot(env.local_rank.min(page.slots() - 1));
        let peer = |started| PeerInfo {
            host: String::new(),
            pid: 0,
            slot: None,
            started,
        };
        let peers = (0..env.world).map(peer).collect();
        let status = Arc::new(Status::new(env.rank, peers, page, slot));
        status.fail(Error::NotJoined { rank: env.rank });
        let wiring = Wiring {
            hosts: Hosts::one(env.world),
            origin: Some(Origin::Store {
                server: None,
                address,
                prefix: bootstrap::keys(&env),
            }),
            ..Wiring::alone(status, &options)
        };
        let flight = Flight::new(&env, Identity::of(&env));
        Self::assemble(env, options, wiring, flight)
    }

    /// Forms the newest generation, and the one after it if ranks are lost meanwhile.
    fn await_successor(&self, store: &str) -> Result<Self, Error> {
        let status = &self.member().status;
        let (page, slot) = (self.page(), self.slot());
        let memory = self.kept_memory()?;
        let mut failed = status.generation();
        let mut why = status.health().err();
        let mut limit = match self.is_joining() {
            // The others go on without it, and take it in when they come to it.
            true => Duration::MAX,
            false => self.patience(),
        };
        loop {
            slot.set_awaits(Some(failed));
            let Some(generation) = page.wait_generation(failed, limit) else {
                slot.set_awaits(None);
                return Err(match page.revocation() {
                    Some(cause) => Error::Revoked {
                        culprit: None,
                        text: cause.text,
                    },
                    None => why.unwrap_or(Error::NoRecovery {
                        reason: "the launcher has published no next generation",
                    }),
                });
            };
            let succession = Succession {
                generation: &generation,
                slot: slot.index(),
                started: status.started(self.rank()),
                page,
                store: generation.store.as_deref().unwrap_or(store),
                memory: &memory,
            };
            match self.form(&succession) {
                Ok(group) => {
                    slot.set_awaits(None);
                    return Ok(group);
                }
                // The others wait for an invitation that has this process in it.
                Err(Error::Fenced { .. }) if self.is_joining() => failed = generation.number,
                Err(error @ Error::Fenced { .. }) => return Err(error),
                Err(error) => {
                    // Whatever it is, it may be due to another rank that was lost, which the launcher knows.
                    let culprit = error.culprit().and_then(|rank| succession.local(rank));
                    if let Some(culprit) = culprit
                        && culprit != status.started(self.rank())
                    {
                        slot.set_victim_of(culprit, generation.number);
                    }
                    // Its own connection to the store is at fault, again. A launcher has all ranks form another generation, or on
                    // several nodes moves the store. Unless one of it happens soon, this rank is the lost one.
                    let has_ended = page.end_of_generation(generation.number).is_some();
                    if error.culprit().is_none() && !has_ended {
                        limit = limit.min(LAUNCHER_TIMEOUT);
                    }
                    (failed, why) = (generation.number, Some(error));
                }
            }
        }
    }

    /// Joins this generation.
    fn form(&self, succession: &Succession<'_>) -> Result<Self, Error> {
        let member = self.member();
        let Generation {
            number,
            world,
            first,
            members,
            ..
        } = succession.generation;
        let own = self.slot().index();
        let Some(place) = members.iter().position(|slot| *slot == own) else {
            return Err(Error::Fenced {
                rank: self.rank(),
                generation: u64::from(*number),
            });
        };
        let env = WorkerEnv {
            rank: first + place,
            world: *world,
            local_rank: place,
            local_world: members.len(),
            ..self.env().clone()
        };
        if *world == 1 {
            let mut peer = member.status.peers()[self.rank()].clone();
            peer.slot = Some(own);
            let status = Status::new(0, vec![peer], self.page().clone(), self.slot());
            let wiring = Wiring {
                origin: member.origin.clone(),
                ..Wiring::alone(status.in_generation(*number).into(), &member.options)
            };
            return self.successor(env, wiring);
        }
        let formation = Formation::new();
        let formed = bootstrap::connect_next(&env, &member.options, succession, &formation);
        let wiring = formed.inspect_err(|error| {
            let flight = member.status.flight().expect("a group has a recorder");
            let membership = Membership {
                name: format!("world (generation {number})"),
                // Of the ranks of other nodes it has not heard.
                ranks: (0..*world)
                    .map(|rank| succession.local(rank).unwrap_or(rank))
                    .collect(),
                transport: "none",
            };
            flight.never_formed(membership, &formation, error);
        })?;
        self.successor(env, wiring)
    }

    /// The memory that the next generation goes on with. No rank joins that before this has returned, so once it has formed, nobody
    /// works on the buffers of this one.
    ///
    /// *Blocks*: until the operations that were submitted have ended.
    fn kept_memory(&self) -> Result<KeptMemory, Error> {
        let member = self.member();
        let Some(arena) = member.allocator.arena() else {
            return Ok(KeptMemory::default());
        };
        if !member.executor.is_idle_within(self.timeout()) {
            return Err(Error::NoRecovery {
                reason: "an operation of this rank does not end",
            });
        }
        Ok(KeptMemory {
            own: Some(arena.clone()),
            mapped: member.p2p.mapped().cloned().collect(),
        })
    }

    /// Gives free memory that this group has from the generation before it back to the system. Call it once the group has its own
    /// buffers: until then they find the pages in place.
    pub fn trim(&self) {
        if let Some(arena) = self.member().allocator.arena() {
            arena.trim();
        }
    }

    /// How long ranks wait for their launcher, beside an operation's timeout.
    fn patience(&self) -> Duration {
        let timeout = self.member().options.timeout.max(self.timeout());
        timeout.saturating_add(LAUNCHER_TIMEOUT)
    }

    /// The group that follows this one with this wiring. It is recorded in the same flight.
    fn successor(&self, env: WorkerEnv, wiring: Wiring) -> Result<Self, Error> {
        let member = self.member();
        let flight = member.status.flight().cloned();
        let flight = flight.expect("a group has a recorder from its beginning");
        let options: GroupOptions = member.options.clone();
        Self::assemble(env, options, wiring, flight)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use paceline_rendezvous::page::{JobPage, Revocation};
    use paceline_rendezvous::store::Server;
    use paceline_rendezvous::token::Token;

    use super::*;
    use crate::async_calls::AllReduce;
    use crate::element::ReduceOp;
    use crate::options::Transport;

    /// The sum of the ranks that started the job, over the ranks of this group.
    fn sum(group: &ProcessGroup, started: usize) -> f32 {
        let mut sum = [started as f32];
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        sum[0]
    }

    fn options(timeout: Duration) -> GroupOptions {
        GroupOptions {
            timeout,
            ..GroupOptions::default()
        }
    }

    #[test]
    fn threads_go_on_without_the_ones_that_left() {
        let groups = ProcessGroup::local(4, &options(Duration::from_secs(30))).unwrap();
        std::thread::scope(|scope| {
            for (started, mut group) in groups.into_iter().enumerate() {
                scope.spawn(move || {
                    assert_eq!(sum(&group, started), 6.0);
                    let mut left = vec![0, 1, 2, 3];
                    // Rank 0 first, then the last one.
                    for (number, lost) in [(1, 0), (2, 3)] {
                        if started == lost {
                            return;
                        }
                        left.retain(|rank| *rank != lost);
                        let error = group.all_reduce(&mut [0.0], ReduceOp::Sum).unwrap_err();
                        let next = group.next_generation();
                        let next = next.unwrap_or_else(|again| panic!("{again} after {error}"));
                        let old = std::mem::replace(&mut group, next);
                        assert_eq!(group.generation(), number);
                        assert_eq!((group.world(), group.transport()), (left.len(), "local"));
                        assert_eq!(
                            group.rank(),
                            left.iter().position(|r| *r == started).unwrap()
                        );
                        assert!(old.health().is_err());
                        drop(old);
                        assert_eq!(sum(&group, started), left.iter().sum::<usize>() as f32);
                    }
                    // Its sub-groups know where they belong, and one rank can be left.
                    let alone = group.split(Some(started as u32), 0).unwrap().unwrap();
                    assert_eq!((alone.world(), alone.generation()), (1, 2));
                    assert!(alone.next_generation().is_err());
                    if started == 1 {
                        return;
                    }
                    group.barrier().unwrap_err();
                    let last = group.next_generation().unwrap();
                    assert_eq!((last.world(), sum(&last, started)), (1, 2.0));
                });
            }
        });
    }

    #[test]
    fn a_thread_that_does_not_come_in_time_is_fenced() {
        let mut groups = ProcessGroup::local(3, &options(Duration::from_millis(300))).unwrap();
        let late = groups.pop().unwrap();
        std::thread::scope(|scope| {
            let others = groups.into_iter().enumerate().map(|(started, group)| {
                scope.spawn(move || {
                    group.barrier().unwrap_err();
                    let next = group.next_generation().unwrap();
                    assert_eq!((next.world(), sum(&next, started)), (2, 1.0));
                })
            });
            let others: Vec<_> = others.collect();
            others.into_iter().for_each(|other| other.join().unwrap());
        });
        late.health().unwrap_err();
        let error = late.next_generation().unwrap_err();
        assert!(
            matches!(error, Error::Fenced { generation: 1, .. }),
            "{error}"
        );
    }

    #[test]
    fn a_group_without_a_launcher_has_no_successor() {
        let group = ProcessGroup::connect(WorkerEnv::alone(), &GroupOptions::default()).unwrap();
        assert!(!group.declare_recovery());
        let error = group.next_generation().unwrap_err();
        assert!(matches!(error, Error::NoRecovery { .. }), "{error}");
    }

    /// A launcher's store and page with ranks that are threads, which reach them as processes do.
    fn launched(world: usize, transport: Transport, rank: impl Fn(&JobPage, ProcessGroup) + Sync) {
        launched_on(&[world], transport, |pages, group| rank(&pages[0], group));
    }

    /// The same with so many ranks on each node.
    fn launched_on(
        nodes: &[usize],
        transport: Transport,
        rank: impl Fn(&[JobPage], ProcessGroup) + Sync,
    ) {
        let token = Token::generate().unwrap();
        let server = Server::bind("127.0.0.1:0".parse().unwrap(), &token).unwrap();
        let page = |slots: &usize| JobPage::create_memfd(*slots).unwrap();
        let pages: Vec<JobPage> = nodes.iter().map(page).collect();
        pages.iter().for_each(JobPage::set_recovers);
        let options = GroupOptions {
            transport,
            arena_bytes: Some(1 << 20),
            ..options(Duration::from_secs(30))
        };
        let world = nodes.iter().sum();
        let places = (0..).zip(nodes);
        let places = places.flat_map(|(node, slots)| (0..*slots).map(move |slot| (node, slot)));
        std::thread::scope(|scope| {
            for (own, (node, slot)) in places.enumerate() {
                let (rank, options, pages, token) = (&rank, &options, &pages, &token);
                let store = Some(server.addr().to_string());
                scope.spawn(move || {
                    let env = WorkerEnv {
                        rank: own,
                        world,
                        local_rank: slot,
                        local_world: nodes[node],
                        store,
                        token: token.clone(),
                        token_is_secret: true,
                        page_fd: pages[node].raw_fd(),
                        ..WorkerEnv::alone()
                    };
                    rank(pages, ProcessGroup::connect(env, options).unwrap());
                });
            }
        });
    }

    #[test]
    fn the_ranks_of_several_nodes_go_on_in_another_store() {
        for transport in [Transport::Tcp, Transport::Auto] {
            // The first node has lost rank 1 and its place; the ranks of the second come first now.
            launched_on(&[2, 2], transport, |pages, group| {
                assert!(group.declare_recovery());
                group.declare_admission();
                let started = group.rank();
                group.barrier().unwrap();
                if started == 1 {
                    return;
                }
                let token = &group.env().token;
                let server = (started == 0).then(|| {
                    let server = Server::bind("127.0.0.1:0".parse().unwrap(), token).unwrap();
                    for (page, first, members) in
                        [(&pages[0], 2, vec![0]), (&pages[1], 0, vec![0, 1])]
                    {
                        page.end_generation(0, 1);
                        page.publish(&Generation {
                            number: 3,
                            world: 3,
                            first,
                            members,
                            store: Some(server.addr().to_string()),
                        });
                    }
                    server
                });
                group.barrier().unwrap_err();
                let next = group.next_generation().unwrap();
                assert_eq!((next.rank(), next.world()), ([2, 9, 0, 1][started], 3));
                assert_eq!(
                    (next.generation(), next.local_world()),
                    (3, [1, 0, 2, 2][started])
                );
                assert_eq!(sum(&next, started), 5.0);
                next.blame((next.rank() + 1) % 3);
                let blamed = next.slot().victim_in(3);
                assert_eq!(blamed, Some([2, 9, 3, 0][started]));
                drop(group);
                next.barrier().unwrap();
                drop(server);
            });
        }
    }

    #[test]
    fn a_rank_that_was_given_up_and_lives_changes_nothing() {
        for transport in [Transport::Shm, Transport::Tcp] {
            let all_are_ready = Barrier::new(3);
            launched(3, transport, |page, group| {
                assert!(group.declare_recovery());
                let started = group.rank();
                let pair = group
                    .split(Some((started != 1).into()), 0)
                    .unwrap()
                    .unwrap();
                all_are_ready.wait();
                if started == 0 {
                    // As the launcher does, but rank 1 is not killed.
                    page.end_generation(0, 1);
                    page.publish_generation(&[0, 2]);
                }
                let old = group.barrier().unwrap_err();
                assert_eq!(old.culprit(), Some(1), "{old}");
                assert!(
                    pair.health().is_err(),
                    "a sub-group is of the same generation"
                );
                let next = group.next_generation();
                if started == 1 {
                    let error = next.unwrap_err();
                    assert!(
                        matches!(error, Error::Fenced { generation: 1, .. }),
                        "{error}"
                    );
                    return;
                }
                let next = next.unwrap();
                assert_eq!((next.rank(), next.world()), (started / 2, 2));
                assert_eq!((next.generation(), next.slot().index()), (1, started));
                assert_eq!(sum(&next, started), 2.0);
                assert!(group.barrier().is_err());
                drop((group, pair));
                assert_eq!(sum(&next, started), 2.0);
                next.blame(1 - next.rank());
                assert_eq!(next.slot().victim_in(1), Some(2 - started));
            });
        }
    }

    #[test]
    fn a_generation_that_ends_while_it_forms_is_passed_over() {
        for transport in [Transport::Shm, Transport::Tcp] {
            launched(4, transport, |page, group| {
                let started = group.rank();
                assert!(group.declare_recovery());
                group.barrier().unwrap();
                match started {
                    0 => return,
                    // Rank 1 is a member of generation 1 and never comes.
                    1 => {
                        page.end_generation(0, 0);
                        page.publish_generation(&[1, 2, 3]);
                        let waits = |slot| page.slot(slot).awaits() == Some(0);
                        while !(waits(2) && waits(3)) {
                            std::thread::yield_now();
                        }
                        // They may be anywhere in forming it.
                        std::thread::sleep(Duration::from_millis(5));
                        page.end_generation(1, 1);
                        page.publish_generation(&[2, 3]);
                        return;
                    }
                    _ => {}
                }
                group.barrier().unwrap_err();
                let next = group.next_generation().unwrap();
                assert_eq!((next.generation(), next.world()), (2, 2));
                assert_eq!(sum(&next, started), 5.0);
            });
        }
    }

    #[test]
    fn the_launchers_end_of_the_job_ends_the_wait() {
        let both_have_formed = Barrier::new(2);
        launched(2, Transport::Shm, |page, group| {
            assert!(group.declare_recovery());
            both_have_formed.wait();
            if group.rank() == 0 {
                page.revoke(&Revocation {
                    rank: Some(1),
                    text: "too few are left".into(),
                });
            }
            let error = group.next_generation().unwrap_err();
            let says = "the launcher ended the job: too few are left";
            assert_eq!(error.to_string(), says);
        });
    }

    #[test]
    fn the_next_generation_works_on_the_memory_of_this_one() {
        const LEN: usize = 200 << 10;
        let sum = || AllReduce::new(ReduceOp::Sum, LEN);
        launched(3, Transport::Shm, |page, group| {
            assert!(group.declare_recovery());
            let started = group.rank();
            let arena = group.member().allocator.arena().unwrap().clone();
            let mut kept = group.buffer::<f32>(10).unwrap();
            kept.fill(started as f32);
            group.barrier().unwrap();
            if started == 1 {
                page.end_generation(0, 1);
                page.publish_generation(&[0, 2]);
                return;
            }
            // The memory of an operation that failed belongs to its peers until they have all left it.
            let lost = group.buffer::<f32>(LEN).unwrap();
            group.all_reduce_async(lost, sum()).wait().unwrap_err();
            assert!(group.buffer::<f32>(LEN).is_err());
            let next = group.next_generation().unwrap();
            assert!(Arc::ptr_eq(
                next.member().allocator.arena().unwrap(),
                &arena
            ));
            let known = group.member().p2p.mapped();
            let known: Vec<_> = known.map(Arc::as_ptr).collect();
            assert!(
                next.member()
                    .p2p
                    .mapped()
                    .all(|arena| known.contains(&Arc::as_ptr(arena)))
            );
            drop(group);
            let mut buffer = next.buffer::<f32>(LEN).unwrap();
            assert!(buffer.iter().all(|value| *value == 0.0));
            buffer.fill(started as f32);
            let sums = next.all_reduce_async(buffer, sum()).wait().unwrap();
            assert!(sums.buffer.iter().all(|sum| *sum == 2.0));
            assert!(kept.iter().all(|value| *value == started as f32));
            drop((sums, kept));
            next.trim();
            assert_eq!(arena.report().used, 0);
        });
    }

    #[test]
    fn a_replacement_joins_where_the_others_agree() {
        for transport in [Transport::Shm, Transport::Tcp] {
            let all_know = Barrier::new(3);
            launched(3, transport, |page, group| {
                let mut started = group.rank();
                let mut group = group;
                assert!(group.declare_recovery());
                group.declare_admission();
                group.barrier().unwrap();
                if started == 1 {
                    page.end_generation(0, 1);
                    page.publish_generation(&[0, 2]);
                    let env = group.env().clone();
                    let same = GroupOptions {
                        transport,
                        arena_bytes: Some(1 << 20),
                        ..options(Duration::from_secs(30))
                    };
                    drop(group);
                    all_know.wait();
                    // This thread is the process that the launcher starts.
                    page.clear_slot(1);
                    let env = WorkerEnv {
                        replacement: 1,
                        ..env
                    };
                    group = ProcessGroup::connect(env, &same).unwrap();
                    let error = group.all_reduce(&mut [0.0], ReduceOp::Sum).unwrap_err();
                    assert!(matches!(error, Error::NotJoined { rank: 1 }), "{error}");
                    assert!(group.barrier().is_err() && group.is_joining());
                    let invite = || {
                        while !page.slot(1).is_ready_to_join() {
                            std::thread::yield_now();
                        }
                        page.invite_generation(&[0, 2, 1])
                    };
                    group = std::thread::scope(|scope| {
                        let joined = scope.spawn(|| group.next_generation().unwrap());
                        assert_eq!(invite(), 2);
                        joined.join().unwrap()
                    });
                    group.declare_joined();
                    assert!(!group.is_joining());
                    started = 10;
                } else {
                    group.barrier().unwrap_err();
                    group = group.next_generation().unwrap();
                    assert_eq!((group.world(), group.generation()), (2, 1));
                    all_know.wait();
                    loop {
                        let mut wants = [i32::from(group.is_invited())];
                        group.all_reduce(&mut wants, ReduceOp::Max).unwrap();
                        if wants == [1] {
                            break;
                        }
                    }
                    let next = group.admit().unwrap();
                    // Nothing has failed.
                    group.health().unwrap();
                    group = next;
                }
                assert_eq!((group.world(), group.generation()), (3, 2));
                let ranks = [0, 2, 1];
                assert_eq!(group.rank(), ranks[group.slot().index()]);
                assert!(!group.is_invited());
                assert_eq!(sum(&group, started), 12.0);
            });
        }
    }

    #[test]
    fn a_replacement_needs_a_launcher() {
        let env = WorkerEnv {
            world: 2,
            local_world: 2,
            replacement: 1,
            ..WorkerEnv::alone()
        };
        let error = ProcessGroup::connect(env, &GroupOptions::default()).unwrap_err();
        assert!(matches!(error, Error::NoRecovery { .. }), "{error}");
    }
}
