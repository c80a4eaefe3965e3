//! Buckets on NVIDIA GPUs: a tensor's address, and NCCL's collectives on it.
//!
//! The host never waits here. Once a bucket's address is known, its kernels have been submitted to the driver. NCCL's stream
//! waits for them on the device, and later kernels that use the result wait for NCCL's stream.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use burn::backend::{BackendTensor, BackendTypes, CubeDevice, DispatchDevice, DispatchTensorKind};
use burn::tensor::{DType, Device, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_fusion::{FusionBackend, FusionRuntime, FusionTensor};
use cubecl_cuda::CudaRuntime;
use cubecl_runtime::runtime::Runtime;
use paceline_collective::Tree;
use paceline_nccl::{
    Before, Communicator, DeviceBuffer, Float, Label, NcclError, NcclOptions, Ticket, TreeSum,
};

use crate::comm_hook::CommHook;
use crate::ddp::Reduction;
use crate::error::DdpError;
use crate::reducer::{DeviceCall, DeviceGroup, DeviceTicket, Setup};

/// The memory of one rank's GPU.
pub(crate) struct Cuda {
    /// `None` with a single rank.
    communicator: Option<Communicator>,
    tree: Arc<Tree>,
    reduction: Reduction,
    hook: CommHook,
    device: Device,
    /// Calls that may still be running.
    open: Mutex<Vec<Ticket>>,
}

/// The ordinal of a CUDA device in this process; `None` for any other device.
pub(crate) fn ordinal(device: &Device) -> Option<usize> {
    match device.clone().inner().as_dispatch() {
        DispatchDevice::Cube(CubeDevice::Cuda(device)) => Some(device.index),
        _ => None,
    }
}

impl Cuda {
    /// Joins the other ranks, each with its own device.
    ///
    /// *Blocks*: until all ranks have joined and every pair has been tested, see [`Communicator::join`].
    pub(crate) fn join(
        setup: &Setup,
        device: &Device,
        reduction: Reduction,
    ) -> Result<Self, DdpError> {
        let (group, hook) = (&setup.group, setup.hook);
        if reduction == Reduction::Tree && hook != CommHook::None {
            return Err(DdpError::Backend(
                "NCCL sums in tree order in f32 only: a communication hook needs reduction ring",
            ));
        }
        let number = ordinal(device).ok_or_else(|| {
            DdpError::Device("NCCL needs a CUDA device, and the model is on another kind".into())
        })?;
        let communicator = match group.world() {
            1 => None,
            _ => Some(Communicator::join(group, number, &NcclOptions::default())?),
        };
        Ok(Self {
            communicator,
            tree: setup.tree.clone(),
            reduction,
            hook,
            device: device.clone().inner(),
            open: Mutex::default(),
        })
    }

    fn open(&self) -> MutexGuard<'_, Vec<Ticket>> {
        self.open
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
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
}

impl DeviceGroup for Cuda {
    fn device(&self) -> &Device {
        &self.device
    }

    fn computed(&self, tensor: Tensor<1>) -> Tensor<1> {
        // Each operation is its own kernel unless the program enables Burn's fusion. A device failure is reported when its
        // memory is requested.
        let _ = self.device.flush();
        tensor
    }

    fn all_reduce(
        &self,
        call: DeviceCall,
        blocks: Vec<Tensor<1>>,
    ) -> Result<Box<dyn DeviceTicket>, DdpError> {
        let len = blocks.first().map_or(0, |block| block.dims()[0]);
        let Some(communicator) = &self.communicator else {
            let sum = self.whole(blocks);
            return Ok(Box::new(Sent {
                sum,
                len,
                ticket: None,
            }));
        };
        let (float, sum) = match self.hook {
            CommHook::Bf16Compress => (Float::Bf16, self.whole(blocks).cast(DType::BF16)),
            CommHook::Fp16Compress => (Float::F16, self.whole(blocks).cast(DType::F16)),
            _ => (Float::F32, self.whole(blocks)),
        };
        let place = Place::of(&sum)?;
        let before = match communicator.has_context_events() {
            true => Before::Context,
            false => place.fence(),
        };
        let label = Label {
            bucket: Some(call.bucket as u32),
            step: call.step,
        };
        let buffer = place.into_buffer();
        let ticket = match self.reduction {
            Reduction::Ring => communicator.all_reduce(buffer, float, before, label),
            Reduction::Tree => {
                let sum = TreeSum {
                    tree: self.tree.clone(),
                    len,
                    stride: len,
                };
                communicator.reduce_in_tree_order(buffer, sum, before, label)
            }
        };
        let mut open = self.open();
        open.retain(|ticket| !matches!(ticket.poll(), Some(Ok(_))));
        open.push(ticket.clone());
        Ok(Box::new(Sent {
            sum,
            len,
            ticket: Some(ticket),
        }))
    }

    fn synchronize(&self) -> Result<(), DdpError> {
        let open = std::mem::take(&mut *self.open());
        for ticket in open {
            ticket.wait()?;
        }
        Ok(())
    }
}

/// A call in flight, with its memory.
struct Sent {
    sum: Tensor<1>,
    len: usize,
    ticket: Option<Ticket>,
}

impl DeviceTicket for Sent {
    fn result(&self) -> Result<Tensor<1>, DdpError> {
        if let Some(ticket) = &self.ticket {
            ticket.order_after()?;
        }
        let sum = self.sum.clone().cast(DType::F32);
        Ok(match sum.dims()[0] == self.len {
            true => sum,
            false => sum.narrow(0, 0, self.len),
        })
    }

    fn times(&self) -> Option<(Instant, Instant)> {
        let timing = self.ticket.as_ref()?.wait().ok()?;
        Some((timing.started, timing.finished))
    }
}

/// The address of a tensor.
struct Place {
    pointer: u64,
    bytes: usize,
    tensor: CubeTensor,
    /// Keeps the memory from being moved or given to another tensor.
    resource: Box<dyn std::any::Any + Send>,
}

impl Place {
    /// The place of a tensor of one dimension. When this returns, the tensor's kernels are submitted to the driver but may
    /// not have run.
    ///
    /// *Errors*: the tensor could not be computed.
    fn of(tensor: &Tensor<1>) -> Result<Self, DdpError> {
        let DispatchTensorKind::Cube(BackendTensor::Float(inner)) =
            tensor.clone().into_dispatch().kind
        else {
            return Err(DdpError::Device("the bucket is on no CUDA device".into()));
        };
        let tensor = Resolve::<CubeBackend>::resolve(inner);
        if !tensor.is_contiguous() {
            return Err(DdpError::Device("a bucket's memory has gaps".into()));
        }
        let handle = tensor.handle.clone();
        let resource = tensor
            .client
            .get_resource::<<CudaRuntime as Runtime>::Server>(handle);
        let resource = resource
            .map_err(|error| DdpError::Device(format!("a bucket has no address: {error:?}")))?;
        let memory = resource.resource();
        Ok(Self {
            pointer: memory.ptr,
            bytes: memory.size as usize,
            tensor,
            resource: Box::new(resource),
        })
    }

    /// For drivers that cannot wait for a whole context: the NCCL thread waits on the host.
    fn fence(&self) -> Before {
        let done = self.tensor.client.sync();
        Before::Fence(Box::new(move || {
            let done = burn::tensor::read_sync(done);
            done.map_err(|error| format!("{error:?}"))
        }))
    }

    fn into_buffer(self) -> DeviceBuffer {
        DeviceBuffer {
            ptr: self.pointer,
            bytes: self.bytes,
            // Keeps the tensor as well: an operation may write in place to memory that only one tensor owns.
            keep: Box::new((self.resource, self.tensor)),
        }
    }
}

/// Resolves a tensor whose operations may still be queued into one that has memory.
///
/// Burn's feature `fusion`, which any crate of a program may enable, decides which of the two types its tensors have.
trait Resolve<B> {
    fn resolve(self) -> CubeTensor;
}

impl<B> Resolve<B> for CubeTensor {
    fn resolve(self) -> CubeTensor {
        self
    }
}

impl<B, R> Resolve<B> for FusionTensor<R>
where
    R: FusionRuntime,
    B: FusionBackend<FusionRuntime = R> + BackendTypes<FloatTensorPrimitive = CubeTensor>,
{
    fn resolve(self) -> CubeTensor {
        self.client.clone().resolve_tensor_float::<B>(self)
    }
}

impl From<NcclError> for DdpError {
    fn from(error: NcclError) -> Self {
        match error {
            NcclError::Group(error) => Self::Collective(error),
            other => Self::Nccl(Box::new(other)),
        }
    }
}
