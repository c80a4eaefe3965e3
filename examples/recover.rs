//! A program that goes on when ranks are lost, and takes in the processes that replace them, with the bits of an undisturbed run.
//! `cargo build --release --example recover`, then `paceline run --nproc-per-node 4 --max-restarts 4 target/release/examples/recover`.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Tensor, TensorData};
use paceline::nn::{AdamWConfig, linear, relu};
use paceline::{BatchOptions, Checkpoint, Checkpoints, Ddp, DdpOptions, Recovery};

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
        recovery: Recovery::Live,
        ..DdpOptions::default()
    };
    // A replacement returns from `new` when the others have taken it in, and gets their state from `resume`.
    let (mut ddp, mut model) = Ddp::new(group, Net { layers }, options)?;
    let mut batches = ddp.batches(1024, BatchOptions::new(64).epochs(80))?;
    let mut checkpoints = Checkpoints::open("runs/recover", ddp.group())?;
    if let Some(mut saved) = checkpoints.resume(&mut ddp)? {
        (model, optimizer) = saved.restore(&mut ddp, model, optimizer)?;
        batches.load_state_dict(saved.sampler()?)?;
    }
    for plan in batches {
        let reduced = ddp.step_on(&model, &plan, loss)?;
        model = optimizer.step(3e-3, model, reduced.grads);
        checkpoints.record(&ddp, &plan)?;
        let state = || Checkpoint::new(&model, &optimizer).sampler(&plan.after);
        if plan.ends_epoch() {
            checkpoints.save(&ddp, state())?;
            // Another rank is rank 0 once the first one is lost.
            if ddp.group().rank() == 0 {
                println!("epoch {} loss {:.5}", plan.epoch + 1, reduced.loss);
            }
        }
        checkpoints.admit(&mut ddp, &model, state)?;
    }
    println!("weights sha256: {}", ddp.sha256(&model)?);
    Ok(checkpoints.finish()?)
}
