//! `SyncBatchNorm`: batch normalisation over the samples of all ranks.

use std::sync::Arc;

use burn::module::{Flag, Module, ModuleVisitor, Param, RunningState};
use burn::nn::BatchNorm;
use burn::tensor::{DType, Tensor};
use paceline_nn::tape::{self, Point};
use paceline_nn::{Pass, draw_seed};

use crate::buffer;
use crate::error::DdpError;

mod meeting;

use meeting::Member;
pub(crate) use meeting::{Meeting, Ranks, set_weight};

/// Batch normalisation whose mean and variance are those of the samples of all shards, as PyTorch's `SyncBatchNorm`.
///
/// It has the paths, the parameters and the saved state of a [`BatchNorm`], and is made from one, as with
/// `convert_sync_batchnorm`: declare the field as a `SyncBatchNorm` and initialise it with `.into()`.
///
/// [`Ddp`](crate::Ddp) connects the ranks; outside of a step, and with one shard, it is an ordinary batch norm. All shards run it
/// equally often in a step. With several shards on a rank the layer needs all of them at once:
/// [`Ddp::step_on_replicas`](crate::Ddp::step_on_replicas) runs each in a thread, one at a time from one layer to the next, and
/// [`Ddp::step`](crate::Ddp::step) returns an error. With one shard per rank both work.
///
/// *Shape*: `[batch, features, ...]`, as `BatchNorm`'s; the batch may differ between shards.
///
/// *Numerics*: mean and variance are exact to f32. Sums over shards are in f64, along the tree of the shards, so the bits are the
/// same on any number of ranks. The gradients are those of the weighted mean of all shards' losses.
///
/// *Memory*: the activations of all shards of the rank. *Cost*: an all-reduce of `2 * features + 1` numbers in the forward pass, and one of `2 * features` in the backward pass. Each
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
    /// Normalises `input`, in training by the statistics of all shards' samples, otherwise by the running ones.
    ///
    /// *Blocks*: until all shards of all ranks run the layer, at most the group's timeout.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let is_training = input.device().is_autodiff() && self.training.is_enabled();
        match Member::current().filter(|_| is_training) {
            Some(member) => self.normalise(input, member),
            None => BatchNorm::from(self.clone()).forward(input),
        }
    }

    fn normalise<const D: usize>(&self, input: Tensor<D>, member: Arc<Member>) -> Tensor<D> {
        let features = self.gamma.dims()[0];
        let rows = Rows::of(tape::plain(input.clone()));
        let statistics = rows.moments();
        let failure = Pass::current().map(|pass| pass.failure().clone());
        // Other shards of this rank draw random numbers before this one goes on.
        let device = input.device().inner();
        let seed = draw_seed(&device);
        let sums = failure
            .as_ref()
            .and_then(|failure| failure.attempt(|| member.sum(rows.sums(&statistics)?, 1.0)));
        device.seed(seed);
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
                // The step multiplies this shard's gradients by its weight, but the sums are over all shards' losses.
                member.sum(sums, member.weight())
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

/// Looks for a `SyncBatchNorm`.
struct Find(bool);

impl ModuleVisitor for Find {
    fn enter_module(&mut self, _name: &str, container_type: &str) {
        self.0 |= container_type.rsplit(':').next() == Some("SyncBatchNorm");
    }
}
