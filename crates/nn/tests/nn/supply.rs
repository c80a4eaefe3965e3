//! Blocks whose parameters are supplied: gathered, computed, dropped, gathered again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Shape, Tensor};
use paceline_nn::{Block, BoxError, Pass, Recompute, Supply, visited_block};

use crate::support::{device, values};

#[derive(Module, Debug)]
struct Layer {
    up: Linear,
    frozen: Linear,
    down: Linear,
    idle: Linear,
    dropout: Dropout,
}

impl Layer {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            up: linear(6, 10),
            frozen: Linear::no_grad(linear(10, 10)),
            down: linear(10, 6),
            idle: linear(2, 2),
            dropout: DropoutConfig::new(0.3).init(),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let hidden = self.frozen.forward(gelu(self.up.forward(x.clone())));
        x + self.dropout.forward(self.down.forward(hidden))
    }
}

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Block<Layer>>,
    last: Linear,
}

impl Net {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let run = |x, layer: &Block<Layer>| layer.forward(x, Layer::forward);
        self.last.forward(self.layers.iter().fold(x, run))
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Call {
    Gather(usize),
    Scatter(usize),
}

/// Holds the parameters of all blocks, each cut into three parts.
#[derive(Debug, Default)]
struct Parts {
    blocks: HashMap<usize, Vec<(ParamId, Shape, [Tensor<1>; 3])>>,
    gradients: Mutex<HashMap<ParamId, Option<Tensor<1>>>>,
    calls: Mutex<Vec<Call>>,
    fails_at: Option<Call>,
}

impl Parts {
    fn call(&self, call: Call) -> Result<(), BoxError> {
        let fails = self.fails_at.as_ref() == Some(&call);
        self.calls.lock().unwrap().push(call);
        if fails { Err("lost".into()) } else { Ok(()) }
    }
}

impl Supply for Parts {
    fn parameters(&self, block: usize) -> Vec<(ParamId, Shape)> {
        let params = self.blocks.get(&block).into_iter().flatten();
        params.map(|(id, shape, _)| (*id, shape.clone())).collect()
    }

    fn gather(&self, block: usize) -> Result<Vec<Tensor<1>>, BoxError> {
        self.call(Call::Gather(block))?;
        let whole = |(_, _, parts): &(_, _, [Tensor<1>; 3])| Tensor::cat(parts.to_vec(), 0);
        Ok(self.blocks[&block].iter().map(whole).collect())
    }

    fn scatter(&self, block: usize, gradients: Vec<Option<Tensor<1>>>) -> Result<(), BoxError> {
        self.call(Call::Scatter(block))?;
        let ids = self.blocks[&block].iter().map(|(id, ..)| *id);
        self.gradients.lock().unwrap().extend(ids.zip(gradients));
        Ok(())
    }
}

/// Takes the parameters out of blocks and leaves placeholders of one value.
#[derive(Default)]
struct Cut(Parts);

impl ModuleMapper for Cut {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(block) = visited_block() else {
            return param;
        };
        let (id, tensor, mapper) = param.consume();
        let (shape, len) = (tensor.shape(), tensor.shape().num_elements());
        let flat = tensor.clone().inner().reshape([len]);
        let third = len.div_ceil(3);
        let part = |at: usize| {
            let range = (at * third).min(len)..((at + 1) * third).min(len);
            flat.clone().slice([range])
        };
        let entry = (id, shape, [0, 1, 2].map(part));
        self.0.blocks.entry(block).or_default().push(entry);
        let placeholder = Tensor::zeros([1; D], &tensor.device());
        let placeholder = placeholder.set_require_grad(tensor.is_require_grad());
        Param::from_mapped_value(id, placeholder, mapper)
    }
}

/// Bits of gradients by parameter, on the tape or taken out of it.
struct Gradients<'a> {
    all: &'a burn::tensor::Gradients,
    found: HashMap<ParamId, Vec<f32>>,
}

impl ModuleVisitor for Gradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = param.base().grad(self.all) {
            let data = gradient.into_data();
            self.found.insert(param.id, data.try_to_vec().expect("f32"));
        }
    }
}

