//! Temperature, power, and clocks that are held down now.
//!
//! *Source*: clocks event reasons in NVIDIA's NVML reference.

use paceline_gpu::sample::Throttle;
use paceline_gpu::snapshot::{Device, Snapshot};

use super::rules::{self, Rule, rules};
use super::words::{gpus, grouped, joined};
use crate::finding::{Notes, Severity};

/// Degrees below the device's own threshold from which it is spoken of.
const MARGIN_C: u32 = 3;

/// For devices that do not tell their threshold; most slow down between 83 and 95 degrees.
const HOT_C: u32 = 90;

/// Share of the maker's power limit, in percent, below which a limit is spoken of.
const LIMIT_PERCENT: u32 = 95;

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let devices = &snapshot.devices;
    let known = devices
        .iter()
        .filter_map(|device| device.now.temperature_c.known());
    if let (Some(least), Some(most)) = (known.clone().min(), known.max()) {
        notes.sheet("temperature").fact(match least == most {
            true => format!("{most} \u{b0}C"),
            false => format!("{least} to {most} \u{b0}C"),
        });
    }
    rules::judge(THROTTLES, devices, notes);
    judge_temperature(devices, notes);
    judge_limit(devices, notes);
}

const HEAT: [Throttle; 2] = [Throttle::Thermal, Throttle::HardwareThermal];

const THROTTLES: &[Rule] = rules! {
    Warning "clocks", |device| held_by(device, &HEAT) =>
        "{is|are} held down now: too hot",
        "it may run at half its speed or less, and every other rank waits for it",
        "clear dust and the way of the air, give cards room, raise the fans; a lower power limit (`sudo nvidia-smi -i N -pl WATTS`) costs \
         less than the heat does";
    Warning "clocks", |device| held_by(device, &[Throttle::PowerBrake]) =>
        "{is|are} held down now: the power supply asks for less (power brake)",
        "it may run at half its speed or less, and every other rank waits for it",
        "check power supplies, their cables and the machine's power budget; in a rack, what the management controller caps";
    Warning "clocks", |device| {
        held_by(device, &[Throttle::Hardware]) && !held_by(device, &HEAT) && !held_by(device, &[Throttle::PowerBrake])
    } =>
        "{is|are} held down now by hardware",
        "it may run at half its speed or less: heat, power or current out of bounds for a moment",
        "`nvidia-smi -q -d PERFORMANCE` while it trains; check cooling and power cables";
    Note "clocks", |device| held_by(device, &[Throttle::PowerCap]) =>
        "{runs|run} at the power limit",
        "usual under full load: clocks fall a little so that the limit holds",
        "nothing, unless the limit is lower than it need be (`nvidia-smi -q -d POWER`)";
    Note "clocks", |device| held_by(device, &[Throttle::ClocksSetting]) =>
        "clocks of {} were set by a user",
        "it does not go above them, whatever power and heat allow",
        "`sudo nvidia-smi -i N -rgc` and `-rac` take settings away";
    Note "clocks", |device| held_by(device, &[Throttle::SyncBoost]) =>
        "{waits|wait} for a slower GPU of the group (sync boost)",
        "all of the group run at the clock of the slowest",
        "look for what holds the slowest one down";
};

fn held_by(device: &Device, reasons: &[Throttle]) -> bool {
    let now = device.now.throttles.known();
    now.is_some_and(|now| reasons.iter().any(|reason| now.contains(reason)))
}

fn judge_temperature(devices: &[Device], notes: &mut Notes) {
    let near = devices.iter().filter_map(|device| {
        let now = *device.now.temperature_c.known()?;
        let own = device.slowdown_c.known().copied().filter(|own| *own > 0);
        let from = own.map_or(HOT_C, |own| own.saturating_sub(MARGIN_C));
        (now >= from).then_some((now, own, device.index))
    });
    let words: Vec<String> = near
        .map(|(now, own, index)| match own {
            Some(own) => format!("GPU {index} has {now} \u{b0}C, and slows down at {own}"),
            None => format!("GPU {index} has {now} \u{b0}C"),
        })
        .collect();
    if !words.is_empty() {
        notes.sheet("temperature").warning(
            joined(words),
            "at its threshold it runs at half its speed or less; heat for long shortens its life",
            "clear dust and the way of the air, give cards room, raise the fans, or lower the power limit (`sudo nvidia-smi -i N -pl WATTS`)",
        );
    }
}

