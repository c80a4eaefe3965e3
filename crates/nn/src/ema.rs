//! `Ema`: an exponential moving average of the weights, beside any optimizer.

use burn::optim::{LearningRate, Optimizer, RecordState, StateSink, StateSource, join_path};
use burn::tensor::{Device, Tensor};

use crate::values::{Owned, Values, are_readable, of_process};

/// The average's name in the state of a parameter.
const AVERAGE: &str = "ema";

/// That of the optimizer's own state.
const OPTIMIZER: &str = "optimizer";

/// An optimizer that also keeps an exponential moving average of each parameter, as PyTorch's `AveragedModel` does with
/// `get_ema_multi_avg_fn(decay)`: the weights after the first step, and from then on `decay * average + (1 - decay) * weight`.
///
/// The average is a part of the parameter's state, under the name `ema`. It goes wherever that goes: into checkpoints, to ranks that join,
/// and in slices to the ranks that share it. It moves in steps in which the parameter has a gradient.
///
/// *Numerics*: in the type of the weights, each value by itself. *Memory*: that of the weights.
///
/// *Source*: `torch/optim/swa_utils.py`.
///
/// *Example*:
/// ```
/// use burn::optim::ModuleOptimizer;
/// use paceline_nn::{AdamWConfig, Ema};
///
/// let optimizer = ModuleOptimizer::from(Ema::new(AdamWConfig::new().build(), 0.999));
/// ```
#[derive(Clone, Debug)]
pub struct Ema<O> {
    optimizer: O,
    decay: f64,
}

impl<O> Ema<O> {
    /// `optimizer` with an average of which the share `decay` remains in each step.
    pub fn new(optimizer: O, decay: f64) -> Self {
        Self { optimizer, decay }
    }
}

/// The state of a parameter in [`Ema`].
#[derive(Clone, Debug)]
pub struct EmaState<S, const D: usize> {
    optimizer: Option<S>,
    average: Tensor<D>,
}

impl<S: RecordState, const D: usize> RecordState for EmaState<S, D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_tensor(prefix, AVERAGE, self.average.to_data());
        if let Some(state) = &self.optimizer {
            state.state_flatten(&join_path(prefix, OPTIMIZER), out);
        }
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let average = Tensor::from_data(src.take_tensor(prefix, AVERAGE)?, device);
        let prefix = join_path(prefix, OPTIMIZER);
        let optimizer = match src.has_under(&prefix) {
            true => Some(S::state_unflatten(&prefix, src, device)?),
            false => None,
        };
        Some(Self { optimizer, average })
    }
}

impl<O: Optimizer> Optimizer for Ema<O> {
    type State<const D: usize> = EmaState<O::State<D>, D>;

    fn step<const D: usize>(
        &self,
        learning_rate: LearningRate,
        tensor: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let (state, average) = match state {
            Some(state) => (state.optimizer, Some(state.average)),
            None => (None, None),
        };
        let (tensor, optimizer) = self.optimizer.step(learning_rate, tensor, gradient, state);
        let average = match average {
            Some(average) => moved(average, &tensor, 1.0 - self.decay),
            None => tensor.clone(),
        };
        (tensor, Some(EmaState { optimizer, average }))
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        EmaState {
            optimizer: (state.optimizer).map(|state| O::to_device(state, device)),
            average: state.average.to_device(device),
        }
    }
}

/// `average` after a step towards `weights`.
fn moved<const D: usize>(average: Tensor<D>, weights: &Tensor<D>, share: f64) -> Tensor<D> {
    match Values::of(weights).filter(|_| are_readable(&average)) {
        Some(weights) => {
            let mut average = Owned::new(average);
            of_process().lerp(average.slice_mut(), weights.slice(), share as f32);
            average.tensor()
        }
        None => average.clone() + (weights.clone() - average).mul_scalar(share),
    }
}
