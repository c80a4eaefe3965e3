//! A call of the communicator: what it works on, when its data is ready, and what it is called in reports.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use paceline_collective::Tree;

/// Memory of the device that a communicator works on, and whatever keeps it from being freed or reused.
pub struct DeviceBuffer {
    /// Address of the first byte, as the driver counts (a `CUdeviceptr`) in the primary context of the communicator's device.
    pub ptr: u64,
    /// Length.
    ///
    /// *Units*: bytes.
    pub bytes: usize,
    /// Dropped when the call is over, before its ticket says so, on the thread that calls NCCL. Never dropped when a call
    /// cannot be ended: the device may then still write there. Dropping it must not wait for the device, as `cuMemFree` does:
    /// what is behind it could then not be given up. A handle of a pool's memory does not wait.
    pub keep: Box<dyn Any + Send>,
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("ptr", &format_args!("{:#x}", self.ptr))
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// The numbers in a buffer that is summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Float {
    /// IEEE single precision.
    F32,
    /// The upper half of a single.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl Float {
    /// Size of one number.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// When the data of a call is ready.
pub enum Before {
    /// It is already.
    Now,
    /// When all work is done that the device's primary context has been given so far, on any stream: the device waits,
    /// the host does not. Work that this process has only queued for itself must have been given to the driver first.
    ///
    /// *Errors*: needs a driver for CUDA 12.5 or newer, see [`has_context_events`](crate::Communicator::has_context_events).
    Context,
    /// When this returns; it is called on the thread that calls NCCL, and calls behind it wait.
    Fence(Box<dyn FnOnce() -> Result<(), String> + Send>),
}

impl fmt::Debug for Before {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Now => "Now",
            Self::Context => "Context",
            Self::Fence(_) => "Fence",
        })
    }
}

/// What a call belongs to, for reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Label {
    /// The gradient bucket.
    pub bucket: Option<u32>,
    /// The training step, 0 outside training.
    pub step: u64,
}

/// A sum over the shard tree, see [`reduce_in_tree_order`](crate::Communicator::reduce_in_tree_order).
#[derive(Debug, Clone)]
pub struct TreeSum {
    /// The order, and how many blocks each rank brings.
    pub tree: Arc<Tree>,
    /// Numbers of one block.
    pub len: usize,
    /// From the first number of a block to the first of the next; at least `len`.
    pub stride: usize,
}

/// What a call does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// All ranks get the sum.
    AllReduce,
    /// All ranks get the root's data.
    Broadcast,
    /// All ranks get all ranks' data.
    AllGather,
    /// All ranks get the sum, added in the order of a tree.
    TreeSum,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllReduce => "all-reduce",
            Self::Broadcast => "broadcast",
            Self::AllGather => "all-gather",
            Self::TreeSum => "sum in the tree's order",
        })
    }
}

/// A call in words: `all-reduce #12 (bucket 3, step 812)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallName {
    /// What it does.
    pub kind: Kind,
    /// The communicator's running number, from 1.
    pub seq: u64,
    /// What it belongs to.
    pub label: Label,
}

impl fmt::Display for CallName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.kind, self.seq)?;
        match (self.label.bucket, self.label.step) {
            (Some(bucket), 0) => write!(f, " (bucket {bucket})"),
            (Some(bucket), step) => write!(f, " (bucket {bucket}, step {step})"),
            (None, 0) => Ok(()),
            (None, step) => write!(f, " (step {step})"),
        }
    }
}
