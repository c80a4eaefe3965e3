//! Collectives of NCCL on tensors: buckets, and what the ranks of other groups exchange.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use burn::tensor::{DType, Device, Tensor};
use paceline_collective::{ProcessGroup, Tree};
use paceline_nccl::{
    Before, Communicator, DeviceBuffer, Float, Label, NcclError, NcclOptions, Ticket, TreeSum,
};

use super::on_device::padded_copy;
use super::{
    Arrival, DeviceCall, DeviceExchange, DeviceGroup, DevicePort, DeviceTicket, Setup, lock,
};
use crate::comm_hook::CommHook;
use crate::ddp::{Backend, Reduction};
use crate::error::DdpError;

/// The tensors of a group's ranks as NCCL reaches them.
pub(crate) struct NcclGroup<M> {
    port: Arc<Port<M>>,
    /// The group's place among the port's lanes; `None` if it has no other ranks.
    lane: Option<usize>,
    tree: Arc<Tree>,
    rank: usize,
    reduction: Reduction,
    hook: CommHook,
}

/// This rank's device as NCCL reaches it, for all of its groups.
struct Port<M> {
    memory: M,
    device: Device,
    ordinal: usize,
    backend: Backend,
    options: NcclOptions,
    lanes: Mutex<Lanes>,
    /// Calls of all lanes that may still be running.
    open: Mutex<Vec<Ticket>>,
}

/// This rank's connections to others.
enum Lanes {
    Joined(Vec<Communicator>),
    /// They have been aborted.
    Ended,
}

impl<M> Port<M> {
    /// Joins the other ranks of a group, if it has any, and returns its lane. `None` if `what` goes through the host because ranks
    /// share a device.
    fn join(&self, group: &ProcessGroup, what: &str) -> Result<Option<Option<usize>>, DdpError> {
        if group.world() == 1 {
            return Ok(Some(None));
        }
        let mut lanes = lock(&self.lanes);
        let Lanes::Joined(lanes) = &mut *lanes else {
            return Err(ENDED);
        };
        let joined = match lanes.first() {
            Some(first) => first.join_lane(group),
            None => Communicator::join(group, self.ordinal, &self.options),
        };
        match joined {
            Ok(joined) => lanes.push(joined),
            // Every rank gets the same error.
            Err(error @ NcclError::OneDevice { .. }) if self.backend == Backend::Auto => {
                if group.rank() == 0 {
                    paceline_rendezvous::notice!(WARN, "{error}: {what} go through the host");
                }
                return Ok(None);
            }
            Err(NcclError::Group(error)) if group.is_subgroup() => {
                return Err(DdpError::along(group, error));
            }
            Err(error) => return Err(error.into()),
        }
        Ok(Some(Some(lanes.len() - 1)))
    }
}

const ENDED: DdpError = DdpError::Backend("NCCL's communicator has been aborted");

/// How NCCL reaches tensors of one kind of device.
pub(crate) trait NcclMemory: Send + Sync + 'static {
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
    pub(crate) backend: Backend,
    pub(crate) reduction: Reduction,
}

impl<M: NcclMemory> NcclGroup<M> {
    /// Joins the other ranks, each with its own device. `None` if gradients go through the host because ranks share one.
    ///
    /// *Blocks*: until all ranks have joined and every pair has been tested, see [`Communicator::join`].
    pub(crate) fn join(
        setup: &Setup,
        on: NcclDevice<'_>,
        memory: M,
        options: &NcclOptions,
    ) -> Result<Option<Self>, DdpError> {
        let (group, hook) = (&setup.group, setup.hook);
        if on.reduction == Reduction::Tree && hook != CommHook::None {
            return Err(DdpError::Backend(
                "NCCL sums in tree order in f32 only: a communication hook needs reduction ring",
            ));
        }
        let port = Port {
            memory,
            device: on.device.clone().inner(),
            ordinal: on.ordinal,
            backend: on.backend,
            options: options.clone(),
            lanes: Mutex::new(Lanes::Joined(Vec::new())),
            open: Mutex::default(),
        };
        Ok(port.join(group, "gradients")?.map(|lane| Self {
            lane,
            port: Arc::new(port),
            tree: setup.tree.clone(),
            rank: group.rank(),
            reduction: on.reduction,
            hook,
        }))
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
    ) -> Result<Box<Sent>, DdpError> {
        let Some(lane) = self.lane else {
            let back: Back = Box::new(|_| Ok(tensor));
            return Ok(Box::new(Sent {
                ticket: None,
                part,
                back: Mutex::new(Some(back)),
            }));
        };
        let lanes = lock(&self.port.lanes);
        let Lanes::Joined(lanes) = &*lanes else {
            return Err(ENDED);
        };
        let communicator = &lanes[lane];
        let lent = self
            .port
            .memory
            .lend(tensor, communicator.has_context_events())?;
        let ticket = call(communicator, lent.buffer, lent.before);
        let mut open = lock(&self.port.open);
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
        bucket: call.bucket.map(|bucket| bucket as u32),
        step: call.step,
    }
}

impl<M: NcclMemory> DeviceGroup for NcclGroup<M> {
    fn device(&self) -> &Device {
        &self.port.device
    }

