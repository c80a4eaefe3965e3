//! One call of an operation, in either kind of memory.

use super::op::Op;
use super::samples::{POISON, Sample};
use super::shape::{Place, Shape};
use super::{Memory, Settings};
use crate::async_calls::AllReduce;
use crate::buffer::Buffer;
use crate::element::ReduceOp;
use crate::error::Error;
use crate::group::ProcessGroup;

/// An operation with the memory that it works on.
pub(super) struct Turn<'a, T: Sample> {
    group: &'a ProcessGroup,
    op: Op,
    reduction: ReduceOp,
    place: Place,
    shape: Shape,
    ground: Ground<T>,
}

enum Ground<T: Sample> {
    /// The group's buffer, which a call takes and gives back; none while a call has it.
    Arena(Option<Buffer<T>>),
    /// The caller's; one for both where the operation works in place.
    Ordinary { input: Vec<T>, output: Vec<T> },
}

impl<'a, T: Sample> Turn<'a, T> {
    /// *Errors*: the arena is full.
    pub(super) fn new(
        group: &'a ProcessGroup,
        settings: &Settings,
        op: Op,
        bytes: usize,
    ) -> Result<Self, Error> {
        let place = Place {
            rank: group.rank(),
            world: group.world(),
            root: settings.root,
        };
        let shape = Shape::new(op, place, bytes, size_of::<T>());
        let ground = match settings.memory {
            Memory::Arena => Ground::Arena(Some(group.buffer(shape.len)?)),
            Memory::Ordinary => {
                let output = if is_in_place(op) {
                    0
                } else {
                    shape.output.len()
                };
                Ground::Ordinary {
                    input: vec![T::default(); shape.input.len()],
                    output: vec![T::default(); output],
                }
            }
        };
        Ok(Self {
            group,
            op,
            reduction: settings.reduction,
            place,
            shape,
            ground,
        })
    }

    pub(super) fn place(&self) -> Place {
        self.place
    }

    pub(super) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Writes zeros everywhere, so that no page is missing and sums stay what they are however often they are made.
    pub(super) fn clear(&mut self) {
        match &mut self.ground {
            Ground::Arena(buffer) => {
                if let Some(buffer) = buffer {
                    buffer.fill(T::default());
                }
            }
            Ground::Ordinary { input, output } => {
                input.fill(T::default());
                output.fill(T::default());
            }
        }
    }

    /// Spoils the output, then lets `write` have the input.
    pub(super) fn prepare(&mut self, write: impl FnOnce(&mut [T])) {
        let poison = T::of(POISON);
        match &mut self.ground {
            Ground::Arena(buffer) => {
                if let Some(buffer) = buffer {
                    buffer.fill(poison);
                    write(&mut buffer[self.shape.input.clone()]);
                }
            }
            Ground::Ordinary { input, output } => {
                output.fill(poison);
                write(input);
            }
        }
    }

    /// The result.
    pub(super) fn output(&self) -> &[T] {
        match &self.ground {
            Ground::Arena(None) => &[],
            Ground::Arena(Some(buffer)) => &buffer[self.shape.output.clone()],
            Ground::Ordinary { input, .. } if is_in_place(self.op) => {
                &input[..self.shape.output.len()]
            }
            Ground::Ordinary { output, .. } => output,
        }
    }

    /// The call.
    ///
    /// *Errors*: the group's; the memory is gone then.
    pub(super) fn run(&mut self) -> Result<(), Error> {
        let Ground::Arena(slot) = &mut self.ground else {
            return self.call();
        };
        let Some(buffer) = slot.take() else {
            // A call that failed has kept it; the group says why.
            return self.group.health();
        };
        let buffer = self.submit(buffer)?;
        self.ground = Ground::Arena(Some(buffer));
        Ok(())
    }

    fn submit(&self, buffer: Buffer<T>) -> Result<Buffer<T>, Error> {
        let (group, reduction, root) = (self.group, self.reduction, self.place.root);
        let ticket = match self.op {
            Op::AllReduce => {
                let call = AllReduce {
                    op: reduction,
                    tree: None,
                    len: self.shape.len,
                    bucket: None,
                    step: 0,
                };
                group.all_reduce_async(buffer, call)
            }
            Op::Reduce => group.reduce_async(buffer, reduction, root),
            Op::Broadcast => group.broadcast_async(buffer, root),
            Op::AllGather => group.all_gather_async(buffer),
            Op::ReduceScatter => group.reduce_scatter_async(buffer, reduction),
            Op::Gather => group.gather_async(buffer, root),
            Op::Scatter => group.scatter_async(buffer, root),
            Op::AllToAll => group.all_to_all_async(buffer),
            Op::Barrier => return group.barrier().map(|()| buffer),
        };
        ticket.wait().map(|done| done.buffer)
    }

    fn call(&mut self) -> Result<(), Error> {
        let (group, reduction, root) = (self.group, self.reduction, self.place.root);
        let Ground::Ordinary { input, output } = &mut self.ground else {
            return group.health();
        };
        let is_root = self.place.rank == root;
        match self.op {
            Op::AllReduce => group.all_reduce(input, reduction),
            Op::Reduce => group.reduce(input, reduction, root),
            Op::Broadcast => group.broadcast(input, root),
            Op::AllGather => group.all_gather(input, output),
            Op::ReduceScatter => group.reduce_scatter(input, output, reduction),
            Op::Gather => group.gather(input, is_root.then_some(&mut output[..]), root),
            Op::Scatter => group.scatter(is_root.then_some(&input[..]), output, root),
            Op::AllToAll => group.all_to_all(input, output),
            Op::Barrier => group.barrier(),
        }
    }
}

fn is_in_place(op: Op) -> bool {
    matches!(op, Op::AllReduce | Op::Reduce | Op::Broadcast)
}
