//! The PCI bus of a snapshot: what is above a device.

use std::collections::BTreeMap;

use paceline_gpu::snapshot::{PciDevice, PciKind, Snapshot};

/// Bridges above one another; no machine has as many, and a snapshot may lie in a circle.
const DEPTH_MAX: usize = 32;

/// NVIDIA's number as a maker.
const NVIDIA: u16 = 0x10de;

/// The bus by addresses.
pub(super) struct Bus<'a> {
    by_address: BTreeMap<&'a str, &'a PciDevice>,
}

impl<'a> Bus<'a> {
    pub(super) fn new(snapshot: &'a Snapshot) -> Self {
        let named = |device: &'a PciDevice| (device.address.as_str(), device);
        Self {
            by_address: snapshot.system.pci.iter().map(named).collect(),
        }
    }

    /// Whether anything of the bus is known.
    pub(super) fn is_known(&self) -> bool {
        !self.by_address.is_empty()
    }

    pub(super) fn get(&self, address: &str) -> Option<&'a PciDevice> {
        self.by_address.get(address).copied()
    }

    /// The device itself and the bridges above it, the nearest first.
    pub(super) fn way_up(&self, address: &str) -> Vec<&'a PciDevice> {
        let above = |device: &&'a PciDevice| self.get(device.parent.as_deref()?);
        std::iter::successors(self.get(address), above)
            .take(DEPTH_MAX)
            .collect()
    }

    /// The bridge that a device is plugged into.
    pub(super) fn slot(&self, address: &str) -> Option<&'a PciDevice> {
        self.way_up(address).get(1).copied()
    }

    /// Bridges on the way from `a` to `b` that lie below the nearest one above both; nothing where they share none.
    pub(super) fn between(&self, a: &str, b: &str) -> Option<Vec<&'a PciDevice>> {
        let (up, other) = (self.way_up(a), self.way_up(b));
        let shares = |way: &[&PciDevice], device: &PciDevice| {
            way.iter().any(|known| known.address == device.address)
        };
        let top = up.iter().skip(1).find(|device| shares(&other, device))?;
        let below = |way: Vec<&'a PciDevice>| {
            let until = way.iter().position(|known| known.address == top.address);
            way.into_iter().take(until.unwrap_or(0)).skip(1)
        };
        Some(below(up).chain(below(other)).collect())
    }

    /// NVIDIA's devices of a kind.
    pub(super) fn of_nvidia(&self, kind: PciKind) -> impl Iterator<Item = &'a PciDevice> {
        let all = self.by_address.values().copied();
        all.filter(move |device| device.kind == kind && device.id.0 == NVIDIA)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bus(devices: &[(&str, Option<&str>)]) -> Snapshot {
        let device = |(address, parent): &(&str, Option<&str>)| PciDevice {
            address: (*address).to_owned(),
            parent: parent.map(str::to_owned),
            ..PciDevice::default()
        };
        let mut snapshot = Snapshot::default();
        snapshot.system.pci = devices.iter().map(device).collect();
        snapshot
    }

    #[test]
    fn the_bridges_between_two_devices_are_those_below_the_one_above_both() {
        let snapshot = bus(&[
            ("root", None),
            ("up", Some("root")),
            ("down1", Some("up")),
            ("down2", Some("up")),
            ("a", Some("down1")),
            ("b", Some("down2")),
            ("far", None),
            ("c", Some("far")),
        ]);
        let bus = Bus::new(&snapshot);
        let names = |a, b| {
            let between = bus.between(a, b)?;
            Some(
                between
                    .iter()
                    .map(|device| device.address.clone())
                    .collect::<Vec<_>>(),
            )
        };
        assert_eq!(names("a", "b"), Some(vec!["down1".into(), "down2".into()]));
        assert_eq!(names("a", "c"), None);
        assert_eq!(names("a", "nobody"), None);
        assert_eq!(
            bus.slot("a").map(|slot| slot.address.as_str()),
            Some("down1")
        );
    }

    #[test]
    fn a_bus_that_is_a_circle_ends() {
        let snapshot = bus(&[("a", Some("b")), ("b", Some("a"))]);
        assert_eq!(Bus::new(&snapshot).way_up("a").len(), DEPTH_MAX);
        assert!(Bus::new(&snapshot).between("a", "b").is_some());
    }
}