    fn computed(&self, tensor: Tensor<1>) -> Tensor<1> {
        // Each operation is its own kernel unless the program enables Burn's fusion. A device failure is reported when its
        // memory is requested.
        let _ = self.port.device.flush();
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
            _ if self.lane.is_none() => (Float::F32, self.whole(blocks)),
            CommHook::Bf16Compress => (Float::Bf16, self.whole(blocks).cast(DType::BF16)),
            CommHook::Fp16Compress => (Float::F16, self.whole(blocks).cast(DType::F16)),
            _ => (Float::F32, self.whole(blocks)),
        };
        let sent = self.submit(sum, part, |communicator, buffer, before| {
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
        })?;
        Ok(sent)
    }

    fn all_gather(
        &self,
        call: DeviceCall,
        values: Tensor<1>,
    ) -> Result<Box<dyn DeviceTicket>, DdpError> {
        let (len, label) = (values.dims()[0], label(&call));
        let counts = call.counts.iter().flat_map(|counts| counts.iter());
        let bytes = counts.map(|count| count * size_of::<f32>()).collect();
        let sent = self.submit(values, 0..len, |communicator, buffer, before| {
            communicator.all_gather(buffer, bytes, before, label)
        })?;
        Ok(sent)
    }

    fn synchronize(&self) -> Result<(), DdpError> {
        let open = std::mem::take(&mut *lock(&self.port.open));
        for ticket in open {
            ticket.wait()?;
        }
        Ok(())
    }

    fn abort(&self) -> Result<(), DdpError> {
        let mut lanes = lock(&self.port.lanes);
        match std::mem::replace(&mut *lanes, Lanes::Ended) {
            Lanes::Joined(mut lanes) => {
                // One ends them all.
                let ended = lanes.pop().map_or(Ok(()), Communicator::abort);
                Ok(ended?)
            }
            Lanes::Ended => Ok(()),
        }
    }

    fn port(&self) -> Option<&dyn DevicePort> {
        Some(self)
    }
}

impl<M: NcclMemory> DevicePort for NcclGroup<M> {
    fn join(
        &self,
        group: &ProcessGroup,
        tree: &Arc<Tree>,
    ) -> Result<Option<Arc<dyn DeviceExchange>>, DdpError> {
        let lane = self
            .port
            .join(group, "values between the ranks of a model")?;
        Ok(lane.map(|lane| {
            let exchange: Arc<dyn DeviceExchange> = Arc::new(Self {
                lane,
                port: self.port.clone(),
                tree: tree.clone(),
                rank: group.rank(),
                reduction: Reduction::Tree,
                hook: CommHook::None,
            });
            exchange
        }))
    }
}

impl<M: NcclMemory> DeviceExchange for NcclGroup<M> {
    fn sum(
        &self,
        mut blocks: Vec<Tensor<1>>,
        counts: Option<Arc<[usize]>>,
    ) -> Result<Tensor<1>, DdpError> {
        if let [block] = &mut blocks[..] {
            *block = own(block.clone());
        }
        self.reduce(unlabelled(counts), blocks)?.result()
    }

    fn gather(&self, values: Tensor<1>, counts: Arc<[usize]>) -> Result<Tensor<1>, DdpError> {
        let total = counts.iter().sum();
        let call = unlabelled(Some(counts));
        let place = call.part(self.rank, total);
        let all = Tensor::zeros([total], (&self.port.device, values.dtype()));
        let all = all.slice_assign([place], values);
        self.all_gather(call, all)?.result()
    }

    fn max(&self, values: Tensor<1>) -> Result<Tensor<1>, DdpError> {
        let (len, label) = (values.dims()[0], Label::default());
        let sent = self.submit(own(values), 0..len, |communicator, buffer, before| {
            communicator.max(buffer, Float::F32, before, label)
        });
        sent?.result()
    }

    fn send(&self, values: Tensor<1>, to: usize) -> Result<(), DdpError> {
        let len = values.dims()[0];
        let sent = self.submit(values, 0..len, |communicator, buffer, before| {
            communicator.send(buffer, to, before, Label::default())
        });
        sent.map(drop)
    }

    fn receive(&self, len: usize, dtype: DType, from: usize) -> Result<Box<dyn Arrival>, DdpError> {
        let room = Tensor::empty([len], (&self.port.device, dtype));
        let sent = self.submit(room, 0..len, |communicator, buffer, before| {
            communicator.receive(buffer, from, before, Label::default())
        })?;
        Ok(sent)
    }
}

impl<M> fmt::Debug for NcclGroup<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NcclGroup")
            .field("rank", &self.rank)
            .field("lane", &self.lane)
            .finish_non_exhaustive()
    }
}

/// A call outside of gradients' buckets.
fn unlabelled(counts: Option<Arc<[usize]>>) -> DeviceCall {
    DeviceCall {
        bucket: None,
        step: 0,
        counts,
    }
}

/// The same values in memory that nothing else reads, because NCCL overwrites it.
fn own(values: Tensor<1>) -> Tensor<1> {
    let len = values.dims()[0];
    padded_copy(values).narrow(0, 0, len)
}

/// A call in flight, with its memory.
struct Sent {
    ticket: Option<Ticket>,
    /// The elements that this rank gets.
    part: Range<usize>,
    /// `None` once the result is taken.
    back: Mutex<Option<Back>>,
}

impl Sent {
    /// All of the memory, as it is after the call.
    fn whole(&self) -> Result<Tensor<1>, DdpError> {
        if let Some(ticket) = &self.ticket {
            ticket.order_after()?;
        }
        let back = lock(&self.back).take();
        let back = back.ok_or(DdpError::Backend("a bucket was taken twice"))?;
        back(self.ticket.as_ref())
    }
}

impl Arrival for Sent {
    fn tensor(self: Box<Self>) -> Result<Tensor<1>, DdpError> {
        self.whole()
    }
}

impl DeviceTicket for Sent {
    fn result(&self) -> Result<Tensor<1>, DdpError> {
        let whole = self.whole()?;
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
