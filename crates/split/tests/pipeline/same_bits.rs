//! Weights, losses and norms of pipelines have the bits of one rank.

use paceline_ddp::{Ddp, DdpOptions, Precision};
use paceline_nn::Recompute;
use paceline_nn::gpt::Gpt;
use paceline_split::pipeline::Schedule::*;
use paceline_split::pipeline::{Pipeline, PipelineOptions};

use crate::support::*;

fn check(world: usize, layout: &PipelineOptions, options: &DdpOptions, expect: &Outcome) {
    let outcomes = ranks(world, |group| {
        train(&group, layout.clone(), options).expect("it trains")
    });
    for outcome in &outcomes {
        assert_eq!(outcome, expect, "{world} ranks, {layout:?}");
    }
}

#[test]
fn every_schedule_on_2_and_4_ranks() {
    let options = options(1, 4);
    let expect = alone(&options);
    for (schedule, chunks) in SCHEDULES {
        for pp in [1, 2, 4].into_iter().filter(|pp| pp * chunks <= 8) {
            check(pp, &layout(pp, schedule, chunks), &options, &expect);
        }
    }
}

#[test]
fn pipelines_beside_each_other_average_their_stages() {
    let options = options(2, 2);
    let expect = alone(&options);
    for (schedule, chunks) in SCHEDULES {
        // The ranks of the first layout run two shards each.
        for (world, pp) in [(2, 2), (4, 2)] {
            check(world, &layout(pp, schedule, chunks), &options, &expect);
        }
    }
}

#[test]
fn mixed_precision_and_recomputed_blocks() {
    for precision in [Precision::F32, Precision::Bf16] {
        let options = DdpOptions {
            precision,
            recompute: Recompute::Blocks,
            ..options(1, 2)
        };
        let expect = alone(&options);
        for schedule in [OneForwardOneBackward, ZeroBubbleH1] {
            check(2, &layout(2, schedule, 1), &options, &expect);
        }
    }
}

#[test]
fn cuts_by_hand() {
    let options = options(1, 3);
    let expect = alone(&options);
    for schedule in [OneForwardOneBackward, ZeroBubbleH1] {
        for cuts in [vec![1], vec![3], vec![7]] {
            let layout = PipelineOptions {
                cuts: Some(cuts),
                ..layout(2, schedule, 1)
            };
            check(2, &layout, &options, &expect);
        }
    }
}

#[test]
fn frozen_blocks_and_a_frozen_first_stage() {
    let options = options(1, 4);
    let of_shard = |step, shard| data(step, shard, &options);
    for (schedule, chunks, frozen) in [
        (OneForwardOneBackward, 1, 2),
        (ZeroBubbleH1, 1, 3),
        // All of stage 0. Rank 0 trains stage 2.
        (Interleaved, 2, 2),
    ] {
        let expect = ranks(1, |group| {
            let (ddp, net) = Ddp::new(group, frozen_gpt(frozen), options.clone()).expect("ranks");
            steps_alone(ddp, net, Gpt::forward, of_shard)
        });
        let layout = layout(2, schedule, chunks);
        let outcomes = ranks(2, |group| {
            let made = Pipeline::new(&group, frozen_gpt(frozen), layout.clone(), options.clone());
            let trained = steps_in_pipeline(made.expect("a pipeline"), None, of_shard);
            trained.expect("it trains")
        });
        for outcome in outcomes {
            assert_eq!(outcome, expect[0], "{layout:?}, {frozen} blocks");
        }
    }
}

#[test]
fn the_best_idle_share_is_that_of_gradients_that_leave_early() {
    let options = options(1, 4);
    for ((schedule, chunks), expect) in
        SCHEDULES
            .into_iter()
            .zip([2.0 / 14.0, 2.0 / 14.0, 2.0 / 26.0, 1.0 / 13.0])
    {
        let idle = ranks(2, |group| {
            let layout = layout(2, schedule, chunks);
            let made = Pipeline::new(&group, gpt(), layout, options.clone()).expect("a pipeline");
            idle_at_best(made, |shard| data(0, shard, &options), 4)
        });
        for idle in idle {
            assert!((idle - expect).abs() < 1e-9, "{schedule}: {idle}");
        }
    }
}
