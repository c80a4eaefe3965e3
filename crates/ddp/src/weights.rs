//! A model's tensors as plain bytes: saving, restoring and hashing them.

use std::collections::HashMap;

use burn::module::Module;
use burn::tensor::TensorData;
use sha2::{Digest, Sha256};

use crate::buffer;

/// Every tensor of `model` in registration order: its path and its data.
///
/// Parameters, running statistics, integer and boolean tensors, each once.
pub fn export<M: Module>(model: &M) -> Vec<(String, TensorData)> {
    buffer::export(model)
}

/// `model` with the tensors in `values` (by path) replaced; the others stay.
///
/// *Shape*: the caller has checked the shapes against [`export`]'s; Burn panics on a mismatch.
pub fn import<M: Module>(model: M, values: HashMap<String, TensorData>) -> M {
    buffer::import(model, values)
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
    let mut hash = Sha256::new();
    let mut tensors: Vec<_> = tensors.iter().collect();
    tensors.sort_by_key(|(path, _)| path);
    for (path, data) in tensors {
        let dtype = format!("{:?}", data.dtype());
        for text in [path.as_str(), dtype.as_str()] {
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
    hash.finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
