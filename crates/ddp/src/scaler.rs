//! `GradScaler`: keeps small f16 gradients from vanishing by scaling the loss, and skips steps in which the scale was too
//! large.
//!
//! Every value of a gradient is proportional to the loss. With a large factor, gradients survive that f16 would otherwise
//! round to zero; after the ranks have averaged them in f32, they are divided by it again. If the factor was too large, f16
//! overflows to an infinity or NaN: the step is skipped and the factor lowered.
//!
//! The decision needs no message of its own. An infinity or NaN in one rank's gradient persists in every sum that contains
//! it, and the averaged gradients have the same bytes on every rank, so all ranks decide alike in the same step. Only
//! averaged gradients are checked, because a rank that checked its own could decide differently from the others.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::buffer;
use crate::error::DdpError;
use crate::reducer::Means;

/// Settings of a [`GradScaler`], with PyTorch's names and defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct GradScalerOptions {
    /// The first scale.
    pub init_scale: f32,
    /// The factor of the scale after `growth_interval` steps in a row without an infinity or NaN; above 1.
    pub growth_factor: f64,
    /// The factor of the scale after a skipped step; below 1.
    pub backoff_factor: f64,
    /// Steps in a row after which the scale grows.
    pub growth_interval: u32,
    /// Whether the scaler is active; if not, losses and gradients pass unchanged.
    pub enabled: bool,
}

impl Default for GradScalerOptions {
    fn default() -> Self {
        Self {
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            enabled: true,
        }
    }
}

/// The state of a [`GradScaler`], for a checkpoint; the names in a file are those of PyTorch's `state_dict()`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GradScalerState {
    /// The scale of the next step.
    pub scale: f32,
    /// See [`GradScalerOptions::growth_factor`].
    pub growth_factor: f64,
    /// See [`GradScalerOptions::backoff_factor`].
    pub backoff_factor: f64,
    /// See [`GradScalerOptions::growth_interval`].
    pub growth_interval: u32,
    /// Steps in a row that were not skipped.
    #[serde(rename = "_growth_tracker")]
    pub growth_tracker: u32,
}

impl GradScalerState {
    fn check(&self) -> Result<(), DdpError> {
        let refuse = |what: String| Err(DdpError::Scaler { what });
        let positive = |value: f64| value.is_finite() && value > 0.0;
        if !positive(f64::from(self.scale)) {
            return refuse(format!(
                "the scale must be finite and above 0, not {}",
                self.scale
            ));
        }
        if !positive(self.growth_factor) || self.growth_factor <= 1.0 {
            let factor = self.growth_factor;
            return refuse(format!("growth_factor must be above 1, not {factor}"));
        }
        if !positive(self.backoff_factor) || self.backoff_factor >= 1.0 {
            let factor = self.backoff_factor;
            return refuse(format!(
                "backoff_factor must be between 0 and 1, not {factor}"
            ));
        }
        if self.growth_tracker >= self.growth_interval {
            return refuse(format!(
                "the growth tracker {} must be below growth_interval {}",
                self.growth_tracker, self.growth_interval
            ));
        }
        Ok(())
    }

    /// The rule: back off after a skipped step, grow after many good ones.
    fn after(&self, found_inf: bool) -> Self {
        // As PyTorch: the product in f64, the scale in f32.
        let times = |factor: f64| (f64::from(self.scale) * factor) as f32;
        let (scale, growth_tracker) = if found_inf {
            (times(self.backoff_factor), 0)
        } else if self.growth_tracker + 1 < self.growth_interval {
            (self.scale, self.growth_tracker + 1)
        } else {
            let grown = times(self.growth_factor);
            (if grown.is_finite() { grown } else { self.scale }, 0)
        };
        Self {
            scale,
            growth_tracker,
            ..self.clone()
        }
    }
}

/// Scales losses up and gradients back down, and adapts the scale.
///
/// With [`DdpOptions::scaler`](crate::DdpOptions::scaler) everything is automatic: each
/// [`backward`](crate::ShardStep::backward) scales its loss, and a step unscales the averaged gradients, clips them (the
/// limit applies to the true norm) and updates the scale. A skipped step sets [`Reduced::skipped`](crate::Reduced::skipped)
/// and returns no gradients, so the optimizer changes neither weights nor its own state.
///
/// *Numerics*: with factors that are powers of two, as the defaults are, scaling changes no digit of a gradient that
/// neither overflows nor underflows.
///
/// *Source*: `torch.amp.GradScaler`; the state uses its names, the rule its order of operations. PyTorch tracks per optimizer
/// whether gradients were already unscaled; here [`unscale`](Self::unscale) takes gradients and returns them.
///
/// *Example*: a loop without [`Ddp`](crate::Ddp)
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::{GradientsParams, SgdConfig};
/// use burn::tensor::{Device, Tensor};
/// use paceline_ddp::GradScaler;
///
/// let device = Device::flex().autodiff();
/// let mut model: Linear = LinearConfig::new(4, 2).init(&device);
/// let mut optimizer = SgdConfig::new().init();
/// let mut scaler = GradScaler::default();
/// for _ in 0..3 {
///     let loss = model.forward(Tensor::<2>::ones([8, 4], &device)).mean();
///     let grads = GradientsParams::from_grads(scaler.scale(loss).backward(), &model);
///     let (grads, found_inf) = scaler.unscale(&model, grads)?;
///     model = optimizer.step(0.1, model, grads); // no gradients, no change
///     scaler.update(found_inf);
/// }
/// assert_eq!(scaler.get_scale(), 65536.0);
/// # Ok::<(), paceline_ddp::DdpError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct GradScaler {
    state: GradScalerState,
    enabled: bool,
}

