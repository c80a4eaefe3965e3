//! The state of a [`Ddp`], to save and to resume from.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, ParamId};
use burn::tensor::{DType, TensorData};
use paceline_collective::ProcessGroup;
use serde::{Deserialize, Serialize};

use super::Ddp;
use super::average::Rounds;
use crate::buffer::{self, Handle};
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

/// What a rank has of a tensor of the model.
#[derive(Clone, Debug)]
pub struct OwnTensor {
    /// Burn's id of the tensor.
    pub id: ParamId,
    /// The path of the tensor.
    pub path: String,
    /// At stage 3 of ZeRO, the elements of the tensor, or of this rank's [slice](Placement::slice) of it, that `value` has; otherwise it
    /// has all.
    pub range: Option<Range<usize>>,
    /// The values.
    pub value: TensorData,
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

    /// Has the next step compare `digest`, of the whole state after the last one, over all ranks, in place of a window of the
    /// weights. All ranks call it after the same step.
    pub fn compare_state(&mut self, digest: u64) {
        self.fingerprint.compare_state(self.step, digest);
    }

    /// The newest step at whose start all ranks had the same state, by [`compare_state`](Self::compare_state).
    pub fn agreed_step(&self) -> Option<u64> {
        self.fingerprint.agreed()
    }

    /// Goes back to `state`, which all ranks had. All ranks call it, once each has the weights of that state again.
    ///
    /// *Errors*: an impossible scaler state.
    pub fn go_back(&mut self, state: &DdpState) -> Result<(), DdpError> {
        if let (Some(scaler), Some(saved)) = (&mut self.scaler, &state.scaler) {
            scaler.load_state_dict(saved.clone())?;
        }
        (self.step, self.options.seed) = (state.step, state.seed);
        self.fingerprint.go_back();
        Ok(())
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

    /// A copy of what this rank alone has of the model, for a save that no step waits for: of a tensor that all replicas have, the
    /// first replica's. Empty tensors are the first rank's.
    ///
    /// *Errors*: weights that no optimizer has made yet.
    pub fn own_tensors<M: Module>(&self, model: &M) -> Result<Vec<OwnTensor>, DdpError> {
        let is_first_replica = self.group.rank() == 0;
        let is_first = self.model_group().rank() == 0;
        self.tensors_here(model, is_first_replica, is_first)
    }

    /// As [`own_tensors`](Self::own_tensors), of all that this rank has of the model, whichever other ranks have it too.
    pub fn part_tensors<M: Module>(&self, model: &M) -> Result<Vec<OwnTensor>, DdpError> {
        self.tensors_here(model, true, true)
    }

    fn tensors_here<M: Module>(
        &self,
        model: &M,
        is_first_replica: bool,
        is_first: bool,
    ) -> Result<Vec<OwnTensor>, DdpError> {
        self.require_weights()?;
        let own = buffer::handles(model).into_iter().filter_map(|handle| {
            let (id, path) = (handle.id, handle.path.clone());
            let sharded = self.sharded.as_deref();
            if let Some(sharded) = sharded.filter(|sharded| sharded.contains(id)) {
                let (range, value) = sharded.own_part(id)?;
                let range = Some(range);
                return Some(OwnTensor {
                    id,
                    path,
                    range,
                    value,
                });
            }
            let is_mine = match handle.is_placeholder() {
                true => is_first && self.whole_shape(&handle).contains(&0),
                false => is_first_replica,
            };
            is_mine.then(|| OwnTensor {
                id,
                path,
                range: None,
                value: handle.read(),
            })
        });
        Ok(own.collect())
    }

    fn whole_shape(&self, handle: &Handle) -> Vec<usize> {
        let own = handle.shape.clone();
        match self.placement() {
            Some(placement) => placement.whole_shape(handle.id, own),
            None => own,
        }
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