fn judge_limit(devices: &[Device], notes: &mut Notes) {
    let low = devices.iter().filter_map(|device| {
        let (now, usual) = (
            device.now.power_limit_mw.known()?,
            device.power_default_mw.known()?,
        );
        let is_low = u64::from(*now) * 100 < u64::from(*usual) * u64::from(LIMIT_PERCENT);
        is_low.then_some(((now / 1000, usual / 1000), device.index))
    });
    for ((now, usual), of) in grouped(low) {
        // Halving the power costs far more than saving some of it.
        let severity = match u64::from(now) * 100 < u64::from(usual) * 70 {
            true => Severity::Warning,
            false => Severity::Note,
        };
        notes.sheet("power").add(
            severity,
            format!("the power limit of {} is {now} W, its maker's is {usual} W", gpus(&of)),
            "it is slower under full load, and data-parallel training waits for the slowest".to_owned(),
            format!("if that is not intended, `sudo nvidia-smi -i N -pl {usual}`; the power supply and the cooling must carry it"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, machine};

    fn with(change: impl Fn(&mut Device)) -> Snapshot {
        let mut snapshot = machine(2);
        change(&mut snapshot.devices[1]);
        snapshot
    }

    #[test]
    fn what_holds_clocks_down_is_told_apart() {
        let speaks = |throttles: &[Throttle], expect: &[&str]| {
            check(
                judge,
                &with(|device| device.now.throttles = throttles.to_vec().into()),
                expect,
            );
        };
        speaks(&[], &[]);
        speaks(&[Throttle::DisplayClock], &[]);
        speaks(&[Throttle::Thermal], &["warning: clocks: clear dust"]);
        speaks(
            &[Throttle::Hardware, Throttle::HardwareThermal],
            &["warning: clocks: clear dust"],
        );
        speaks(
            &[Throttle::Hardware, Throttle::PowerBrake],
            &["warning: clocks: check power"],
        );
        speaks(&[Throttle::Hardware], &["warning: clocks: `nvidia-smi -q"]);
        speaks(&[Throttle::PowerCap], &["note: clocks: nothing"]);
        speaks(
            &[Throttle::ClocksSetting],
            &["note: clocks: `sudo nvidia-smi -i N -rgc`"],
        );
        speaks(&[Throttle::SyncBoost], &["note: clocks: look for"]);
    }

    #[test]
    fn heat_is_measured_by_the_devices_own_threshold() {
        let speaks = |now: u32, own: Option<u32>, expect: &[&str]| {
            let hot = |device: &mut Device| {
                device.now.temperature_c = now.into();
                if let Some(own) = own {
                    device.slowdown_c = own.into();
                }
            };
            check(judge, &with(hot), expect);
        };
        let warning = ["warning: temperature: clear dust"];
        speaks(86, Some(90), &[]);
        speaks(87, Some(90), &warning);
        speaks(89, None, &[]);
        speaks(90, None, &warning);
        speaks(40, Some(0), &[]);
    }

    #[test]
    fn a_power_limit_below_the_makers_is_told() {
        let speaks = |now: u32, expect: &[&str]| {
            let limited = |device: &mut Device| {
                device.now.power_limit_mw = now.into();
                device.power_default_mw = 350_000.into();
            };
            check(judge, &with(limited), expect);
        };
        speaks(350_000, &[]);
        speaks(450_000, &[]);
        speaks(340_000, &[]);
        speaks(300_000, &["note: power: if that is not intended"]);
        speaks(200_000, &["warning: power: if that is not intended"]);
    }
}
