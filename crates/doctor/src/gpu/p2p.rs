//! Pairs of GPUs without peer-to-peer: why, what works all the same, and what can be changed.
//!
//! *Source*: what each code comes from: `p2p_caps.c` of NVIDIA's open kernel modules. What NCCL does: `ncclTopoCheckP2p` in its
//! `graph/paths.cc`, and "GPU troubleshooting" and "Shared memory" in its user guide. Cards without it: NVIDIA/nccl-tests issue 117.

use std::collections::BTreeMap;

use paceline_gpu::snapshot::{Device, P2pStatus, Snapshot};
use paceline_words::{Lang, Word, say};

use super::fabric::has_switches;
use super::pairs::{Pair, pairs};
use super::words::{self, joined, listed, model};
use crate::checks;
use crate::finding::{Notes, plain};

/// What still works.
const STILL_WORKS: Word = Word::new(
    "what works: one GPU alone, and DDP with NCCL, which then copies through the host's memory: right results, slower \
     exchange. What does not: PyTorch's DataParallel copies between the cards at every step, which is slow at best; \
     it has hung on such machines where DDP ran",
    "GPU 하나만 쓰는 학습과 NCCL을 쓰는 DDP는 됩니다. 이때 NCCL은 호스트 메모리를 거쳐 복사하므로 결과는 맞고 통신만 느립니다. PyTorch의 DataParallel은 \
     스텝마다 카드 사이에 복사하므로 잘 되어도 느리고, DDP가 동작하는 머신에서 멈춘 사례도 있습니다",
);

/// The same where it has been said in full.
const AS_ABOVE: Word = Word::new(
    "as above: DDP and NCCL work by way of the host's memory, DataParallel does not do well",
    "위와 같습니다. DDP와 NCCL은 호스트 메모리를 거쳐 동작하고, DataParallel은 잘 되지 않습니다",
);

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let pairs = pairs(snapshot);
    if pairs.is_empty() {
        return;
    }
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::PEER_TO_PEER);
    sheet.fact(said(&pairs, lang));
    let named = |some: &[Pair]| {
        let some: Vec<(u32, u32)> = some.iter().map(|pair| pair.of).collect();
        words::pairs(&some, pairs.len(), lang)
    };
    let mut is_said = false;
    for (status, some) in by_status(&pairs) {
        if status == P2pStatus::Ok {
            continue;
        }
        let (wired, rest): (Vec<Pair>, Vec<Pair>) =
            some.into_iter().partition(|pair| pair.has_nvlink);
        let code = status.code();
        if !wired.is_empty() {
            let named = named(&wired);
            sheet.error(
                say!(
                    lang,
                    "peer-to-peer is {code} between GPUs that NVLink joins: {named}",
                    "NVLink로 연결된 GPU인데 P2P가 {code}: {named}"
                ),
                say!(
                    lang,
                    "NCCL takes this for broken hardware and refuses to start (\"unhandled cuda error\")",
                    "NCCL은 이를 하드웨어 고장으로 보고 시작을 거부합니다(\"unhandled cuda error\")"
                ),
                say!(
                    lang,
                    "reset the GPUs (`sudo nvidia-smi -r`) or start the machine again, and look into `sudo dmesg | grep -i -e xid -e nvlink`; \
                     NCCL_IGNORE_DISABLED_P2P=1 makes NCCL go around the pair, slower",
                    "GPU를 리셋하거나(`sudo nvidia-smi -r`) 머신을 재시작하고, `sudo dmesg | grep -i -e xid -e nvlink`를 확인하세요. \
                     NCCL_IGNORE_DISABLED_P2P=1을 주면 NCCL이 이 쌍을 우회하지만 느립니다"
                ),
            );
        }
        if !rest.is_empty() {
            let (cause, remedy) = cause(status, snapshot, &rest, lang);
            let named = named(&rest);
            let (why, fix) = match is_said {
                false => (
                    STILL_WORKS,
                    followed(remedy, &settings(snapshot, lang), lang),
                ),
                true => (AS_ABOVE, remedy),
            };
            is_said = true;
            sheet.warning(
                say!(
                    lang,
                    "peer-to-peer is {code} between {named}: {cause}",
                    "P2P가 {code}({named}): {cause}"
                ),
                why.of(lang),
                fix,
            );
        }
    }
}

