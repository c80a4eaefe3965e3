//! Temperature, power, and clocks that are held down now.
//!
//! *Source*: clocks event reasons in NVIDIA's NVML reference.

use paceline_gpu::sample::Throttle;
use paceline_gpu::snapshot::{Device, Snapshot};
use paceline_words::{say, span};

use super::rules::{self, Rule, rules};
use super::words::{gpus, grouped, joined};
use crate::checks;
use crate::finding::{Notes, Severity};

/// Degrees below the device's own threshold from which it is spoken of.
const MARGIN_C: u32 = 3;

/// For devices that do not tell their threshold; most slow down between 83 and 95 degrees.
const HOT_C: u32 = 90;

/// Share of the maker's power limit, in percent, below which a limit is spoken of.
const LIMIT_PERCENT: u32 = 95;

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let (devices, lang) = (&snapshot.devices, notes.lang);
    let known = devices
        .iter()
        .filter_map(|device| device.now.temperature_c.known());
    if let (Some(least), Some(most)) = (known.clone().min(), known.max()) {
        notes.sheet(checks::TEMPERATURE).fact(match least == most {
            true => format!("{most} \u{b0}C"),
            false => format!("{} \u{b0}C", span(least, most, lang)),
        });
    }
    rules::judge(THROTTLES, devices, notes);
    judge_temperature(devices, notes);
    judge_limit(devices, notes);
}

const HEAT: [Throttle; 2] = [Throttle::Thermal, Throttle::HardwareThermal];

