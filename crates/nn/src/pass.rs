//! How the blocks of a model run: whether they are recomputed, and where their random numbers come from.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use crate::failure::{BoxError, Failure};
use crate::linear::{Left, WeightGradients};
use crate::supply::Supply;
use crate::turn::Turn;

/// Which [`Block`](crate::Block)s compute their forward pass again during the backward pass.
///
/// *Numerics*: the same bits in every variant.
///
/// *Memory*: a recomputed block keeps its input until the backward pass, and the values inside it only while it runs. *Cost*:
/// one more forward pass of each recomputed block.
///
/// *Source*: Chen et al. 2016, "Training deep nets with sublinear memory cost"; `torch.utils.checkpoint`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// None of them.
    #[default]
    None,
    /// All of them.
    Blocks,
    /// Those whose index is a multiple of this number, as torchtitan's selective activation checkpointing does.
    Every(NonZeroUsize),
    /// None, but in every block Burn's own gradient checkpointing recomputes operations that are limited by memory, such as
    /// activation functions. What runs on the CPU kernels of this crate's own keeps its inputs.
    Burn,
}

impl Recompute {
    pub(crate) fn includes(self, index: usize) -> bool {
        match self {
            Self::None | Self::Burn => false,
            Self::Blocks => true,
            Self::Every(count) => index.is_multiple_of(count.get()),
        }
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Blocks => f.write_str("blocks"),
            Self::Every(count) => count.fmt(f),
            Self::Burn => f.write_str("burn"),
        }
    }
}

/// A text that is no [`Recompute`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("recompute: expected none, blocks, burn or a number from 1, got {0:?}")]
pub struct RecomputeParseError(String);

impl FromStr for Recompute {
    type Err = RecomputeParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(Self::None),
            "blocks" => Ok(Self::Blocks),
            "burn" => Ok(Self::Burn),
            number => number
                .parse()
                .map(Self::Every)
                .map_err(|_| RecomputeParseError(text.to_string())),
        }
    }
}

/// One forward and backward pass of a model, on one thread: the policy, the random numbers and the first failure of its
/// blocks. `Ddp` enters one for each shard; a program without it enters its own.
///
/// Randomness belongs to blocks. Before a block runs, it seeds its devices from the pass's seed, its own index and the number
/// of times it has run in the pass. Dropout therefore has the same bits with and without recomputation, and wherever the block
/// runs. Without a seed, blocks that are not recomputed draw from the device as other code does.
///
/// A clone is the same pass.
///
/// *Example*:
/// ```
/// use burn::nn::{Dropout, DropoutConfig};
/// use burn::tensor::{Device, Tensor};
/// use paceline_nn::{Block, Pass, Recompute};
///
/// let device = Device::flex().autodiff();
/// let block = Block::new(0, DropoutConfig::new(0.5).init());
/// let gradient = |recompute| {
///     let input = Tensor::<2>::ones([4, 4], &device).require_grad();
///     let pass = Pass::new(recompute).with_seed(7);
///     pass.enter(|| {
///         let output = block.forward(input.clone(), Dropout::forward);
///         input.grad(&output.sum().backward()).unwrap().into_data()
///     })
/// };
/// assert_eq!(gradient(Recompute::None), gradient(Recompute::Blocks));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Pass {
    recompute: Recompute,
    failure: Failure,
    seeds: Arc<Mutex<Seeds>>,
    supply: Option<Weak<dyn Supply>>,
    left: Option<Left>,
    run: BlockRun,
    takes_turns: bool,
}

/// How the block runs that this pass is in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum BlockRun {
    /// Once, on the tape.
    #[default]
    Once,
    /// Off the tape, before it is recomputed.
    First,
    /// On a tape of its own, for gradients: nobody reads what it returns.
    Second,
}

#[derive(Debug, Default)]
struct Seeds {
    base: Option<u64>,
    has_run: bool,
    /// How often each block has run.
    runs: HashMap<usize, u64>,
}

/// Counts the calls of [`Pass::seed_of_parts`]; no block has this index.
const PARTS: usize = usize::MAX - 1;

thread_local! {
    static CURRENT: RefCell<Option<Pass>> = const { RefCell::new(None) };
}

impl Pass {
    /// A pass without a seed.
    pub fn new(recompute: Recompute) -> Self {
        Self {
            recompute,
            ..Self::default()
        }
    }

    /// A pass whose failure panics, because no caller takes it.
    pub(crate) fn unheard() -> Self {
        Self {
            failure: Failure::unheard(),
            ..Self::default()
        }
    }

