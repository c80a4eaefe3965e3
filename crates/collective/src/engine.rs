//! The one executor: runs a call's plan over memory that ranks share and over connections to the others.
//!
//! Memory that peers can map is worked on where it lies. A caller's own memory is not mapped by anybody: what peers read
//! of it is copied into shared staging before they do, what they store comes back by a copy, a cache-sized piece of the
//! call at a time. Small things are copied into the cell that announces the call, and one meeting is all they cost.
#![allow(unsafe_code)]

mod ground;
mod prepared;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use self::ground::{Ground, Pointers};
use self::prepared::Cache;
use crate::call::{Call, agree, common_piece};
use crate::element::{DType, normalise_bools};
use crate::error::Error;
use crate::fold::Scratch;
use crate::memory::{Allocator, Gauges, Operand, Region};
use crate::plan::{Layout, Space};
use crate::runner::Runner;
use crate::status::OpWait;
use crate::stream::Streams;
use crate::team::Team;

/// What came of a piece of a call.
#[derive(Debug, Clone, Copy)]
enum Came {
    /// It is done; see [`Engine::execute`].
    Ready(Option<Instant>),
    /// Nothing is done: some ranks brought ordinary memory and others the group's, and pieces of this length serve both.
    Cut(usize),
}

/// How peers that map this rank's memory see its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lending {
    /// A copy in the cell that announces the call.
    Inline,
    /// The operand itself.
    InPlace([u64; 2]),
    /// Copies in staging memory.
    Staged,
}

/// One rank's executor. Runs one operation at a time, in the same order on all ranks.
#[derive(Debug)]
pub(crate) struct Engine {
    rank: usize,
    /// The ranks whose memory is mapped, when there are any.
    team: Option<Team>,
    means: Means,
    allocator: Allocator,
    cache: Cache,
    /// Shared memory that callers' own memory is copied through; as large as the largest piece so far.
    staging: Option<Region>,
    /// This rank's `Temp` space.
    temp: Option<Region>,
    /// What stream peers are sent while this rank's tasks overwrite it.
    copies: Option<Region>,
    /// What of all this is memory.
    pub(crate) gauges: Arc<Gauges>,
    /// Bytes that this rank has sent to others.
    sent: Arc<AtomicU64>,
    /// The next call to be executed was [begun](Self::begin).
    begun: bool,
    /// A call is being executed, or one has panicked and left peers in no known state.
    inside: bool,
}

/// What came of an attempt to begin a call without waiting for anybody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Begun {
    /// All other ranks have come already: executing the rest waits for nobody.
    Met,
    /// This rank has come.
    Come,
    /// The call needs more than one meeting; nothing has happened.
    No,
}

impl Engine {
    pub(crate) fn new(
        rank: usize,
        team: Option<Team>,
        streams: Option<Streams>,
        allocator: Allocator,
    ) -> Self {
        Self {
            rank,
            team,
            means: Means {
                streams,
                scratch: Scratch::default(),
                pointers: Pointers::default(),
            },
            allocator,
            cache: Cache::default(),
            staging: None,
            temp: None,
            copies: None,
            gauges: Arc::default(),
            sent: Arc::default(),
            begun: false,
            inside: false,
        }
    }

    /// Counts the bytes that this rank sends in `sent` from now on.
    pub(crate) fn count_in(&mut self, sent: Arc<AtomicU64>) {
        self.sent = sent;
    }

    /// Whether some ranks map each other's memory.
    pub(crate) fn shares_memory(&self) -> bool {
        self.team.is_some()
    }

    /// Frees what it keeps between calls. Peers may write to it until the generation after this one forms.
    pub(crate) fn release(&mut self, generation: u32) {
        if let Some(staging) = &mut self.staging {
            staging.lose(Some(generation));
        }
        (self.staging, self.temp, self.copies) = (None, None, None);
        self.measure();
    }

    fn measure(&self) {
        let bytes = |region: &Option<Region>| region.as_ref().map_or(0, Region::bytes);
        let streams = self.means.streams.as_ref().map_or(0, Streams::bytes);
        let staging = bytes(&self.staging) + bytes(&self.copies);
        self.gauges.set(staging, bytes(&self.temp), streams);
    }

    /// Whether small calls can be [begun](Self::begin).
    pub(crate) fn begins(&self) -> bool {
        self.team.is_some() && self.means.streams.is_none()
    }

