//! The ranks of one host, which map each other's memory: what they tell each other and how they meet.
//!
//! An operation begins with a meeting: each rank writes its header and where its data lies into a cell of its control
//! page, publishes its progress and waits until all have. All compare all headers. A further meeting stands between the
//! rounds of a plan and after the last, unless what was lent is a copy; between a rank's coming to the first and the
//! others' coming to the last its lent memory belongs to the operation.
//!
//! What a peer says is checked where it could lead outside a mapping. Contents are not: a rank that may join has proved the
//! job's token, and could send wrong numbers anyway.
#![allow(unsafe_code)]

mod meeting;
mod protocol;
mod sync;

use std::cell::Cell as Counter;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use self::meeting::{Cores, Meeting};
use self::protocol::Board;
use crate::call::{HEADER_WORDS, Header};
use crate::error::Error;
use crate::memory::{CELL_WORDS, CONTROL_BYTES, Cell, Segment, Shown};
use crate::plan::Space;
use crate::runner::Runner;
use crate::status::{OpWait, Waiters};

/// Ranks' numbers, ascending, and what they called.
pub(crate) type Calls = Vec<(usize, Header)>;

/// One rank's view of the ranks that share its host.
#[derive(Debug)]
pub(crate) struct Team {
    /// This rank's place among the members.
    me: usize,
    /// The members' ranks, ascending.
    ranks: Vec<usize>,
    shown: Vec<Shown>,
    /// By rank of the group.
    member: Vec<Option<usize>>,
    meeting: Meeting,
    /// Operations so far, which chooses the cell; the same on all members.
    operations: Counter<usize>,
    /// Meetings so far; the same on all members, because they follow the same plans.
    meetings: Counter<u32>,
}

impl Team {
    /// `shown` is the memory of `ranks`, which are `rank` and all that share its host, ascending.
    pub(crate) fn new(rank: usize, world: usize, ranks: Vec<usize>, shown: Vec<Shown>) -> Self {
        let me = ranks.partition_point(|other| *other < rank);
        let mut member = vec![None; world];
        for (index, rank) in ranks.iter().enumerate() {
            member[*rank] = Some(index);
        }
        let meeting = Meeting::new(me, ranks.len());
        Self {
            me,
            ranks,
            shown,
            member,
            meeting,
            operations: Counter::new(0),
            meetings: Counter::new(0),
        }
    }

    /// With this many cores for all members; else those that this process may use are taken for all that there are.
    pub(crate) fn on(self, cores: usize) -> Self {
        let meeting = self.meeting.on(cores, self.ranks.len());
        Self { meeting, ..self }
    }

    /// Where this rank's failure wakes those of its threads that wait for the others.
    pub(crate) fn waiters(&self) -> Box<dyn Waiters> {
        Box::new(Bell(self.shown[0].control.clone()))
    }

    pub(crate) fn has(&self, rank: usize) -> bool {
        self.member[rank].is_some()
    }

    /// Begins an operation; returns this rank's cell, for data lent in it.
    pub(crate) fn begin(&self) -> &Cell {
        self.operations.set(self.operations.get().wrapping_add(1));
        self.cell(self.me)
    }

    /// This rank's cell in the operation that was begun last.
    pub(crate) fn own_cell(&self) -> &Cell {
        self.cell(self.me)
    }

    /// Says which call this is and where the lent data begins in this rank's segment, and comes to the operation's first
    /// meeting; whether all have.
    pub(crate) fn announce(&self, header: &Header, bases: [u64; 2]) -> bool {
        let words = header.encode();
        let digest = digest(&words);
        let cell = self.cell(self.me);
        // Relaxed: published by the store of `progress` that follows.
        cell.digest.store(digest, Ordering::Relaxed);
        let all: [u64; CELL_WORDS] = std::array::from_fn(|i| {
            if i < HEADER_WORDS {
                words[i]
            } else {
                bases[i - HEADER_WORDS]
            }
        });
        cell.words
            .iter()
            .zip(all)
            .for_each(|(slot, word)| slot.store(word, Ordering::Relaxed));
        self.come()
    }

    /// Whether all have come as far as this rank.
    pub(crate) fn is_complete(&self) -> bool {
        protocol::complete(self, self.meetings.get())
    }

    /// Compares all calls, after all have come to the first meeting. The result is what each of them called, where that
    /// differs.
    pub(crate) fn compare(&self, header: &Header) -> Result<Option<Calls>, Error> {
        let digest = digest(&header.encode());
        let same = |member: usize| self.cell(member).digest.load(Ordering::Relaxed) == digest;
        if (0..self.ranks.len()).all(same) {
            return Ok(None);
        }
        self.calls(header).map(Some)
    }

