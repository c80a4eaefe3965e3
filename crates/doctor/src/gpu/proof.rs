//! Peer-to-peer over PCIe that the driver calls `OK`: its word, not a proof.
//!
//! *Source*: "GPU troubleshooting" in NCCL's user guide (`OK` and ACS, `simpleP2P` checks what arrives); pytorch/pytorch issues
//! 13045, 24081 and 84803 (DataParallel that hangs or learns nothing, silent corruption, cured by the IOMMU or ACS).

use paceline_gpu::snapshot::{Ancestor, Snapshot};
use paceline_words::{Lang, say};

use super::pairs::{Pair, pairs};
use super::words::{self, joined};
use super::{acs, iommu};
use crate::checks;
use crate::finding::Notes;

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let pairs = pairs(snapshot);
    let over_pcie = pairs.iter().copied();
    let over_pcie: Vec<Pair> = over_pcie.filter(Pair::is_ok_over_pcie).collect();
    if over_pcie.is_empty() {
        return;
    }
    let lang = notes.lang;
    let named = |some: &[Pair]| {
        let some: Vec<(u32, u32)> = some.iter().map(|pair| pair.of).collect();
        words::pairs(&some, pairs.len(), lang)
    };
    let devices = snapshot.devices.len();
    let proof = say!(
        lang,
        "prove it: `simpleP2P` of NVIDIA's cuda-samples checks what arrives, and `all_reduce_perf -b 8 -e 256M -f 2 -g {devices} -c 1` of \
         nccl-tests must end with 0 wrong values; `p2pBandwidthLatencyTest` must be faster with peer-to-peer than without",
        "직접 확인하세요. NVIDIA cuda-samples의 `simpleP2P`는 도착한 값을 검사하고, nccl-tests의 `all_reduce_perf -b 8 -e 256M -f 2 -g {devices} \
         -c 1`은 틀린 값 0개로 끝나야 하며, `p2pBandwidthLatencyTest`는 P2P를 켰을 때 더 빨라야 합니다"
    );
    let mut sheet = notes.sheet(checks::PEER_TO_PEER);
    let reasons = suspicions(snapshot, lang);
    if !reasons.is_empty() {
        let (named, reasons) = (named(&over_pcie), joined(reasons, lang));
        sheet.warning(
            say!(
                lang,
                "the driver says that peer-to-peer over PCIe is OK between {named}, which is no proof here: {reasons}",
                "드라이버는 PCIe P2P가 OK라고 하지만({named}) 이 머신에서는 믿을 수 없음: {reasons}"
            ),
            say!(
                lang,
                "the driver looks at cards and chipset, not at what lies between: on such machines jobs hang, crawl, or train on garbage \
                 without an error. DataParallel meets it first; NCCL on AMD machines with two GPUs, or where NCCL_P2P_LEVEL tells it to",
                "드라이버는 카드와 칩셋만 보고 그 사이의 경로는 보지 않습니다. 이런 머신에서는 작업이 멈추거나, 매우 느려지거나, 오류 없이 깨진 값으로 학습합니다. \
                 DataParallel에서 먼저 나타나고, NCCL에서는 GPU가 2개인 AMD 머신이나 NCCL_P2P_LEVEL을 설정한 경우에 나타납니다"
            ),
            say!(
                lang,
                "{proof}; until then NCCL_P2P_DISABLE=1, and DDP in place of DataParallel",
                "{proof}. 그때까지는 NCCL_P2P_DISABLE=1을 주고, DataParallel 대신 DDP를 쓰세요"
            ),
        );
        return;
    }
    let across = over_pcie.into_iter();
    let across = across.filter(|pair| pair.ancestor >= Some(Ancestor::HostBridge));
    let across: Vec<Pair> = across.collect();
    if !across.is_empty() {
        let named = named(&across);
        sheet.note(
            say!(
                lang,
                "the driver says that peer-to-peer over PCIe is OK between {named}, by way of a CPU; this was not tested",
                "드라이버는 CPU를 거치는 PCIe P2P가 OK라고 하지만({named}) 시험하지는 않음"
            ),
            say!(
                lang,
                "some mainboards pass such data on slowly or not at all, and the driver does not know; NCCL itself goes by way of a CPU only \
                 where NCCL_P2P_LEVEL tells it to, and on AMD machines with two GPUs",
                "이런 데이터를 느리게 전달하거나 아예 전달하지 못하는 메인보드가 있고, 드라이버는 이를 알지 못합니다. NCCL은 NCCL_P2P_LEVEL을 설정했거나 GPU가 \
                 2개인 AMD 머신에서만 CPU를 거칩니다"
            ),
            say!(
                lang,
                "{proof}; if it fails or hangs NCCL_P2P_DISABLE=1",
                "{proof}. 실패하거나 멈추면 NCCL_P2P_DISABLE=1을 설정하세요"
            ),
        );
    }
}

