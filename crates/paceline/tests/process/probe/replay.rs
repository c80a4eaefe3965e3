//! A user program that records its gradients and replays a step; a test starts it as ranks, and alone.
//!
//! `probe replay FOLDER` trains with checkpoints in FOLDER. In one step one rank of four computes a wrong gradient, as broken
//! hardware would. `probe replay FOLDER STEP` replays that step without the fault, and prints what differs.

use std::env::Args;
use std::num::NonZeroU64;
use std::path::Path;

use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::{Device, Tensor, TensorData};
use paceline::digests::Recorded;
use paceline::{BatchOptions, Checkpoint, Checkpoints, Ddp, DdpOptions, ProcessGroup, Saved};

const SAMPLES: usize = 40;
const STEPS: u64 = 9;
/// The checkpoint that a replay starts from.
const SAVED: u64 = 3;
/// The rank, the step and the shard of the wrong gradient.
const WRONG: (usize, u64, usize) = (2, 7, 2);

type Failure = Box<dyn std::error::Error>;

pub(crate) fn run(mut args: Args) -> Result<(), Failure> {
    let folder = args.next().ok_or("expected a folder")?;
    match args.next() {
        None => train(paceline::init()?, Path::new(&folder)),
        Some(step) => replay(paceline::init()?, Path::new(&folder), step.parse()?),
    }
}

fn start(group: ProcessGroup) -> Result<(Ddp, Linear, ModuleOptimizer), Failure> {
    let device = Device::flex().autodiff();
    device.seed(0);
    let options = DdpOptions {
        shards: Some(4),
        record: NonZeroU64::new(20),
        ..DdpOptions::default()
    };
    let (ddp, model) = Ddp::new(group, LinearConfig::new(1, 2).init(&device), options)?;
    Ok((ddp, model, AdamWConfig::new().init()))
}

fn loss(model: &Linear, indices: &[usize]) -> Tensor<1> {
    let values: Vec<f32> = indices.iter().map(|&at| (at as f32).sin()).collect();
    let values = TensorData::new(values, [indices.len(), 1]);
    let input = Tensor::<2>::from_data(values, &model.weight.device());
    (model.forward(input) - 1.0).powf_scalar(2.0).mean()
}

fn train(group: ProcessGroup, folder: &Path) -> Result<(), Failure> {
    let rank = group.rank();
    let (mut ddp, mut model, mut optimizer) = start(group)?;
    let mut checkpoints = Checkpoints::open(folder, ddp.group())?;
    let batches = ddp.batches(SAMPLES, BatchOptions::new(8))?;
    for (step, plan) in (1..=STEPS).zip(batches) {
        let reduced = ddp.step(&model, |shard| {
            let indices = &plan.shards[shard.shard()];
            let loss = loss(&shard.model()?, indices);
            let loss = match (rank, step, shard.shard()) == WRONG {
                true => loss * 1.000_001,
                false => loss,
            };
            shard.backward(loss, indices.len() as f32)
        })?;
        model = optimizer.step(0.01, model, reduced.grads);
        checkpoints.record(&ddp, &plan)?;
        if step == SAVED {
            checkpoints.save(
                &ddp,
                Checkpoint::new(&model, &optimizer).sampler(&plan.after),
            )?;
        }
    }
    Ok(checkpoints.finish()?)
}

fn replay(group: ProcessGroup, folder: &Path, last: u64) -> Result<(), Failure> {
    let saved = Saved::at_or_before(last - 1, folder, &group)?;
    let mut saved = saved.ok_or("there is no checkpoint")?;
    let recorded = Recorded::read(folder, saved.step() + 1..=last)?;
    let (mut ddp, model, optimizer) = start(group)?;
    let mut batches = ddp.batches(SAMPLES, BatchOptions::new(8))?;
    batches.load_state_dict(saved.sampler()?)?;
    let (mut model, mut optimizer) = saved.restore(&mut ddp, model, optimizer)?;
    for plan in batches.take((last - saved.step()) as usize) {
        let reduced = ddp.step_on(&model, &plan, loss)?;
        model = optimizer.step(0.01, model, reduced.grads);
        let compared = recorded.compare(&ddp, None)?;
        match compared.difference {
            None => println!("step {}: {} shards", ddp.next_step(), compared.shards),
            Some(found) => {
                let (step, shard, rank) = (found.step, found.shard, found.rank);
                let tensors = found.tensors.join(" ");
                println!("step {step}: shard {shard} of rank {rank} differs: {tensors}");
                break;
            }
        }
    }
    Ok(())
}
