//! Checkpoints of data-parallel training: saved without delaying a step, found again after any crash, and loaded on any
//! number of ranks.
//!
//! ```text
//! FOLDER/step-0000000345/
//!   model.safetensors    weights and running statistics by path, with their full shape; metadata in the header
//!   optimizer.burnpack   optimizer state by parameter id, in Burn's own format
//!   optimizer-N.burnpack that of rank N, where each rank's optimizer has a state of its own (local SGD, DiLoCo)
//!   schedule.burnpack    state of the learning-rate scheduler, where one was given
//!   hook.safetensors     state of the communication hook, see `paceline_ddp::Ddp::hook_state`
//!   state.json           see below
//! FOLDER/ledger.jsonl    the samples of each step, see [`ledger`]
//! FOLDER/digests/        digests of the last steps' gradients, see [`digests`]
//! ```
//!
//! ```json
//! {
//!   "version": 2,
//!   "step": 345,                                      steps done
//!   "seed": 0,                                        with step and shard the seed of the device's randomness
//!   "scaler": { "scale": 65536.0, ... },              PyTorch's names; absent without a scaler
//!   "sampler": { "epoch": 15, "consumed": 0, ... },   position in the data, on any number of ranks
//!   "value": ...,                                     the program's own
//!   "parameters": { "hidden.weight": 1234, ... },     the ids that optimizer.burnpack uses, by path
//!   "best_step": 30,                                  of the best checkpoint so far; absent unless the program compares them
//!   "weights_sha256": "...",                          see `paceline_ddp::weights::sha256`
//!   "files": { "model.safetensors": "SHA-256", ... }
//! }
//! ```
//!
//! Version 1, which `paceline train` wrote, had no `parameters` (ids were 1, 2, ... in registration order) and its own
//! values at the top level instead of in `value`. It can still be read.
//!
//! A checkpoint is written into a hidden folder beside its place, synced and renamed, so it exists whole or not at all. If
//! the checksums show that the disk lost or changed data later, the previous checkpoint is used. With the feature `object-store`,
//! [`Checkpoints::upload_to`] keeps a copy in an object store.

mod average;
mod checkpoint;
mod checkpoints;
mod dealt;
mod decide;
pub mod digests;
mod error;
mod files;
mod folder;
pub mod ledger;
mod left;
mod lock;
mod memory;
mod optimizer;
mod record;
#[cfg(feature = "object-store")]
mod remote;
#[cfg(not(feature = "object-store"))]
#[path = "remote/absent.rs"]
mod remote;
mod saved;
mod share;
mod snapshot;
mod tensors;

pub use average::averaged;
pub use checkpoint::{Checkpoint, write_tensors};
pub use checkpoints::Checkpoints;
pub use decide::{by_rank_0, by_rank_0_slowly};
pub use error::CheckpointError;
pub use folder::{has_valid, list};
pub use lock::{FolderLock, LockError};
pub use optimizer::{LoadOptimizer, OptimizerRef};
pub use remote::Remote;
#[cfg(feature = "object-store")]
pub use remote::tls;
pub use saved::{Origin, Saved, SavedModel};
pub use tensors::read_safetensors;
