//! Devices on the PCI bus as the kernel shows them: folders nested as the bridges are, and flat links to them.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::Node;
use super::tree::Tree;

/// Something on the bus, and what is below it.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Pci {
    /// A number such as `0x030200`, or one of the words of [`class`].
    class: String,
    /// Vendor and device: `10de:2330`.
    id: String,
    /// `gen5 x16`, or `gen1 x4 of gen5 x16` where the most is another; nothing where there is no such link.
    link: Option<String>,
    /// As above it if not given; -1 is not known.
    numa: Option<i32>,
    driver: Option<String>,
    iommu_group: Option<u32>,
    /// The control register of its Access Control Services; nothing where only root may read it.
    acs: Option<u16>,
    /// Network interfaces by name.
    net: BTreeMap<String, Interface>,
    /// RDMA devices by name.
    infiniband: BTreeMap<String, Rdma>,
    /// Other files.
    files: BTreeMap<String, String>,
    below: BTreeMap<String, Pci>,
}

/// A network interface.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Interface {
    is_up: bool,
    speed_mbps: i64,
}

/// An RDMA device.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rdma {
    is_up: bool,
    /// As the kernel writes it: `400 Gb/sec (4X NDR)`.
    rate: String,
    /// `InfiniBand` or `Ethernet`.
    layer: String,
}

/// What a device hangs on.
#[derive(Debug, Clone)]
pub(super) struct Above<'a> {
    folder: String,
    numa: i32,
    nodes: &'a [Node],
    iommu: Option<&'a str>,
}

impl<'a> Above<'a> {
    pub(super) fn host_bridge(name: &str, nodes: &'a [Node], iommu: Option<&'a str>) -> Self {
        Self {
            folder: format!("/sys/devices/{name}"),
            numa: -1,
            nodes,
            iommu,
        }
    }
}

impl Pci {
    /// Writes it and all that is below it.
    pub(super) fn write(&self, address: &str, above: &Above<'_>, tree: &mut Tree) {
        let numa = self.numa.unwrap_or(above.numa);
        let folder = format!("{}/{address}", above.folder);
        tree.link(&format!("/sys/bus/pci/devices/{address}"), &folder);
        tree.text(&format!("{folder}/class"), class(&self.class));
        let (vendor, device) = self.id.split_once(':').unwrap_or((&self.id, "0000"));
        tree.text(&format!("{folder}/vendor"), &format!("0x{vendor}"));
        tree.text(&format!("{folder}/device"), &format!("0x{device}"));
        tree.text(&format!("{folder}/numa_node"), &numa.to_string());
        let node = usize::try_from(numa)
            .ok()
            .and_then(|numa| above.nodes.get(numa));
        // Where the node is not known the kernel calls all CPUs near.
        let cpus = node.map_or_else(|| all_cpus(above.nodes), |node| node.cpus.clone());
        tree.text(&format!("{folder}/local_cpulist"), &cpus);
        if let Some(link) = &self.link {
            write_link(link, &folder, tree);
        }
        if let Some(driver) = &self.driver {
            let drivers = format!("/sys/bus/pci/drivers/{driver}");
            tree.folder(&drivers);
            tree.link(&format!("{folder}/driver"), &drivers);
        }
        if let (Some(group), Some(kind)) = (self.iommu_group, above.iommu) {
            let groups = format!("/sys/kernel/iommu_groups/{group}");
            tree.text(&format!("{groups}/type"), kind);
            tree.link(&format!("{groups}/devices/{address}"), &folder);
            tree.link(&format!("{folder}/iommu_group"), &groups);
        }
        tree.file(&format!("{folder}/config"), &self.config(vendor, device));
        self.write_networks(&folder, tree);
        for (name, text) in &self.files {
            tree.text(&format!("{folder}/{name}"), text);
        }
        let below = Above {
            folder,
            numa,
            ..above.clone()
        };
        for (address, device) in &self.below {
            device.write(address, &below, tree);
        }
    }

