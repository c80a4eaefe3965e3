//! From the ranks' averages to an optimizer's gradients: the norm, and tensors on the model's device.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor, TensorData};
use paceline_collective::ProcessGroup;

use crate::buffer::{self, Entry, Value};
use crate::ddp::Parts;
use crate::error::DdpError;
use crate::plan::BucketPlan;
use crate::reducer::{Means, cut};
use crate::zero::{CHUNK, Shares};

/// Where the whole gradient is, of which this rank has a part.
pub(crate) struct Whole<'a> {
    pub(crate) group: &'a ProcessGroup,
    pub(crate) plan: &'a BucketPlan,
    /// The ranks' slices, if each has its own only.
    pub(crate) shares: Option<&'a Shares>,
    /// The other parts of the model.
    pub(crate) parts: Option<&'a Parts>,
}

/// Scales gradients so that their common 2-norm is at most `limit`; returns the norm before.
///
/// *Blocks*: on a device, until the gradients are computed. With slices or parts, until all ranks have sent the squares of
/// theirs.
///
/// *Numerics*: in host memory, squares are added in f64, first in chunks of a parameter and then chunk by chunk in
/// registration order, the same on every rank and for any number of ranks and parts. On a device each parameter's squares are
/// added there in their own type. Devices of different kinds could round differently, so all ranks use rank 0's norm.
pub(crate) fn clip(means: &mut Means, limit: f64, whole: &Whole<'_>) -> Result<f64, DdpError> {
    let own = match (&*means, whole.shares) {
        (Means::Host(values), None) => squares_of_all(values, whole),
        (Means::Host(values), Some(shares)) => squares_of_slices(values, shares, whole)?,
        (Means::Device(values), _) => squares_on_device(values, whole)?,
    };
    let mut total = match whole.parts {
        None => own.iter().sum(),
        Some(parts) => parts.sum_of_squares(&own)?,
    };
    if matches!(means, Means::Device(_)) {
        let mut first = [total];
        whole.group.broadcast(&mut first, 0)?;
        [total] = first;
    }
    let norm = f64::sqrt(total);
    // PyTorch's clip_grad_norm_ uses the same small constant against division by zero.
    let factor = (limit / (norm + 1e-6)) as f32;
    if factor < 1.0 {
        means.scale(factor);
    }
    Ok(norm)
}

/// The sum of squares of each chunk.
fn squares(values: &[f32]) -> impl Iterator<Item = f64> {
    let square = |x: &f32| f64::from(*x) * f64::from(*x);
    values
        .chunks(CHUNK)
        .map(move |chunk| chunk.iter().map(square).sum())
}

/// The chunks of a gradient, or of a slice of `len` elements of it.
fn chunks_of(index: usize, len: usize, whole: &Whole<'_>) -> usize {
    let chunks = whole.parts.map(|parts| parts.chunks(index, len));
    chunks.unwrap_or(len.div_ceil(CHUNK))
}

/// Appends the squares of a gradient, or of a slice of `len` elements, chunk by chunk; 0 for a parameter that no rank used.
fn append_squares(
    all: &mut Vec<f64>,
    (index, len): (usize, usize),
    value: Option<&Vec<f32>>,
    whole: &Whole<'_>,
) {
    let end = all.len() + chunks_of(index, len, whole);
    if let Some(mean) = value {
        match whole.parts.and_then(|parts| parts.by_piece(index, mean)) {
            None => all.extend(squares(mean)),
            Some(pieces) => all.extend(pieces.iter().flat_map(|piece| squares(piece))),
        }
    }
    all.resize(end, 0.0);
}

/// The squares of whole gradients, chunk by chunk.
fn squares_of_all(values: &[Option<Vec<f32>>], whole: &Whole<'_>) -> Vec<f64> {
    let mut all = Vec::new();
    for (index, value) in values.iter().enumerate() {
        let (bucket, position) = whole.plan.places[index];
        let len = whole.plan.buckets[bucket].segments[position].len;
        append_squares(&mut all, (index, len), value.as_ref(), whole);
    }
    all
}

