//! `ModelParallel`: the layers of one model on several devices of one process.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Bool, Device, Int, Tensor};
use paceline_nn::visited_block;

/// A place in a model.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// The path of a tensor, such as `layers.1.weight`.
    pub path: &'a str,
    /// The outermost block that it is in.
    pub block: Option<usize>,
}

/// Naive model parallelism: each part of a model is on one of several devices of this process, and activations are copied
/// from device to device in the forward pass, their gradients back in the backward pass.
///
/// [`Block`](paceline_nn::Block)s copy their inputs to their own device. A model without blocks copies activations itself,
/// with [`to_device`](paceline_nn::to_device).
///
/// *Memory*: each device holds its part of the weights, gradients, optimizer state and activations.
///
/// *Cost*: one device computes at a time, so a step takes as long as on one device, and the copies on top. A
/// [`pipeline`](crate::pipeline) keeps all of them busy.
///
/// *Numerics*: the bits of one device, if the devices are of one kind.
///
/// *Source*: PyTorch's tutorial on model parallelism with two devices; `device_map` of Hugging Face's Accelerate.
///
/// *Example*: the first two blocks on one device, the others on a second
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use paceline_nn::gpt::GptConfig;
/// use paceline_split::ModelParallel;
///
/// let [first, second] = [Device::flex().autodiff(), Device::flex().autodiff()]; // Device::cuda(0), Device::cuda(1)
/// let config = GptConfig { vocabulary: 257, context: 16, layers: 3, heads: 2, width: 8, dropout: 0.1 };
/// let gpt = ModelParallel::new(vec![first.clone(), second], vec![2]).place(config.init(&first));
/// let scores = gpt.forward(Tensor::<2, Int>::zeros([3, 16], &first)); // on the second device
/// # assert_eq!(scores.dims(), [3, 16, 257]);
/// ```
#[derive(Clone, Debug)]
pub struct ModelParallel {
    devices: Vec<Device>,
    cuts: Vec<usize>,
}

impl ModelParallel {
    /// Blocks below `cuts[0]` go to the first of `devices` (with autodiff), those from there below `cuts[1]` to the second, and
    /// so on. More cuts than devices leave the rest on the last.
    #[must_use]
    pub fn new(devices: Vec<Device>, cuts: Vec<usize>) -> Self {
        Self { devices, cuts }
    }

    /// Cuts a model of `blocks` blocks, numbered from 0, into parts that differ by at most one block.
    #[must_use]
    pub fn even(devices: Vec<Device>, blocks: usize) -> Self {
        let count = devices.len();
        let cuts = (1..count).map(|part| (part * blocks).div_ceil(count));
        Self::new(devices, cuts.collect())
    }

    /// `model` with its blocks on their devices. A tensor outside of blocks goes where the block before it is, in registration
    /// order.
    #[must_use]
    pub fn place<M: Module>(&self, model: M) -> M {
        if self.devices.is_empty() {
            return model;
        }
        let mut device = 0;
        Self::place_by(model, |part| {
            device = part.block.map_or(device, |block| self.device_of(block));
            self.devices[device].clone()
        })
    }

    /// The number of a block's device.
    fn device_of(&self, block: usize) -> usize {
        let device = self.cuts.partition_point(|cut| *cut <= block);
        device.min(self.devices.len() - 1)
    }

    /// `model` with each tensor on the device that `device_of` names, asked in registration order.
    ///
    /// Parameters become leaves, as with [`Module::fork`].
    #[must_use]
    pub fn place_by<M: Module>(model: M, device_of: impl FnMut(Part<'_>) -> Device) -> M {
        model.map(&mut Place {
            path: Vec::new(),
            device_of,
        })
    }
}

struct Place<F> {
    path: Vec<String>,
    device_of: F,
}

impl<F: FnMut(Part<'_>) -> Device> Place<F> {
    fn move_to<P: Module>(&mut self, param: P) -> P {
        let path = self.path.join(".");
        let device = (self.device_of)(Part {
            path: &path,
            block: visited_block(),
        });
        param.fork(&device)
    }
}

impl<F: FnMut(Part<'_>) -> Device> ModuleMapper for Place<F> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.move_to(param)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.move_to(param)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.move_to(param)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_go_to_devices_in_order() {
        let check = |parallel: ModelParallel, blocks, expected: &[usize]| {
            let devices: Vec<usize> = (0..blocks).map(|block| parallel.device_of(block)).collect();
            assert_eq!(devices, expected);
        };
        let devices = |count| vec![Device::flex(); count];
        check(ModelParallel::even(devices(2), 4), 4, &[0, 0, 1, 1]);
        check(ModelParallel::even(devices(3), 4), 4, &[0, 0, 1, 2]);
        check(ModelParallel::even(devices(3), 2), 2, &[0, 1]);
        check(ModelParallel::new(devices(2), vec![1, 2]), 3, &[0, 1, 1]);
        check(ModelParallel::new(devices(2), vec![]), 2, &[0, 0]);
    }
}
