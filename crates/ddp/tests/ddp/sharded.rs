//! Stage 3 of ZeRO: the parameters of blocks are dealt to the ranks, with the bits of the whole model.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use burn::module::{Module, ParamGroup};
use burn::nn::{BatchNorm, BatchNormConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{
    AdafactorConfig, AdamWConfig, LambConfig, ModuleOptimizer, MuonConfig, SgdConfig,
    momentum::MomentumConfig,
};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Tensor};
use paceline_collective::ProcessGroup;
use paceline_ddp::timeline::{Activity, Timeline};
use paceline_ddp::{
    BucketCaps, CommHook, Ddp, DdpError, DdpOptions, GradScaler, GradScalerOptions, Precision,
    Reduced, ZeroRedundancyOptimizer, ZeroStage, in_f32, weights,
};
use paceline_nn::{Block, Pass};

use crate::support::*;

/// A residual layer with running statistics, a frozen part, a parameter that is never read, and one that some shards read.
#[derive(Module, Debug)]
struct Layer {
    norm: LayerNorm,
    up: Linear,
    batch_norm: BatchNorm,
    frozen: Linear,
    down: Linear,
    idle: Linear,
    side: Linear,
}

impl Layer {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            norm: LayerNormConfig::new(6).init(device),
            up: linear(6, 400),
            batch_norm: BatchNormConfig::new(400).init(device),
            frozen: Linear::no_grad(linear(400, 6)),
            down: linear(6, 6),
            idle: linear(2, 2),
            side: linear(6, 6),
        }
    }

    fn forward(&self, x: Tensor<2>, side: bool) -> Tensor<2> {
        let hidden = in_f32(x.clone(), |x| self.norm.forward(x));
        let hidden = gelu(self.up.forward(hidden));
        let hidden = in_f32(hidden, |x| self.batch_norm.forward(x));
        let y = self.down.forward(self.frozen.forward(hidden));
        x + if side {
            y.clone() + self.side.forward(y)
        } else {
            y
        }
    }
}

#[derive(Module, Debug)]
struct Net {
    /// Read again at the end.
    first: Block<Linear>,
    layers: Vec<Block<Layer>>,
    last: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let net = Self {
            first: Block::shared(0, LinearConfig::new(6, 6).init(device)),
            layers: (1..=4).map(|i| Block::new(i, Layer::new(device))).collect(),
            last: LinearConfig::new(6, 3).init(device),
        };
        fixed(net, (1 << 26) as f32, 0.1)
    }

    /// Leaves out the third layer on some shards.
    fn forward(&self, x: Tensor<2>, shard: usize) -> Tensor<2> {
        let mut x = self.first.forward(x, |first, x| first.forward(x));
        for (at, layer) in self.layers.iter().enumerate() {
            if at != 2 || shard != 1 {
                let side = shard % 3 == 1;
                x = layer.forward(x, move |layer, x| layer.forward(x, side));
            }
        }
        let x = self.first.module().forward(x);
        self.last.forward(x)
    }

    fn loss(&self, precision: Precision, indices: &[usize], shard: usize) -> Tensor<1> {
        let (x, y) = batch(indices, &self.last.weight.device());
        let output = self.forward(precision.input(x), shard);
        (precision.logits(output) - y).powf_scalar(2.0).mean()
    }
}

const SHARDS: usize = 5;
const STEPS: usize = 3;

fn small_buckets() -> DdpOptions {
    DdpOptions {
        sums: 1,
        caps: BucketCaps {
            first_bytes: 64,
            bytes: 256,
        },
        ..options(SHARDS)
    }
}

fn adamw() -> ModuleOptimizer {
    AdamWConfig::new().init()
}

/// One step with uneven shards, each of several micro-batches or none.
fn one_step(ddp: &mut Ddp, net: &Net, precision: Precision) -> Result<Reduced, DdpError> {
    ddp.step(net, |shard| {
        let samples = samples(shard.step(), shard.shard());
        let micro: Vec<&[usize]> = samples.chunks(3).collect();
        shard.micro_batches(micro.len());
        for indices in micro {
            let loss = shard.model()?.loss(precision, indices, shard.shard());
            shard.add(0, indices.len() as f32);
            shard.backward(loss, indices.len() as f32)?;
        }
        Ok(())
    })
}

/// Hash of the weights, norms of the gradients, unused parameters and scores of an evaluation.
type Outcome = (String, Vec<Option<f64>>, Vec<String>, Vec<Vec<f32>>);

