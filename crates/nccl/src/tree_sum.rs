//! A sum in the order of a tree: the exchange of data, and the additions.
//!
//! The elements are divided into one slice per rank. Every rank sends each other rank that rank's slice of its own blocks, adds
//! up its own slice of all blocks in the order of the tree's program, and distributes the result unless the sum is to be scattered.
//! The additions are those of the collective on the host, element by element, so the bytes are equal.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::ops::Range;
use std::sync::Arc;

use paceline_collective::TreeStep;

use crate::call::TreeSum;
use crate::communicator::wrong_parts;
use crate::driver::{Context, Kernel, Memory, Stream};
use crate::error::NcclError;
use crate::nccl::Comm;

/// The kernel that adds, for devices since 2014.
const PTX: &str = concat!(include_str!("add.ptx"), "\0");
/// Slices are aligned to this many singles, since NCCL moves 16 bytes at a time.
const SLICE_SINGLES: usize = 4;
/// Received slices are aligned to this many singles.
const SPOT_SINGLES: usize = 128;
/// The kernel's threads per block and maximum number of blocks: enough to saturate any device's memory.
const THREADS: u32 = 256;
const BLOCKS_MAX: u64 = 2048;
/// Size of an element.
const SINGLE: usize = size_of::<f32>();

/// The reason why a sum is invalid on this rank, if it is.
pub(crate) fn wrong(sum: &TreeSum, (rank, world): (usize, usize), bytes: usize) -> Option<String> {
    if sum.tree.world() != world {
        let other = sum.tree.world();
        return Some(format!("the tree is for {other} ranks, not {world}"));
    }
    if sum.stride < sum.len {
        return Some(format!(
            "blocks of {} numbers cannot be {} apart",
            sum.len, sum.stride
        ));
    }
    let blocks = sum.tree.blocks(rank).len();
    let needed = sum
        .stride
        .checked_mul(blocks - 1)
        .and_then(|before| before.checked_add(sum.len))
        .and_then(|singles| singles.checked_mul(SINGLE));
    if needed.is_none_or(|needed| needed > bytes) {
        return Some(format!(
            "{bytes} bytes have no room for {blocks} blocks of {} numbers, {} apart",
            sum.len, sum.stride
        ));
    }
    let counts = sum.counts.as_ref();
    counts.and_then(|counts| wrong_parts(counts, 1, world, sum.len))
}

/// The slices: those that the caller names, or equal ones for all ranks, with a remainder added to the last one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Slices {
    len: usize,
    world: usize,
    each: usize,
    counts: Option<Arc<[usize]>>,
}

impl Slices {
    fn new(len: usize, world: usize, counts: Option<Arc<[usize]>>) -> Self {
        Self {
            len,
            world,
            each: len / world / SLICE_SINGLES * SLICE_SINGLES,
            counts,
        }
    }

    /// A rank's slice.
    fn of(&self, rank: usize) -> Range<usize> {
        if let Some(counts) = &self.counts {
            let start: usize = counts[..rank].iter().sum();
            return start..start + counts[rank];
        }
        let start = rank * self.each;
        let last = rank + 1 == self.world;
        start..if last { self.len } else { start + self.each }
    }

    /// The remainder of equal slices at the end: fewer than `world * SLICE_SINGLES` elements.
    fn rest(&self) -> Range<usize> {
        self.world * self.each..self.len
    }
}

/// The location of this rank's slice of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spot {
    /// In its own block with this number.
    Own(usize),
    /// Among the received slices, at this position.
    Came(usize),
}

/// One rank's part of a sum.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    rank: usize,
    slices: Slices,
    /// Number of blocks of each rank.
    blocks: Vec<usize>,
    /// The first position of each peer's slices among the received ones.
    first: Vec<usize>,
    /// `.0 += .1`, in order. The sum is in the first block afterwards.
    adds: Vec<(Spot, Spot)>,
    /// Number of received slices.
    spots: usize,
}

