//! Steps against PyTorch's lists, every sample once, and resuming after every step.

use proptest::prelude::*;

use super::super::SamplerOptions;
use super::*;

/// A small run: the sampler's options and the layout.
#[derive(Clone, Copy, Debug)]
struct Run {
    of: SamplerOptions,
    global_batch: usize,
    padding: Padding,
}

impl Run {
    fn new(len: usize, shards: usize, global_batch: usize) -> Self {
        let of = SamplerOptions {
            len,
            shards,
            seed: 5,
            ..SamplerOptions::default()
        };
        let padding = Padding::None;
        Self {
            of,
            global_batch,
            padding,
        }
    }

    fn sampler(&self) -> DistributedSampler {
        DistributedSampler::new(self.of).expect("valid options")
    }

    fn options(&self) -> BatchOptions {
        BatchOptions {
            global_batch: self.global_batch,
            padding: self.padding,
            epochs: Some(2),
        }
    }

    fn try_start(&self) -> Result<ShardedBatches, SamplerError> {
        ShardedBatches::new(self.sampler(), self.options())
    }

    fn start(&self) -> ShardedBatches {
        self.try_start().expect("a run with steps")
    }

    fn resume(&self, state: &SamplerState) -> Result<ShardedBatches, SamplerError> {
        let mut batches = self.try_start()?;
        batches.load_state_dict(state)?;
        Ok(batches)
    }
}

/// Runs of every kind that have at least one step.
fn runs() -> impl Strategy<Value = Run> {
    let sizes = (1usize..80, 1usize..9, 0usize..20);
    let kinds = (any::<u64>(), any::<bool>(), any::<bool>(), any::<bool>());
    (sizes, kinds)
        .prop_map(
            |((len, shards, more), (seed, shuffle, drop_last, torch))| Run {
                of: SamplerOptions {
                    len,
                    shards,
                    seed,
                    shuffle,
                    drop_last,
                },
                global_batch: shards + more,
                padding: if torch { Padding::Torch } else { Padding::None },
            },
        )
        .prop_filter("has a step", |run| run.try_start().is_ok())
}

/// The samples of each shard in epoch `epoch`, over all steps.
fn joined(run: &Run, epoch: u64) -> Vec<Vec<usize>> {
    let mut lists = vec![Vec::new(); run.of.shards];
    for plan in run.start().filter(|plan| plan.epoch == epoch) {
        for (list, indices) in lists.iter_mut().zip(&plan.shards) {
            list.extend(indices);
        }
    }
    lists
}

/// A run in which each of `world` ranks has its own iterator and keeps the lists of its own shards. Returns the joined steps
/// and the state after each.
fn read_by_ranks(
    run: &Run,
    world: usize,
    from: Option<&SamplerState>,
) -> (Vec<Vec<Vec<usize>>>, Vec<SamplerState>) {
    let mut steps: Vec<Vec<Vec<usize>>> = Vec::new();
    let mut states = Vec::new();
    for rank in 0..world {
        let bound = |rank: usize| rank * run.of.shards / world;
        let plans = from.map_or_else(
            || run.start(),
            |state| run.resume(state).expect("own state"),
        );
        states.clear();
        for (step, plan) in plans.enumerate() {
            steps.resize(steps.len().max(step + 1), Vec::new());
            steps[step].extend_from_slice(&plan.shards[bound(rank)..bound(rank + 1)]);
            states.push(plan.after);
        }
    }
    (steps, states)
}

#[test]
fn a_batch_that_the_shards_do_not_divide_gives_the_first_ones_more() {
    let run = Run {
        of: SamplerOptions {
            shuffle: false,
            ..Run::new(9, 3, 4).of
        },
        ..Run::new(9, 3, 4)
    };
    let lists: Vec<_> = run.start().take(3).map(|plan| plan.shards).collect();
    assert_eq!(lists[0], [vec![0, 3], vec![1], vec![2]]);
    assert_eq!(lists[1], [vec![6], vec![4], vec![5]]);
    assert_eq!(lists[2], [vec![], vec![7], vec![8]]);
}

#[test]
fn epochs_advance_by_themselves_and_differ() {
    let mut steps = Run::new(12, 2, 4).start();
    let epoch = |steps: &mut ShardedBatches| -> Vec<_> {
        steps.by_ref().take(3).map(|plan| plan.shards).collect()
    };
    let (first, second) = (epoch(&mut steps), epoch(&mut steps));
    assert_ne!(first, second);
    assert_eq!(steps.next(), None, "two epochs were asked for");

    steps.set_epoch(1);
    assert_eq!(epoch(&mut steps), second);
}

#[test]
fn the_last_plan_of_an_epoch_says_so() {
    let ends: Vec<_> = Run::new(10, 2, 4)
        .start()
        .map(|plan| (plan.step_in_epoch, plan.samples(), plan.ends_epoch()))
        .collect();
    let epoch = [(0, 4, false), (1, 4, false), (2, 2, true)];
    assert_eq!(ends, [epoch, epoch].concat());
}

#[test]
fn a_run_without_a_step_is_refused_instead_of_looping() {
    let refused = Run::new(10, 8, 7).try_start().unwrap_err();
    assert_eq!(
        refused.to_string(),
        "global batch 7 is smaller than the 8 shards that share it"
    );
    let mut dropping = Run::new(7, 2, 8);
    dropping.of.drop_last = true;
    let refused = dropping.try_start().unwrap_err();
    assert_eq!(
        refused.to_string(),
        "no full step: 7 samples over 2 shards do not fill one global batch of 8"
    );
}

