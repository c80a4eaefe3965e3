//! Sharded optimizers whose gradients NCCL scatters and whose weights it gathers.

use burn::optim::AdamWConfig;
use paceline_nn::Block;

use super::*;
use crate::timeline::BucketTiming;
use crate::zero::{ZeroRedundancyOptimizer, ZeroStage};

/// Blocks with weights of more than one chunk, so that ranks share them.
#[derive(Module, Debug)]
struct Deep {
    first: Linear,
    blocks: Vec<Block<Linear>>,
    last: Linear,
    never: Linear,
}

const WIDTH: usize = 40;
const SHARDS: usize = 4;

impl Deep {
    fn new(device: &Device) -> Self {
        let layer = |from, to| LinearConfig::new(from, to).init(device);
        let blocks = (0..3).map(|index| Block::new(index, layer(WIDTH, WIDTH)));
        let net = Self {
            first: layer(5, WIDTH),
            blocks: blocks.collect(),
            last: layer(WIDTH, 3),
            never: layer(50, 50),
        };
        fixed(net)
    }

    fn loss(&self, samples: &[usize]) -> Tensor<1> {
        let x = inputs(samples, &self.first.weight.device());
        let run = |x, block: &Block<Linear>| block.forward(x, |layer, x| relu(layer.forward(x)));
        let x = self.blocks.iter().fold(self.first.forward(x), run);
        self.last.forward(x).powf_scalar(2.0).mean()
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    walk: Walk,
    world: usize,
    stage: Option<ZeroStage>,
    clip_norm: Option<f64>,
}

/// The hash of the weights after three steps, and the norms, which are the same on every rank.
fn train(case: Case) -> (String, Vec<Option<f64>>) {
    let rank = |group: ProcessGroup| {
        let device = Device::flex().autodiff();
        let options = DdpOptions {
            clip_norm: case.clip_norm,
            caps: BucketCaps {
                first_bytes: 4 << 10,
                bytes: 12 << 10,
            },
            ..options(SHARDS)
        };
        let made = Ddp::with_reducer(group, Deep::new(&device), options, move |_, setup| {
            case.walk.reducer(setup)
        });
        let (mut ddp, mut net) = made.expect("ranks agree");
        let mut whole = AdamWConfig::new().init();
        let mut dealt = None;
        if let Some(stage) = case.stage {
            let made = ZeroRedundancyOptimizer::at_stage(&mut ddp, net, whole.clone(), stage);
            let (optimizer, model) = made.expect("a sharded optimizer");
            net = model;
            dealt = Some(optimizer);
        }
        let mut norms = Vec::new();
        for step in 0..3 {
            let reduced = ddp.step(&net, |turn| {
                let first = step * 50 + turn.shard() * 10;
                // Uneven shards of two micro-batches, and one without a sample.
                let samples: Vec<usize> = (first..first + (step + turn.shard()) % 4).collect();
                let micro: Vec<&[usize]> = samples.chunks(2).collect();
                turn.micro_batches(micro.len());
                for samples in micro {
                    let loss = turn.model()?.loss(samples);
                    turn.backward(loss, samples.len() as f32)?;
                }
                Ok::<_, DdpError>(())
            });
            let reduced = reduced.expect("a step");
            assert_eq!(reduced.unused, ["never.weight", "never.bias"]);
            let gathers = &reduced.timeline.gathers;
            let is_sharded = case.stage == Some(ZeroStage::Parameters);
            assert_eq!(gathers.is_empty(), !is_sharded);
            let is_on_device = |gather: &BucketTiming| gather.device.is_some();
            assert!(gathers.iter().all(is_on_device) || case.walk != Walk::Device);
            norms.push(reduced.grad_norm);
            net = match &mut dealt {
                Some(dealt) => dealt.step(0.01, net, reduced.grads).expect("a step"),
                None => whole.step(0.01, net, reduced.grads),
            };
        }
        // Some ranks have more to evaluate than others.
        let passes = 0..ddp.group().rank() + 1;
        let losses = ddp.evaluate(&net, |net| {
            let losses = passes.map(|pass| net.loss(&[pass, 7]).into_scalar::<f32>());
            losses.collect::<Vec<f32>>()
        });
        let losses = losses.expect("an evaluation");
        assert!(losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
        ddp.synchronize().expect("nothing has failed");
        (ddp.sha256(&net).expect("whole tensors"), norms)
    };
    let mut all = on_ranks(case.world, rank);
    let first = all.remove(0);
    assert!(all.iter().all(|other| *other == first), "{case:?}");
    first
}

const STAGES: [Option<ZeroStage>; 4] = [
    None,
    Some(ZeroStage::Optimizer),
    Some(ZeroStage::Gradients),
    Some(ZeroStage::Parameters),
];

#[test]
fn every_stage_of_zero_gives_the_bits_of_the_host_through_nccl() {
    let case = Case {
        walk: Walk::Host,
        world: 1,
        stage: None,
        clip_norm: None,
    };
    let (expected, _) = train(case);
    for world in [2, 3, 4] {
        for stage in STAGES {
            let case = Case {
                walk: Walk::Device,
                world,
                stage,
                ..case
            };
            assert_eq!(train(case).0, expected, "{case:?}");
        }
    }
}

#[test]
fn clipping_on_a_device_has_the_same_bits_in_slices_and_whole() {
    let case = Case {
        walk: Walk::Device,
        world: 1,
        stage: None,
        clip_norm: Some(0.01),
    };
    let expected = train(case);
    let is_clipped = |norm: &Option<f64>| norm.is_some_and(|norm| norm > 0.01);
    assert!(expected.1.iter().all(is_clipped), "{:?}", expected.1);
    for world in [1, 2, 4] {
        for stage in STAGES {
            let case = Case {
                world,
                stage,
                ..case
            };
            assert_eq!(train(case), expected, "{case:?}");
        }
    }
}
