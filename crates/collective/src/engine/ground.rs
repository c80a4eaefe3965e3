//! Where the places of a plan lie in memory, for one piece of a call, and what a round does there.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use super::prepared::Prepared;
use crate::call::{Call, Header};
use crate::element::ReduceOp;
use crate::error::Error;
use crate::fold::{self, Fold, Scratch};
use crate::memory::{Cell, Home, Operand, Region};
use crate::plan::{Layout, Place, Plan, Round, Space, Spot, Task};
use crate::runner::Runner;
use crate::stream::{Memory, RoundStep};
use crate::team::Team;

/// From this many bytes on, in all ranks' buffers together, results that do not replace an input go past the caches: they
/// would push out the inputs that are still to be read. About a last-level cache. Results in place never do: their lines
/// are in the cache already, and 16 MiB on 2 ranks took twice as long past it.
///
/// *Units*: bytes.
const STREAMING_BYTES_MIN: usize = 32 << 20;

/// Room for pointers, kept between calls.
#[derive(Debug, Default)]
pub(super) struct Pointers {
    /// Of a task.
    inputs: Vec<*const u8>,
    outputs: Vec<*mut u8>,
    /// See [`Ground::bases`].
    bases: Vec<[Option<NonNull<u8>>; 2]>,
}

// SAFETY: what is in them is not used after the call that put it there.
unsafe impl Send for Pointers {}

/// One piece of a call, laid out.
pub(super) struct Ground<'a> {
    call: &'a Call,
    rank: usize,
    operand: &'a Operand,
    prepared: &'a Prepared,
    /// Slots of the whole call in this rank's own memory.
    whole: [Layout; 2],
    /// First element of the piece in every slot.
    first: usize,
    /// *Units*: bytes of an element.
    size: usize,
    temp: Option<NonNull<u8>>,
    /// By rank, where its lent `In` and `Out` begin; none where nothing is reached through memory.
    bases: Vec<[Option<NonNull<u8>>; 2]>,
    /// Where this rank's staged `In` and `Out` begin, if it stages.
    staged: Option<[NonNull<u8>; 2]>,
}

impl<'a> Ground<'a> {
    pub(super) fn new(
        call: &'a Call,
        rank: usize,
        operand: &'a Operand,
        prepared: &'a Prepared,
        first: usize,
        temp: Option<&'a mut Region>,
    ) -> Self {
        Self {
            call,
            rank,
            operand,
            prepared,
            whole: [Space::In, Space::Out].map(|space| Layout::of(&call.spec, rank, space)),
            first,
            size: call.element_bytes(),
            temp: temp.map(|region| NonNull::from(region.as_mut_slice()).cast()),
            bases: Vec::new(),
            staged: None,
        }
    }

    /// A place in this rank's memory, as its caller sees it.
    pub(super) fn own(&self, place: Place) -> NonNull<u8> {
        let (base, start) = match place.space {
            Space::In => (
                self.operand.input(),
                self.whole[0].start(place.slot) + self.first,
            ),
            Space::Out => (
                self.operand.output(),
                self.whole[1].start(place.slot) + self.first,
            ),
            Space::Temp => (
                self.temp.expect("a plan with places in `Temp` has some"),
                self.prepared.temp_start(place.slot),
            ),
        };
        // SAFETY: a plan stays inside its layout, and the operand is as long as the whole call's.
        unsafe { base.add((start + place.at) * self.size) }
    }

    /// A spot in memory that this rank can reach; none on other hosts.
    pub(super) fn mapped(&self, spot: &Spot) -> Option<NonNull<u8>> {
        if spot.rank == self.rank {
            return Some(self.own(spot.place));
        }
        let base = self.bases.get(spot.rank)?[index(spot.place.space)]?;
        Some(self.within(base, spot.rank, spot.place))
    }

