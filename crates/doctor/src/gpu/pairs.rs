//! Pairs of devices: what the driver says of peer-to-peer between them, whether NVLink joins them, what both hang on.

use std::collections::BTreeMap;

use paceline_gpu::snapshot::{
    Ancestor, Capability, Device, Link, NvLink, P2pStatus, Reading, Remote, Snapshot,
};

/// Two devices; what holds in one direction only counts for the worse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pair {
    /// The lower index first.
    pub(super) of: (u32, u32),
    /// Reading and writing, both ways: the first answer that is not `OK`. Nothing where the driver did not say.
    pub(super) status: Option<P2pStatus>,
    /// Whether NVLinks are up between them, directly or through switches.
    pub(super) has_nvlink: bool,
    /// The nearest thing that both hang on.
    pub(super) ancestor: Option<Ancestor>,
}

impl Pair {
    pub(super) fn is_ok(&self) -> bool {
        self.status == Some(P2pStatus::Ok)
    }

    /// Whether peer-to-peer goes over PCIe, as far as the driver allows it.
    pub(super) fn is_ok_over_pcie(&self) -> bool {
        self.is_ok() && !self.has_nvlink
    }
}

/// All pairs of the snapshot's devices, in the order of their indices.
pub(super) fn pairs(snapshot: &Snapshot) -> Vec<Pair> {
    let devices: BTreeMap<u32, &Device> = snapshot
        .devices
        .iter()
        .map(|device| (device.index, device))
        .collect();
    let mut links: BTreeMap<(u32, u32), Vec<&Link>> = BTreeMap::new();
    for link in &snapshot.links {
        let of = (link.from.min(link.to), link.from.max(link.to));
        links.entry(of).or_default().push(link);
    }
    let mut pairs = Vec::new();
    for (index, (a, first)) in devices.iter().enumerate() {
        for (b, second) in devices.iter().skip(index + 1) {
            let links = links.get(&(*a, *b)).map_or(&[][..], Vec::as_slice);
            pairs.push(Pair {
                of: (*a, *b),
                status: status(links),
                has_nvlink: says_nvlink(links) || are_joined(first, second),
                ancestor: links.iter().find_map(|link| link.ancestor.known().copied()),
            });
        }
    }
    pairs
}

fn answer(link: &Link, asked: Capability) -> Option<P2pStatus> {
    let position = Capability::ALL.iter().position(|known| *known == asked)?;
    link.p2p.get(position)?.known().copied()
}

fn status(links: &[&Link]) -> Option<P2pStatus> {
    let answers: Vec<P2pStatus> = links
        .iter()
        .flat_map(|link| [Capability::Read, Capability::Write].map(|asked| answer(link, asked)))
        .flatten()
        .collect();
    let bad = answers.iter().find(|answer| **answer != P2pStatus::Ok);
    bad.or(answers.first()).copied()
}

fn says_nvlink(links: &[&Link]) -> bool {
    links
        .iter()
        .any(|link| answer(link, Capability::NvLink) == Some(P2pStatus::Ok))
}

/// Whether both have links that are up towards each other, or towards switches.
fn are_joined(a: &Device, b: &Device) -> bool {
    let leads_to = |from: &Device, to: &Device| {
        let there = to.pci.known();
        active(from).any(|link| there.is_some() && link.remote_pci.known() == there)
    };
    let to_switch =
        |device: &Device| active(device).any(|link| link.remote.known() == Some(&Remote::Switch));
    leads_to(a, b) || leads_to(b, a) || (to_switch(a) && to_switch(b))
}

/// The device's NVLinks that are up.
pub(super) fn active(device: &Device) -> impl Iterator<Item = &NvLink> {
    let links = device.nvlinks.known().into_iter().flatten();
    links.filter(|link| link.is_active == Reading::Known(true))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{linked, machine};

    #[test]
    fn a_pair_is_as_good_as_the_worse_of_its_directions() {
        let check = |forth: P2pStatus, back: P2pStatus, expect: P2pStatus| {
            let mut snapshot = machine(2);
            snapshot.links = vec![linked(0, 1, forth), linked(1, 0, back)];
            assert_eq!(pairs(&snapshot)[0].status, Some(expect));
        };
        check(P2pStatus::Ok, P2pStatus::Ok, P2pStatus::Ok);
        check(
            P2pStatus::Ok,
            P2pStatus::NotSupported,
            P2pStatus::NotSupported,
        );
        check(
            P2pStatus::TopologyNotSupported,
            P2pStatus::Ok,
            P2pStatus::TopologyNotSupported,
        );
    }

    #[test]
    fn nothing_said_is_not_ok() {
        let mut snapshot = machine(2);
        assert_eq!(pairs(&snapshot)[0].status, None);
        snapshot.links = vec![Link {
            to: 1,
            ..Link::default()
        }];
        assert!(!pairs(&snapshot)[0].is_ok());
    }

    #[test]
    fn links_that_are_up_join_devices_directly_or_through_switches() {
        let link = |remote: Remote, pci: &str, is_active: bool| NvLink {
            is_active: is_active.into(),
            remote: remote.into(),
            remote_pci: pci.to_owned().into(),
            ..NvLink::default()
        };
        let check = |a: NvLink, b: NvLink, expect: bool| {
            let mut snapshot = machine(2);
            snapshot.devices[0].nvlinks = vec![a].into();
            snapshot.devices[1].nvlinks = vec![b].into();
            assert_eq!(pairs(&snapshot)[0].has_nvlink, expect);
        };
        let [first, second] = [0, 1].map(|index| {
            let snapshot = machine(2);
            snapshot.devices[index]
                .pci
                .known()
                .cloned()
                .expect("a place")
        });
        check(
            link(Remote::Gpu, &second, true),
            link(Remote::Gpu, &first, true),
            true,
        );
        check(
            link(Remote::Gpu, &second, false),
            link(Remote::Gpu, &first, false),
            false,
        );
        check(
            link(Remote::Switch, "0000:05:00.0", true),
            link(Remote::Switch, "0000:06:00.0", true),
            true,
        );
        check(
            link(Remote::Gpu, "0000:77:00.0", true),
            link(Remote::Gpu, "0000:78:00.0", true),
            false,
        );
    }
}
