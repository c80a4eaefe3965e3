//! Going on with a saved run: rank 0 reads the newest whole checkpoint, all ranks get what it says.

use std::path::Path;

use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, TensorData};
use paceline_collective::ProcessGroup;
use paceline_ddp::weights;
use serde::{Deserialize, Serialize};

use crate::checkpoint::{self, State};
use crate::config::TrainConfig;
use crate::error::TrainError;
use crate::model::Net;
use crate::run_dir::checkpoints;

/// The newest whole checkpoint, as every rank has it.
pub(crate) struct Resumed {
    pub(crate) told: Told,
    /// On rank 0 only; the others get them in `Ddp::new`, as at any start.
    weights: Option<Vec<(String, TensorData)>>,
    optimizer: Vec<u8>,
}

/// What rank 0 tells the others about it.
#[derive(Serialize, Deserialize)]
pub(crate) struct Told {
    pub(crate) path: String,
    pub(crate) state: State,
    /// Newer checkpoints that were passed over, and why.
    pub(crate) damaged: Vec<String>,
}

impl Resumed {
    /// Reads the checkpoint on rank 0 and sends it to all.
    ///
    /// *Blocks*: until rank 0 has read it. *Errors* - `NoCheckpoint` on rank 0, `Rank0` on the others; collectives.
    pub(crate) fn read(config: &TrainConfig, group: &ProcessGroup) -> Result<Self, TrainError> {
        let found = match group.rank() {
            0 => Some(checkpoint::newest(&checkpoints(&config.run_dir))),
            _ => None,
        };
        let message: Option<Result<Told, String>> = found.as_ref().map(|found| match found {
            Ok((path, checkpoint, damaged)) => Ok(Told {
                path: path.display().to_string(),
                state: checkpoint.state.clone(),
                damaged: damaged.clone(),
            }),
            Err(error) => Err(error.to_string()),
        });
        let message = message.map(|told| serde_json::to_vec(&told).expect("it always encodes"));
        let message = group.broadcast_bytes(message.as_deref(), 0)?;
        let (weights, optimizer) = match found {
            Some(found) => {
                let (_, checkpoint, _) = found?;
                (Some(checkpoint.weights), Some(checkpoint.optimizer))
            }
            None => (None, None),
        };
        let told: Result<Told, String> = serde_json::from_slice(&message)
            .unwrap_or_else(|error| Err(format!("its message cannot be read: {error}")));
        Ok(Self {
            told: told.map_err(TrainError::Rank0)?,
            weights,
            optimizer: broadcast_blob(group, optimizer)?,
        })
    }

    /// The network (on rank 0) and the optimizer as they were saved.
    ///
    /// *Errors*: `Misfit` when they are of another model.
    pub(crate) fn apply(
        &mut self,
        mut net: Net,
        optimizer: ModuleOptimizer,
    ) -> Result<(Net, ModuleOptimizer), TrainError> {
        let path = Path::new(&self.told.path);
        if let Some(saved) = self.weights.take() {
            net = weights::import(
                net.clone(),
                checkpoint::fit(path, saved, &weights::export(&net))?,
            );
        }
        let bytes = Bytes::from_bytes_vec(std::mem::take(&mut self.optimizer));
        let optimizer = optimizer
            .from_bytes(bytes)
            .map_err(|error| TrainError::Misfit {
                path: path.to_path_buf(),
                what: format!("the optimizer state cannot be read: {error}"),
            })?;
        Ok((net, optimizer))
    }
}

/// Sends bytes of any length from rank 0 to all.
fn broadcast_blob(group: &ProcessGroup, blob: Option<Vec<u8>>) -> Result<Vec<u8>, TrainError> {
    const PIECE_BYTES: usize = 16 << 20;
    let len = blob.as_ref().map(|blob| (blob.len() as u64).to_le_bytes());
    let len = group.broadcast_bytes(len.as_ref().map(|len| &len[..]), 0)?;
    let len = len
        .as_slice()
        .try_into()
        .map(u64::from_le_bytes)
        .unwrap_or(0) as usize;
    let mut received = Vec::new();
    while received.len() < len {
        let end = (received.len() + PIECE_BYTES).min(len);
        let piece = blob.as_ref().map(|blob| &blob[received.len()..end]);
        let piece = group.broadcast_bytes(piece, 0)?;
        if piece.is_empty() {
            return Err(TrainError::Rank0("it sent less than it announced".into()));
        }
        received.extend(piece);
    }
    Ok(received)
}
