//! A rank that leaves inside a collective of the forward or backward pass ends the step of the others with an error.

use burn::tensor::{Device, Int, Tensor};
use paceline_collective::{DeviceMesh, ProcessGroup};
use paceline_ddp::{Ddp, DdpError, DdpOptions};
use paceline_split::tensor::{ParallelGpt, TensorParallel, TensorPlacement};

use crate::support::{CONFIG, gpt, on_ranks};

/// Where the last rank leaves.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Leaves {
    BeforeForward,
    BeforeBackward,
}

/// A step on a mesh with so many replicas on two ranks each.
fn step(world: &ProcessGroup, replicas: usize, leaves: Leaves) -> Result<(), DdpError> {
    let device = Device::flex().autodiff();
    let mesh = DeviceMesh::new(world, &[("dp", replicas), ("tp", 2)])?;
    let tp = TensorParallel::new(mesh.group("tp")?.clone(), 2).expect("parts");
    let model = ParallelGpt::from_gpt(gpt(&CONFIG, &device), &tp).expect("a model");
    let placement = TensorPlacement::new(world, &tp, &model)?;
    let options = DdpOptions {
        shards: Some(replicas),
        ..DdpOptions::default()
    };
    let (mut ddp, model) = Ddp::new(mesh.group("dp")?.clone(), model, options)?;
    ddp.join_parts(tp.group(), &model, |id| placement.pieces(id))?;
    let is_last = world.rank() + 1 == world.world();
    let leave = |at| match is_last && at == leaves {
        true => Err(DdpError::Backend("this rank leaves")),
        false => Ok(()),
    };
    let reduced = ddp.step(&model, |shard| {
        let model = shard.model()?;
        leave(Leaves::BeforeForward)?;
        let tokens = Tensor::<2, Int>::ones([1, 4], &device);
        let scores = model.forward(tokens).into_iter();
        let scores = scores.map(|scores| scores.flatten(0, 1)).collect();
        let right = Tensor::<1, Int>::ones([4], &device);
        let loss = tp.cross_entropy(scores, CONFIG.vocabulary, right).mean();
        leave(Leaves::BeforeBackward)?;
        shard.backward(loss, 4.0)
    });
    reduced.map(drop)
}

#[test]
fn a_rank_that_leaves_ends_the_step_of_the_others_with_its_number() {
    for leaves in [Leaves::BeforeForward, Leaves::BeforeBackward] {
        for replicas in [1, 2] {
            let last = 2 * replicas - 1;
            let results = on_ranks(2 * replicas, |world| step(&world, replicas, leaves));
            let errors = results
                .into_iter()
                .map(|result| result.expect_err("a rank left"));
            let mut errors: Vec<DdpError> = errors.collect();
            assert!(matches!(errors.pop(), Some(DdpError::Backend(_))));
            for error in &errors {
                let is_collective = error.collective().is_some();
                assert!(is_collective, "{leaves:?}, {replicas}: {error}");
            }
            // Its neighbours along both dimensions.
            for neighbour in [last - 1, last % 2].into_iter().take(replicas) {
                let error = &errors[neighbour];
                assert_eq!(error.culprit(), Some(last), "{leaves:?}: {error}");
            }
        }
    }
}
