//! Gradients of weights that are computed later have the bits of one backward pass.

use std::sync::{Arc, Mutex};

use burn::module::{Module, Param};
use burn::nn::{LayerNorm, LayerNormConfig, Linear};
use burn::tensor::activation::{gelu, tanh};
use burn::tensor::{DType, Device, Tensor};
use paceline_nn::tape::{Point, custom};
use paceline_nn::{
    Block, MapParams, Pass, Recompute, WeightGradients, checkpoint, last_linear, linear, map_params,
};

use crate::support::{Bits, device, values};

fn layer(inputs: usize, outputs: usize, device: &Device) -> Linear {
    Linear {
        weight: Param::from_tensor(values([inputs, outputs], device)),
        bias: Some(Param::from_tensor(values([outputs], device))),
    }
}

/// Casts a model inside the tape, as mixed precision does.
struct Cast(DType);

impl MapParams for Cast {
    fn map<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Param<Tensor<D>>> {
        let (id, tensor, mapper) = param.clone().consume();
        let tensor = tensor.cast(self.0);
        Some(Param::from_mapped_value(id, tensor, mapper))
    }
}

/// A way to run a model.
#[derive(Clone, Copy, Debug)]
struct Way {
    recompute: Recompute,
    dtype: DType,
}

const PLAIN: Way = Way {
    recompute: Recompute::None,
    dtype: DType::F32,
};

impl Way {
    /// The bits of a pass, and the number of gradients that came later.
    fn pass<M: Module, const D: usize>(
        self,
        later: Option<&WeightGradients>,
        model: &M,
        input: &Tensor<D>,
        forward: impl Fn(&M, Tensor<D>) -> Tensor<D>,
    ) -> (Bits, usize) {
        let pass = Pass::new(self.recompute).with_seed(3);
        let pass = match later {
            Some(later) => pass.deferring(later),
            None => pass,
        };
        let cast = map_params(model.clone(), &mut Cast(self.dtype));
        let output = pass.enter(|| forward(&cast, input.clone().cast(self.dtype)));
        if let Some(later) = later {
            later.keep(&cast);
        }
        drop(cast);
        let weights = values(output.dims(), &input.device()).cast(self.dtype);
        let mut bits = Bits::default();
        bits.add("output", Some(output.clone()));
        let at_once = (output * weights).sum().backward();
        let mut first = Bits::default();
        first.add_model(model, &at_once);
        let left = later.and_then(WeightGradients::backward);
        let all: Vec<_> = std::iter::once(&at_once).chain(&left).collect();
        bits.add("input", input.grad(&at_once));
        bits.add_model_of(model, &all);
        pass.finish().expect("no failure");
        let later = first.missing().len();
        (bits, later)
    }

    fn check<M: Module, const D: usize>(
        self,
        expected_later: usize,
        model: &M,
        input: &Tensor<D>,
        forward: impl Fn(&M, Tensor<D>) -> Tensor<D> + Copy,
    ) {
        let (expected, none) = self.pass(None, model, input, forward);
        let later = WeightGradients::default();
        let (bits, count) = self.pass(Some(&later), model, input, forward);
        assert_eq!(bits.differing(&expected), [""; 0], "{self:?}");
        assert_eq!((none, count), (0, expected_later), "{self:?}");
        assert!(later.backward().is_none(), "nothing is left");
    }
}

/// Burn computes some of these as one product of two matrices and others as a batch of products.
#[test]
fn the_bits_are_those_of_burns_layer_for_inputs_of_every_shape() {
    let (device, _alone) = device();
    fn of<const D: usize>(dims: [usize; D], outputs: usize, device: &Device) {
        let whole = layer(dims[D - 1], outputs, device);
        let mut plain = whole.clone();
        plain.bias = None;
        let mut frozen = whole.clone();
        frozen.weight = frozen.weight.set_require_grad(false);
        let half = Way {
            dtype: DType::BF16,
            ..PLAIN
        };
        for input in [values(dims, device).require_grad(), values(dims, device)] {
            for way in [PLAIN, half] {
                way.check(1, &whole, &input, linear);
                way.check(1, &plain, &input, linear);
                way.check(0, &frozen, &input, linear);
            }
        }
    }
    of([5], 3, &device);
    of([5, 7], 3, &device);
    of([1, 7], 9, &device);
    for length in [5, 32, 64] {
        for batch in [1, 3] {
            of([batch, length, 24], 8, &device);
            of([batch, length, 24], 300, &device);
            of([2, batch, length, 6], 40, &device);
        }
    }
}

#[test]
fn the_last_layer_of_a_recomputed_block_computes_gradients_only_with_the_same_bits() {
    let (device, _alone) = device();
    fn of<const D: usize>(dims: [usize; D], device: &Device) {
        let whole = layer(dims[D - 1], 9, device);
        let mut plain = whole.clone();
        plain.bias = None;
        let mut frozen = whole.clone();
        frozen.weight = frozen.weight.set_require_grad(false);
        let recomputed = Way {
            recompute: Recompute::Blocks,
            ..PLAIN
        };
        let half = Way {
            dtype: DType::BF16,
            ..recomputed
        };
        for input in [values(dims, device).require_grad(), values(dims, device)] {
            for (model, later) in [(&whole, 1), (&plain, 1), (&frozen, 0)] {
                let block = Block::new(0, model.clone());
                for way in [recomputed, half] {
                    let once = Way {
                        recompute: Recompute::None,
                        ..way
                    };
                    let forward = |block: &Block<Linear>, x| {
                        block.forward(x, |layer, x| last_linear(layer, tanh(x)))
                    };
                    let expected = once.pass(None, &block, &input, forward);
                    let bits = way.pass(None, &block, &input, forward);
                    assert_eq!(bits, expected, "{dims:?} {way:?}");
                    way.check(later, &block, &input, forward);
                }
            }
        }
    }
    of([5], &device);
    of([5, 7], &device);
    of([3, 32, 24], &device);
    of([2, 1, 5, 6], &device);
}

