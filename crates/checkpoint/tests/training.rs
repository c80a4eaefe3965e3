//! Saving and resuming a training, with threads as ranks: the same bits on another number of ranks.

use std::path::Path;

use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::module::{Module, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::{Bool, DType, Device, Tensor, TensorData};
use paceline_checkpoint::{Checkpoint, CheckpointError, Checkpoints, ledger, list};
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_ddp::sampler::{BatchOptions, ShardedBatches};
use paceline_ddp::{
    Block, CommHook, Ddp, DdpOptions, GradScaler, Precision, ZeroRedundancyOptimizer, ZeroStage,
    weights,
};

const LEN: usize = 50;

/// Runs `rank` on one thread per rank and returns the results.
fn ranks<R: Send>(world: usize, rank: impl Fn(ProcessGroup) -> R + Sync) -> Vec<R> {
    let groups = ProcessGroup::local(world, &GroupOptions::default()).expect("a local group");
    paceline_testing::on_threads(groups, rank)
}

/// Weights that do not depend on random numbers, since threads share Burn's generator.
fn model(inputs: usize) -> Linear {
    let model = LinearConfig::new(inputs, 2).init(&Device::flex().autodiff());
    let fixed = weights::export(&model).into_iter().map(|(path, data)| {
        let values: Vec<f32> = (0..data.num_elements())
            .map(|at| at as f32 / 10.0)
            .collect();
        (path, TensorData::new(values, data.shape().clone()))
    });
    let fixed = fixed.collect();
    weights::import(model, fixed)
}

fn loss(model: &Linear, indices: &[usize]) -> Tensor<1> {
    let values: Vec<f32> = indices.iter().map(|&at| (at as f32).sin()).collect();
    let values = TensorData::new(values, [indices.len(), 1]);
    let x = Tensor::<2>::from_data(values, &model.weight.device()).repeat_dim(1, 3);
    let x = x.cast(model.weight.val().dtype());
    let y = model.forward(x).cast(DType::F32);
    (y - 1.0).powf_scalar(2.0).mean()
}

fn options() -> DdpOptions {
    DdpOptions {
        precision: Precision::F16,
        scaler: Some(GradScaler::default()),
        ..DdpOptions::default()
    }
}

fn start(group: ProcessGroup) -> (Ddp, Linear, ModuleOptimizer, ShardedBatches) {
    let (ddp, model) = Ddp::new(group, model(3), options()).expect("the ranks agree");
    let batches = ddp.batches(LEN, BatchOptions::new(10).epochs(3));
    let batches = batches.expect("steps");
    (ddp, model, AdamWConfig::new().init(), batches)
}

/// Trains until `stop` steps are done, or to the end, saving every third step; returns the weights' hash and the sum of
/// all losses.
fn train(group: ProcessGroup, folder: &Path, stop: Option<u64>) -> (String, f64) {
    let checkpoints = Checkpoints::open(folder, &group).expect("a folder");
    train_with(checkpoints, group, stop)
}

fn train_with(checkpoints: Checkpoints, group: ProcessGroup, stop: Option<u64>) -> (String, f64) {
    let (mut ddp, mut model, mut optimizer, mut batches) = start(group);
    let schedule = LinearLrSchedulerConfig::new(0.1, 0.001, 15).init();
    let mut schedule = schedule.expect("a valid schedule");
    let mut losses = 0.0;
    let mut checkpoints = checkpoints
        .keep(2)
        .metadata("classes", "[\"low\",\"high\"]");
    if let Some(mut saved) = checkpoints.latest().expect("readable") {
        (model, optimizer) = saved.restore(&mut ddp, model, optimizer).expect("it fits");
        batches
            .load_state_dict(saved.sampler().expect("a position"))
            .expect("the same data");
        schedule = saved.schedule(schedule).expect("a schedule");
        losses = saved.value().expect("a number");
        assert_eq!(saved.metadata()["classes"], "[\"low\",\"high\"]");
    }
    for plan in batches {
        let reduced = ddp.step_on(&model, &plan, loss).expect("a step");
        model = optimizer.step(schedule.step(), model, reduced.grads);
        losses += reduced.loss;
        checkpoints.record(&ddp, &plan).expect("recorded");
        let done = ddp.next_step();
        if done % 3 == 0 || stop == Some(done) {
            let checkpoint = Checkpoint::new(&model, &optimizer)
                .sampler(&plan.after)
                .schedule(&schedule)
                .value(&losses);
            checkpoints.save(&ddp, checkpoint).expect("saved");
        }
        if stop == Some(done) {
            break;
        }
    }
    checkpoints.finish().expect("written");
    (weights::sha256(&weights::export(&model)), losses)
}

#[test]
fn a_training_goes_on_with_the_same_bits_on_another_number_of_ranks() {
    let whole = tempfile::tempdir().expect("a folder");
    let expected = ranks(1, |group| train(group, whole.path(), None)).remove(0);
    for (first, second) in [(1, 4), (4, 1), (3, 2)] {
        let folder = tempfile::tempdir().expect("a folder");
        // In the middle of an epoch, between two saves.
        ranks(first, |group| train(group, folder.path(), Some(8)));
        let [_, newest] = &list(folder.path())[..] else {
            panic!("steps 6 and 8");
        };
        // As if the job had been killed before it saved.
        std::fs::remove_dir_all(newest).expect("removed");
        for found in ranks(second, |group| train(group, folder.path(), None)) {
            assert_eq!(found, expected, "{first} ranks, then {second}");
        }
        let audit = ledger::audit(folder.path()).expect("readable");
        assert_eq!(audit.faults, []);
        assert_eq!((audit.steps, audit.rolled_back), (18, 2));
        let owners = audit.attempts.iter();
        let owners = owners.map(|attempt| attempt.begin.owners.len());
        assert_eq!(owners.collect::<Vec<_>>(), [first, second]);
        assert!(audit.epochs.iter().all(|epoch| epoch.once == LEN));
    }
}

#[cfg(feature = "object-store")]
#[test]
fn a_training_goes_on_elsewhere_from_its_copy_alone() {
    let [whole, copies, first, second] = [(); 4].map(|()| tempfile::tempdir().expect("a folder"));
    let expected = ranks(1, |group| train(group, whole.path(), None)).remove(0);
    let url = format!("file://{}", copies.path().display());
    let train = |group: ProcessGroup, folder: &Path, stop| {
        let checkpoints = Checkpoints::open(folder, &group).expect("a folder");
        train_with(checkpoints.upload_to(&url).expect("a URL"), group, stop)
    };
    ranks(3, |group| train(group, first.path(), Some(8)));
    for found in ranks(2, |group| train(group, second.path(), None)) {
        assert_eq!(found, expected);
    }
    let audit = ledger::audit(second.path()).expect("readable");
    assert_eq!((audit.steps, audit.faults), (18, Vec::new()));
    // The first folder has an older checkpoint than the copies.
    for found in ranks(1, |group| train(group, first.path(), None)) {
        assert_eq!(found, expected);
    }
    let kept = |folder| {
        let paths = list(folder).into_iter();
        let names = paths.map(|path| path.file_name().expect("a name").to_owned());
        names.collect::<Vec<_>>()
    };
    assert_eq!(kept(copies.path()), kept(second.path()));
}

#[test]
fn a_checkpoint_of_another_model_is_refused_on_all_ranks_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    ranks(1, |group| train(group, folder.path(), Some(1)));
    let errors = ranks(2, |group| {
        let (mut ddp, other) = Ddp::new(group, model(4), options()).expect("the ranks agree");
        let checkpoints = Checkpoints::open(folder.path(), ddp.group()).expect("a folder");
        let mut saved = checkpoints.latest().expect("readable").expect("one");
        let restored = saved.restore(&mut ddp, other, AdamWConfig::new().init());
        restored.err().expect("refused").to_string()
    });
    for error in errors {
        let reason = "weight is [3, 2] F32, the model's is [4, 2] F32";
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn damaged_checkpoints_alone_are_an_error_on_all_ranks() {
    let folder = tempfile::tempdir().expect("a folder");
    ranks(1, |group| train(group, folder.path(), Some(1)));
    let newest = list(folder.path()).pop().expect("one");
    std::fs::remove_file(newest.join("state.json")).expect("removed");
    let errors = ranks(2, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).expect("a folder");
        let Err(error) = checkpoints.latest() else {
            panic!("both checkpoints are damaged");
        };
        error.to_string()
    });
    assert!(
        errors[0].starts_with("no valid checkpoint in"),
        "{}",
        errors[0]
    );
    assert_eq!(errors[1], errors[0]);
}