    /// Begins a call that one meeting is enough for: lends this rank's part and comes to the meeting. What peers need of
    /// this rank is done with that, so the thread that [executes](Self::execute) the rest may take its time; it has to be the
    /// next call executed.
    pub(crate) fn begin(&mut self, call: &Call, operand: &Operand) -> Begun {
        let (size, header) = (call.element_bytes(), &call.header);
        let begins = self.begins() && !self.inside;
        let Some(team) = self.team.as_ref().filter(|_| begins) else {
            return Begun::No;
        };
        let prepared = self.cache.get(call, self.rank, 0);
        if header.piece < header.total || !prepared.is_inline(size) {
            return Begun::No;
        }
        self.inside = true;
        let mut ground = Ground::new(call, self.rank, operand, prepared, 0, None);
        ground.lend_inline(team.begin());
        let is_met = team.announce(header, [0; 2]);
        (self.begun, self.inside) = (true, false);
        match is_met {
            true => Begun::Met,
            false => Begun::Come,
        }
    }

    /// Whether all ranks have come to the call that was begun.
    pub(crate) fn is_met(&self) -> bool {
        self.begun && self.team.as_ref().is_some_and(Team::is_complete)
    }

    /// Runs a call to its end, one that was [begun](Self::begin) from where it is: until it is done as far as this rank is
    /// concerned and nobody touches the operand any more, or fails, after which nothing can be executed. Waits only while
    /// `wait` lets it. The result is when the last rank had arrived; `None` if nothing took time after that.
    pub(crate) fn execute(
        &mut self,
        call: &Call,
        operand: &Operand,
        wait: &OpWait<'_>,
        runner: Runner,
    ) -> Result<Option<Instant>, Error> {
        if std::mem::replace(&mut self.inside, true) {
            return Err(Error::ThreadGone { rank: self.rank });
        }
        let mut cut = None;
        let ready = loop {
            let whole_or_cut = cut.as_ref().unwrap_or(call);
            let came = self.pieces(whole_or_cut, operand, wait, runner);
            self.measure();
            match came {
                Ok(Came::Ready(ready)) => break ready,
                Ok(Came::Cut(piece)) => {
                    let mut smaller = call.clone();
                    smaller.header.piece = piece;
                    cut = Some(smaller);
                }
                Err(error) => {
                    if let Some(staging) = &mut self.staging {
                        // Peers that have not noticed yet may still write to it.
                        staging.lose(Some(wait.status.generation()));
                    }
                    return Err(error);
                }
            }
        };
        if call.header.dtype == Some(DType::Bool) {
            let bytes = Layout::of(&call.spec, self.rank, Space::Out).total();
            // SAFETY: the result's own memory, which the operation has just filled.
            normalise_bools(unsafe {
                std::slice::from_raw_parts_mut(operand.output().as_ptr(), bytes)
            });
        }
        self.inside = false;
        Ok(ready)
    }

    /// Runs a call piece by piece.
    fn pieces(
        &mut self,
        call: &Call,
        operand: &Operand,
        wait: &OpWait<'_>,
        runner: Runner,
    ) -> Result<Came, Error> {
        let (total, piece) = (call.header.total, call.header.piece.max(1));
        let (mut ready, mut first) = (None, 0);
        loop {
            match self.piece(call, operand, first, wait, runner)? {
                Came::Ready(came) if first == 0 => ready = came,
                Came::Ready(_) => {}
                cut => return Ok(cut),
            }
            first = first.saturating_add(piece);
            if first >= total {
                return Ok(Came::Ready(ready));
            }
        }
    }

