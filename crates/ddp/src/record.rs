//! Digests of numbers in memory: of the gradients of each shard, by which a replay is compared with its run, and of weights, by
//! which ranks are compared with each other.

use std::sync::{Mutex, MutexGuard};

use xxhash_rust::xxh3::xxh3_64;

/// The digests of a shard's gradients in one step, see [`DdpOptions::record`](crate::DdpOptions::record).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardDigests {
    /// The shard.
    pub shard: usize,
    /// The rank that computed it, by the number that its process was started with.
    pub rank: usize,
    /// One of each parameter, in the order of [`Ddp::parameter_paths`](crate::Ddp::parameter_paths); 0 where the shard gives no
    /// gradient.
    pub tensors: Vec<u64>,
}

/// Tells accidents apart at the speed of memory. It does not stop a forger.
///
/// *Source*: XXH3, 64 bits.
pub(crate) fn digest(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// The digests of a rank's shards in the running step, or in the last one.
#[derive(Debug, Default)]
pub(crate) struct Recorder(Mutex<Vec<ShardDigests>>);

impl Recorder {
    pub(crate) fn begin_step(&self) {
        self.lock().clear();
    }

    pub(crate) fn begin_shard(&self, shard: usize, rank: usize, parameters: usize) {
        self.lock().push(ShardDigests {
            shard,
            rank,
            tensors: vec![0; parameters],
        });
    }

    /// Notes the sum of the running shard's micro-batches.
    pub(crate) fn gradient(&self, index: usize, values: &[f32]) {
        if let Some(shard) = self.lock().last_mut() {
            shard.tensors[index] = digest(bytemuck::cast_slice(values));
        }
    }

    pub(crate) fn digests(&self) -> Vec<ShardDigests> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<ShardDigests>> {
        (self.0.lock()).unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
