//! The memory of a training at stage 3 of ZeRO, counted by the allocator: each of four ranks needs its part of the state, and a
//! few blocks. In a process of its own, whose heap is that of the ranks.

use std::sync::Barrier;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_ddp::{Block, Ddp, DdpError, DdpOptions, ZeroRedundancyOptimizer, ZeroStage};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

const RANKS: usize = 4;
const BLOCKS: usize = 24;
const WIDTH: usize = 512;
const BATCH: usize = 4;

#[derive(Module, Debug)]
struct Deep {
    layers: Vec<Block<Linear>>,
}

/// Bytes of a rank in the third step and its update: most on the heap, and in shared memory for gradients and gathers.
fn rank(group: ProcessGroup, before: usize, barrier: &Barrier) -> [usize; 3] {
    let device = Device::flex().autodiff();
    let layer = |index| Block::new(index, LinearConfig::new(WIDTH, WIDTH).init(&device));
    let net = Deep {
        layers: (0..BLOCKS).map(layer).collect(),
    };
    let options = DdpOptions {
        shards: Some(RANKS),
        fingerprint_every: 0,
        ..DdpOptions::default()
    };
    let (mut ddp, net) = Ddp::new(group.clone(), net, options).expect("ranks agree");
    let optimizer = AdamWConfig::new().init();
    let stage = ZeroStage::Parameters;
    let made = ZeroRedundancyOptimizer::at_stage(&mut ddp, net, optimizer, stage);
    let (mut optimizer, mut net) = made.expect("a sharded optimizer");
    for step in 0..3 {
        if step == 2 {
            barrier.wait();
            ALLOCATED.reset_peak_usage();
            barrier.wait();
        }
        let reduced = ddp.step(&net, |shard| {
            let x = Tensor::<2>::ones([BATCH, WIDTH], &device);
            let model = shard.model()?;
            let run =
                |x, layer: &Block<Linear>| layer.forward(x, |layer, x| relu(layer.forward(x)));
            let loss = model.layers.iter().fold(x, run).mean();
            shard.backward(loss, 1.0)
        });
        let reduced: Result<_, DdpError> = reduced;
        net = optimizer
            .step(0.01, net, reduced.expect("a step").grads)
            .expect("an update");
    }
    barrier.wait();
    let used = |group: &ProcessGroup| group.memory().arena.expect("shared memory").used;
    let gathers = optimizer.gathers().expect("stage 3");
    // The ranks are threads of one process.
    [
        (ALLOCATED.peak_usage() - before) / RANKS,
        used(&group),
        used(gathers),
    ]
}

#[test]
fn a_rank_of_four_needs_a_quarter_of_the_state_and_a_few_blocks() {
    let groups = ProcessGroup::local(RANKS, &GroupOptions::default()).expect("a local group");
    let before = ALLOCATED.current_usage();
    let barrier = Barrier::new(RANKS);
    let used: Vec<[usize; 3]> = std::thread::scope(|scope| {
        let ranks = groups.into_iter();
        let ranks = ranks.map(|group| scope.spawn(|| rank(group, before, &barrier)));
        let ranks: Vec<_> = ranks.collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("no panic"))
            .collect()
    });
    let block = (WIDTH * WIDTH + WIDTH) * size_of::<f32>();
    // Weights, gradients and two moments.
    let state = 4 * BLOCKS * block;
    // The heap has the ranks' peaks at one moment, and what process groups allocate: 2.6 MiB for each rank. Shared memory has
    // three blocks' gradients, and the gathers of two blocks.
    let groups = 3 << 20;
    for used in used {
        let all: usize = used.iter().sum();
        let limit = state / RANKS + 10 * block + groups;
        assert!(all <= limit, "{used:?} of {limit} bytes, blocks of {block}");
        assert!(all < state / 2, "{used:?} of {state} bytes");
    }
}
