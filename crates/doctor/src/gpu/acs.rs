//! Access Control Services of PCIe bridges, which send what one device writes to another up to the CPU.
//!
//! *Source*: "PCI Access Control Services" in NCCL's user guide; the PCI Express base specification: request redirect makes a
//! switch's downstream port send peer-to-peer requests upstream.

use std::collections::{BTreeMap, BTreeSet};

use paceline_gpu::bus::Bus;
use paceline_gpu::snapshot::{PciDevice, PciKind, Reading, Snapshot};

use super::rules::indices;
use super::words::{gpus, gpus_that, joined};
use crate::finding::{Notes, plain};

/// Network cards that are looked at; a snapshot from elsewhere may name any number.
const NICS_MAX: usize = 256;

/// Bridges that redirect on the short way between two GPUs, or a GPU and a network card for RDMA, and the GPUs that suffer.
pub(super) fn in_the_way(snapshot: &Snapshot) -> BTreeMap<String, BTreeSet<u32>> {
    let bus = Bus::of(&snapshot.system);
    let places = snapshot.devices.iter().filter_map(|device| {
        let place = device.pci.known()?;
        Some((place.as_str(), Some(device.index)))
    });
    let rdma = snapshot.system.nics.iter().filter(|nic| nic.is_rdma);
    let rdma = rdma.take(NICS_MAX);
    let rdma = rdma.filter_map(|nic| Some((nic.pci.as_deref()?, None)));
    let ends: Vec<(&str, Option<u32>)> = places.chain(rdma).collect();
    let mut found: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
    for (position, (a, first)) in ends.iter().enumerate() {
        for (b, second) in &ends[position + 1..] {
            let suffer = first.iter().chain(second);
            // Pairs of network cards do not matter here.
            if suffer.clone().next().is_none() {
                continue;
            }
            let between = bus.between(a, b).unwrap_or_default();
            for bridge in between.into_iter().filter(|bridge| redirects(bridge)) {
                found
                    .entry(bridge.address.clone())
                    .or_default()
                    .extend(suffer.clone());
            }
        }
    }
    found
}

fn redirects(bridge: &PciDevice) -> bool {
    bridge.acs_redirects == Reading::Known(true)
}

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    if snapshot.devices.is_empty() {
        return;
    }
    let bridges: Vec<&PciDevice> = snapshot
        .system
        .pci
        .iter()
        .filter(|device| device.kind == PciKind::Bridge)
        .collect();
    let known = bridges
        .iter()
        .filter(|bridge| bridge.acs_redirects.known().is_some());
    let mut sheet = notes.sheet("ACS");
    sheet.fact(match (bridges.len(), known.count()) {
        (0, _) => "no bridge above the GPUs is seen".to_owned(),
        (_, 0) => "not readable, which needs root".to_owned(),
        (all, some) => {
            let on = bridges.iter().filter(|bridge| redirects(bridge)).count();
            let of = if some < all {
                format!(" that can be read, of {all}")
            } else {
                String::new()
            };
            format!("redirects at {on} of {some} bridges{of}")
        }
    });
    let found = in_the_way(snapshot);
    if found.is_empty() {
        judge_roots(snapshot, notes);
        return;
    }
    let suffering: Vec<u32> = found.values().flatten().copied().collect();
    let named: Vec<String> = found.keys().map(|address| plain(address)).collect();
    let first = named.first().cloned().unwrap_or_default();
    let whom = gpus_that(&suffering, "exchanges", "exchange");
    let names = joined(named);
    sheet.warning(
        format!("ACS sends what {whom} below a PCIe switch up to the CPU and back, at {names}"),
        "what GPUs send each other, or a network card, takes the long way: jobs crawl, or hang where it does not arrive",
        match snapshot.system.virtual_machine().is_some() {
            true => {
                "a virtual machine needs ACS: have the host's administrator switch ATS on in the network adapters, or train on the bare \
                 machine"
                    .to_owned()
            }
            false => format!(
                "switch ACS off in the firmware (often part of VT-d, AMD-Vi or \"IO virtualization\"); or until the next start, for each of \
                 these bridges, `sudo setpci -s {first} ECAP_ACS+0x6.w=0000`"
            ),
        },
    );
}

/// Ports that redirect although nothing takes a short way: what GPUs exchange goes by way of the CPU in any case.
fn judge_roots(snapshot: &Snapshot, notes: &mut Notes) {
    let bus = Bus::of(&snapshot.system);
    let of = indices(&snapshot.devices, |device| {
        let way = device.pci.known().map(|place| bus.way_up(place));
        way.is_some_and(|way| way.into_iter().skip(1).any(redirects))
    });
    if of.len() > 1 {
        notes.sheet("ACS").note(
            format!("ACS redirects above {}, which share no PCIe switch", gpus(&of)),
            "what they exchange goes by way of the CPU in any case; with an IOMMU that translates, peer-to-peer between them is slower or fails",
            "nothing, unless peer-to-peer is to be used here: then ACS off in the firmware, or `iommu=pt`",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{behind_one_switch, check, machine};
    use paceline_gpu::snapshot::{Gap, Nic};

    #[test]
    fn redirects_below_a_shared_switch_are_in_the_way() {
        let mut snapshot = behind_one_switch();
        check(judge, &snapshot, &[]);
        let down = |snapshot: &mut Snapshot, redirects: Reading<bool>| {
            let port = snapshot
                .system
                .pci
                .iter_mut()
                .find(|device| device.address == "0000:03:00.0");
            port.expect("a port").acs_redirects = redirects;
        };
        down(&mut snapshot, true.into());
        check(
            judge,
            &snapshot,
            &["warning: ACS: switch ACS off in the firmware"],
        );
        snapshot.system.confined_by = vec!["vmware".to_owned()];
        check(
            judge,
            &snapshot,
            &["warning: ACS: a virtual machine needs ACS"],
        );
        down(&mut snapshot, Reading::missing(Gap::NoPermission));
        check(judge, &snapshot, &[]);
    }

    #[test]
    fn redirects_where_no_short_way_leads_are_a_note() {
        // Both cards hang on root ports of their own: what they exchange goes by way of the CPU in any case.
        let mut snapshot = machine(2);
        for device in &mut snapshot.system.pci {
            device.acs_redirects = true.into();
        }
        check(judge, &snapshot, &["note: ACS: nothing, unless"]);
    }

    #[test]
    fn a_network_card_for_rdma_counts_as_an_end() {
        let mut snapshot = behind_one_switch();
        snapshot.devices.truncate(1);
        let port = snapshot
            .system
            .pci
            .iter_mut()
            .find(|device| device.address == "0000:03:01.0");
        port.expect("a port").acs_redirects = true.into();
        check(judge, &snapshot, &[]);
        snapshot.system.nics = vec![Nic {
            pci: Some("0000:05:00.0".to_owned()),
            is_rdma: true,
            ..Nic::default()
        }];
        check(judge, &snapshot, &["warning: ACS: switch ACS off"]);
    }
}
