//! What this rank knows of the group's health: the first failure, who left, and what this rank is doing.

mod board;
mod culprits;
mod op_wait;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Instant;

use paceline_rendezvous::page::{JobPage, Phase, Slot};
use parking_lot::{Condvar, Mutex};

use self::board::{Board, activity};
pub(crate) use self::culprits::{Missing, answer_timeout};
pub(crate) use self::op_wait::OpWait;
use crate::error::{Error, Operation};
use crate::flight::{self, Dump, Flight, Recorder};
use crate::message::{Abort, Answer, Message};
use crate::mpi;

/// Answer of a rank that waits in an operation of another group, maybe for a rank that nobody in this one can see, or in a send or a
/// receive, which have numbers of their own.
const ELSEWHERE: u64 = u64::MAX;
/// Value of `left` for a rank that has not left.
const STAYS: u64 = u64::MAX;

/// One rank as the others know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PeerInfo {
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// Its slot on the page that this rank sees; none for a rank whose page is another one.
    pub(crate) slot: Option<usize>,
    /// Its number in the job's first generation, by which the launcher knows it.
    pub(crate) started: usize,
}

/// Carries messages to peers: at once, or not at all. Never blocks.
pub(crate) trait Courier: Send + Sync + std::fmt::Debug {
    fn send(&self, to: usize, message: &Message);
}

/// Threads that wait for something other than the latch, and have to look at it when the group fails.
pub(crate) trait Waiters: Send + Sync + std::fmt::Debug {
    fn wake(&self);
}

/// What a sub-group knows beside its own rank numbers.
#[derive(Debug, Clone)]
struct Subgroup {
    name: String,
    /// The job's number of each rank.
    ranks: Vec<usize>,
}

/// Shared by the callers, the communication thread and the watch thread of one rank.
#[derive(Debug)]
pub(crate) struct Status {
    pub(crate) rank: usize,
    /// How many groups of all ranks came before this one.
    generation: u32,
    peers: Vec<PeerInfo>,
    page: JobPage,
    board: Arc<Board>,
    /// None in the group of all ranks, whose numbers are the job's.
    subgroup: Option<Subgroup>,
    latch: Mutex<Option<Error>>,
    /// The latch has changed, or a rank has left.
    changed: Condvar,
    /// Whether `latch` holds a failure; read without the lock.
    failed: AtomicBool,
    announced: AtomicBool,
    left: Vec<AtomicU64>,
    running: Mutex<Running>,
    answers: Mutex<Vec<Option<Answer>>>,
    answered: Condvar,
    courier: OnceLock<Box<dyn Courier>>,
    flight: OnceLock<(Arc<Flight>, Arc<Recorder>)>,
    waiters: Mutex<Vec<Box<dyn Waiters>>>,
}

/// What this rank waits in, with its place on the board.
#[derive(Debug, Default)]
struct Running {
    collective: Option<(u64, Operation)>,
    /// Sends and receives; several threads may have one each.
    p2p: Vec<(u64, Operation)>,
}

impl Status {
    /// `peers` are all ranks, this one among them; `slot` is its own on `page`.
    pub(crate) fn new(rank: usize, peers: Vec<PeerInfo>, page: JobPage, slot: Slot) -> Self {
        slot.set_rank(peers[rank].started);
        slot.set_pid(std::process::id());
        Self::on_board(rank, peers, page, Arc::new(Board::new(slot)), None)
    }

    /// In a generation after the first.
    pub(crate) fn in_generation(self, generation: u32) -> Self {
        Self { generation, ..self }
    }

    /// The status of a sub-group's rank `rank`: `members` are its ranks in this group's numbers. It shares the page and
    /// what is written there, and nothing else: its failures are its own.
    pub(crate) fn child(&self, rank: usize, members: &[usize], name: &str) -> Self {
        let peers = members.iter().map(|member| self.peers[*member].clone());
        let subgroup = Subgroup {
            name: name.to_owned(),
            ranks: members.iter().map(|member| self.global(*member)).collect(),
        };
        let (page, board) = (self.page.clone(), self.board.clone());
        Self::on_board(rank, peers.collect(), page, board, Some(subgroup))
            .in_generation(self.generation)
    }