    /// The headers differ, or a peer's digest is not that of its header.
    fn calls(&self, header: &Header) -> Result<Calls, Error> {
        let headers = (0..self.ranks.len()).map(|member| {
            let words: [u64; HEADER_WORDS] =
                std::array::from_fn(|i| self.cell(member).words[i].load(Ordering::Relaxed));
            let decoded = Header::decode(&words).and_then(|header| {
                let told = self.cell(member).digest.load(Ordering::Relaxed);
                if told == digest(&words) {
                    Ok(header)
                } else {
                    Err(format!(
                        "the digest {told:016x}, which is not that of its call"
                    ))
                }
            });
            decoded
                .map_err(|reason| self.broken(header, member, format!("its header holds {reason}")))
        });
        let headers = headers.collect::<Result<Vec<_>, _>>()?;
        Ok(self.ranks.iter().copied().zip(headers).collect())
    }

    /// Comes to the next meeting, and waits until all members have.
    pub(crate) fn meet(&self, wait: &OpWait<'_>, runner: Runner) -> Result<(), Error> {
        match self.come() {
            true => Ok(()),
            false => self.wait(wait, runner),
        }
    }

    /// Comes to the next meeting; whether all members have.
    fn come(&self) -> bool {
        self.meetings.set(self.meetings.get().wrapping_add(1));
        self.meeting.come(self, self.meetings.get())
    }

    /// Waits until all members have come as far as this rank.
    pub(crate) fn wait(&self, wait: &OpWait<'_>, runner: Runner) -> Result<(), Error> {
        self.meeting.wait(
            self,
            self.meetings.get(),
            |member| self.ranks[member],
            wait,
            runner,
        )
    }

    /// Data that a member lends in its cell.
    pub(crate) fn inline(&self, rank: usize, bytes: usize) -> Option<NonNull<u8>> {
        Some(self.cell(self.member[rank]?).data(bytes))
    }

    /// Where the lent data of a member begins, after all have come to the meeting that [`announce`](Self::announce) comes
    /// to. `bytes` of it are used.
    ///
    /// *Errors*: it does not lie in the member's arena.
    pub(crate) fn base(
        &self,
        header: &Header,
        rank: usize,
        space: Space,
        bytes: usize,
        align: usize,
    ) -> Result<NonNull<u8>, Error> {
        let member = self.member[rank].expect("only members lend memory");
        let word = match space {
            Space::In => HEADER_WORDS,
            Space::Out | Space::Temp => HEADER_WORDS + 1,
        };
        let offset = self.cell(member).words[word].load(Ordering::Relaxed);
        let segment = &self.shown[member].arena;
        let end = offset.checked_add(bytes as u64);
        let inside =
            offset >= CONTROL_BYTES as u64 && end.is_some_and(|end| end <= segment.bytes() as u64);
        if inside && offset.is_multiple_of(align as u64) {
            return Ok(segment.at(offset as usize));
        }
        let size = segment.bytes();
        Err(self.broken(
            header,
            member,
            format!("its data begins at byte {offset} of a segment of {size}"),
        ))
    }

    fn broken(&self, header: &Header, member: usize, reason: String) -> Error {
        Error::wire(self.ranks[member], Some(header.operation), reason)
    }

    fn cell(&self, member: usize) -> &Cell {
        &self.shown[member].control.control().cells[self.operations.get() % 2]
    }
}

/// Rings for all members; those of other ranks look and sleep on.
#[derive(Debug)]
struct Bell(Arc<Segment>);

impl Waiters for Bell {
    fn wake(&self) {
        let bell = &self.0.control().bell;
        bell.fetch_add(1, Ordering::SeqCst);
        sync::wake_all(bell);
    }
}

impl Board for Team {
    fn members(&self) -> usize {
        self.ranks.len()
    }

    fn progress(&self, member: usize) -> &AtomicU32 {
        &self.cell(member).progress
    }

    fn bell(&self) -> &AtomicU32 {
        &self.shown[0].control.control().bell
    }

    fn sleepers(&self) -> &AtomicU32 {
        &self.shown[0].control.control().sleepers
    }
}

impl Cores for Team {
    fn core(&self, member: usize) -> &AtomicU32 {
        &self.shown[member].control.control().core
    }
}

/// A number that differs when a word does, but for one chance in 2^64 that nobody steers: all are members of one job.
fn digest(words: &[u64; HEADER_WORDS]) -> u64 {
    words.iter().fold(0x9E37_79B9_7F4A_7C15, |hash, word| {
        (hash.rotate_left(25) ^ word).wrapping_mul(0xD6E8_FEB8_6659_FD93)
    })
}
