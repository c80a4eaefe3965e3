//! A model's tensors as plain bytes: saving, restoring and hashing them.

use std::collections::HashMap;
use std::ops::Range;

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

/// The elements of `whole` in a range along an axis.
///
/// # Panics
///
/// If the tensor has no such axis or elements.
pub fn slice(whole: &TensorData, axis: usize, range: Range<usize>) -> TensorData {
    let (mut shape, dtype) = (whole.shape().to_vec(), whole.dtype());
    let row = shape[axis + 1..].iter().product::<usize>() * dtype.size();
    let rows = whole.as_bytes().chunks_exact((shape[axis] * row).max(1));
    let kept = rows.flat_map(|rows| &rows[range.start * row..range.end * row]);
    let kept = kept.copied().collect();
    shape[axis] = range.len();
    TensorData::from_bytes_vec(kept, shape, dtype)
}

/// The tensor whose slices along an axis these are, in order: all of one type, and of one shape but for that axis.
///
/// # Panics
///
/// If `slices` is empty.
pub fn concat(slices: &[TensorData], axis: usize) -> TensorData {
    let (mut shape, dtype) = (slices[0].shape().to_vec(), slices[0].dtype());
    let row = shape[axis + 1..].iter().product::<usize>() * dtype.size();
    let lens: Vec<usize> = slices.iter().map(|slice| slice.shape()[axis]).collect();
    let count: usize = shape[..axis].iter().product();
    shape[axis] = lens.iter().sum();
    let mut whole = Vec::with_capacity(shape.iter().product::<usize>() * dtype.size());
    for at in 0..count {
        for (slice, len) in slices.iter().zip(&lens) {
            whole.extend_from_slice(&slice.as_bytes()[at * len * row..(at + 1) * len * row]);
        }
    }
    TensorData::from_bytes_vec(whole, shape, dtype)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_along_any_axis_are_the_tensor_again() {
        let whole = TensorData::new((0..60_i32).collect(), [3, 5, 4]);
        assert_eq!(
            slice(&whole, 2, 1..2),
            TensorData::new((0..15).map(|i| 4 * i + 1).collect::<Vec<i32>>(), [3, 5, 1])
        );
        for (axis, cuts) in [(0, [0, 1, 3]), (1, [0, 3, 5]), (2, [0, 0, 4])] {
            let slices = cuts
                .windows(2)
                .map(|cut| slice(&whole, axis, cut[0]..cut[1]));
            let slices: Vec<TensorData> = slices.collect();
            assert_eq!(concat(&slices, axis), whole, "axis {axis}");
        }
    }
}
