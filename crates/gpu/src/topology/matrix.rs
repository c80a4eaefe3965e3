//! The matrix of connections and those of peer-to-peer, in nvidia-smi's codes.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::ends::{End, EndKind};
use crate::bus::{Bus, place};
use crate::snapshot::{Ancestor, Capability, Device, Link, P2pStatus, Remote, Snapshot};

/// What is not known.
pub(super) const UNKNOWN: &str = "?";

/// A code for each pair of ends; each row is one end's way to all.
pub(super) type Codes = Vec<Vec<String>>;

/// One capability of peer-to-peer between GPUs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct P2p {
    /// What is asked.
    pub capability: Capability,
    /// The driver's answers: `X`, `OK`, `CNS`, `GNS`, `TNS`, `DR`, `NS`, `U`, or `?` where there is no answer.
    pub codes: Codes,
}

/// What a code means.
pub(super) fn meaning(code: &str) -> &'static str {
    match code {
        "X" => "the device itself",
        "NV#" => "by this number of NVLinks, straight or through NVSwitches",
        "PIX" => "by PCIe through one switch at most, or on one board",
        "PXB" => "by PCIe through several switches, and no CPU",
        "PHB" => "by PCIe through a host bridge, which is in the CPU",
        "NODE" => "through several host bridges of one NUMA node",
        "SYS" => "from NUMA node to NUMA node, by the link between CPUs",
        "OK" => "supported, says the driver",
        "CNS" => "not supported by the chipset",
        "GNS" => "not supported by the GPU",
        "TNS" => "not supported over the way between the two",
        "DR" => "disabled by a setting of the driver",
        "NS" => "not supported",
        "U" => "unknown to the driver",
        _ => "not told; the notes say why",
    }
}

/// The nearest things first, as a legend lists them.
pub(super) const CONNECTION_CODES: [&str; 8] =
    ["X", "NV#", "PIX", "PXB", "PHB", "NODE", "SYS", UNKNOWN];

/// In the order of nvidia-smi's legend.
pub(super) const P2P_CODES: [&str; 8] = ["X", "OK", "CNS", "GNS", "TNS", "NS", "DR", "U"];

fn ancestor_code(ancestor: Ancestor) -> &'static str {
    match ancestor {
        Ancestor::Board | Ancestor::Bridge => "PIX",
        Ancestor::Bridges => "PXB",
        Ancestor::HostBridge => "PHB",
        Ancestor::Node => "NODE",
        Ancestor::System => "SYS",
    }
}

/// What the driver says about each ordered pair.
pub(super) fn links(snapshot: &Snapshot) -> BTreeMap<(u32, u32), &Link> {
    let links = snapshot.links.iter();
    links.map(|link| ((link.from, link.to), link)).collect()
}

/// How all ends are connected. `ends` begins with the snapshot's devices.
pub(super) fn connections(snapshot: &Snapshot, bus: &Bus<'_>, ends: &[End]) -> Codes {
    let links = links(snapshot);
    let code = |(row, one): (usize, &End), (column, other): (usize, &End)| {
        if row == column {
            return "X".to_owned();
        }
        let gpu = |at: usize, end: &End| {
            let devices = snapshot.devices.get(at);
            devices.filter(|_| end.kind == EndKind::Gpu)
        };
        let mut ancestor = None;
        if let Some((a, b)) = gpu(row, one).zip(gpu(column, other)) {
            let lines = nvlinks(a, b);
            if lines > 0 {
                return format!("NV{lines}");
            }
            let known = |from: &Device, to: &Device| {
                links
                    .get(&(from.index, to.index))?
                    .ancestor
                    .known()
                    .copied()
            };
            ancestor = known(a, b).or_else(|| known(b, a));
        }
        let ancestor = ancestor.or_else(|| bus.nearest(&one.spot(), &other.spot()));
        ancestor.map_or(UNKNOWN, ancestor_code).to_owned()
    };
    matrix(ends, code)
}

fn matrix<T>(all: &[T], code: impl Fn((usize, &T), (usize, &T)) -> String) -> Codes {
    let row = |one: (usize, &T)| -> Vec<String> {
        all.iter()
            .enumerate()
            .map(|other| code((one.0, one.1), other))
            .collect()
    };
    all.iter().enumerate().map(row).collect()
}

/// NVLinks that are up between two devices: straight ones, else the smaller number of those to NVSwitches.
///
/// Of straight ones the smaller number that one of the two counts; one that cannot count does not matter.
fn nvlinks(a: &Device, b: &Device) -> usize {
    let smaller = |one: Option<usize>, other: Option<usize>| match (one, other) {
        (Some(one), Some(other)) => one.min(other),
        (one, other) => one.or(other).unwrap_or(0),
    };
    let straight = |from: &Device, to: &Device| {
        let address = place(to.pci.known()?);
        let leads_there = |pci: Option<&String>| pci.is_some_and(|pci| place(pci) == address);
        up(from, |link| leads_there(link.remote_pci.known()))
    };
    match smaller(straight(a, b), straight(b, a)) {
        0 => {
            let switched = |device| {
                let lines = up(device, |link| link.remote.known() == Some(&Remote::Switch));
                lines.unwrap_or(0)
            };
            switched(a).min(switched(b))
        }
        lines => lines,
    }
}

/// How many of a device's NVLinks are up and of this kind; nothing where it has none that are known.
fn up(device: &Device, fits: impl Fn(&crate::snapshot::NvLink) -> bool) -> Option<usize> {
    let links = device.nvlinks.known().filter(|links| !links.is_empty())?;
    let up = links
        .iter()
        .filter(|link| link.is_active.known() == Some(&true));
    Some(up.filter(|link| fits(link)).count())
}

/// The driver's answers for every capability.
pub(super) fn p2p(snapshot: &Snapshot) -> Vec<P2p> {
    let links = links(snapshot);
    let all = Capability::ALL.iter().enumerate();
    let of = |(number, capability): (usize, &Capability)| P2p {
        capability: *capability,
        codes: matrix(&snapshot.devices, |(row, from), (column, to)| {
            if row == column {
                return "X".to_owned();
            }
            let link = links.get(&(from.index, to.index));
            let status = link.and_then(|link| link.p2p.get(number)?.known().copied());
            status.map_or(UNKNOWN, P2pStatus::code).to_owned()
        }),
    };
    all.map(of).collect()
}

/// Capabilities whose answers are the same, in the order of the first of each.
pub(super) fn same(all: &[P2p]) -> Vec<Vec<&P2p>> {
    let mut groups: Vec<Vec<&P2p>> = Vec::new();
    for one in all {
        match groups
            .iter_mut()
            .find(|group| group.first().is_some_and(|first| first.codes == one.codes))
        {
            Some(group) => group.push(one),
            None => groups.push(vec![one]),
        }
    }
    groups
}

/// The codes that occur; all numbers of NVLinks are one.
pub(super) fn occurring<'a>(all: impl IntoIterator<Item = &'a Codes>) -> BTreeSet<String> {
    let is_nvlinks = |code: &str| {
        code.strip_prefix("NV")
            .is_some_and(|rest| rest.parse::<usize>().is_ok())
    };
    let codes = all.into_iter().flatten().flatten();
    codes
        .map(|code| {
            if is_nvlinks(code) {
                "NV#".to_owned()
            } else {
                code.clone()
            }
        })
        .collect()
}

/// What people call it.
pub(super) fn capability_word(capability: Capability) -> &'static str {
    match capability {
        Capability::Read => "read",
        Capability::Write => "write",
        Capability::NvLink => "NVLink",
        Capability::Atomics => "atomics",
        Capability::Pcie => "PCIe",
    }
}