#[test]
fn a_second_job_is_kept_out_of_the_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let group = ranks(1, |group| group).remove(0);
    let first = Checkpoints::open(folder.path(), &group).expect("free");
    let error = Checkpoints::open(folder.path(), &group).expect_err("in use");
    assert!(matches!(error, CheckpointError::InUse { .. }), "{error}");
    drop(first);
    Checkpoints::open(folder.path(), &group).expect("free again");
}

#[test]
fn an_error_of_the_background_comes_with_the_next_save_or_at_the_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let group = ranks(1, |group| group).remove(0);
    let (ddp, model, optimizer, _) = start(group);
    let mut checkpoints = Checkpoints::open(folder.path(), ddp.group()).expect("a folder");
    // A file replaces the folder, so that nothing can be written in it.
    std::fs::remove_dir_all(folder.path()).expect("removed");
    std::fs::write(folder.path(), "").expect("a file");
    let mut save = || checkpoints.save(&ddp, Checkpoint::new(&model, &optimizer));
    save().expect("the background fails later");
    let error = save().expect_err("the first save's").to_string();
    assert!(error.starts_with("cannot write checkpoint"), "{error}");
    save().expect("the background fails later");
    let error = checkpoints.finish().expect_err("the last save's");
    assert!(
        error.to_string().starts_with("cannot write checkpoint"),
        "{error}"
    );
    std::fs::remove_file(folder.path()).expect("removed");
    std::fs::create_dir(folder.path()).expect("a folder to clean up");
}

