//! Ranks as threads, and the bits of a pass to compare.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Gradients, Int, Tensor, TensorData};
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_ddp::{DdpError, Placement};
use paceline_nn::gpt::{Gpt, GptConfig};

/// Sizes that no number of parts divides by accident: 11 tokens are cut unevenly.
pub(crate) const CONFIG: GptConfig = GptConfig {
    vocabulary: 11,
    context: 8,
    layers: 2,
    heads: 4,
    width: 16,
    dropout: 0.0,
};

/// What `f` returns on each rank of a group.
pub(crate) fn on_ranks<R: Send>(world: usize, f: impl Fn(ProcessGroup) -> R + Sync) -> Vec<R> {
    let groups = ProcessGroup::local(world, &GroupOptions::default()).expect("a group");
    paceline_testing::on_threads(groups, f)
}

/// Values that look random and are the same in every run.
pub(crate) fn values<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (0..count as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0)
        .collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

pub(crate) fn classes(count: usize, total: usize, device: &Device) -> Tensor<1, Int> {
    let values: Vec<i64> = (0..count)
        .map(|i| (i * i + 3 * i) as i64 % total as i64)
        .collect();
    Tensor::from_data(&values[..], device)
}

/// A model whose weights do not depend on Burn's random numbers, which all threads share.
pub(crate) fn gpt(config: &GptConfig, device: &Device) -> Gpt {
    struct Fill(u32);
    impl ModuleMapper for Fill {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            self.0 += 1;
            let by = 0.1 + 0.01 * self.0 as f32;
            param.map(|old| {
                let values = values(old.dims(), &old.device().inner()) * by;
                values.autodiff().set_require_grad(old.is_require_grad())
            })
        }
    }
    config.init(device).map(&mut Fill(0))
}

/// Named tensors.
pub(crate) type Bits = BTreeMap<String, TensorData>;

/// Nothing is cut.
pub(crate) struct Whole;

impl Placement for Whole {
    fn group(&self) -> &ProcessGroup {
        unreachable!("no rank is asked")
    }

    fn shape(&self, _: ParamId) -> Vec<usize> {
        unreachable!("nothing is missing")
    }

    fn whole(&self, _: ParamId, own: TensorData) -> Result<TensorData, DdpError> {
        Ok(own)
    }

    fn replace(&self, _: ParamId, whole: TensorData) -> Option<TensorData> {
        Some(whole)
    }
}

/// The gradients of a model's parameters, whole.
pub(crate) fn gradients<M: Module>(
    model: &M,
    gradients: &Gradients,
    placement: &dyn Placement,
) -> Bits {
    let mut walk = Walk {
        gradients,
        placement,
        path: Vec::new(),
        bits: Bits::new(),
    };
    model.visit(&mut walk);
    walk.bits
}

struct Walk<'a> {
    gradients: &'a Gradients,
    placement: &'a dyn Placement,
    path: Vec<String>,
    bits: Bits,
}

impl ModuleVisitor for Walk<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = param.val().grad(self.gradients).expect("a gradient");
        let whole = self.placement.whole(param.id, gradient.into_data());
        let whole = whole.expect("the other ranks' slices");
        self.bits.insert(self.path.join("."), whole);
    }
}

/// The tensors of all ranks, which must be equal.
pub(crate) fn all_alike(mut ranks: Vec<Bits>) -> Bits {
    let first = ranks.swap_remove(0);
    for rank in &ranks {
        for (name, data) in &first {
            assert_eq!(rank.get(name), Some(data), "{name}");
        }
    }
    first
}