fn train(
    group: ProcessGroup,
    options: DdpOptions,
    optimizer: ModuleOptimizer,
    stage: Option<ZeroStage>,
) -> Outcome {
    let precision = options.precision;
    let (mut ddp, mut net) =
        Ddp::new(group.clone(), Net::new(&device()), options).expect("ranks agree");
    let whole_bytes = bytes(&net);
    let mut whole = optimizer.clone();
    let mut sharded = None;
    if let Some(stage) = stage {
        let made = ZeroRedundancyOptimizer::at_stage(&mut ddp, net, optimizer, stage);
        let (optimizer, dealt) = made.expect("a sharded optimizer");
        sharded = Some(optimizer);
        net = dealt;
        let is_dealt = 5 * bytes(&net) < 3 * whole_bytes;
        assert_eq!(is_dealt, stage == ZeroStage::Parameters);
    }
    let (mut norms, mut unused) = (Vec::new(), Vec::new());
    for _ in 0..STEPS {
        let reduced = one_step(&mut ddp, &net, precision).expect("a step");
        assert_eq!(reduced.weight as f32, reduced.sums[0]);
        norms.push(reduced.grad_norm);
        unused.extend(reduced.unused);
        net = match &mut sharded {
            Some(sharded) => sharded.step(0.01, net, reduced.grads).expect("a step"),
            None => whole.step(0.01, net, reduced.grads),
        };
    }
    let hash = ddp.sha256(&net).expect("a hash");
    // Ranks have different numbers of passes, and only some leave out a block.
    let scores = ddp.evaluate(&net, |net| {
        let own = ddp.shards().map(|shard| {
            let (x, _) = batch(&[shard, 7, 9], &net.last.weight.device());
            let scores = precision.logits(net.forward(precision.input(x), shard));
            scores.into_data().try_to_vec::<f32>().expect("f32")
        });
        own.collect::<Vec<_>>()
    });
    let scores = scores.expect("an evaluation");
    let bits = scores
        .concat()
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect::<Vec<u8>>();
    let all = group.all_gather_bytes(&bits).expect("the scores");
    let all = all.concat();
    let scores = all
        .as_chunks::<4>()
        .0
        .iter()
        .map(|x| f32::from_le_bytes(*x));
    assert_eq!(ddp.sha256(&net).expect("a hash"), hash);
    (hash, norms, unused, vec![scores.collect()])
}

/// Bytes of the tensors in a model.
fn bytes(net: &Net) -> usize {
    weights::export(net)
        .iter()
        .map(|(_, data)| data.as_bytes().len())
        .sum()
}

fn on_one_rank(options: DdpOptions, optimizer: ModuleOptimizer) -> Outcome {
    let one = ranks(1, |group| group).remove(0);
    train(one, options, optimizer, None)
}

/// Compares stage 3 on several numbers of ranks with one rank that has everything.
fn same_bits(
    worlds: &[usize],
    what: &str,
    options: &dyn Fn() -> DdpOptions,
    optimizer: &ModuleOptimizer,
) {
    let expected = on_one_rank(options(), optimizer.clone());
    assert!(expected.2.iter().any(|path| path == "layers.0.idle.weight"));
    for world in worlds {
        let options: Vec<DdpOptions> = (0..*world).map(|_| options()).collect();
        let options = Mutex::new(options);
        let found = ranks(*world, |group| {
            let options = options.lock().expect("whole").pop().expect("one each");
            train(
                group,
                options,
                optimizer.clone(),
                Some(ZeroStage::Parameters),
            )
        });
        for outcome in found {
            assert_eq!(outcome, expected, "{what} on {world} ranks");
        }
    }
}

#[test]
fn every_optimizer_gives_the_bits_of_the_whole_model() {
    let momentum = MomentumConfig {
        momentum: 0.9,
        dampening: 0.0,
        nesterov: true,
    };
    // It takes matrices only.
    let matrices = ParamGroup::from_any_predicates(vec!["up.weight", "down.weight", "side.weight"]);
    let muon = MuonConfig::new().build();
    for (name, optimizer) in [
        ("muon", adamw().with_group(matrices, muon, None)),
        ("adamw", adamw()),
        ("sgd", SgdConfig::new().with_momentum(Some(momentum)).init()),
        ("lamb", LambConfig::new().init()),
        ("adafactor", AdafactorConfig::new().init()),
    ] {
        same_bits(&[1, 2, 3, 5], name, &small_buckets, &optimizer);
    }
}