/// What makes the driver's word doubtful.
fn suspicions(snapshot: &Snapshot, lang: Lang) -> Vec<String> {
    let mut reasons = Vec::new();
    if let Some(mode) = iommu::translating(snapshot) {
        reasons.push(say!(
            lang,
            "the IOMMU translates what GPUs send ({mode})",
            "IOMMU가 GPU의 전송을 변환함({mode})"
        ));
    }
    if !acs::in_the_way(snapshot).is_empty() {
        reasons.push(say!(
            lang,
            "ACS sends it up to the CPU",
            "ACS가 데이터를 CPU로 올려 보냄"
        ));
    }
    if snapshot.system.virtual_machine().is_some() {
        reasons.push(say!(lang, "this is a virtual machine", "가상 머신임"));
    }
    let mut settings = snapshot.system.driver_parameters.iter();
    if settings.any(|(name, value)| name.contains("ForceP2P") && value.trim() != "0") {
        reasons.push(say!(
            lang,
            "a setting of the driver (ForceP2P) makes it say so",
            "드라이버 설정(ForceP2P)으로 강제된 응답임"
        ));
    }
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, joined_all, machine};
    use paceline_gpu::snapshot::{Capability, P2pStatus};

    fn over_pcie(ancestor: Ancestor) -> Snapshot {
        let mut snapshot = machine(2);
        joined_all(&mut snapshot, P2pStatus::Ok);
        for link in &mut snapshot.links {
            link.ancestor = ancestor.into();
        }
        snapshot
    }

    #[test]
    fn ok_below_one_switch_needs_no_word() {
        check(judge, &over_pcie(Ancestor::Bridge), &[]);
        check(judge, &machine(2), &[]);
    }

    #[test]
    fn ok_by_way_of_a_cpu_is_noted() {
        check(
            judge,
            &over_pcie(Ancestor::Node),
            &["note: peer-to-peer: prove it"],
        );
        let mut nvlink = over_pcie(Ancestor::System);
        for link in &mut nvlink.links {
            let position = Capability::ALL
                .iter()
                .position(|known| *known == Capability::NvLink);
            link.p2p[position.expect("known")] = P2pStatus::Ok.into();
        }
        check(judge, &nvlink, &[]);
    }

    #[test]
    fn ok_where_something_is_in_the_way_is_a_warning() {
        let speaks = |change: fn(&mut Snapshot), reason: &str| {
            let mut snapshot = over_pcie(Ancestor::Bridge);
            change(&mut snapshot);
            check(judge, &snapshot, &["warning: peer-to-peer: prove it"]);
            let mut notes = Notes::default();
            judge(&snapshot, &mut notes);
            assert!(
                notes.findings[0].what.contains(reason),
                "{:?}",
                notes.findings
            );
        };
        speaks(
            |snapshot| {
                snapshot.system.iommu.is_on = true.into();
                snapshot.system.iommu.mode = "DMA-FQ".to_owned().into();
            },
            "(DMA-FQ)",
        );
        speaks(
            |snapshot| snapshot.system.confined_by = vec!["kvm".to_owned()],
            "virtual machine",
        );
        speaks(
            |snapshot| {
                snapshot.system.driver_parameters =
                    vec![("ForceP2P".to_owned(), "0x11".to_owned())];
            },
            "ForceP2P",
        );
    }

    #[test]
    fn what_is_not_ok_is_spoken_of_elsewhere() {
        let mut snapshot = machine(2);
        joined_all(&mut snapshot, P2pStatus::NotSupported);
        snapshot.system.confined_by = vec!["kvm".to_owned()];
        check(judge, &snapshot, &[]);
    }
}
