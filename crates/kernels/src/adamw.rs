//! Steps of the optimizer AdamW.

use crate::isa::{Kernels, Task};
use crate::registers::Register;
use crate::threads::each_pair_mut;

/// Values of a parameter that are updated at once.
const UNIT: usize = 1024;

/// AdamW: Adam with the decay of weights apart from the gradient.
///
/// *Numerics*: the formula and the roundings of Burn's, whose operations are those on whole tensors, without fused multiply-adds.
/// The powers of the betas are taken in f64.
///
/// *Source*: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization".
///
/// *Example*:
/// ```
/// use paceline_kernels::{AdamW, Kernels};
///
/// let optimizer = AdamW {
///     learning_rate: 0.1,
///     beta_1: 0.9,
///     beta_2: 0.999,
///     epsilon: 1e-8,
///     weight_decay: 0.0,
/// };
/// let (mut weight, mut moments) = ([1.0], [[0.0]; 2]);
/// let [first, second] = &mut moments;
/// Kernels::of_process()?.adamw(&optimizer, 1, &mut weight, &[0.5], [first, second]);
/// assert!((weight[0] - 0.9).abs() < 1e-6);
/// # Ok::<(), paceline_kernels::IsaError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// What remains of the mean gradient in each step.
    pub beta_1: f32,
    /// What remains of the mean square of the gradient in each step.
    pub beta_2: f32,
    /// Added to the square root of the latter, against division by zero.
    pub epsilon: f32,
    /// Share of a weight that it loses in each step, in learning rates.
    pub weight_decay: f32,
}

impl Kernels {
    /// Takes a step, the first of which is number 1, in place: on a parameter and on the means of its gradient and of the gradient's
    /// square, which are zeros before the first.
    ///
    /// # Panics
    ///
    /// If the slices have different lengths.
    pub fn adamw(
        self,
        optimizer: &AdamW,
        step: u32,
        parameter: &mut [f32],
        gradient: &[f32],
        [first, second]: [&mut [f32]; 2],
    ) {
        let len = parameter.len();
        assert!(
            [gradient.len(), first.len(), second.len()] == [len; 3],
            "a gradient and two moments for each of {len} values"
        );
        let correction = |beta: f32| (1.0 - power(beta.into(), step)) as f32;
        let factors = Factors {
            betas: [optimizer.beta_1, optimizer.beta_2],
            rests: [1.0 - optimizer.beta_1, 1.0 - optimizer.beta_2],
            corrections: [correction(optimizer.beta_1), correction(optimizer.beta_2)],
            epsilon: optimizer.epsilon,
            kept: (1.0 - optimizer.learning_rate * f64::from(optimizer.weight_decay)) as f32,
            learning_rate: optimizer.learning_rate as f32,
        };
        let mut moments: Vec<[&mut [f32]; 2]> = first
            .chunks_mut(UNIT)
            .zip(second.chunks_mut(UNIT))
            .map(|(first, second)| [first, second])
            .collect();
        each_pair_mut(
            (parameter, UNIT),
            (&mut moments, 1),
            16 * len,
            |unit, parameter, moments| {
                self.run(Step {
                    factors,
                    gradient: &gradient[unit * UNIT..][..parameter.len()],
                    parameter,
                    moments,
                });
            },
        );
    }
}

/// `base` to the power of `exponent`, by multiplications in a fixed order.
fn power(mut base: f64, mut exponent: u32) -> f64 {
    let mut power = 1.0;
    while exponent > 0 {
        if exponent % 2 == 1 {
            power *= base;
        }
        base *= base;
        exponent /= 2;
    }
    power
}

#[derive(Clone, Copy)]
struct Factors {
    betas: [f32; 2],
    /// `1 - beta`.
    rests: [f32; 2],
    /// `1 - beta^step`.
    corrections: [f32; 2],
    epsilon: f32,
    /// Share of a weight that decay leaves.
    kept: f32,
    learning_rate: f32,
}

struct Step<'a, 'b> {
    factors: Factors,
    gradient: &'a [f32],
    parameter: &'a mut [f32],
    moments: &'a mut [[&'b mut [f32]; 2]],
}

impl Task for Step<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let units = self
            .parameter
            .chunks_mut(UNIT)
            .zip(self.gradient.chunks(UNIT));
        for ((parameter, gradient), [first, second]) in units.zip(self.moments) {
            step(self.factors, parameter, gradient, first, second);
        }
    }
}

/// The compiler only knows of parameters that they lie apart.
#[inline(always)]
fn step(
    factors: Factors,
    parameter: &mut [f32],
    gradient: &[f32],
    first: &mut [f32],
    second: &mut [f32],
) {
    let moments = first.iter_mut().zip(second);
    for ((parameter, gradient), (first, second)) in parameter.iter_mut().zip(gradient).zip(moments)
    {
        *first = *first * factors.betas[0] + gradient * factors.rests[0];
        *second = *second * factors.betas[1] + gradient * gradient * factors.rests[1];
        let mean = *first / factors.corrections[0];
        let size = (*second / factors.corrections[1]).sqrt() + factors.epsilon;
        *parameter = *parameter * factors.kept - mean / size * factors.learning_rate;
    }
}
