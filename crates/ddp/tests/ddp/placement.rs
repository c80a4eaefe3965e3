//! Models of which each rank holds a part: exports, imports and hashes are those of the whole model.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Tensor, TensorData};
use paceline_collective::ProcessGroup;
use paceline_ddp::{Ddp, DdpError, DdpOptions, Placement, weights};

use crate::support::{device, optimizer, ranks};

#[derive(Module, Debug)]
struct Layers {
    layers: Vec<Linear>,
}

const LAYERS: usize = 5;

/// Weights that do not depend on random numbers.
fn whole() -> Layers {
    let device = device();
    let layer = |_| LinearConfig::new(3, 3).init(&device);
    let net = Layers {
        layers: (0..LAYERS).map(layer).collect(),
    };
    let tensors = weights::export(&net).into_iter().enumerate();
    let values = tensors.map(|(at, (path, data))| {
        let values = (0..data.num_elements()).map(|i| (at * 31 + i) as f32 / 100.0);
        let values: Vec<f32> = values.collect();
        (path, TensorData::new(values, data.shape().clone()))
    });
    let values = values.collect();
    weights::import(net, values)
}

/// Every `world`-th layer is on one rank.
struct Dealt {
    world: ProcessGroup,
    /// Owner and shape.
    parameters: HashMap<ParamId, (usize, Vec<usize>)>,
}

impl Placement for Dealt {
    fn group(&self) -> &ProcessGroup {
        &self.world
    }

    fn shape(&self, id: ParamId) -> Vec<usize> {
        self.parameters[&id].1.clone()
    }

    fn whole(&self, id: ParamId, own: TensorData) -> Result<TensorData, DdpError> {
        let (owner, shape) = &self.parameters[&id];
        let own = (*owner == self.world.rank()).then_some(own);
        let dtype = burn::tensor::DType::F32;
        let bytes = own.as_ref().map(|own| own.as_bytes());
        let bytes = self.world.broadcast_bytes(bytes, *owner)?;
        Ok(TensorData::from_bytes_vec(bytes, shape.clone(), dtype))
    }

    fn replace(&self, id: ParamId, whole: TensorData) -> Option<TensorData> {
        (self.parameters[&id].0 == self.world.rank()).then_some(whole)
    }
}

struct Cut<'a> {
    rank: usize,
    world: usize,
    layer: usize,
    parameters: &'a mut HashMap<ParamId, (usize, Vec<usize>)>,
}

impl ModuleMapper for Cut<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.layer = name.parse().unwrap_or(self.layer);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let owner = self.layer % self.world;
        let (id, tensor, mapper) = param.consume();
        self.parameters.insert(id, (owner, tensor.dims().to_vec()));
        let tensor = match owner == self.rank {
            true => tensor,
            false => Tensor::zeros([0; D], &tensor.device()).require_grad(),
        };
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// The hashes of the whole model at the start, after a step of each rank's own layers, and after loading the first one again.
fn hashes(world: usize) -> Vec<[String; 3]> {
    ranks(world, |group| {
        let mut parameters = HashMap::new();
        let model = whole().map(&mut Cut {
            rank: group.rank(),
            world,
            layer: 0,
            parameters: &mut parameters,
        });
        let alone = group.split(Some(group.rank() as u32), 0);
        let alone = alone.expect("a group").expect("a colour");
        let options = DdpOptions {
            shards: Some(1),
            ..DdpOptions::default()
        };
        let (mut ddp, mut model) = Ddp::new(alone, model, options).expect("a replica");
        let own = (group.rank()..LAYERS).step_by(world).count();
        assert_eq!(ddp.parameter_count(), own * 12);
        let world = group.clone();
        ddp.set_placement(Arc::new(Dealt { world, parameters }));
        let mut tensors = HashMap::new();
        let exported = ddp.export(&model, |path, data| {
            tensors.insert(path.to_owned(), data);
            Ok::<_, DdpError>(())
        });
        exported.expect("an export");
        let start = ddp.sha256(&model).expect("a hash");
        let state = ddp.state_dict();
        let reduced = ddp.step(&model, |shard| {
            let model = shard.model()?;
            let own = model
                .layers
                .iter()
                .skip(group.rank())
                .step_by(group.world());
            let x = Tensor::<2>::ones([2, 3], &device());
            let loss = own.fold(x, |x, layer| layer.forward(x)).mean();
            shard.backward(loss, 1.0)
        });
        let reduced = reduced.expect("a step");
        assert_eq!(reduced.unused, Vec::<String>::new());
        model = optimizer().step(0.1, model, reduced.grads);
        let trained = ddp.sha256(&model).expect("a hash");
        if group.rank() != 0 {
            tensors.clear();
        }
        model = ddp.load_state_dict(model, &state, tensors).expect("loaded");
        [start, trained, ddp.sha256(&model).expect("a hash")]
    })
}

#[test]
fn every_rank_hashes_and_loads_the_whole_model_of_which_it_holds_a_part() {
    let whole = weights::sha256(&weights::export(&whole()));
    for world in [1, 2, 3] {
        let hashes = hashes(world);
        for [start, trained, loaded] in &hashes {
            assert_eq!(start, &whole, "{world} ranks");
            assert_ne!(trained, &whole, "{world} ranks");
            assert_eq!(trained, &hashes[0][1], "{world} ranks");
            assert_eq!(loaded, &whole, "{world} ranks");
        }
    }
}