/// Two pieces of advice, one after the other.
fn followed(first: String, second: &str, lang: Lang) -> String {
    match lang {
        Lang::En => format!("{first}; {second}"),
        Lang::Ko => format!("{first}. {second}"),
    }
}

fn by_status(pairs: &[Pair]) -> Vec<(P2pStatus, Vec<Pair>)> {
    let mut groups: Vec<(P2pStatus, Vec<Pair>)> = Vec::new();
    for pair in pairs {
        let Some(status) = pair.status else {
            continue;
        };
        match groups.iter_mut().find(|(known, _)| *known == status) {
            Some((_, some)) => some.push(*pair),
            None => groups.push((status, vec![*pair])),
        }
    }
    groups
}

/// "OK over NVLink: all 28 pairs of GPUs".
fn said(pairs: &[Pair], lang: Lang) -> String {
    let key = |pair: &Pair| match pair.status {
        Some(P2pStatus::Ok) if pair.has_nvlink => say!(lang, "OK over NVLink", "NVLink로 OK"),
        Some(P2pStatus::Ok) => say!(lang, "OK over PCIe", "PCIe로 OK"),
        Some(status) => status.code().to_owned(),
        None => say!(lang, "not told", "알려 주지 않음"),
    };
    let mut groups: BTreeMap<String, Vec<(u32, u32)>> = BTreeMap::new();
    for pair in pairs {
        groups.entry(key(pair)).or_default().push(pair.of);
    }
    let words = groups
        .iter()
        .map(|(key, some)| format!("{key}: {}", words::pairs(some, pairs.len(), lang)));
    listed(words.collect(), lang)
}

/// Why, and what could bring it.
fn cause(status: P2pStatus, snapshot: &Snapshot, pairs: &[Pair], lang: Lang) -> (String, String) {
    let is_of_pairs = |device: &&Device| {
        let mut pairs = pairs.iter();
        pairs.any(|pair| [pair.of.0, pair.of.1].contains(&device.index))
    };
    let devices: Vec<&Device> = snapshot.devices.iter().filter(is_of_pairs).collect();
    if status == P2pStatus::DisabledByRegkey {
        return by_setting(snapshot, lang);
    }
    let has_mig = |device: &&Device| device.mig.known().is_some_and(|mig| mig.is_on);
    if devices.iter().any(has_mig) {
        return (
            say!(lang, "MIG is on", "MIG가 켜져 있음"),
            say!(
                lang,
                "switch MIG off where whole cards are to train together",
                "카드 전체로 함께 학습하려면 MIG를 끄세요"
            ),
        );
    }
    let no_setting = || {
        say!(
            lang,
            "no setting brings it to these cards",
            "설정으로 켤 수 있는 기능이 아닙니다"
        )
    };
    if devices.iter().any(|device| is_late_geforce(device)) {
        let cause = say!(
            lang,
            "GeForce cards from the RTX 40 series on do not have it",
            "GeForce는 RTX 40 시리즈부터 P2P를 지원하지 않음"
        );
        return (cause, no_setting());
    }
    match status {
        P2pStatus::NotSupported => not_supported(snapshot, &devices, pairs, lang),
        P2pStatus::ChipsetNotSupported => (
            say!(
                lang,
                "the driver does not trust this CPU or chipset to pass data from card to card",
                "이 CPU나 칩셋을 거친 카드 간 전송을 드라이버가 신뢰하지 않음"
            ),
            say!(
                lang,
                "put both cards below one PCIe switch where the machine has one; a newer driver knows more CPUs",
                "머신에 PCIe 스위치가 있다면 두 카드를 같은 스위치 아래에 꽂으세요. 새 드라이버는 더 많은 CPU를 지원합니다"
            ),
        ),
        P2pStatus::GpuNotSupported => (
            say!(
                lang,
                "these cards do not have it",
                "이 카드에 P2P 기능이 없음"
            ),
            no_setting(),
        ),
        P2pStatus::TopologyNotSupported => (
            say!(
                lang,
                "the cards hang on different sockets or I/O hubs, and nothing is passed on between those",
                "카드들이 서로 다른 소켓이나 I/O 허브에 있어 그 사이로 데이터가 전달되지 않음"
            ),
            say!(
                lang,
                "put both cards into slots of one CPU, as its manual draws them",
                "메인보드 설명서를 보고 두 카드를 같은 CPU의 슬롯에 꽂으세요"
            ),
        ),
        P2pStatus::Unknown | P2pStatus::Ok | P2pStatus::DisabledByRegkey => (
            say!(
                lang,
                "the driver cannot say why",
                "드라이버가 이유를 알려 주지 않음"
            ),
            say!(
                lang,
                "a newer driver may know; `sudo dmesg | grep -i nvrm` after a start of the machine",
                "드라이버를 업데이트하면 이유가 나올 수 있습니다. 머신을 재시작한 뒤 `sudo dmesg | grep -i nvrm`도 확인하세요"
            ),
        ),
    }
}

