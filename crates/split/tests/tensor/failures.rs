//! A rank that leaves inside a collective of the forward or backward pass ends the step of the others with an error.

use burn::tensor::{Device, Int, Tensor};
use paceline_collective::{DeviceMesh, ProcessGroup};
use paceline_ddp::{Ddp, DdpError, DdpOptions};
use paceline_split::tensor::{ParallelGpt, TensorParallel};

use crate::support::{CONFIG, gpt, on_ranks};

/// Where rank 1 leaves.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Leaves {
    BeforeForward,
    BeforeBackward,
}

fn step(world: &ProcessGroup, leaves: Leaves) -> Result<(), DdpError> {
    let device = Device::flex().autodiff();
    let mesh = DeviceMesh::new(world, &[("dp", 1), ("tp", 2)])?;
    let tp = TensorParallel::new(mesh.group("tp")?.clone(), 2).expect("parts");
    let model = ParallelGpt::from_gpt(gpt(&CONFIG, &device), &tp).expect("a model");
    let options = DdpOptions {
        shards: Some(1),
        ..DdpOptions::default()
    };
    let (mut ddp, model) = Ddp::new(mesh.group("dp")?.clone(), model, options)?;
    let is_gone = |at| world.rank() == 1 && at == leaves;
    let gone = || DdpError::Backend("rank 1 has left");
    let reduced = ddp.step(&model, |shard| {
        let model = shard.model()?;
        if is_gone(Leaves::BeforeForward) {
            return Err(gone());
        }
        let scores = model
            .forward(Tensor::<2, Int>::ones([1, 4], &device))
            .into_iter();
        let scores = scores.map(|scores| scores.flatten(0, 1)).collect();
        let right = Tensor::<1, Int>::ones([4], &device);
        let loss = tp.cross_entropy(scores, CONFIG.vocabulary, right).mean();
        if is_gone(Leaves::BeforeBackward) {
            return Err(gone());
        }
        shard.backward(loss, 4.0)
    });
    reduced.map(drop)
}

#[test]
fn a_rank_that_leaves_ends_the_step_of_the_others_with_its_number() {
    for leaves in [Leaves::BeforeForward, Leaves::BeforeBackward] {
        let results = on_ranks(2, |world| step(&world, leaves));
        let error = results[0].as_ref().expect_err("rank 1 left");
        assert!(
            matches!(error, DdpError::Collective(_)),
            "{leaves:?}: {error}"
        );
        assert_eq!(error.culprit(), Some(1), "{leaves:?}: {error}");
    }
}