const THROTTLES: &[Rule] = rules! {
    Warning GPU_CLOCKS, |device| held_by(device, &HEAT) =>
        ("{} {is|are} held down now: too hot", "{}: 과열로 클럭이 제한되고 있음"),
        ("it may run at half its speed or less, and every other rank waits for it",
         "속도가 절반 이하로 떨어질 수 있고, 다른 모든 랭크가 기다리게 됩니다"),
        ("clear dust and the way of the air, give cards room, raise the fans; a lower power limit (`sudo nvidia-smi -i N -pl WATTS`) costs \
         less than the heat does",
         "먼지와 공기 통로를 정리하고, 카드 간격을 넓히고, 팬 속도를 올리세요. 발열로 잃는 것보다 전력 한도를 낮추는 것(`sudo nvidia-smi -i N -pl \
         WATTS`)이 손해가 적습니다");
    Warning GPU_CLOCKS, |device| held_by(device, &[Throttle::PowerBrake]) =>
        ("{} {is|are} held down now: the power supply asks for less (power brake)",
         "{}: 전원 공급 장치의 요청으로 클럭이 제한되고 있음(power brake)"),
        ("it may run at half its speed or less, and every other rank waits for it",
         "속도가 절반 이하로 떨어질 수 있고, 다른 모든 랭크가 기다리게 됩니다"),
        ("check power supplies, their cables and the machine's power budget; in a rack, what the management controller caps",
         "전원 공급 장치와 케이블, 머신의 전력 예산을 확인하세요. 랙에서는 관리 컨트롤러의 제한도 확인하세요");
    Warning GPU_CLOCKS, |device| {
        held_by(device, &[Throttle::Hardware]) && !held_by(device, &HEAT) && !held_by(device, &[Throttle::PowerBrake])
    } =>
        ("{} {is|are} held down now by hardware", "{}: 하드웨어가 클럭을 제한하고 있음"),
        ("it may run at half its speed or less: heat, power or current out of bounds for a moment",
         "속도가 절반 이하로 떨어질 수 있습니다. 온도, 전력, 전류가 순간적으로 한계를 넘었습니다"),
        ("`nvidia-smi -q -d PERFORMANCE` while it trains; check cooling and power cables",
         "학습 중에 `nvidia-smi -q -d PERFORMANCE`를 실행해 보고, 냉각과 전원 케이블을 확인하세요");
    Note GPU_CLOCKS, |device| held_by(device, &[Throttle::PowerCap]) =>
        ("{} {runs|run} at the power limit", "{}: 전력 한도에서 동작 중"),
        ("usual under full load: clocks fall a little so that the limit holds",
         "최대 부하에서는 정상입니다. 전력 한도를 지키기 위해 클럭이 조금 내려갑니다"),
        ("nothing, unless the limit is lower than it need be (`nvidia-smi -q -d POWER`)",
         "할 일이 없습니다. 다만 한도가 필요 이상으로 낮은지 `nvidia-smi -q -d POWER`로 확인하세요");
    Note GPU_CLOCKS, |device| held_by(device, &[Throttle::ClocksSetting]) =>
        ("clocks of {} were set by a user", "{}: 사용자가 클럭을 고정해 둠"),
        ("it does not go above them, whatever power and heat allow", "전력과 온도에 여유가 있어도 그 이상으로 올라가지 않습니다"),
        ("`sudo nvidia-smi -i N -rgc` and `-rac` take settings away", "`sudo nvidia-smi -i N -rgc`와 `-rac`로 설정을 해제하세요");
    Note GPU_CLOCKS, |device| held_by(device, &[Throttle::SyncBoost]) =>
        ("{} {waits|wait} for a slower GPU of the group (sync boost)", "{}: 그룹의 더 느린 GPU에 클럭을 맞추고 있음(sync boost)"),
        ("all of the group run at the clock of the slowest", "그룹의 모든 GPU가 가장 느린 GPU의 클럭으로 동작합니다"),
        ("look for what holds the slowest one down", "가장 느린 GPU의 클럭이 낮은 이유를 찾으세요");
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
    let lang = notes.lang;
    let words: Vec<String> = near
        .map(|(now, own, index)| match own {
            Some(own) => say!(
                lang,
                "GPU {index} has {now} \u{b0}C, and slows down at {own}",
                "GPU {index}: {now} \u{b0}C, {own} \u{b0}C부터 느려짐"
            ),
            None => say!(
                lang,
                "GPU {index} has {now} \u{b0}C",
                "GPU {index}: 현재 {now} \u{b0}C"
            ),
        })
        .collect();
    if !words.is_empty() {
        notes.sheet(checks::TEMPERATURE).warning(
            joined(words, lang),
            say!(
                lang,
                "at its threshold it runs at half its speed or less; heat for long shortens its life",
                "임계 온도에 이르면 속도가 절반 이하로 떨어집니다. 오래 과열되면 수명도 줄어듭니다"
            ),
            say!(
                lang,
                "clear dust and the way of the air, give cards room, raise the fans, or lower the power limit (`sudo nvidia-smi -i N -pl WATTS`)",
                "먼지와 공기 통로를 정리하고, 카드 간격을 넓히고, 팬 속도를 올리거나 전력 한도를 낮추세요(`sudo nvidia-smi -i N -pl WATTS`)"
            ),
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
    let lang = notes.lang;
    for ((now, usual), of) in grouped(low) {
        // Halving the power costs far more than saving some of it.
        let severity = match u64::from(now) * 100 < u64::from(usual) * 70 {
            true => Severity::Warning,
            false => Severity::Note,
        };
        let whom = gpus(&of, lang);
        notes.sheet(checks::POWER).add(
            severity,
            say!(
                lang,
                "the power limit of {whom} is {now} W, its maker's is {usual} W",
                "{whom}: 전력 한도 {now} W, 제조사 기본값은 {usual} W"
            ),
            say!(
                lang,
                "it is slower under full load, and data-parallel training waits for the slowest",
                "최대 부하에서 더 느리고, 데이터 병렬 학습은 가장 느린 장치를 기다립니다"
            ),
            say!(
                lang,
                "if that is not intended, `sudo nvidia-smi -i N -pl {usual}`; the power supply and the cooling must carry it",
                "의도한 설정이 아니라면 `sudo nvidia-smi -i N -pl {usual}` 명령으로 되돌리세요. 전원과 냉각이 감당할 수 있어야 합니다"
            ),
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