impl Default for GradScaler {
    fn default() -> Self {
        Self::new(GradScalerOptions::default()).expect("the defaults are valid")
    }
}

impl GradScaler {
    /// A scaler for the beginning of a training.
    ///
    /// *Errors*: [`DdpError::Scaler`] for invalid factors or scales.
    pub fn new(options: GradScalerOptions) -> Result<Self, DdpError> {
        let state = GradScalerState {
            scale: options.init_scale,
            growth_factor: options.growth_factor,
            backoff_factor: options.backoff_factor,
            growth_interval: options.growth_interval,
            growth_tracker: 0,
        };
        if options.enabled {
            state.check()?;
        }
        Ok(Self {
            state,
            enabled: options.enabled,
        })
    }

    /// The current scale; 1 if the scaler is not enabled.
    #[must_use]
    pub fn get_scale(&self) -> f32 {
        if self.enabled { self.state.scale } else { 1.0 }
    }

    /// Whether it is enabled.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// `loss`, scaled; run the backward pass on it.
    #[must_use]
    pub fn scale<const D: usize>(&self, loss: Tensor<D>) -> Tensor<D> {
        if self.enabled {
            loss.mul_scalar(self.state.scale)
        } else {
            loss
        }
    }

    /// Divides gradients by the scale and returns whether any value is infinite or NaN. If so, it returns no gradients, and
    /// an optimizer step with them changes nothing.
    ///
    /// *Cost*: two passes over the gradients, on their device. *Blocks*: until they are computed. *Errors*: the device cannot
    /// be read.
    pub fn unscale<M: Module>(
        &self,
        model: &M,
        grads: GradientsParams,
    ) -> Result<(GradientsParams, bool), DdpError> {
        if !self.enabled {
            return Ok((grads, false));
        }
        let mut visitor = Unscale {
            factor: self.inverse(),
            from: grads,
            to: GradientsParams::new(),
            bad: None,
        };
        model.visit(&mut visitor);
        Ok(match found(visitor.bad)? {
            true => (GradientsParams::new(), true),
            false => (visitor.to, false),
        })
    }

    /// Adapts the scale. Call it once per step, after the optimizer.
    pub fn update(&mut self, found_inf: bool) {
        if self.enabled {
            self.state = self.state.after(found_inf);
        }
    }

    /// The state to save after [`update`](Self::update), or `None` if the scaler is not enabled.
    #[must_use]
    pub fn state_dict(&self) -> Option<GradScalerState> {
        self.enabled.then(|| self.state.clone())
    }

    /// Restores a saved state; a scaler that is not enabled ignores it.
    ///
    /// *Errors*: [`DdpError::Scaler`] for an impossible state.
    pub fn load_state_dict(&mut self, state: GradScalerState) -> Result<(), DdpError> {
        if self.enabled {
            state.check()?;
            self.state = state;
        }
        Ok(())
    }

    /// Settings and state as one line, to be compared between ranks.
    pub(crate) fn describe(&self) -> String {
        format!("{:?}", self.state_dict())
    }

    /// Unscales the ranks' averages in their own memory.
    pub(crate) fn unscale_means(&self, means: &mut Means) {
        if self.enabled {
            means.scale(self.inverse());
        }
    }

    /// 1 / scale, divided in f64.
    fn inverse(&self) -> f32 {
        f64::from(self.state.scale).recip() as f32
    }
}

/// Whether every average is finite.
pub(crate) fn are_finite(means: &Means) -> Result<bool, DdpError> {
    match means {
        Means::Host(means) => {
            let mut values = means.iter().flatten().flatten();
            Ok(values.all(|value| value.is_finite()))
        }
        Means::Device(values) => {
            let mut bad = None;
            for mean in values.iter().flatten() {
                see(&mut bad, mean.clone());
            }
            Ok(!found(bad)?)
        }
    }
}

/// Adds 0 to `bad` if all of `tensor` is finite, and NaN if not. Computed on the tensors' device.
fn see<const D: usize>(bad: &mut Option<Tensor<1>>, tensor: Tensor<D>) {
    let len = tensor.shape().num_elements();
    let here = buffer::sum(tensor.reshape([len]).mul_scalar(0.0).cast(DType::F32));
    *bad = Some(match bad.take() {
        Some(before) => before + here,
        None => here,
    });
}

/// The verdict over all tensors, from one read value.
fn found(bad: Option<Tensor<1>>) -> Result<bool, DdpError> {
    let read = buffer::read(bad, "whether gradients are finite")?;
    Ok(read
        .first()
        .is_some_and(|value| !buffer::floats(value)[0].is_finite()))
}

struct Unscale {
    factor: f32,
    from: GradientsParams,
    to: GradientsParams,
    bad: Option<Tensor<1>>,
}

impl ModuleVisitor for Unscale {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.from.remove::<D>(param.id) {
            see(&mut self.bad, gradient.clone());
            self.to.register(param.id, gradient.mul_scalar(self.factor));
        }
    }
}

#[cfg(test)]
mod tests;
