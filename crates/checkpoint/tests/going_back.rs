//! Bits flip on one rank: all ranks go back to a state that all had, and end with the weights of an undisturbed run. Ranks are
//! threads.

mod support;

use std::path::Path;
use std::time::Duration;

use burn::optim::AdamWConfig;
use burn::tensor::{Device, TensorData};
use paceline_checkpoint::ledger::audit;
use paceline_checkpoint::{Checkpoint, Checkpoints};
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_ddp::sampler::BatchOptions;
use paceline_ddp::{Ddp, DdpOptions, weights};
use support::Net;
use tempfile::tempdir;

const STEPS: u64 = 40;

/// `net` with this bit flipped in one weight.
fn flipped(net: Net, bit: u32) -> Net {
    let flip = |(path, data): (String, TensorData)| {
        let mut values: Vec<f32> = data.try_to_vec().expect("f32");
        values[1] = f32::from_bits(values[1].to_bits() ^ (1 << bit));
        (path, TensorData::new(values, data.shape().clone()))
    };
    let tensors = weights::export(&net).into_iter();
    let wrong = tensors.filter(|(path, _)| path == "second.bias").map(flip);
    let wrong = wrong.collect();
    weights::import(net, wrong)
}

/// What goes wrong on rank 1 in one step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Nothing,
    /// A bit of a weight, before the step.
    Weight(u64),
    /// The bit that makes it so large that the loss is infinite.
    Huge(u64),
    /// The optimizer's update.
    Update(u64),
    /// The gradients that it sends.
    Gradient(u64),
    /// A bit of a weight, again each time that the step is repeated.
    Lasting(u64),
    /// The loss, on all ranks.
    Nan(u64),
}

/// The hash of the weights, or the error that ends the job, and the steps that it ran.
type End = (Result<String, String>, u64);

/// The first and last steps that were given up.
type GivenUp = Vec<(u64, u64)>;

fn rank(group: ProcessGroup, folder: &Path, every: u64, fault: Fault) -> End {
    let device = Device::flex().autodiff();
    let options = DdpOptions {
        shards: Some(4),
        skip_non_finite: true,
        ..DdpOptions::default()
    };
    let mut fault = match (fault, group.rank()) {
        (Fault::Nan(_), _) | (_, 1) => fault,
        _ => Fault::Nothing,
    };
    let (mut ddp, mut net) =
        Ddp::new(group, Net::new(&device, 1.0), options).expect("the ranks agree");
    let mut optimizer = AdamWConfig::new().init();
    let mut batches = ddp
        .batches(64, BatchOptions::new(16).epochs(10))
        .expect("steps");
    let checkpoints = Checkpoints::open(folder, ddp.group()).expect("a folder");
    let mut checkpoints = checkpoints.snapshot_every(every);
    let mut ran = 0;
    loop {
        let position = batches.state();
        let state = || Checkpoint::new(&net, &optimizer).sampler(&position);
        checkpoints.snapshot(&mut ddp, state).expect("kept");
        let Some(plan) = batches.next() else { break };
        ran += 1;
        let step = ddp.next_step();
        let now = fault;
        let is_due = |fault| now == fault;
        if is_due(Fault::Weight(step)) || is_due(Fault::Lasting(step)) {
            net = flipped(net, 18);
        }
        if is_due(Fault::Huge(step)) {
            net = flipped(net, 30);
        }
        let reduced = ddp.step_on(&net, &plan, |net, indices| {
            let loss = net.loss(indices);
            match now {
                Fault::Gradient(of) if of == step => loss * 1.01,
                Fault::Nan(of) if of == step => loss * f32::NAN,
                _ => loss,
            }
        });
        if [Fault::Weight, Fault::Huge, Fault::Gradient]
            .iter()
            .any(|of| now == of(step))
        {
            fault = Fault::Nothing;
        }
        let reduced = match reduced {
            Ok(reduced) => reduced,
            Err(error) => {
                let saved = checkpoints.go_back(&ddp, &error).expect("no save failed");
                let Some(mut saved) = saved else {
                    return (Err(error.to_string()), ran);
                };
                (net, optimizer) = saved.restore(&mut ddp, net, optimizer).expect("it fits");
                let position = saved.sampler().expect("a position");
                batches.load_state_dict(position).expect("the same data");
                continue;
            }
        };
        if reduced.skipped {
            let given_up = checkpoints.give_up(&ddp, &plan).expect("recorded");
            let (_, mut saved) = given_up.expect("a snapshot");
            (net, optimizer) = saved.restore(&mut ddp, net, optimizer).expect("it fits");
            assert_eq!(ddp.next_step(), step + 1);
            assert_eq!(saved.sampler().expect("a position"), &plan.after);
            continue;
        }
        let rate = match is_due(Fault::Update(step)) {
            true => {
                fault = Fault::Nothing;
                0.051
            }
            false => 0.05,
        };
        net = optimizer.step(rate, net, reduced.grads);
        checkpoints.record(&ddp, &plan).expect("recorded");
        if ddp.next_step().is_multiple_of(5) {
            let saved = Checkpoint::new(&net, &optimizer).sampler(&plan.after);
            checkpoints.save(&ddp, saved).expect("saved");
        }
    }
    checkpoints.finish().expect("written");
    (Ok(ddp.sha256(&net).expect("whole")), ran)
}