fn not_supported(
    snapshot: &Snapshot,
    devices: &[&Device],
    pairs: &[Pair],
    lang: Lang,
) -> (String, String) {
    let name = |index: u32| {
        let device = devices.iter().find(|device| device.index == index);
        device.map(|device| model(device, lang))
    };
    let differ = |pair: &Pair| name(pair.of.0) != name(pair.of.1);
    if pairs.iter().all(differ) {
        (
            say!(
                lang,
                "the driver offers it between cards of one chip only, and these differ",
                "드라이버는 같은 칩의 카드 사이에서만 제공하는데, 칩이 서로 다름"
            ),
            say!(
                lang,
                "train together on cards of one model",
                "같은 모델의 카드끼리 학습하세요"
            ),
        )
    } else if has_switches(snapshot) {
        (
            say!(
                lang,
                "on a board with NVSwitches this means that the NVLinks are not set up",
                "NVSwitch 보드에서 이 코드는 NVLink가 설정되지 않았다는 뜻임"
            ),
            say!(
                lang,
                "let the fabric manager run (`systemctl status nvidia-fabricmanager`), and look for Xid and SXid in `sudo dmesg`",
                "패브릭 매니저를 실행하고(`systemctl status nvidia-fabricmanager`), `sudo dmesg`에서 Xid와 SXid를 찾으세요"
            ),
        )
    } else if snapshot.system.virtual_machine().is_some() {
        (
            say!(
                lang,
                "this is a virtual machine, which hides how the cards are wired",
                "가상 머신이라 카드의 연결 구조가 가려져 있음"
            ),
            say!(
                lang,
                "the host's administrator can pass cards through together with the switch above them, or offer NVLink; nothing inside the machine helps",
                "호스트 관리자가 카드를 상위 스위치와 함께 넘겨주거나 NVLink를 제공할 수 있습니다. 가상 머신 안에서는 할 수 있는 일이 없습니다"
            ),
        )
    } else {
        (
            say!(
                lang,
                "the driver does not offer it for these cards in this machine",
                "드라이버가 이 머신의 이 카드에는 P2P를 제공하지 않음"
            ),
            say!(
                lang,
                "a newer driver and a newer firmware of the mainboard are worth a try; most consumer cards never have it",
                "드라이버와 메인보드 펌웨어를 업데이트해 볼 만합니다. 소비자용 카드는 대부분 P2P를 지원하지 않습니다"
            ),
        )
    }
}

