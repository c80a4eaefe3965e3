//! Devices and ranks that did no work all job although there was work for them: the first thing to tell.

use crate::report::{GpuReport, IdleCause, Note, Report};

/// A job has to be observed for this long before anything counts as idle: programs start slowly.
const OBSERVED_MIN_S: f64 = 5.0;
/// A device or rank that is busy for less than this share of the time did no work.
const IDLE_SHARE: f64 = 0.01;
/// A rank that has less than this part of what the ranks have on average did no work, if others did.
const IDLE_PART: f64 = 0.1;

/// GPUs that did nothing while fewer GPUs than ranks worked.
pub(super) fn gpus(report: &Report) -> Option<Note> {
    let all = report.gpus_at_once.as_ref()?;
    // A device that could not be read for most of the time is not known to be idle.
    let is_known = |gpu: &&GpuReport| gpu.known_s > all.observed_s / 2.0;
    let is_idle = |gpu: &&GpuReport| gpu.busy_share.unwrap_or(0.0) < IDLE_SHARE;
    let (idle, busy): (Vec<_>, Vec<_>) = report.gpus.iter().filter(is_known).partition(is_idle);
    let ranks = report.ranks.len();
    // Where no GPU works and no rank has opened one, the job computes on processors.
    let is_meant = !busy.is_empty() || idle.iter().any(|gpu| !gpu.ranks.is_empty());
    let is_short = ranks < 2 || busy.len() >= ranks || all.observed_s < OBSERVED_MIN_S;
    if idle.is_empty() || is_short || !is_meant {
        return None;
    }
    let shared = report.gpus.iter().find(|gpu| gpu.ranks.len() > 1);
    let mut opened: Vec<u32> = idle.iter().flat_map(|gpu| gpu.ranks.clone()).collect();
    opened.sort_unstable();
    opened.dedup();
    let cause = match shared {
        Some(gpu) => IdleCause::Shared {
            gpu: gpu.index,
            ranks: gpu.ranks.clone(),
        },
        None if !opened.is_empty() => IdleCause::Opened { ranks: opened },
        None => IdleCause::Unknown,
    };
    let indexes = |gpus: Vec<&GpuReport>| gpus.iter().map(|gpu| gpu.index).collect();
    Some(Note::IdleGpus {
        gpus: indexes(idle),
        busy: indexes(busy),
        ranks,
        cause,
    })
}

/// Ranks that did nothing while others worked, on a job without devices.
pub(super) fn ranks(report: &Report) -> Option<Note> {
    let all = report.ranks_at_once.as_ref()?;
    let has_devices = report.gpus.iter().any(|gpu| gpu.is_counted);
    if has_devices || all.observed_s < OBSERVED_MIN_S {
        return None;
    }
    // Little processor time in each interval is still work: what counts is the mean.
    let known = report
        .ranks
        .iter()
        .filter_map(|rank| rank.utilization_percent);
    let mean = known.clone().sum::<f64>() / known.count().max(1) as f64;
    // Where many ranks take turns on few cores, all have little.
    let least = (100.0 * IDLE_SHARE).min(IDLE_PART * mean);
    let is_idle = |percent: Option<f64>| percent.is_some_and(|mean| mean < least);
    let idle = report
        .ranks
        .iter()
        .filter(|rank| is_idle(rank.utilization_percent));
    let ranks: Vec<u32> = idle.map(|rank| rank.rank).collect();
    let of = report.ranks.len();
    (!ranks.is_empty() && ranks.len() < of).then_some(Note::IdleRanks { ranks, of })
}
