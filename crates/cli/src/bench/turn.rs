//! One call of an operation, in either kind of memory.

use paceline_collective::{
    AllGather, AllReduce, Buffer, Error, ProcessGroup, ReduceOp, ReduceScatter,
};

use super::measurement::{Memory, Settings};
use super::op::Op;
use super::samples::{POISON, Sample};
use super::shape::{Place, Shape};

/// Tells the messages of a measurement from others.
const TAG: u32 = 0xBE4C;

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
    /// The same for messages, which take a buffer to send and one to receive.
    Messages(Option<[Buffer<T>; 2]>),
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
            Memory::Arena if op == Op::SendRecv => {
                let buffers = [
                    group.buffer(shape.input.len())?,
                    group.buffer(shape.output.len())?,
                ];
                Ground::Messages(Some(buffers))
            }
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
        let zero = T::default();
        match &mut self.ground {
            Ground::Arena(buffer) => buffer.iter_mut().for_each(|buffer| buffer.fill(zero)),
            Ground::Messages(buffers) => {
                let buffers = buffers.iter_mut().flatten();
                buffers.for_each(|buffer| buffer.fill(zero));
            }
            Ground::Ordinary { input, output } => {
                input.fill(zero);
                output.fill(zero);
            }
        }
    }

    /// Spoils the output, then lets `write` have the input.
    pub(super) fn prepare(&mut self, write: impl FnOnce(&mut [T])) {
        let poison = T::of(POISON);
        match &mut self.ground {
            Ground::Arena(Some(buffer)) => {
                buffer.fill(poison);
                write(&mut buffer[self.shape.input.clone()]);
            }
            Ground::Messages(Some([input, output])) => {
                output.fill(poison);
                write(input);
            }
            Ground::Arena(None) | Ground::Messages(None) => {}
            Ground::Ordinary { input, output } => {
                output.fill(poison);
                write(input);
            }
        }
    }

    /// The result.
    pub(super) fn output(&self) -> &[T] {
        match &self.ground {
            Ground::Arena(None) | Ground::Messages(None) => &[],
            Ground::Messages(Some([_, output])) => output,
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
        match &mut self.ground {
            Ground::Ordinary { .. } => return self.call(),
            Ground::Arena(slot) => {
                if let Some(buffer) = slot.take() {
                    self.ground = Ground::Arena(Some(self.submit(buffer)?));
                    return Ok(());
                }
            }
            Ground::Messages(slot) => {
                if let Some(buffers) = slot.take() {
                    self.ground = Ground::Messages(Some(self.pass_on(buffers)?));
                    return Ok(());
                }
            }
        }
        // Without its memory, which a call that failed has kept, the group has failed.
        self.group.health()
    }

    fn pass_on(&self, [input, output]: [Buffer<T>; 2]) -> Result<[Buffer<T>; 2], Error> {
        let receipt = self.group.recv_async(output, self.place.previous(), TAG)?;
        let sending = self.group.send_async(input, self.place.next(), TAG)?;
        let output = receipt.wait()?.buffer;
        Ok([sending.wait()?, output])
    }

    fn submit(&self, buffer: Buffer<T>) -> Result<Buffer<T>, Error> {
        let (group, reduction, root) = (self.group, self.reduction, self.place.root);
        let ticket = match self.op {
            Op::AllReduce => {
                let call = AllReduce::new(reduction, self.shape.len);
                return group
                    .all_reduce_buffer(buffer, call)
                    .map(|done| done.buffer);
            }
            Op::Reduce => group.reduce_async(buffer, reduction, root),
            Op::Broadcast => group.broadcast_async(buffer, root),
            Op::AllGather => group.all_gather_async(buffer, AllGather::default()),
            Op::ReduceScatter => {
                let call = ReduceScatter {
                    op: reduction,
                    tree: None,
                    counts: None,
                    bucket: None,
                    step: 0,
                };
                group.reduce_scatter_async(buffer, call)
            }
            Op::Gather => group.gather_async(buffer, root),
            Op::Scatter => group.scatter_async(buffer, root),
            Op::AllToAll => group.all_to_all_async(buffer),
            // Messages have their own ground.
            Op::Barrier | Op::SendRecv => return group.barrier().map(|()| buffer),
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
            Op::SendRecv => {
                group.send(input, self.place.next(), TAG)?;
                group.recv(output, self.place.previous(), TAG)
            }
            Op::Barrier => group.barrier(),
        }
    }
}

fn is_in_place(op: Op) -> bool {
    matches!(op, Op::AllReduce | Op::Reduce | Op::Broadcast)
}
