//! Memory errors of devices, and PCIe packets that had to be sent again.
//!
//! *Source*: NVIDIA's "GPU Memory Error Management" (row remapping, containment) and "Dynamic Page Retirement".

use paceline_gpu::snapshot::{Device, Snapshot};
use paceline_words::{Lang, count, say};

use super::rules::{self, Rule, rules};
use super::words::{gpus, grouped, joined, listed};
use crate::checks;
use crate::finding::Notes;

/// Packets sent again that are worth a word. Our own choice: a sound link has a handful after months.
const REPLAYS_MIN: u64 = 1_000;

/// Corrected errors since the driver was loaded that are worth a word. Our own choice; each of them did no harm.
const CORRECTED_MIN: u64 = 1_000;

const RULES: &[Rule] = rules! {
    Error MEMORY_ERRORS, |device| device.errors.retirement_failed.known() == Some(&true) =>
        ("{} could not put bad memory out of use", "{}: 불량 메모리를 사용에서 제외하지 못함"),
        ("no spare memory is left for it: programs go on using what is known to fail",
         "대체할 예비 메모리가 남아 있지 않아, 불량으로 확인된 메모리를 계속 사용하게 됩니다"),
        ("take the card out of training and have it replaced; `nvidia-smi -q -d ROW_REMAPPER,PAGE_RETIREMENT` is what the maker asks for",
         "이 카드를 학습에서 빼고 교체를 요청하세요. 제조사에는 `nvidia-smi -q -d ROW_REMAPPER,PAGE_RETIREMENT`의 출력을 보내면 됩니다");
    Error MEMORY_ERRORS, |device| device.errors.uncorrected.known().is_some_and(|errors| *errors > 0) =>
        ("{} had memory errors that could not be corrected since the driver was loaded",
         "{}: 드라이버 로드 후 정정할 수 없는 메모리 오류가 발생함"),
        ("programs that met one were ended or computed with wrong numbers, and the next may be too",
         "오류가 발생한 프로그램은 종료되었거나 잘못된 값으로 계산했으며, 다음 프로그램도 그럴 수 있습니다"),
        ("do not trust results of that time; `sudo nvidia-smi -r -i N` when nothing runs on it, or start the machine again; if errors \
         come back, have the card replaced",
         "그 시간에 얻은 결과는 믿지 마세요. 실행 중인 것이 없을 때 `sudo nvidia-smi -r -i N`을 실행하거나 머신을 재시작하고, 오류가 다시 나타나면 \
         카드를 교체하세요");
    Warning MEMORY_ERRORS, |device| device.errors.retirement_pending.known() == Some(&true) =>
        ("{} {waits|wait} for a reset to put bad memory out of use", "{}: 불량 메모리를 제외하기 위해 리셋을 기다리는 중"),
        ("until then the bad place may be met again", "그때까지는 불량 영역을 다시 사용할 수 있습니다"),
        ("when nothing runs on it `sudo nvidia-smi -r -i N`, or start the machine again",
         "실행 중인 것이 없을 때 `sudo nvidia-smi -r -i N`을 실행하거나 머신을 재시작하세요");
    Note MEMORY_ERRORS, |device| device.errors.uncorrected.known() == Some(&0) && device.errors.uncorrected_ever.known().is_some_and(|errors| *errors > 0) =>
        ("{} had memory errors that could not be corrected, in an earlier time", "{}: 예전에 정정할 수 없는 메모리 오류가 있었음"),
        ("none since the driver was loaded: what failed then has been put out of use or was a single event",
         "드라이버 로드 후에는 없습니다. 당시의 불량 메모리는 이미 제외되었거나 일회성 오류였습니다"),
        ("watch it: `nvidia-smi -q -d ECC`; a count that grows is a reason to have the card replaced",
         "`nvidia-smi -q -d ECC`로 지켜보고, 횟수가 늘어나면 카드를 교체하세요");
    Note MEMORY_ERRORS, |device| device.errors.corrected.known().is_some_and(|errors| *errors >= CORRECTED_MIN) =>
        ("{} corrected more than 1000 memory errors since the driver was loaded",
         "{}: 드라이버 로드 후 정정한 메모리 오류가 1000회를 넘음"),
        ("no result was wrong; many of them often come before one that cannot be corrected",
         "잘못된 결과는 없었습니다. 다만 이런 오류가 많아지면 정정할 수 없는 오류가 뒤따르는 경우가 많습니다"),
        ("watch it: `nvidia-smi -q -d ECC`; check the cooling", "`nvidia-smi -q -d ECC`로 지켜보고, 냉각 상태를 확인하세요");
};

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::MEMORY_ERRORS);
    let devices = &snapshot.devices;
    let known = |device: &&Device| device.errors.uncorrected.known().is_some();
    match devices.iter().filter(known).count() {
        0 if devices.is_empty() => {}
        0 => sheet.fact(say!(
            lang,
            "not counted: no GPU here tells of memory errors",
            "집계하지 않음: 메모리 오류를 알려 주는 GPU가 없음"
        )),
        _ => sheet.fact(said(devices, lang)),
    }

    rules::judge(RULES, devices, notes);
    judge_replays(devices, notes);
}

