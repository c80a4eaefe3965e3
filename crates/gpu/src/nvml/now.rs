//! What a device does now, in groups of values that one call of the driver gives, each with the pace at which it is worth
//! asking.

mod gpm;
mod rate;

use std::time::Duration;

use nvml_wrapper::Device;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, PcieUtilCounter, TemperatureSensor};
use nvml_wrapper::sys_exports::field_id;

use crate::sample::{DeviceSample, ProcessMemory, Throttle};
use crate::snapshot::{Gap, Holder, Memory, Reading};

use self::rate::{Counter, Window};
use super::gap::{gap, is_lasting};
use super::processes::processes;
use super::raw::{self, ALL_LINKS, Field, Library};
use super::up_to;

/// What one or two calls give. The times are those that others have measured on drivers of 2025 and 2026.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Group {
    /// 3 us.
    Utilization,
    /// 12 us.
    Memory,
    /// 3 us where the driver has the power of the moment, up to 3 ms where it is the average.
    Power,
    /// Under 1 us.
    SmClock,
    Throttles,
    Temperature,
    /// Under 1 us.
    MemoryClock,
    PowerLimit,
    Energy,
    NvLink,
    /// 0.5 ms from counters. The older call waits for 20 ms, so a sample makes at most one of these.
    Pcie,
    /// The performance counters. What they cost is not known: no device that has them was there to be measured.
    Gpm,
    /// 5 ms a list, and there are two. The driver's lock, for which the job's own calls wait, is held meanwhile.
    Processes,
}

/// When a group is asked again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pace {
    /// Not sooner than this after the last time; zero is with every sample.
    pub(crate) soonest: Duration,
    /// Not later than this, however long it takes.
    pub(crate) latest: Duration,
    /// Its part of the time that may be spent in the driver, in hundredths.
    pub(crate) share: u32,
}

impl Pace {
    pub(crate) fn of((soonest_ms, latest_s, share): (u64, u64, u32)) -> Self {
        Self {
            soonest: Duration::from_millis(soonest_ms),
            latest: Duration::from_secs(latest_s),
            share,
        }
    }
}

/// What a call of the driver came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Values.
    Known,
    /// None now, but with the next sample.
    NextSample,
    /// None.
    Missing(Gap),
}

/// What is remembered of a device from one sample to the next.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counters {
    has_no_instant_power: bool,
    nvlink: [Counter; 2],
    pcie: Window,
    has_no_pcie_counters: bool,
    is_rx_next: bool,
    gpm: gpm::Turns,
}

/// A moment at which a device is asked.
#[derive(Debug)]
pub(crate) struct Ask<'a, 'nvml> {
    pub(crate) library: &'a Library,
    pub(crate) device: &'a Device<'nvml>,
    pub(crate) at: Duration,
    /// Whether a call that waits for 20 ms may still be made.
    pub(crate) may_wait: &'a mut bool,
}

impl Group {
    /// Each with its pace: milliseconds at the soonest, seconds at the latest, and its share of the time.
    pub(crate) const ALL: [(Self, (u64, u64, u32)); 13] = [
        (Self::Utilization, (0, 1, 20)),
        (Self::Memory, (0, 2, 12)),
        (Self::Power, (0, 2, 13)),
        (Self::SmClock, (0, 5, 5)),
        (Self::Throttles, (0, 5, 5)),
        (Self::Temperature, (1_000, 10, 5)),
        (Self::MemoryClock, (1_000, 10, 5)),
        (Self::PowerLimit, (10_000, 60, 1)),
        (Self::Energy, (1_000, 10, 4)),
        (Self::NvLink, (1_000, 10, 5)),
        (Self::Pcie, (1_000, 10, 10)),
        (Self::Gpm, (1_000, 10, 5)),
        (Self::Processes, (1_000, 60, 10)),
    ];

    /// Whether one answer is enough; a rate needs two.
    pub(crate) fn is_instant(self) -> bool {
        !matches!(self, Self::NvLink | Self::Pcie | Self::Gpm)
    }

