//! Idle devices: held ones, whose memory a process has, and unused ones.
//!
//! The one rule for both: a report adds up the time in which a device was held and idle, and live views name it once that has
//! lasted for a while.

use std::time::Duration;

use paceline_gpu::sample::DeviceSample;
use serde::{Serialize, Serializer};

use super::Rules;

/// What a driver keeps for itself on a device that nobody uses, at most.
const DRIVER_BYTES_MAX: u64 = 768 << 20;

/// A device at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// It computes.
    Busy,
    /// It computes nothing or next to nothing, and its memory is held.
    HeldIdle,
    /// It computes nothing, and nobody holds it.
    Free,
}

impl Moment {
    /// The device as a sample has it; nothing where the driver does not say enough.
    pub(crate) fn of(now: &DeviceSample, rules: &Rules) -> Option<Self> {
        let percent = *now.utilization_percent.known()?;
        if percent >= rules.busy_percent {
            return Some(Self::Busy);
        }
        Some(match is_held(now)? {
            true => Self::HeldIdle,
            false => Self::Free,
        })
    }
}

/// Whether memory of a device is held, where that can be told.
///
/// The processes say so where they can be read; where they cannot, or a container hides them, memory in use says so
/// beyond what a driver keeps for itself.
fn is_held(now: &DeviceSample) -> Option<bool> {
    let processes = now.processes.known().map(|all| !all.is_empty());
    let used_bytes = now.memory.known().map(|memory| memory.used_bytes);
    let memory = used_bytes.map(|bytes| bytes > DRIVER_BYTES_MAX);
    match (processes, memory) {
        (Some(true), _) | (_, Some(true)) => Some(true),
        (None, None) => None,
        _ => Some(false),
    }
}

/// Whether a device does nothing, and has for long enough to say so.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Idleness {
    /// Its memory is held while it computes nothing.
    pub held_idle: bool,
    /// Nobody holds it, while another device works.
    pub unused: bool,
    /// For how long it has been seen to do nothing, held or not.
    #[serde(rename = "idle_s", serialize_with = "seconds")]
    pub lasts: Duration,
}

fn seconds<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

/// Follows devices from look to look and says which of them do nothing.
///
/// *Example*:
/// ```
/// use std::time::Duration;
/// use paceline_gpu::sample::{DeviceSample, ProcessMemory};
/// use paceline_usage::Rules;
/// use paceline_usage::idle::IdleWatch;
///
/// let mut watch = IdleWatch::new(Rules::default(), Duration::from_secs(1));
/// let held = DeviceSample {
///     utilization_percent: 0.into(),
///     processes: vec![ProcessMemory { pid: 4711, ..ProcessMemory::default() }].into(),
///     ..DeviceSample::default()
/// };
/// let seen = (0..=10).map(|second| watch.see(Duration::from_secs(second), [&held])[0]);
/// assert!(seen.last().flatten().is_some_and(|device| device.held_idle));
/// ```
#[derive(Debug)]
pub struct IdleWatch {
    rules: Rules,
    /// Looks further apart than this say nothing about the time between them.
    late_after: Duration,
    last_at: Option<Duration>,
    followed: Vec<Followed>,
}

/// What is remembered of a device.
#[derive(Debug, Clone, Copy)]
struct Followed {
    index: u32,
    moment: Option<Moment>,
    /// Since when it has been as it is.
    since: Duration,
    busy_at: Option<Duration>,
}

impl IdleWatch {
    /// Nothing yet, of looks that come at this interval.
    pub fn new(rules: Rules, interval: Duration) -> Self {
        Self {
            late_after: rules.late_after.max(interval * 3),
            rules,
            last_at: None,
            followed: Vec::new(),
        }
    }

    /// Takes a look in, `at` this time since looking began. For each device what is known of it; nothing for one whose
    /// utilisation or holders cannot be read.
    pub fn see<'a>(
        &mut self,
        at: Duration,
        devices: impl IntoIterator<Item = &'a DeviceSample>,
    ) -> Vec<Option<Idleness>> {
        let last_at = self.last_at.replace(at);
        let is_late = last_at.is_some_and(|last| at.saturating_sub(last) > self.late_after);
        let follow = |now: &DeviceSample| {
            let moment = Moment::of(now, &self.rules);
            let before = (self.followed.iter()).find(|device| device.index == now.index);
            let since = before.filter(|before| !is_late && before.moment == moment);
            let is_busy = moment == Some(Moment::Busy);
            Followed {
                index: now.index,
                moment,
                since: since.map_or(at, |before| before.since),
                busy_at: match is_busy {
                    true => Some(at),
                    false => before.and_then(|before| before.busy_at),
                },
            }
        };
        self.followed = devices.into_iter().map(follow).collect();
        let all = self.followed.iter();
        all.map(|device| device.idleness(at, &self.rules, &self.followed))
            .collect()
    }
}