#[test]
fn a_failed_write_of_dealt_state_stops_no_other_rank() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path().join("run");
    let barrier = std::sync::Barrier::new(2);
    let errors = ranks(2, |group| {
        let rank = group.rank();
        let (mut ddp, net) =
            Ddp::new(group, wide(DType::F32), DdpOptions::default()).expect("ranks");
        let (optimizer, stage) = (AdamWConfig::new().init(), ZeroStage::Parameters);
        let made = ZeroRedundancyOptimizer::at_stage(&mut ddp, net, optimizer, stage);
        let (mut optimizer, mut net) = made.expect("a sharded optimizer");
        let mut checkpoints = Checkpoints::open(&place, ddp.group()).expect("a folder");
        barrier.wait();
        if rank == 0 {
            std::fs::remove_dir_all(&place).expect("removed");
            std::fs::write(&place, "in the way").expect("a file");
        }
        barrier.wait();
        let mut errors = Vec::new();
        for _ in 0..2 {
            let grads = wide_step(&mut ddp, &net);
            net = optimizer.step(0.01, net, grads).expect("a step");
            errors.extend(
                checkpoints
                    .save(&ddp, Checkpoint::new(&net, &optimizer))
                    .err(),
            );
        }
        errors.extend(checkpoints.finish().err());
        errors.iter().map(ToString::to_string).collect::<Vec<_>>()
    });
    assert_eq!(errors[0].len(), 1, "{errors:?}");
    assert!(
        errors[0][0].starts_with("cannot write checkpoint"),
        "{errors:?}"
    );
    assert_eq!(errors[1], [""; 0]);
}

#[derive(Module, Debug)]
struct Wide {
    layers: Vec<Block<Linear>>,
    last: Linear,
    mask: Param<Tensor<1, Bool>>,
}

fn wide(dtype: DType) -> Wide {
    let device = Device::flex().autodiff();
    let net = Wide {
        layers: (0..3)
            .map(|at| Block::new(at, LinearConfig::new(50, 50).init(&device)))
            .collect(),
        last: LinearConfig::new(50, 50).init(&device),
        mask: Param::initialized(
            ParamId::new(),
            Tensor::from_data([true, false, true], &device),
        ),
    };
    let values = weights::export(&net).into_iter().enumerate();
    let values = values.filter(|(_, (path, _))| path != "mask");
    let values = values.map(|(at, (path, data))| {
        let values = (0..data.num_elements()).map(|i| ((at * 31 + i) % 97) as f64 / 500.0);
        let values: Vec<f64> = values.collect();
        let values = TensorData::new(values, data.shape().clone());
        (path, values.convert_dtype(dtype))
    });
    let values = values.collect();
    weights::import(net, values)
}

/// The gradients of a step whose samples depend on its number and the shards'.
fn wide_step(ddp: &mut Ddp, net: &Wide) -> burn::optim::GradientsParams {
    let device = Device::flex().autodiff();
    let reduced = ddp.step(net, |shard| {
        let x = (shard.step() * 4 + shard.shard() as u64 + 1) as f32 / 10.0;
        let model = shard.model()?;
        let dtype = model.last.weight.val().dtype();
        let x = Tensor::<2>::full([2, 50], x, (&device, dtype));
        let run = |x, layer: &Block<Linear>| layer.forward(x, |layer, x| layer.forward(x));
        let y = model.last.forward(model.layers.iter().fold(x, run));
        shard.backward((y - 1.0).powf_scalar(2.0).mean(), 2.0)
    });
    reduced.expect("a step").grads
}

