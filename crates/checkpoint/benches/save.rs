//! How long a save delays a step, compared with copying the state and with the whole write: state that one rank has, and state that
//! is dealt to two.
//!
//! ```text
//! cargo bench -p paceline-checkpoint --bench save
//! ```
//!
//! `cargo test` runs one round with a tiny model.

use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use paceline_checkpoint::{Checkpoint, Checkpoints};
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_ddp::sampler::BatchOptions;
use paceline_ddp::{Block, Ddp, DdpOptions, ZeroRedundancyOptimizer, ZeroStage, weights};

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Block<Linear>>,
}

/// What a rank measured.
#[derive(Default)]
struct Times {
    state_bytes: usize,
    copied: Vec<Duration>,
    held_up: Vec<Duration>,
    written: Vec<Duration>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let is_bench = std::env::args().any(|arg| arg == "--bench");
    // 4 * 2048 * 2048 weights are 64 MiB; AdamW keeps twice that.
    let (width, rounds) = if is_bench { (2048, 9) } else { (32, 1) };
    for ranks in [1, 2] {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
        let groups = ProcessGroup::local(ranks, &GroupOptions::default())?;
        let times = paceline_testing::on_threads(groups, |group| {
            let open = |group: &ProcessGroup| Checkpoints::open(folder.path(), group);
            measure(group, open, width, rounds).map_err(|error| error.to_string())
        });
        let Some(Ok(times)) = times.into_iter().next() else {
            return Err("a rank failed".into());
        };
        match ranks {
            1 => println!(
                "one rank               {:.1} MB",
                times.state_bytes as f64 / 1e6
            ),
            _ => println!(
                "ZeRO-3 on {ranks} ranks      {:.1} MB each",
                times.state_bytes as f64 / 1e6
            ),
        }
        show("copying takes", times.copied);
        show("a save delays a step by", times.held_up);
        show("on disk after", times.written);
    }
    Ok(())
}

fn measure<E: Error + 'static>(
    group: ProcessGroup,
    open: impl Fn(&ProcessGroup) -> Result<Checkpoints, E>,
    width: usize,
    rounds: usize,
) -> Result<Times, Box<dyn Error>> {
    let device = Device::flex().autodiff();
    let ranks = group.world();
    let layer = |at| Block::new(at, LinearConfig::new(width, width).init(&device));
    let net = Net {
        layers: (0..4).map(layer).collect(),
    };
    let options = DdpOptions {
        shards: Some(ranks),
        ..DdpOptions::default()
    };
    let (mut ddp, mut net) = Ddp::new(group, net, options)?;
    let (mut whole, mut dealt) = (AdamWConfig::new().init(), None);
    if ranks > 1 {
        let (optimizer, stage) = (whole.clone(), ZeroStage::Parameters);
        let made = ZeroRedundancyOptimizer::at_stage(&mut ddp, net, optimizer, stage)?;
        (dealt, net) = (Some(made.0), made.1);
    }
    let mut checkpoints = open(ddp.group())?;
    let mut times = Times::default();
    for plan in ddp.batches(1024, BatchOptions::new(ranks))?.take(rounds) {
        let reduced = ddp.step_on(&net, &plan, |net, _| {
            let run = |x, layer: &Block<Linear>| layer.forward(x, |layer, x| layer.forward(x));
            let x = Tensor::<2>::ones([1, width], &device);
            net.layers.iter().fold(x, run).mean()
        })?;
        net = match &mut dealt {
            Some(dealt) => dealt.step(0.1, net, reduced.grads)?,
            None => whole.step(0.1, net, reduced.grads),
        };
        let local = dealt.as_ref().map_or(&whole, |dealt| dealt.local());

        let weights: usize = weights::export(&net)
            .iter()
            .map(|(_, data)| data.as_bytes().len())
            .sum();
        let state = local.into_bytes()?.to_vec();
        let weights = vec![1_u8; weights.max(state.len() / 2)];
        times.state_bytes = weights.len() + state.len();
        let begun = Instant::now();
        black_box((weights.clone(), state.clone()));
        times.copied.push(begun.elapsed());

        let checkpoint = match &dealt {
            Some(dealt) => Checkpoint::new(&net, dealt),
            None => Checkpoint::new(&net, &whole),
        };
        let begun = Instant::now();
        checkpoints.save(&ddp, checkpoint)?;
        times.held_up.push(begun.elapsed());
        checkpoints.wait()?;
        times.written.push(begun.elapsed());
    }
    checkpoints.finish()?;
    Ok(times)
}

fn show(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let ms = |at: usize| times[at].as_secs_f64() * 1e3;
    println!(
        "{what:22} {:.2} ms (median; {:.2} to {:.2})",
        ms(times.len() / 2),
        ms(0),
        ms(times.len() - 1)
    );
}
