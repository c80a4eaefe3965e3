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

/// How often a rank that is held back looks whether it was asked to stop, which wakes nobody.
const STOP_LOOK: Duration = Duration::from_millis(100);

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

    /// Whether the group has lost a rank without which the others can go on.
    pub fn is_lost(&self) -> bool {
        self.health().is_err_and(|error| error.is_loss())
    }

    /// Says that this program goes on with [`next_generation`](Self::next_generation) when other ranks are lost, and returns
    /// whether its launcher does so too. Without this word from every rank, the launcher ends the job after a failure, or
    /// restarts it.
    ///
    /// *Blocks*: no.
    pub fn declare_recovery(&self) -> bool {
        self.slot().set_recovers();
        if self.page().recovers() {
            self.slot().hold_life();
        }
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

    /// Whether the launchers hold this group back after a loss, because the job has too few nodes. All its ranks have the same answer
    /// until they are [invited](Self::is_invited) to a group with others.
    pub fn is_held(&self) -> bool {
        let status = &self.member().status;
        !status.is_subgroup() && self.page().is_held(status.generation()) && !self.is_invited()
    }

    /// Waits while the group [is held back](Self::is_held). All ranks call it between two steps. Returns whether this one has waited.
    ///
    /// *Blocks*: until the ranks are invited, or the group's generation ends, or the job was asked to stop or ends. The launchers
    /// bound it.
    pub fn wait_while_held(&self) -> bool {
        let (page, number) = (self.page(), self.member().status.generation());
        let (mut changes, mut has_waited) = (0, false);
        while self.is_held()
            && page.end_of_generation(number).is_none()
            && self.stop_wish().is_none()
        {
            changes = page.wait_changed(changes, STOP_LOOK);
            has_waited = true;
        }
        has_waited
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
                spare: Arc::default(),
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
        // It would lie between the buffers until now, whose place the next ones take, and the memory that is still free.
        member.executor.release();
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
mod tests;
