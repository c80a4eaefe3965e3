//! The PCI bus: GPUs, NVSwitches, network cards, and every bridge above one.

mod acs;

use std::collections::BTreeMap;

use super::{CHARS_MAX, LINE_BYTES_MAX, numa, numa_node, text, try_line};
pub(super) use crate::bus::NVIDIA;
use crate::host::Host;
use crate::snapshot::{Gap, PciDevice, PciKind, PcieLink, Reading};
use paceline_words::plain;

const FOLDER: &str = "/sys/bus/pci/devices";
/// Machines with hundreds of virtual functions have thousands.
const DEVICES_MAX: usize = 16_384;
/// Devices that are no bridges. With every virtual function of its network cards no machine that trains has more.
const ENDS_MAX: usize = 2048;
/// A chain of bridges; PCI has 256 buses.
const DEPTH_MAX: usize = 64;

pub(super) const AMD: u16 = 0x1002;
pub(super) const INTEL: u16 = 0x8086;

/// A device's place in the tree: what its link in [`FOLDER`] says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Place {
    /// Folder of its files.
    folder: String,
    /// The host bridge.
    root: String,
    /// Addresses from the host bridge down to itself.
    chain: Vec<String>,
}

/// What is there, in the order of addresses.
pub(super) fn read(host: &Host<'_>) -> Vec<PciDevice> {
    let mut found: BTreeMap<String, PciDevice> = BTreeMap::new();
    let names = host.names(FOLDER, DEVICES_MAX).unwrap_or_default();
    let ends = names.iter().filter(|name| is_address(name));
    let ends = ends.filter_map(|name| Some((name, end_kind(host, name)?)));
    for (name, kind) in ends.take(ENDS_MAX) {
        let place = place(host, name);
        let above = place.chain.len().saturating_sub(1);
        for (depth, bridge) in place.chain.iter().enumerate().take(above) {
            if found.contains_key(bridge) {
                continue;
            }
            let place = Place {
                folder: format!("{FOLDER}/{bridge}"),
                root: place.root.clone(),
                chain: place.chain[..=depth].to_vec(),
            };
            found.insert(
                bridge.clone(),
                device(host, bridge, PciKind::Bridge, &place),
            );
        }
        found.insert(name.clone(), device(host, name, kind, &place));
    }
    found.into_values().collect()
}

/// Folder of a device's files.
pub(super) fn folder(address: &str) -> String {
    format!("{FOLDER}/{address}")
}

/// The innermost PCI address in the target of one of sysfs's links.
pub(super) fn address_in(target: &str) -> Option<String> {
    let part = target.rsplit('/').find(|part| is_address(part))?;
    Some(part.to_owned())
}

/// `0000:18:00.0`, the domain being longer on some machines.
fn is_address(name: &str) -> bool {
    let mut parts = name.split([':', '.']);
    let hex = |part: Option<&str>, from: usize, to: usize| {
        part.is_some_and(|part| {
            (from..=to).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_hexdigit())
        })
    };
    let parts_fit = hex(parts.next(), 4, 8)
        && hex(parts.next(), 2, 2)
        && hex(parts.next(), 2, 2)
        && hex(parts.next(), 1, 1);
    parts_fit
        && parts.next().is_none()
        && name.matches('.').count() == 1
        && name.rfind('.') > name.rfind(':')
}

/// What a device is, if it is one that matters by itself.
fn end_kind(host: &Host<'_>, name: &str) -> Option<PciKind> {
    let class = hex(host, name, "class").ok()?;
    let vendor = hex(host, name, "vendor").unwrap_or(0);
    kind_of(class, vendor.try_into().unwrap_or(0))
}

/// *Source*: the PCI Code and ID Assignment Specification: base class, sub-class and programming interface, a byte each.
fn kind_of(class: u32, vendor: u16) -> Option<PciKind> {
    match (class >> 16, class >> 8) {
        // Virtual consoles and those of management processors are no devices that compute.
        (0x03, _) => [NVIDIA, AMD, INTEL]
            .contains(&vendor)
            .then_some(PciKind::Gpu),
        // Processing accelerators, of any maker.
        (_, 0x1200) => Some(PciKind::Gpu),
        (_, 0x0680) if vendor == NVIDIA => Some(PciKind::NvSwitch),
        (0x02, _) => Some(PciKind::Nic),
        _ => None,
    }
}

