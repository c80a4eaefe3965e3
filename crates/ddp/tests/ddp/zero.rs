//! A sharded optimizer gives the bits of the whole one, and each rank has its part of the state only.

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Module, ParamGroup};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, LambConfig, LionConfig,
    ModuleOptimizer, MuonConfig, RmsPropConfig, SgdConfig, momentum::MomentumConfig,
};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_ddp::{
    BucketCaps, CommHook, Ddp, DdpOptions, GradScaler, GradScalerOptions, ZeroRedundancyOptimizer,
    ZeroStage, weights,
};

use crate::support::*;

/// Wide enough that parameters are cut.
#[derive(Module, Debug)]
struct Wide {
    first: Linear,
    norm: LayerNorm,
    second: Linear,
    never: Linear,
}

impl Wide {
    fn new(device: &Device) -> Self {
        let net = Self {
            first: LinearConfig::new(6, 900).init(device),
            norm: LayerNormConfig::new(900).init(device),
            second: LinearConfig::new(900, 3).init(device),
            never: LinearConfig::new(40, 60).init(device),
        };
        fixed(net, (1 << 26) as f32, 0.1)
    }

    fn loss(&self, indices: &[usize], device: &Device) -> Tensor<1> {
        let (x, y) = batch(indices, device);
        let hidden = relu(self.norm.forward(self.first.forward(x)));
        (self.second.forward(hidden) - y).powf_scalar(2.0).mean()
    }
}

const SHARDS: usize = 6;
const STEPS: usize = 4;
const STAGES: [ZeroStage; 2] = [ZeroStage::Optimizer, ZeroStage::Gradients];

fn wide_options() -> DdpOptions {
    DdpOptions {
        shards: Some(SHARDS),
        caps: BucketCaps {
            first_bytes: 8 << 10,
            bytes: 20 << 10,
        },
        ..DdpOptions::default()
    }
}

/// Hash of the weights, number of the optimizer's state values on this rank, and norms of the gradients.
type Outcome = (String, usize, Vec<Option<f64>>);

fn train_wide(
    group: ProcessGroup,
    options: DdpOptions,
    optimizer: ModuleOptimizer,
    stage: Option<ZeroStage>,
) -> Outcome {
    let device = device();
    let (mut ddp, mut net) = Ddp::new(group, Wide::new(&device), options).expect("ranks agree");
    let mut whole = optimizer.clone();
    let mut sharded = stage.map(|stage| {
        let sharded = ZeroRedundancyOptimizer::at_stage(&mut ddp, net.clone(), optimizer, stage);
        sharded.expect("a sharded optimizer").0
    });
    let mut norms = Vec::new();
    for step in 0..STEPS {
        let reduced = ddp.step(&net, |shard| {
            // Uneven shards, and one without a sample.
            let count = (step + shard.shard()) % 4;
            let indices: Vec<usize> = (0..count)
                .map(|k| step * 100 + shard.shard() * 10 + k)
                .collect();
            shard.micro_batches(usize::from(count > 0));
            if count > 0 {
                let loss = shard.model()?.loss(&indices, &device);
                shard.backward(loss, count as f32)?;
            }
            Ok::<_, paceline_ddp::DdpError>(())
        });
        let reduced = reduced.expect("a step");
        assert_eq!(reduced.unused, ["never.weight", "never.bias"]);
        norms.push(reduced.grad_norm);
        net = match &mut sharded {
            Some(sharded) => sharded.step(0.01, net, reduced.grads).expect("a step"),
            None => whole.step(0.01, net, reduced.grads),
        };
    }
    let local = sharded.as_ref().map_or(&whole, |sharded| sharded.local());
    let state = local.into_bytes().expect("it encodes").len();
    (weights::sha256(&weights::export(&net)), state, norms)
}

