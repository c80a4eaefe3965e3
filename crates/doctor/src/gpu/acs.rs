//! Access Control Services of PCIe bridges, which send what one device writes to another up to the CPU.
//!
//! *Source*: "PCI Access Control Services" in NCCL's user guide; the PCI Express base specification: request redirect makes a
//! switch's downstream port send peer-to-peer requests upstream.

use std::collections::{BTreeMap, BTreeSet};

use paceline_gpu::bus::Bus;
use paceline_gpu::snapshot::{PciDevice, PciKind, Reading, Snapshot};
use paceline_words::say;

use super::rules::indices;
use super::words::{gpus, gpus_that, joined};
use crate::checks;
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
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::ACS);
    sheet.fact(match (bridges.len(), known.count()) {
        (0, _) => say!(
            lang,
            "no bridge above the GPUs is seen",
            "GPU 위에 보이는 브리지가 없음"
        ),
        (_, 0) => say!(
            lang,
            "not readable, which needs root",
            "root 권한이 있어야 읽을 수 있음"
        ),
        (all, some) => {
            let on = bridges.iter().filter(|bridge| redirects(bridge)).count();
            let of = match some < all {
                true => say!(
                    lang,
                    " that can be read, of {all}",
                    "(전체 {all}개 중 읽을 수 있는 것)"
                ),
                false => String::new(),
            };
            say!(
                lang,
                "redirects at {on} of {some} bridges{of}",
                "브리지 {some}개{of} 중 {on}개에서 우회시킴"
            )
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
    let whom = gpus_that(&suffering, "exchanges", "exchange", lang);
    let names = joined(named, lang);
    sheet.warning(
        say!(
            lang,
            "ACS sends what {whom} below a PCIe switch up to the CPU and back, at {names}",
            "ACS 때문에 PCIe 스위치 아래 {whom}의 데이터가 CPU까지 올라갔다 내려옴(브리지 {names})"
        ),
        say!(
            lang,
            "what GPUs send each other, or a network card, takes the long way: jobs crawl, or hang where it does not arrive",
            "GPU끼리 또는 네트워크 카드와 주고받는 데이터가 먼 길로 돌아갑니다. 작업이 매우 느려지거나, 데이터가 도착하지 않으면 멈춥니다"
        ),
        match snapshot.system.virtual_machine().is_some() {
            true => say!(
                lang,
                "a virtual machine needs ACS: have the host's administrator switch ATS on in the network adapters, or train on the bare \
                 machine",
                "가상 머신에는 ACS가 필요합니다. 호스트 관리자에게 네트워크 어댑터의 ATS를 켜 달라고 하거나, 베어메탈에서 학습하세요"
            ),
            false => say!(
                lang,
                "switch ACS off in the firmware (often part of VT-d, AMD-Vi or \"IO virtualization\"); or until the next start, for each of \
                 these bridges, `sudo setpci -s {first} ECAP_ACS+0x6.w=0000`",
                "펌웨어에서 ACS를 끄세요(VT-d, AMD-Vi, \"IO virtualization\"에 포함된 경우가 많습니다). 다음 재시작 전까지만이라면 브리지마다 `sudo setpci -s \
                 {first} ECAP_ACS+0x6.w=0000`을 실행하세요"
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
        let lang = notes.lang;
        let whom = gpus(&of, lang);
        notes.sheet(checks::ACS).note(
            say!(
                lang,
                "ACS redirects above {whom}, which share no PCIe switch",
                "{whom}: 상위 브리지의 ACS가 데이터를 우회시킴(공유하는 PCIe 스위치는 없음)"
            ),
            say!(
                lang,
                "what they exchange goes by way of the CPU in any case; with an IOMMU that translates, peer-to-peer between them is slower or fails",
                "어차피 데이터는 CPU를 거칩니다. 주소를 변환하는 IOMMU까지 있으면 P2P가 더 느려지거나 실패합니다"
            ),
            say!(
                lang,
                "nothing, unless peer-to-peer is to be used here: then ACS off in the firmware, or `iommu=pt`",
                "할 일이 없습니다. 다만 여기서 P2P를 쓰려면 펌웨어에서 ACS를 끄거나 `iommu=pt`를 설정하세요"
            ),
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