    fn on_board(
        rank: usize,
        peers: Vec<PeerInfo>,
        page: JobPage,
        board: Arc<Board>,
        subgroup: Option<Subgroup>,
    ) -> Self {
        Self {
            rank,
            generation: 0,
            page,
            board,
            subgroup,
            latch: Mutex::new(None),
            changed: Condvar::new(),
            failed: AtomicBool::new(false),
            announced: AtomicBool::new(false),
            left: peers.iter().map(|_| AtomicU64::new(STAYS)).collect(),
            running: Mutex::default(),
            answers: Mutex::new(vec![None; peers.len()]),
            answered: Condvar::new(),
            courier: OnceLock::new(),
            flight: OnceLock::new(),
            waiters: Mutex::default(),
            peers,
        }
    }

    /// Says which threads a failure wakes, beside those that wait for the latch.
    pub(crate) fn add_waiters(&self, waiters: Box<dyn Waiters>) {
        self.waiters.lock().push(waiters);
    }

    /// The job's number of a rank of this group.
    pub(crate) fn global(&self, rank: usize) -> usize {
        self.subgroup
            .as_ref()
            .map_or(rank, |subgroup| subgroup.ranks[rank])
    }

    /// The number in the job's first generation of a rank of this group.
    pub(crate) fn started(&self, rank: usize) -> usize {
        self.peers[rank].started
    }

    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    pub(crate) fn is_subgroup(&self) -> bool {
        self.subgroup.is_some()
    }

    /// What this rank knows of all ranks.
    pub(crate) fn peers(&self) -> &[PeerInfo] {
        &self.peers
    }

    /// The name of one of this rank's threads: "rank5/comm", in a sub-group "rank5/dp1/comm".
    pub(crate) fn thread_name(&self, part: &str) -> String {
        match &self.subgroup {
            Some(subgroup) => format!("rank{}/{}/{part}", subgroup.ranks[self.rank], subgroup.name),
            None => format!("rank{}/{part}", self.rank),
        }
    }

    /// Starts one of this rank's threads.
    pub(crate) fn spawn(
        &self,
        part: &str,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<JoinHandle<()>, Error> {
        let thread = std::thread::Builder::new().name(self.thread_name(part));
        let doing = format!("start its {part} thread");
        let spawned = thread.spawn(run);
        spawned.map_err(|error| Error::system(self.rank, doing, error))
    }

    /// What the group is called.
    pub(crate) fn name(&self) -> &str {
        self.subgroup
            .as_ref()
            .map_or("world", |subgroup| &subgroup.name)
    }

    /// Says how messages reach the peers; once, while the group forms. Without it nobody is told anything.
    pub(crate) fn set_courier(&self, courier: Box<dyn Courier>) {
        self.courier.set(courier).expect("a group has one courier");
    }

    /// Says what is recorded of this rank and of the group; once, before the group works.
    pub(crate) fn set_flight(&self, flight: Arc<Flight>, recorder: Arc<Recorder>) {
        let set = self.flight.set((flight, recorder));
        set.expect("a group has one recorder");
    }

    /// The recorder that all groups of this rank share.
    pub(crate) fn flight(&self) -> Option<&Arc<Flight>> {
        self.flight.get().map(|(flight, _)| flight)
    }

    /// The group's own recorder, once it has one.
    pub(crate) fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.flight.get().map(|(_, recorder)| recorder)
    }

    /// What this rank has recorded, once there is a recorder.
    pub(crate) fn dump_flight(&self) -> Option<Dump> {
        let (flight, _) = self.flight.get()?;
        Some(flight::dump(flight, &activity(&self.board.slot)))
    }