#[test]
fn clipping_scaling_precision_and_recomputation_keep_the_bits() {
    let clipped = || DdpOptions {
        clip_norm: Some(1e-3),
        ..small_buckets()
    };
    same_bits(&[2, 3], "clipping", &clipped, &adamw());
    let policy = |policy: &str| DdpOptions {
        recompute: policy.parse().expect("a policy"),
        ..small_buckets()
    };
    same_bits(&[2], "blocks", &|| policy("blocks"), &adamw());
    same_bits(&[2], "burn", &|| policy("burn"), &adamw());
    let bf16 = || DdpOptions {
        precision: Precision::Bf16,
        ..clipped()
    };
    same_bits(&[1, 2, 3], "bf16", &bf16, &adamw());
    let kept = || DdpOptions {
        keep_f32: vec!["LayerNorm".into(), "layers.1.idle".into()],
        ..bf16()
    };
    same_bits(&[2], "keep_f32", &kept, &adamw());
    let scaled = || DdpOptions {
        // The first steps overflow on purpose.
        scaler: Some(
            GradScaler::new(GradScalerOptions {
                init_scale: 1e10,
                backoff_factor: 1e-7,
                ..GradScalerOptions::default()
            })
            .expect("a scaler"),
        ),
        precision: Precision::F16,
        ..clipped()
    };
    let (_, norms, ..) = on_one_rank(scaled(), adamw());
    assert!(
        norms.contains(&None) && norms.iter().any(Option::is_some),
        "{norms:?}"
    );
    same_bits(&[2, 3], "fp16", &scaled, &adamw());
}

#[test]
fn gradients_in_bf16_on_the_wire_give_the_bits_of_whole_ones() {
    let options = || DdpOptions {
        comm_hook: CommHook::Bf16Compress,
        ..small_buckets()
    };
    let run = |stage| ranks(3, |group| train(group, options(), adamw(), stage));
    assert_eq!(run(Some(ZeroStage::Parameters)), run(None));
}

/// Where rank 1 fails in [`failing_step`].
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    BeforeThePass,
    Forward,
    BetweenForwardAndBackward,
    Backward,
    BetweenPasses,
}

/// The errors of two ranks.
fn failing_step(at: At) -> Vec<DdpError> {
    ranks(2, |group| {
        let fails = group.rank() == 1;
        let options = DdpOptions {
            fingerprint_every: 0,
            ..options(2)
        };
        let (mut ddp, net) = Ddp::new(group, Net::new(&device()), options).expect("ranks agree");
        let stage = ZeroStage::Parameters;
        let made = ZeroRedundancyOptimizer::at_stage(&mut ddp, net, adamw(), stage);
        let (_optimizer, net) = made.expect("a sharded optimizer");
        let left = |here: At| match fails && here == at {
            true => Err(DdpError::Device("it left".into())),
            false => Ok(()),
        };
        let reduced = ddp.step(&net, |shard| {
            shard.micro_batches(2);
            for _ in 0..2 {
                left(At::BeforeThePass)?;
                let net = shard.model()?;
                let (mut x, _) = batch(&[1, 2], &device());
                for (index, layer) in net.layers.iter().enumerate() {
                    if index == 2 {
                        left(At::Forward)?;
                    }
                    let runs = AtomicUsize::new(0);
                    x = layer.forward(x, move |layer, x| {
                        let is_backward = runs.fetch_add(1, Ordering::Relaxed) == 1;
                        if fails && at == At::Backward && index == 1 && is_backward {
                            let pass = Pass::current().expect("a pass");
                            pass.failure().set(DdpError::Device("it left".into()));
                        }
                        layer.forward(x, false)
                    });
                }
                left(At::BetweenForwardAndBackward)?;
                shard.backward(x.mean(), 2.0)?;
                left(At::BetweenPasses)?;
            }
            Ok(())
        });
        let error = reduced.err().expect("an error");
        let again = ddp.step(&net, |_| Ok::<_, DdpError>(())).err();
        if at != At::BeforeThePass {
            again.expect("a failed group stays failed");
        }
        error
    })
}

#[test]
fn a_rank_that_fails_anywhere_in_a_pass_is_the_error_of_the_others() {
    for at in [
        At::BeforeThePass,
        At::Forward,
        At::BetweenForwardAndBackward,
        At::Backward,
        At::BetweenPasses,
    ] {
        let errors = failing_step(at);
        assert_eq!(errors[1].to_string(), "device: it left", "{at:?}");
        assert_eq!(errors[0].culprit(), Some(1), "{at:?}: {}", errors[0]);
    }
}

