//! How long a save delays a step, compared with copying the state and with the whole write.
//!
//! ```text
//! cargo bench -p paceline-checkpoint --bench save
//! ```
//!
//! `cargo test` runs one round with a tiny model.

use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use paceline_checkpoint::{Checkpoint, Checkpoints};
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_ddp::sampler::BatchOptions;
use paceline_ddp::{Ddp, DdpOptions, weights};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let is_bench = std::env::args().any(|arg| arg == "--bench");
    // 4096 * 4096 weights are 64 MiB; AdamW keeps twice that.
    let (width, rounds) = if is_bench { (4096, 9) } else { (32, 1) };
    let group = ProcessGroup::local(1, &GroupOptions::default())?.remove(0);
    let device = Device::flex().autodiff();
    let model: Linear = LinearConfig::new(width, width).init(&device);
    let mut optimizer = AdamWConfig::new().init();
    let options = DdpOptions {
        shards: Some(1),
        ..DdpOptions::default()
    };
    let (mut ddp, mut model) = Ddp::new(group, model, options)?;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let mut checkpoints = Checkpoints::open(folder.path(), ddp.group())?;
    let (mut copied, mut held_up, mut written) = (Vec::new(), Vec::new(), Vec::new());
    let mut state_bytes = 0;
    for plan in ddp.batches(1024, BatchOptions::new(1))?.take(rounds) {
        let reduced = ddp.step_on(&model, &plan, |model, _| {
            model.forward(Tensor::<2>::ones([1, width], &device)).mean()
        })?;
        model = optimizer.step(0.1, model, reduced.grads);

        let state: Vec<Vec<u8>> = weights::export(&model)
            .iter()
            .map(|(_, data)| data.as_bytes().to_vec())
            .chain([optimizer.into_bytes()?.to_vec()])
            .collect();
        state_bytes = state.iter().map(Vec::len).sum();
        let begun = Instant::now();
        black_box(state.clone());
        copied.push(begun.elapsed());

        let begun = Instant::now();
        checkpoints.save(&ddp, Checkpoint::new(&model, &optimizer))?;
        held_up.push(begun.elapsed());
        checkpoints.wait()?;
        written.push(begun.elapsed());
    }
    checkpoints.finish()?;
    println!("state                  {:.1} MB", state_bytes as f64 / 1e6);
    show("copying takes", copied);
    show("a save delays a step by", held_up);
    show("on disk after", written);
    Ok(())
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
