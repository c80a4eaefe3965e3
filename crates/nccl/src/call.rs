//! A call of the communicator: its buffer, the readiness of its data, and its name in reports.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use paceline_collective::Tree;

/// Device memory for a call, with the owner that keeps it from being freed or reused.
pub struct DeviceBuffer {
    /// Address of the first byte: a `CUdeviceptr` in the primary context of the communicator's device.
    pub ptr: u64,
    /// Length.
    ///
    /// *Units*: bytes.
    pub bytes: usize,
    /// Dropped on the NCCL thread after the call, before its ticket is settled. Never dropped if the call cannot be ended,
    /// because the device may still write there. The drop must not wait for the device, as `cuMemFree` does: the thread could
    /// then not abort later calls. A handle to pooled memory does not wait.
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

/// The number type of a buffer to sum, with its `ncclDataType_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Float {
    /// IEEE single precision.
    F32 = 7,
    /// The upper half of a single.
    Bf16 = 9,
    /// IEEE half precision.
    F16 = 6,
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
    /// It is ready.
    Now,
    /// After all work submitted so far to the device's primary context, on any stream: the device waits, the host does not.
    /// Work queued within this process must be submitted to the driver first.
    ///
    /// *Errors*: needs a driver for CUDA 12.5 or newer, see [`has_context_events`](crate::Communicator::has_context_events).
    Context,
    /// When this returns. It runs on the NCCL thread, and later calls wait for it.
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

/// The origin of a call, for reports.
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
    /// The order, and the number of blocks of each rank.
    pub tree: Arc<Tree>,
    /// Length of a block, in numbers.
    pub len: usize,
    /// Distance between the starts of two blocks, in numbers; at least `len`.
    pub stride: usize,
    /// The numbers of the sum that each rank gets, in rank order, in place; `None` if every rank gets all of it.
    pub counts: Option<Arc<[usize]>>,
}

/// The operation of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// All ranks get the sum.
    AllReduce,
    /// All ranks get the largest of all ranks' numbers.
    Max,
    /// Each rank gets its part of the sum.
    ReduceScatter,
    /// All ranks get all ranks' data.
    AllGather,
    /// All ranks get the sum, or their parts of it, added in the order of a tree.
    TreeSum,
    /// A rank gets this rank's data.
    Send,
    /// This rank gets a rank's data.
    Receive,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllReduce => "all-reduce",
            Self::Max => "maximum",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllGather => "all-gather",
            Self::TreeSum => "sum in the tree's order",
            Self::Send => "send",
            Self::Receive => "receive",
        })
    }
}

/// The name of a call in messages: `all-reduce #12 (bucket 3, step 812)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallName {
    /// The operation.
    pub kind: Kind,
    /// The communicator's running number, from 1.
    pub seq: u64,
    /// Its origin.
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