    /// The same pass, with the seed of its blocks.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        self.restart(seed);
        self
    }

    /// The same pass, whose blocks get parameters from `supply`. The caller keeps `supply` until the end of the backward pass: the
    /// tape does not, because Burn may free a dropped tape much later.
    ///
    /// # Panics
    ///
    /// Blocks panic if `supply` is gone.
    #[must_use]
    pub fn with_supply<S: Supply + 'static>(self, supply: &Arc<S>) -> Self {
        let supply: Weak<S> = Arc::downgrade(supply);
        Self {
            supply: Some(supply),
            ..self
        }
    }

    /// The same pass, which leaves gradients of weights to `later`. Where blocks get parameters from a [`Supply`], it does not.
    #[must_use]
    pub fn deferring(self, later: &WeightGradients) -> Self {
        Self {
            left: Some(later.left().clone()),
            ..self
        }
    }

    /// The same pass, whose blocks take a [`Turn`](crate::Turn) for each run, because other threads of this process draw random
    /// numbers too.
    #[must_use]
    pub fn in_turns(self) -> Self {
        Self {
            takes_turns: true,
            ..self
        }
    }

    /// Sets the seed for what follows, for example for the next micro-batch.
    pub fn restart(&self, seed: u64) {
        let mut seeds = self.seeds();
        seeds.base = Some(seed);
        seeds.runs.clear();
    }

    /// Whether a block has run in this pass. It has then left the device's random numbers at a place that depends on the
    /// policy.
    pub fn has_run_blocks(&self) -> bool {
        self.seeds().has_run
    }

    /// Runs `f` in this pass: blocks that run on this thread find it.
    pub fn enter<R>(&self, f: impl FnOnce() -> R) -> R {
        struct Restore(Option<Pass>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.with_borrow_mut(|current| *current = self.0.take());
            }
        }
        let outer = CURRENT.with_borrow_mut(|current| current.replace(self.clone()));
        let _restore = Restore(outer);
        f()
    }

    /// The pass that this thread is in.
    pub fn current() -> Option<Self> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// Where closures of this pass leave their first error.
    pub fn failure(&self) -> &Failure {
        &self.failure
    }

    /// Ends the pass.
    ///
    /// *Errors*: the first failure. The gradients of the pass are then of no use.
    pub fn finish(&self) -> Result<(), BoxError> {
        self.failure.take().map_or(Ok(()), Err)
    }

    pub(crate) fn recompute(&self) -> Recompute {
        self.recompute
    }

    pub(crate) fn supply(&self) -> Option<&Weak<dyn Supply>> {
        self.supply.as_ref()
    }

    pub(crate) fn left(&self) -> Option<Left> {
        self.left.clone().filter(|_| self.supply.is_none())
    }

    /// Whether nothing in this pass is on a tape: the forward pass of a block that will be recomputed.
    pub(crate) fn is_off_tape(&self) -> bool {
        self.run == BlockRun::First
    }

    /// Whether only gradients are wanted.
    pub(crate) fn is_second_run(&self) -> bool {
        self.run == BlockRun::Second
    }

    /// Waits for a turn, if blocks of this pass take turns.
    pub(crate) fn turn(&self) -> Option<Turn> {
        self.takes_turns.then(Turn::take)
    }

    /// The seed of the next run of block `index`.
    pub(crate) fn next_seed(&self, index: usize) -> Option<u64> {
        let mut seeds = self.seeds();
        seeds.has_run = true;
        let runs = seeds.runs.entry(index).or_default();
        let run = *runs;
        *runs += 1;
        seeds.base.map(|base| mix(base, index as u64, run))
    }

    /// A seed for random numbers of parts that may be computed anywhere, a new one for each call; `None` if the pass has no
    /// seed. [`mix`] it with the part's number.
    pub fn seed_of_parts(&self) -> Option<u64> {
        self.next_seed(PARTS)
    }

    /// The pass inside a block: its blocks are seeded from the block's seed.
    pub(crate) fn inside(&self, seed: Option<u64>, run: BlockRun) -> Self {
        Self {
            recompute: self.recompute,
            failure: self.failure.clone(),
            seeds: Arc::new(Mutex::new(Seeds {
                base: seed,
                ..Seeds::default()
            })),
            supply: self.supply.clone(),
            left: self.left.clone(),
            run,
            takes_turns: self.takes_turns,
        }
    }

    fn seeds(&self) -> MutexGuard<'_, Seeds> {
        self.seeds.lock().expect("no holder panics")
    }
}

/// A seed that differs for every `(seed, a, b)`: SplitMix64's finalizer over a simple combination.
pub fn mix(seed: u64, a: u64, b: u64) -> u64 {
    let mut z = seed
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(a.wrapping_mul(0xd1b5_4a32_d192_ed03))
        .wrapping_add(b.wrapping_mul(0x8cb9_2ba7_2f3d_8dd7));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
