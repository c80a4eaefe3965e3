//! The unit that translates addresses of devices.
//!
//! *Source*: "PCI Access Control Services" in NCCL's user guide (VT-d and IOMMU); `Documentation/ABI/testing/sysfs-kernel-iommu_groups`
//! of Linux for the modes; pytorch/pytorch issue 84803 (silent corruption, gone with the IOMMU off).

use paceline_gpu::snapshot::{Reading, Snapshot};

use super::pairs::{Pair, pairs};
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
    let mut sheet = notes.sheet("IOMMU");
    let iommu = &snapshot.system.iommu;
    let told = match iommu.parameters.is_empty() {
        true => String::new(),
        false => format!(
            "; the kernel was told {}",
            plain(&iommu.parameters.join(" "))
        ),
    };
    let state = match (&iommu.is_on, iommu.mode.known().map(String::as_str)) {
        (Reading::Known(false), _) => "off".to_owned(),
        (Reading::Known(true), Some("identity")) => "on, passes GPUs through (identity)".to_owned(),
        (Reading::Known(true), Some(mode)) => {
            format!("on, translates what GPUs send ({})", plain(mode))
        }
        (Reading::Known(true), None) => "on, how it treats GPUs is not known".to_owned(),
        (Reading::Missing { .. }, _) => "not known".to_owned(),
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
                format!("the IOMMU translates what GPUs send ({mode})"),
                "without peer-to-peer it costs copies between host and GPU a little; it would be in the way of peer-to-peer",
                "nothing, unless you bring peer-to-peer about: then `iommu=pt` on the kernel's command line",
            );
        }
        return;
    }
    sheet.warning(
        format!("the IOMMU translates what GPUs send to other devices ({mode})"),
        "what GPUs send each other or a network card takes the way through the CPU, slower; on many mainboards it hangs or arrives wrong",
        match snapshot.system.virtual_machine().is_some() {
            true => "the virtual machine has an IOMMU of its own: `iommu=pt` on its kernel's command line, or have it made without one",
            false => {
                "`iommu=pt` on the kernel's command line (/etc/default/grub, then `sudo update-grub` and a start of the machine) lets devices \
                 through as they are; where that does not help, switch VT-d or AMD-Vi (IOMMU) off in the firmware"
            }
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
