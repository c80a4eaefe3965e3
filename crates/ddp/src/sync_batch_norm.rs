//! `SyncBatchNorm`: batch normalisation over the samples of all ranks.

use std::cell::RefCell;
use std::sync::{Arc, Mutex};

use burn::module::{Flag, Module, ModuleVisitor, Param, RunningState};
use burn::nn::BatchNorm;
use burn::tensor::{DType, Tensor};
use paceline_collective::{ProcessGroup, ReduceOp};
use paceline_nn::Pass;
use paceline_nn::tape::{self, Point};

use crate::buffer;
use crate::error::DdpError;

/// Batch normalisation whose mean and variance are those of the samples of all ranks, as PyTorch's `SyncBatchNorm`.
///
/// It has the paths, the parameters and the saved state of a [`BatchNorm`], and is made from one, as with
/// `convert_sync_batchnorm`: declare the field as a `SyncBatchNorm` and initialise it with `.into()`.
///
/// [`Ddp`](crate::Ddp) connects the ranks; outside of a step, and on one rank, it is an ordinary batch norm. It needs one shard
/// per rank ([`DdpOptions::shards`](crate::DdpOptions::shards) is the number of ranks), because the shards of one rank run one
/// after the other. All ranks run it equally often in a step.
///
/// *Shape*: `[batch, features, ...]`, as `BatchNorm`'s; the batch may differ between ranks.
///
/// *Numerics*: mean and variance are exact to f32. Sums over ranks are in f64, in a fixed order, and all ranks get the same
/// bits. The gradients are those of the weighted mean of all ranks' losses.
///
/// *Cost*: an all-reduce of `2 * features + 1` numbers in the forward pass, and one of `2 * features` in the backward pass. Each
/// waits for the device.
///
/// *Errors*: a failed collective becomes the error of the step.
///
/// *Example*:
/// ```
/// use burn::module::Module;
/// use burn::nn::{BatchNormConfig, Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use paceline_ddp::SyncBatchNorm;
///
/// #[derive(Module, Debug)]
/// struct Net {
///     linear: Linear,
///     norm: SyncBatchNorm,
/// }
///
/// let device = Device::flex().autodiff();
/// let net = Net {
///     linear: LinearConfig::new(4, 8).init(&device),
///     norm: BatchNormConfig::new(8).init(&device).into(),
/// };
/// let output = net.norm.forward(net.linear.forward(Tensor::<2>::ones([3, 4], &device)));
/// assert_eq!(output.dims(), [3, 8]);
/// ```
#[derive(Module, Debug)]
pub struct SyncBatchNorm {
    /// The learnable weight.
    pub gamma: Param<Tensor<1>>,
    /// The learnable bias.
    pub beta: Param<Tensor<1>>,
    /// Whether the layer takes part in training.
    pub training: Param<Flag>,
    /// The running mean.
    pub running_mean: RunningState<Tensor<1>>,
    /// The running variance.
    pub running_var: RunningState<Tensor<1>>,
    /// Weight of a batch in the running statistics.
    pub momentum: f64,
    /// Added to the variance, against division by zero.
    pub epsilon: f64,
}

impl From<BatchNorm> for SyncBatchNorm {
    fn from(norm: BatchNorm) -> Self {
        Self {
            gamma: norm.gamma,
            beta: norm.beta,
            training: norm.training,
            running_mean: norm.running_mean,
            running_var: norm.running_var,
            momentum: norm.momentum,
            epsilon: norm.epsilon,
        }
    }
}

impl From<SyncBatchNorm> for BatchNorm {
    fn from(norm: SyncBatchNorm) -> Self {
        Self {
            gamma: norm.gamma,
            beta: norm.beta,
            training: norm.training,
            running_mean: norm.running_mean,
            running_var: norm.running_var,
            momentum: norm.momentum,
            epsilon: norm.epsilon,
        }
    }
}

