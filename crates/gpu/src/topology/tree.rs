//! The PCIe tree: host bridges, switches and devices, with the link of each towards the host.
//!
//! Ports are folded: a port of a host bridge or a switch and the device in it are the two ends of one link, and one line.
//! A bridge is a line of its own where several things hang below it, or where its link is worse than what hangs below.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::ends::{End, EndKind};
use super::text::shown;
use crate::bus::{Bus, DEPTH_MAX, place};
use crate::columns::aligned;
use crate::snapshot::{Device, PciDevice, PciKind, PcieLink, Snapshot};
use paceline_words::counted;

/// A device that does this much is not idle, in percent of the driver's measuring period.
const BUSY_PERCENT: u32 = 10;

/// Network cards below one port that have a line each.
const NICS_MAX: usize = 8;

/// A host bridge and what hangs below it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Root {
    /// As the kernel calls it: `pci0000:17`.
    pub name: String,
    /// NUMA node of all below it, where they agree.
    pub numa_node: Option<u32>,
    /// What hangs below it.
    pub below: Vec<Branch>,
}

/// Something on the PCI bus, and what hangs below it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Branch {
    /// `GPU0`, `NIC0`, `NVSwitch`, `switch`, `bridge`.
    pub label: String,
    /// Model, or the network cards' own names.
    pub name: String,
    /// Place on the bus.
    pub pci: String,
    /// The link towards the host, where it is known.
    pub link: Option<LinkState>,
    /// Ports above it that have no line of their own, the uppermost first.
    pub through: Vec<String>,
    /// What hangs below it.
    pub below: Vec<Branch>,
}

/// A PCIe link, and what is to be thought of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LinkState {
    /// Speed and width now, and the most: of the device's own lanes, and of the generations that device and slot both can.
    #[serde(flatten)]
    pub link: PcieLink,
    /// Lanes of the slot, where they are fewer than the device's.
    pub slot_lanes: Option<u32>,
    /// Fewer lanes are in use than the device has.
    pub is_narrow: bool,
    /// The generation is lower than device and slot can, and it is not idleness.
    pub is_slow: bool,
    /// The generation is lower because the device is idle: it rises under load.
    pub is_resting: bool,
}

/// What is on the bus, with its labels.
pub(super) struct Grower<'a> {
    bus: &'a Bus<'a>,
    below: BTreeMap<String, Vec<&'a PciDevice>>,
    ends: &'a [End],
    snapshot: &'a Snapshot,
    /// Bridges that something hangs below.
    needed: BTreeSet<String>,
}

impl<'a> Grower<'a> {
    pub(super) fn new(bus: &'a Bus<'a>, ends: &'a [End], snapshot: &'a Snapshot) -> Self {
        let mut below: BTreeMap<String, Vec<&PciDevice>> = BTreeMap::new();
        let mut needed = BTreeSet::new();
        for (_, device) in bus.devices() {
            if let Some(parent) = &device.parent {
                below.entry(place(parent)).or_default().push(device);
            }
            if device.kind != PciKind::Bridge {
                needed.extend(bus.above(device));
            }
        }
        Self {
            bus,
            below,
            ends,
            snapshot,
            needed,
        }
    }

    /// The whole tree. What hangs in a circle, which only a damaged snapshot has, is not in it.
    pub(super) fn roots(&self) -> Vec<Root> {
        let mut roots: BTreeMap<String, Vec<&PciDevice>> = BTreeMap::new();
        for (_, device) in self.bus.devices() {
            let parent = device.parent.as_deref();
            if parent.is_none_or(|parent| self.bus.get(parent).is_none()) && self.is_needed(device)
            {
                roots.entry(shown(&device.root)).or_default().push(device);
            }
        }
        let root = |(name, devices): (String, Vec<&PciDevice>)| Root {
            numa_node: self.node_of(&devices),
            below: devices
                .iter()
                .map(|device| self.branch(device, 0))
                .collect(),
            name: if name.is_empty() {
                "host".to_owned()
            } else {
                name
            },
        };
        roots.into_iter().map(root).collect()
    }

    fn is_needed(&self, device: &PciDevice) -> bool {
        device.kind != PciKind::Bridge || self.needed.contains(&place(&device.address))
    }