#[test]
fn only_the_second_run_of_the_last_layer_returns_zeros() {
    let (device, _alone) = device();
    let layer = layer(3, 4, &device);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let told = seen.clone();
    let output = checkpoint(
        &layer,
        values([2, 3], &device).require_grad(),
        move |layer, x| {
            let y = last_linear(layer, x);
            let is_zero = y.clone().inner().abs().sum().into_scalar::<f32>() == 0.0;
            told.lock().expect("no holder panics").push(is_zero);
            y
        },
    );
    output.sum().backward();
    assert_eq!(*seen.lock().expect("no holder panics"), [false, true]);
}

/// Layers in a block and in a block inside of it.
#[derive(Module, Debug)]
struct Part {
    norm: LayerNorm,
    own: Linear,
    inner: Block<Linear>,
    last: Linear,
    end: Linear,
}

impl Part {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let y = tanh(linear(&self.own, self.norm.forward(x.clone())));
        let y = self
            .inner
            .forward(y, |layer, y| last_linear(layer, gelu(y)));
        let y = checkpoint(&self.last, y, |layer, y| linear(layer, tanh(y)));
        last_linear(&self.end, y) + x
    }
}

#[derive(Module, Debug)]
struct Net {
    first: Block<Linear>,
    parts: Vec<Block<Part>>,
    tied: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let part = |index| Part {
            norm: LayerNormConfig::new(8).init(device),
            own: layer(8, 8, device),
            inner: Block::new(index + 10, layer(8, 8, device)),
            last: layer(8, 8, device),
            end: layer(8, 8, device),
        };
        Self {
            // Its input needs no gradient.
            first: Block::new(0, layer(8, 8, device)),
            parts: (1..4).map(|at| Block::new(at, part(at))).collect(),
            tied: layer(8, 8, device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.tied.forward(self.first.forward(x, linear));
        let parts = self.parts.iter();
        let x = parts.fold(x, |x, part| part.forward(x, Part::forward));
        self.tied.forward(x)
    }
}

#[test]
fn the_bits_are_the_same_in_blocks_and_recomputed_blocks() {
    let (device, _alone) = device();
    let net = Net::new(&device);
    for input in [values([2, 5, 8], &device), values([2, 32, 8], &device)] {
        for recompute in ["none", "blocks", "2", "burn"] {
            for dtype in [DType::F32, DType::BF16] {
                let way = Way {
                    recompute: recompute.parse().expect("a policy"),
                    dtype,
                };
                way.check(1 + 3 * 4, &net, &input, Net::forward);
            }
        }
    }
}

#[test]
fn a_weight_that_is_left_out_gets_its_gradient_at_once() {
    let (device, _alone) = device();
    let layer = layer(3, 3, &device);
    let input = values([2, 3], &device);
    let twice = |layer: &Linear, x| linear(layer, linear(layer, x));
    let (expected, _) = PLAIN.pass(None, &layer, &input, twice);
    let later = WeightGradients::except([layer.weight.id]);
    let (bits, count) = PLAIN.pass(Some(&later), &layer, &input, twice);
    assert_eq!((bits, count), (expected, 0));
}

#[test]
fn a_forward_pass_without_its_backward_pass_is_freed() {
    let (device, _alone) = device();
    let held = Arc::new(());
    let on_tape = held.clone();
    let Linear { weight, bias } = layer(3, 3, &device);
    let (id, weight, mapper) = weight.consume();
    let hooked = custom(weight.clone(), weight.clone(), &Point::leaf(&weight), {
        move |gradient| Some(gradient).filter(|_| Arc::strong_count(&on_tape) > 0)
    });
    let layer = Linear {
        weight: Param::from_mapped_value(id, hooked, mapper),
        bias,
    };
    let later = WeightGradients::default();
    let pass = Pass::default().deferring(&later);
    let output = pass.enter(|| linear(&layer, values([2, 3], &device)));
    later.keep(&layer);
    drop((weight, layer, later, pass, output));
    Point::on(&device).sweep();
    assert_eq!(Arc::strong_count(&held), 1);
}

#[test]
fn a_weight_that_is_used_twice_is_a_failure() {
    let (device, _alone) = device();
    let block = Block::new(0, layer(3, 3, &device));
    let other_way = |layer: &Linear, x| linear(layer, x).matmul(layer.weight.val());
    let twice = |layer: &Linear, x| linear(layer, linear(layer, x));
    for (recompute, forward) in [
        (Recompute::None, twice as fn(&Linear, Tensor<2>) -> _),
        (Recompute::Blocks, twice),
        (Recompute::Blocks, other_way),
    ] {
        let later = WeightGradients::default();
        let pass = Pass::new(recompute).deferring(&later);
        let input = values([2, 3], &device);
        let output = pass.enter(|| block.forward(input, forward));
        later.keep(&block);
        let _ = output.sum().backward();
        let error = pass.finish().expect_err("failed").to_string();
        assert!(error.contains("used more than once"), "{error}");
    }
}
