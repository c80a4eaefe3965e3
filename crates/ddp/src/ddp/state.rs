//! The state of a [`Ddp`], to save and to resume from.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{DType, TensorData};
use paceline_collective::ProcessGroup;
use serde::{Deserialize, Serialize};

use super::Ddp;
use super::average::Rounds;
use crate::error::DdpError;
use crate::placement::{self, Placement};
use crate::scaler::{GradScaler, GradScalerState};
use crate::weights::Hasher;

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

    /// Restores `state`, and broadcasts rank 0's tensors: those in its `weights`, by path, and for the others those of its
    /// `model`. All ranks call it with the same state.
    ///
    /// *Blocks*: until the weights have arrived.
    ///
    /// *Errors*: an impossible scaler state; failed collectives.
    pub fn load_state_dict<M: Module>(
        &mut self,
        model: M,
        state: &DdpState,
        weights: HashMap<String, TensorData>,
    ) -> Result<M, DdpError> {
        if let (Some(scaler), Some(saved)) = (&mut self.scaler, &state.scaler) {
            scaler.load_state_dict(saved.clone())?;
        }
        self.step = state.step;
        self.rounds = Rounds::new(self.options.comm_hook);
        self.options.seed = state.seed;
        placement::broadcast(&self.group, self.placement.as_deref(), model, weights)
    }

    /// Tells where the tensors are that the models of some ranks lack. The model may have placeholders from now on.
    pub fn set_placement(&mut self, placement: Arc<dyn Placement>) {
        self.placement = Some(placement);
    }

    /// Where the tensors are that the models of some ranks lack.
    pub fn placement(&self) -> Option<&dyn Placement> {
        self.placement.as_deref()
    }

    /// The ranks that together hold the model: those of the [placement](Self::set_placement), if there is one.
    pub fn model_group(&self) -> &ProcessGroup {
        let placement = self.placement.as_deref();
        placement.map_or(&self.group, Placement::group)
    }

    /// Whether the models of some ranks lack tensors, so that all ranks take part in an [`export`](Self::export).
    pub fn is_split(&self) -> bool {
        self.placement.is_some()
    }

    /// Path, shape and type of every tensor of the whole model, in the order of the paths.
    pub fn tensors<M: Module>(&self, model: &M) -> Vec<(String, Vec<usize>, DType)> {
        let handles = placement::sorted(self.placement.as_deref(), model).into_iter();
        handles
            .map(|handle| (handle.path, handle.shape, handle.dtype))
            .collect()
    }

    /// Gives `each` the path and the value of every tensor of the whole model, in the order of the paths. All ranks call it
    /// if the model [is split](Self::is_split), and all of them get every tensor.
    ///
    /// *Memory*: one tensor at a time, or one block at stage 3 of ZeRO. *Blocks*: until the ranks that hold a tensor have sent
    /// it.
    ///
    /// *Errors*: those of `each`, after which the other ranks wait in vain; failed collectives.
    pub fn export<M: Module, E: From<DdpError>>(
        &self,
        model: &M,
        each: impl FnMut(&str, TensorData) -> Result<(), E>,
    ) -> Result<(), E> {
        self.require_weights()?;
        placement::export(self.placement.as_deref(), model, each)
    }

    /// [`weights::sha256`](crate::weights::sha256) of the whole model. All ranks call it if the model
    /// [is split](Self::is_split).
    ///
    /// *Memory*, *Blocks*: like [`export`](Self::export).
    pub fn sha256<M: Module>(&self, model: &M) -> Result<String, DdpError> {
        let mut hasher = Hasher::default();
        self.export(model, |path, data| {
            hasher.add(path, &data);
            Ok::<_, DdpError>(())
        })?;
        Ok(hasher.finish())
    }
}
