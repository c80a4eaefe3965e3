//! NVSwitch boards: without NVIDIA's fabric manager their NVLinks stay down.
//!
//! *Source*: NVIDIA's "Fabric Manager for NVIDIA NVSwitch Systems"; `p2p_caps.c` of NVIDIA's open kernel modules: where an
//! NVSwitch is there and NVLink is not set up, no other way between GPUs is offered.

use paceline_gpu::bus::Bus;
use paceline_gpu::snapshot::{PciKind, Reading, Snapshot};

use crate::finding::{Notes, count};

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
    let mut sheet = notes.sheet("NVSwitch");
    let manager = &snapshot.system.has_fabric_manager;
    sheet.fact(format!(
        "{} on the bus, fabric manager {}",
        count(switches, "NVSwitch"),
        match manager {
            Reading::Known(true) => "runs",
            Reading::Known(false) if snapshot.system.is_container() =>
                "not seen from this container",
            Reading::Known(false) => "does not run",
            Reading::Missing { .. } => "not seen",
        }
    ));
    // A container has processes of its own only.
    if *manager == Reading::Known(false) && !snapshot.system.is_container() {
        sheet.error(
            "the board has NVSwitches and NVIDIA's fabric manager does not run",
            "NVLinks through the switches are not set up: CUDA programs fail when they start (error 802, \"system not yet \
             initialized\"), and peer-to-peer is NS",
            "`sudo systemctl enable --now nvidia-fabricmanager`; its version must be the driver's to the last digit; where it fails \
             `sudo journalctl -u nvidia-fabricmanager` says why",
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