    /// A place in lent memory that begins at `base`.
    fn within(&self, base: NonNull<u8>, rank: usize, place: Place) -> NonNull<u8> {
        let start = self.prepared.layout(rank, place.space).start(place.slot);
        // SAFETY: lent memory has room for the piece's layout: `Team::base` has checked that of a peer, `staging_bytes`
        // has reserved this rank's own.
        unsafe { base.add((start + place.at) * self.size) }
    }

    /// Copies what this rank lends into its cell. Stream peers are sent it from there where they need a copy.
    pub(super) fn lend_inline(&mut self, cell: &Cell) {
        let bytes = self.prepared.layout(self.rank, Space::In).total() * self.size;
        if bytes == 0 {
            return;
        }
        // Inline calls have one piece, so all of `In` lies in one place.
        let data = cell.data(bytes);
        // SAFETY: the operand is as long as the call's layout; the cell belongs to this rank until it meets the others.
        unsafe { data.copy_from_nonoverlapping(self.operand.input(), bytes) };
        self.staged = Some([data; 2]);
    }

    /// What this rank lends is in its cell since the call was begun; peers may be reading it.
    pub(super) fn has_lent_inline(&mut self, cell: &Cell) {
        let bytes = self.prepared.layout(self.rank, Space::In).total() * self.size;
        self.staged = (bytes > 0).then(|| [cell.data(bytes); 2]);
    }

    /// Has copies lent from `region` instead of the operand; where they begin in this rank's segment, if they do.
    pub(super) fn stage_in(&mut self, region: &mut Region) -> [u64; 2] {
        let starts = self
            .prepared
            .staging_starts()
            .map(|start| start * self.size);
        // Nobody maps the heap; stream peers do not ask where it is.
        let offset = match region.home() {
            Home::Arena { offset, .. } => *offset,
            Home::Heap(_) => 0,
        };
        assert!(self.prepared.staging_bytes(self.size) <= region.bytes());
        let memory = NonNull::from(region.as_mut_slice()).cast::<u8>();
        // SAFETY: both starts lie within the staging bytes.
        self.staged = Some(starts.map(|start| unsafe { memory.add(start) }));
        starts.map(|start| (offset + start) as u64)
    }

    /// Copies what peers read in a round to where they see it.
    pub(super) fn stage(&self, round: usize) {
        let Some(places) = self.prepared.stage.get(round) else {
            return;
        };
        self.copy_staged(places, |own, staged| (own, staged));
    }

    /// [`unstage`](Self::unstage) after the last round.
    pub(super) fn unstage_last(&self) {
        if let Some(last) = self.prepared.plan.rounds.len().checked_sub(1) {
            self.unstage(last);
        }
    }

