//! Muon on the products of [`paceline_kernels`].

use burn::config::Config;
use burn::optim::momentum::{Momentum, MomentumConfig};
use burn::optim::{LearningRate, MuonState, Optimizer};
use burn::tensor::{Device, Tensor};

use crate::linear::{product, scores};
use crate::values::Values;

/// Steps of the iteration, and its coefficients. *Source*: as [`MuonConfig`].
const STEPS: usize = 5;
const COEFFICIENTS: [f32; 3] = [3.4445, -4.775, 2.0315];

/// Smallest norm that a matrix is divided by.
const EPSILON: f32 = 1e-7;

/// Burn's `MuonConfig` with updates of AdamW's size, for an optimizer whose bits do not depend on threads or the instruction set. Its state is
/// stored as that of Burn's, so each reads the other's checkpoints.
///
/// It is for matrices; other parameters are in a group with another optimizer.
///
/// *Numerics*: products as [`linear`](crate::linear), the norm in f64.
///
/// *Source*: Jordan and others 2024, "Muon: An optimizer for hidden layers in neural networks"; the size of updates, by which learning rate and
/// weight decay can be those of AdamW, is that of Liu and others 2025, "Muon is Scalable for LLM Training".
///
/// *Example*:
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::{GradientsParams, ModuleOptimizer};
/// use burn::tensor::{Device, Tensor};
/// use paceline_nn::MuonConfig;
///
/// let device = Device::flex().autodiff();
/// let layer: Linear = LinearConfig::new(4, 3).with_bias(false).init(&device);
/// let gradients = layer.forward(Tensor::<2>::ones([2, 4], &device)).sum().backward();
/// let gradients = GradientsParams::from_grads(gradients, &layer);
/// let mut optimizer = ModuleOptimizer::from(MuonConfig::new().build());
/// let layer = optimizer.step(1e-3, layer, gradients);
/// ```
#[derive(Config, Debug)]
pub struct MuonConfig {
    /// Nesterov's momentum.
    #[config(default = 0.95)]
    pub momentum: f64,
    /// Share of a weight that it loses in each step, in learning rates.
    #[config(default = 0.1)]
    pub weight_decay: f32,
}

impl MuonConfig {
    /// The optimizer alone, as a group of parameters takes it.
    pub fn build(&self) -> Muon {
        let momentum = MomentumConfig {
            momentum: self.momentum,
            dampening: 0.0,
            nesterov: true,
        };
        Muon {
            momentum: Momentum::new(&momentum),
            weight_decay: self.weight_decay,
        }
    }
}

/// The optimizer of a [`MuonConfig`].
#[derive(Clone)]
pub struct Muon {
    momentum: Momentum,
    weight_decay: f32,
}

impl Optimizer for Muon {
    type State<const D: usize> = MuonState<D>;

    /// # Panics
    ///
    /// If the parameter is not a matrix.
    fn step<const D: usize>(
        &self,
        learning_rate: LearningRate,
        tensor: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        assert!(D == 2, "muon steps matrices, and this has {D} dimensions");
        let momentum = state.map(|state| state.momentum);
        let (update, momentum) = self.momentum.transform(gradient, momentum);
        let shape = tensor.dims();
        let [rows, columns] = [shape[0], shape[1]];
        let update = orthogonal(update.reshape([rows, columns]));
        let size = learning_rate * 0.2 * (rows.max(columns) as f64).sqrt();
        let kept = 1.0 - learning_rate * f64::from(self.weight_decay);
        let update = update.mul_scalar(size).reshape(shape);
        let state = MuonState::new(momentum);
        (tensor.mul_scalar(kept) - update, Some(state))
    }

    fn to_device<const D: usize>(mut state: Self::State<D>, device: &Device) -> Self::State<D> {
        state.momentum = state.momentum.to_device(device);
        state
    }
}

/// About the nearest matrix with orthogonal rows or columns, by Newton and Schulz's iteration.
fn orthogonal(matrix: Tensor<2>) -> Tensor<2> {
    let [rows, columns] = matrix.dims();
    if rows > columns {
        return orthogonal(matrix.transpose()).transpose();
    }
    let [a, b, c] = COEFFICIENTS;
    let mut x = normalised(matrix);
    for _ in 0..STEPS {
        let square = scores(x.clone(), x.clone());
        let fourth = product(square.clone(), square.clone(), None);
        let factor = square.mul_scalar(b) + fourth.mul_scalar(c);
        x = x.clone().mul_scalar(a) + product(factor, x, None);
    }
    x
}

/// The matrix over its Frobenius norm.
fn normalised(matrix: Tensor<2>) -> Tensor<2> {
    match Values::of(&matrix) {
        Some(values) => {
            let squares = values.slice().iter().map(|value| f64::from(*value).powi(2));
            let norm = squares.sum::<f64>().sqrt();
            matrix.div_scalar(norm.max(f64::from(EPSILON)))
        }
        None => {
            // Along the axes: a sum over all elements is made of atomic additions on a GPU, in any order.
            let squares = matrix.clone().square().sum_dim(1).sum_dim(0);
            matrix / squares.sqrt().clamp_min(EPSILON)
        }
    }
}
