//! A bucket in flight to the other ranks: in f32, or in half the bytes.

use std::sync::Arc;

use burn::tensor::bf16;
use half::slice::HalfFloatSliceExt;
use paceline_collective::{
    AllReduce, Buffer, Element, Error, OpTiming, ProcessGroup, ReduceScatter, Ticket,
};

/// The memory of one bucket.
pub(super) struct Memory {
    /// A stack of blocks.
    pub(super) blocks: Buffer<f32>,
    /// The same blocks in bf16, if gradients are sent in half the bytes.
    pub(super) half: Option<Buffer<bf16>>,
}

/// The receipt of a bucket, with the memory that is not in flight.
pub(super) enum Sent {
    Whole(Ticket<f32>),
    Half {
        ticket: Ticket<bf16>,
        blocks: Buffer<f32>,
    },
}

impl Memory {
    /// Allocates `len` numbers over all blocks, and their bf16 copy if `is_halved`.
    pub(super) fn new(group: &ProcessGroup, len: usize, is_halved: bool) -> Result<Self, Error> {
        Ok(Self {
            blocks: group.buffer(len)?,
            half: is_halved.then(|| group.buffer(len)).transpose()?,
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
            None => Sent::Whole(reduce(group, blocks, call, counts)),
            Some(mut half) => {
                half[..len].convert_from_f32_slice(&blocks[..len]);
                let ticket = reduce(group, half, call, counts);
                Sent::Half { ticket, blocks }
            }
        }
    }
}

fn reduce<T: Element>(
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
            Self::Whole(_) => size_of::<f32>(),
            Self::Half { .. } => size_of::<bf16>(),
        }
    }

    /// Waits for the sum, which then fills the first `len` numbers of the blocks.
    pub(super) fn wait(self, len: usize) -> Result<(Memory, OpTiming), Error> {
        match self {
            Self::Whole(ticket) => {
                let done = ticket.wait()?;
                let memory = Memory {
                    blocks: done.buffer,
                    half: None,
                };
                Ok((memory, done.timing))
            }
            Self::Half { ticket, mut blocks } => {
                let done = ticket.wait()?;
                done.buffer[..len].convert_to_f32_slice(&mut blocks[..len]);
                let memory = Memory {
                    blocks,
                    half: Some(done.buffer),
                };
                Ok((memory, done.timing))
            }
        }
    }
}
