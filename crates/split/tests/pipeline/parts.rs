//! Pipelines whose stages are cut into parts: the bits are those of the same parts on one rank, and a lost rank is named.

use burn::tensor::{Int, Tensor};
use paceline_collective::{DeviceMesh, ProcessGroup};
use paceline_ddp::{Ddp, DdpOptions, GradScaler, GradScalerOptions, Precision, ZeroStage};
use paceline_nn::Recompute;
use paceline_split::pipeline::Schedule::*;
use paceline_split::pipeline::{MicroBatches, Pipeline, PipelineError, PipelineOptions};
use paceline_split::tensor::{ParallelGpt, TensorParallel, TensorPlacement};

use crate::support::*;

/// How the tensors are cut, and what of a stage's parts is dealt to its replicas.
#[derive(Clone, Copy, Debug)]
struct Cut {
    parts: usize,
    is_sequence: bool,
    zero: Option<ZeroStage>,
}

impl Cut {
    fn on(self, group: &ProcessGroup) -> TensorParallel {
        let tp = TensorParallel::new(group.clone(), self.parts).expect("parts");
        match self.is_sequence {
            true => tp.with_sequence_parallel(),
            false => tp,
        }
    }
}

/// Where a rank ends, if it does.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ends {
    Never,
    Forward,
    Backward,
}

/// One shard's data, for scores that are cut.
struct Cuts {
    data: Data,
    tp: TensorParallel,
    ends: Ends,
}

impl Cuts {
    fn may_end(&self, at: Ends, micro_batch: usize) {
        if self.ends == at && micro_batch == 1 {
            // A panic without its message.
            std::panic::resume_unwind(Box::new("this rank is lost"));
        }
    }
}

impl MicroBatches<Tensor<2, Int>, Vec<Tensor<3>>> for Cuts {
    fn count(&self) -> usize {
        self.data.count()
    }

    fn weight(&self, micro_batch: usize) -> f32 {
        self.may_end(Ends::Backward, micro_batch);
        self.data.weight(micro_batch)
    }

    fn input(&self, micro_batch: usize) -> Tensor<2, Int> {
        self.data.input(micro_batch)
    }

    fn loss(&self, micro_batch: usize, scores: Vec<Tensor<3>>) -> Tensor<1> {
        self.may_end(Ends::Forward, micro_batch);
        let flat = |scores: Tensor<3>| self.data.precision.logits(scores.flatten::<2>(0, 1));
        let scores = scores.into_iter().map(flat).collect();
        let right = self.data.labels(micro_batch);
        self.tp
            .cross_entropy(scores, CONFIG.vocabulary, right)
            .mean()
    }
}

/// All parts on one rank, without a pipeline.
fn alone(cut: Cut, options: &DdpOptions) -> Outcome {
    ranks(1, |group| {
        let tp = cut.on(&group);
        let net = ParallelGpt::from_gpt(gpt(), &tp).expect("a model");
        let placement = TensorPlacement::new(&group, &tp, &net).expect("slices");
        let (mut ddp, net) = Ddp::new(group, net, options.clone()).expect("a replica");
        let joined = ddp.join_parts(tp.group(), &net, |id| placement.pieces(id));
        joined.expect("it is alone");
        ddp.set_placement(placement);
        steps_alone(ddp, net, ParallelGpt::forward, |step, shard| Cuts {
            data: data(step, shard, options),
            tp: tp.clone(),
            ends: Ends::Never,
        })
    })
    .remove(0)
}

type Made = (Pipeline<3>, Ddp, ParallelGpt);

/// A mesh of `dp` by `pp` by so many ranks for the parts.
fn pipeline(
    world: &ProcessGroup,
    along_tp: usize,
    cut: Cut,
    layout: PipelineOptions,
    options: &DdpOptions,
) -> Result<(Made, TensorParallel), PipelineError> {
    let dp = world.world() / layout.ranks / along_tp;
    let mesh = DeviceMesh::new(world, &[("dp", dp), ("pp", layout.ranks), ("tp", along_tp)])?;
    let tp = cut.on(mesh.group("tp")?);
    let net = ParallelGpt::from_gpt(gpt(), &tp).expect("a model");
    let made = Pipeline::on(mesh, net, layout, options.clone())?;
    Ok((made, tp))
}

fn train(
    world: &ProcessGroup,
    along_tp: usize,
    cut: Cut,
    layout: PipelineOptions,
    options: &DdpOptions,
    ends: Ends,
) -> Result<Outcome, PipelineError> {
    let (made, tp) = pipeline(world, along_tp, cut, layout, options)?;
    steps_in_pipeline(made, cut.zero, |step, shard| Cuts {
        data: data(step, shard, options),
        tp: tp.clone(),
        ends,
    })
}

fn check(
    world: usize,
    along_tp: usize,
    cut: Cut,
    layout: &PipelineOptions,
    options: &DdpOptions,
    expect: &Outcome,
) {
    let outcomes = ranks(world, |group| {
        let layout = layout.clone();
        train(&group, along_tp, cut, layout, options, Ends::Never).expect("it trains")
    });
    for outcome in &outcomes {
        let case = format!("{world} ranks, {along_tp} for {cut:?}, {layout:?}");
        assert_eq!(outcome, expect, "{case}");
    }
}

const TWO: Cut = Cut {
    parts: 2,
    is_sequence: false,
    zero: None,
};

