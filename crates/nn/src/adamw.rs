//! Burn's AdamW on the kernels of [`paceline_kernels`].

use burn::config::Config;
use burn::optim::grad_clipping::GradientClippingConfig;
use burn::optim::{
    self as burns, AdamWState, AdaptiveMomentumState, LearningRate, ModuleOptimizer, Optimizer,
};
use burn::tensor::{Device, Tensor};
use paceline_kernels as kernels;

use crate::values::{Owned, are_readable, of_process};

/// Burn's `AdamWConfig`, for an optimizer that takes a step in one pass over memory on CPUs, in place. Its state is stored as that of Burn's,
/// so each reads the other's checkpoints.
///
/// *Numerics*: each value is rounded as by Burn's operations, apart from the powers of the betas, which are taken in f64.
///
/// *Memory*: none beyond parameters, gradients and state, where Burn's makes a tensor for each operation.
///
/// *Example*:
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::GradientsParams;
/// use burn::tensor::{Device, Tensor};
/// use paceline_nn::AdamWConfig;
///
/// let device = Device::flex().autodiff();
/// let layer: Linear = LinearConfig::new(4, 3).init(&device);
/// let gradients = layer.forward(Tensor::<2>::ones([2, 4], &device)).sum().backward();
/// let gradients = GradientsParams::from_grads(gradients, &layer);
/// let mut optimizer = AdamWConfig::new().with_weight_decay(0.01).init();
/// let layer = optimizer.step(1e-3, layer, gradients);
/// ```
#[derive(Config, Debug)]
pub struct AdamWConfig {
    /// Decay of the running mean of the gradient.
    #[config(default = 0.9)]
    pub beta_1: f32,
    /// Decay of the running mean of the squared gradient.
    #[config(default = 0.999)]
    pub beta_2: f32,
    /// Added to the square root of that mean, against division by zero.
    #[config(default = 1e-5)]
    pub epsilon: f32,
    /// Share of a weight that it loses in each step, in learning rates.
    #[config(default = 1e-4)]
    pub weight_decay: f32,
    /// Whether weights decay only where the step moves them the same way. Burn's operations compute such steps.
    #[config(default = false)]
    pub cautious_weight_decay: bool,
    /// Whether the largest mean square so far counts. Burn's operations compute such steps.
    #[config(default = false)]
    pub amsgrad: bool,
    /// How gradients are clipped.
    pub grad_clipping: Option<GradientClippingConfig>,
}

impl AdamWConfig {
    /// The optimizer of a module.
    pub fn init(&self) -> ModuleOptimizer {
        let optimizer = ModuleOptimizer::from(self.build());
        match &self.grad_clipping {
            Some(clipping) => optimizer.with_grad_clipping(clipping.init()),
            None => optimizer,
        }
    }

    /// The optimizer alone, as a group of parameters takes it.
    pub fn build(&self) -> AdamW {
        let burns = burns::AdamWConfig::new()
            .with_beta_1(self.beta_1)
            .with_beta_2(self.beta_2)
            .with_epsilon(self.epsilon)
            .with_weight_decay(self.weight_decay)
            .with_cautious_weight_decay(self.cautious_weight_decay)
            .with_amsgrad(self.amsgrad);
        AdamW {
            config: self.clone(),
            burns: burns.build(),
        }
    }
}

/// The optimizer of an [`AdamWConfig`].
#[derive(Clone)]
pub struct AdamW {
    config: AdamWConfig,
    burns: burns::AdamW,
}

impl Optimizer for AdamW {
    type State<const D: usize> = AdamWState<D>;

    fn step<const D: usize>(
        &self,
        learning_rate: LearningRate,
        tensor: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let is_burns = self.config.amsgrad || self.config.cautious_weight_decay;
        let is_readable = are_readable(&tensor)
            && are_readable(&gradient)
            && state.as_ref().is_none_or(|AdamWState { momentum }| {
                are_readable(&momentum.moment_1) && are_readable(&momentum.moment_2)
            });
        if is_burns || !is_readable {
            return self.burns.step(learning_rate, tensor, gradient, state);
        }
        let state = state.map(|state| state.momentum).unwrap_or_else(|| {
            let zeros = || Tensor::zeros(tensor.dims(), (&tensor.device(), tensor.dtype()));
            AdaptiveMomentumState {
                time: 0,
                moment_1: zeros(),
                moment_2: zeros(),
                max_moment_2: None,
            }
        });
        let step = state.time + 1;
        let [mut parameter, mut first, mut second] =
            [tensor, state.moment_1, state.moment_2].map(Owned::new);
        let gradient = Owned::new(gradient);
        let adamw = kernels::AdamW {
            learning_rate,
            beta_1: self.config.beta_1,
            beta_2: self.config.beta_2,
            epsilon: self.config.epsilon,
            weight_decay: self.config.weight_decay,
        };
        of_process().adamw(
            &adamw,
            step.try_into().unwrap_or(u32::MAX),
            parameter.slice_mut(),
            gradient.slice(),
            [first.slice_mut(), second.slice_mut()],
        );
        let momentum = AdaptiveMomentumState {
            time: step,
            moment_1: first.tensor(),
            moment_2: second.tensor(),
            max_moment_2: None,
        };
        (parameter.tensor(), Some(AdamWState { momentum }))
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        burns::AdamW::to_device(state, device)
    }
}
