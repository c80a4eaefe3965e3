//! Tensor parallelism: matrices cut into parts that several ranks compute at the same time.
//!
//! The number of parts is a constant of the job, as the number of shards is. Each rank of a group has a contiguous range of the
//! parts, and one rank may have them all. Every part is computed by itself, and what the parts make together is added along one
//! fixed binary tree, so **the bits depend on the number of parts and not on where they are**.
//!
//! ```text
//!              copy            column       row            reduce
//!  x ──────────┬─> part 0 ──> [W_0] ──> y_0 ──> [V_0] ──┬──> sum ──> z       forward
//!              └─> part 1 ──> [W_1] ──> y_1 ──> [V_1] ──┘
//!
//!  sum of the parts' gradients   <──────────────────────  copies of z's      backward
//! ```
//!
//! - [`TensorParallel`]: the parts, where they are, and the operations between them.
//! - [`ColumnParallelLinear`], [`RowParallelLinear`], [`ParallelEmbedding`]: layers cut into parts, made from ordinary ones.
//! - [`cross_entropy`](TensorParallel::cross_entropy), [`argmax`](TensorParallel::argmax): of scores whose classes are cut into
//!   parts.
//! - [`ParallelGpt`]: the language model of [`paceline_nn::gpt`] with all of these.
//!
//! *Source*: Shoeybi et al. 2019, "Megatron-LM: training multi-billion parameter language models using model parallelism"; for
//! sequence parallelism Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models".

mod exchange;
mod gpt;
mod layers;
mod operations;
mod placement;
mod sequence;
mod vocabulary;

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use paceline_collective::{ProcessGroup, Tree};
use paceline_ddp::{Ddp, DdpError, DeviceExchange};

pub use gpt::{ParallelGpt, ParallelGptBlock, ParallelGptEmbedding};
pub use layers::{ColumnParallelLinear, ParallelEmbedding, RowParallelLinear};
pub use placement::TensorPlacement;

/// The parts of a job's tensors, and the ranks that have them.
///
/// Rank `r` of the group has the parts [`Tree::range`]`(r)` of the tree over all parts: contiguous, as even as possible.
///
/// Its operations run on one tensor for each part of this rank. They are functions of Burn's autodiff tape: the backward pass
/// runs the opposite operation. All ranks of the group must run the same operations in the same order.
///
/// *Numerics*: sums are in f32, or f64 for tensors of f64, along the tree over the parts; the result is rounded once to the tensors'
/// type. Their bits are the same wherever the parts are.
///
/// *Errors*: Burn's functions return none. A failed collective is the failure of the [`Pass`](paceline_nn::Pass) of the
/// thread, which `Ddp::step` returns as the step's error; the operation gives zeros, and later ones of the pass send nothing.
/// Outside of a pass it panics.
///
/// *Example*: one rank that has both parts
/// ```
/// use burn::tensor::{Device, Tensor};
/// use paceline_collective::{GroupOptions, ProcessGroup};
/// use paceline_split::tensor::TensorParallel;
///
/// let group = ProcessGroup::local(1, &GroupOptions::default())?.remove(0);
/// let tp = TensorParallel::new(group, 2).unwrap();
/// let parts = tp.copy(Tensor::<1>::from_floats([1.0, 2.0], &Device::flex()));
/// assert_eq!(tp.reduce(parts).into_data().try_to_vec::<f32>().unwrap(), [2.0, 4.0]);
/// # Ok::<(), paceline_collective::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TensorParallel {
    group: ProcessGroup,
    tree: Arc<Tree>,
    cuts_sequence: bool,
    /// Shared by the clones in a model's layers.
    device: Arc<OnceLock<Arc<dyn DeviceExchange>>>,
}

