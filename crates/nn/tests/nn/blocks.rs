//! Models made of blocks.

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Dropout, DropoutConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::{Bool, Device, Tensor};
use paceline_nn::{Block, Pass, Recompute};

use crate::support::{Bits, device, values};

/// A transformer layer with dropout.
#[derive(Module, Debug)]
struct Layer {
    norm: LayerNorm,
    project: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
    dropout: Dropout,
}

impl Layer {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            norm: LayerNormConfig::new(8).init(device),
            project: linear(8, 24),
            out: linear(8, 8),
            up: linear(8, 16),
            down: linear(16, 8),
            dropout: DropoutConfig::new(0.3).init(),
        }
    }

    fn forward(&self, (x, mask): (Tensor<3>, Tensor<3, Bool>)) -> Tensor<3> {
        let mut parts = self
            .project
            .forward(self.norm.forward(x.clone()))
            .chunk(3, 2);
        let (value, key, query) = (parts.remove(2), parts.remove(1), parts.remove(0));
        let scores = query.matmul(key.transpose()).mask_fill(mask, -1e9);
        let scores = self.dropout.forward(softmax(scores, 2));
        let x = x + self.dropout.forward(self.out.forward(scores.matmul(value)));
        let hidden = gelu(self.up.forward(self.norm.forward(x.clone())));
        x + self.dropout.forward(self.down.forward(hidden))
    }
}

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Block<Layer>>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let layer = |index| Block::new(index, Layer::new(device));
        Self {
            layers: (0..4).map(layer).collect(),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, len, _] = x.dims();
        let mask = Tensor::<2, Bool>::tril_mask([len, len], 0, &x.device());
        let mask = mask.unsqueeze::<3>().repeat_dim(0, batch);
        self.layers.iter().fold(x, |x, layer| {
            layer.forward((x, mask.clone()), Layer::forward)
        })
    }
}

const POLICIES: [&str; 5] = ["none", "blocks", "2", "3", "burn"];

fn policies() -> impl Iterator<Item = Recompute> {
    POLICIES.iter().map(|text| text.parse().expect("a policy"))
}

/// The bits of one pass under `recompute`.
fn pass<M: Module>(
    recompute: Recompute,
    model: &M,
    input: &Tensor<3>,
    forward: impl Fn(&M, Tensor<3>) -> Tensor<3>,
) -> Bits {
    let pass = Pass::new(recompute).with_seed(11);
    let bits = pass.enter(|| {
        let output = forward(model, input.clone());
        let weights = values(output.dims(), &input.device());
        let gradients = (output.clone() * weights).sum().backward();
        let mut bits = Bits::default();
        bits.add("output", Some(output));
        bits.add("input", input.grad(&gradients));
        bits.add_model(model, &gradients);
        bits
    });
    pass.finish().expect("no failure");
    bits
}