    /// Asks, and writes into `now` what comes.
    pub(crate) fn read(
        self,
        ask: Ask<'_, '_>,
        counters: &mut Counters,
        now: &mut DeviceSample,
    ) -> Answer {
        let device = ask.device;
        match self {
            Self::Utilization => utilization(device, now),
            Self::Memory => keep(&mut now.memory, memory(device)),
            Self::Power => keep(&mut now.power_mw, power(device, counters)),
            Self::SmClock => keep(&mut now.sm_clock_mhz, clock(device, Clock::SM)),
            Self::MemoryClock => keep(&mut now.memory_clock_mhz, clock(device, Clock::Memory)),
            Self::Throttles => {
                let bits = raw::throttle_bits(device).map_err(gap);
                keep(&mut now.throttles, bits.map(throttles))
            }
            Self::Temperature => keep(&mut now.temperature_c, temperature(device)),
            Self::PowerLimit => {
                let limit = device.enforced_power_limit().map_err(gap);
                keep(&mut now.power_limit_mw, limit.and_then(milliwatts))
            }
            Self::Energy => {
                let energy = device.total_energy_consumption().map_err(gap);
                keep(&mut now.energy_mj, energy.and_then(known))
            }
            Self::NvLink => nvlink(device, ask.at, counters, now),
            Self::Pcie => pcie(ask, counters, now),
            Self::Gpm => gpm::read(ask, &mut counters.gpm, now),
            Self::Processes => {
                let held = processes(device).map(|held| {
                    let memory = |held: Holder| ProcessMemory {
                        pid: held.pid,
                        used_bytes: held.memory_bytes,
                    };
                    held.into_iter().map(memory).collect()
                });
                keep(&mut now.processes, held)
            }
        }
    }
}

fn keep<T>(place: &mut Reading<T>, value: Result<T, Gap>) -> Answer {
    let answer = match &value {
        Ok(_) => Answer::Known,
        Err(gap) => Answer::Missing(gap.clone()),
    };
    *place = value.into();
    answer
}

fn utilization(device: &Device<'_>, now: &mut DeviceSample) -> Answer {
    let rates = device.utilization_rates().map_err(gap);
    let percent = |value| up_to(100, "percent busy", value);
    let memory = rates.clone().and_then(|rates| percent(rates.memory));
    now.memory_utilization_percent = memory.into();
    keep(
        &mut now.utilization_percent,
        rates.and_then(|rates| percent(rates.gpu)),
    )
}

fn memory(device: &Device<'_>) -> Result<Memory, Gap> {
    let newer = device.memory_info().map_err(gap);
    let (used_bytes, total_bytes) = match newer {
        Ok(info) => (info.used, info.total),
        Err(Gap::NoFunction) => raw::memory(device).map_err(gap)?,
        Err(other) => return Err(other),
    };
    if total_bytes == 0 || total_bytes == u64::MAX {
        return Err(Gap::NotSupported);
    }
    up_to(total_bytes, "bytes in use", used_bytes)?;
    Ok(Memory {
        used_bytes,
        total_bytes,
    })
}

fn power(device: &Device<'_>, counters: &mut Counters) -> Result<u32, Gap> {
    if !counters.has_no_instant_power {
        let field = Field::of_device(field_id::NVML_FI_DEV_POWER_INSTANT);
        let [power] = raw::fields(device, [field])
            .map_err(gap)
            .unwrap_or_else(|gap| [Err(gap)]);
        match power {
            Ok(power) => return milliwatts(u32::try_from(power.value).unwrap_or(u32::MAX)),
            Err(gap) if is_lasting(&gap) => counters.has_no_instant_power = true,
            Err(gap) => return Err(gap),
        }
    }
    milliwatts(device.power_usage().map_err(gap)?)
}

/// A megawatt is no device's.
pub(super) fn milliwatts(value: u32) -> Result<u32, Gap> {
    if value == u32::MAX {
        return Err(Gap::NotSupported);
    }
    up_to(1_000_000_000, "mW", value)
}

/// The driver writes "not known" as the largest number.
pub(super) fn known(value: u64) -> Result<u64, Gap> {
    if value == u64::MAX {
        return Err(Gap::NotSupported);
    }
    Ok(value)
}

fn clock(device: &Device<'_>, which: Clock) -> Result<u32, Gap> {
    up_to(100_000, "MHz", device.clock_info(which).map_err(gap)?)
}

fn temperature(device: &Device<'_>) -> Result<u32, Gap> {
    let value = device.temperature(TemperatureSensor::Gpu).map_err(gap)?;
    up_to(250, "degrees", value)
}

fn throttles(bits: u64) -> Vec<Throttle> {
    use ThrottleReasons as Bits;
    let names = [
        (Bits::SW_POWER_CAP, Throttle::PowerCap),
        (Bits::SW_THERMAL_SLOWDOWN, Throttle::Thermal),
        (Bits::HW_THERMAL_SLOWDOWN, Throttle::HardwareThermal),
        (Bits::HW_POWER_BRAKE_SLOWDOWN, Throttle::PowerBrake),
        (Bits::HW_SLOWDOWN, Throttle::Hardware),
        (Bits::SYNC_BOOST, Throttle::SyncBoost),
        (Bits::APPLICATIONS_CLOCKS_SETTING, Throttle::ClocksSetting),
        (Bits::DISPLAY_CLOCK_SETTING, Throttle::DisplayClock),
    ];
    // Being idle is a reason too, and no trouble; others may come with newer drivers.
    let set = ThrottleReasons::from_bits_truncate(bits);
    let on = names.into_iter().filter(|(bit, _)| set.contains(*bit));
    on.map(|(_, name)| name).collect()
}