struct Bits {
    output: Vec<f32>,
    input: Option<Vec<f32>>,
    gradients: HashMap<ParamId, Vec<f32>>,
}

fn run(net: &Net, input: &Tensor<2>, pass: &Pass) -> Bits {
    let bits = |tensor: Tensor<2>| tensor.inner().into_data().try_to_vec::<f32>().expect("f32");
    pass.enter(|| {
        let output = net.forward(input.clone());
        let weights = values(output.dims(), &input.device());
        let all = (output.clone() * weights).sum().backward();
        let mut gradients = Gradients {
            all: &all,
            found: HashMap::new(),
        };
        net.visit(&mut gradients);
        Bits {
            output: bits(output),
            input: input.grad(&all).map(bits),
            gradients: gradients.found,
        }
    })
}

fn net(device: &Device) -> Net {
    let layer = |index| Block::new(index, Layer::new(device));
    Net {
        layers: (0..3).map(layer).collect(),
        last: LinearConfig::new(6, 2).init(device),
    }
}

#[test]
fn supplied_parameters_give_the_bits_of_parameters_in_the_module() {
    let (device, _alone) = device();
    for wants_input in [true, false] {
        let whole = net(&device);
        let input = values([4, 6], &device).set_require_grad(wants_input);
        let expected = run(&whole, &input, &Pass::default().with_seed(3));

        let mut cut = Cut::default();
        let placeholders = whole.map(&mut cut);
        assert_eq!(placeholders.layers.num_params(), 3 * 8);
        let parts = Arc::new(cut.0);
        let pass = Pass::default().with_seed(3).with_supply(&parts);
        let bits = run(&placeholders, &input, &pass);
        pass.finish().expect("no failure");

        assert_eq!(bits.output, expected.output);
        assert_eq!(bits.input, expected.input);
        let mut gradients = bits.gradients;
        assert_eq!(gradients.len(), 2, "placeholders have no gradients");
        for (id, gradient) in parts.gradients.lock().unwrap().drain() {
            let gradient = gradient.map(|g| g.into_data().try_to_vec().expect("f32"));
            gradients.extend(gradient.map(|gradient| (id, gradient)));
        }
        assert_eq!(gradients, expected.gradients);
        let calls: Vec<_> = (0..3)
            .map(Call::Gather)
            .chain(
                (0..3)
                    .rev()
                    .flat_map(|at| [Call::Gather(at), Call::Scatter(at)]),
            )
            .collect();
        assert_eq!(*parts.calls.lock().unwrap(), calls);
    }
}

#[test]
fn evaluation_gathers_once_and_scatters_nothing() {
    let (device, _alone) = device();
    let whole = net(&device);
    let input = values([4, 6], &device).inner();
    let expected = whole.valid().forward(input.clone()).into_data();
    let mut cut = Cut::default();
    let placeholders = whole.map(&mut cut).valid();
    let parts = Arc::new(cut.0);
    let pass = Pass::default().with_supply(&parts);
    let output = pass.enter(|| placeholders.forward(input)).into_data();
    assert_eq!(output, expected);
    let calls: Vec<_> = (0..3).map(Call::Gather).collect();
    assert_eq!(*parts.calls.lock().unwrap(), calls);
}

/// The pass ends, reports the failure, and asks for nothing after it.
#[test]
fn a_failed_gather_or_scatter_ends_the_pass_with_its_error() {
    let (device, _alone) = device();
    let input = values([4, 6], &device);
    for (fails_at, calls) in [
        (Call::Gather(0), 1),
        (Call::Gather(2), 3),
        (Call::Scatter(2), 5),
        (Call::Scatter(0), 9),
    ] {
        let mut cut = Cut::default();
        let placeholders = net(&device).map(&mut cut);
        let parts = Arc::new(Parts {
            fails_at: Some(fails_at.clone()),
            ..cut.0
        });
        let pass = Pass::new(Recompute::None).with_supply(&parts);
        run(&placeholders, &input, &pass);
        let error = pass.finish().expect_err("a failure").to_string();
        assert_eq!(error, "lost", "{fails_at:?}");
        assert_eq!(parts.calls.lock().unwrap().len(), calls, "{fails_at:?}");
    }
}
