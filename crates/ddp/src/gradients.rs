//! From the ranks' averages to an optimizer's gradients: the norm, and tensors on the model's device.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor, TensorData};
use paceline_collective::ProcessGroup;

use crate::buffer::{self, Entry, Value};
use crate::ddp::Parts;
use crate::error::DdpError;
use crate::plan::BucketPlan;
use crate::reducer::{HostMeans, Means, cut};
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

/// The 2-norm of all gradients, which on a device only this rank has.
///
/// *Blocks*: on a device, until the gradients are computed. With slices or parts, until all ranks have sent the squares of
/// theirs.
///
/// *Numerics*: squares are added in chunks of a parameter, and then chunk by chunk in f64 in registration order, the same on
/// every rank and for any number of ranks and parts. In host memory a chunk is added in f64 too, on a device it is added there in
/// the type of the sums.
pub(crate) fn norm(means: &Means, whole: &Whole<'_>) -> Result<f64, DdpError> {
    let squares = match means {
        Means::Host(means) => squares_on_host(means, whole),
        Means::Device(values) => squares_on_device(values, whole)?,
    };
    let own = match whole.shares {
        None => squares_of_all(&squares, whole),
        Some(shares) => squares_of_slices(&squares, shares, whole)?,
    };
    let total = match whole.parts {
        None => own.iter().sum(),
        Some(parts) => parts.sum_of_squares(&own)?,
    };
    Ok(f64::sqrt(total))
}

/// Scales gradients of this 2-norm so that it is at most `limit`.
pub(crate) fn clip(means: &mut Means, norm: f64, limit: f64) {
    // PyTorch's clip_grad_norm_ uses the same small constant against division by zero.
    let factor = (limit / (norm + 1e-6)) as f32;
    if factor < 1.0 {
        means.scale(factor);
    }
}

/// By parameter, the sum of squares of each chunk; `None` where this rank has no gradient.
type Squares = Vec<Option<Vec<f64>>>;

fn squares_on_host(means: &HostMeans, whole: &Whole<'_>) -> Squares {
    let square = |x: &f32| f64::from(*x) * f64::from(*x);
    let of = |values: &[f32]| -> Vec<f64> {
        let chunks = values.chunks(CHUNK);
        chunks.map(|chunk| chunk.iter().map(square).sum()).collect()
    };
    let all = means.iter().enumerate().map(|(index, mean)| {
        let mean = mean?;
        let pieces = whole.parts.and_then(|parts| parts.by_piece(index, mean));
        Some(match pieces {
            None => of(mean),
            Some(pieces) => pieces.iter().flat_map(|piece| of(piece)).collect(),
        })
    });
    all.collect()
}

fn squares_on_device(values: &[Option<Tensor<1>>], whole: &Whole<'_>) -> Result<Squares, DdpError> {
    let mut owners = Vec::new();
    let mut sums = Vec::new();
    for (index, mean) in values.iter().enumerate() {
        let Some(mean) = mean else { continue };
        let parts = whole.parts;
        let pieces = parts.and_then(|parts| parts.by_piece_on_device(index, mean));
        for piece in pieces.unwrap_or_else(|| vec![mean.clone()]) {
            owners.push(index);
            sums.push(buffer::sums_of_chunks(piece.clone() * piece, CHUNK));
        }
    }
    let read = buffer::read(sums, "the norm of the gradients")?;
    let mut squares = vec![None; values.len()];
    for (index, sums) in owners.into_iter().zip(read) {
        let all: &mut Vec<f64> = squares[index].get_or_insert_default();
        all.extend(sums.iter::<f64>());
    }
    Ok(squares)
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
    squares: &Squares,
    whole: &Whole<'_>,
) {
    let end = all.len() + chunks_of(index, len, whole);
    all.extend(squares[index].iter().flatten());
    all.resize(end, 0.0);
}

/// The squares of whole gradients, chunk by chunk.
fn squares_of_all(squares: &Squares, whole: &Whole<'_>) -> Vec<f64> {
    let mut all = Vec::new();
    for (index, (bucket, position)) in whole.plan.places.iter().enumerate() {
        let len = whole.plan.buckets[*bucket].segments[*position].len;
        append_squares(&mut all, (index, len), squares, whole);
    }
    all
}

/// The same of gradients of which each rank has slices.
fn squares_of_slices(
    squares: &Squares,
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
        append_squares(&mut own, slice, squares, whole);
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
        Means::Host(means) if buffer::is_host(device) => means.into_values(),
        Means::Host(means) => on_device(upload(&means, plan, &device.clone().inner())),
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
fn upload(means: &HostMeans, plan: &BucketPlan, device: &Device) -> Vec<Option<Tensor<1>>> {
    let values: Vec<Option<&[f32]>> = means.iter().collect();
    let mut uploaded = vec![None; values.len()];
    for bucket in &plan.buckets[..plan.tail()] {
        let mut block = vec![0.0; bucket.stride];
        for segment in &bucket.segments {
            if let Some(value) = values[segment.index] {
                block[segment.offset..segment.offset + value.len()].copy_from_slice(value);
            }
        }
        let block = TensorData::new(block, [bucket.stride]);
        let block = Tensor::<1>::from_data(block, (device, DType::F32));
        for segment in &bucket.segments {
            if let Some(value) = values[segment.index] {
                uploaded[segment.index] = Some(cut(&block, segment.offset, value.len()));
            }
        }
    }
    uploaded
}
