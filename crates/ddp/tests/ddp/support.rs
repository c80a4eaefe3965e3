//! A small model, its data, and a way to train it on any number of ranks.

use std::time::Duration;

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, Tensor, TensorData};
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_ddp::{BucketCaps, Ddp, DdpError, DdpOptions, Reduced, weights};

/// Three layers with batch normalisation and a side branch that only some inputs use.
#[derive(Module, Debug)]
pub(crate) struct Net {
    pub(crate) first: Linear,
    pub(crate) norm: BatchNorm,
    pub(crate) second: Linear,
    pub(crate) side: Linear,
    pub(crate) never: Linear,
}

impl Net {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            first: LinearConfig::new(6, 16).init(device),
            norm: BatchNormConfig::new(16).init(device),
            second: LinearConfig::new(16, 3).init(device),
            side: LinearConfig::new(6, 3).init(device),
            never: LinearConfig::new(2, 2).init(device),
        }
    }

    pub(crate) fn forward(&self, input: Tensor<2>, side: bool) -> Tensor<2> {
        let hidden = self.first.forward(input.clone());
        // In mixed precision the norm alone is f32.
        let (compute, norm) = (hidden.dtype(), self.norm.gamma.val().dtype());
        let hidden = relu(self.norm.forward(hidden.cast(norm)).cast(compute));
        let output = self.second.forward(hidden);
        if side {
            output + self.side.forward(input)
        } else {
            output
        }
    }
}

/// The device to test on: the host, or the kind in `PACELINE_TEST_DEVICE` if the tests are built for it.
pub(crate) fn device() -> Device {
    let kind = std::env::var("PACELINE_TEST_DEVICE").unwrap_or_else(|_| "cpu".into());
    let kind = kind
        .parse()
        .expect("PACELINE_TEST_DEVICE is a kind of device");
    let device = paceline_ddp::device::open(kind, 0);
    let device = device.unwrap_or_else(|error| panic!("{error}"));
    device.autodiff()
}

pub(crate) fn group_options() -> GroupOptions {
    GroupOptions {
        timeout: Duration::from_secs(20),
        ..GroupOptions::default()
    }
}

/// Runs `rank` on one thread per rank and returns what each returned, in rank order.
pub(crate) fn ranks<R: Send>(world: usize, rank: impl Fn(ProcessGroup) -> R + Sync) -> Vec<R> {
    ranks_with(&group_options(), world, rank)
}

pub(crate) fn ranks_with<R: Send>(
    options: &GroupOptions,
    world: usize,
    rank: impl Fn(ProcessGroup) -> R + Sync,
) -> Vec<R> {
    let groups = ProcessGroup::local(world, options).expect("a local group");
    paceline_testing::on_threads(groups, rank)
}

/// Sample `index` of a data set that needs no files: features and target are functions of the index.
pub(crate) fn batch(indices: &[usize], device: &Device) -> (Tensor<2>, Tensor<2>) {
    let feature = |i: usize, k: usize| ((i * 31 + k * 17) % 23) as f32 / 11.5 - 1.0;
    let x: Vec<f32> = indices
        .iter()
        .flat_map(|&i| (0..6).map(move |k| feature(i, k)))
        .collect();
    let y: Vec<f32> = indices
        .iter()
        .flat_map(|&i| (0..3).map(move |k| feature(i + 7, k).sin()))
        .collect();
    let n = indices.len();
    (
        Tensor::from_data(TensorData::new(x, [n, 6]), device),
        Tensor::from_data(TensorData::new(y, [n, 3]), device),
    )
}

pub(crate) fn loss(net: &Net, indices: &[usize], side: bool, device: &Device) -> Tensor<1> {
    let (x, y) = batch(indices, device);
    let dtype = net.first.weight.val().dtype();
    let (x, y) = (x.cast(dtype), y.cast(dtype));
    (net.forward(x, side) - y).powf_scalar(2.0).mean()
}

pub(crate) fn optimizer() -> ModuleOptimizer {
    AdamWConfig::new().init()
}

/// Options with buckets small enough that the little model has several.
pub(crate) fn options(shards: usize) -> DdpOptions {
    DdpOptions {
        shards: Some(shards),
        caps: BucketCaps {
            first_bytes: 64,
            bytes: 256,
        },
        ..DdpOptions::default()
    }
}

/// The samples of `shard` in `step`: uneven on purpose, and sometimes none.
pub(crate) fn samples(step: u64, shard: usize) -> Vec<usize> {
    let count = (step as usize * 5 + shard * 3) % 7;
    let count = if count == 1 { 2 } else { count };
    (0..count)
        .map(|k| step as usize * 100 + shard * 10 + k)
        .collect()
}

/// One step of the standard job: micro-batches of at most three samples, the side branch on some
/// shards only.
pub(crate) fn train_step(ddp: &mut Ddp, net: &Net, device: &Device) -> Result<Reduced, DdpError> {
    ddp.step(net, |shard| {
        let samples = samples(shard.step(), shard.shard());
        let micro: Vec<&[usize]> = samples.chunks(3).collect();
        shard.micro_batches(micro.len());
        for indices in micro {
            let side = shard.shard() % 3 == 1;
            let loss = loss(&shard.model()?, indices, side, device);
            shard.add(0, indices.len() as f32);
            shard.backward(loss, indices.len() as f32)?;
        }
        Ok(())
    })
}

/// Trains the standard job and returns the hash of the final weights.
pub(crate) fn train(group: ProcessGroup, shards: usize, steps: usize) -> String {
    train_as(DType::F32, group, shards, steps)
}

/// Like [`train`], with every tensor of the net in another floating-point type.
pub(crate) fn train_as(dtype: DType, group: ProcessGroup, shards: usize, steps: usize) -> String {
    let device = device();
    let mut optimizer = optimizer();
    let options = DdpOptions {
        sums: 1,
        ..options(shards)
    };
    let net = in_type(dtype, fixed_net(&device));
    let (mut ddp, mut net) = Ddp::new(group, net, options).expect("ranks agree");
    for _ in 0..steps {
        let reduced = train_step(&mut ddp, &net, &device).expect("a step");
        assert_eq!(reduced.weight as f32, reduced.sums[0]);
        net = optimizer.step(0.01, net, reduced.grads);
    }
    let types = weights::export(&net);
    assert!(types.iter().all(|(_, data)| data.dtype() == dtype));
    weights::sha256(&weights::export(&net))
}

/// A net whose weights do not depend on random numbers, since threads share Burn's generator.
pub(crate) fn fixed_net(device: &Device) -> Net {
    fixed(Net::new(device), (1 << 24) as f32, 0.5)
}

/// `net` with weights that do not depend on random numbers: `n / unit - shift` for numbers n below 2^24.
pub(crate) fn fixed<M: Module>(net: M, unit: f32, shift: f32) -> M {
    let mut counter = 0u32;
    let tensors = weights::export(&net).into_iter();
    let tensors = tensors.filter(|(path, _)| !path.contains("running"));
    let values = tensors.map(|(path, data)| {
        let values = (0..data.num_elements()).map(|_| {
            counter = counter.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (counter >> 8) as f32 / unit - shift
        });
        let values: Vec<f32> = values.collect();
        (path, TensorData::new(values, data.shape().clone()))
    });
    let values = values.collect();
    weights::import(net, values)
}

/// `net` with all its tensors in `dtype`.
pub(crate) fn in_type(dtype: DType, net: Net) -> Net {
    let values = weights::export(&net);
    let values = values
        .into_iter()
        .map(|(path, data)| (path, data.convert_dtype(dtype)))
        .collect();
    weights::import(net, values)
}
