//! The unit that translates addresses of devices.
//!
//! *Source*: "PCI Access Control Services" in NCCL's user guide (VT-d and IOMMU); `Documentation/ABI/testing/sysfs-kernel-iommu_groups`
//! of Linux for the modes; pytorch/pytorch issue 84803 (silent corruption, gone with the IOMMU off).

use paceline_gpu::snapshot::{Reading, Snapshot};
use paceline_words::say;

use super::pairs::{Pair, pairs};
use crate::checks;
use crate::finding::{Notes, plain};

/// How the IOMMU translates what GPUs send; nothing where it is off, passes it through, or is not known to do either.
pub(super) fn translating(snapshot: &Snapshot) -> Option<String> {
    let iommu = &snapshot.system.iommu;
    if iommu.is_on != Reading::Known(true) {
        return None;
    }
    let mode = iommu.mode.known()?;
    (mode != "identity").then(|| plain(mode))
}

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    if snapshot.devices.is_empty() {
        return;
    }
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::IOMMU);
    let iommu = &snapshot.system.iommu;
    let parameters = plain(&iommu.parameters.join(" "));
    let told = match iommu.parameters.is_empty() {
        true => String::new(),
        false => say!(
            lang,
            "; the kernel was told {parameters}",
            "; 커널 설정: {parameters}"
        ),
    };
    let mode = iommu.mode.known().map(|mode| plain(mode));
    let state = match (&iommu.is_on, mode.as_deref()) {
        (Reading::Known(false), _) => say!(lang, "off", "꺼짐"),
        (Reading::Known(true), Some("identity")) => say!(
            lang,
            "on, passes GPUs through (identity)",
            "켜짐, GPU는 그대로 통과(identity)"
        ),
        (Reading::Known(true), Some(mode)) => say!(
            lang,
            "on, translates what GPUs send ({mode})",
            "켜짐, GPU의 전송을 변환({mode})"
        ),
        (Reading::Known(true), None) => say!(
            lang,
            "on, how it treats GPUs is not known",
            "켜짐, GPU를 어떻게 처리하는지는 알 수 없음"
        ),
        (Reading::Missing { .. }, _) => say!(lang, "not known", "알 수 없음"),
    };
    sheet.fact(state + &told);
    let Some(mode) = translating(snapshot) else {
        return;
    };
    let is_used = pairs(snapshot).iter().any(Pair::is_ok_over_pcie);
    let has_rdma = snapshot.system.nics.iter().any(|nic| nic.is_rdma);
    if !is_used && !has_rdma {
        if snapshot.devices.len() > 1 {
            sheet.note(
                say!(
                    lang,
                    "the IOMMU translates what GPUs send ({mode})",
                    "IOMMU가 GPU의 전송을 변환함({mode})"
                ),
                say!(
                    lang,
                    "without peer-to-peer it costs copies between host and GPU a little; it would be in the way of peer-to-peer",
                    "P2P를 쓰지 않으면 호스트와 GPU 사이의 복사가 조금 느려질 뿐이지만, P2P에는 방해가 됩니다"
                ),
                say!(
                    lang,
                    "nothing, unless you bring peer-to-peer about: then `iommu=pt` on the kernel's command line",
                    "할 일이 없습니다. 다만 P2P를 쓰게 된다면 커널 명령줄에 `iommu=pt`를 넣으세요"
                ),
            );
        }
        return;
    }
    sheet.warning(
        say!(
            lang,
            "the IOMMU translates what GPUs send to other devices ({mode})",
            "IOMMU가 GPU에서 다른 장치로 가는 전송을 변환함({mode})"
        ),
        say!(
            lang,
            "what GPUs send each other or a network card takes the way through the CPU, slower; on many mainboards it hangs or arrives wrong",
            "GPU끼리 또는 네트워크 카드와 주고받는 데이터가 CPU를 거쳐 느려집니다. 많은 메인보드에서는 멈추거나 잘못된 값이 도착합니다"
        ),
        match snapshot.system.virtual_machine().is_some() {
            true => say!(
                lang,
                "the virtual machine has an IOMMU of its own: `iommu=pt` on its kernel's command line, or have it made without one",
                "가상 머신에 자체 IOMMU가 있습니다. 가상 머신의 커널 명령줄에 `iommu=pt`를 넣거나, IOMMU 없이 만들어 달라고 하세요"
            ),
            false => say!(
                lang,
                "`iommu=pt` on the kernel's command line (/etc/default/grub, then `sudo update-grub` and a start of the machine) lets devices \
                 through as they are; where that does not help, switch VT-d or AMD-Vi (IOMMU) off in the firmware",
                "커널 명령줄에 `iommu=pt`를 넣으면 장치의 전송이 그대로 통과합니다(/etc/default/grub을 고치고 `sudo update-grub`을 실행한 뒤 머신을 재시작하세요). \
                 그래도 안 되면 펌웨어에서 VT-d나 AMD-Vi(IOMMU)를 끄세요"
            ),
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, joined_all, machine};
    use paceline_gpu::snapshot::{Gap, Nic, P2pStatus};

    fn with(is_on: bool, mode: Option<&str>, status: P2pStatus) -> Snapshot {
        let mut snapshot = machine(2);
        joined_all(&mut snapshot, status);
        snapshot.system.iommu.is_on = is_on.into();
        snapshot.system.iommu.mode = match mode {
            Some(mode) => mode.to_owned().into(),
            None => Reading::missing(Gap::NotSupported),
        };
        snapshot
    }

    #[test]
    fn it_matters_where_it_translates_what_devices_exchange() {
        let warning = ["warning: IOMMU: `iommu=pt`"];
        check(judge, &with(true, Some("DMA"), P2pStatus::Ok), &warning);
        check(judge, &with(true, Some("DMA-FQ"), P2pStatus::Ok), &warning);
        check(judge, &with(true, Some("identity"), P2pStatus::Ok), &[]);
        check(judge, &with(true, None, P2pStatus::Ok), &[]);
        check(judge, &with(false, Some("DMA"), P2pStatus::Ok), &[]);
        check(
            judge,
            &with(true, Some("DMA"), P2pStatus::GpuNotSupported),
            &["note: IOMMU: nothing, unless"],
        );
    }

    #[test]
    fn a_network_card_for_rdma_is_reason_enough() {
        let mut snapshot = with(true, Some("DMA"), P2pStatus::GpuNotSupported);
        snapshot.system.nics = vec![Nic {
            is_rdma: true,
            ..Nic::default()
        }];
        check(judge, &snapshot, &["warning: IOMMU: `iommu=pt`"]);
    }

    #[test]
    fn a_virtual_machine_has_one_of_its_own() {
        let mut snapshot = with(true, Some("DMA"), P2pStatus::Ok);
        snapshot.system.confined_by = vec!["kvm".to_owned()];
        check(judge, &snapshot, &["warning: IOMMU: the virtual machine"]);
    }
}
