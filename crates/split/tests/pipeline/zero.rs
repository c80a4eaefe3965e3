//! Stages whose replicas share optimizer state, gradients and weights: ZeRO in pipelines, with the bits of one rank.

use burn::optim::AdamWConfig;
use burn::tensor::Tensor;
use paceline_collective::ProcessGroup;
use paceline_ddp::{Ddp, DdpError, DdpOptions, Precision, ZeroRedundancyOptimizer, ZeroStage};
use paceline_nn::gpt::Gpt;
use paceline_split::pipeline::Schedule::*;
use paceline_split::pipeline::{MicroBatches, Pipeline, PipelineError, PipelineOptions};

use crate::failures::losing_the_last;
use crate::support::*;

const STAGES: [ZeroStage; 3] = [
    ZeroStage::Optimizer,
    ZeroStage::Gradients,
    ZeroStage::Parameters,
];

fn check(
    world: usize,
    layout: &PipelineOptions,
    options: &DdpOptions,
    counts: &[usize],
    expect: &Outcome,
) {
    for stage in STAGES {
        let outcomes = ranks(world, |group| {
            let stage = Some(stage);
            train_with(&group, layout.clone(), options, counts, stage).expect("it trains")
        });
        for outcome in &outcomes {
            assert_eq!(
                outcome, expect,
                "stage {stage}, {world} ranks, {layout:?}, {counts:?}"
            );
        }
    }
}

#[test]
fn every_stage_and_schedule_has_the_bits_of_one_rank() {
    let options = options(4, 2);
    let expect = alone(&options);
    for (schedule, chunks) in SCHEDULES {
        // Two replicas of two stages, with two shards each; three, of which one has two shards.
        for world in [4, 6] {
            let layout = layout(2, schedule, chunks);
            check(world, &layout, &options, &counts(&options), &expect);
        }
    }
}

#[test]
fn replicas_with_fewer_micro_batches_take_part_in_the_gathers_of_the_others() {
    let options = options(3, 4);
    for counts in [[4, 2, 1], [1, 4, 0], [0, 0, 3]] {
        let expect = alone_with(&options, &counts);
        for (schedule, chunks) in SCHEDULES {
            // Two ranks for each stage have two shards and one.
            for (world, pp) in [(4, 2), (8, 4), (6, 2)] {
                if pp * chunks <= 8 {
                    let layout = layout(pp, schedule, chunks);
                    check(world, &layout, &options, &counts, &expect);
                }
            }
        }
    }
}

#[test]
fn mixed_precision_and_cuts_by_hand() {
    // The first stage is the embedding alone, which is read by the head too, so none of its parameters are dealt at stage 3.
    for (precision, cuts) in [(Precision::Bf16, vec![3]), (Precision::F32, vec![1])] {
        let options = DdpOptions {
            precision,
            ..options(2, 3)
        };
        let expect = alone(&options);
        let layout = PipelineOptions {
            cuts: Some(cuts),
            ..layout(2, OneForwardOneBackward, 1)
        };
        check(4, &layout, &options, &counts(&options), &expect);
    }
}

type Made = (Pipeline<3>, Ddp, ZeroRedundancyOptimizer, Gpt);

fn stage_3(
    group: &ProcessGroup,
    layout: PipelineOptions,
    options: DdpOptions,
) -> Result<Made, PipelineError> {
    let (pipeline, mut ddp, net) = Pipeline::new(group, gpt(), layout, options)?;
    let optimizer = AdamWConfig::new().init();
    let stage = ZeroStage::Parameters;
    let (optimizer, net) = ZeroRedundancyOptimizer::at_stage(&mut ddp, net, optimizer, stage)?;
    Ok((pipeline, ddp, optimizer, net))
}

#[test]
fn an_evaluation_gathers_the_weights_of_its_stages() {
    let options = options(2, 2);
    let scores = |group: &ProcessGroup, is_sharded: bool| {
        let layout = layout(2, Interleaved, 2);
        let replica = group.rank() / 2;
        // Replicas have different numbers of batches.
        let count = 1 + 2 * replica;
        let data = data(0, 0, &options);
        let mut scores = Vec::new();
        let each = |_: usize, output: Tensor<3>| {
            scores.extend(output.into_data().try_to_vec::<f32>().expect("f32"));
        };
        if is_sharded {
            let (mut pipeline, ddp, _, net) =
                stage_3(group, layout, options.clone()).expect("a pipeline");
            let run = pipeline.evaluate(&ddp, &net, count, |at| data.input(at), each);
            run.expect("an evaluation");
        } else {
            let made = Pipeline::new(group, gpt(), layout, options.clone());
            let (mut pipeline, ddp, net) = made.expect("a pipeline");
            let run = pipeline.evaluate(&ddp, &net, count, |at| data.input(at), each);
            run.expect("an evaluation");
        }
        scores
    };
    let expect = ranks(4, |group| scores(&group, false));
    assert!(!expect[1].is_empty() && !expect[3].is_empty());
    assert_eq!(ranks(4, |group| scores(&group, true)), expect);
}

#[test]
fn parts_that_are_joined_after_the_optimizer_is_sharded_are_refused() {
    let errors = ranks(2, |group| {
        let (mut ddp, net) = Ddp::new(group.clone(), gpt(), options(2, 1)).expect("a replica");
        let optimizer = AdamWConfig::new().init();
        let made = ZeroRedundancyOptimizer::new(&mut ddp, &net, optimizer);
        made.expect("a sharded optimizer");
        ddp.join_parts(&group, &net, |_| None)
            .expect_err("it is too late")
    });
    for error in errors {
        assert!(matches!(error, DdpError::Sharded(_)), "{error}");
    }
}

#[test]
fn a_lost_rank_ends_the_gathers_of_its_replica_and_its_neighbours() {
    for (schedule, chunks) in SCHEDULES {
        let errors = losing_the_last(|group| {
            let made = stage_3(group, layout(2, schedule, chunks), options(2, 2));
            let (pipeline, ddp, _, net) = made.expect("a pipeline");
            (pipeline, ddp, net)
        });
        for (rank, error) in errors[..3].iter().enumerate() {
            let is_named = error.contains("rank 3 of the job: rank ");
            assert!(is_named, "{schedule}, rank {rank}: {error}");
        }
    }
}

#[test]
fn the_best_idle_share_of_gathered_blocks_is_that_of_whole_backward_passes() {
    let options = options(2, 4);
    for (schedule, chunks) in SCHEDULES {
        let idle = ranks(4, |group| {
            let layout = layout(2, schedule, chunks);
            let made = Pipeline::new(&group, gpt(), layout, options.clone());
            let (pipeline, mut ddp, net) = made.expect("a pipeline");
            let (optimizer, stage) = (AdamWConfig::new().init(), ZeroStage::Parameters);
            let made = ZeroRedundancyOptimizer::at_stage(&mut ddp, net, optimizer, stage);
            let (_optimizer, net) = made.expect("it is dealt");
            idle_at_best((pipeline, ddp, net), |shard| data(0, shard, &options), 4)
        });
        for idle in idle {
            let expect = whole_passes(2, 4, chunks);
            assert!((idle - expect).abs() < 1e-9, "{schedule}: {idle}");
        }
    }
}