/// Trains five of ten steps at a time with the state whole or dealt to the ranks, and returns the weights' hash.
fn train_wide(
    group: ProcessGroup,
    folder: &Path,
    stage: Option<ZeroStage>,
    dtype: DType,
) -> String {
    let (mut ddp, mut net) = Ddp::new(group, wide(dtype), DdpOptions::default()).expect("ranks");
    let mut whole = match dtype {
        // Its moments would be read in f32, see below.
        DType::F64 => SgdConfig::new().init(),
        _ => AdamWConfig::new().init(),
    };
    let mut sharded = None;
    if let Some(stage) = stage {
        let made = ZeroRedundancyOptimizer::at_stage(&mut ddp, net, whole.clone(), stage);
        let (optimizer, dealt) = made.expect("a sharded optimizer");
        (sharded, net) = (Some(optimizer), dealt);
    }
    let mut checkpoints = Checkpoints::open(folder, ddp.group()).expect("a folder");
    if let Some(mut saved) = checkpoints.latest().expect("readable") {
        match sharded.take() {
            Some(optimizer) => {
                let restored = saved.restore(&mut ddp, net, optimizer).expect("it fits");
                (net, sharded) = (restored.0, Some(restored.1));
            }
            None => (net, whole) = saved.restore(&mut ddp, net, whole).expect("it fits"),
        }
    }
    for _ in 0..5 {
        let grads = wide_step(&mut ddp, &net);
        net = match &mut sharded {
            Some(optimizer) => optimizer.step(0.01, net, grads).expect("a step"),
            None => whole.step(0.01, net, grads),
        };
    }
    let checkpoint = match &sharded {
        Some(optimizer) => Checkpoint::new(&net, optimizer),
        None => Checkpoint::new(&net, &whole),
    };
    checkpoints.save(&ddp, checkpoint).expect("saved");
    checkpoints.finish().expect("saved");
    ddp.sha256(&net).expect("a hash")
}

/// Size of the optimizer's file of the newest checkpoint, in KiB: the ids in it have different lengths.
fn state_size(folder: &Path) -> u64 {
    let newest = list(folder).pop().expect("a checkpoint");
    let file = std::fs::metadata(newest.join("optimizer.burnpack"));
    file.expect("a file").len() / 1024
}

#[test]
fn state_that_is_dealt_to_ranks_is_saved_whole_and_resumed_in_any_layout() {
    let run_in = |dtype: DType, stages: [(usize, Option<ZeroStage>); 2]| {
        let folder = tempfile::tempdir().expect("a folder");
        let hashes = stages.map(|(world, stage)| {
            let mut hashes = ranks(world, |group| {
                train_wide(group, folder.path(), stage, dtype)
            });
            hashes.dedup();
            assert_eq!(hashes.len(), 1, "all ranks have the same weights");
            hashes.remove(0)
        });
        (hashes, state_size(folder.path()))
    };
    let (whole, one, three) = (
        None,
        Some(ZeroStage::Optimizer),
        Some(ZeroStage::Parameters),
    );
    let run = |stages| run_in(DType::F32, stages);
    let expected = run([(1, whole), (1, whole)]);
    for stages in [
        [(2, one), (3, one)],
        [(4, one), (1, whole)],
        [(1, whole), (4, one)],
        [(3, one), (2, whole)],
        [(1, one), (1, one)],
        [(3, three), (2, whole)],
        [(2, whole), (4, three)],
        [(4, three), (3, three)],
        [(2, three), (3, one)],
        [(1, three), (1, whole)],
    ] {
        assert_eq!(run(stages), expected, "{stages:?}");
    }
    let run = |stages| run_in(DType::F64, stages);
    let expected = run([(1, whole), (1, whole)]);
    for stages in [[(3, three), (2, whole)], [(2, whole), (4, three)]] {
        assert_eq!(run(stages), expected, "{stages:?} in f64");
    }
}

#[test]
fn an_optimizer_state_that_would_be_read_in_another_type_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    ranks(2, |group| {
        let made = Ddp::new(group, wide(DType::F64), DdpOptions::default());
        let (mut ddp, mut net) = made.expect("ranks");
        let mut optimizer = AdamWConfig::new().init();
        let grads = wide_step(&mut ddp, &net);
        net = optimizer.step(0.01, net, grads);
        let mut checkpoints = Checkpoints::open(folder.path(), ddp.group()).expect("a folder");
        let saved = checkpoints.save(&ddp, Checkpoint::new(&net, &optimizer));
        saved.expect("saved");
        // The newest checkpoint must be in place.
        checkpoints.finish().expect("saved");
    });
    ranks(2, |group| {
        let made = Ddp::new(group, wide(DType::F64), DdpOptions::default());
        let (mut ddp, net) = made.expect("ranks");
        let checkpoints = Checkpoints::open(folder.path(), ddp.group()).expect("a folder");
        let saved = checkpoints.latest().expect("readable");
        let restored =
            (saved.expect("a checkpoint")).restore(&mut ddp, net, AdamWConfig::new().init());
        let error = restored.err().expect("moments in f64").to_string();
        let expected =
            "in F64, but Burn would read it in F32, the default type of `Device::default()`";
        assert!(error.contains(expected), "{error}");
    });
}