impl Plan {
    fn new(sum: &TreeSum, rank: usize) -> Self {
        let world = sum.tree.world();
        let blocks: Vec<usize> = (0..world).map(|it| sum.tree.blocks(it).len()).collect();
        let mut spots = 0;
        let mut first = Vec::with_capacity(world);
        for (peer, count) in blocks.iter().enumerate() {
            first.push(spots);
            if peer != rank {
                spots += count;
            }
        }
        let mut plan = Self {
            rank,
            slices: Slices::new(sum.len, world, sum.counts.clone()),
            blocks,
            first,
            spots,
            adds: Vec::new(),
        };
        let mut stack = Vec::new();
        for step in sum.tree.program() {
            match *step {
                TreeStep::Load { rank, block } => stack.push(plan.spot(rank, block)),
                TreeStep::Merge => {
                    let right = stack.pop().expect("a program merges two entries");
                    let left = stack.pop().expect("a program merges two entries");
                    // The sum of two numbers does not depend on their order, so it stays in a block of this rank if one of
                    // the two is there: in the end, in the first.
                    let (to, from) = match (left, right) {
                        (Spot::Came(_), Spot::Own(_)) => (right, left),
                        _ => (left, right),
                    };
                    plan.adds.push((to, from));
                    stack.push(to);
                }
            }
        }
        debug_assert_eq!(stack, [Spot::Own(0)], "every rank has blocks");
        plan
    }

    /// The location of this rank's slice of a block.
    fn spot(&self, peer: usize, block: usize) -> Spot {
        if peer == self.rank {
            Spot::Own(block)
        } else {
            Spot::Came(self.first[peer] + block)
        }
    }

    /// Distance between two received slices.
    fn spot_singles(&self) -> usize {
        self.slices
            .of(self.rank)
            .len()
            .next_multiple_of(SPOT_SINGLES)
    }

    /// Memory for the received slices.
    fn bytes(&self) -> usize {
        self.spots * self.spot_singles() * SINGLE
    }

    /// The peers of a rank.
    fn peers(&self) -> impl Iterator<Item = usize> {
        let rank = self.rank;
        (0..self.slices.world).filter(move |peer| *peer != rank)
    }
}

/// The resources of sums, created by the first one.
#[derive(Debug, Default)]
pub(crate) struct Adder {
    kernel: Option<Kernel>,
    came: Option<Memory>,
}

/// The kernel that adds `count` floats at its second address to those at its first: two addresses and a count of 64 bits.
pub(crate) fn add_kernel(context: &Context) -> Result<Kernel, NcclError> {
    let ptx = CStr::from_bytes_with_nul(PTX.as_bytes());
    let ptx = ptx.expect("the text ends with the only zero byte");
    context.kernel(ptx, c"paceline_add_f32")
}

impl Adder {
    /// Plans a sum, and provides memory for the received slices. Returns memory that was too small, which must live until the
    /// stream has done its work.
    pub(crate) fn prepare(
        &mut self,
        context: &Context,
        sum: &TreeSum,
        rank: usize,
    ) -> Result<(Moves, Option<Memory>), NcclError> {
        let plan = Plan::new(sum, rank);
        if !plan.adds.is_empty() && self.kernel.is_none() {
            self.kernel = Some(add_kernel(context)?);
        }
        let room = self.came.as_ref().map_or(0, |room| room.bytes);
        let outgrown = if plan.bytes() > room {
            let larger = context.memory(plan.bytes())?;
            self.came.replace(larger)
        } else {
            None
        };
        let moves = Moves {
            plan,
            stride: sum.stride,
            came: self.came.as_ref().map_or(0, |room| room.ptr),
        };
        Ok((moves, outgrown))
    }

    /// `to[i] += from[i]`.
    ///
    /// # Safety
    ///
    /// Both ranges are memory of the stream's context with `count` singles, live until the stream has done it, and do not overlap.
    unsafe fn add(
        &self,
        stream: &Stream,
        (mut to, mut from): (u64, u64),
        count: usize,
    ) -> Result<(), NcclError> {
        let kernel = self.kernel.as_ref();
        let kernel = kernel.expect("it was made with the plan that adds");
        let mut count = count as u64;
        let blocks = count.div_ceil(u64::from(THREADS)).clamp(1, BLOCKS_MAX) as u32;
        let mut arguments = [
            (&raw mut to).cast::<c_void>(),
            (&raw mut from).cast(),
            (&raw mut count).cast(),
        ];
        // SAFETY: the kernel takes three 64-bit numbers, which the driver copies before it returns; the rest is the caller's
        // contract.
        unsafe { kernel.launch(stream, (blocks, THREADS), &mut arguments) }
    }
}

