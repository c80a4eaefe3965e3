//! The PCI bus of a snapshot: the bridges above a device, and the nearest thing that two devices both hang on.

use std::collections::BTreeMap;

use crate::snapshot::{Ancestor, PciDevice, PciKind, System};

/// Most bridges above a device; real machines have six at most, and a snapshot from elsewhere may have a circle.
pub(crate) const DEPTH_MAX: usize = 32;

/// NVIDIA's number as a maker.
pub(crate) const NVIDIA: u16 = 0x10de;

/// Everything on the bus, by place. Nothing in a snapshot is believed: bridges may lie in a circle.
pub struct Bus<'a> {
    devices: BTreeMap<String, &'a PciDevice>,
    /// Whether there is but one NUMA node, so that all of the machine is in it.
    has_one_node: bool,
}

/// Where one end of a connection is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Spot {
    /// Its place on the bus.
    pub(crate) pci: Option<String>,
    /// Its NUMA node.
    pub(crate) numa_node: Option<u32>,
}

impl<'a> Bus<'a> {
    /// The bus of a machine.
    pub fn of(system: &'a System) -> Self {
        let device = |device: &'a PciDevice| (place(&device.address), device);
        Self {
            devices: system.pci.iter().map(device).collect(),
            has_one_node: system.numa.len() <= 1,
        }
    }

    /// Whether nothing of the bus is known.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// The device at a place.
    pub fn get(&self, place_of_it: &str) -> Option<&'a PciDevice> {
        self.devices.get(&place(place_of_it)).copied()
    }

    /// All devices, ascending by place.
    pub(crate) fn devices(&self) -> impl Iterator<Item = (&str, &'a PciDevice)> {
        self.devices
            .iter()
            .map(|(place, device)| (&**place, *device))
    }

    /// NVIDIA's devices of a kind.
    pub fn of_nvidia(&self, kind: PciKind) -> impl Iterator<Item = &'a PciDevice> {
        let all = self.devices.values().copied();
        all.filter(move |device| device.kind == kind && device.id.0 == NVIDIA)
    }

    /// The device itself and the bridges above it, the nearest first.
    pub fn way_up(&self, address: &str) -> Vec<&'a PciDevice> {
        let above = |device: &&'a PciDevice| self.get(device.parent.as_deref()?);
        std::iter::successors(self.get(address), above)
            .take(DEPTH_MAX)
            .collect()
    }

    /// The bridge that a device is plugged into.
    pub fn slot(&self, address: &str) -> Option<&'a PciDevice> {
        self.way_up(address).get(1).copied()
    }

    /// Places of the bridges above a device, the nearest one first.
    pub(crate) fn above(&self, device: &PciDevice) -> Vec<String> {
        let way = self.way_up(&device.address).into_iter().skip(1);
        way.map(|bridge| place(&bridge.address)).collect()
    }

    /// Bridges on the way from `a` to `b` that lie below the nearest one above both; nothing where they share none.
    pub fn between(&self, a: &str, b: &str) -> Option<Vec<&'a PciDevice>> {
        let (up, other) = (self.way_up(a), self.way_up(b));
        let top = up.iter().skip(1).find(|device| other.contains(device))?;
        let below = |way: &[&'a PciDevice]| {
            let below = way.iter().skip(1).take_while(|device| device != &top);
            below.copied().collect::<Vec<_>>()
        };
        Some([below(&up), below(&other)].concat())
    }

    /// The nearest thing that both hang on; nothing where that is not known.
    ///
    /// A switch is two bridges below each other: its port towards the host, and one of its ports towards devices. So devices
    /// on two ports of one switch have one bridge each between them and the one they share, and more than that is more than
    /// one switch.
    ///
    /// *Source*: the levels are those of `nvmlGpuTopologyLevel_t`, and NCCL counts a switch as two bridges likewise.
    pub(crate) fn nearest(&self, one: &Spot, other: &Spot) -> Option<Ancestor> {
        let find = |spot: &Spot| spot.pci.as_deref().and_then(|place| self.get(place));
        let (a, b) = (find(one), find(other));
        let both = a.zip(b);
        if let Some(near) = both.and_then(|(a, b)| self.below_host_bridge(a, b)) {
            return Some(near);
        }
        let node = |on_bus: Option<&PciDevice>, spot: &Spot| {
            let by_bus = on_bus.and_then(|device| device.numa_node.known().copied());
            by_bus.or(spot.numa_node)
        };
        match (node(a, one), node(b, other)) {
            (Some(a), Some(b)) if a != b => Some(Ancestor::System),
            // One that is not on the bus may be as near as one switch.
            _ if both.is_none() => None,
            (Some(_), Some(_)) => Some(Ancestor::Node),
            // The firmware of most machines with one node names none.
            _ if self.has_one_node => Some(Ancestor::Node),
            _ => None,
        }
    }

    /// The same for two that share a bridge or a host bridge.
    fn below_host_bridge(&self, a: &PciDevice, b: &PciDevice) -> Option<Ancestor> {
        if place(&a.address) == place(&b.address) {
            return Some(Ancestor::Bridge);
        }
        let (above_a, above_b) = (self.above(a), self.above(b));
        let shared = above_a.iter().enumerate().find_map(|(below_a, bridge)| {
            let below_b = above_b.iter().position(|other| other == bridge)?;
            Some(below_a.max(below_b))
        });
        match shared {
            Some(0 | 1) => Some(Ancestor::Bridge),
            Some(_) => Some(Ancestor::Bridges),
            None if !a.root.is_empty() && a.root == b.root => Some(Ancestor::HostBridge),
            None => None,
        }
    }
}

