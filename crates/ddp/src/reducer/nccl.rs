//! Collectives of NCCL on buckets that are tensors.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use burn::tensor::{DType, Device, Tensor};
use paceline_collective::Tree;
use paceline_nccl::{
    Before, Communicator, DeviceBuffer, Float, Label, NcclError, NcclOptions, Ticket, TreeSum,
};

use super::{DeviceCall, DeviceGroup, DeviceTicket, Setup, lock};
use crate::comm_hook::CommHook;
use crate::ddp::Reduction;
use crate::error::DdpError;

/// The ranks' tensors as NCCL reaches them.
pub(crate) struct NcclGroup<M> {
    link: Mutex<Link>,
    memory: M,
    tree: Arc<Tree>,
    rank: usize,
    reduction: Reduction,
    hook: CommHook,
    device: Device,
    /// Calls that may still be running.
    open: Mutex<Vec<Ticket>>,
}

/// This rank's connection to the others.
enum Link {
    /// There are no others.
    Alone,
    Joined(Communicator),
    /// It has been aborted.
    Ended,
}

/// How NCCL reaches tensors of one kind of device.
pub(crate) trait NcclMemory: Send + Sync {
    /// Lends a tensor to a call. Without `has_context_events` the call waits on the host for the tensor's kernels.
    ///
    /// *Errors*: the tensor could not be computed.
    fn lend(&self, tensor: Tensor<1>, has_context_events: bool) -> Result<Lent, DdpError>;
}

/// A tensor's memory during a call.
pub(crate) struct Lent {
    pub(crate) buffer: DeviceBuffer,
    /// When its kernels have run.
    pub(crate) before: Before,
    /// Makes a tensor of the memory after the call. Later work of the device already waits for the call.
    pub(crate) back: Back,
}

pub(crate) type Back = Box<dyn FnOnce(Option<&Ticket>) -> Result<Tensor<1>, DdpError> + Send>;

/// The device of this rank and how its gradients are added.
pub(crate) struct NcclDevice<'a> {
    pub(crate) device: &'a Device,
    /// The driver's number of the device.
    pub(crate) ordinal: usize,
    pub(crate) reduction: Reduction,
}

impl<M: NcclMemory> NcclGroup<M> {
    /// Joins the other ranks, each with its own device.
    ///
    /// *Blocks*: until all ranks have joined and every pair has been tested, see [`Communicator::join`].
    pub(crate) fn join(
        setup: &Setup,
        on: NcclDevice<'_>,
        memory: M,
        options: &NcclOptions,
    ) -> Result<Self, DdpError> {
        let (group, hook) = (&setup.group, setup.hook);
        if on.reduction == Reduction::Tree && hook != CommHook::None {
            return Err(DdpError::Backend(
                "NCCL sums in tree order in f32 only: a communication hook needs reduction ring",
            ));
        }
        let link = match group.world() {
            1 => Link::Alone,
            _ => Link::Joined(Communicator::join(group, on.ordinal, options)?),
        };
        Ok(Self {
            link: Mutex::new(link),
            memory,
            tree: setup.tree.clone(),
            rank: group.rank(),
            reduction: on.reduction,
            hook,
            device: on.device.clone().inner(),
            open: Mutex::default(),
        })
    }

    /// Joins all blocks into one tensor for the tree, or sums them for the ring.
    fn whole(&self, mut blocks: Vec<Tensor<1>>) -> Tensor<1> {
        if blocks.len() > 1 && self.reduction == Reduction::Tree {
            return Tensor::cat(blocks, 0);
        }
        // Right to left: the order in which the tree adds one rank's remaining blocks.
        let mut sum = blocks.pop().expect("every rank has a shard");
        while let Some(left) = blocks.pop() {
            sum = self.computed(left + sum);
        }
        sum
    }

    /// Calls NCCL with a tensor, of which this rank gets a part back.
    fn submit(
        &self,
        tensor: Tensor<1>,
        part: Range<usize>,
        call: impl FnOnce(&Communicator, DeviceBuffer, Before) -> Ticket,
    ) -> Result<Box<dyn DeviceTicket>, DdpError> {
        let link = lock(&self.link);
        let communicator = match &*link {
            Link::Joined(communicator) => communicator,
            Link::Alone => {
                let back: Back = Box::new(|_| Ok(tensor));
                return Ok(Box::new(Sent {
                    ticket: None,
                    part,
                    back: Mutex::new(Some(back)),
                }));
            }
            Link::Ended => return Err(DdpError::Backend("NCCL's communicator has been aborted")),
        };
        let lent = self
            .memory
            .lend(tensor, communicator.has_context_events())?;
        let ticket = call(communicator, lent.buffer, lent.before);
        let mut open = lock(&self.open);
        open.retain(|ticket| !matches!(ticket.poll(), Some(Ok(_))));
        open.push(ticket.clone());
        Ok(Box::new(Sent {
            ticket: Some(ticket),
            part,
            back: Mutex::new(Some(lent.back)),
        }))
    }
}