#[test]
fn a_transformer_with_dropout_has_the_same_bits_under_every_policy() {
    let (device, _alone) = device();
    let net = Net::new(&device);
    let input = values([2, 5, 8], &device).require_grad();
    let expected = pass(Recompute::None, &net, &input, Net::forward);
    assert!(expected.missing().is_empty());
    for recompute in policies() {
        let bits = pass(recompute, &net, &input, Net::forward);
        assert_eq!(bits, expected, "{recompute}");
    }
    // Parameters that are made at their first use draw from the same random numbers.
    let fresh = policies().map(|recompute| {
        device.seed(1);
        pass(recompute, &Net::new(&device), &input, Net::forward)
    });
    let fresh: Vec<Bits> = fresh.collect();
    assert!(fresh.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn blocks_in_blocks_have_the_same_bits_under_every_policy() {
    let (device, _alone) = device();
    let outer = Block::new(0, Net::new(&device));
    let input = values([2, 5, 8], &device).require_grad();
    let forward = |outer: &Block<Net>, x| outer.forward(x, Net::forward);
    let expected = pass(Recompute::None, &outer, &input, forward);
    for recompute in policies() {
        assert_eq!(
            pass(recompute, &outer, &input, forward),
            expected,
            "{recompute}"
        );
    }
}

/// Three terms and more: the order of additions shows in the bits.
#[test]
fn a_tensor_used_inside_and_outside_of_blocks_has_the_same_bits_under_every_policy() {
    let (device, _alone) = device();
    let linear: Linear = LinearConfig::new(8, 8).init(&device);
    let blocks = [0, 1, 2].map(|index| Block::new(index, linear.clone()));
    let forward = |blocks: &[Block<Linear>; 3], x: Tensor<3>| {
        blocks.iter().fold(x.clone(), |y, block| {
            let both = block.forward((y.clone(), x.clone()), |linear, (y, x)| {
                linear.forward(x.clone()) * linear.forward(gelu(x)) + linear.forward(y.clone()) * y
            });
            both + x.clone() * y
        })
    };
    let input = values([2, 5, 8], &device).require_grad();
    let expected = pass(Recompute::None, &blocks, &input, forward);
    for recompute in policies() {
        let bits = pass(recompute, &blocks, &input, forward);
        assert_eq!(bits, expected, "{recompute}");
    }
}

#[test]
fn each_block_and_each_of_its_runs_drops_other_values() {
    let (device, _alone) = device();
    let ones = Tensor::<2>::ones([8, 8], &device);
    let run = |pass: &Pass, index: usize| {
        let block = Block::new(index, DropoutConfig::new(0.5).init());
        let output = pass.enter(|| block.forward(ones.clone(), Dropout::forward));
        output.inner().into_data()
    };
    let pass = Pass::default().with_seed(1);
    let masks = [run(&pass, 0), run(&pass, 0), run(&pass, 1)];
    assert!(masks[0] != masks[1] && masks[0] != masks[2] && masks[1] != masks[2]);
    // Where a block runs does not matter: the same index, run and seed give the same values.
    let elsewhere = Pass::default().with_seed(1);
    assert_eq!(run(&elsewhere, 1), masks[2]);
    assert_eq!(run(&elsewhere, 0), masks[0]);
    elsewhere.restart(2);
    assert_ne!(run(&elsewhere, 0), masks[0]);
}

#[test]
fn without_a_pass_a_block_seeds_nothing() {
    let (device, _alone) = device();
    let ones = Tensor::<2>::ones([8, 8], &device);
    let dropout = DropoutConfig::new(0.5).init();
    let block = Block::new(3, dropout.clone());
    device.seed(9);
    let plain = dropout.forward(ones.clone());
    device.seed(9);
    let output = block.forward(ones, Dropout::forward);
    assert_eq!(output.inner().into_data(), plain.inner().into_data());
}

#[derive(Default)]
struct Paths {
    path: Vec<String>,
    found: Vec<String>,
}

impl ModuleVisitor for Paths {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.push(format!("{name}:{container_type}"));
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found
            .push(format!("{} {}", self.path.join("."), param.id));
    }
}

#[test]
fn a_block_has_the_paths_ids_records_and_display_of_its_module() {
    let (device, _alone) = device();
    let blocks = Net::new(&device).layers;
    let layers: Vec<Layer> = blocks.iter().map(|block| block.module().clone()).collect();
    let (mut of_blocks, mut of_layers) = (Paths::default(), Paths::default());
    blocks.visit(&mut of_blocks);
    layers.visit(&mut of_layers);
    assert_eq!(of_blocks.found, of_layers.found);
    assert_eq!(of_blocks.found.len(), 4 * 10);
    assert_eq!(blocks.num_params(), layers.num_params());
    assert_eq!(
        format!("{}", Show(&blocks[0])),
        format!("{}", Show(&layers[0]))
    );

    // A record of the modules loads into blocks.
    let others = Net::new(&device)
        .layers
        .load_record(layers.clone().into_record());
    let weight = |block: &Block<Layer>| block.module().up.weight.val().into_data();
    assert_eq!(
        others.iter().map(weight).collect::<Vec<_>>(),
        blocks.iter().map(weight).collect::<Vec<_>>()
    );
}

struct Show<'a, M>(&'a M);

impl<M: burn::module::ModuleDisplay> std::fmt::Display for Show<'_, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.format(Default::default()))
    }
}

#[test]
fn a_policy_is_read_back_from_its_text() {
    for (text, policy) in POLICIES.iter().zip(policies()) {
        assert_eq!(policy.to_string(), *text);
    }
    for text in ["", "0", "-1", "all", "None"] {
        let error = text.parse::<Recompute>().expect_err(text).to_string();
        assert!(error.ends_with(&format!("{text:?}")), "{error}");
    }
}
