//! The state of a [`Ddp`], to save and to resume from.

use burn::module::Module;
use serde::{Deserialize, Serialize};

use super::Ddp;
use crate::error::DdpError;
use crate::scaler::{GradScaler, GradScalerState};
use crate::verify;

/// The state of a [`Ddp`] besides the weights: the same on every rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DdpState {
    /// Steps done.
    pub step: u64,
    /// The job seed. With the step and the shard it determines the device's randomness.
    pub seed: u64,
    /// The gradient scaler, if the job has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaler: Option<GradScalerState>,
}

impl Ddp {
    /// The state to save in a checkpoint before the next step.
    pub fn state_dict(&self) -> DdpState {
        DdpState {
            step: self.step,
            seed: self.options.seed,
            scaler: self.scaler.as_ref().and_then(GradScaler::state_dict),
        }
    }

    /// Restores `state` and broadcasts the weights of rank 0's `model`. All ranks call it with the same state.
    ///
    /// *Blocks*: until the weights have arrived.
    ///
    /// *Errors*: an impossible scaler state; failed collectives.
    pub fn load_state_dict<M: Module>(
        &mut self,
        model: M,
        state: &DdpState,
    ) -> Result<M, DdpError> {
        if let (Some(scaler), Some(saved)) = (&mut self.scaler, &state.scaler) {
            scaler.load_state_dict(saved.clone())?;
        }
        self.step = state.step;
        self.options.seed = state.seed;
        verify::broadcast_model(&self.group, model)
    }
}
