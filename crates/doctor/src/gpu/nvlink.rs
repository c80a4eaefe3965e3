//! NVLinks: those that are down while others are up, and errors on them.
//!
//! *Source*: NVLink counters in NVIDIA's NVML reference; how many links a device has is compared with its siblings, since a
//! board need not wire all of them.

use paceline_gpu::snapshot::{Device, NvLink, Snapshot};
use paceline_words::say;

use super::fabric::has_switches;
use super::pairs::active;
use super::words::{gpus, gpus_that, grouped, joined, listed, model};
use crate::checks;
use crate::finding::Notes;

/// From so many errors of one link on it is a warning. Our own choice: a link that is retrained now and then has a few.
const ERRORS_MANY: u64 = 100;

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let with = snapshot.devices.iter().filter(|device| all(device) > 0);
    let with: Vec<&Device> = with.collect();
    if with.is_empty() {
        return;
    }
    let lang = notes.lang;
    let counts = with
        .iter()
        .map(|device| ((up(device), all(device)), device.index));
    let words = grouped(counts);
    let words = words.iter().map(|((up, all), of)| {
        let gpus = gpus(of, lang);
        say!(
            lang,
            "{up} of {all} links up on {gpus}",
            "{gpus}: 링크 {all}개 중 {up}개 연결됨"
        )
    });
    notes
        .sheet(checks::NVLINK)
        .fact(listed(words.collect(), lang));
    judge_setting(snapshot, notes);
    judge_missing(snapshot, &with, notes);
    judge_errors(&with, notes);
}

fn all(device: &Device) -> usize {
    device.nvlinks.known().map_or(0, Vec::len)
}

fn up(device: &Device) -> usize {
    active(device).count()
}

/// Whether every link of the device says if it is up.
fn tells_all(device: &Device) -> bool {
    let mut links = device.nvlinks.known().into_iter().flatten();
    links.all(|link| link.is_active.known().is_some())
}

fn judge_missing(snapshot: &Snapshot, with: &[&Device], notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::NVLINK);
    let told: Vec<&&Device> = with.iter().filter(|device| tells_all(device)).collect();
    if told.len() > 1 && told.iter().all(|device| up(device) == 0) {
        // Without the fabric manager all are down, and that has been said.
        if !has_switches(snapshot) {
            sheet.note(
                say!(
                    lang,
                    "these GPUs have NVLinks, and none is up",
                    "GPU에 NVLink가 있지만 연결된 링크가 하나도 없음"
                ),
                say!(
                    lang,
                    "they talk over PCIe; with an NVLink bridge each pair has several times the speed, and peer-to-peer that works",
                    "PCIe로 통신합니다. NVLink 브리지를 쓰면 GPU 쌍마다 속도가 몇 배 빨라지고 P2P 직접 통신도 됩니다"
                ),
                say!(
                    lang,
                    "if there is a bridge, check its seat on both cards, and that both are in the slots that it is made for; `nvidia-smi nvlink -s`",
                    "브리지가 있다면 두 카드에 제대로 꽂혔는지, 두 카드가 브리지 간격에 맞는 슬롯에 있는지 확인하세요. 링크 상태는 `nvidia-smi nvlink -s`에 \
                     나옵니다"
                ),
            );
        }
        return;
    }
    for (name, of) in grouped(
        told.iter()
            .map(|device| (model(device, lang), device.index)),
    ) {
        let siblings = told.iter().filter(|device| of.contains(&device.index));
        let most = siblings.clone().map(|device| up(device)).max().unwrap_or(0);
        let fewer = siblings.filter(|device| up(device) < most);
        for (number, some) in grouped(fewer.map(|device| (up(device), device.index))) {
            let whom = gpus_that(&some, "has", "have", lang);
            sheet.warning(
                say!(
                    lang,
                    "{whom} {number} NVLinks up, others of this kind ({name}) have {most}",
                    "{whom}: 연결된 NVLink가 {number}개, 같은 모델({name})의 다른 GPU는 {most}개"
                ),
                say!(
                    lang,
                    "collectives run at the speed of the slowest link; with switches, a GPU whose links are down takes the whole job with it",
                    "집합 통신은 가장 느린 링크의 속도로 동작합니다. 스위치가 있는 머신에서는 링크가 끊긴 GPU 하나가 작업 전체를 멈춥니다"
                ),
                say!(
                    lang,
                    "`nvidia-smi nvlink -s` names the links; reset the GPUs or start the machine again; if they stay down, seat the bridge or \
                     board anew or have it repaired",
                    "끊긴 링크는 `nvidia-smi nvlink -s`에 나옵니다. GPU를 리셋하거나 머신을 재시작하고, 그래도 끊겨 있으면 브리지나 보드를 다시 꽂거나 \
                     수리를 맡기세요"
                ),
            );
        }
    }
}

