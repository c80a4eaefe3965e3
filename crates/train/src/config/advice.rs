//! Warnings of settings that work, but not as they read: a pipeline that stays empty, a schedule without its gain, blocks that are
//! computed again although the settings say otherwise.

use paceline_ddp::ZeroStage;
use paceline_nn::Recompute;
use paceline_split::pipeline::{PipelineOptions, simulate, unit_cost, whole_cost};

use super::TrainConfig;
use super::settings::Settings;
use super::value::Source;
use crate::plan::MICRO_BATCHES_PER_STAGE;
use crate::report::plural;

/// One sentence each.
pub(super) fn advice(settings: &Settings) -> Vec<String> {
    let config = TrainConfig::from_settings(settings);
    let found = [
        nothing_to_deal(settings, &config),
        recomputes_anyway(settings, &config),
        early_gradients(settings, &config),
        empty_pipeline(settings, &config),
    ];
    found.into_iter().flatten().collect()
}

/// ZeRO deals state to replicas, and stage 3 has a price for one too. A resumed run may have had more of them.
fn nothing_to_deal(settings: &Settings, config: &TrainConfig) -> Option<String> {
    let zero = settings.need("zero");
    let is_asked = !matches!(zero.source, Source::Run(_));
    let is_in_vain = config.zero_stage() == Some(ZeroStage::Parameters) && config.dp == 1;
    (is_in_vain && is_asked).then(|| {
        format!(
            "`zero` is {}, but there is one replica: it keeps all of its state, and computes every block again",
            zero.cite()
        )
    })
}

/// Stage 3 of ZeRO gathers a block's weights again for its backward pass, and runs the block again with them.
fn recomputes_anyway(settings: &Settings, config: &TrainConfig) -> Option<String> {
    let is_said = settings.need("recompute").source != Source::Default;
    let is_all = config.recompute() == Recompute::Blocks;
    (config.zero_stage() == Some(ZeroStage::Parameters) && is_said && !is_all).then(|| {
        format!(
            "`recompute` is {}, but `zero` {} computes every block again: it keeps no block's weights for the backward pass",
            settings.need("recompute").cite(),
            settings.need("zero").cite()
        )
    })
}

/// The setting because of which blocks compute the gradients of inputs and weights at once.
fn whole_passes(config: &TrainConfig) -> Option<&'static str> {
    let others = [
        ("tp", config.tp.is_some()),
        ("zero", config.zero_stage() == Some(ZeroStage::Parameters)),
    ];
    let other = others.into_iter().find(|(_, is_set)| *is_set);
    other.map(|(key, _)| key)
}

fn early_gradients(settings: &Settings, config: &TrainConfig) -> Option<String> {
    let schedule = config.pipeline()?.schedule;
    let other = whole_passes(config).filter(|_| schedule.puts_off_weights())?;
    Some(format!(
        "`schedule` is {}, which gains nothing over 1f1b with `{other}` {}: blocks whose weights are {} compute the gradients of \
         inputs and weights at once",
        settings.need("schedule").cite(),
        settings.need(other).cite(),
        match other {
            "tp" => "cut",
            _ => "gathered",
        }
    ))
}

fn empty_pipeline(settings: &Settings, config: &TrainConfig) -> Option<String> {
    let options = config.pipeline()?;
    let (stages, count) = (options.ranks, config.accumulate);
    if count >= stages {
        return None;
    }
    let enough = MICRO_BATCHES_PER_STAGE * stages;
    let is_split = whole_passes(config).is_none();
    let idle = |count| {
        Some(format!(
            "{:.0} %",
            100.0 * idle_share(&options, count, is_split)?
        ))
    };
    let batch = enough * config.shards;
    Some(format!(
        "`accumulate` is {}, fewer micro-batches than `pp` has stages: each of {} waits for at least {} of a step, and with \
         --micro-batches {enough} for {}{}; the bits depend on that number",
        settings.need("accumulate").cite(),
        plural(stages as u64, "rank"),
        idle(count)?,
        idle(enough)?,
        match config.global_batch < batch {
            true => format!(", which needs a --global-batch of {batch}"),
            false => String::new(),
        }
    ))
}

/// The mean over the ranks, with equal stages.
fn idle_share(options: &PipelineOptions, micro_batches: usize, is_split: bool) -> Option<f64> {
    let plan = options.size(micro_batches).plan(options.schedule).ok()?;
    let trace = match is_split {
        true => simulate(&plan, unit_cost, 0.0),
        false => simulate(&plan, whole_cost, 0.0),
    };
    Some(trace.ok()?.bubble())
}
