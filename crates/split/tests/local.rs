//! One process: replicas in threads, and layers on several devices. One test at a time, because Burn has one source of random
//! numbers for a process.

use std::sync::{Mutex, MutexGuard};

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Gradients, Int, Tensor, TensorData};
use paceline_nn::gpt::GptConfig;
use paceline_nn::{Block, Pass, Recompute};
use paceline_split::{DataParallel, ModelParallel};

fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(|broken| broken.into_inner())
}

fn device() -> Device {
    Device::flex().autodiff()
}

#[derive(Module, Debug)]
struct Net {
    first: Block<Linear>,
    norm: BatchNorm,
    dropout: Dropout,
    last: Linear,
    frozen: Linear,
}

impl Net {
    fn new(dropout: f64) -> Self {
        let device = device();
        device.seed(1);
        let net = Self {
            first: Block::new(0, LinearConfig::new(6, 8).init(&device)),
            norm: BatchNormConfig::new(8).init(&device),
            dropout: DropoutConfig::new(dropout).init(),
            last: LinearConfig::new(8, 3).init(&device),
            frozen: LinearConfig::new(8, 3).init(&device).no_grad(),
        };
        let _ = net.valid();
        net
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.first.forward(x, |linear, x| relu(linear.forward(x)));
        let x = self.dropout.forward(self.norm.forward(x));
        self.last.forward(x.clone()) + self.frozen.forward(x)
    }

    /// With the weights' values and running statistics of its own.
    fn copy(&self) -> Self {
        self.valid().train()
    }

    fn gradients(&self, all: &Gradients) -> Vec<TensorData> {
        let first = &self.first.module().weight;
        let weights = [&first.val(), &self.last.weight.val()];
        assert!(self.frozen.weight.val().grad(all).is_none());
        let gradients = weights.map(|weight| weight.grad(all).expect("a gradient").into_data());
        let scale = self.norm.gamma.val().grad(all).expect("a gradient");
        [gradients.to_vec(), vec![scale.into_data()]].concat()
    }
}

fn batch(rows: usize) -> Tensor<2> {
    let values: Vec<f32> = (0..rows * 6)
        .map(|i| ((i * 37) % 23) as f32 / 11.5 - 1.0)
        .collect();
    Tensor::from_data(TensorData::new(values, [rows, 6]), &device())
}

fn parallel(replicas: usize) -> DataParallel {
    DataParallel::new(vec![device(); replicas])
}

fn sum(parts: Vec<Vec<TensorData>>) -> Vec<TensorData> {
    let tensors = |part: Vec<TensorData>| -> Vec<Vec<f32>> {
        part.into_iter()
            .map(|data| data.iter::<f32>().collect())
            .collect()
    };
    let mut parts = parts.into_iter();
    let first = parts.next().expect("a part");
    let shapes: Vec<_> = first.iter().map(|data| data.shape().clone()).collect();
    let total = parts.map(tensors).fold(tensors(first), |total, part| {
        let add = |(a, b): (Vec<f32>, Vec<f32>)| a.iter().zip(b).map(|(a, b)| a + b).collect();
        total.into_iter().zip(part).map(add).collect()
    });
    let data = total.into_iter().zip(shapes);
    data.map(|(values, shape)| TensorData::new(values, shape))
        .collect()
}

/// The chunks of 3, 3 and 1 rows one after the other, from the same weights and statistics.
#[test]
fn replicas_give_the_outputs_and_the_added_gradients_of_the_chunks() {
    let _alone = alone();
    let net = Net::new(0.0);
    let input = batch(7).require_grad();
    let mut outputs = Vec::new();
    let mut parts = Vec::new();
    let mut statistics = Vec::new();
    for (start, rows) in [(0, 3), (3, 3), (6, 1)] {
        let copy = net.copy();
        let output = copy.forward(input.clone().inner().narrow(0, start, rows).autodiff());
        outputs.push(output.clone().inner());
        let gradients = output.powf_scalar(2.0).sum().backward();
        parts.push(copy.gradients(&gradients));
        statistics.push(copy.norm.running_mean.value_sync().into_data());
    }
    let own = net.copy();
    let output = parallel(3).forward(&own, input.clone(), Net::forward);
    assert_eq!(output.to_data(), Tensor::cat(outputs, 0).into_data());
    let gradients = output.powf_scalar(2.0).sum().backward();
    assert_eq!(own.gradients(&gradients), sum(parts));
    assert_eq!(input.grad(&gradients).expect("a gradient").dims(), [7, 6]);
    assert_eq!(
        own.norm.running_mean.value_sync().into_data(),
        statistics[0]
    );
}