impl SyncBatchNorm {
    /// Normalises `input`, in training by the statistics of all ranks' samples, otherwise by the running ones.
    ///
    /// *Blocks*: until all ranks run the layer, at most the group's timeout.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let ranks = CURRENT.with_borrow(Clone::clone);
        let is_training = input.device().is_autodiff() && self.training.is_enabled();
        match ranks.filter(|_| is_training) {
            Some(ranks) => self.normalise(input, ranks),
            None => BatchNorm::from(self.clone()).forward(input),
        }
    }

    fn normalise<const D: usize>(&self, input: Tensor<D>, ranks: Arc<Ranks>) -> Tensor<D> {
        let features = self.gamma.dims()[0];
        let rows = Rows::of(tape::plain(input.clone()));
        let statistics = rows.moments();
        let failure = Pass::current().map(|pass| pass.failure().clone());
        let sums = failure
            .as_ref()
            .and_then(|failure| failure.attempt(|| ranks.sum(rows.sums(&statistics)?, 1.0)));
        // After a failure the values do not matter.
        let sums = sums.unwrap_or_else(|| vec![1.0; 2 * features + 1]);
        let count = sums[2 * features];
        let means: Vec<f64> = sums[..features].iter().map(|sum| sum / count).collect();
        let squares = sums[features..2 * features].iter().zip(&means);
        let variances = squares.map(|(sum, mean)| (sum / count - mean * mean).max(0.0));
        let variances: Vec<f64> = variances.collect();
        self.update(&means, &variances);
        let scales = variances
            .iter()
            .map(|var| 1.0 / (var + self.epsilon).sqrt());
        let scale = rows.column(scales);
        let normal = (rows.values.clone() - rows.column(means.into_iter())) * scale.clone();
        let output = rows.shaped(normal.clone());
        let backward = move |gradient: Tensor<D>| {
            let failure = failure?;
            let gradient = Rows::of(gradient);
            let products = gradient.values.clone() * normal.clone();
            let sums = [gradient.values.clone(), products].map(|rows| rows.sum_dim(1));
            let sums = failure.attempt(|| {
                let sums = read(sums)?;
                // The step multiplies this rank's gradients by its weight, but the sums are over all ranks' losses.
                ranks.sum(sums, ranks.weight())
            })?;
            let mean = |at: usize| {
                sums[at * features..(at + 1) * features]
                    .iter()
                    .map(|sum| sum / count)
            };
            let [mean, product] = [0, 1].map(|at| gradient.column(mean(at)));
            let result = (gradient.values.clone() - mean - normal * product) * scale;
            Some(gradient.shaped(result))
        };
        let after = Point::origin(&input);
        let output = tape::custom(output, input, &after, backward);
        let mut shape = [1; D];
        shape[1] = features;
        let (gamma, beta) = (self.gamma.val(), self.beta.val());
        output * gamma.reshape(shape) + beta.reshape(shape)
    }

    fn update(&self, means: &[f64], variances: &[f64]) {
        for (running, batch) in [(&self.running_mean, means), (&self.running_var, variances)] {
            let old = running.value_sync();
            let batch: Vec<f32> = batch.iter().map(|value| *value as f32).collect();
            let batch = Tensor::<1>::from_data(&batch[..], &old.device()).cast(old.dtype());
            let new = old.mul_scalar(1.0 - self.momentum) + batch.mul_scalar(self.momentum);
            running.update(new.detach());
        }
    }
}

/// A tensor with one row for each feature, in f32.
struct Rows<const D: usize> {
    values: Tensor<2>,
    /// With the features in front.
    shape: [usize; D],
    dtype: DType,
}

impl<const D: usize> Rows<D> {
    fn of(tensor: Tensor<D>) -> Self {
        let dtype = tensor.dtype();
        let tensor = tensor.swap_dims(0, 1);
        let shape = tensor.dims();
        let columns = shape[1..].iter().product();
        let values = tensor.reshape([shape[0], columns]).cast(DType::F32);
        Self {
            values,
            shape,
            dtype,
        }
    }

    fn shaped(&self, values: Tensor<2>) -> Tensor<D> {
        values.cast(self.dtype).reshape(self.shape).swap_dims(0, 1)
    }

    /// A column with a number for each feature.
    fn column(&self, values: impl Iterator<Item = f64>) -> Tensor<2> {
        let values: Vec<f32> = values.map(|value| value as f32).collect();
        let column = Tensor::<1>::from_data(&values[..], &self.values.device());
        column.reshape([values.len(), 1])
    }