    /// When the times of what this rank has recorded begin, once there is a recorder.
    pub(crate) fn flight_origin(&self) -> Option<Instant> {
        self.flight.get().map(|(flight, _)| flight.origin())
    }

    /// Leaves the flight record where it can be found, if the group has failed. *Blocks* while it is written.
    pub(crate) fn write_flight(&self) {
        let Some((flight, recorder)) = self.flight.get() else {
            return;
        };
        let error = self.latch.lock().clone();
        let error = error.filter(|error| !matches!(error, Error::NotJoined { .. }));
        if let Some(error) = error {
            flight.failed(recorder, &error, &activity(&self.board.slot));
        }
    }

    pub(crate) fn page(&self) -> &JobPage {
        &self.page
    }

    /// This rank's own slot.
    pub(crate) fn slot(&self) -> Slot {
        self.board.slot.clone()
    }

    pub(crate) fn world(&self) -> usize {
        self.peers.len()
    }

    /// The first failure, if there is one: latched here, or the launcher's word on the page.
    pub(crate) fn health(&self) -> Result<(), Error> {
        if self.failed.load(Ordering::Acquire) {
            return Err(self
                .latch
                .lock()
                .clone()
                .expect("`failed` is set after the latch"));
        }
        match self.page.end_of_generation(self.generation) {
            Some(cause) => Err(Error::Revoked {
                culprit: cause.rank.and_then(|rank| self.of_started(rank)),
                text: cause.text,
            }),
            None => Ok(()),
        }
    }

    /// Whether no failure has been latched. One load, and a hint: [`health`](Self::health) is the judge.
    pub(crate) fn is_sound(&self) -> bool {
        !self.failed.load(Ordering::Acquire)
    }

    /// Latches `error` unless there is an earlier failure; returns the one that counts.
    pub(crate) fn fail(&self, error: Error) -> Error {
        let mut latch = self.latch.lock();
        if let Some(first) = &*latch {
            return first.clone();
        }
        if let Some(culprit) = error.culprit().filter(|culprit| *culprit != self.rank) {
            self.blame(culprit);
        }
        *latch = Some(error.clone());
        self.failed.store(true, Ordering::Release);
        mpi::give_up();
        self.changed.notify_all();
        drop(latch);
        // Without the latch's lock: those who wait look at the latch under a lock of their own.
        self.waiters
            .lock()
            .iter()
            .for_each(|waiters| waiters.wake());
        error
    }

    /// Says on the page that this process fails because of a rank of this group.
    pub(crate) fn blame(&self, rank: usize) {
        let culprit = self.started(rank);
        self.board.slot.set_victim_of(culprit, self.generation);
    }

    /// The rank of this group because of which this process fails, in any of its groups.
    pub(crate) fn blamed(&self) -> Option<usize> {
        self.of_started(self.board.slot.victim_in(self.generation)?)
    }

    /// The number in this group of a rank of the job's first generation.
    fn of_started(&self, rank: usize) -> Option<usize> {
        self.peers.iter().position(|peer| peer.started == rank)
    }

    /// Tells all peers why this rank's group is broken; once, and only if it is.
    pub(crate) fn announce(&self) {
        let Some(error) = self.latch.lock().clone() else {
            return;
        };
        if !self.announced.swap(true, Ordering::Relaxed) {
            self.send_all(&Message::Abort(Abort::of(self.rank, &error)));
        }
        // Only now: a slow disk must not keep the peers waiting.
        self.write_flight();
    }

    /// Leaves the group: in order after the operation `after`, or with the cause when it is broken.
    pub(crate) fn part(&self, after: u64) {
        match self.failed.load(Ordering::Acquire) {
            true => self.announce(),
            false => self.send_all(&Message::Goodbye { after }),
        }
    }

    fn send_all(&self, message: &Message) {
        if let Some(courier) = self.courier.get() {
            (0..self.world())
                .filter(|to| *to != self.rank)
                .for_each(|to| courier.send(to, message));
        }
    }