fn optimizers() -> Vec<(&'static str, ModuleOptimizer)> {
    let momentum = MomentumConfig {
        momentum: 0.9,
        dampening: 0.0,
        nesterov: true,
    };
    let clipping = Some(GradientClippingConfig::Norm(1e-3));
    // It takes matrices only.
    let matrices = ParamGroup::from_paths(vec!["first.weight", "second.weight"]);
    let muon = MuonConfig::new().build();
    vec![
        (
            "muon",
            AdamWConfig::new().init().with_group(matrices, muon, None),
        ),
        ("sgd", SgdConfig::new().with_momentum(Some(momentum)).init()),
        ("adam", AdamConfig::new().init()),
        ("adamw", AdamWConfig::new().init()),
        ("adagrad", AdaGradConfig::new().init()),
        ("rmsprop", RmsPropConfig::new().init()),
        ("lion", LionConfig::new().init()),
        ("adan", AdanConfig::new().init()),
        ("lamb", LambConfig::new().init()),
        ("adafactor", AdafactorConfig::new().init()),
        (
            "clipping by norm",
            AdamWConfig::new().with_grad_clipping(clipping).init(),
        ),
    ]
}

#[test]
fn every_optimizer_gives_the_same_weights_in_slices_and_whole() {
    for (name, optimizer) in optimizers() {
        let one = ranks(1, |group| group).remove(0);
        let (expected, whole, _) = train_wide(one, wide_options(), optimizer.clone(), None);
        for (world, stage) in [1, 2, 3, 5]
            .into_iter()
            .flat_map(|world| STAGES.map(|s| (world, s)))
        {
            let found = ranks(world, |group| {
                train_wide(group, wide_options(), optimizer.clone(), Some(stage))
            });
            for (hash, state, _) in found {
                assert_eq!(hash, expected, "{name} on {world} ranks at stage {stage}");
                assert!(
                    world == 1 || state < whole || name == "sgd",
                    "{name}: {state} of {whole}"
                );
            }
        }
    }
}

#[test]
fn the_state_of_a_rank_is_its_part_of_the_whole() {
    let adamw = || AdamWConfig::new().init();
    let one = ranks(1, |group| group).remove(0);
    let (_, whole, _) = train_wide(one, wide_options(), adamw(), None);
    let found = ranks(4, |group| {
        train_wide(group, wide_options(), adamw(), Some(ZeroStage::Gradients))
    });
    for (_, state, _) in found {
        // A quarter, and a chunk of 1,024 elements for each of two moments and four buckets.
        assert!(
            state < whole / 4 + 4 * 2 * 4 * 1024,
            "{state} of {whole} bytes"
        );
    }
}

#[test]
fn clipping_by_the_global_norm_has_the_same_bits_in_slices_and_whole() {
    let options = || DdpOptions {
        clip_norm: Some(1e-2),
        ..wide_options()
    };
    let adamw = || AdamWConfig::new().init();
    let one = ranks(1, |group| group).remove(0);
    let (expected, _, norms) = train_wide(one, options(), adamw(), None);
    assert!(
        norms
            .iter()
            .all(|norm| norm.is_some_and(|norm| norm > 1e-2))
    );
    for (world, stage) in [2, 3, 4]
        .into_iter()
        .flat_map(|world| STAGES.map(|s| (world, s)))
    {
        for (hash, _, found) in ranks(world, |group| {
            train_wide(group, options(), adamw(), Some(stage))
        }) {
            assert_eq!(
                (hash, found),
                (expected.clone(), norms.clone()),
                "{world} ranks"
            );
        }
    }
}

