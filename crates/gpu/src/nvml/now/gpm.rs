//! What the multiprocessors did from one reading of the performance counters to the next.

use std::time::Duration;

use crate::nvml::raw::{Metric, Place};
use crate::sample::DeviceSample;
use crate::snapshot::{Gap, Reading};

use super::{Answer, Ask};

/// Two readings nearer to one another than this are taken for one: a share of so little time says nothing.
const WINDOW_MIN: Duration = Duration::from_millis(50);

/// Whose turn it is. Each reading ends one stretch of time and begins the next, so no time is left out.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Turns {
    has_counters: bool,
    /// The newest reading, and when it was made; nothing before the first, and after an error.
    newest: Option<(Place, Duration)>,
}

/// Reads the counters, and writes what they say about the time since the last reading.
pub(super) fn read(ask: Ask<'_, '_>, turns: &mut Turns, now: &mut DeviceSample) -> Answer {
    match shares(&ask, turns, now.index) {
        Ok(Some(shares)) => keep(shares, now),
        Ok(None) => Answer::NextSample,
        Err(gap) => {
            turns.newest = None;
            for place in places(now) {
                *place = Reading::missing(gap.clone());
            }
            Answer::Missing(gap)
        }
    }
}

/// The share of each metric; nothing after the first reading.
fn shares(
    ask: &Ask<'_, '_>,
    turns: &mut Turns,
    index: u32,
) -> Result<Option<[Result<f64, Gap>; 4]>, Gap> {
    if !turns.has_counters {
        // Fails of itself where the driver is too old to know of counters.
        turns.has_counters = ask.library.has_counters(ask.device)?;
        if !turns.has_counters {
            return Err(Gap::NotSupported);
        }
    }
    let before = turns.newest;
    if before.is_some_and(|(_, at)| ask.at.saturating_sub(at) < WINDOW_MIN) {
        return Ok(None);
    }
    let place = before.map_or(Place::default(), |(place, _)| place.other());
    ask.library.read_counters(ask.device, index, place)?;
    turns.newest = Some((place, ask.at));
    if before.is_none() {
        return Ok(None);
    }
    let shares = ask.library.between_counters(index, place, Metric::ALL)?;
    Ok(Some(shares))
}

/// Where each metric is kept, in the order of [`Metric::ALL`].
fn places(now: &mut DeviceSample) -> [&mut Reading<f64>; 4] {
    [
        &mut now.sm_active_percent,
        &mut now.sm_occupancy_percent,
        &mut now.tensor_active_percent,
        &mut now.dram_active_percent,
    ]
}

fn keep(shares: [Result<f64, Gap>; 4], now: &mut DeviceSample) -> Answer {
    let known = shares.iter().any(Result::is_ok);
    let why = shares
        .iter()
        .find_map(|share| share.as_ref().err().cloned());
    for (place, share) in places(now).into_iter().zip(shares) {
        *place = share.into();
    }
    match why {
        Some(gap) if !known => Answer::Missing(gap),
        _ => Answer::Known,
    }
}
