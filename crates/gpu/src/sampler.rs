//! Asks the driver what its devices do, again and again, at little cost: each kind of value at its own pace, what a device
//! does not have rarely, and a lost device only to see whether it is back.

mod amd;

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::nvml::{self, Answer, Ask, Counters, Group, Library, Pace, is_lasting};
use crate::places::Places;
use crate::sample::DeviceSample;
use crate::snapshot::{DriverError, Gap};

pub use self::amd::AmdSampler;

/// How long a value is left alone that the device or the driver does not have.
const MISSING_PAUSE: Duration = Duration::from_secs(60);

/// How long a value is left alone that failed; it may come back.
const FAILED_PAUSE: Duration = Duration::from_secs(1);

/// How long a device is left alone that is lost or cannot be opened.
const LOST_PAUSE: Duration = Duration::from_secs(5);

/// One part of this many is the share of its time that a sampler spends in the driver.
const TIME_SHARE: u32 = 100;

/// What a call is taken to cost before it was made.
const COST_GUESS: Duration = Duration::from_micros(10);

/// Asks the driver what its devices do.
///
/// *Cost*: each call is measured, and dear ones are made less often, so that about 1% of the time is spent in the driver: its
/// locks are those that the job's own calls wait for. Utilization is never older than a second for it, most else not older
/// than ten, processes not older than a minute. Memory does not grow. Nothing is asked before the first sample.
///
/// *Blocks*: every call, `open` and drop too, as long as the driver does. With a driver that fails or a card that falls off
/// the bus that can be forever, so nothing may wait for a sampler's thread without a deadline. It holds no lock
/// of this program; a thread left behind in the driver does not keep the process from ending.
///
/// *Example*:
/// ```
/// use std::time::Duration;
/// use paceline_gpu::places::Places;
/// use paceline_gpu::sampler::Sampler;
///
/// let mut sampler = Sampler::open(&Places::from_env());
/// if let Some(trouble) = sampler.trouble() {
///     eprintln!("no GPU is watched: {trouble:?}");
/// }
/// let sample = sampler.sample(Duration::ZERO);
/// assert_eq!(sample.len(), sampler.devices().count());
/// ```
#[derive(Debug)]
pub struct Sampler {
    library: Result<Library, DriverError>,
    slots: Vec<Slot>,
    /// The slot that is asked first, another one with each sample.
    first: usize,
    /// What calls cost is measured with it.
    clock: fn() -> Duration,
}

/// A device and what is remembered of it.
#[derive(Debug)]
struct Slot {
    now: DeviceSample,
    counters: Counters,
    due: [Due; Group::ALL.len()],
    /// Not asked before this time: it is lost.
    silent_until: Duration,
}

/// A sample that is being taken.
struct Moment<'a> {
    at: Duration,
    devices: usize,
    clock: fn() -> Duration,
    may_wait: &'a mut bool,
}

/// When a group of values is asked next, and what that costs.
#[derive(Debug, Clone, Copy)]
struct Due {
    at: Duration,
    cost: Duration,
}

impl Sampler {
    /// Loads the driver's library. Without a driver there are no devices, and [`Self::trouble`] says why.
    pub fn open(places: &Places) -> Self {
        let library = nvml::open(places);
        let count = library.as_ref().map_or(0, Library::count);
        Self {
            library,
            slots: (0..count).map(Slot::new).collect(),
            first: 0,
            clock: monotonic,
        }
    }

    /// Only the devices with these numbers of the driver, in this order; numbers that there are not are left out.
    pub fn only(mut self, indexes: &[u32]) -> Self {
        let has = |index: &&u32| self.slots.iter().any(|slot| slot.now.index == **index);
        let mut wanted: Vec<u32> = Vec::new();
        for index in indexes.iter().filter(has) {
            if !wanted.contains(index) {
                wanted.push(*index);
            }
        }
        self.slots = wanted.into_iter().map(Slot::new).collect();
        self
    }

    /// Why there are no devices.
    pub fn trouble(&self) -> Option<&DriverError> {
        self.library.as_ref().err()
    }

