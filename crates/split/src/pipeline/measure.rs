//! A dry run: how long each block of a model takes.

use std::time::Instant;

use burn::tensor::{Device, Tensor};
use paceline_nn::tape::{Point, untracked};

use super::model::Sequential;

/// Runs of each block; the fastest counts.
const ROUNDS: usize = 3;

/// The time of each block's forward and backward pass on one micro-batch, for [`cut`](super::cut).
///
/// *Units*: seconds. *Cost*: three passes through the whole model. *Memory*: the whole model, and one block's activations.
pub fn measure<const D: usize, M: Sequential<D>>(
    model: &M,
    device: &Device,
    input: impl Fn() -> M::Input,
    loss: impl Fn(M::Output) -> Tensor<1>,
) -> Vec<f64> {
    let count = model.block_count();
    let mut costs = vec![f64::INFINITY; count];
    for _ in 0..ROUNDS {
        let mut between: Option<Tensor<D>> = None;
        for (block, cost) in costs.iter_mut().enumerate() {
            let x = between.take().map(Tensor::require_grad);
            let start = Instant::now();
            let y = match x {
                None => model.first(input()),
                Some(x) if block + 1 == count => {
                    drop(loss(model.last(x)).backward());
                    *cost = cost.min(seconds(start, device));
                    break;
                }
                Some(x) => model.middle(block, x),
            };
            between = Some(untracked(y.clone()));
            let gradient = y.clone().inner().ones_like();
            drop(Point::origin(&y).deposit(y, || Some(gradient)).backward());
            *cost = cost.min(seconds(start, device));
        }
    }
    costs
}

/// The time since `start`, when the device has done its work.
fn seconds(start: Instant, device: &Device) -> f64 {
    // A device that fails does so again in the first step, which reports it.
    let _ = device.sync();
    start.elapsed().as_secs_f64()
}