/// A place as the kernel writes it: NVML has eight digits for the domain, the kernel four.
pub(crate) fn place(text: &str) -> String {
    let text = text.to_ascii_lowercase();
    match text.split_once(':') {
        Some((domain, rest)) if domain.len() > 4 && rest.contains(':') => {
            format!("{:0>4}:{rest}", domain.trim_start_matches('0'))
        }
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::{Gap, NumaNode, Reading};

    /// `host bridge/bridge/.../device`, and its NUMA node.
    fn device(path: &str, node: Option<u32>) -> Vec<PciDevice> {
        let parts: Vec<&str> = path.split('/').collect();
        let numa_node = node.map_or(Reading::missing(Gap::NotSupported), Reading::Known);
        let one = |at: usize| PciDevice {
            address: parts[at].to_owned(),
            parent: (at > 1).then(|| parts[at - 1].to_owned()),
            root: parts[0].to_owned(),
            numa_node: numa_node.clone(),
            ..PciDevice::default()
        };
        (1..parts.len()).map(one).collect()
    }

    fn check(one: &str, other: &str, nodes: usize, expect: Option<Ancestor>) {
        let with_node = |path: &str| match path.split_once('@') {
            Some((path, node)) => device(path, node.parse().ok()),
            None => device(path, None),
        };
        let (a, b) = (with_node(one), with_node(other));
        let spot = |devices: &[PciDevice]| Spot {
            pci: devices.last().map(|device| device.address.clone()),
            numa_node: None,
        };
        let (at_a, at_b) = (spot(&a), spot(&b));
        let system = System {
            pci: [a, b].concat(),
            numa: vec![NumaNode::default(); nodes],
            ..System::default()
        };
        let bus = Bus::of(&system);
        assert_eq!(bus.nearest(&at_a, &at_b), expect, "{one} and {other}");
        assert_eq!(bus.nearest(&at_b, &at_a), expect, "{other} and {one}");
    }

    #[test]
    fn the_nearest_thing_that_two_devices_share_has_its_code() {
        use Ancestor::*;
        // Two functions of one card, and two ports of one switch.
        check("h0/r/c.0", "h0/r/c.1", 1, Some(Bridge));
        check("h0/r/u/d1/a", "h0/r/u/d2/b", 2, Some(Bridge));
        // A switch below a switch, and two switches below one port.
        check("h0/r/u/d1/v/e/a", "h0/r/u/d2/b", 1, Some(Bridges));
        check("h0/r/u/d1/a", "h0/r/v/e1/b", 1, Some(Bridges));
        // Two ports of one host bridge, with and without a switch, and right on it as in virtual machines.
        check("h0/r1/a", "h0/r2/b", 1, Some(HostBridge));
        check("h0/r1/u/d/a", "h0/r2/b@1", 2, Some(HostBridge));
        check("h0/a", "h0/b", 1, Some(HostBridge));
        // Two host bridges.
        check("h0/r1/a@0", "h1/r2/b@0", 2, Some(Node));
        check("h0/r1/a@0", "h1/r2/b@1", 2, Some(System));
    }

    #[test]
    fn a_machine_with_one_node_need_not_name_it() {
        check("h0/r1/a", "h1/r2/b", 1, Some(Ancestor::Node));
        check("h0/r1/a", "h1/r2/b", 0, Some(Ancestor::Node));
        check("h0/r1/a@0", "h1/r2/b", 1, Some(Ancestor::Node));
        check("h0/r1/a@0", "h1/r2/b", 2, None);
        check("h0/r1/a", "h1/r2/b", 2, None);
    }

    #[test]
    fn a_device_that_the_system_does_not_show_is_far_only_where_its_node_says_so() {
        let mut pci = device("h0/r1/a", Some(0));
        pci.extend(device("h1/r2/b", Some(1)));
        let system = System {
            pci,
            numa: vec![NumaNode::default(); 2],
            ..System::default()
        };
        let bus = Bus::of(&system);
        let spot = |pci: &str, numa_node| Spot {
            pci: Some(pci.to_owned()),
            numa_node,
        };
        let hidden = spot("hidden", Some(1));
        let far = bus.nearest(&spot("a", None), &hidden);
        assert_eq!(far, Some(Ancestor::System));
        assert_eq!(bus.nearest(&spot("b", None), &hidden), None);
    }

    #[test]
    fn the_bridges_between_two_devices_are_those_below_the_one_above_both() {
        let mut pci = device("h0/root/up/down1/a", None);
        pci.extend(device("h0/root/up/down2/b", None));
        pci.extend(device("h1/far/c", None));
        let system = System {
            pci,
            ..System::default()
        };
        let bus = Bus::of(&system);
        let names = |a, b| {
            let between = bus.between(a, b)?.into_iter();
            Some(between.map(|device| &*device.address).collect::<Vec<_>>())
        };
        assert_eq!(names("a", "b"), Some(vec!["down1", "down2"]));
        assert_eq!(names("a", "c"), None);
        assert_eq!(names("a", "nobody"), None);
        assert_eq!(bus.slot("a").map(|slot| &*slot.address), Some("down1"));
    }

    #[test]
    fn a_circle_of_bridges_ends() {
        let mut pci = device("h0/a/b/c", None);
        pci[0].parent = Some("b".to_owned());
        let system = System {
            pci,
            ..System::default()
        };
        let bus = Bus::of(&system);
        assert_eq!(bus.way_up("c").len(), DEPTH_MAX);
        assert!(bus.between("a", "c").is_some());
    }

    #[test]
    fn the_drivers_places_are_the_kernels() {
        let check = |text, expect| assert_eq!(place(text), expect);
        check("0000:18:00.0", "0000:18:00.0");
        check("00000000:3B:00.0", "0000:3b:00.0");
        check("00010000:3B:00.0", "10000:3b:00.0");
        check("10000:e1:00.0", "10000:e1:00.0");
        check("nonsense", "nonsense");
    }
}
