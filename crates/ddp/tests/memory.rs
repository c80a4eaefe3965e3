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
const BLOCKS: usize = 64;
const WIDTH: usize = 512;
const BATCH: usize = 4;

#[derive(Module, Debug)]
struct Deep {
    layers: Vec<Block<Linear>>,
}

impl Deep {
    /// Random weights, which are not made yet.
    fn new(device: &Device) -> Self {
        let layer = |index| Block::new(index, LinearConfig::new(WIDTH, WIDTH).init(device));
        Self {
            layers: (0..BLOCKS).map(layer).collect(),
        }
    }
}

/// What a rank found.
struct Found {
    /// The hash of the initial weights.
    sha256: String,
    /// Bytes on the heap while the weights were made.
    door: usize,
    /// Bytes in the third step and its update: most on the heap, and in shared memory for gradients and gathers.
    step: [usize; 3],
}

fn rank(group: ProcessGroup, before: usize, barrier: &Barrier) -> Found {
    let device = Device::flex().autodiff();
    let options = DdpOptions {
        shards: Some(RANKS),
        fingerprint_every: 0,
        deferred_init: true,
        ..DdpOptions::default()
    };
    let made = Ddp::new(group.clone(), Deep::new(&device), options);
    let (mut ddp, net) = made.expect("ranks agree");
    let optimizer = AdamWConfig::new().init();
    let stage = ZeroStage::Parameters;
    let made = ZeroRedundancyOptimizer::at_stage(&mut ddp, net, optimizer, stage);
    let (mut optimizer, mut net) = made.expect("a sharded optimizer");
    barrier.wait();
    let used = || ALLOCATED.peak_usage().saturating_sub(before) / RANKS;
    let door = used();
    let sha256 = ddp.sha256(&net).expect("gathers");
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
    let shared = |group: &ProcessGroup| group.memory().arena.expect("shared memory").used;
    let gathers = optimizer.gathers().expect("stage 3");
    // The ranks are threads of one process.
    let step = [used(), shared(&group), shared(gathers)];
    Found { sha256, door, step }
}

/// The hash of the same initial weights on one rank that has them all.
fn whole() -> String {
    let device = Device::flex().autodiff();
    device.seed(1);
    let group = ProcessGroup::local(1, &GroupOptions::default()).expect("a local group");
    let made = Ddp::new(group[0].clone(), Deep::new(&device), DdpOptions::default());
    let (ddp, net) = made.expect("one rank");
    ddp.sha256(&net).expect("no gathers")
}

#[test]
fn a_rank_of_four_needs_a_quarter_of_the_state_and_a_few_blocks() {
    let whole = whole();
    Device::flex().seed(1);
    let groups = ProcessGroup::local(RANKS, &GroupOptions::default()).expect("a local group");
    let before = ALLOCATED.current_usage();
    ALLOCATED.reset_peak_usage();
    let barrier = Barrier::new(RANKS);
    let found: Vec<Found> = std::thread::scope(|scope| {
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
    // What each recomputed block keeps.
    let activations = BLOCKS * BATCH * WIDTH * size_of::<f32>();
    let with_a_block = |bytes| (bytes + block + activations) * 115 / 100;
    for Found { sha256, door, step } in found {
        assert_eq!(sha256, whole);
        // A parameter is made, sent and dealt.
        let limit = with_a_block(state / 4 / RANKS) + 2 * block;
        assert!(door <= limit, "{door} of {limit} bytes, blocks of {block}");
        // The heap has the ranks' peaks at one moment. Shared memory has the gradients of a few blocks, and a gather.
        let all: usize = step.iter().sum();
        let limit = with_a_block(state / RANKS);
        assert!(all <= limit, "{step:?} of {limit} bytes, blocks of {block}");
    }
}