    fn write_networks(&self, folder: &str, tree: &mut Tree) {
        for (name, interface) in &self.net {
            let place = format!("{folder}/net/{name}");
            tree.link(&format!("/sys/class/net/{name}"), &place);
            tree.link(&format!("{place}/device"), folder);
            let state = if interface.is_up { "up" } else { "down" };
            tree.text(&format!("{place}/operstate"), state);
            tree.text(
                &format!("{place}/carrier"),
                if interface.is_up { "1" } else { "0" },
            );
            tree.text(&format!("{place}/speed"), &interface.speed_mbps.to_string());
            tree.text(&format!("{place}/type"), "1");
        }
        for (name, rdma) in &self.infiniband {
            let place = format!("{folder}/infiniband/{name}");
            tree.link(&format!("/sys/class/infiniband/{name}"), &place);
            tree.link(&format!("{place}/device"), folder);
            let (state, physical) = match rdma.is_up {
                true => ("4: ACTIVE", "5: LinkUp"),
                false => ("1: DOWN", "3: Disabled"),
            };
            let port = format!("{place}/ports/1");
            tree.text(&format!("{port}/state"), state);
            tree.text(&format!("{port}/phys_state"), physical);
            tree.text(&format!("{port}/rate"), &rdma.rate);
            tree.text(&format!("{port}/link_layer"), &rdma.layer);
            tree.text(&format!("{place}/node_type"), "1: CA");
        }
    }

    /// The configuration space: its first 64 bytes, which any user may read, and all of it where it has what only root may see.
    fn config(&self, vendor: &str, device: &str) -> Vec<u8> {
        let number = |digits: &str| u16::from_str_radix(digits, 16).unwrap_or(0).to_le_bytes();
        let length = if self.acs.is_some() { 4096 } else { 64 };
        let mut config = vec![0; length];
        config[0..2].copy_from_slice(&number(vendor));
        config[2..4].copy_from_slice(&number(device));
        let class =
            u32::from_str_radix(class(&self.class).trim_start_matches("0x"), 16).unwrap_or(0);
        config[9..12].copy_from_slice(&class.to_le_bytes()[..3]);
        config[14] = u8::from(class >> 8 == 0x0604);
        if let Some(control) = self.acs {
            // Capabilities: a list is there, and the one for PCIe is at 0x40, the last.
            config[6] = 0x10;
            config[0x34] = 0x40;
            config[0x40] = 0x10;
            // Extended ones: error reporting at 0x100, then Access Control Services at 0x148, the last.
            config[0x100..0x104]
                .copy_from_slice(&(0x0001_u32 | 2 << 16 | 0x148 << 20).to_le_bytes());
            config[0x148..0x14c].copy_from_slice(&(0x000d_u32 | 1 << 16).to_le_bytes());
            config[0x14c..0x14e].copy_from_slice(&0x005f_u16.to_le_bytes());
            config[0x14e..0x150].copy_from_slice(&control.to_le_bytes());
        }
        config
    }
}

/// A class by word.
fn class(word: &str) -> &str {
    match word {
        "bridge" => "0x060400",
        "gpu" => "0x030200",
        "vga" => "0x030000",
        "accelerator" => "0x120000",
        "nvswitch" => "0x068000",
        "ethernet" => "0x020000",
        "infiniband" => "0x020700",
        "nvme" => "0x010802",
        number => number,
    }
}

fn all_cpus(nodes: &[Node]) -> String {
    let cpus: Vec<&str> = nodes.iter().map(|node| node.cpus.as_str()).collect();
    cpus.join(",")
}

fn write_link(link: &str, folder: &str, tree: &mut Tree) {
    let (now, most) = link.split_once(" of ").unwrap_or((link, link));
    for (kind, side) in [("current", now), ("max", most)] {
        let (generation, lanes) = side.split_once(" x").unwrap_or((side, "0"));
        let speed = match generation {
            "gen1" => "2.5 GT/s PCIe",
            "gen2" => "5.0 GT/s PCIe",
            "gen3" => "8.0 GT/s PCIe",
            "gen4" => "16.0 GT/s PCIe",
            "gen5" => "32.0 GT/s PCIe",
            "gen6" => "64.0 GT/s PCIe",
            other => other,
        };
        tree.text(&format!("{folder}/{kind}_link_speed"), speed);
        tree.text(&format!("{folder}/{kind}_link_width"), lanes);
    }
}