#[test]
fn resuming_within_an_epoch_names_every_setting_that_differs() {
    let state = Run::new(24, 2, 4).start().next().expect("a step").after;
    let other = Run::new(24, 4, 8);
    let refused = other.resume(&state).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "sampler state was saved within epoch 0, after 4 samples, with shards 2 (now 4), global_batch 4 (now 8)"
    );
    let hint = refused.hint().expect("the way out");
    let way_out =
        "(with 2 shards on at most 2 ranks) until the epoch ends; a checkpoint from there";
    assert!(hint.contains(way_out), "{hint}");
}

#[test]
fn between_epochs_the_layout_may_change_but_the_seed_may_not() {
    let state = Run::new(8, 2, 4).start().nth(1).expect("two steps").after;
    assert_eq!((state.epoch, state.consumed), (1, 0));
    let wider = Run::new(8, 4, 8).resume(&state).expect("between epochs");
    assert_eq!(wider.map(|plan| plan.epoch).collect::<Vec<_>>(), [1]);

    let mut reseeded = Run::new(8, 2, 4);
    reseeded.of.seed = 6;
    let refused = reseeded.resume(&state).unwrap_err();
    assert_eq!(refused, SamplerError::SeedDiffers { saved: 5, now: 6 });
}

#[test]
fn a_state_that_no_step_ends_at_is_refused() {
    let run = Run::new(10, 2, 4);
    let state = run.start().state();
    for consumed in [1, 3, 5, 9, 10, 11, u64::MAX] {
        let refused = run.resume(&SamplerState { consumed, ..state }).unwrap_err();
        let expected = SamplerError::NotAtAStep {
            epoch: 0,
            consumed,
            global_batch: 4,
        };
        assert_eq!(refused, expected);
    }
}

#[test]
fn a_state_survives_json() {
    let state = Run::new(10, 2, 4).start().next().expect("a step").after;
    let text = serde_json::to_string(&state).expect("plain data");
    assert_eq!(serde_json::from_str::<SamplerState>(&text).unwrap(), state);
    assert!(text.contains(r#""epoch":0,"consumed":4"#), "{text}");
}

#[test]
fn huge_batches_do_not_overflow() {
    let steps: Vec<_> = Run::new(5, 2, usize::MAX).start().collect();
    assert_eq!(steps.len(), 2, "one step an epoch");
    assert_eq!(steps[0].samples(), 5);
}

proptest! {
    #[test]
    fn without_padding_every_sample_is_read_exactly_once_an_epoch(mut run in runs()) {
        run.padding = Padding::None;
        run.of.drop_last = false;
        for epoch in 0..2 {
            let mut read = joined(&run, epoch).concat();
            read.sort_unstable();
            prop_assert!(read.into_iter().eq(0..run.of.len));
        }
    }

    #[test]
    fn without_padding_a_shard_reads_its_stride_of_the_permutation(mut run in runs()) {
        run.padding = Padding::None;
        run.of.drop_last = false;
        let order = run.sampler().order(1);
        for (shard, list) in joined(&run, 1).iter().enumerate() {
            let stride = order.iter().skip(shard).step_by(run.of.shards);
            prop_assert!(list.iter().eq(stride));
        }
    }

    #[test]
    fn with_pytorchs_padding_a_shard_reads_what_its_sampler_yields(mut run in runs()) {
        run.padding = Padding::Torch;
        run.of.drop_last = false;
        for (shard, list) in joined(&run, 1).iter().enumerate() {
            prop_assert_eq!(list, &run.sampler().indices(1, shard).unwrap());
        }
    }

    #[test]
    fn with_drop_last_every_step_is_full(mut run in runs()) {
        run.of.drop_last = true;
        prop_assume!(run.try_start().is_ok());
        let widths = |plan: &StepPlan| plan.shards.iter().map(Vec::len).collect::<Vec<_>>();
        let plans: Vec<_> = run.start().collect();
        for plan in &plans {
            prop_assert_eq!(plan.samples(), run.global_batch);
            prop_assert_eq!(widths(plan), widths(&plans[0]));
        }
    }

    #[test]
    fn ranks_of_two_worlds_one_after_the_other_read_what_one_rank_reads(
        run in runs(), before in 1usize..5, then in 1usize..5, cut in 0usize..6,
    ) {
        let whole: Vec<_> = run.start().map(|plan| plan.shards).collect();
        let cut = cut.min(whole.len() - 1);
        let (first, state) = read_by_ranks(&run, before, None);
        let (second, _) = read_by_ranks(&run, then, Some(&state[cut]));
        prop_assert_eq!(&first[..=cut], &whole[..=cut]);
        prop_assert_eq!(&second[..], &whole[cut + 1..]);
    }

    #[test]
    fn a_run_cut_after_any_step_continues_with_the_same_plans(run in runs()) {
        let whole: Vec<_> = run.start().collect();
        prop_assert_eq!(whole.len() as u64, 2 * run.start().steps_per_epoch());
        for (cut, plan) in whole.iter().enumerate() {
            let rest: Vec<_> = run.resume(&plan.after).expect("own state").collect();
            prop_assert_eq!(&rest, &whole[cut + 1..]);

            let mut started = run.start();
            started.nth(cut);
            prop_assert_eq!(started.state(), plan.after);
        }
    }
}

#[test]
fn micro_batches_cover_the_shard_and_are_never_empty() {
    for len in 0..20 {
        for count in 1..8 {
            let indices: Vec<usize> = (0..len).collect();
            let parts: Vec<&[usize]> = micro_batches(&indices, count).collect();
            assert!(parts.len() <= count, "{len} in {count}");
            assert!(parts.iter().all(|part| !part.is_empty()));
            assert_eq!(parts.concat(), indices);
        }
    }
}