    /// The driver's numbers of the devices, in the order of each sample.
    pub fn devices(&self) -> impl Iterator<Item = u32> + '_ {
        self.slots.iter().map(|slot| slot.now.index)
    }

    /// What the devices do now, `at` this time since sampling began. Values that are not asked every time are those of the
    /// last time; rates are missing until there are two readings.
    pub fn sample(&mut self, at: Duration) -> Vec<DeviceSample> {
        let count = self.slots.len();
        if let Ok(library) = &self.library {
            let mut may_wait = true;
            let (later, sooner) = self.slots.split_at_mut(self.first.min(count));
            for slot in sooner.iter_mut().chain(later) {
                let moment = Moment {
                    at,
                    devices: count,
                    clock: self.clock,
                    may_wait: &mut may_wait,
                };
                slot.ask(library, moment);
            }
        }
        self.first = if self.first + 1 < count {
            self.first + 1
        } else {
            0
        };
        self.slots.iter().map(|slot| slot.now.clone()).collect()
    }
}

impl Slot {
    fn new(index: u32) -> Self {
        Self {
            now: DeviceSample {
                index,
                ..DeviceSample::default()
            },
            counters: Counters::default(),
            due: [Due::NOW; Group::ALL.len()],
            silent_until: Duration::ZERO,
        }
    }

    fn ask(&mut self, library: &Library, moment: Moment<'_>) {
        let Moment {
            at,
            devices,
            clock,
            may_wait,
        } = moment;
        if at < self.silent_until {
            return;
        }
        let device = match library.device(self.now.index) {
            Ok(device) => device,
            Err(gap) => return self.fall_silent(at, &gap),
        };
        for ((group, pace), due) in Group::ALL.into_iter().zip(&mut self.due) {
            if at < due.at {
                continue;
            }
            let ask = Ask {
                library,
                device: &device,
                at,
                may_wait,
            };
            let begun = clock();
            let answer = group.read(ask, &mut self.counters, &mut self.now);
            due.cost = settled(due.cost, clock().saturating_sub(begun));
            if answer == Answer::Missing(Gap::Lost) {
                return self.fall_silent(at, &Gap::Lost);
            }
            due.at = at.saturating_add(pause(&answer, Pace::of(pace), due.cost, devices));
        }
    }

    fn fall_silent(&mut self, at: Duration, gap: &Gap) {
        let index = self.now.index;
        *self = Self {
            now: DeviceSample::missing(index, gap),
            silent_until: at.saturating_add(LOST_PAUSE),
            ..Self::new(index)
        };
    }
}

impl Due {
    const NOW: Self = Self {
        at: Duration::ZERO,
        cost: COST_GUESS,
    };
}

/// How long a group is left alone after this answer.
fn pause(answer: &Answer, pace: Pace, cost: Duration, devices: usize) -> Duration {
    let usual = usual_pause(pace, cost, devices);
    match answer {
        Answer::NextSample => Duration::ZERO,
        Answer::Known => usual,
        Answer::Missing(gap) if is_lasting(gap) => MISSING_PAUSE,
        Answer::Missing(_) => usual.max(FAILED_PAUSE),
    }
}

/// The group's share of a hundredth of the time, divided between the devices, must be enough for what it costs.
fn usual_pause(pace: Pace, cost: Duration, devices: usize) -> Duration {
    let devices = u32::try_from(devices).unwrap_or(u32::MAX);
    let of_all = cost.saturating_mul(TIME_SHARE).saturating_mul(devices);
    let needed = of_all.saturating_mul(100) / pace.share.max(1);
    needed.clamp(pace.soonest, pace.latest)
}

/// What a call is taken to cost after another one: a single slow call, on a busy machine, says little.
fn settled(cost: Duration, took: Duration) -> Duration {
    if took > cost {
        return took
            .min(cost.saturating_mul(2))
            .max(Duration::from_nanos(1));
    }
    (cost + took) / 2
}

fn monotonic() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

#[cfg(test)]
mod tests;