impl Followed {
    fn idleness(&self, at: Duration, rules: &Rules, all: &[Self]) -> Option<Idleness> {
        let moment = self.moment?;
        if moment == Moment::Busy {
            return Some(Idleness::default());
        }
        let lasts = at.saturating_sub(self.since);
        let is_long = lasts >= rules.idle_after;
        // One that takes a break still works.
        let works = |other: &Self| {
            let busy_at = other.busy_at;
            busy_at.is_some_and(|busy_at| at.saturating_sub(busy_at) < rules.idle_after)
        };
        Some(Idleness {
            held_idle: is_long && moment == Moment::HeldIdle,
            unused: is_long && moment == Moment::Free && all.iter().any(works),
            lasts,
        })
    }
}

#[cfg(test)]
mod tests {
    use paceline_gpu::sample::ProcessMemory;
    use paceline_gpu::snapshot::{Gap, Memory, Reading};

    use super::*;

    const NOBODY: &[u32] = &[];

    fn device(index: u32, percent: u32, pids: &[u32]) -> DeviceSample {
        let process = |pid: &u32| ProcessMemory {
            pid: *pid,
            ..ProcessMemory::default()
        };
        DeviceSample {
            index,
            utilization_percent: percent.into(),
            processes: pids.iter().map(process).collect::<Vec<_>>().into(),
            ..DeviceSample::default()
        }
    }

    fn watch() -> IdleWatch {
        IdleWatch::new(Rules::default(), Duration::from_secs(1))
    }

    /// What is said of each device after the last of these seconds: `h` held but idle, `u` unused, `-` neither, `?` not known.
    fn said(
        watch: &mut IdleWatch,
        seconds: std::ops::RangeInclusive<u64>,
        all: &[DeviceSample],
    ) -> String {
        let mut last = Vec::new();
        for second in seconds {
            last = watch.see(Duration::from_secs(second), all);
        }
        let mark = |idleness: &Option<Idleness>| match idleness {
            None => '?',
            Some(Idleness {
                held_idle: true, ..
            }) => 'h',
            Some(Idleness { unused: true, .. }) => 'u',
            Some(_) => '-',
        };
        last.iter().map(mark).collect()
    }

    #[test]
    fn a_device_is_named_once_it_has_done_nothing_for_ten_seconds() {
        let mut watch = watch();
        let all = [
            device(0, 90, &[1]),
            device(1, 4, &[2]),
            device(2, 0, NOBODY),
        ];
        assert_eq!(said(&mut watch, 0..=9, &all), "---");
        assert_eq!(said(&mut watch, 10..=10, &all), "-hu");
        let working = [device(0, 90, &[1]), device(1, 5, &[2]), device(2, 0, &[3])];
        assert_eq!(said(&mut watch, 11..=11, &working), "---");
        assert_eq!(said(&mut watch, 12..=20, &all), "---");
        assert_eq!(said(&mut watch, 21..=22, &all), "-hu");
    }

    #[test]
    fn where_nobody_works_no_device_is_unused() {
        let mut watch = watch();
        let all = [device(0, 90, &[1]), device(1, 0, NOBODY)];
        assert_eq!(said(&mut watch, 0..=20, &all), "-u");
        let pausing = [device(0, 0, &[1]), device(1, 0, NOBODY)];
        assert_eq!(said(&mut watch, 21..=29, &pausing), "-u", "a break");
        assert_eq!(said(&mut watch, 30..=31, &pausing), "h-");
    }

    #[test]
    fn looks_too_far_apart_say_nothing_about_the_time_between() {
        let mut watch = watch();
        let all = [device(0, 0, &[1])];
        assert_eq!(said(&mut watch, 0..=8, &all), "-");
        assert_eq!(said(&mut watch, 60..=69, &all), "-");
        assert_eq!(said(&mut watch, 70..=70, &all), "h");
    }

    #[test]
    fn what_cannot_be_read_is_not_judged() {
        let mut unread = device(0, 0, &[1]);
        unread.utilization_percent = Reading::missing(Gap::NotSupported);
        let mut hidden = device(1, 0, NOBODY);
        hidden.processes = Reading::missing(Gap::NoPermission);
        let lost = DeviceSample::missing(2, &Gap::Lost);
        assert_eq!(said(&mut watch(), 0..=20, &[unread, hidden, lost]), "???");
    }

    #[test]
    fn where_processes_are_hidden_memory_says_whether_a_device_is_held() {
        let check = |used_mib: u64, processes: Reading<Vec<ProcessMemory>>, expect| {
            let now = DeviceSample {
                memory: Memory {
                    used_bytes: used_mib << 20,
                    total_bytes: 80 << 30,
                }
                .into(),
                processes,
                ..device(0, 0, NOBODY)
            };
            let moment = Moment::of(&now, &Rules::default());
            assert_eq!(moment, Some(expect), "{used_mib} MiB");
        };
        let hidden = || Reading::missing(Gap::NoPermission);
        check(600, hidden(), Moment::Free);
        check(800, hidden(), Moment::HeldIdle);
        check(800, Vec::new().into(), Moment::HeldIdle);
        check(3, vec![ProcessMemory::default()].into(), Moment::HeldIdle);
    }
}