    /// Runs elements `first..first + header.piece` of every slot.
    fn piece(
        &mut self,
        call: &Call,
        operand: &Operand,
        first: usize,
        wait: &OpWait<'_>,
        runner: Runner,
    ) -> Result<Came, Error> {
        let size = call.element_bytes();
        let prepared = self.cache.get(call, self.rank, first);
        let temp = reserve(&mut self.temp, &Allocator::Heap, prepared.temp_bytes(size))?;
        let mut ground = Ground::new(call, self.rank, operand, prepared, first, temp);
        let Some(team) = &self.team else {
            if prepared.plan.lends_copies && self.means.streams.is_some() {
                let bytes = prepared.staging_bytes(size);
                let copies = reserve(&mut self.copies, &Allocator::Heap, bytes)?;
                ground.stage_in(copies.expect("what is lent is not empty"));
                ground.stage(0);
            }
            let ready = self.means.rounds(None, &ground, wait, runner)?;
            self.sent
                .fetch_add(prepared.sent_bytes(size), Ordering::Relaxed);
            return Ok(Came::Ready(ready));
        };
        // The last piece of a long call may be short, but its data does not lie in one place.
        let whole = call.header.piece >= call.header.total;
        let lending = match operand.shared() {
            _ if whole && prepared.is_inline(size) => Lending::Inline,
            Some(bases) if whole && !prepared.plan.lends_copies => Lending::InPlace(bases),
            _ => Lending::Staged,
        };
        let begun = std::mem::take(&mut self.begun);
        let cell = match begun {
            true => team.own_cell(),
            false => team.begin(),
        };
        let bases = match lending {
            Lending::Inline if begun => {
                ground.has_lent_inline(cell);
                [0; 2]
            }
            Lending::Inline => {
                ground.lend_inline(cell);
                [0; 2]
            }
            Lending::InPlace(bases) => bases,
            Lending::Staged => {
                let bytes = prepared.staging_bytes(size);
                match reserve(&mut self.staging, &self.allocator, bytes)? {
                    Some(staging) => {
                        let bases = ground.stage_in(staging);
                        ground.stage(0);
                        bases
                    }
                    None => [0; 2],
                }
            }
        };
        let met = match begun {
            true => team.is_complete(),
            false => team.announce(&call.header, bases),
        };
        if !met {
            team.wait(wait, runner)?;
        }
        if let Some(calls) = team.compare(&call.header)? {
            match &mut self.means.streams {
                Some(streams) => streams.differ(&call.header, &calls, runner, wait)?,
                None => match common_piece(&calls).filter(|_| first == 0) {
                    // No rank has touched anything yet. All see the same calls, so all begin again alike.
                    Some(piece) => return Ok(Came::Cut(piece)),
                    None => agree(&calls)?,
                },
            }
        }
        let inline = lending == Lending::Inline;
        ground.resolve(team, inline, &mut self.means.pointers)?;
        let met = (!inline).then(Instant::now);
        let ready = self
            .means
            .rounds(Some(team), &ground, wait, runner)?
            .or(met);
        if !inline {
            team.meet(wait, runner)?;
            ground.unstage_last();
        }
        ground.end(&mut self.means.pointers);
        self.sent
            .fetch_add(prepared.sent_bytes(size), Ordering::Relaxed);
        Ok(Came::Ready(ready))
    }
}

/// What runs a plan's rounds.
#[derive(Debug)]
struct Means {
    /// Connections to the others, when there are any.
    streams: Option<Streams>,
    scratch: Scratch,
    pointers: Pointers,
}

impl Means {
    /// Runs a plan's rounds, with a meeting of the ranks of this host between them. The result is when the last rank had
    /// come to the first, if others than those of this host take part.
    fn rounds(
        &mut self,
        team: Option<&Team>,
        ground: &Ground<'_>,
        wait: &OpWait<'_>,
        runner: Runner,
    ) -> Result<Option<Instant>, Error> {
        let rounds = &ground.plan().rounds;
        let mut ready = None;
        let (scratch, pointers) = (&mut self.scratch, &mut self.pointers);
        if let Some(streams) = self.streams.as_mut().filter(|_| rounds.is_empty()) {
            return streams.meet(ground.header(), runner, wait).map(Some);
        }
        for (index, round) in rounds.iter().enumerate() {
            if let Some(team) = team.filter(|_| index > 0) {
                ground.stage(index);
                team.meet(wait, runner)?;
                ground.unstage(index - 1);
            }
            let Some(streams) = &mut self.streams else {
                ground.run(round, scratch, pointers);
                continue;
            };
            // SAFETY: all memory is laid out for the plan's places; the ranks of this host have met, and touch of each
            // other's what their tasks say.
            let came = unsafe {
                streams.round(
                    &ground.step(index, runner),
                    &mut |task, inputs, _, len, outputs| {
                        ground.compute(task, len, inputs, outputs, scratch);
                    },
                    wait,
                )?
            };
            if index == 0 {
                ready = Some(came);
            }
        }
        Ok(ready)
    }
}

/// A kept region, made larger when it is too small; none for no bytes.
fn reserve<'a>(
    kept: &'a mut Option<Region>,
    allocator: &Allocator,
    bytes: usize,
) -> Result<Option<&'a mut Region>, Error> {
    if bytes == 0 {
        return Ok(None);
    }
    let region = match kept.take().filter(|region| region.bytes() >= bytes) {
        Some(region) => region,
        None => allocator.allocate(bytes.next_power_of_two())?,
    };
    Ok(Some(kept.insert(region)))
}
