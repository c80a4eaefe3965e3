//! `Placement`: where the tensors of a model are, if no rank's model holds all of them. Exports, imports and hashes of the whole
//! model, one tensor at a time.

use std::collections::HashMap;
use std::ops::Range;

use burn::module::{Module, ParamId};
use burn::tensor::{DType, TensorData};
use paceline_collective::ProcessGroup;

use crate::buffer::{self, Handle};
use crate::error::DdpError;

/// Bytes of small weights sent in one broadcast.
const BROADCAST_BYTES: usize = 16 << 20;

/// Where the tensors of a model are, if this rank's model does not hold all of them.
///
/// In the place of a parameter that it does not hold, the model has a *placeholder*: a tensor without elements, with the
/// parameter's id, path, rank and type. [`Ddp`](crate::Ddp) neither hooks nor compares placeholders.
///
/// All ranks of [`group`](Self::group) call the functions for the same tensors in the same order.
pub trait Placement: Send + Sync {
    /// The ranks that together hold the model.
    fn group(&self) -> &ProcessGroup;

    /// The shape of a tensor for which this rank's model has a placeholder.
    fn shape(&self, id: ParamId) -> Vec<usize>;

    /// The whole shape of a tensor of which this rank's model has one of shape `own`.
    fn whole_shape(&self, id: ParamId, own: Vec<usize>) -> Vec<usize> {
        match own.contains(&0) {
            true => self.shape(id),
            false => own,
        }
    }

    /// The slice of a parameter that this rank's model holds in its place: an axis and a range along it. Without one it holds
    /// the whole parameter or a placeholder.
    fn slice(&self, id: ParamId) -> Option<(usize, Range<usize>)> {
        let _ = id;
        None
    }

    /// The number of the pipeline's stage that holds a parameter; 0 without a pipeline.
    fn stage(&self, id: ParamId) -> usize {
        let _ = id;
        0
    }

    /// The whole tensor, on every rank. `own` is the tensor of this rank's model; a placeholder's has no elements.
    ///
    /// *Blocks*: until the ranks that hold it have sent it.
    fn whole(&self, id: ParamId, own: TensorData) -> Result<TensorData, DdpError>;

    /// Takes a new value, the whole tensor; returns it for this rank's model, or `None` if that keeps a placeholder.
    fn replace(&self, id: ParamId, whole: TensorData) -> Option<TensorData>;
}

/// Every tensor of the model in the order of the paths, with its whole shape.
pub(crate) fn sorted<M: Module>(placement: Option<&dyn Placement>, model: &M) -> Vec<Handle> {
    let mut handles = registered(placement, model);
    handles.sort_by(|a, b| a.path.cmp(&b.path));
    handles
}

/// The same in registration order.
fn registered<M: Module>(placement: Option<&dyn Placement>, model: &M) -> Vec<Handle> {
    let mut handles = buffer::handles(model);
    for handle in &mut handles {
        if let Some(placement) = placement {
            let own = std::mem::take(&mut handle.shape);
            handle.shape = placement.whole_shape(handle.id, own);
        }
    }
    handles
}

/// Gives `each` the path and the whole value of every tensor of the model, in the order of the paths.
///
/// *Memory*: one tensor at a time.
pub(crate) fn export<M: Module, E: From<DdpError>>(
    placement: Option<&dyn Placement>,
    model: &M,
    mut each: impl FnMut(&str, TensorData) -> Result<(), E>,
) -> Result<(), E> {
    for handle in sorted(placement, model) {
        let (id, path) = (handle.id, handle.path.clone());
        let own = handle.read();
        let whole = match placement {
            Some(placement) => placement.whole(id, own)?,
            None => own,
        };
        each(&path, whole)?;
    }
    Ok(())
}

/// `model` with rank 0's tensors: those in its `values`, and for the others those of its model.
///
/// *Memory*: 16 MiB, or the largest tensor.
pub(crate) fn broadcast<M: Module>(
    group: &ProcessGroup,
    placement: Option<&dyn Placement>,
    mut model: M,
    mut values: HashMap<String, TensorData>,
) -> Result<M, DdpError> {
    let group = placement.map_or(group, Placement::group);
    let is_root = group.rank() == 0;
    let handles = registered(placement, &model);
    // A placeholder without a new value stays as it is.
    let has_value = |handle: &Handle| values.contains_key(&handle.path) || !handle.is_placeholder();
    let sent: Vec<u8> = handles
        .iter()
        .map(|handle| has_value(handle).into())
        .collect();
    let sent = group.broadcast_bytes(is_root.then_some(&sent[..]), 0)?;
    let sent = handles.into_iter().zip(sent).filter(|(_, sent)| *sent > 0);
    let mut batch = Vec::new();
    let mut handles = sent.map(|(handle, _)| handle).peekable();
    while let Some(handle) = handles.next() {
        batch.push(handle);
        let bytes: usize = batch.iter().chain(handles.peek()).map(Handle::bytes).sum();
        if handles.peek().is_some() && bytes <= BROADCAST_BYTES {
            continue;
        }
        model = broadcast_batch(
            group,
            placement,
            model,
            std::mem::take(&mut batch),
            &mut values,
        )?;
    }
    Ok(model)
}

fn broadcast_batch<M: Module>(
    group: &ProcessGroup,
    placement: Option<&dyn Placement>,
    model: M,
    batch: Vec<Handle>,
    values: &mut HashMap<String, TensorData>,
) -> Result<M, DdpError> {
    let mut tensors = Vec::with_capacity(batch.len());
    let total = batch.iter().map(Handle::bytes).sum();
    let mut flat: Vec<u8> = Vec::with_capacity(total);
    for handle in batch {
        let (id, path) = (handle.id, handle.path.clone());
        tensors.push((id, path, handle.shape.clone(), handle.dtype));
        if group.rank() == 0 {
            let value = values.remove(&handle.path);
            let value = value.unwrap_or_else(|| handle.read());
            flat.extend_from_slice(value.as_bytes());
        }
    }
    let own = (group.rank() == 0).then_some(&flat[..]);
    let received = group.broadcast_long(own, total, 0)?;
    let flat = received.unwrap_or(flat);
    let mut new = HashMap::new();
    let mut rest = &flat[..];
    for (id, path, shape, dtype) in tensors {
        let (bytes, after) = rest.split_at(shape.iter().product::<usize>() * dtype.size());
        rest = after;
        let data = TensorData::from_bytes_vec(bytes.to_vec(), shape, dtype);
        let data = match placement {
            Some(placement) => placement.replace(id, data),
            None => Some(data),
        };
        new.extend(data.map(|data| (path, data)));
    }
    Ok(buffer::import(model, new))
}

/// Rank 0's tensor on every rank. `own` is given on rank 0 only.
pub(crate) fn broadcast_tensor(
    group: &ProcessGroup,
    own: Option<TensorData>,
    shape: Vec<usize>,
    dtype: DType,
) -> Result<TensorData, DdpError> {
    let total = shape.iter().product::<usize>() * dtype.size();
    let bytes = own.as_ref().map(TensorData::as_bytes);
    let received = group.broadcast_long(bytes, total, 0)?;
    let received = received.map(|bytes| TensorData::from_bytes_vec(bytes, shape, dtype));
    Ok(received.or(own).expect("received, or sent"))
}
