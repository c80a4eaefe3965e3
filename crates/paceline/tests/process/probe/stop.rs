//! A user program that saves and stops on request; the tests of stop requests start it as ranks.
//!
//! `probe stop ddp` trains a small model in its own loop; `probe stop group` only adds numbers. Every rank prints `runs`
//! after some steps, and `rank R stopped after step N by SIGNAL` when it has stopped.

use std::env::Args;

use burn::nn::LinearConfig;
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor};
use paceline::{Ddp, DdpOptions, ProcessGroup, ReduceOp, StopSignal};

/// More than any test waits for, at half a millisecond each.
const STEPS: u64 = 100_000;
/// From this step on a rank prints that it runs.
const UNDERWAY: u64 = 5;

pub(crate) fn run(mut args: Args) -> Result<(), Box<dyn std::error::Error>> {
    let group = paceline::init()?;
    let rank = group.rank();
    let end = match args.next().as_deref() {
        Some("ddp") => train(group)?,
        Some("group") => add_up(&group)?,
        other => panic!("expected `ddp` or `group`, got {other:?}"),
    };
    match end {
        Some((step, signal)) => println!("rank {rank} stopped after step {step} by {signal}"),
        None => println!("rank {rank} was not asked"),
    }
    Ok(())
}

fn train(group: ProcessGroup) -> Result<Option<(u64, StopSignal)>, Box<dyn std::error::Error>> {
    let device = Device::flex().autodiff();
    device.seed(0);
    let model = LinearConfig::new(4, 1).init(&device);
    let mut optimizer = SgdConfig::new().init();
    let options = DdpOptions {
        stop_on_signal: true,
        ..DdpOptions::default()
    };
    let (mut ddp, mut model) = Ddp::new(group, model, options)?;
    while ddp.next_step() < STEPS {
        let reduced = ddp.step(&model, |shard| {
            let input = Tensor::<2>::ones([2, 4], &device);
            let loss = shard.model()?.forward(input).powf_scalar(2.0).mean();
            shard.backward(loss, 2.0)
        })?;
        model = optimizer.step(1e-3, model, reduced.grads);
        if let Some(signal) = ddp.stop_requested() {
            return Ok(Some((ddp.next_step(), signal)));
        }
        say_once(ddp.next_step());
    }
    Ok(None)
}

fn add_up(group: &ProcessGroup) -> Result<Option<(u64, StopSignal)>, Box<dyn std::error::Error>> {
    group.stop_on_signal()?;
    for step in 1..=STEPS {
        group.all_reduce(&mut [step as i64], ReduceOp::Sum)?;
        if let Some(signal) = group.stop_requested(step)? {
            return Ok(Some((step, signal)));
        }
        say_once(step);
    }
    Ok(None)
}

fn say_once(step: u64) {
    if step == UNDERWAY {
        println!("runs");
    }
}