/// The same of gradients of which each rank has slices.
fn squares_of_slices(
    values: &[Option<Vec<f32>>],
    shares: &Shares,
    whole: &Whole<'_>,
) -> Result<Vec<f64>, DdpError> {
    let Whole { group, plan, .. } = *whole;
    let parameters = 0..plan.places.len();
    let len_of = |index, rank| shares.owned(plan, index, rank).len();
    let chunks_of = |index, rank| chunks_of(index, len_of(index, rank), whole);
    let ranks = 0..group.world();
    let counts = ranks.map(|rank| parameters.clone().map(|index| chunks_of(index, rank)).sum());
    let counts: Vec<usize> = counts.collect();
    let mut own = Vec::with_capacity(counts[group.rank()]);
    for index in parameters.clone() {
        let slice = (index, len_of(index, group.rank()));
        append_squares(&mut own, slice, values[index].as_ref(), whole);
    }
    let mut all = vec![0.0; counts.iter().sum()];
    group.all_gather_v(&own, &mut all, &counts)?;
    let mut next = Vec::with_capacity(counts.len());
    let mut first = 0;
    for count in counts {
        next.push(first);
        first += count;
    }
    let mut in_order = Vec::with_capacity(all.len());
    for index in parameters {
        for (rank, next) in next.iter_mut().enumerate() {
            let chunks = chunks_of(index, rank);
            in_order.extend_from_slice(&all[*next..*next + chunks]);
            *next += chunks;
        }
    }
    Ok(in_order)
}

/// The squares of each gradient or of its pieces; 0 for parameters that no rank used.
fn squares_on_device(
    values: &[Option<Tensor<1>>],
    whole: &Whole<'_>,
) -> Result<Vec<f64>, DdpError> {
    let mut sums = Vec::new();
    let mut is_used = Vec::new();
    for (index, value) in values.iter().enumerate() {
        let pieces = match (value, whole.parts) {
            (Some(mean), parts) => {
                let pieces = parts.and_then(|parts| parts.by_piece_on_device(index, mean));
                pieces.unwrap_or_else(|| vec![mean.clone()])
            }
            (None, _) => Vec::new(),
        };
        let count = whole.parts.map_or(1, |parts| parts.pieces(index));
        is_used.extend((0..count).map(|_| value.is_some()));
        sums.extend(
            pieces
                .into_iter()
                .map(|mean| buffer::sum(mean.clone() * mean)),
        );
    }
    let read = buffer::read(sums, "the norm of the gradients")?;
    let sums = read.iter().flat_map(|sum| sum.iter::<f64>().next());
    let mut read = sums;
    let squares = is_used.into_iter();
    Ok(squares
        .map(|is_used| is_used.then(|| read.next()).flatten().unwrap_or(0.0))
        .collect())
}

/// Makes the gradients of `model` from the averages of its `parameters`. The average of a slice becomes a gradient of the
/// slice.
pub(crate) fn register<M: Module>(
    model: &M,
    parameters: &[Entry],
    means: Means,
    plan: &BucketPlan,
    device: &Device,
) -> GradientsParams {
    let values: Vec<Option<Value>> = match means {
        Means::Device(values) => on_device(values),
        Means::Host(values) if buffer::is_host(device) => {
            let values = values.into_iter();
            values.map(|value| value.map(Value::Host)).collect()
        }
        Means::Host(values) => on_device(upload(&values, plan, &device.clone().inner())),
    };
    let values = parameters.iter().zip(values).filter_map(|(entry, value)| {
        let shape = entry.shape.clone().into();
        value.map(|value| (entry.id, (value, shape)))
    });
    buffer::gradients(model, values.collect())
}

fn on_device(values: Vec<Option<Tensor<1>>>) -> Vec<Option<Value>> {
    let values = values.into_iter();
    values
        .map(|value| value.map(|mean| Value::Device(Box::new(mean))))
        .collect()
}

/// Uploads averages to a device with one copy per bucket.
fn upload(
    values: &[Option<Vec<f32>>],
    plan: &BucketPlan,
    device: &Device,
) -> Vec<Option<Tensor<1>>> {
    let mut uploaded = vec![None; values.len()];
    for bucket in &plan.buckets[..plan.tail()] {
        let mut block = vec![0.0; bucket.stride];
        for segment in &bucket.segments {
            if let Some(value) = &values[segment.index] {
                block[segment.offset..segment.offset + value.len()].copy_from_slice(value);
            }
        }
        let block = TensorData::new(block, [bucket.stride]);
        let block = Tensor::<1>::from_data(block, (device, DType::F32));
        for segment in &bucket.segments {
            if let Some(value) = &values[segment.index] {
                uploaded[segment.index] = Some(cut(&block, segment.offset, value.len()));
            }
        }
    }
    uploaded
}
