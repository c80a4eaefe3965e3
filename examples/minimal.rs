//! Your own model and your own loop, data-parallel.
//!
//! ```text
//! cargo build --release --example minimal
//! cargo run --release -- run --nproc-per-node 2 target/release/examples/minimal
//! ```
//!
//! One rank, two ranks or eight print the same hash: on one kind of device the result depends on the number of shards only.
//! `PACELINE_DEVICE=cuda` computes on GPUs, if paceline was built with its feature `cuda`; vulkan, metal and rocm likewise.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor, TensorData};
use paceline::sampler::{BatchOptions, DistributedSampler, SamplerOptions, ShardedBatches};
use paceline::{Ddp, DdpOptions, weights};

const SHARDS: usize = 8;

#[derive(Module, Debug)]
struct Net {
    hidden: Linear,
    output: Linear,
}

impl Net {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.output.forward(relu(self.hidden.forward(x)))
    }
}

/// The samples to learn: y = sin(x).
fn batch(indices: &[usize], device: &Device) -> (Tensor<2>, Tensor<2>) {
    let x: Vec<f32> = indices.iter().map(|&i| i as f32 / 160.0 - 3.2).collect();
    let y: Vec<f32> = x.iter().map(|x| x.sin()).collect();
    let tensor = |values| Tensor::from_data(TensorData::new(values, [indices.len(), 1]), device);
    (tensor(x), tensor(y))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let group = paceline::init()?;
    let rank = group.rank();
    let device = paceline::device::of_rank(&group)?.autodiff();
    device.seed(0);
    let model = Net {
        hidden: LinearConfig::new(1, 64).init(&device),
        output: LinearConfig::new(64, 1).init(&device),
    };
    let mut optimizer = AdamWConfig::new().init();
    let options = DdpOptions {
        shards: Some(SHARDS.max(group.world())),
        stop_on_signal: true,
        ..DdpOptions::default()
    };
    let (mut ddp, mut model) = Ddp::new(group, model, options)?;

    let sampler = DistributedSampler::new(SamplerOptions {
        len: 1024,
        shards: ddp.shard_count(),
        ..SamplerOptions::default()
    })?;
    let epochs = BatchOptions {
        global_batch: 64,
        epochs: Some(20),
        ..BatchOptions::default()
    };
    for step in ShardedBatches::new(sampler, epochs)? {
        let reduced = ddp.step(&model, |shard| {
            let indices = &step.shards[shard.shard()];
            let (x, y) = batch(indices, &device);
            let loss = (shard.model()?.forward(x) - y).powf_scalar(2.0).mean();
            shard.backward(loss, indices.len() as f32)
        })?;
        model = optimizer.step(3e-3, model, reduced.grads);
        // The same answer on all ranks: a longer training saves the model here.
        if let Some(signal) = ddp.stop_requested() {
            println!(
                "rank {rank} stops after step {} by {signal}",
                ddp.next_step()
            );
            return Ok(());
        }
    }
    if rank == 0 {
        let (x, y) = batch(&(0..1024).collect::<Vec<_>>(), &device);
        let error: f32 = (model.forward(x) - y).powf_scalar(2.0).mean().into_scalar();
        println!("mean squared error {error:.5}");
        println!(
            "weights sha256: {}",
            weights::sha256(&weights::export(&model))
        );
    }
    Ok(())
}