    fn children(&self, device: &PciDevice) -> Vec<&'a PciDevice> {
        let below = self.below.get(&place(&device.address));
        let below = below.into_iter().flatten().copied();
        below.filter(|child| self.is_needed(child)).collect()
    }

    fn node_of(&self, devices: &[&PciDevice]) -> Option<u32> {
        let mut nodes = devices.iter().map(|device| device.numa_node.known());
        let first = nodes.next().flatten()?;
        nodes.all(|node| node == Some(first)).then_some(*first)
    }

    fn branch(&self, device: &'a PciDevice, depth: usize) -> Branch {
        let mut through = Vec::new();
        let mut at = device;
        let mut children = self.children(at);
        let mut deep = depth;
        while let (PciKind::Bridge, [only]) = (at.kind, &*children) {
            if self.is_worse(at, only) || deep >= DEPTH_MAX {
                break;
            }
            through.push(shown(&place(&at.address)));
            at = only;
            children = self.children(at);
            deep += 1;
        }
        let below = match deep < DEPTH_MAX {
            true => children
                .iter()
                .map(|child| self.branch(child, deep + 1))
                .collect(),
            false => Vec::new(),
        };
        let (label, name) = self.named(at, &children);
        Branch {
            label,
            name,
            pci: shown(&place(&at.address)),
            link: self.link(at),
            through,
            below,
        }
    }

    /// Whether a bridge's link holds back the only thing below it. A port's cannot: it is the same link.
    fn is_worse(&self, bridge: &PciDevice, below: &PciDevice) -> bool {
        // A generation has twice the speed of the one before. What hangs below may be idle now.
        let speed = |lanes: u32, generation: u32| u64::from(lanes) << generation.min(16);
        let (Some(above), Some(below)) = (self.link(bridge), self.link(below)) else {
            return false;
        };
        let now = speed(above.link.lanes, above.link.generation);
        let wanted = speed(below.link.lanes, below.link.generation_max);
        (above.is_narrow || above.is_slow) && now < wanted
    }

    fn named(&self, device: &PciDevice, children: &[&PciDevice]) -> (String, String) {
        let address = place(&device.address);
        let here = |end: &&End| end.pci.as_deref() == Some(&*address);
        let ends: Vec<&End> = self.ends.iter().filter(here).collect();
        if !ends.is_empty() {
            let join = |word: fn(&End) -> &str| {
                let words: Vec<&str> = ends.iter().map(|end| word(end)).collect();
                words.join(", ")
            };
            return (
                join(|end| &end.label),
                join(|end| end.name.as_deref().unwrap_or("")),
            );
        }
        let driver = device.driver.as_deref().map(shown);
        let driver = driver.map_or(String::new(), |driver| format!("({driver})"));
        let label = match device.kind {
            PciKind::Gpu => "GPU",
            PciKind::NvSwitch => "NVSwitch",
            PciKind::Nic => "NIC",
            PciKind::Bridge if children.iter().any(|child| child.kind == PciKind::Bridge) => {
                "switch"
            }
            PciKind::Bridge => "bridge",
        };
        match device.kind {
            PciKind::Bridge | PciKind::NvSwitch => (label.to_owned(), String::new()),
            PciKind::Gpu | PciKind::Nic => (label.to_owned(), driver),
        }
    }

    /// The driver knows of its devices' links better than the system, but what the slot allows is its maximum.
    fn link(&self, device: &PciDevice) -> Option<LinkState> {
        let address = place(&device.address);
        let is_it = |gpu: &&Device| gpu.pci.known().is_some_and(|pci| place(pci) == address);
        let gpu = self.snapshot.devices.iter().find(is_it);
        let by_driver = gpu
            .and_then(|gpu| gpu.pcie.known())
            .filter(|link| link.lanes > 0);
        let by_system = device.link.known();
        let above = device
            .parent
            .as_deref()
            .and_then(|parent| self.bus.get(parent));
        // A switch's own ports are joined inside it, and no slot.
        let is_inside =
            device.kind == PciKind::Bridge && above.is_some_and(|above| self.is_switch(above));
        let slot = above
            .filter(|_| !is_inside)
            .and_then(|above| above.link.known());
        let mut link = *by_driver.or(by_system)?;
        if let Some(own) = by_system {
            link.lanes_max = link.lanes_max.max(own.lanes_max);
        }
        if let Some(slot) = slot.filter(|slot| slot.generation_max > 0) {
            link.generation_max = link.generation_max.min(slot.generation_max);
        }
        let is_lower = link.generation > 0 && link.generation < link.generation_max;
        let other = self.snapshot.others.iter();
        let mut other = other.filter(|other| place(&other.pci) == address);
        let now = gpu
            .map(|gpu| &gpu.now)
            .or_else(|| other.next().map(|other| &other.now));
        let busy = now.and_then(|now| now.utilization_percent.known());
        // Without a word about it a GPU is taken to be idle, which most are when somebody looks at the wiring.
        let is_idle =
            device.kind == PciKind::Gpu && busy.is_none_or(|percent| *percent < BUSY_PERCENT);
        let lanes = slot.map(|slot| slot.lanes_max);
        Some(LinkState {
            link,
            slot_lanes: lanes.filter(|lanes| (1..link.lanes_max).contains(lanes)),
            is_narrow: link.lanes > 0 && link.lanes < link.lanes_max && !self.is_port(device),
            is_slow: is_lower && !is_idle && !self.is_port(device),
            is_resting: is_lower && is_idle,
        })
    }

    /// Whether a bridge is a switch's port towards the host: bridges hang below it, and it hangs below one.
    fn is_switch(&self, device: &PciDevice) -> bool {
        let below = self.below.get(&place(&device.address));
        let has_ports =
            below.is_some_and(|below| below.iter().any(|child| child.kind == PciKind::Bridge));
        device.kind == PciKind::Bridge
            && device.parent.is_some()
            && has_ports
            && !self.is_port(device)
    }

    /// Whether a bridge is a port for a device or another switch, so the upper end of their link: those of host bridges,
    /// and every second one below them.
    fn is_port(&self, device: &PciDevice) -> bool {
        device.kind == PciKind::Bridge && self.bus.above(device).len().is_multiple_of(2)
    }
}