fn judge_replays(devices: &[Device], notes: &mut Notes) {
    let lang = notes.lang;
    let named = devices.iter().filter_map(|device| {
        let (replays, index) = (*device.errors.pcie_replays.known()?, device.index);
        let said = say!(lang, "{replays} of GPU {index}", "GPU {index} {replays}회");
        (replays >= REPLAYS_MIN).then_some(said)
    });
    let named: Vec<String> = named.collect();
    if named.is_empty() {
        return;
    }
    let named = joined(named, lang);
    notes.sheet(checks::PCIE).note(
        say!(
            lang,
            "PCIe packets had to be sent again: {named}",
            "PCIe 패킷이 재전송됨: {named}"
        ),
        say!(
            lang,
            "each costs time only, but a good link has next to none: a riser, a cable or dirty contacts",
            "재전송은 시간만 잃지만, 정상 링크에서는 거의 일어나지 않습니다. 라이저, 케이블, 더러운 접점이 흔한 원인입니다"
        ),
        say!(
            lang,
            "seat the card anew, leave the riser out, or set the slot to a lower generation in the firmware",
            "카드를 다시 꽂거나, 라이저 없이 연결하거나, 펌웨어에서 슬롯의 세대를 낮추세요"
        ),
    );
}

/// "none on 8 GPUs", or who has how many.
fn said(devices: &[Device], lang: Lang) -> String {
    let counted = devices.iter().filter_map(|device| {
        let errors = &device.errors;
        let corrected = errors.corrected.known().copied().unwrap_or(0);
        Some(((corrected, *errors.uncorrected.known()?), device.index))
    });
    let groups = grouped(counted);
    let words = groups.iter().map(|((corrected, uncorrected), of)| {
        let (all, gpus) = (count(lang, of.len(), "GPU", "GPU"), gpus(of, lang));
        match (corrected, uncorrected) {
            (0, 0) => say!(lang, "none on {all}", "{all}: 없음"),
            _ => say!(
                lang,
                "{gpus}: {corrected} corrected, {uncorrected} not",
                "{gpus}: 정정 {corrected}회, 정정 불가 {uncorrected}회"
            ),
        }
    });
    listed(words.collect(), lang)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, machine};
    use paceline_gpu::snapshot::Errors;

    #[test]
    fn errors_are_judged_by_what_they_do_to_results() {
        let speaks = |errors: Errors, expect: &[&str]| {
            let mut snapshot = machine(2);
            snapshot.devices[1].errors = errors;
            check(judge, &snapshot, expect);
        };
        let clean = || Errors {
            corrected: 3.into(),
            uncorrected: 0.into(),
            uncorrected_ever: 0.into(),
            retirement_pending: false.into(),
            retirement_failed: false.into(),
            pcie_replays: 5.into(),
            ..Errors::default()
        };
        speaks(Errors::default(), &[]);
        speaks(clean(), &[]);
        speaks(
            Errors {
                uncorrected: 1.into(),
                uncorrected_ever: 1.into(),
                ..clean()
            },
            &["error: memory errors: do not trust"],
        );
        speaks(
            Errors {
                uncorrected_ever: 2.into(),
                ..clean()
            },
            &["note: memory errors: watch it"],
        );
        speaks(
            Errors {
                retirement_pending: true.into(),
                ..clean()
            },
            &["warning: memory errors: when nothing runs"],
        );
        speaks(
            Errors {
                retirement_failed: true.into(),
                ..clean()
            },
            &["error: memory errors: take the card out"],
        );
        speaks(
            Errors {
                corrected: 5_000.into(),
                pcie_replays: 70_000.into(),
                ..clean()
            },
            &["note: memory errors: watch it", "note: PCIe: seat the card"],
        );
    }

    #[test]
    fn the_table_counts_them() {
        let fact = |errors: [u64; 2]| {
            let mut snapshot = machine(2);
            for (device, uncorrected) in snapshot.devices.iter_mut().zip(errors) {
                device.errors.uncorrected = uncorrected.into();
            }
            let mut notes = Notes::default();
            judge(&snapshot, &mut notes);
            notes.facts[0].value.clone()
        };
        assert_eq!(fact([0, 0]), "none on 2 GPUs");
        assert_eq!(fact([0, 2]), "none on 1 GPU; GPU 1: 0 corrected, 2 not");
    }
}