/// A number of parts that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartsError {
    /// Fewer parts than ranks, or far too many.
    #[error("{parts} parts of tensors cannot be dealt to {ranks} ranks")]
    Ranks {
        /// Number of parts.
        parts: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// A size that the parts do not divide.
    #[error("{parts} parts do not divide {size} {what}")]
    Uneven {
        /// Number of parts.
        parts: usize,
        /// The size.
        size: usize,
        /// What it counts.
        what: &'static str,
    },
    /// Fewer things than parts.
    #[error("{size} {what} are too few for {parts} parts")]
    Few {
        /// Number of parts.
        parts: usize,
        /// The size.
        size: usize,
        /// What it counts.
        what: &'static str,
    },
}

impl TensorParallel {
    /// Deals `parts` parts to the ranks of `group`: the group of a mesh's dimension `tp`, see
    /// [`DeviceMesh`](paceline_collective::DeviceMesh).
    ///
    /// *Errors*: fewer parts than ranks.
    pub fn new(group: ProcessGroup, parts: usize) -> Result<Self, PartsError> {
        let ranks = group.world();
        let tree = Tree::split(parts, ranks).map_err(|_| PartsError::Ranks { parts, ranks })?;
        Ok(Self {
            group,
            tree,
            cuts_sequence: false,
            device: Arc::default(),
        })
    }

    /// From now on values between the parts stay on their device where `ddp` leaves gradients there (NCCL on CUDA devices), in this
    /// and its clones, so in models that have one. All ranks of the group call it, before or between steps. Without it, and for
    /// tensors of f64, they go through the host's memory.
    ///
    /// *Numerics*: the same bits.
    ///
    /// *Blocks*, *Errors*: those of [`Ddp::device_exchange`].
    pub fn connect(&self, ddp: &Ddp) -> Result<(), DdpError> {
        if self.group.world() > 1
            && self.device.get().is_none()
            && let Some(exchange) = ddp.device_exchange(&self.group, &self.tree)?
        {
            // Nobody else has set it: the ranks would be out of step.
            self.device.get_or_init(|| exchange);
        }
        Ok(())
    }

    /// The same, with sequence parallelism: between the matrices each part has its share of every sequence, so norms, dropout
    /// and residuals are computed and kept once instead of on every rank.
    ///
    /// *Numerics*: other bits than without, again the same wherever the parts are.
    ///
    /// *Memory*: the activations between the matrices are divided by the number of ranks. *Cost*: the bytes on the wire stay the
    /// same, because an all-reduce is a reduce-scatter and an all-gather.
    #[must_use]
    pub fn with_sequence_parallel(self) -> Self {
        Self {
            cuts_sequence: true,
            ..self
        }
    }

    /// Number of parts, on all ranks together.
    pub fn parts(&self) -> usize {
        self.tree.leaves()
    }

    /// The parts that this rank has.
    pub fn local(&self) -> Range<usize> {
        self.tree.range(self.group.rank())
    }

    /// The ranks that share the parts.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// The share of part `part` in `total` things: contiguous; the first parts get one more.
    pub fn share(&self, total: usize, part: usize) -> Range<usize> {
        let (each, more) = (total / self.parts(), total % self.parts());
        let start = part * each + part.min(more);
        start..start + each + usize::from(part < more)
    }

    /// The share of all parts of `rank`.
    fn share_of_rank(&self, total: usize, rank: usize) -> Range<usize> {
        let parts = self.tree.range(rank);
        self.share(total, parts.start).start..self.share(total, parts.end - 1).end
    }

    /// *Errors*: with sequence parallelism, a length that is no multiple of the parts.
    fn divides_sequence(&self, length: usize) -> Result<(), PartsError> {
        match self.cuts_sequence {
            true => self.divides(length, "places of a sequence"),
            false => Ok(()),
        }
    }

    /// *Errors*: `size` is no multiple of the parts.
    fn divides(&self, size: usize, what: &'static str) -> Result<(), PartsError> {
        let parts = self.parts();
        match size.is_multiple_of(parts) {
            true => Ok(()),
            false => Err(PartsError::Uneven { parts, size, what }),
        }
    }
}
