//! A model's tensors as plain bytes: saving, restoring and hashing them.

use std::collections::HashMap;

use burn::module::Module;
use burn::tensor::{DType, TensorData};
use sha2::{Digest, Sha256};

use crate::buffer;

/// Every tensor of `model` in registration order: its path and its data.
///
/// Parameters, running statistics, integer and boolean tensors, each once.
pub fn export<M: Module>(model: &M) -> Vec<(String, TensorData)> {
    let handles = buffer::handles(model).into_iter();
    handles
        .map(|handle| (handle.path.clone(), handle.read()))
        .collect()
}

/// `model` with the tensors in `values` (by path) replaced; the others stay.
///
/// *Shape*: the caller has checked the shapes against [`export`]'s; Burn panics on a mismatch.
pub fn import<M: Module>(model: M, values: HashMap<String, TensorData>) -> M {
    buffer::import(model, values)
}

/// Path, shape and type of every tensor of `model` in registration order, each once.
pub fn tensors<M: Module>(model: &M) -> Vec<(String, Vec<usize>, DType)> {
    let handles = buffer::handles(model).into_iter();
    handles
        .map(|handle| (handle.path, handle.shape, handle.dtype))
        .collect()
}

/// Burn's id and the path of every tensor of `model` in registration order, each once. Optimizer state is keyed by id.
pub fn paths<M: Module>(model: &M) -> Vec<(u64, String)> {
    buffer::paths(model)
}

/// SHA-256 over the names, types, shapes and bytes of `tensors`, as lower-case hexadecimal.
///
/// Per tensor, in the order of their paths: length of the path (u64, little-endian), the path, the type's name
/// likewise, the rank (u64), each dimension (u64), then the elements, little-endian. The order of `tensors` does not matter,
/// so the hash can be verified from a safetensors file alone.
pub fn sha256(tensors: &[(String, TensorData)]) -> String {
    let mut hasher = Hasher::default();
    let mut tensors: Vec<_> = tensors.iter().collect();
    tensors.sort_by_key(|(path, _)| path);
    tensors
        .into_iter()
        .for_each(|(path, data)| hasher.add(path, data));
    hasher.finish()
}

/// [`sha256`] of tensors that come one by one, in the order of their paths.
#[derive(Clone, Debug, Default)]
pub struct Hasher(Sha256);

impl Hasher {
    /// Adds the next tensor.
    pub fn add(&mut self, path: &str, data: &TensorData) {
        let Self(hash) = self;
        let dtype = format!("{:?}", data.dtype());
        for text in [path, dtype.as_str()] {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text.as_bytes());
        }
        let dims: Vec<usize> = data.shape().to_vec();
        hash.update((dims.len() as u64).to_le_bytes());
        for dim in dims {
            hash.update((dim as u64).to_le_bytes());
        }
        hash.update(data.as_bytes());
    }

    /// The hash.
    pub fn finish(self) -> String {
        let digest = self.0.finalize();
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}