#[test]
fn dropout_is_repeatable_and_recomputed_blocks_change_no_bits() {
    let _alone = alone();
    let net = Net::new(0.5);
    let run = |replicas, recompute, seed| {
        let net = net.copy();
        device().seed(seed);
        let pass = Pass::new(recompute).with_seed(seed);
        let gradients = pass.enter(|| {
            let output = parallel(replicas).forward(&net, batch(8), Net::forward);
            output.powf_scalar(2.0).sum().backward()
        });
        pass.finish().expect("no failure");
        net.gradients(&gradients)
    };
    let expected = run(4, Recompute::None, 7);
    for _ in 0..3 {
        assert_eq!(run(4, Recompute::None, 7), expected);
        assert_eq!(run(4, Recompute::Blocks, 7), expected);
    }
    assert_ne!(run(4, Recompute::None, 8), expected, "dropout drops");
    assert_ne!(
        run(2, Recompute::None, 7),
        expected,
        "statistics are those of a chunk"
    );
}

#[test]
fn tensors_of_every_kind_are_cut_and_joined_and_a_single_chunk_runs_on_the_model() {
    let _alone = alone();
    let net = Net::new(0.0);
    let labels = Tensor::<1, Int>::arange(0..7, &device());
    let both = |net: &Net, (x, labels): (Tensor<2>, Tensor<1, Int>)| {
        let even = labels.clone().remainder_scalar(2).equal_elem(0);
        (net.forward(x), (labels, even))
    };
    let input = (batch(7), labels.clone());
    let (x, (found, even)) = parallel(4).forward(&net, input.clone(), both);
    assert_eq!(x.dims(), [7, 3]);
    assert_eq!(found.into_data(), labels.into_data());
    assert_eq!(
        even.into_data().iter::<bool>().filter(|even| *even).count(),
        4
    );
    for replicas in [0, 1] {
        let net = Net::new(0.0);
        let (alone, _) = parallel(replicas).forward(&net, input.clone(), both);
        let expected = Net::new(0.0).forward(batch(7));
        assert_eq!(alone.into_data(), expected.into_data());
    }
}

const GPT: GptConfig = GptConfig {
    vocabulary: 11,
    context: 6,
    layers: 3,
    heads: 2,
    width: 8,
    dropout: 0.0,
};

#[test]
fn every_tensor_is_placed_with_its_path_and_its_block() {
    let _alone = alone();
    let mut parts = Vec::new();
    let _ = ModelParallel::place_by(GPT.init(&device()), |part| {
        let name = part.path.rsplit_once('.').expect("a tensor's path").0;
        parts.push((part.block, name.to_owned()));
        device()
    });
    let first = |block| {
        parts
            .iter()
            .find(|(at, _)| *at == block)
            .map(|(_, name)| name.as_str())
    };
    assert_eq!(first(Some(0)), Some("embedding.tokens"));
    assert_eq!(first(Some(3)), Some("blocks.2.attention_norm"));
    assert_eq!(parts.last(), Some(&(None, "norm".to_owned())));
}

/// Every kind of device in this build; on the CPU alone both parts are on one.
#[test]
fn a_model_on_two_devices_learns_as_on_one() {
    let _alone = alone();
    let kind = std::env::var("PACELINE_TEST_DEVICE").unwrap_or_else(|_| "cpu".into());
    let kind = kind
        .parse()
        .expect("PACELINE_TEST_DEVICE is a kind of device");
    let second = paceline_ddp::device::open(kind, 0)
        .expect("a device")
        .autodiff();
    let run = |cuts: Vec<usize>| {
        device().seed(3);
        let gpt = GPT.init(&device());
        let _ = gpt.valid();
        let gpt = ModelParallel::new(vec![device(), second.clone()], cuts).place(gpt);
        let tokens = Tensor::<2, Int>::ones([2, 6], &device());
        let scores = gpt.forward(tokens);
        let place = scores.device();
        let gradients = scores.clone().powf_scalar(2.0).mean().backward();
        let embedding = gpt.embedding.module();
        let mut visitor = Squares(Vec::new(), &gradients);
        embedding.visit(&mut visitor);
        gpt.visit(&mut visitor);
        (place, scores.into_data(), visitor.0)
    };
    let (place, scores, squares) = run(vec![9]);
    assert_eq!(place, device());
    let (other, found, gradients) = run(vec![2]);
    assert_eq!(other, second);
    if kind == paceline_ddp::device::DeviceKind::Cpu {
        assert_eq!((found, gradients), (scores, squares));
    } else {
        found.assert_approx_eq::<f32>(&scores, Default::default());
        assert_eq!(gradients.len(), squares.len());
    }
}

struct Squares<'a>(Vec<f32>, &'a Gradients);

impl burn::module::ModuleVisitor for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<Tensor<D>>) {
        let gradient = param.val().grad(self.1).expect("a gradient");
        assert_eq!(gradient.device(), param.val().device());
        self.0.push(gradient.powf_scalar(2.0).sum().into_scalar());
    }
}