fn label(call: &DeviceCall) -> Label {
    Label {
        bucket: Some(call.bucket as u32),
        step: call.step,
    }
}

impl<M: NcclMemory> DeviceGroup for NcclGroup<M> {
    fn device(&self) -> &Device {
        &self.device
    }

    fn computed(&self, tensor: Tensor<1>) -> Tensor<1> {
        // Each operation is its own kernel unless the program enables Burn's fusion. A device failure is reported when its
        // memory is requested.
        let _ = self.device.flush();
        tensor
    }

    fn reduce(
        &self,
        call: DeviceCall,
        blocks: Vec<Tensor<1>>,
    ) -> Result<Box<dyn DeviceTicket>, DdpError> {
        let len = blocks.first().map_or(0, |block| block.dims()[0]);
        let (part, label) = (call.part(self.rank, len), label(&call));
        let (float, sum) = match self.hook {
            _ if matches!(*lock(&self.link), Link::Alone) => (Float::F32, self.whole(blocks)),
            CommHook::Bf16Compress => (Float::Bf16, self.whole(blocks).cast(DType::BF16)),
            CommHook::Fp16Compress => (Float::F16, self.whole(blocks).cast(DType::F16)),
            _ => (Float::F32, self.whole(blocks)),
        };
        self.submit(sum, part, |communicator, buffer, before| {
            match (self.reduction, call.counts) {
                (Reduction::Ring, None) => communicator.all_reduce(buffer, float, before, label),
                (Reduction::Ring, Some(counts)) => {
                    communicator.reduce_scatter(buffer, (float, counts), before, label)
                }
                (Reduction::Tree, counts) => {
                    let sum = TreeSum {
                        tree: self.tree.clone(),
                        len,
                        stride: len,
                        counts,
                    };
                    communicator.reduce_in_tree_order(buffer, sum, before, label)
                }
            }
        })
    }

    fn all_gather(
        &self,
        call: DeviceCall,
        values: Tensor<1>,
    ) -> Result<Box<dyn DeviceTicket>, DdpError> {
        let (len, label) = (values.dims()[0], label(&call));
        let counts = call.counts.iter().flat_map(|counts| counts.iter());
        let bytes = counts.map(|count| count * size_of::<f32>()).collect();
        self.submit(values, 0..len, |communicator, buffer, before| {
            communicator.all_gather(buffer, bytes, before, label)
        })
    }

    fn synchronize(&self) -> Result<(), DdpError> {
        let open = std::mem::take(&mut *lock(&self.open));
        for ticket in open {
            ticket.wait()?;
        }
        Ok(())
    }

    fn abort(&self) -> Result<(), DdpError> {
        let mut link = lock(&self.link);
        match std::mem::replace(&mut *link, Link::Ended) {
            Link::Joined(communicator) => Ok(communicator.abort()?),
            _ => Ok(()),
        }
    }
}

/// A call in flight, with its memory.
struct Sent {
    ticket: Option<Ticket>,
    /// The elements that this rank gets.
    part: Range<usize>,
    /// `None` once the result is taken.
    back: Mutex<Option<Back>>,
}

impl DeviceTicket for Sent {
    fn result(&self) -> Result<Tensor<1>, DdpError> {
        if let Some(ticket) = &self.ticket {
            ticket.order_after()?;
        }
        let back = lock(&self.back).take();
        let back = back.ok_or(DdpError::Backend("a bucket was taken twice"))?;
        let whole = back(self.ticket.as_ref())?;
        let len = self.part.len();
        Ok(match len {
            0 => Tensor::zeros([0], &whole.device()),
            _ if len == whole.dims()[0] => whole.cast(DType::F32),
            _ => whole.narrow(0, self.part.start, len).cast(DType::F32),
        })
    }

    fn times(&self) -> Option<(Instant, Instant)> {
        let timing = self.ticket.as_ref()?.wait().ok()?;
        Some((timing.started, timing.finished))
    }
}

impl From<NcclError> for DdpError {
    fn from(error: NcclError) -> Self {
        match error {
            NcclError::Group(error) => Self::Collective(error),
            NcclError::Along { group, rank, error } => match *error {
                NcclError::Group(error) => Self::Along {
                    group,
                    rank,
                    error: Box::new(error),
                },
                error => Self::Nccl(Box::new(NcclError::Along {
                    group,
                    rank,
                    error: Box::new(error),
                })),
            },
            other => Self::Nccl(Box::new(other)),
        }
    }
}