fn nvlink(
    device: &Device<'_>,
    at: Duration,
    counters: &mut Counters,
    now: &mut DeviceSample,
) -> Answer {
    let ids = [
        field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
        field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
    ];
    let asked = ids.map(|id| Field::of_link(ALL_LINKS, id));
    let answers = raw::fields(device, asked).map_err(gap);
    let [sent, received] = answers.unwrap_or_else(|gap| [Err(gap.clone()), Err(gap)]);
    let [tx, rx] = &mut counters.nvlink;
    let rate = |counter: &mut Counter, answer: Result<raw::Number, Gap>| {
        let kib = answer?.value;
        counter
            .rate(at, kib.saturating_mul(1024))
            .ok_or(Gap::NotRead)
    };
    now.nvlink_tx_bytes_s = rate(tx, sent).into();
    let received = rate(rx, received);
    keep(&mut now.nvlink_rx_bytes_s, received)
}

/// From the device's byte counters; where there are none, or samples are too far apart for them, from the call that waits.
fn pcie(ask: Ask<'_, '_>, counters: &mut Counters, now: &mut DeviceSample) -> Answer {
    if counters.has_no_pcie_counters {
        return pcie_call(ask, counters, now);
    }
    let ids = [
        field_id::NVML_FI_DEV_PCIE_COUNT_TX_BYTES,
        field_id::NVML_FI_DEV_PCIE_COUNT_RX_BYTES,
    ];
    let asked = ids.map(Field::of_device);
    let both = match raw::fields(ask.device, asked).map_err(gap) {
        Ok([Ok(tx), Ok(rx)]) => [tx, rx],
        Ok([Err(gap), _] | [_, Err(gap)]) | Err(gap) => {
            if is_lasting(&gap) {
                counters.has_no_pcie_counters = true;
                return pcie_call(ask, counters, now);
            }
            now.pcie_tx_bytes_s = Reading::missing(gap.clone());
            return keep(&mut now.pcie_rx_bytes_s, Err(gap));
        }
    };
    match counters.pcie.add(ask.at, both) {
        rate::Turn::Opened => Answer::NextSample,
        rate::Turn::Closed([tx, rx]) => {
            now.pcie_tx_bytes_s = tx.into();
            keep(&mut now.pcie_rx_bytes_s, Ok(rx))
        }
        rate::Turn::TooLate => {
            counters.has_no_pcie_counters = true;
            pcie_call(ask, counters, now)
        }
    }
}

/// One direction at a time.
fn pcie_call(ask: Ask<'_, '_>, counters: &mut Counters, now: &mut DeviceSample) -> Answer {
    if !*ask.may_wait {
        return Answer::NextSample;
    }
    *ask.may_wait = false;
    let (place, which) = if counters.is_rx_next {
        (&mut now.pcie_rx_bytes_s, PcieUtilCounter::Receive)
    } else {
        (&mut now.pcie_tx_bytes_s, PcieUtilCounter::Send)
    };
    counters.is_rx_next = !counters.is_rx_next;
    let answer = ask.device.pcie_throughput(which).map_err(gap);
    let answer = keep(place, answer.map(|kb| u64::from(kb) * 1000));
    if let Answer::Missing(gap) = &answer
        && is_lasting(gap)
    {
        // What one direction does not have the other does not have either.
        now.pcie_tx_bytes_s = Reading::missing(gap.clone());
        now.pcie_rx_bytes_s = Reading::missing(gap.clone());
    }
    answer
}

/// Everything that one answer tells.
pub(super) fn at_once(library: &Library, device: &Device<'_>, index: u32) -> DeviceSample {
    let mut now = DeviceSample {
        index,
        ..DeviceSample::default()
    };
    let mut counters = Counters::default();
    for (group, _) in Group::ALL
        .into_iter()
        .filter(|(group, _)| group.is_instant())
    {
        let ask = Ask {
            library,
            device,
            at: Duration::ZERO,
            may_wait: &mut false,
        };
        group.read(ask, &mut counters, &mut now);
    }
    now
}

#[cfg(test)]
mod tests;