/// Trains `steps` more steps with a hook and saves; returns the weights' hash.
fn train_hooked(group: ProcessGroup, folder: &Path, hook: CommHook, steps: usize) -> String {
    let options = DdpOptions {
        comm_hook: hook,
        ..DdpOptions::default()
    };
    let (mut ddp, mut net) = Ddp::new(group, wide(DType::F32), options).expect("ranks");
    let mut optimizer = AdamWConfig::new().init();
    let mut checkpoints = Checkpoints::open(folder, ddp.group()).expect("a folder");
    if let Some(mut saved) = checkpoints.latest().expect("readable") {
        (net, optimizer) = saved.restore(&mut ddp, net, optimizer).expect("it fits");
    }
    for _ in 0..steps {
        let grads = wide_step(&mut ddp, &net);
        net = ddp
            .average(optimizer.step(0.01, net, grads))
            .expect("ranks");
    }
    let saved = checkpoints.save(&ddp, Checkpoint::new(&net, &optimizer));
    saved.expect("the round has ended");
    checkpoints.finish().expect("saved");
    ddp.sha256(&net).expect("a hash")
}

#[test]
fn a_resumed_training_with_a_communication_hook_has_the_bits_of_an_uninterrupted_one() {
    let run = |hook: &str, parts: &[(usize, usize)]| {
        let folder = tempfile::tempdir().expect("a folder");
        let hook: CommHook = hook.parse().expect("a hook");
        let hashes = parts.iter().map(|(world, steps)| {
            let mut hashes = ranks(*world, |group| {
                train_hooked(group, folder.path(), hook, *steps)
            });
            hashes.dedup();
            assert_eq!(hashes.len(), 1, "{hook}: all ranks have the same weights");
            hashes.remove(0)
        });
        let mut hashes: Vec<String> = hashes.collect();
        hashes.pop().expect("a part")
    };
    for hook in [
        "int8",
        "topk:0.1",
        "powersgd:2:2",
        "localsgd:3",
        "diloco:3:0:0.7:0.5",
    ] {
        assert_eq!(
            run(hook, &[(3, 6), (3, 6)]),
            run(hook, &[(3, 12)]),
            "{hook}"
        );
    }
    // Their state is by shard, so the number of ranks may change.
    for hook in ["topk:0.1", "powersgd:2:2"] {
        let expected = run(hook, &[(1, 12)]);
        for parts in [[(3, 6), (2, 6)], [(1, 6), (4, 6)], [(4, 6), (1, 6)]] {
            assert_eq!(run(hook, &parts), expected, "{hook}: {parts:?}");
        }
    }
    // A worker that did not exist begins with rank 0's optimizer; the others keep theirs.
    run("diloco:3:0:0.7:0.5", &[(2, 6), (3, 6), (2, 6)]);
}

#[test]
fn a_training_whose_ranks_had_their_own_optimizers_resumes_with_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let local: CommHook = "localsgd:3".parse().expect("a hook");
    ranks(3, |group| train_hooked(group, folder.path(), local, 6));
    let mut hashes = ranks(3, |group| {
        train_hooked(group, folder.path(), CommHook::default(), 6)
    });
    hashes.dedup();
    assert_eq!(hashes.len(), 1, "all ranks have the same weights");
}

#[test]
fn a_checkpoint_within_a_round_of_local_steps_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = || DdpOptions {
        comm_hook: "localsgd:4".parse().expect("a hook"),
        ..DdpOptions::default()
    };
    let errors = ranks(2, |group| {
        let (mut ddp, net) = Ddp::new(group, wide(DType::F32), options()).expect("ranks");
        let mut optimizer = AdamWConfig::new().init();
        let checkpoints = Checkpoints::open(folder.path(), ddp.group());
        let grads = wide_step(&mut ddp, &net);
        let net = optimizer.step(0.01, net, grads);
        let net = ddp.average(net).expect("ranks");
        let error = checkpoints
            .expect("a folder")
            .save(&ddp, Checkpoint::new(&net, &optimizer));
        error
            .expect_err("each rank has its own weights")
            .to_string()
    });
    assert_eq!(
        errors[0],
        "step 1: the weights after the last step have not been averaged"
    );
}
