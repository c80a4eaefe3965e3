//! What could not be read or judged: one note that lists it, so that silence is not taken for health.

use std::collections::BTreeMap;

use paceline_gpu::snapshot::{Device, Gap, PciKind, Reading, Snapshot};
use paceline_words::{Lang, Word, count, say};

use super::words::{gpus, joined};
use crate::checks;
use crate::finding::{Notes, plain};

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    judge_others(snapshot, notes);
    if snapshot.devices.is_empty() {
        return;
    }
    let lang = notes.lang;
    let unread = unread(snapshot, lang);
    if unread.is_empty() {
        return;
    }
    let words = unread.values().map(|(why, what)| {
        let (what, why) = (joined(what.clone(), lang), told_as(why, lang));
        format!("{what} ({why})")
    });
    let words = words.collect::<Vec<_>>().join("; ");
    let is_missing = |why: Gap| unread.contains_key(&why.to_string());
    let mut fixes = Vec::new();
    if is_missing(Gap::NoPermission) {
        fixes.push(say!(
            lang,
            "run it as root (`sudo`) to see what needs that",
            "root 권한(`sudo`)으로 다시 실행하면 확인할 수 있습니다"
        ));
    }
    if is_missing(Gap::NoFunction) {
        fixes.push(say!(
            lang,
            "a newer driver tells more",
            "드라이버를 업데이트하면 더 많은 정보를 볼 수 있습니다"
        ));
    }
    if fixes.is_empty() {
        fixes.push(say!(
            lang,
            "nothing, unless you suspect it: `nvidia-smi -q` may show more",
            "의심되는 것이 없다면 할 일이 없습니다. `nvidia-smi -q`에 더 나올 수도 있습니다"
        ));
    }
    let fix = match lang {
        Lang::En => fixes.join("; "),
        Lang::Ko => fixes.join(". "),
    };
    notes.sheet(checks::NOT_READ).note(
        say!(
            lang,
            "not everything could be read: {words}",
            "읽지 못한 항목이 있음: {words}"
        ),
        say!(
            lang,
            "what depends on it was not judged: no finding about it does not mean that it is well",
            "이 항목에 의존하는 판단은 하지 않았습니다. 관련 문제가 표시되지 않아도 정상이라는 뜻은 아닙니다"
        ),
        fix,
    );
}

/// Why something is not known.
pub(super) fn told_as(why: &Gap, lang: Lang) -> String {
    match (lang, why) {
        (Lang::En, why) => plain(&why.to_string()),
        (Lang::Ko, Gap::NotRead) => "읽지 않음".to_owned(),
        (Lang::Ko, Gap::NotSupported) => "지원하지 않음".to_owned(),
        (Lang::Ko, Gap::NoPermission) => "권한 없음".to_owned(),
        (Lang::Ko, Gap::NoFunction) => "드라이버가 오래되어 알려 주지 않음".to_owned(),
        (Lang::Ko, Gap::Lost) => "장치가 응답하지 않음".to_owned(),
        (Lang::Ko, Gap::Other(words)) => plain(words),
    }
}

fn judge_others(snapshot: &Snapshot, notes: &mut Notes) {
    let mut makers: BTreeMap<String, usize> = BTreeMap::new();
    for other in &snapshot.others {
        *makers.entry(plain(&other.maker)).or_default() += 1;
    }
    if makers.is_empty() {
        return;
    }
    let lang = notes.lang;
    let words = makers.iter().map(|(maker, number)| {
        let devices = count(lang, *number, "device", "장치");
        match lang {
            Lang::En => format!("{devices} of {maker}"),
            Lang::Ko => format!("{maker} {devices}"),
        }
    });
    let words = joined(words.collect(), lang);
    notes.sheet(checks::OTHER_GPUS).note(
        say!(
            lang,
            "{words} are not diagnosed",
            "진단하지 않는 장치: {words}"
        ),
        say!(
            lang,
            "this program knows the faults of NVIDIA's devices only",
            "이 프로그램은 NVIDIA 장치의 문제만 진단합니다"
        ),
        say!(
            lang,
            "use the maker's own tool, such as `rocm-smi` or `amd-smi` for AMD",
            "제조사의 도구를 쓰세요. AMD라면 `rocm-smi`나 `amd-smi`가 있습니다"
        ),
    );
}