    /// A message of a peer has arrived.
    pub(crate) fn receive(&self, from: usize, message: Message) {
        match message {
            Message::Goodbye { after } => {
                // Under the latch's lock, so that no thread that waits for a change misses this one.
                let _latch = self.latch.lock();
                self.left[from].store(after.min(STAYS - 1), Ordering::Release);
                self.changed.notify_all();
            }
            Message::Abort(abort) => {
                // A rank number beyond the world can only be an error; nobody is blamed then.
                let culprit = abort.culprit.filter(|culprit| *culprit < self.world());
                self.fail(Abort { culprit, ..abort }.into_error());
            }
            Message::Ask => {
                if let Some(courier) = self.courier.get() {
                    // A rank that waits in a send or a receive does not keep others waiting by itself either.
                    let running = self.running.lock().collective;
                    let elsewhere = || self.board.is_waiting().then_some(ELSEWHERE);
                    let answer = Answer {
                        seq: running.map(|(_, it)| it.seq.max(1)).or_else(elsewhere),
                        text: activity(&self.board.slot),
                    };
                    courier.send(from, &Message::Tell(answer));
                }
            }
            Message::Tell(answer) => {
                self.answers.lock()[from] = Some(answer);
                self.answered.notify_all();
                // As above.
                let _latch = self.latch.lock();
                self.changed.notify_all();
            }
        }
    }

    /// The connection to a peer has ended. An error unless it said goodbye.
    pub(crate) fn lost(&self, peer: usize) {
        if self.left_after(peer).is_none() {
            let during = self.running.lock().latest();
            self.fail(Error::PeerLost {
                rank: peer,
                place: self.place(peer),
                during,
            });
        }
    }

    /// The last operation of a rank that has left.
    pub(crate) fn left_after(&self, peer: usize) -> Option<u64> {
        Some(self.left[peer].load(Ordering::Acquire)).filter(|after| *after != STAYS)
    }

    pub(crate) fn set_phase(&self, phase: Phase, step: u64) {
        self.board.set_phase(phase, step);
    }

    pub(crate) fn set_operation(&self, operation: Option<Operation>) {
        let mut running = self.running.lock();
        if let Some((place, _)) = running.collective.take() {
            self.board.end(place);
        }
        running.collective = operation.map(|operation| (self.board.begin(operation), operation));
    }

    /// This rank waits in a send or a receive for as long as the result lives, beside whatever else it does.
    pub(crate) fn enter(&self, operation: Operation) -> Entered<'_> {
        let mut running = self.running.lock();
        let place = self.board.begin(operation);
        running.p2p.push((place, operation));
        Entered {
            status: self,
            place,
        }
    }

    /// "host b, pid 4711"; in a sub-group "dp1, rank 5 of the job, host b, pid 4711"; in a later generation "started as
    /// rank 6, host b, pid 4711".
    pub(crate) fn place(&self, rank: usize) -> String {
        let PeerInfo {
            host, pid, started, ..
        } = &self.peers[rank];
        let group = match &self.subgroup {
            Some(subgroup) => format!(
                "{}, rank {} of the job, ",
                subgroup.name, subgroup.ranks[rank]
            ),
            None => String::new(),
        };
        let was = match self.generation {
            0 => String::new(),
            _ => format!("started as rank {started}, "),
        };
        format!("{group}{was}host {host}, pid {pid}")
    }
}

impl Running {
    fn latest(&self) -> Option<Operation> {
        let latest = self.collective.as_ref().or(self.p2p.last());
        latest.map(|(_, operation)| *operation)
    }
}

/// This rank waits in a send or a receive; see [`Status::enter`].
#[derive(Debug)]
pub(crate) struct Entered<'a> {
    status: &'a Status,
    place: u64,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut running = self.status.running.lock();
        running.p2p.retain(|(place, _)| *place != self.place);
        self.status.board.end(self.place);
    }
}

#[cfg(test)]
mod tests;
