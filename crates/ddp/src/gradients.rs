//! From the ranks' averages to an optimizer's gradients: the norm, and tensors on the model's device.

use std::collections::HashMap;

use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor, TensorData};
use paceline_collective::ProcessGroup;

use crate::buffer::{self, Value};
use crate::error::DdpError;
use crate::plan::BucketPlan;
use crate::reducer::{Means, cut};

/// Scales gradients so that their common 2-norm is at most `limit`; returns the norm before.
///
/// *Blocks*: on a device, until the gradients are computed.
///
/// *Numerics*: in host memory, squares are added in f64 in registration order, the same on every rank. On a device each
/// parameter's squares are added there in f32. Devices of different kinds could round differently, so all ranks use rank 0's
/// norm.
pub(crate) fn clip(means: &mut Means, limit: f64, group: &ProcessGroup) -> Result<f64, DdpError> {
    let norm = match means {
        Means::Host(values) => {
            let square = |x: &f32| f64::from(*x) * f64::from(*x);
            let total: f64 = values.iter().flatten().flatten().map(square).sum();
            total.sqrt()
        }
        Means::Device(values) => {
            let mut norm = [norm_on_device(values)?];
            group.broadcast(&mut norm, 0)?;
            norm[0]
        }
    };
    // PyTorch's clip_grad_norm_ uses the same small constant against division by zero.
    let factor = (limit / (norm + 1e-6)) as f32;
    if factor < 1.0 {
        means.scale(factor);
    }
    Ok(norm)
}

fn norm_on_device(values: &[Option<Tensor<1>>]) -> Result<f64, DdpError> {
    let present = values.iter().flatten();
    let squares = present.map(|mean| buffer::sum(mean.clone() * mean.clone()));
    let read = buffer::read(squares, "the norm of the gradients")?;
    let total: f64 = read
        .iter()
        .map(|sum| f64::from(buffer::floats(sum)[0]))
        .sum();
    Ok(total.sqrt())
}

/// Makes the gradients of `model` from averages. `index` maps a parameter to its average.
pub(crate) fn register<M: Module>(
    model: &M,
    index: &HashMap<ParamId, usize>,
    means: Means,
    plan: &BucketPlan,
    device: &Device,
) -> GradientsParams {
    let mut values: Vec<Option<Value>> = match means {
        Means::Device(values) => on_device(values),
        Means::Host(values) if buffer::is_host(device) => {
            let values = values.into_iter();
            values.map(|value| value.map(Value::Host)).collect()
        }
        Means::Host(values) => on_device(upload(&values, plan, &device.clone().inner())),
    };
    buffer::gradients(model, |id| {
        index.get(&id).and_then(|index| values[*index].take())
    })
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
                block[segment.offset..segment.offset + segment.len].copy_from_slice(value);
            }
        }
        let block = TensorData::new(block, [bucket.stride]);
        let block = Tensor::<1>::from_data(block, (device, DType::F32));
        for segment in &bucket.segments {
            if values[segment.index].is_some() {
                uploaded[segment.index] = Some(cut(&block, segment.offset, segment.len));
            }
        }
    }
    uploaded
}
