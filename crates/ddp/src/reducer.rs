//! The gradients of one step: from the hooks into buckets, across the ranks, and back as averages.
//!
//! There is one [`Reducer`] for each kind of memory that holds gradients:
//!
//! ```text
//! HostReducer    ordinary memory   hook -> bucket in host memory ------------------------> all_reduce
//! StagedReducer  any other device  hook -> kept until its bucket is complete
//!                                    staging thread: one read-back -> bucket, as above --> all_reduce
//! DeviceReducer  NVIDIA, NCCL      hook -> bucket on the device -------------------------> NCCL
//!                f64 parameters    hook -> bucket of f64 tensors -------------------------> all_reduce
//! ```
//!
//! The first two differ only in the thread that writes into the bucket; the same gradients give the same bytes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use burn::tensor::DType;
use paceline_collective::{ProcessGroup, Tree};

use crate::buffer::Value;
use crate::comm_hook::CommHook;
use crate::error::DdpError;
use crate::hook::GradientSink;
use crate::plan::BucketPlan;
use crate::record::Recorder;
use crate::timeline::BucketTiming;
use crate::zero::Shares;

mod blocks;
mod compress;
mod host;
mod in_double;
mod means;
#[cfg(any(feature = "cuda", test))]
mod nccl;
mod on_device;
mod pool;
mod sent;
mod staged;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use blocks::{IN_FLIGHT, LATE};
pub(crate) use host::HostReducer;
pub(crate) use in_double::InDouble;
pub(crate) use means::{HostMeans, Means};
#[cfg(any(feature = "cuda", test))]
pub(crate) use nccl::{Lent, NcclDevice, NcclGroup, NcclMemory};
pub use on_device::{Arrival, DeviceExchange};
pub(crate) use on_device::{DeviceCall, DeviceGroup, DevicePort, DeviceReducer, DeviceTicket, cut};
pub(crate) use staged::StagedReducer;

/// Collects gradients shard by shard and reduces each bucket as soon as it is complete.
pub(crate) trait Reducer: GradientSink {
    /// Takes the memory of all buckets that share it with none. Without this call each takes it when its first gradient comes.
    ///
    /// *Errors*: no memory.
    fn reserve(&self) -> Result<(), DdpError>;

    /// Handles the next event of the step, in the compute thread's order.
    fn apply(&self, event: Event);

    /// The number of buckets sent in this step.
    fn launched(&self) -> usize;

    /// Waits for every bucket in launch order. Does not wait for gradients that stay on their device: later kernels wait for
    /// them.
    fn finish(&self) -> Result<Finished, DdpError>;

    /// The result of a step whose gradients all came, but whose tail bucket did not: `tail` is the same from another rank. `None`
    /// if gradients are missing too.
    fn finish_with(&self, tail: Vec<f32>) -> Option<Finished> {
        let _ = tail;
        None
    }

    /// Whether the buckets are in host memory; otherwise they are tensors.
    fn is_on_host(&self) -> bool {
        true
    }

    /// The same for other buckets, or a sharded optimizer, if it continues with what this one has of its device.
    fn with_setup(&self, setup: &Setup) -> Option<Arc<dyn Reducer>> {
        let _ = setup;
        None
    }

    /// The way of other groups of this rank to the device, if gradients stay there.
    fn port(&self) -> Option<&dyn DevicePort> {
        None
    }

    /// Waits for all calls of earlier steps and returns their result.
    fn synchronize(&self) -> Result<(), DdpError> {
        Ok(())
    }

    /// Ends all calls on the device, so that the ranks that are left can begin others. A step that lacks only its tail can still
    /// be [finished](Self::finish_with).
    ///
    /// *Errors*: the device cannot be used any more.
    fn abort(&self) -> Result<(), DdpError> {
        Ok(())
    }

    /// Shows `with` what the communication hook keeps of a parameter between two steps. Not called if it keeps nothing, or if
    /// another rank keeps it.
    fn kept(&self, kept: Kept, index: usize, with: &mut dyn FnMut(&mut [f32])) {
        let _ = (kept, index, with);
    }

