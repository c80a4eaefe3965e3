//! Lost ranks and bad input end as errors on every rank.

use burn::tensor::{Int, Tensor};
use paceline_collective::{DeviceMesh, ProcessGroup};
use paceline_ddp::Ddp;
use paceline_nn::gpt::Gpt;
use paceline_split::pipeline::Schedule::*;
use paceline_split::pipeline::{MicroBatches, Pipeline, PipelineError, PipelineOptions};

use crate::support::*;

/// Data of a rank that ends in the forward pass of one micro-batch.
pub(crate) struct Ends(pub(crate) Data, pub(crate) usize);

impl MicroBatches<Tensor<2, Int>, Tensor<3>> for Ends {
    fn count(&self) -> usize {
        self.0.count()
    }

    fn weight(&self, micro_batch: usize) -> f32 {
        self.0.weight(micro_batch)
    }

    fn input(&self, micro_batch: usize) -> Tensor<2, Int> {
        self.0.input(micro_batch)
    }

    fn loss(&self, micro_batch: usize, output: Tensor<3>) -> Tensor<1> {
        let loss = self.0.loss(micro_batch, output);
        if micro_batch == self.1 {
            // A panic without its message.
            std::panic::resume_unwind(Box::new("the last stage is lost"));
        }
        loss
    }
}

/// The errors of a step of two pipelines of two stages, of which the second one loses its last stage.
pub(crate) fn losing_the_last(
    make: impl Fn(&ProcessGroup) -> (Pipeline<3>, Ddp, Gpt) + Sync,
) -> Vec<String> {
    let errors = ranks(4, |group| {
        let rank = group.rank();
        let (mut pipeline, mut ddp, net) = make(&group);
        drop(group);
        let lost = if rank == 3 { 1 } else { usize::MAX };
        let step = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pipeline.step(&mut ddp, &net, |pipeline, shard| {
                let data = data(0, shard.shard(), &options(2, 2));
                pipeline.shard(shard, &Ends(data, lost))?;
                Ok::<_, PipelineError>(())
            })
        }));
        match step {
            Ok(step) => step.err().expect("the step fails").to_string(),
            Err(_) => "lost".to_owned(),
        }
    });
    assert_eq!(errors[3], "lost");
    errors
}

#[test]
fn a_lost_rank_is_named_on_all_others_in_every_schedule() {
    for (schedule, chunks) in [
        (GPipe, 1),
        (OneForwardOneBackward, 1),
        (Interleaved, 2),
        (ZeroBubbleH1, 1),
    ] {
        let errors = losing_the_last(|group| {
            let made = Pipeline::new(group, gpt(), layout(2, schedule, chunks), options(2, 2));
            made.expect("a pipeline")
        });
        let [first, stage, neighbour] = [0, 1, 2].map(|rank| &errors[rank]);
        // The neighbour in its pipeline, and the replica of its stage.
        assert!(
            neighbour.contains("rank 3 of the job: rank 1 left"),
            "{schedule}: {neighbour}"
        );
        assert!(
            stage.contains("rank 1 left the group"),
            "{schedule}: {stage}"
        );
        assert!(
            first.contains("gave up") && first.contains("rank 1 left"),
            "{schedule}: {first}"
        );
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused_before_any_rank_waits() {
    let check =
        |world, layout: PipelineOptions, micro_batches, expect: &str, hint: Option<&str>| {
            for error in ranks(world, |group| {
                let made = Pipeline::new(&group, gpt(), layout.clone(), options(4, micro_batches));
                made.err().expect("it is refused")
            }) {
                assert_eq!(error.to_string(), expect);
                assert_eq!(error.hint().as_deref(), hint);
            }
        };
    check(
        3,
        layout(2, GPipe, 1),
        2,
        "pipeline: 3 ranks do not divide into pipelines of 2",
        Some("use 1, 3 stages, or a number of ranks that is a multiple of 2"),
    );
    check(
        2,
        layout(2, Interleaved, 5),
        2,
        "pipeline: 10 stages for 8 blocks",
        Some("use at most 8 stages"),
    );
    check(
        2,
        layout(2, Interleaved, 2),
        3,
        "pipeline: schedule interleaved needs a number of micro-batches that is a multiple of its 2 ranks, got 3",
        Some("use 4 micro-batches, or schedule 1f1b, which takes any number"),
    );
    check(
        2,
        layout(2, GPipe, 2),
        2,
        "pipeline: schedule gpipe has 1 stage for each rank, got 2",
        Some("choose the schedule interleaved for several stages on each rank"),
    );
    check(
        2,
        layout(2, ZeroBubbleH1, 2),
        2,
        "pipeline: schedule zb-h1 has 1 stage for each rank, got 2",
        Some("choose the schedule interleaved for several stages on each rank"),
    );
    for cuts in [vec![], vec![0], vec![8], vec![2, 4]] {
        let expect = format!(
            "pipeline: cuts {cuts:?} of 8 blocks: expected 1 ascending numbers from 1 to 7"
        );
        let layout = PipelineOptions {
            cuts: Some(cuts),
            ..layout(2, GPipe, 1)
        };
        check(2, layout, 2, &expect, None);
    }
}

#[test]
fn a_rank_whose_stages_are_frozen_is_refused_on_all_ranks() {
    for error in ranks(2, |group| {
        let made = Pipeline::new(&group, frozen_gpt(4), layout(2, GPipe, 1), options(1, 2));
        made.err().expect("it is refused")
    }) {
        let expect = "pipeline: all parameters of the stages of the pipeline's rank 0 are frozen";
        assert_eq!(error.to_string(), expect);
        let hint = "use fewer ranks, or cuts that give rank 0 a block that is trained";
        assert_eq!(error.hint().as_deref(), Some(hint));
    }
}

#[test]
fn a_mesh_with_pipelines_of_another_size_is_refused() {
    for (ranks_of, expect) in [
        (1, "pipeline: 1 ranks, but the mesh has 2 along pp"),
        (4, "pipeline: 4 ranks, but the mesh has 2 along pp"),
    ] {
        for error in ranks(2, |group| {
            let mesh = DeviceMesh::new(&group, &[("dp", 1), ("pp", 2)]).expect("a mesh");
            let made = Pipeline::on(mesh, gpt(), layout(ranks_of, GPipe, 1), options(1, 2));
            made.err().expect("it is refused")
        }) {
            assert_eq!(error.to_string(), expect);
        }
    }
}

#[test]
fn ranks_with_other_layouts_are_named() {
    let errors = ranks(2, |group| {
        let cuts = Some(vec![3 + group.rank()]);
        let layout = PipelineOptions {
            cuts,
            ..layout(2, GPipe, 1)
        };
        let made = Pipeline::new(&group, gpt(), layout, options(1, 2));
        made.err().expect("it is refused").to_string()
    });
    for error in errors {
        assert!(
            error.starts_with("ranks do not agree on the pipeline: rank 0 has"),
            "{error}"
        );
    }
}
