//! Steps of a job, computed again on one rank and compared with the digests of gradients that its ranks recorded.

use std::num::NonZeroU64;

use paceline_checkpoint::Saved;
use paceline_checkpoint::digests::{Difference, Recorded};
use paceline_checkpoint::ledger::{self, GivenUp};
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_ddp::{DdpOptions, ShardStep, weights};
use serde::Serialize;

use crate::classify::Supervised;
use crate::config::{NonFinite, Recovery, Strategy, Task, TrainConfig, Zero};
use crate::error::TrainError;
use crate::language::Text;
use crate::layout::Layout;
use crate::model::Net;
use crate::optimizer::Optimizer;
use crate::run_dir;
use crate::schedule::Schedule;
use crate::setup::{ddp_options, open_devices, sharded_batches};
use crate::task::{Part, TrainTask};
use crate::trainer::{of_shard, run_shard};

/// The step to replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replay {
    /// The step, counted as the ledger does, from 1.
    pub step: u64,
    /// Compares only the shards that this rank computed.
    pub rank: Option<usize>,
}

/// What a replay has found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Replayed {
    /// The step of the checkpoint that it began with; 0 for the run's start.
    pub from: u64,
    /// The last step that it computed.
    pub step: u64,
    /// Steps that it compared.
    pub steps_compared: u64,
    /// Shards of these steps that it compared.
    pub shards_compared: usize,
    /// Shards of these steps that have no record.
    pub shards_unrecorded: usize,
    /// The first shard that differs.
    pub difference: Option<Difference>,
}

/// Computes the steps of the run in `config.run_dir` on this process alone, from the newest checkpoint before `replay.step`, or from
/// the run's start without one, up to that step or the first one that differs. Writes nothing.
///
/// *Cost*: each step takes as long as it would take one rank to train it.
///
/// *Errors*: the step or the rank is not recorded; damaged files; data or devices that cannot be used.
pub fn replay(config: &TrainConfig, replay: Replay) -> Result<Replayed, TrainError> {
    // The layouts that are recorded all have the same bits.
    let config = &TrainConfig {
        strategy: Strategy::Single,
        zero: Zero::Off,
        recovery: Recovery::None,
        ..config.clone()
    };
    match config.task {
        Task::Digits | Task::Idx | Task::Csv | Task::Images => {
            run::<Supervised<Net>>(config, replay)
        }
        Task::Lm => run::<Text>(config, replay),
    }
}

fn run<T: TrainTask>(config: &TrainConfig, replay: Replay) -> Result<Replayed, TrainError> {
    let Replay { step: last, rank } = replay;
    let group = ProcessGroup::local(1, &GroupOptions::default())?.remove(0);
    let folder = run_dir::checkpoints(&config.run_dir);
    let mut saved = Saved::at_or_before(last.saturating_sub(1), &folder, &group)?;
    let from = saved.as_ref().map_or(0, Saved::step);
    let recorded = Recorded::read(&folder, from + 1..=last)?;
    require(&recorded, replay)?;

    let config = &TrainConfig {
        // It begins where it says itself, also with the steps of a run that was resumed.
        resume: false,
        // A checkpoint has other weights by now.
        init: config.init.clone().filter(|_| saved.is_none()),
        ..config.clone()
    };
    let device = open_devices(config, &group)?.remove(0);
    let task = T::open(config, Some(&group))?;
    let position = saved.as_ref().map(Saved::sampler).transpose()?;
    let batches = sharded_batches(config, task.len(Part::Train), position)?;
    let schedule = Schedule::new(config, batches.steps_per_epoch());
    let layout = Layout::new(config, &group)?;
    device.seed(config.seed);
    let net = T::cuts().model(&task, config, &device, &layout)?;
    let options = DdpOptions {
        record: Some(NonZeroU64::MIN),
        stop_on_signal: false,
        ..ddp_options(config, &task)
    };
    let (mut ddp, net) = layout.wrap(net, options)?;
    let (mut optimizer, mut net) = Optimizer::new(config, &task, &mut ddp, net)?;
    if let Some(saved) = &mut saved {
        (net, optimizer) = saved.restore(&mut ddp, net, optimizer)?;
    }
    let mut replayed = Replayed {
        from,
        step: from,
        steps_compared: 0,
        shards_compared: 0,
        shards_unrecorded: 0,
        difference: None,
    };
    let given_up = match config.non_finite {
        NonFinite::Back => ledger::audit(&folder)?.attempts,
        NonFinite::Stop | NonFinite::Skip => Vec::new(),
    };
    let given_up: Vec<GivenUp> = given_up.into_iter().flat_map(|of| of.given_up).collect();
    let mut kept = None;
    for plan in batches.take((last - from) as usize) {
        let step = ddp.next_step() + 1;
        // One rank has the whole state.
        if let Optimizer::Whole(own) = &optimizer
            && given_up.iter().any(|of| of.first == step)
        {
            kept = Some((weights::export(&net), own.clone()));
        }
        let rate = schedule.rate(ddp.next_step());
        let reduced = ddp.step(&net, |shard: &mut ShardStep<'_, T::Model>| {
            let micro = of_shard(&task, &plan, shard.shard(), config.accumulate)?;
            run_shard(&task, config, shard, &micro)
        })?;
        net = optimizer.step(rate, net, reduced.grads)?;
        replayed.step = ddp.next_step();
        let compared = recorded.compare(&ddp, rank)?;
        replayed.steps_compared += u64::from(compared.shards > 0);
        replayed.shards_compared += compared.shards;
        replayed.shards_unrecorded += compared.unrecorded;
        replayed.difference = compared.difference;
        if replayed.difference.is_some() {
            break;
        }
        if given_up.iter().any(|of| of.last == step)
            && let Some((weights, state)) = kept.take()
        {
            net = weights::import(net, weights.into_iter().collect());
            optimizer = Optimizer::Whole(state);
        }
    }
    Ok(replayed)
}

/// *Errors*: the record lacks the step, or the rank in it.
fn require(recorded: &Recorded, replay: Replay) -> Result<(), TrainError> {
    let Replay { step, rank } = replay;
    let Some((first, last)) = recorded.steps() else {
        let message = "the run has no record of its gradients".into();
        let hint = "start it with --record N, which keeps digests of its last N steps";
        return Err(TrainError::usage(message, hint));
    };
    let ranks = recorded.ranks(step);
    if ranks.is_empty() {
        let message = format!("step {step} is not recorded, only steps {first} to {last}");
        let hint = "choose one of these, or a larger --record N for the next run";
        return Err(TrainError::usage(message, hint));
    }
    match rank {
        Some(rank) if !ranks.contains(&rank) => {
            let message = format!("step {step} has no record of rank {rank}");
            let known: Vec<String> = ranks.iter().map(ToString::to_string).collect();
            let hint = format!(
                "choose one of {}; each rank writes its file on its own host",
                known.join(", ")
            );
            Err(TrainError::usage(message, hint))
        }
        _ => Ok(()),
    }
}
