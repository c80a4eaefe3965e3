//! Your own model and loop: 1, 2 or 4 ranks print the same hash, even if the job is interrupted and started again.
//! `cargo build --release --example minimal`, then `paceline run --nproc-per-node 2 target/release/examples/minimal`.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Tensor, TensorData};
use paceline::nn::{AdamWConfig, linear, relu};
use paceline::{BatchOptions, Checkpoint, Checkpoints, Ddp, DdpOptions, weights};

#[derive(Module, Debug)]
struct Net {
    layers: [Linear; 2],
}

/// Mean squared error on the samples of y = sin(x) with these indices.
fn loss(net: &Net, indices: &[usize]) -> Tensor<1> {
    let x: Vec<f32> = indices.iter().map(|&i| i as f32 / 160.0 - 3.2).collect();
    let x = TensorData::new(x, [indices.len(), 1]);
    let x = Tensor::<2>::from_data(x, &net.layers[0].weight.device());
    let y = linear(&net.layers[1], relu(linear(&net.layers[0], x.clone())));
    (y - x.sin()).square().mean()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let group = paceline::init()?;
    let device = paceline::device::of_rank(&group)?.autodiff();
    device.seed(0);
    let layer = |from, to| LinearConfig::new(from, to).init(&device);
    let layers = [layer(1, 64), layer(64, 1)];
    let mut optimizer = AdamWConfig::new().init();
    let options = DdpOptions {
        stop_on_signal: true,
        ..DdpOptions::default()
    };
    let (mut ddp, mut model) = Ddp::new(group, Net { layers }, options)?;
    let mut batches = ddp.batches(1024, BatchOptions::new(64).epochs(20))?;
    let mut checkpoints = Checkpoints::open("runs/minimal", ddp.group())?;
    if let Some(mut saved) = checkpoints.latest()? {
        (model, optimizer) = saved.restore(&mut ddp, model, optimizer)?;
        batches.load_state_dict(saved.sampler()?)?;
    }
    for plan in batches {
        let reduced = ddp.step_on(&model, &plan, loss)?;
        model = optimizer.step(3e-3, model, reduced.grads);
        let stop = ddp.stop_requested();
        if plan.ends_epoch() || stop.is_some() {
            println!("epoch {} loss {:.5}", plan.epoch + 1, reduced.loss);
            let checkpoint = Checkpoint::new(&model, &optimizer).sampler(&plan.after);
            checkpoints.save(&ddp, checkpoint)?;
        }
        if let Some(signal) = stop {
            checkpoints.finish()?;
            std::process::exit(signal.exit_code().into());
        }
    }
    let hash = weights::sha256(&weights::export(&model));
    println!("weights sha256: {hash}");
    Ok(checkpoints.finish()?)
}