/// How all ranks end, which is the same on all. Each sample of each epoch was used once by what counts.
#[track_caller]
fn end(world: usize, every: u64, fault: Fault) -> End {
    end_of(world, every, fault).0
}

#[track_caller]
fn end_of(world: usize, every: u64, fault: Fault) -> (End, GivenUp) {
    let folder = tempdir().expect("a folder");
    let options = GroupOptions {
        timeout: Duration::from_secs(20),
        ..GroupOptions::default()
    };
    let groups = ProcessGroup::local(world, &options).expect("a local group");
    let ends =
        paceline_testing::on_threads(groups, |group| rank(group, folder.path(), every, fault));
    assert!(ends.iter().all(|end| *end == ends[0]), "{ends:?}");
    let audit = audit(folder.path()).expect("a ledger");
    assert_eq!(audit.faults, [], "{fault:?}");
    if ends[0].0.is_ok() {
        assert_eq!(audit.steps, STEPS, "{fault:?}");
        assert_eq!(audit.epochs.len(), 10, "{fault:?}");
    }
    let given_up = audit.attempts.iter().flat_map(|attempt| &attempt.given_up);
    let given_up = given_up.map(|of| (of.first, of.last)).collect();
    (ends.into_iter().next().expect("a rank"), given_up)
}

#[test]
fn all_ranks_go_back_and_end_with_the_same_bits() {
    let (hash, steps) = end(1, 0, Fault::Nothing);
    assert_eq!(steps, STEPS);
    for world in [2, 3] {
        assert_eq!(end(world, 7, Fault::Nothing), (hash.clone(), STEPS));
        // Early and late, at a snapshot and between two, in the window that is compared next and in others.
        for step in [0, 7, 8, 15, 30] {
            for fault in [Fault::Weight(step), Fault::Huge(step), Fault::Update(step)] {
                let (repaired, steps) = end(world, 7, fault);
                assert_eq!(repaired, hash, "{fault:?} on {world} ranks");
                assert!((STEPS + 1..STEPS + 20).contains(&steps), "{steps} steps");
            }
        }
    }
}

#[test]
fn without_a_snapshot_or_if_it_does_not_help_the_job_ends_and_names_the_rank() {
    for (every, fault) in [(0, Fault::Weight(9)), (7, Fault::Lasting(9))] {
        let (error, _) = end(3, every, fault);
        let error = error.expect_err("it lasts");
        assert!(
            error.contains("on ranks [1] differ from the other ranks"),
            "{error}"
        );
        let (error, _) = end(2, every, fault);
        let error = error.expect_err("it lasts");
        assert!(error.contains("no majority agrees on"), "{error}");
    }
}

/// What the check cannot find: the average contains the wrong gradient on all ranks.
#[test]
fn a_wrong_gradient_that_was_sent_goes_unnoticed() {
    let (right, _) = end(3, 7, Fault::Nothing);
    let (wrong, steps) = end(3, 7, Fault::Gradient(9));
    assert_eq!(steps, STEPS);
    assert_ne!(wrong, right);
}

#[test]
fn all_ranks_go_back_from_a_nan_and_on_with_the_next_samples() {
    // Of the snapshots before steps 0, 7 and 14, the last one counts once a step has followed it.
    for (step, given_up) in [(17, (15, 18)), (14, (8, 15)), (0, (1, 1))] {
        let alone = end_of(1, 7, Fault::Nan(step));
        assert_eq!(alone.1, [given_up]);
        for world in [2, 4] {
            assert_eq!(
                end_of(world, 7, Fault::Nan(step)),
                alone,
                "on {world} ranks"
            );
        }
    }
}