/// What is missing for which reason, by the reason in English. That a device or the system does not have something is no gap;
/// that of a lost device has been said.
fn unread(snapshot: &Snapshot, lang: Lang) -> BTreeMap<String, (Gap, Vec<String>)> {
    let mut all: BTreeMap<String, (Gap, Vec<String>)> = BTreeMap::new();
    let mut add = |why: &Gap, what: String| {
        if !matches!(why, Gap::NotSupported | Gap::Lost) {
            let known = all.entry(plain(&why.to_string()));
            let (_, of_why) = known.or_insert_with(|| (why.clone(), Vec::new()));
            of_why.push(what);
        }
    };
    for (name, why) in of_system(snapshot).into_iter().chain(of_pairs(snapshot)) {
        add(&why, name.of(lang).to_owned());
    }
    let mut of_devices: BTreeMap<(&str, String), (Word, Gap, Vec<u32>)> = BTreeMap::new();
    for device in snapshot.devices.iter().filter(|device| !device.is_lost()) {
        for (name, why) in told(device) {
            let (.., of) = of_devices
                .entry((name.of(Lang::En), why.to_string()))
                .or_insert((name, why, Vec::new()));
            of.push(device.index);
        }
    }
    for (name, why, of) in of_devices.into_values() {
        let (name, whom) = (name.of(lang), gpus(&of, lang));
        match of.len() == snapshot.devices.len() {
            true => add(&why, name.to_owned()),
            false => add(&why, say!(lang, "{name} of {whom}", "{whom}의 {name}")),
        }
    }
    all
}

fn gap<T>(name: Word, reading: &Reading<T>) -> Option<(Word, Gap)> {
    Some((name, reading.gap()?.clone()))
}

fn of_system(snapshot: &Snapshot) -> Vec<(Word, Gap)> {
    const XIDS: Word = Word::new("Xid lines of the kernel's log", "커널 로그의 Xid 줄");
    const IOMMU: Word = Word::new("the IOMMU", "IOMMU 상태");
    const SHM: Word = Word::new("/dev/shm", "공유 메모리(/dev/shm)");
    const LOCKED: Word = Word::new("the limit of locked memory", "메모리 잠금 한도");
    const DRIVER: Word = Word::new("the driver's version", "드라이버 버전");
    const BRIDGES: Word = Word::new("ACS of bridges", "브리지의 ACS");
    let system = &snapshot.system;
    let bridges = system
        .pci
        .iter()
        .filter(|device| device.kind == PciKind::Bridge);
    let acs = bridges.filter_map(|bridge| gap(BRIDGES, &bridge.acs_redirects));
    [
        gap(XIDS, &system.xids),
        gap(IOMMU, &system.iommu.is_on),
        gap(SHM, &system.shm),
        gap(LOCKED, &system.memlock_bytes),
        gap(DRIVER, &snapshot.driver.version),
    ]
    .into_iter()
    .flatten()
    .chain(acs.take(1))
    .collect()
}

/// What a device does not tell; of one that does not even tell its name, only that.
fn told(device: &Device) -> Vec<(Word, Gap)> {
    const MOST: Word = Word::new("nearly everything", "거의 모든 항목");
    let basic = [
        device.name.gap(),
        device.memory.gap(),
        device.pcie.gap(),
        device.now.temperature_c.gap(),
    ];
    match basic {
        [Some(why), Some(_), Some(_), Some(_)] => {
            let why = match why {
                Gap::NotSupported => Gap::other("not supported"),
                why => why.clone(),
            };
            vec![(MOST, why)]
        }
        _ => of_device(device),
    }
}

/// The first pair of which the driver does not say whether it has peer-to-peer.
fn of_pairs(snapshot: &Snapshot) -> Option<(Word, Gap)> {
    let mut links = snapshot.links.iter();
    links.find_map(|link| gap(checks::PEER_TO_PEER, &link.p2p[0]))
}

