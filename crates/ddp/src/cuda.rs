//! Addresses of CUDA memory: how NCCL reaches Burn's tensors on NVIDIA GPUs.
//!
//! The host never waits here. Once a tensor's address is known, its kernels have been submitted to the driver. NCCL's stream
//! waits for them on the device, and later kernels that use the result wait for NCCL's stream.

use burn::backend::{BackendTensor, BackendTypes, CubeDevice, DispatchDevice, DispatchTensorKind};
use burn::tensor::{Device, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_fusion::{FusionBackend, FusionRuntime, FusionTensor};
use cubecl_cuda::CudaRuntime;
use cubecl_runtime::runtime::Runtime;
use paceline_nccl::{Before, DeviceBuffer};

use crate::error::DdpError;
use crate::reducer::{Lent, NcclMemory};

/// The memory of one rank's GPU.
pub(crate) struct Cuda;

/// The ordinal of a CUDA device in this process; `None` for any other device.
pub(crate) fn ordinal(device: &Device) -> Option<usize> {
    match device.clone().inner().as_dispatch() {
        DispatchDevice::Cube(CubeDevice::Cuda(device)) => Some(device.index),
        _ => None,
    }
}

impl NcclMemory for Cuda {
    /// When this returns, the tensor's kernels are submitted to the driver but may not have run.
    fn lend(&self, tensor: Tensor<1>, has_context_events: bool) -> Result<Lent, DdpError> {
        let DispatchTensorKind::Cube(BackendTensor::Float(inner)) =
            tensor.clone().into_dispatch().kind
        else {
            return Err(DdpError::Device("the bucket is on no CUDA device".into()));
        };
        let inner = Resolve::<CubeBackend>::resolve(inner);
        if !inner.is_contiguous() {
            return Err(DdpError::Device("a bucket's memory has gaps".into()));
        }
        let resource = inner
            .client
            .get_resource::<<CudaRuntime as Runtime>::Server>(inner.handle.clone());
        let resource = resource
            .map_err(|error| DdpError::Device(format!("a bucket has no address: {error:?}")))?;
        let (ptr, size) = (resource.resource().ptr, resource.resource().size as usize);
        let bytes = tensor.dims()[0] * tensor.dtype().size();
        if bytes > size {
            return Err(DdpError::Device(format!(
                "a bucket of {bytes} bytes has {size} bytes of memory"
            )));
        }
        let before = match has_context_events {
            true => Before::Context,
            false => fence(&inner),
        };
        let buffer = DeviceBuffer {
            ptr,
            bytes,
            // The resource keeps the memory from being moved or given to another tensor. The tensor is kept as well: an
            // operation may write in place to memory that only one tensor owns.
            keep: Box::new((resource, inner)),
        };
        Ok(Lent {
            buffer,
            before,
            // The result is in the same memory.
            back: Box::new(|_| Ok(tensor)),
        })
    }
}

/// For drivers that cannot wait for a whole context: the NCCL thread waits on the host.
fn fence(tensor: &CubeTensor) -> Before {
    let done = tensor.client.sync();
    Before::Fence(Box::new(move || {
        let done = burn::tensor::read_sync(done);
        done.map_err(|error| format!("{error:?}"))
    }))
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