#[test]
fn a_scaler_that_finds_an_infinity_in_one_slice_skips_the_step_on_all_ranks() {
    let options = || DdpOptions {
        // The first steps overflow f32 on purpose. A skipped step has no norm.
        clip_norm: Some(1e9),
        scaler: Some(
            GradScaler::new(GradScalerOptions {
                init_scale: 3e38,
                backoff_factor: 1e-6,
                ..GradScalerOptions::default()
            })
            .expect("a scaler"),
        ),
        ..wide_options()
    };
    let adamw = || AdamWConfig::new().init();
    let one = ranks(1, |group| group).remove(0);
    let (expected, _, norms) = train_wide(one, options(), adamw(), None);
    assert!(
        norms.contains(&None) && norms.iter().any(Option::is_some),
        "{norms:?}"
    );
    for stage in STAGES {
        for (hash, _, found) in ranks(3, |group| {
            train_wide(group, options(), adamw(), Some(stage))
        }) {
            assert_eq!((hash, found), (expected.clone(), norms.clone()));
        }
    }
}

#[test]
fn gradients_in_bf16_on_the_wire_give_the_bits_of_whole_ones() {
    let options = || DdpOptions {
        comm_hook: CommHook::Bf16Compress,
        ..wide_options()
    };
    let adamw = || AdamWConfig::new().init();
    let whole = ranks(3, |group| train_wide(group, options(), adamw(), None));
    for stage in STAGES {
        let sliced = ranks(3, |group| {
            train_wide(group, options(), adamw(), Some(stage))
        });
        for ((expected, ..), (hash, ..)) in whole.iter().zip(&sliced) {
            assert_eq!(hash, expected);
        }
    }
}

#[test]
fn running_statistics_and_partly_used_parameters_are_those_of_the_whole_optimizer() {
    let run = |group: ProcessGroup, stage: Option<ZeroStage>| {
        let device = device();
        let (mut ddp, mut net) = Ddp::new(
            group,
            fixed_net(&device),
            DdpOptions {
                sums: 1,
                ..options(8)
            },
        )
        .expect("ranks agree");
        let mut whole = optimizer();
        let mut sharded = stage.map(|stage| {
            let sharded =
                ZeroRedundancyOptimizer::at_stage(&mut ddp, net.clone(), optimizer(), stage);
            sharded.expect("a sharded optimizer").0
        });
        for _ in 0..6 {
            let reduced = train_step(&mut ddp, &net, &device).expect("a step");
            assert_eq!(reduced.weight as f32, reduced.sums[0]);
            net = match &mut sharded {
                Some(sharded) => sharded.step(0.01, net, reduced.grads).expect("a step"),
                None => whole.step(0.01, net, reduced.grads),
            };
        }
        weights::sha256(&weights::export(&net))
    };
    let expected = run(ranks(1, |group| group).remove(0), None);
    for (world, stage) in [1, 2, 4, 8]
        .into_iter()
        .flat_map(|world| STAGES.map(|s| (world, s)))
    {
        for hash in ranks(world, |group| run(group, Some(stage))) {
            assert_eq!(hash, expected, "{world} ranks");
        }
    }
}

/// Layers of one bucket each.
#[derive(Module, Debug)]
struct Deep {
    layers: Vec<Linear>,
}

const LAYERS: usize = 8;
const WIDTH: usize = 256;