/// A plan with addresses. Its parts are put on the stream one after another, each after NCCL has accepted the previous one.
///
/// For all of them, `ptr` must be memory of the stream's context with this rank's blocks, and live until the stream has done it.
#[derive(Debug)]
pub(crate) struct Moves {
    plan: Plan,
    stride: usize,
    /// Address of the received slices.
    came: u64,
}

impl Moves {
    fn block(&self, ptr: u64, number: usize, at: usize) -> u64 {
        ptr + ((number * self.stride + at) * SINGLE) as u64
    }

    fn address(&self, ptr: u64, spot: Spot) -> u64 {
        match spot {
            Spot::Own(number) => self.block(ptr, number, self.own().start),
            Spot::Came(place) => self.came + (place * self.plan.spot_singles() * SINGLE) as u64,
        }
    }

    fn own(&self) -> Range<usize> {
        self.plan.slices.of(self.plan.rank)
    }

    /// Sends all blocks' slices to the ranks that add them up.
    ///
    /// # Safety
    ///
    /// As the type says.
    pub(crate) unsafe fn slices(
        &self,
        (comm, stream): (&Comm, &Stream),
        ptr: u64,
    ) -> Result<(), NcclError> {
        let plan = &self.plan;
        let own_bytes = self.own().len() * SINGLE;
        comm.group(|| {
            for peer in plan.peers() {
                let theirs = plan.slices.of(peer);
                for number in 0..plan.blocks[plan.rank] {
                    if !theirs.is_empty() {
                        let from = self.block(ptr, number, theirs.start);
                        // SAFETY: within this rank's blocks, by the caller's contract.
                        unsafe { comm.send(from, theirs.len() * SINGLE, peer, stream) }?;
                    }
                }
                for number in 0..plan.blocks[peer] {
                    if own_bytes > 0 {
                        let to = self.address(ptr, plan.spot(peer, number));
                        // SAFETY: there is memory for every received slice.
                        unsafe { comm.recv(to, own_bytes, peer, stream) }?;
                    }
                }
            }
            Ok(())
        })
    }

    /// Adds up this rank's slice.
    ///
    /// # Safety
    ///
    /// As the type says.
    pub(crate) unsafe fn add(
        &self,
        adder: &Adder,
        stream: &Stream,
        ptr: u64,
    ) -> Result<(), NcclError> {
        let count = self.own().len();
        if count == 0 {
            return Ok(());
        }
        for (left, right) in &self.plan.adds {
            let both = (self.address(ptr, *left), self.address(ptr, *right));
            // SAFETY: both locations have room for this rank's slice, and differ.
            unsafe { adder.add(stream, both, count) }?;
        }
        Ok(())
    }

    /// Distributes the sums.
    ///
    /// # Safety
    ///
    /// As the type says.
    pub(crate) unsafe fn sums(
        &self,
        (comm, stream): (&Comm, &Stream),
        ptr: u64,
    ) -> Result<(), NcclError> {
        let slices = &self.plan.slices;
        let (from, bytes) = (self.address(ptr, Spot::Own(0)), slices.each * SINGLE);
        comm.group(|| {
            if bytes > 0 {
                // SAFETY: the result is in place, and the first block has room for all slices.
                unsafe { comm.all_gather((from, ptr), bytes, stream) }?;
            }
            let rest = slices.rest();
            if !rest.is_empty() {
                // At the end of the last rank's slice.
                let (at, root) = (self.block(ptr, 0, rest.start), slices.world - 1);
                // SAFETY: the same.
                unsafe { comm.broadcast((at, at), rest.len() * SINGLE, root, stream) }?;
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests;
