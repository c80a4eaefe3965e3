//! The step of a plan: the bits of the explicit form on any number of ranks, with default options.

use burn::tensor::Tensor;
use paceline_collective::ProcessGroup;
use paceline_ddp::sampler::{BatchOptions, StepPlan};
use paceline_ddp::{Ddp, DdpError, DdpOptions, Reduced, SHARDS_DEFAULT, weights};

use crate::support::{Net, batch, device, fixed_net, loss, optimizer, ranks};

/// 23 samples: the last step of an epoch is short, and some shards of it are empty.
const LEN: usize = 23;

fn options() -> BatchOptions {
    BatchOptions::new(10).epochs(2)
}

/// Trains with `step` and returns the weights' hash and each step's reported loss.
fn train(
    group: ProcessGroup,
    options_of: DdpOptions,
    mut step: impl FnMut(&mut Ddp, &Net, &StepPlan) -> Reduced,
) -> (String, Vec<f64>) {
    let device = device();
    let (mut ddp, mut net) = Ddp::new(group, fixed_net(&device), options_of).expect("the door");
    let mut optimizer = optimizer();
    let mut losses = Vec::new();
    for plan in ddp.batches(LEN, options()).expect("steps") {
        let reduced = step(&mut ddp, &net, &plan);
        losses.push(reduced.loss);
        net = optimizer.step(0.01, net, reduced.grads);
    }
    (weights::sha256(&weights::export(&net)), losses)
}

fn on_plan(ddp: &mut Ddp, net: &Net, plan: &StepPlan) -> Reduced {
    let device = device();
    ddp.step_on(net, plan, |net, indices| {
        assert!(!indices.is_empty());
        loss(net, indices, true, &device)
    })
    .expect("a step")
}

#[test]
fn a_program_that_names_nothing_gets_the_same_bits_on_one_to_four_ranks() {
    let run = |group| train(group, DdpOptions::default(), on_plan);
    let expected = ranks(1, run).remove(0);
    for world in 2..=SHARDS_DEFAULT {
        for found in ranks(world, run) {
            assert_eq!(found, expected, "{world} ranks");
        }
    }
    let five = ranks(5, |group| train(group, DdpOptions::default(), on_plan).0);
    assert_ne!(five[0], expected.0, "five ranks have five shards");
}

#[test]
fn a_plans_step_has_the_bits_of_the_explicit_form() {
    for accumulate in [1, 2] {
        let options = || DdpOptions {
            accumulate,
            ..DdpOptions::default()
        };
        let explicit = |ddp: &mut Ddp, net: &Net, plan: &StepPlan| {
            let device = device();
            let reduced = ddp.step(net, |shard| {
                let indices = &plan.shards[shard.shard()];
                let parts = indices.chunks(indices.len().div_ceil(accumulate).max(1));
                shard.micro_batches(parts.len());
                for part in parts {
                    let loss = loss(&shard.model()?, part, true, &device);
                    shard.backward(loss, part.len() as f32)?;
                }
                Ok::<(), DdpError>(())
            });
            reduced.expect("a step")
        };
        let expected = ranks(2, |group| train(group, options(), explicit).0);
        let found = ranks(2, |group| train(group, options(), on_plan).0);
        assert_eq!(found, expected, "{accumulate} micro-batches");
    }
}

#[test]
fn the_loss_is_the_mean_over_all_samples_of_the_step_on_every_rank() {
    let losses = ranks(2, |group| {
        let device = device();
        device.seed(1);
        // A mean of losses that depend on the sample alone.
        let (mut ddp, net) =
            Ddp::new(group, Net::new(&device), DdpOptions::default()).expect("the door");
        let plan = ddp.batches(LEN, options()).expect("steps").next();
        let plan = plan.expect("a step");
        let reduced = ddp.step_on(&net, &plan, |net, indices| {
            let (x, _) = batch(indices, &device);
            let constant = net.forward(x, true).sum() * 0.0;
            let mean = indices.iter().sum::<usize>() as f32 / indices.len() as f32;
            constant + Tensor::<1>::from_floats([mean], &device)
        });
        let indices: Vec<usize> = plan.shards.concat();
        let expected = indices.iter().sum::<usize>() as f64 / indices.len() as f64;
        (reduced.expect("a step").loss, expected)
    });
    for (found, expected) in losses {
        assert!((found - expected).abs() < 1e-5, "{found} for {expected}");
    }
}

#[test]
fn a_plan_for_another_number_of_shards_is_refused_and_changes_nothing() {
    let group = ranks(1, |group| group).remove(0);
    let device = device();
    let (mut ddp, net) =
        Ddp::new(group, Net::new(&device), DdpOptions::default()).expect("the door");
    let mut plan = ddp
        .batches(LEN, options())
        .expect("steps")
        .next()
        .expect("a step");
    plan.shards.pop();
    let error = ddp
        .step_on(&net, &plan, |net, indices| {
            loss(net, indices, true, &device)
        })
        .err()
        .expect("refused");
    assert_eq!(
        error.to_string(),
        "the step's plan has 3 shards, but the job has 4"
    );
    assert_eq!(ddp.state_dict().step, 0);
}
