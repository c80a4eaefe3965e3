//! One run of a block: its random numbers, its supplied parameters, and the pass inside it.

use std::collections::HashMap;

use burn::module::{Devices, Module, ParamId};
use burn::tensor::{Device, Distribution, Tensor};

use crate::failure::Failure;
use crate::pass::{BlockRun, Pass};
use crate::supply::{Supplied, Values};
use crate::tape::Slot;
use crate::tensors::{Kind, MapTensors, Near, Tensors};

/// One run of a block.
pub(crate) struct Run {
    outer: Option<Pass>,
    /// The module's, then others of the input.
    devices: Devices,
    /// Number of the module's.
    own: usize,
    seed: Option<u64>,
    supplied: Option<Supplied>,
}

impl Run {
    pub(crate) fn new<M: Module>(module: &M, input: &impl Tensors, index: usize) -> Self {
        let outer = Pass::current();
        let mut found = FindDevices(module.devices());
        let own = found.0.len();
        let _ = input.clone().map(&mut found);
        let supplied = outer.as_ref().and_then(|pass| {
            let source = pass.supply()?.clone();
            Supplied::new(source, index, pass.failure().clone())
        });
        Self {
            supplied,
            seed: outer.as_ref().and_then(|pass| pass.next_seed(index)),
            devices: found.0,
            own,
            outer,
        }
    }

    /// The input on the module's device.
    pub(crate) fn near<I: Tensors>(&self, input: I) -> I {
        match self.own == self.devices.len() {
            true => input,
            false => input.map(&mut Near(&self.devices[..self.own])),
        }
    }

    pub(crate) fn is_off_tape(&self) -> bool {
        self.outer.as_ref().is_some_and(Pass::is_off_tape)
    }

    pub(crate) fn is_supplied(&self) -> bool {
        self.supplied.is_some()
    }

    pub(crate) fn gather(&self) -> Values {
        let supplied = self.supplied.as_ref();
        supplied.map(Supplied::gather).unwrap_or_default()
    }

    pub(crate) fn scatter(&self, gradients: &HashMap<ParamId, Slot>) {
        if let Some(supplied) = &self.supplied {
            supplied.scatter(gradients);
        }
    }

    /// Seeds the devices, if there is a seed, and runs `f` in a pass that begins afresh.
    pub(crate) fn call<R>(&self, run: BlockRun, f: impl FnOnce() -> R) -> R {
        let _turn = self.outer.as_ref().and_then(Pass::turn);
        if let Some(seed) = self.seed {
            self.devices.iter().for_each(|device| device.seed(seed));
        }
        let outer = self.outer.clone().unwrap_or_else(Pass::unheard);
        outer.inside(self.seed, run).enter(f)
    }

    /// Draws a seed from the device if the pass gives none, because a second run needs the numbers of the first.
    pub(crate) fn draw_seed(&mut self) {
        if let (None, Some(device)) = (self.seed, self.devices.first()) {
            self.seed = Some(draw_seed(&device.clone().inner()));
        }
    }

    /// Whether the gradient of a parameter that this run used is left for later.
    pub(crate) fn defers(&self, id: ParamId) -> bool {
        let left = self.outer.as_ref().and_then(Pass::left);
        left.is_some_and(|left| left.has_taken(id))
    }

    /// Where the pass around it leaves its first error.
    pub(crate) fn failure(&self) -> Failure {
        let outer = self.outer.as_ref();
        outer.map_or_else(Failure::unheard, |pass| pass.failure().clone())
    }
}

/// A seed from the device's random numbers, to continue with after others have drawn from them.
pub fn draw_seed(device: &Device) -> u64 {
    let numbers = Distribution::Uniform(0.0, 65_536.0);
    let numbers = Tensor::<1>::random([4], numbers, device);
    let numbers = numbers.into_data().convert::<f32>();
    let numbers = numbers.iter::<f32>().map(|number| number as u64);
    numbers.fold(0, |seed, number| (seed << 16) | number)
}

struct FindDevices(Devices);

impl MapTensors for FindDevices {
    fn any<const D: usize, K: Kind>(&mut self, tensor: Tensor<D, K>) -> Tensor<D, K> {
        let device = tensor.device();
        if !self.0.contains(&device) {
            self.0.push(device);
        }
        tensor
    }
}