    /// Sends this rank's slices of a bucket's parameters to all ranks, between two steps. Only with [`Setup::shares`].
    ///
    /// The values are by parameter, from the first that this rank owns, in the memory that [`is_on_host`](Self::is_on_host)
    /// names.
    fn send_weights(&self, bucket: usize, own: &HashMap<usize, Value>) -> Result<(), DdpError>;

    /// A bucket's parameters from all ranks, by index.
    fn receive_weights(&self, bucket: usize) -> Result<Gathered, DdpError>;
}

/// A bucket's parameters, by index.
pub(crate) struct Gathered {
    pub(crate) values: Vec<(usize, Value)>,
    pub(crate) timing: BucketTiming,
}

/// What communication hooks keep of a parameter from step to step.
#[derive(Clone, Copy)]
pub(crate) enum Kept {
    /// What has not been sent of a shard's gradient, per unit of weight; on the shard's rank.
    Residual { shard: usize },
    /// PowerSGD's `Q`; the same on every rank.
    Factor,
    /// The outer optimizer's momentum; the same on every rank.
    Momentum,
}

/// The ingredients of a reducer.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) group: ProcessGroup,
    pub(crate) plan: Arc<BucketPlan>,
    pub(crate) tree: Arc<Tree>,
    pub(crate) hook: CommHook,
    /// The type that gradients are summed in: f64 if any parameter is f64, otherwise f32.
    pub(crate) dtype: DType,
    /// Shapes of the parameters, each with its place in the whole model.
    pub(crate) shapes: Arc<[(usize, Vec<usize>)]>,
    /// The ranks' slices of the gradients, if each rank gets only its own.
    pub(crate) shares: Option<Arc<Shares>>,
    /// Whether a step's result includes the [tail](Finished::tail), and gradients are kept if it does not come.
    pub(crate) keeps_tail: bool,
    /// Where digests of gradients go, if they are recorded.
    pub(crate) recorder: Option<Arc<Recorder>>,
}

/// An event on the compute thread.
pub(crate) enum Event {
    /// A step starts with empty buckets. The number that ranks compare also counts the steps that were undone, so that a rank
    /// that undid one alone is noticed.
    Step { step: u64, undone: u64 },
    /// This shard starts.
    Shard(usize),
    /// A backward pass starts.
    Micro(Micro),
    /// The backward pass has ended.
    MicroEnd,
    /// Adds to one of the sums that travel with the step.
    Extra { slot: usize, value: f32 },
    /// The shard ends, with these running statistics in plan order.
    ShardEnd(Vec<Vec<f32>>),
    /// The step has succeeded: what the communication hook keeps takes effect.
    Commit,
    /// No more gradients come for the buckets before this one, on any rank. Where parameters are sharded, buckets leave no
    /// earlier.
    Open(usize),
}

/// The backward pass over one micro-batch.
#[derive(Clone, Copy)]
pub(crate) struct Micro {
    /// Samples or tokens, as the program counts them.
    pub(crate) weight: f32,
    /// The factor of its gradients.
    pub(crate) factor: f32,
    /// Whether its weight counts: it is the micro-batch's first backward pass.
    pub(crate) is_first: bool,
    /// Whether it is the shard's last one for the parameters that it reaches.
    pub(crate) is_last: bool,
    /// Whether it is the shard's last one for all parameters, and gradients come in the order of the plan: after one, none comes
    /// for a parameter before it.
    pub(crate) is_ordered: bool,
}

/// The results of a step.
pub(crate) struct Finished {
    pub(crate) means: Means,
    /// By parameter: whether any rank used it.
    pub(crate) used: Vec<bool>,
    /// Averages of the running statistics in plan order; `None` if no shard had a sample.
    pub(crate) statistics: Option<Vec<Vec<f32>>>,
    /// Sums over all shards.
    pub(crate) extras: Vec<f32>,
    pub(crate) timings: Vec<BucketTiming>,
    /// The tail bucket as it came, with [`Setup::keeps_tail`].
    pub(crate) tail: Vec<f32>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while holding the lock is our own bug; its state is not used again.
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}
