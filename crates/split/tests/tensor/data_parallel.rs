//! Tensor parallelism inside data parallelism: the weights of a training are the same on every mesh.

use burn::optim::AdamWConfig;
use burn::tensor::{Device, Int, Tensor};
use paceline_collective::{DeviceMesh, ProcessGroup};
use paceline_ddp::{
    CommHook, Ddp, DdpError, DdpOptions, Precision, ZeroRedundancyOptimizer, ZeroStage, weights,
};
use paceline_nn::gpt::GptConfig;
use paceline_split::tensor::{ParallelGpt, TensorParallel, TensorPlacement};

use crate::support::{CONFIG, classes, gpt, on_ranks};

#[derive(Clone, Copy, Debug)]
struct Job {
    parts: usize,
    is_sequence: bool,
    precision: Precision,
    zero: Option<ZeroStage>,
    width: usize,
    hook: CommHook,
}

/// Stages of ZeRO, which deals the state of a slice to its replicas.
const STAGES: [Option<ZeroStage>; 4] = [
    None,
    Some(ZeroStage::Optimizer),
    Some(ZeroStage::Gradients),
    Some(ZeroStage::Parameters),
];

/// The same outcome on meshes of so many ranks, of which so many are along `tp`.
fn check(job: Job, meshes: &[(usize, usize)]) {
    let mut first = None;
    for (world, ranks) in meshes {
        for zero in STAGES {
            let job = Job { zero, ..job };
            for ended in on_ranks(*world, |world| train(job, &world, *ranks)) {
                let ended = ended.expect("trained");
                let first = first.get_or_insert_with(|| ended.clone());
                assert_eq!(ended, *first, "{job:?}, {world} ranks, {ranks} along tp");
            }
        }
    }
}

/// The hash of the weights and the norms after three steps, on a mesh with so many ranks along `tp`.
fn train(job: Job, world: &ProcessGroup, ranks: usize) -> Result<(String, Vec<u64>), DdpError> {
    let device = Device::flex().autodiff();
    let mesh = DeviceMesh::new(world, &[("dp", world.world() / ranks), ("tp", ranks)])?;
    let tp = TensorParallel::new(mesh.group("tp")?.clone(), job.parts).expect("parts");
    let tp = match job.is_sequence {
        true => tp.with_sequence_parallel(),
        false => tp,
    };
    let config = GptConfig {
        width: job.width,
        ..CONFIG
    };
    let model = ParallelGpt::from_gpt(gpt(&config, &device), &tp).expect("a model");
    let placement = TensorPlacement::new(world, &tp, &model)?;
    let options = DdpOptions {
        shards: Some(2),
        clip_norm: Some(0.05),
        precision: job.precision,
        comm_hook: job.hook,
        sums: 1,
        ..DdpOptions::default()
    };
    let (mut ddp, mut model) = Ddp::new(mesh.group("dp")?.clone(), model, options)?;
    ddp.join_parts(tp.group(), &model, |id| placement.pieces(id))?;
    ddp.set_placement(placement);
    let mut whole = AdamWConfig::new().init();
    let mut sharded = None;
    if let Some(stage) = job.zero {
        let made = ZeroRedundancyOptimizer::at_stage(&mut ddp, model, whole.clone(), stage)?;
        model = made.1;
        sharded = Some(made.0);
        let is_whole = |(path, shape, _): &(String, Vec<usize>, _)| {
            path.starts_with("blocks.") && !shape.contains(&0)
        };
        let has_weights = weights::tensors(&model).iter().any(is_whole);
        assert!(!has_weights || stage != ZeroStage::Parameters, "dealt");
    }
    let mut norms = Vec::new();
    for step in 0..3 {
        let reduced = ddp.step(&model, |shard| {
            let count = 2 * CONFIG.context;
            let tokens = classes(4 * count + 8, CONFIG.vocabulary, &device);
            let start = (2 * step + shard.shard()) * 8;
            let inputs: Tensor<2, Int> = tokens
                .clone()
                .slice(start..start + count)
                .reshape([2, CONFIG.context]);
            let right = tokens.slice(start + 1..start + count + 1);
            let scores = shard.model()?.forward(inputs).into_iter();
            let scores = scores.map(|scores| scores.flatten(0, 1)).collect();
            let losses = tp.cross_entropy(scores, CONFIG.vocabulary, right);
            shard.add(0, 1.0);
            shard.backward(
                losses.cast(burn::tensor::FloatDType::F32).mean(),
                count as f32,
            )
        })?;
        assert_eq!(reduced.sums, [2.0], "one for each shard");
        norms.push(reduced.grad_norm.expect("clipped").to_bits());
        model = match &mut sharded {
            Some(sharded) => sharded.step(1e-2, model, reduced.grads)?,
            None => whole.step(1e-2, model, reduced.grads),
        };
        model = ddp.average(model)?;
    }
    Ok((ddp.sha256(&model)?, norms))
}

