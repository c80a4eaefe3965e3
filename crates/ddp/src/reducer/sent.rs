//! A bucket in flight to the other ranks: in f32, or in half the bytes.

use std::sync::Arc;
use std::time::Instant;

use burn::tensor::{bf16, f16};
use half::slice::HalfFloatSliceExt;
use paceline_collective::{
    AllReduce, Buffer, Element, Error, OpTiming, ProcessGroup, ReduceScatter, Ticket,
};

use crate::comm_hook::CommHook;

/// The memory of one bucket.
pub(super) struct Memory {
    /// A stack of blocks.
    pub(super) blocks: Buffer<f32>,
    /// Memory for the same blocks in half the bytes, if gradients are sent that way.
    pub(super) half: Option<Half>,
}

pub(super) enum Half {
    Bf16(Buffer<bf16>),
    F16(Buffer<f16>),
}

/// The receipt of a bucket, with the memory that is not in flight.
pub(super) enum Sent {
    /// The group has no other rank: the sum is here since then.
    Here(Buffer<f32>, Instant),
    Whole(Ticket<f32>),
    Bf16(Ticket<bf16>, Buffer<f32>),
    F16(Ticket<f16>, Buffer<f32>),
}

impl Memory {
    /// Allocates `len` numbers over all blocks, and what `hook` needs beside them.
    pub(super) fn new(group: &ProcessGroup, len: usize, hook: CommHook) -> Result<Self, Error> {
        Ok(Self {
            blocks: group.buffer(len)?,
            half: match hook {
                CommHook::Bf16Compress => Some(Half::Bf16(group.buffer(len)?)),
                CommHook::Fp16Compress => Some(Half::F16(group.buffer(len)?)),
                _ => None,
            },
        })
    }

    /// Numbers over all blocks.
    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Sends the first `len` numbers. With `counts` each rank gets only that many elements of the sum, in rank order.
    pub(super) fn send(
        self,
        group: &ProcessGroup,
        call: AllReduce,
        counts: Option<Arc<[usize]>>,
        len: usize,
    ) -> Sent {
        let Self { blocks, half } = self;
        match half {
            None if group.world() == 1 => Sent::Here(blocks, Instant::now()),
            None => Sent::Whole(reduce(group, blocks, call, counts)),
            Some(Half::Bf16(half)) => {
                let half = rounded(half, &blocks[..len]);
                Sent::Bf16(reduce(group, half, call, counts), blocks)
            }
            Some(Half::F16(half)) => {
                let half = rounded(half, &blocks[..len]);
                Sent::F16(reduce(group, half, call, counts), blocks)
            }
        }
    }
}

fn rounded<T: Element>(mut half: Buffer<T>, values: &[f32]) -> Buffer<T>
where
    [T]: HalfFloatSliceExt,
{
    half[..values.len()].convert_from_f32_slice(values);
    half
}

/// Adds up `blocks`. With `counts` each rank gets only that many elements of the sum, in rank order.
pub(super) fn reduce<T: Element>(
    group: &ProcessGroup,
    blocks: Buffer<T>,
    call: AllReduce,
    counts: Option<Arc<[usize]>>,
) -> Ticket<T> {
    if counts.is_none() {
        return group.all_reduce_async(blocks, call);
    }
    let AllReduce {
        op,
        tree,
        bucket,
        step,
        ..
    } = call;
    let call = ReduceScatter {
        op,
        tree,
        counts,
        bucket,
        step,
    };
    group.reduce_scatter_async(blocks, call)
}

impl Sent {
    /// Size of one number.
    pub(super) fn bytes_each(&self) -> usize {
        match self {
            Self::Here(..) | Self::Whole(_) => size_of::<f32>(),
            Self::Bf16(..) => size_of::<bf16>(),
            Self::F16(..) => size_of::<f16>(),
        }
    }

    /// Waits for the sum, which then fills the first `len` numbers of the blocks.
    pub(super) fn wait(self, len: usize) -> Result<(Memory, OpTiming), Error> {
        let (blocks, half, timing) = match self {
            Self::Here(blocks, since) => {
                let timing = OpTiming {
                    submitted: since,
                    started: since,
                    peers_ready: since,
                    finished: since,
                };
                (blocks, None, timing)
            }
            Self::Whole(ticket) => {
                let done = ticket.wait()?;
                (done.buffer, None, done.timing)
            }
            Self::Bf16(ticket, mut blocks) => {
                let (half, timing) = widened(ticket, &mut blocks[..len])?;
                (blocks, Some(Half::Bf16(half)), timing)
            }
            Self::F16(ticket, mut blocks) => {
                let (half, timing) = widened(ticket, &mut blocks[..len])?;
                (blocks, Some(Half::F16(half)), timing)
            }
        };
        Ok((Memory { blocks, half }, timing))
    }
}

fn widened<T: Element>(
    ticket: Ticket<T>,
    values: &mut [f32],
) -> Result<(Buffer<T>, OpTiming), Error>
where
    [T]: HalfFloatSliceExt,
{
    let done = ticket.wait()?;
    done.buffer[..values.len()].convert_to_f32_slice(values);
    Ok((done.buffer, done.timing))
}