impl Deep {
    fn new(device: &Device) -> Self {
        let layer = |_| LinearConfig::new(WIDTH, WIDTH).init(device);
        Self {
            layers: (0..LAYERS).map(layer).collect(),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let run = |x, layer: &Linear| relu(layer.forward(x));
        self.layers.iter().fold(x, run)
    }
}

/// One step and update; returns the most bytes that buckets held, and how many were back before the backward pass ended.
fn deep_step(group: ProcessGroup, stage: ZeroStage, shards: usize) -> (usize, usize) {
    let device = device();
    let layer_bytes = (WIDTH * WIDTH + WIDTH) * size_of::<f32>();
    let options = DdpOptions {
        shards: Some(shards),
        caps: BucketCaps {
            first_bytes: layer_bytes,
            bytes: layer_bytes,
        },
        fingerprint_every: 0,
        ..DdpOptions::default()
    };
    let made = Ddp::new(group.clone(), Deep::new(&device), options);
    let (mut ddp, net) = made.expect("ranks agree");
    assert_eq!(ddp.bucket_count(), LAYERS);
    let arena = || {
        group
            .memory()
            .arena
            .expect("ranks on one host share memory")
    };
    let optimizer = AdamWConfig::new().init();
    let sharded = ZeroRedundancyOptimizer::at_stage(&mut ddp, net, optimizer, stage);
    let (mut sharded, mut net) = sharded.expect("a sharded optimizer");
    let (mut early, mut most) = (0, 0);
    for _ in 0..2 {
        let reduced = ddp.step(&net, |shard| {
            let x = Tensor::<2>::ones([4, WIDTH], &device);
            let loss = shard.model()?.forward(x).mean();
            shard.backward(loss, 1.0)
        });
        let reduced = reduced.expect("a step");
        most = most.max(arena().used);
        let end = reduced.timeline.backward_end().expect("a backward pass");
        let back = reduced.timeline.buckets.iter();
        early = back.filter(|bucket| bucket.waited.1 < end).count();
        net = sharded.step(0.01, net, reduced.grads).expect("a step");
        // The pool keeps its memory, so this is the most that it ever was.
        most = most.max(arena().used);
    }
    (most, early)
}

#[test]
fn at_stage_2_two_buckets_have_memory_and_the_others_are_back_before_the_backward_pass_ends() {
    let bucket = ((WIDTH * WIDTH + WIDTH + 3) * size_of::<f32>()).next_multiple_of(4096);
    let run = |stage, shards| {
        let ranks = ranks(2, |group| deep_step(group, stage, shards));
        assert_eq!(ranks[0].1, ranks[1].1, "buckets that were back");
        // The ranks' messages are in this memory too, the same ones at both stages.
        (ranks[0].0 + ranks[1].0, ranks[0].1)
    };
    let (whole, early) = run(ZeroStage::Optimizer, 2);
    assert_eq!(early, 0);
    let (pooled, early) = run(ZeroStage::Gradients, 2);
    assert_eq!(early, LAYERS - 1);
    assert_eq!(whole - pooled, 2 * (LAYERS - 2) * bucket);
    // Two shards on each rank: all buckets hold the first one's sums.
    let (pooled, _) = run(ZeroStage::Gradients, 4);
    assert_eq!(pooled, run(ZeroStage::Optimizer, 4).0);
}

#[test]
fn a_rank_that_leaves_is_the_error_of_a_bucket_that_was_waited_for_in_the_backward_pass() {
    let errors = ranks(2, |group| {
        let device = device();
        let rank = group.rank();
        let options = DdpOptions {
            shards: Some(2),
            caps: BucketCaps {
                first_bytes: 1,
                bytes: 1,
            },
            fingerprint_every: 0,
            ..DdpOptions::default()
        };
        let layer = |_| LinearConfig::new(4, 4).init(&device);
        let net = Deep {
            layers: (0..LAYERS).map(layer).collect(),
        };
        let (mut ddp, net) = Ddp::new(group, net, options).expect("ranks agree");
        let optimizer = AdamWConfig::new().init();
        let stage = ZeroStage::Gradients;
        let sharded = ZeroRedundancyOptimizer::at_stage(&mut ddp, net, optimizer, stage);
        let (_sharded, net) = sharded.expect("a sharded optimizer");
        let reduced = ddp.step(&net, |shard| {
            let model = shard.model()?;
            if rank == 1 {
                return Err(paceline_ddp::DdpError::Device("it left".into()));
            }
            let x = Tensor::<2>::ones([4, 4], &device);
            let run = |x, layer: &Linear| layer.forward(x);
            let loss = model.layers.iter().fold(x, run).mean();
            shard.backward(loss, 1.0)
        });
        reduced.err().expect("an error")
    });
    assert_eq!(errors[1].to_string(), "device: it left");
    assert_eq!(errors[0].culprit(), Some(1), "{}", errors[0]);
}

#[test]
fn at_stage_2_a_model_trains_whose_gradients_do_not_fit_the_arena() {
    let layer = (WIDTH * WIDTH + WIDTH) * size_of::<f32>();
    let arena = |bytes| GroupOptions {
        arena_bytes: Some(bytes),
        ..group_options()
    };
    // Room for two buckets and the messages of the ranks, but not for all gradients.
    let small = arena(6 * layer);
    let train = |group: ProcessGroup, deferred_init: bool| {
        let device = device();
        let options = DdpOptions {
            shards: Some(2),
            caps: BucketCaps {
                first_bytes: layer,
                bytes: layer,
            },
            deferred_init,
            ..DdpOptions::default()
        };
        let net = fixed(Deep::new(&device), (1 << 26) as f32, 0.1);
        let (mut ddp, net) = Ddp::new(group, net, options)?;
        let (optimizer, stage) = (AdamWConfig::new().init(), ZeroStage::Gradients);
        let (mut optimizer, mut net) =
            ZeroRedundancyOptimizer::at_stage(&mut ddp, net, optimizer, stage)?;
        for _ in 0..2 {
            let reduced = ddp.step(&net, |shard| {
                let x = Tensor::<2>::ones([4, WIDTH], &device);
                let loss = shard.model()?.forward(x).mean();
                shard.backward(loss, 1.0)
            })?;
            net = optimizer.step(0.01, net, reduced.grads)?;
        }
        Ok::<_, paceline_ddp::DdpError>(weights::sha256(&weights::export(&net)))
    };
    let trained = |options: &GroupOptions, deferred_init| {
        ranks_with(options, 2, |group| train(group, deferred_init))
    };
    for error in trained(&small, false) {
        let error = error.expect_err("all gradients").to_string();
        assert!(error.starts_with("no room for a buffer"), "{error}");
    }
    let expected = trained(&arena(64 << 20), false);
    for (found, expected) in trained(&small, true).into_iter().zip(expected) {
        assert_eq!(found.expect("two buckets"), expected.expect("room for all"));
    }
}

#[test]
fn a_rank_without_memory_for_a_bucket_ends_the_step_of_all_ranks() {
    let small = GroupOptions {
        arena_bytes: Some(16 << 20),
        ..group_options()
    };
    let errors = ranks_with(&small, 2, |group| {
        let device = device();
        let options = DdpOptions {
            shards: Some(2),
            ..DdpOptions::default()
        };
        let layer = |_| LinearConfig::new(WIDTH, WIDTH).init(&device);
        let net = Deep {
            layers: (0..2).map(layer).collect(),
        };
        let (mut ddp, net) = Ddp::new(group.clone(), net, options).expect("ranks agree");
        let optimizer = AdamWConfig::new().init();
        let stage = ZeroStage::Gradients;
        let sharded = ZeroRedundancyOptimizer::at_stage(&mut ddp, net, optimizer, stage);
        let (_sharded, net) = sharded.expect("a sharded optimizer");
        // What is left is too little for a bucket.
        let mut taken = Vec::new();
        let mut len = if group.rank() == 1 { 16 << 20 } else { 0 };
        while len >= 32 << 10 {
            match group.buffer::<u8>(len) {
                Ok(buffer) => taken.push(buffer),
                Err(_) => len /= 2,
            }
        }
        let reduced = ddp.step(&net, |shard| {
            let x = Tensor::<2>::ones([4, WIDTH], &device);
            let model = shard.model()?;
            let run = |x, layer: &Linear| layer.forward(x);
            let loss = model.layers.iter().fold(x, run).mean();
            shard.backward(loss, 1.0)
        });
        reduced.err().expect("an error").to_string()
    });
    assert!(
        errors[1].starts_with("no room for a buffer"),
        "{}",
        errors[1]
    );
    assert!(errors[0].contains("no room for a buffer"), "{}", errors[0]);
}
