//! Memory and time of a training pass under each policy of recomputation, on a transformer of four blocks.
//!
//! `cargo bench -p paceline-nn` prints the table of `docs/splitting.md`. `cargo test` runs a tiny model, and checks that
//! recomputed blocks keep their inputs and nothing else.
//!
//! Method: bytes are counted by the allocator, so they are exact and include everything that lives on the heap of this
//! process. "After forward" is what the forward pass has left, "peak" the most during forward and backward pass, both on top
//! of the weights. Times are medians of rounds in which the policies take turns.

use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::{Bool, Device, Tensor};
use paceline_nn::{Block, Pass, Recompute};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

#[derive(Clone, Copy)]
struct Size {
    batch: usize,
    len: usize,
    width: usize,
    heads: usize,
    rounds: usize,
}

const FULL: Size = Size {
    batch: 8,
    len: 256,
    width: 256,
    heads: 4,
    rounds: 7,
};

const TINY: Size = Size {
    batch: 8,
    len: 64,
    width: 64,
    heads: 4,
    rounds: 5,
};

const BLOCKS: usize = 4;

#[derive(Module, Debug)]
struct Layer {
    norms: [LayerNorm; 2],
    project: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
    dropout: Dropout,
    heads: usize,
}

impl Layer {
    fn new(size: Size, device: &Device) -> Self {
        let width = size.width;
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            norms: [0, 1].map(|_| LayerNormConfig::new(width).init(device)),
            project: linear(width, 3 * width),
            out: linear(width, width),
            up: linear(width, 4 * width),
            down: linear(4 * width, width),
            dropout: DropoutConfig::new(0.1).init(),
            heads: size.heads,
        }
    }

    fn forward(&self, (x, mask): (Tensor<3>, Tensor<2, Bool>)) -> Tensor<3> {
        let [batch, len, width] = x.dims();
        let parts = self.project.forward(self.norms[0].forward(x.clone()));
        let mut parts = parts.chunk(3, 2).into_iter().map(|part| {
            part.reshape([batch, len, self.heads, width / self.heads])
                .swap_dims(1, 2)
        });
        let mut part = || parts.next().expect("three parts");
        let (query, key, value) = (part(), part(), part());
        let scores = query.matmul(key.transpose()) / ((width / self.heads) as f64).sqrt();
        let scores = softmax(scores.mask_fill(mask.unsqueeze::<4>(), -1e9), 3);
        let mixed = self.dropout.forward(scores).matmul(value);
        let mixed = mixed.swap_dims(1, 2).reshape([batch, len, width]);
        let x = x + self.dropout.forward(self.out.forward(mixed));
        let hidden = gelu(self.up.forward(self.norms[1].forward(x.clone())));
        x + self.dropout.forward(self.down.forward(hidden))
    }
}

#[derive(Clone, Copy, Default)]
struct Cost {
    after_forward_bytes: usize,
    peak_bytes: usize,
    /// What the pass has left when all is dropped.
    left_bytes: usize,
    time: Duration,
}

fn pass(recompute: Recompute, blocks: &[Block<Layer>], input: &Tensor<3>) -> Cost {
    let mask = Tensor::tril_mask([input.dims()[1]; 2], 0, &input.device());
    let before = ALLOCATED.current_usage();
    ALLOCATED.reset_peak_usage();
    let start = Instant::now();
    let pass = Pass::new(recompute).with_seed(1);
    let after = pass.enter(|| {
        let run = |x, block: &Block<Layer>| block.forward((x, mask.clone()), Layer::forward);
        let loss = blocks.iter().fold(input.clone(), run).mean();
        let after = ALLOCATED.current_usage();
        drop(loss.backward());
        after
    });
    pass.finish().expect("no failure");
    Cost {
        after_forward_bytes: after.saturating_sub(before),
        peak_bytes: ALLOCATED.peak_usage().saturating_sub(before),
        left_bytes: ALLOCATED.current_usage().saturating_sub(before),
        time: start.elapsed(),
    }
}

/// The cost of each policy: the bytes of the last round, which are those of every round after the first, and the median time.
fn costs(size: Size, policies: &[Recompute]) -> Vec<Cost> {
    let device = Device::flex().autodiff();
    let block = |index| Block::new(index, Layer::new(size, &device));
    let blocks: Vec<_> = (0..BLOCKS).map(block).collect();
    let input = Tensor::<3>::ones([size.batch, size.len, size.width], &device);
    let mut times = vec![Vec::new(); policies.len()];
    let mut costs = vec![Cost::default(); policies.len()];
    // The first round also makes the weights and fills caches.
    for round in 0..=size.rounds {
        for (at, policy) in policies.iter().enumerate() {
            costs[at] = pass(*policy, &blocks, &input);
            if round > 0 {
                times[at].push(costs[at].time);
            }
        }
    }
    for (cost, times) in costs.iter_mut().zip(&mut times) {
        times.sort();
        cost.time = times[times.len() / 2];
    }
    costs
}

fn main() {
    let names = ["none", "blocks", "2", "burn"];
    let policies = names.map(|name| name.parse().expect("a policy"));
    let is_full = std::env::args().any(|arg| arg == "--bench");
    if !is_full {
        check(&costs(TINY, &policies));
        return;
    }
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    println!("| `--recompute` | after forward | peak | time |\n|---|---|---|---|");
    for (name, cost) in names.iter().zip(costs(FULL, &policies)) {
        println!(
            "| `{name}` | {:.1} MiB | {:.1} MiB | {:.0} ms |",
            mib(cost.after_forward_bytes),
            mib(cost.peak_bytes),
            cost.time.as_secs_f64() * 1e3
        );
    }
}

fn check(costs: &[Cost]) {
    let [none, blocks, half, burn] = costs else {
        panic!("four policies")
    };
    let activation = TINY.batch * TINY.len * TINY.width * size_of::<f32>();
    // The inputs of the blocks, of which the first belongs to the caller, the output, and the tape's own lists.
    let kept = BLOCKS * activation + BLOCKS * 128 * 1024;
    assert!(
        blocks.after_forward_bytes < kept,
        "{} bytes after the forward pass, expected less than {kept}",
        blocks.after_forward_bytes
    );
    assert!(none.after_forward_bytes > 10 * kept);
    for cost in costs {
        assert!(
            cost.left_bytes < 64 * 1024,
            "{} bytes left",
            cost.left_bytes
        );
    }
    // One block at a time.
    assert!(blocks.peak_bytes < none.peak_bytes / 2);
    assert!(half.after_forward_bytes < none.after_forward_bytes * 6 / 10);
    assert!(burn.after_forward_bytes < none.after_forward_bytes);
}