/// A number in hexadecimal, with `0x` before it.
fn hex(host: &Host<'_>, name: &str, file: &str) -> Result<u32, Gap> {
    let text = try_line(host, &format!("{FOLDER}/{name}/{file}"))?;
    let digits = text.strip_prefix("0x").unwrap_or(&text);
    u32::from_str_radix(digits, 16).map_err(Gap::other)
}

/// The tree is read from the text of the link and not by following it: it cannot lead out of the root.
fn place(host: &Host<'_>, name: &str) -> Place {
    let folder = folder(name);
    let target = host.link(&folder).unwrap_or_default();
    let parts: Vec<&str> = target.split('/').collect();
    // The last one: controllers that make a domain of their own hang below a device of another.
    let root = parts.iter().rposition(|part| is_host_bridge(part));
    let below = root.map_or(&parts[..0], |root| &parts[root + 1..]);
    let mut chain: Vec<String> = below
        .iter()
        .filter(|part| is_address(part))
        .take(DEPTH_MAX)
        .map(|part| (*part).to_owned())
        .collect();
    if chain.last().is_none_or(|last| last != name) {
        chain = vec![name.to_owned()];
    }
    Place {
        folder,
        root: root.map_or_else(String::new, |root| parts[root].to_owned()),
        chain,
    }
}

/// `pci0000:17`
fn is_host_bridge(part: &str) -> bool {
    let name = part
        .strip_prefix("pci")
        .and_then(|name| name.split_once(':'));
    let is_hex = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    name.is_some_and(|(domain, bus)| is_hex(domain) && is_hex(bus))
}

fn device(host: &Host<'_>, name: &str, kind: PciKind, place: &Place) -> PciDevice {
    let folder = &place.folder;
    let id = |file| hex(host, name, file).ok().and_then(|id| id.try_into().ok());
    let above = place.chain.len().checked_sub(2);
    let group = host.link_name(&format!("{folder}/iommu_group"));
    PciDevice {
        address: name.to_owned(),
        parent: above.map(|above| place.chain[above].clone()),
        root: place.root.clone(),
        kind,
        id: (id("vendor").unwrap_or(0), id("device").unwrap_or(0)),
        link: link(host, folder).into(),
        numa_node: numa_node(host, folder),
        cpus: numa::cpus_near(host, folder).into(),
        driver: host
            .link_name(&format!("{folder}/driver"))
            .map(|name| plain(&name, CHARS_MAX)),
        iommu_group: group
            .and_then(|group| group.parse().ok())
            .ok_or(Gap::NotSupported)
            .into(),
        // Reading the configuration of a device that sleeps wakes it; only bridges matter here.
        acs_redirects: match kind {
            PciKind::Bridge => acs::redirects(host, folder).into(),
            _ => Reading::default(),
        },
    }
}

fn link(host: &Host<'_>, folder: &str) -> Result<PcieLink, Gap> {
    let read = |file| text(host, &format!("{folder}/{file}"), LINE_BYTES_MAX);
    let link = PcieLink {
        generation: generation(&read("current_link_speed")?),
        generation_max: generation(&read("max_link_speed")?),
        lanes: lanes(&read("current_link_width")?),
        lanes_max: lanes(&read("max_link_width")?),
    };
    // Devices within a processor, and those of virtual machines, have no link and say so by zeros.
    match link == PcieLink::default() {
        true => Err(Gap::NotSupported),
        false => Ok(link),
    }
}

/// `16.0 GT/s PCIe`, in older kernels `16 GT/s`; 0 for what is none.
fn generation(text: &str) -> u32 {
    match text.split_whitespace().next() {
        Some("2.5") => 1,
        Some("5.0" | "5") => 2,
        Some("8.0" | "8") => 3,
        Some("16.0" | "16") => 4,
        Some("32.0" | "32") => 5,
        Some("64.0" | "64") => 6,
        _ => 0,
    }
}

/// 255 where the kernel does not know.
fn lanes(text: &str) -> u32 {
    let lanes = text.trim().parse().unwrap_or(0);
    if lanes <= 32 { lanes } else { 0 }
}

#[cfg(test)]
mod tests;