fn job(hook: &str) -> Job {
    Job {
        parts: 2,
        is_sequence: false,
        precision: Precision::F32,
        zero: None,
        width: CONFIG.width,
        hook: hook.parse().expect("a hook"),
    }
}

#[test]
fn the_weights_and_norms_have_the_same_bits_on_every_mesh() {
    for is_sequence in [false, true] {
        for precision in [Precision::F32, Precision::Bf16] {
            for (parts, meshes) in [
                (2, &[(1, 1), (2, 2), (2, 1), (4, 2)][..]),
                (4, &[(1, 1), (2, 2), (4, 4), (3, 3), (4, 2)]),
            ] {
                let job = Job {
                    parts,
                    is_sequence,
                    precision,
                    zero: None,
                    width: CONFIG.width,
                    hook: CommHook::None,
                };
                check(job, meshes);
            }
        }
    }
}

#[test]
fn matrices_of_many_chunks_are_dealt_to_the_replicas_of_their_slices() {
    let job = Job {
        parts: 4,
        width: 48,
        ..job("none")
    };
    // A rank has one part of a matrix, or several, which lie side by side in its rows.
    check(job, &[(1, 1), (2, 1), (4, 2), (8, 4)]);
}

/// What a rank has of cut parameters must not change what it makes of whole ones: a hash is of this rank's copies of those.
#[test]
fn ranks_that_share_parts_compress_what_both_have_whole_alike() {
    for hook in ["int8", "powersgd:1:0"] {
        let train = |world: &ProcessGroup| train(job(hook), world, 2).expect("trained");
        let ended = on_ranks(4, |world| train(&world));
        for other in &ended {
            assert_eq!(*other, ended[0], "{hook}");
        }
    }
    let refused = on_ranks(4, |world| {
        train(job("topk:0.1"), &world, 2).expect_err("buckets")
    });
    let expect = "communication hook topk:0.1 does not work with parts of a model: it takes the largest elements of whole buckets";
    for error in refused {
        assert!(error.to_string().starts_with(expect), "{error}");
    }
    on_ranks(2, |world| {
        // No other rank has what a rank with all parts has.
        train(job("topk:0.1"), &world, 1).expect("trained");
    });
}

#[test]
fn ranks_that_share_parts_take_local_steps_as_ranks_with_all_parts_do() {
    for hook in ["localsgd:3", "diloco:3:0:0.7:0.5"] {
        let with = |world, ranks| on_ranks(world, |world| train(job(hook), &world, ranks));
        let workers = with(2, 1).into_iter().map(|ended| ended.expect("trained"));
        let workers: Vec<_> = workers.collect();
        assert_eq!(workers[0].0, workers[1].0, "the round has ended");
        assert_ne!(workers[0].1, workers[1].1, "norms are each worker's own");
        for (rank, ended) in with(4, 2).into_iter().enumerate() {
            assert_eq!(
                ended.expect("trained"),
                workers[rank / 2],
                "{hook}, rank {rank}"
            );
        }
    }
}