impl LinkState {
    /// `x16 gen 5`, `x4 of x16, gen 3 of 4`.
    fn words(&self) -> String {
        let link = self.link;
        let part = |now: u32, most: u32, before: &str, of: &str| match (now, most) {
            (0, _) => None,
            (now, most) if now < most => Some((format!("{before}{now} of {of}{most}"), true)),
            (now, _) => Some((format!("{before}{now}"), false)),
        };
        match (
            part(link.lanes, link.lanes_max, "x", "x"),
            part(link.generation, link.generation_max, "gen ", ""),
        ) {
            (Some((lanes, false)), Some((generation, false))) => format!("{lanes} {generation}"),
            (Some((lanes, _)), Some((generation, _))) => format!("{lanes}, {generation}"),
            (Some((one, _)), None) | (None, Some((one, _))) => one,
            (None, None) => String::new(),
        }
    }

    fn mark(&self) -> String {
        let mut marks = Vec::new();
        if self.is_narrow {
            marks.push(match self.slot_lanes {
                Some(lanes) if lanes == self.link.lanes => format!("the slot has {lanes} lanes"),
                _ => format!("{} of its {} lanes", self.link.lanes, self.link.lanes_max),
            });
        }
        if self.is_slow {
            marks.push("below its generation".to_owned());
        }
        match marks.is_empty() {
            true if self.is_resting => "idle".to_owned(),
            true => String::new(),
            false => format!("<-- {}", marks.join(", ")),
        }
    }
}

/// The tree as lines, and what its marks mean.
pub(super) fn text(roots: &[Root]) -> String {
    let mut rows = Vec::new();
    for root in roots {
        let node = root.numa_node.map(|node| format!("NUMA node {node}"));
        rows.push(vec![root.name.clone(), node.unwrap_or_default()]);
        lines(&root.below, "", &mut rows);
    }
    let mut text = aligned(&rows);
    let links: Vec<LinkState> = roots.iter().flat_map(|root| links(&root.below)).collect();
    if links.iter().any(|link| link.is_narrow || link.is_slow) {
        text.push_str(
            "\n<--   less than the device can: a slot with fewer lanes, lanes shared between slots, a bad riser or\n      \
             contact, or the firmware's settings\n",
        );
    }
    if links.iter().any(|link| link.is_resting) {
        text.push_str("\nidle  the link's generation is lowered to save power, and rises under load: no fault\n");
    }
    text
}

fn links(branches: &[Branch]) -> Vec<LinkState> {
    let own = |branch: &Branch| {
        branch
            .link
            .into_iter()
            .chain(links(&branch.below))
            .collect::<Vec<_>>()
    };
    branches.iter().flat_map(own).collect()
}

/// Of more network cards below one port than [`NICS_MAX`], as virtual functions are, the others are counted.
fn lines(branches: &[Branch], before: &str, rows: &mut Vec<Vec<String>>) {
    let is_nic = |branch: &Branch| branch.label.starts_with("NIC") && branch.below.is_empty();
    let nics = branches.iter().filter(|branch| is_nic(branch)).count();
    let mut left = nics.min(NICS_MAX);
    let mut shown: Vec<&Branch> = Vec::new();
    for branch in branches {
        if is_nic(branch) {
            match left.checked_sub(1) {
                Some(fewer) => left = fewer,
                None => continue,
            }
        }
        shown.push(branch);
    }
    let more = nics.saturating_sub(NICS_MAX);
    for (number, branch) in shown.iter().enumerate() {
        let is_last = number + 1 == shown.len() && more == 0;
        let (turn, pass) = if is_last {
            ("└─ ", "   ")
        } else {
            ("├─ ", "│  ")
        };
        let link = branch.link.unwrap_or_default();
        rows.push(vec![
            format!("{before}{turn}{}", branch.label),
            branch.pci.clone(),
            link.words(),
            branch.name.clone(),
            link.mark(),
        ]);
        lines(&branch.below, &format!("{before}{pass}"), rows);
    }
    if more > 0 {
        rows.push(vec![format!(
            "{before}└─ and {} more",
            counted(more, "NIC")
        )]);
    }
}

/// Whether the tree has this kind of end.
pub(super) fn is_in(roots: &[Root], end: &End) -> bool {
    fn find(branches: &[Branch], pci: &str) -> bool {
        branches
            .iter()
            .any(|branch| branch.pci == pci || find(&branch.below, pci))
    }
    let pci = end.pci.as_deref();
    end.kind == EndKind::Nic
        || pci.is_some_and(|pci| roots.iter().any(|root| find(&root.below, pci)))
}
