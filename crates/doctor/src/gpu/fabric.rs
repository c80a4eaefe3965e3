//! NVSwitch boards: without NVIDIA's fabric manager their NVLinks stay down.
//!
//! *Source*: NVIDIA's "Fabric Manager for NVIDIA NVSwitch Systems"; `p2p_caps.c` of NVIDIA's open kernel modules: where an
//! NVSwitch is there and NVLink is not set up, no other way between GPUs is offered.

use paceline_gpu::bus::Bus;
use paceline_gpu::snapshot::{PciKind, Reading, Snapshot};
use paceline_words::{count, say};

use crate::checks;
use crate::finding::Notes;

/// Whether the machine's own NVSwitches are on the bus.
pub(super) fn has_switches(snapshot: &Snapshot) -> bool {
    switches(snapshot) > 0
}

fn switches(snapshot: &Snapshot) -> usize {
    Bus::of(&snapshot.system)
        .of_nvidia(PciKind::NvSwitch)
        .count()
}

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let switches = switches(snapshot);
    if switches == 0 {
        return;
    }
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::NVSWITCH);
    let manager = &snapshot.system.has_fabric_manager;
    let switches = count(lang, switches, "NVSwitch", "NVSwitch");
    let state = match manager {
        Reading::Known(true) => say!(lang, "runs", "실행 중"),
        Reading::Known(false) if snapshot.system.is_container() => {
            say!(
                lang,
                "not seen from this container",
                "이 컨테이너에서는 보이지 않음"
            )
        }
        Reading::Known(false) => say!(lang, "does not run", "실행되고 있지 않음"),
        Reading::Missing { .. } => say!(lang, "not seen", "확인하지 못함"),
    };
    sheet.fact(say!(
        lang,
        "{switches} on the bus, fabric manager {state}",
        "버스에 {switches}, 패브릭 매니저: {state}"
    ));
    // A container has processes of its own only.
    if *manager == Reading::Known(false) && !snapshot.system.is_container() {
        sheet.error(
            say!(
                lang,
                "the board has NVSwitches and NVIDIA's fabric manager does not run",
                "보드에 NVSwitch가 있지만 NVIDIA 패브릭 매니저가 실행되고 있지 않음"
            ),
            say!(
                lang,
                "NVLinks through the switches are not set up: CUDA programs fail when they start (error 802, \"system not yet \
                 initialized\"), and peer-to-peer is NS",
                "스위치를 지나는 NVLink가 설정되지 않았습니다. CUDA 프로그램은 시작할 때 실패하고(오류 802, \"system not yet initialized\"), \
                 P2P는 NS로 나옵니다"
            ),
            say!(
                lang,
                "`sudo systemctl enable --now nvidia-fabricmanager`; its version must be the driver's to the last digit; where it fails \
                 `sudo journalctl -u nvidia-fabricmanager` says why",
                "`sudo systemctl enable --now nvidia-fabricmanager`를 실행하세요. 버전이 드라이버와 끝자리까지 같아야 하며, 실패한 이유는 \
                 `sudo journalctl -u nvidia-fabricmanager`에 나옵니다"
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, machine};
    use paceline_gpu::snapshot::{Gap, PciDevice};

    fn board(manager: Reading<bool>) -> Snapshot {
        let mut snapshot = machine(8);
        snapshot.system.pci.push(PciDevice {
            address: "0000:c1:00.0".to_owned(),
            kind: PciKind::NvSwitch,
            id: (0x10de, 0x22a3),
            ..PciDevice::default()
        });
        snapshot.system.has_fabric_manager = manager;
        snapshot
    }

    #[test]
    fn a_board_with_switches_needs_its_manager() {
        check(
            judge,
            &board(false.into()),
            &["error: NVSwitch: `sudo systemctl enable"],
        );
        check(judge, &board(true.into()), &[]);
        check(judge, &board(Reading::missing(Gap::NoPermission)), &[]);
        let mut container = board(false.into());
        container.system.confined_by = vec!["docker".to_owned()];
        check(judge, &container, &[]);
    }

    #[test]
    fn a_machine_without_switches_needs_none() {
        let mut snapshot = machine(2);
        snapshot.system.has_fabric_manager = false.into();
        check(judge, &snapshot, &[]);
    }
}