fn judge_setting(snapshot: &Snapshot, notes: &mut Notes) {
    let mut settings = snapshot.system.driver_parameters.iter();
    if settings.any(|(name, value)| name.ends_with("NvLinkDisable") && value.trim() != "0") {
        let lang = notes.lang;
        notes.sheet(checks::NVLINK).warning(
            say!(
                lang,
                "a setting of the driver (NVreg_NvLinkDisable) switches NVLink off",
                "드라이버 설정(NVreg_NvLinkDisable)이 NVLink를 끔"
            ),
            say!(
                lang,
                "GPUs talk over PCIe, at a fraction of the speed; on a board with NVSwitches they have no peer-to-peer at all",
                "GPU가 훨씬 느린 PCIe로 통신합니다. NVSwitch가 있는 보드에서는 P2P가 전혀 되지 않습니다"
            ),
            say!(
                lang,
                "take it out of /etc/modprobe.d or the kernel's command line, then `sudo update-initramfs -u` and start the machine again",
                "/etc/modprobe.d나 커널 명령줄에서 이 설정을 지우고, `sudo update-initramfs -u`를 실행한 뒤 머신을 재시작하세요"
            ),
        );
    }
}

fn judge_errors(with: &[&Device], notes: &mut Notes) {
    let lang = notes.lang;
    let bad: Vec<(u64, String)> = with
        .iter()
        .flat_map(|device| {
            let links = device.nvlinks.known().into_iter().flatten();
            let errors = |link: &NvLink| link.errors.known().copied().filter(|errors| *errors > 0);
            links.filter_map(move |link| {
                let (errors, link, gpu) = (errors(link)?, link.index, device.index);
                let said = say!(
                    lang,
                    "{errors} on link {link} of GPU {gpu}",
                    "GPU {gpu} 링크 {link} {errors}회"
                );
                Some((errors, said))
            })
        })
        .collect();
    let Some(worst) = bad.iter().map(|(errors, _)| *errors).max() else {
        return;
    };
    let named = joined(bad.into_iter().map(|(_, words)| words).collect(), lang);
    let what = say!(
        lang,
        "NVLinks counted errors: {named}",
        "NVLink 오류가 집계됨: {named}"
    );
    let why = say!(
        lang,
        "each is repaired by sending again, which costs time; a link with many goes down in the end, and the job with it",
        "오류가 날 때마다 다시 보내느라 시간이 듭니다. 오류가 많은 링크는 결국 끊기고, 작업도 함께 멈춥니다"
    );
    let fix = say!(
        lang,
        "`nvidia-smi nvlink -e` now and after a run: a count that grows means a bad bridge, socket or board",
        "지금과 학습이 끝난 뒤에 `nvidia-smi nvlink -e`를 실행해 비교하세요. 횟수가 늘어나면 브리지, 소켓, 보드 중 하나가 불량입니다"
    );
    let mut sheet = notes.sheet(checks::NVLINK);
    match worst >= ERRORS_MANY {
        true => sheet.warning(what, why, fix),
        false => sheet.note(what, why, fix),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, machine};
    use paceline_gpu::snapshot::{Gap, Reading};

    /// A machine whose devices have so many links up, of four.
    fn with(up: &[usize]) -> Snapshot {
        let mut snapshot = machine(up.len());
        for (device, up) in snapshot.devices.iter_mut().zip(up) {
            let link = |index: u32| NvLink {
                index,
                is_active: ((index as usize) < *up).into(),
                errors: 0.into(),
                ..NvLink::default()
            };
            device.nvlinks = (0..4).map(link).collect::<Vec<_>>().into();
        }
        snapshot
    }

    #[test]
    fn a_device_with_fewer_links_than_its_siblings_is_named() {
        check(judge, &with(&[4, 4, 4, 4]), &[]);
        check(judge, &with(&[2, 2]), &[]);
        check(
            judge,
            &with(&[4, 3, 4, 0]),
            &["warning: NVLink: `nvidia-smi nvlink -s`"; 2],
        );
        let mut mixed = with(&[4, 2]);
        mixed.devices[1].name = "Another GPU".to_owned().into();
        check(judge, &mixed, &[]);
    }

    #[test]
    fn cards_without_a_bridge_are_noted() {
        check(
            judge,
            &with(&[0, 0]),
            &["note: NVLink: if there is a bridge"],
        );
        check(judge, &with(&[0]), &[]);
        check(judge, &machine(2), &[]);
    }

    #[test]
    fn a_driver_that_was_told_to_leave_nvlink_alone_is_named() {
        let mut snapshot = with(&[2, 2]);
        let set = |value: &str| vec![("NVreg_NvLinkDisable".to_owned(), value.to_owned())];
        snapshot.system.driver_parameters = set("1");
        check(judge, &snapshot, &["warning: NVLink: take it out"]);
        snapshot.system.driver_parameters = set("0");
        check(judge, &snapshot, &[]);
    }

    #[test]
    fn links_that_do_not_tell_are_not_counted_as_down() {
        let mut snapshot = with(&[4, 4]);
        if let Reading::Known(links) = &mut snapshot.devices[1].nvlinks {
            links[3].is_active = Reading::missing(Gap::NoFunction);
        }
        check(judge, &snapshot, &[]);
    }

    #[test]
    fn errors_are_a_note_and_many_a_warning() {
        let speaks = |errors: u64, expect: &str| {
            let mut snapshot = with(&[4, 4]);
            if let Reading::Known(links) = &mut snapshot.devices[0].nvlinks {
                links[2].errors = errors.into();
            }
            check(judge, &snapshot, &[expect]);
        };
        speaks(1, "note: NVLink: `nvidia-smi nvlink -e`");
        speaks(9_000, "warning: NVLink: `nvidia-smi nvlink -e`");
    }
}