fn by_setting(snapshot: &Snapshot, lang: Lang) -> (String, String) {
    let all = snapshot.system.driver_parameters.iter();
    let named: Vec<String> = all
        .filter(|(name, _)| name.contains("ForceP2P"))
        .map(|(name, value)| format!("{}={}", plain(name), plain(value)))
        .collect();
    let named = joined(named, lang);
    let (seen, which) = match named.is_empty() {
        true => (
            String::new(),
            say!(
                lang,
                "ForceP2P in `NVreg_RegistryDwords`",
                "`NVreg_RegistryDwords`의 ForceP2P"
            ),
        ),
        false => (format!(" ({named})"), named),
    };
    (
        say!(
            lang,
            "a setting of the driver switches it off{seen}",
            "드라이버 설정이 P2P를 끔{seen}"
        ),
        say!(
            lang,
            "take {which} out of /etc/modprobe.d or the kernel's command line, then `sudo update-initramfs -u` and start the machine again; \
             it was set, perhaps after a hang: test the links before you train on them",
            "/etc/modprobe.d나 커널 명령줄에서 다음 설정을 지우고, `sudo update-initramfs -u`를 실행한 뒤 머신을 재시작하세요: {which}. 누군가 멈춤을 \
             겪고 넣은 설정일 수 있으니, 학습하기 전에 연결을 시험하세요"
        ),
    )
}

/// Ada and later: the first GeForce cards of which the maker says that they have no peer-to-peer.
fn is_late_geforce(device: &Device) -> bool {
    let is_geforce = device
        .name
        .known()
        .is_some_and(|name| name.contains("GeForce"));
    is_geforce && device.capability.known() >= Some(&(8, 9))
}