    pub(super) fn plan(&self) -> &'a Plan {
        &self.prepared.plan
    }

    pub(super) fn header(&self) -> &'a Header {
        &self.call.header
    }

    /// A round for the connections to run.
    pub(super) fn step(&'a self, index: usize, runner: Runner) -> RoundStep<'a> {
        RoundStep {
            header: &self.call.header,
            plan: &self.prepared.plan,
            index,
            element_bytes: self.size,
            memory: self,
            runner,
        }
    }

    /// Copies what peers have stored in a round to where the caller sees it.
    pub(super) fn unstage(&self, round: usize) {
        self.copy_staged(&self.prepared.unstage[round], |own, staged| (staged, own));
    }

    fn copy_staged(
        &self,
        places: &[(Place, usize)],
        way: impl Fn(NonNull<u8>, NonNull<u8>) -> (NonNull<u8>, NonNull<u8>),
    ) {
        let Some(staged) = self.staged else { return };
        for (place, len) in places {
            let base = staged[index(place.space)];
            let (from, to) = way(self.own(*place), self.within(base, self.rank, *place));
            // SAFETY: both are this rank's own memory at this moment and long enough; staging is apart from the operand.
            unsafe { to.copy_from_nonoverlapping(from, len * self.size) };
        }
    }

    /// Learns where the peers' lent memory begins.
    pub(super) fn resolve(
        &mut self,
        team: &Team,
        inline: bool,
        pointers: &mut Pointers,
    ) -> Result<(), Error> {
        let header = &self.call.header;
        self.bases = std::mem::take(&mut pointers.bases);
        self.bases.clear();
        self.bases.resize(self.prepared.layouts_len(), [None; 2]);
        for (rank, space) in self.prepared.touched.iter().copied() {
            if !team.has(rank) {
                continue;
            }
            let bytes = self.prepared.layout(rank, space).total() * self.size;
            self.bases[rank][index(space)] = match inline {
                true => team.inline(rank, bytes),
                false => Some(team.base(header, rank, space, bytes, self.size)?),
            };
        }
        Ok(())
    }

    /// Gives back what [`resolve`](Self::resolve) has taken.
    pub(super) fn end(self, pointers: &mut Pointers) {
        pointers.bases = self.bases;
    }

    /// Runs the tasks of a round whose spots are all in reach.
    pub(super) fn run(&self, round: &Round, scratch: &mut Scratch, pointers: &mut Pointers) {
        for task in &round.tasks {
            self.task(task, scratch, pointers);
        }
    }

    fn task(&self, task: &Task, scratch: &mut Scratch, pointers: &mut Pointers) {
        let reach = |spot: &Spot| self.mapped(spot).expect("a spot on this host");
        let inputs = task
            .inputs
            .iter()
            .map(|spot| reach(spot).as_ptr().cast_const());
        pointers.inputs.extend(inputs);
        let outputs = task.outputs.iter().map(|spot| reach(spot).as_ptr());
        pointers.outputs.extend(outputs);
        // SAFETY: all ranks have come with this call and none has gone on, so what they lend belongs to the operation;
        // within a round nobody touches what a task writes, and outputs equal inputs or lie apart.
        unsafe { self.compute(task, task.len, &pointers.inputs, &pointers.outputs, scratch) };
        pointers.inputs.clear();
        pointers.outputs.clear();
    }

    /// Folds or copies `len` elements.
    ///
    /// # Safety
    ///
    /// That of [`Fold::run`].
    pub(super) unsafe fn compute(
        &self,
        task: &Task,
        len: usize,
        inputs: &[*const u8],
        outputs: &[*mut u8],
        scratch: &mut Scratch,
    ) {
        let all_bytes = self.call.header.total * self.size * self.call.spec.world();
        let in_place = |output: &*mut u8| inputs.contains(&output.cast_const());
        let streaming = self.staged.is_none()
            && all_bytes >= STREAMING_BYTES_MIN
            && !outputs.iter().any(in_place);
        let average = self.call.header.reduce == Some(ReduceOp::Average) && task.last;
        // SAFETY: the caller's.
        unsafe {
            match (&task.fold, self.call.header.reduce, self.call.header.dtype) {
                (Some(tree), Some(op), Some(dtype)) => Fold {
                    tree,
                    dtype,
                    op,
                    inputs,
                    len,
                    outputs,
                    streaming,
                    divide: average.then(|| self.call.spec.tree.leaves()),
                }
                .run(scratch),
                _ => fold::copy(inputs[0], outputs, len * self.size, streaming),
            }
        }
    }
}

impl Memory for Ground<'_> {
    fn own(&self, place: Place) -> *mut u8 {
        self.own(place).as_ptr()
    }

    fn lent(&self, place: Place) -> *const u8 {
        match self.staged.filter(|_| self.prepared.plan.lends_copies) {
            Some(staged) => {
                let base = staged[index(place.space)];
                self.within(base, self.rank, place).as_ptr()
            }
            None => self.own(place).as_ptr(),
        }
    }

    fn mapped_input(&self, spot: Spot) -> Option<*const u8> {
        self.mapped(&spot).map(|start| start.as_ptr().cast_const())
    }

    fn mapped_output(&self, spot: Spot) -> Option<*mut u8> {
        self.mapped(&spot).map(NonNull::as_ptr)
    }
}

fn index(space: Space) -> usize {
    match space {
        Space::In => 0,
        Space::Out => 1,
        Space::Temp => unreachable!("nobody lends `Temp` through shared memory"),
    }
}