fn of_device(device: &Device) -> Vec<(Word, Gap)> {
    const NAMES: Word = Word::new("names", "이름");
    const PLACES: Word = Word::new("places on the bus", "버스 위치");
    const MEMORY: Word = Word::new("memory", "메모리");
    const PCIE: Word = Word::new("PCIe links", "PCIe 링크");
    const MIG: Word = Word::new("MIG modes", "MIG 모드");
    const COMPUTE: Word = Word::new("compute modes", "컴퓨트 모드");
    const ERRORS: Word = Word::new("uncorrected memory errors", "정정할 수 없는 메모리 오류");
    const RETIRING: Word = Word::new(
        "memory that waits to be put out of use",
        "제외를 기다리는 불량 메모리",
    );
    const NVLINKS: Word = Word::new("NVLinks", "NVLink 상태");
    const PROCESSES: Word = Word::new("processes", "프로세스");
    const TEMPERATURES: Word = Word::new("temperatures", "온도");
    const THROTTLES: Word = Word::new("reasons for lower clocks", "클럭 제한 이유");
    let (errors, now) = (&device.errors, &device.now);
    [
        gap(NAMES, &device.name),
        gap(PLACES, &device.pci),
        gap(MEMORY, &device.memory),
        gap(PCIE, &device.pcie),
        gap(MIG, &device.mig),
        gap(COMPUTE, &device.compute_mode),
        gap(ERRORS, &errors.uncorrected),
        gap(RETIRING, &errors.retirement_pending),
        gap(NVLINKS, &device.nvlinks),
        gap(PROCESSES, &device.processes),
        gap(TEMPERATURES, &now.temperature_c),
        gap(THROTTLES, &now.throttles),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, linked, machine};
    use paceline_gpu::snapshot::{OtherDevice, P2pStatus};

    fn what(snapshot: &Snapshot) -> String {
        let mut notes = Notes::default();
        judge(snapshot, &mut notes);
        notes
            .findings
            .into_iter()
            .map(|finding| finding.what)
            .collect()
    }

    #[test]
    fn a_machine_that_tells_all_needs_no_note() {
        check(judge, &machine(2), &[]);
        check(judge, &Snapshot::default(), &[]);
    }

    #[test]
    fn gaps_are_listed_by_reason() {
        let mut snapshot = machine(2);
        snapshot.system.xids = Reading::missing(Gap::NoPermission);
        for device in &mut snapshot.devices {
            device.now.throttles = Reading::missing(Gap::NoFunction);
        }
        snapshot.devices[1].nvlinks = Reading::missing(Gap::NoFunction);
        check(judge, &snapshot, &["note: not read: run it as root"]);
        assert_eq!(
            what(&snapshot),
            "not everything could be read: Xid lines of the kernel's log (no permission); NVLinks of GPU 1 and reasons for lower clocks \
             (the driver is too old to tell)"
        );
    }

    #[test]
    fn what_a_device_does_not_have_is_no_gap() {
        let mut snapshot = machine(1);
        snapshot.devices[0].nvlinks = Reading::missing(Gap::NotSupported);
        check(judge, &snapshot, &[]);
    }

    #[test]
    fn a_device_that_tells_next_to_nothing_is_not_passed_over() {
        let mut snapshot = machine(2);
        snapshot.devices[1] = Device {
            index: 1,
            ..Device::default()
        };
        assert_eq!(
            what(&snapshot),
            "not everything could be read: nearly everything of GPU 1 (not read)"
        );
        let mute = &mut snapshot.devices[1];
        mute.name = Reading::missing(Gap::NotSupported);
        assert_eq!(
            what(&snapshot),
            "not everything could be read: nearly everything of GPU 1 (not supported)"
        );
    }

    #[test]
    fn pairs_that_nobody_tells_of_are_listed() {
        let mut snapshot = machine(2);
        let mut link = linked(0, 1, P2pStatus::Ok);
        link.p2p[0] = Reading::missing(Gap::NoFunction);
        snapshot.links = vec![link];
        check(
            judge,
            &snapshot,
            &["note: not read: a newer driver tells more"],
        );
    }

    #[test]
    fn a_lost_device_is_not_listed_again() {
        let mut snapshot = machine(2);
        snapshot.devices[1] = Device {
            index: 1,
            name: Reading::missing(Gap::Lost),
            ..Device::default()
        };
        check(judge, &snapshot, &[]);
    }

    #[test]
    fn words_from_outside_are_made_harmless() {
        let mut snapshot = machine(1);
        snapshot.devices[0].mig = Reading::Missing {
            missing: Gap::Other("odd\u{1b}[2J".to_owned()),
        };
        assert_eq!(
            what(&snapshot),
            "not everything could be read: MIG modes (odd [2J)"
        );
    }

    #[test]
    fn devices_of_others_are_not_passed_over_in_silence() {
        let mut snapshot = machine(1);
        snapshot.others = vec![OtherDevice {
            maker: "AMD".to_owned(),
            ..OtherDevice::default()
        }];
        check(
            judge,
            &snapshot,
            &["note: other GPUs: use the maker's own tool"],
        );
    }
}