#[test]
fn a_block_that_a_backward_pass_reaches_twice_is_an_error() {
    let errors = ranks(2, |group| {
        let (mut ddp, net) = Ddp::new(group, Net::new(&device()), options(2)).expect("ranks agree");
        let stage = ZeroStage::Parameters;
        let made = ZeroRedundancyOptimizer::at_stage(&mut ddp, net, adamw(), stage);
        let (_optimizer, net) = made.expect("a sharded optimizer");
        let reduced = ddp.step(&net, |shard| {
            let net = shard.model()?;
            let (x, _) = batch(&[1, 2], &device());
            let twice = [&net.layers[0], &net.layers[0]].into_iter();
            let x = twice.fold(x, |x, layer| {
                layer.forward(x, |layer, x| layer.forward(x, false))
            });
            shard.backward(x.mean(), 2.0)
        });
        reduced.err().expect("an error").to_string()
    });
    let expected = "ZeRO stage 3: a backward pass reaches block 1 again or out of order";
    assert!(
        errors.iter().all(|error| error.contains(expected)),
        "{errors:?}"
    );
}

/// Layers of one size; each notes when it begins and ends to compute.
#[derive(Module, Debug)]
struct Deep {
    layers: Vec<Block<Linear>>,
}

const DEPTH: usize = 6;

type Noted = Arc<Mutex<Vec<(Instant, Instant)>>>;

/// One step; returns its timeline, and begin and end of the blocks' forward passes and of their second runs.
fn deep_step(group: ProcessGroup) -> (Timeline, Vec<(Instant, Instant)>) {
    let device = device();
    let layer = |index| Block::new(index, LinearConfig::new(64, 64).init(&device));
    let net = Deep {
        layers: (0..DEPTH).map(layer).collect(),
    };
    let options = DdpOptions {
        shards: Some(2),
        ..DdpOptions::default()
    };
    let (mut ddp, net) = Ddp::new(group, net, options).expect("ranks agree");
    let stage = ZeroStage::Parameters;
    let made = ZeroRedundancyOptimizer::at_stage(&mut ddp, net, adamw(), stage);
    let (_optimizer, net) = made.expect("a sharded optimizer");
    let noted = Noted::default();
    let reduced = ddp.step(&net, |shard| {
        let mut x = Tensor::<2>::ones([8, 64], &device);
        for layer in &shard.model()?.layers {
            let noted = noted.clone();
            x = layer.forward(x, move |layer, x| {
                let start = Instant::now();
                let y = gelu(layer.forward(x));
                noted.lock().expect("whole").push((start, Instant::now()));
                y
            });
        }
        shard.backward(x.mean(), 1.0)
    });
    let timeline = reduced.expect("a step").timeline;
    let noted = noted.lock().expect("whole").clone();
    (timeline, noted)
}

/// Compares the order of events on one thread, which sends and computes; no duration matters.
#[test]
fn gathers_and_scatters_are_under_way_while_blocks_compute() {
    for (timeline, computed) in ranks(2, deep_step) {
        let gathers = &timeline.gathers;
        assert_eq!((gathers.len(), computed.len()), (2 * DEPTH, 2 * DEPTH));
        for (at, gather) in gathers.iter().enumerate() {
            let block = if at < DEPTH { at } else { 2 * DEPTH - 1 - at };
            assert_eq!(gather.bucket, DEPTH - 1 - block);
            assert!(
                gather.waited.1 <= computed[at].0,
                "gathered before it computes"
            );
            if !at.is_multiple_of(DEPTH) {
                let before = computed[at - 1];
                assert!(
                    gather.submitted <= before.0,
                    "gather {at} begins before block {} computes",
                    at - 1
                );
                assert!(before.1 <= gather.waited.0, "and is waited for after it");
            }
        }
        // The first gather of the backward round is sent before the backward pass begins.
        let backward = timeline
            .spans
            .iter()
            .find(|span| span.activity == Activity::Backward);
        let backward = backward.expect("a backward pass");
        assert!(gathers[DEPTH].submitted >= computed[DEPTH - 1].1);
        assert!(gathers[DEPTH].submitted <= backward.end);
        // Buckets leave before the next block runs again, and the compute thread waits for none of the last two.
        for (bucket, timing) in timeline.buckets[..DEPTH].iter().enumerate() {
            let own = computed[DEPTH + bucket];
            assert!(own.1 <= timing.ready);
            if let Some(next) = computed.get(DEPTH + bucket + 1) {
                assert_eq!(timing.operation, "reduce_scatter");
                assert!(
                    timing.submitted <= next.0,
                    "bucket {bucket} leaves before the next block computes"
                );
                assert!(next.1 <= timing.waited.0, "and is waited for after it");
            }
        }
    }
}