#[test]
fn every_schedule_with_parts_on_one_or_two_ranks_of_a_stage() {
    let options = options(1, 4);
    for is_sequence in [false, true] {
        let cut = Cut { is_sequence, ..TWO };
        let expect = alone(cut, &options);
        for (schedule, chunks) in SCHEDULES {
            let layout = layout(2, schedule, chunks);
            check(2, 1, cut, &layout, &options, &expect);
            check(4, 2, cut, &layout, &options, &expect);
        }
    }
}

#[test]
fn eight_ranks_as_replicas_stages_and_parts() {
    use ZeroStage::{Gradients, Optimizer, Parameters};
    let options = options(2, 2);
    for (parts, is_sequence) in [(2, false), (4, true)] {
        let cut = Cut {
            parts,
            is_sequence,
            ..TWO
        };
        let expect = alone(cut, &options);
        let layout = layout(2, OneForwardOneBackward, 1);
        for zero in [None, Some(Optimizer), Some(Gradients), Some(Parameters)] {
            let cut = Cut { zero, ..cut };
            check(8, 2, cut, &layout, &options, &expect);
            // Two shards for each rank.
            check(4, 2, cut, &layout, &options, &expect);
        }
    }
}

#[test]
fn uneven_cuts_of_blocks_and_of_parts_with_recomputed_blocks_in_mixed_precision() {
    let cut = Cut { parts: 4, ..TWO };
    for precision in [Precision::F32, Precision::Bf16] {
        let options = DdpOptions {
            precision,
            recompute: Recompute::Blocks,
            ..options(1, 3)
        };
        let expect = alone(cut, &options);
        let layout = PipelineOptions {
            cuts: Some(vec![3]),
            ..layout(2, OneForwardOneBackward, 1)
        };
        // Three ranks have 2, 1 and 1 of the parts.
        check(6, 3, cut, &layout, &options, &expect);
    }
}

#[test]
fn all_ranks_skip_the_same_steps() {
    let scaler = GradScaler::new(GradScalerOptions {
        init_scale: 1e9,
        backoff_factor: 1e-5,
        ..GradScalerOptions::default()
    });
    let options = DdpOptions {
        precision: Precision::F16,
        scaler: Some(scaler.expect("a scaler")),
        ..options(2, 2)
    };
    let expect = alone(TWO, &options);
    let norms: Vec<u64> = expect.1.iter().map(|(_, norm)| *norm).collect();
    assert!(norms.contains(&0), "a step was skipped: {norms:?}");
    let layout = layout(2, OneForwardOneBackward, 1);
    for zero in [
        None,
        Some(ZeroStage::Gradients),
        Some(ZeroStage::Parameters),
    ] {
        let cut = Cut { zero, ..TWO };
        check(8, 2, cut, &layout, &options, &expect);
    }
}

#[test]
fn a_rank_that_is_lost_in_a_pass_is_named_on_all_others() {
    for ends in [Ends::Forward, Ends::Backward] {
        for (world, zero) in [(4, None), (8, None), (8, Some(ZeroStage::Parameters))] {
            let (replicas, cut) = (world / 4, Cut { zero, ..TWO });
            let errors = ranks(world, |group| {
                let rank = group.rank();
                let options = options(replicas, 2);
                let layout = layout(2, OneForwardOneBackward, 1);
                // The second part of the first pipeline's last stage.
                let ends = if rank == 3 { ends } else { Ends::Never };
                let run = || train(&group, 2, cut, layout, &options, ends);
                let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
                match run {
                    Ok(step) => step.expect_err("the step fails").to_string(),
                    Err(_) => "lost".to_owned(),
                }
            });
            assert_eq!(errors[3], "lost");
            for (rank, error) in errors.iter().enumerate().filter(|(rank, _)| *rank != 3) {
                let is_named = error.contains("rank 3 of the job: rank ");
                assert!(
                    is_named,
                    "{ends:?}, {zero:?}, rank {rank} of {world}: {error}"
                );
            }
        }
    }
}

#[test]
fn parts_on_other_ranks_than_the_meshs_are_refused() {
    let errors = ranks(2, |group| {
        let net = ParallelGpt::from_gpt(gpt(), &TWO.on(&group)).expect("a model");
        let made = Pipeline::new(&group, net, layout(2, GPipe, 1), options(1, 2));
        made.err().expect("it is refused")
    });
    for error in errors {
        let expect = "pipeline: the model has parts on 2 ranks, but the mesh has 1 along tp";
        assert_eq!(error.to_string(), expect);
    }
}

#[test]
fn the_best_idle_share_of_parts_is_that_of_whole_backward_passes() {
    let options = options(1, 4);
    for (schedule, chunks) in SCHEDULES {
        for (world, along_tp) in [(2, 1), (4, 2)] {
            let idle = ranks(world, |group| {
                let layout = layout(2, schedule, chunks);
                let made = pipeline(&group, along_tp, TWO, layout, &options);
                let (made, tp) = made.expect("a pipeline");
                let of_shard = |shard| Cuts {
                    data: data(0, shard, &options),
                    tp: tp.clone(),
                    ends: Ends::Never,
                };
                idle_at_best(made, of_shard, 4)
            });
            for idle in idle {
                let expect = whole_passes(2, 4, chunks);
                assert!((idle - expect).abs() < 1e-9, "{schedule}: {idle}");
            }
        }
    }
}