    /// Mean, and sum of the squared distances from it, of each row.
    fn moments(&self) -> [Tensor<2>; 2] {
        let mean = self.values.clone().mean_dim(1);
        let distances = self.values.clone() - mean.clone();
        let squares = (distances.clone() * distances).sum_dim(1);
        [mean, squares]
    }

    /// Sums of the values and of their squares, and their number.
    fn sums(&self, moments: &[Tensor<2>; 2]) -> Result<Vec<f64>, DdpError> {
        let [features, columns] = self.values.dims();
        let count = columns as f64;
        let read = read(moments.clone())?;
        let (means, squares) = read.split_at(features);
        let sums = means.iter().map(|mean| mean * count);
        let squares = squares.iter().zip(means);
        let squares = squares.map(|(square, mean)| square + mean * mean * count);
        Ok(sums.chain(squares).chain([count]).collect())
    }
}

fn read(columns: [Tensor<2>; 2]) -> Result<Vec<f64>, DdpError> {
    let columns = columns.map(|column| {
        let len = column.dims()[0];
        column.reshape([len])
    });
    let read = buffer::read(columns, "sums of a batch norm")?;
    let values = read
        .iter()
        .flat_map(|data| buffer::floats(data).into_owned());
    Ok(values.map(f64::from).collect())
}

/// The ranks that normalise together. Their operations run beside those of the gradients, which another thread may submit.
#[derive(Debug)]
pub(crate) struct Ranks {
    group: ProcessGroup,
    /// Weight of the running backward pass.
    weight: Mutex<f32>,
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<Ranks>>> = const { RefCell::new(None) };
}

impl Ranks {
    /// The ranks of `group` if `model` has a layer that needs them. All ranks call it.
    ///
    /// *Errors*: another number of shards than of ranks.
    pub(crate) fn connect<M: Module>(
        group: &ProcessGroup,
        shards: usize,
        model: &M,
    ) -> Result<Option<Arc<Self>>, DdpError> {
        let mut find = Find(false);
        model.visit(&mut find);
        let world = group.world();
        match find.0 {
            false => return Ok(None),
            true if shards != world => {
                return Err(DdpError::SyncBatchNorm { shards, world });
            }
            true => {}
        }
        // One colour for all.
        let beside = group.split(Some(0), 0)?;
        Ok(beside.map(|group| {
            let weight = Mutex::new(1.0);
            Arc::new(Self { group, weight })
        }))
    }

    /// Runs `f` on this thread: the model's layers find the ranks.
    pub(crate) fn enter<R>(ranks: Option<&Arc<Self>>, f: impl FnOnce() -> R) -> R {
        struct Restore(Option<Arc<Ranks>>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.with_borrow_mut(|current| *current = self.0.take());
            }
        }
        let outer = CURRENT.with_borrow_mut(|current| std::mem::replace(current, ranks.cloned()));
        let _restore = Restore(outer);
        f()
    }

    /// Tells the ranks that this one cannot go on.
    pub(crate) fn abort(&self, why: &str) {
        self.group.abort(why);
    }

    pub(crate) fn set_weight(&self, weight: f32) {
        *self.weight.lock().expect("no holder panics") = weight;
    }

    fn weight(&self) -> f64 {
        f64::from(*self.weight.lock().expect("no holder panics"))
    }

    /// The sum of `weight * values` over all ranks, divided by this rank's weight.
    fn sum(&self, mut values: Vec<f64>, weight: f64) -> Result<Vec<f64>, DdpError> {
        values.iter_mut().for_each(|value| *value *= weight);
        self.group.all_reduce(&mut values, ReduceOp::Sum)?;
        // A rank whose gradients have no weight gets none.
        let share = if weight == 0.0 { 0.0 } else { 1.0 / weight };
        values.iter_mut().for_each(|value| *value *= share);
        Ok(values)
    }
}

/// Looks for a `SyncBatchNorm`.
struct Find(bool);

impl ModuleVisitor for Find {
    fn enter_module(&mut self, _name: &str, container_type: &str) {
        self.0 |= container_type.rsplit(':').next() == Some("SyncBatchNorm");
    }
}