/// What helps NCCL, and what must not be set.
fn settings(snapshot: &Snapshot, lang: Lang) -> String {
    let text = say!(
        lang,
        "train with one process per GPU (`paceline run`, torchrun) and DDP, not with DataParallel; if NCCL hangs at its first \
         collective set NCCL_P2P_DISABLE=1; do not set NCCL_SHM_DISABLE, which takes the way through the host's memory away",
        "DataParallel 대신 GPU마다 프로세스 하나를 쓰는 DDP로 학습하세요(`paceline run`, torchrun). NCCL이 첫 집합 통신에서 멈추면 NCCL_P2P_DISABLE=1을 \
         설정하세요. NCCL_SHM_DISABLE은 호스트 메모리를 거치는 길까지 막으므로 설정하지 마세요"
    );
    // From NCCL 2.24 on host memory is taken by a way that needs CUDA 13's driver where there is no peer-to-peer.
    let cuda = snapshot.driver.cuda.known();
    let needs_more = cuda.is_some_and(|cuda| ((12, 6)..(13, 0)).contains(cuda));
    if !needs_more {
        return text;
    }
    let more = say!(
        lang,
        "if NCCL 2.24 or newer fails to start set NCCL_CUMEM_HOST_ENABLE=0",
        "NCCL 2.24 이상이 시작하지 못하면 NCCL_CUMEM_HOST_ENABLE=0을 설정하세요"
    );
    followed(text, &more, lang)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, joined_all, machine};
    use paceline_gpu::snapshot::{Mode, NvLink, PciDevice, PciKind, Remote};

    fn with(count: usize, status: P2pStatus) -> Snapshot {
        let mut snapshot = machine(count);
        joined_all(&mut snapshot, status);
        snapshot
    }

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
    fn what_is_ok_or_alone_or_unknown_is_not_spoken_of() {
        check(judge, &with(2, P2pStatus::Ok), &[]);
        check(judge, &machine(1), &[]);
        check(judge, &machine(2), &[]);
    }

    #[test]
    fn each_code_has_its_cause_and_remedy() {
        let speaks = |status, cause: &str, remedy: &str| {
            let snapshot = with(2, status);
            check(
                judge,
                &snapshot,
                &[&format!("warning: peer-to-peer: {remedy}")],
            );
            let what = what(&snapshot);
            assert!(what.ends_with(cause), "{what}");
        };
        speaks(
            P2pStatus::ChipsetNotSupported,
            "pass data from card to card",
            "put both cards below one PCIe switch",
        );
        speaks(
            P2pStatus::GpuNotSupported,
            "these cards do not have it",
            "no setting",
        );
        speaks(
            P2pStatus::TopologyNotSupported,
            "nothing is passed on between those",
            "put both cards into slots of one CPU",
        );
        speaks(
            P2pStatus::DisabledByRegkey,
            "a setting of the driver switches it off",
            "take ForceP2P in `NVreg_RegistryDwords` out",
        );
        speaks(P2pStatus::NotSupported, "in this machine", "a newer driver");
        speaks(
            P2pStatus::Unknown,
            "cannot say why",
            "a newer driver may know",
        );
    }

    #[test]
    fn the_rest_of_the_machine_tells_why_it_is_not_supported() {
        let mut mixed = with(2, P2pStatus::NotSupported);
        mixed.devices[1].name = "Another GPU".to_owned().into();
        check(
            judge,
            &mixed,
            &["warning: peer-to-peer: train together on cards of one model"],
        );

        let mut mig = with(2, P2pStatus::NotSupported);
        mig.devices[0].mig = Mode {
            is_on: true,
            will_be_on: true,
        }
        .into();
        check(judge, &mig, &["warning: peer-to-peer: switch MIG off"]);

        let mut geforce = with(2, P2pStatus::ChipsetNotSupported);
        for device in &mut geforce.devices {
            device.name = "NVIDIA GeForce RTX 4090".to_owned().into();
            device.capability = (8, 9).into();
        }
        check(
            judge,
            &geforce,
            &["warning: peer-to-peer: no setting brings it"],
        );

        let mut board = with(2, P2pStatus::NotSupported);
        board.system.pci.push(PciDevice {
            kind: PciKind::NvSwitch,
            id: (0x10de, 0x22a3),
            ..PciDevice::default()
        });
        check(
            judge,
            &board,
            &["warning: peer-to-peer: let the fabric manager run"],
        );

        let mut guest = with(2, P2pStatus::NotSupported);
        guest.system.confined_by = vec!["kvm".to_owned()];
        check(
            judge,
            &guest,
            &["warning: peer-to-peer: the host's administrator"],
        );

        let mut set = with(2, P2pStatus::DisabledByRegkey);
        set.system.driver_parameters = vec![("ForceP2P".to_owned(), "0".to_owned())];
        check(
            judge,
            &set,
            &["warning: peer-to-peer: take ForceP2P=0 out of"],
        );
    }

    #[test]
    fn pairs_of_one_code_are_one_finding() {
        let mut snapshot = with(4, P2pStatus::Ok);
        for link in &mut snapshot.links {
            if (link.from < 2) != (link.to < 2) {
                link.p2p[0] = P2pStatus::TopologyNotSupported.into();
            }
        }
        assert!(what(&snapshot).starts_with(
            "peer-to-peer is TNS between 4 of 6 pairs of GPUs: 0-2, 0-3, 1-2 and 1-3: "
        ));
        let all = with(8, P2pStatus::GpuNotSupported);
        assert!(what(&all).starts_with("peer-to-peer is GNS between all 28 pairs of GPUs: "));
    }

    #[test]
    fn a_pair_that_nvlink_joins_stops_nccl() {
        let mut snapshot = with(2, P2pStatus::NotSupported);
        for device in &mut snapshot.devices {
            device.nvlinks = vec![NvLink {
                is_active: true.into(),
                remote: Remote::Switch.into(),
                ..NvLink::default()
            }]
            .into();
        }
        check(judge, &snapshot, &["error: peer-to-peer: reset the GPUs"]);
    }

    #[test]
    fn a_driver_before_cuda_13_may_need_another_way_to_host_memory() {
        let says = |cuda: (u32, u32)| {
            let mut snapshot = with(2, P2pStatus::GpuNotSupported);
            snapshot.driver.cuda = cuda.into();
            let mut notes = Notes::default();
            judge(&snapshot, &mut notes);
            notes.findings[0].fix.contains("NCCL_CUMEM_HOST_ENABLE=0")
        };
        assert!(!says((12, 4)));
        assert!(says((12, 6)));
        assert!(says((12, 9)));
        assert!(!says((13, 0)));
    }
}
