//! What the matrices are about: GPUs, other makers' devices and network cards, with the labels they are known by.

use std::collections::BTreeMap;

use serde::Serialize;

use super::text::shown;
use crate::bus::{Bus, NVIDIA, Spot, place};
use crate::snapshot::{
    DEVICES_MAX, Device, Nic, OtherDevice, PciDevice, PciKind, Reading, Snapshot,
};

/// Most network cards in a matrix; servers for eight GPUs have twelve.
pub(super) const NICS_MAX: usize = 64;

/// One row of a matrix, and one column.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct End {
    /// What it is called here: `GPU0`, `AMD0`, `NIC0`.
    pub label: String,
    /// What it is.
    pub kind: EndKind,
    /// Its model, or the network card's own name.
    pub name: Option<String>,
    /// Place on the bus.
    pub pci: Option<String>,
    /// NUMA node.
    pub numa_node: Option<u32>,
    /// CPUs near it.
    pub cpus: Option<Vec<u32>>,
    /// Device memory in bytes.
    pub memory_bytes: Option<u64>,
    /// NVLinks that are up, and all.
    pub nvlinks: Option<(usize, usize)>,
    /// MIG instances, where MIG is on.
    pub mig_devices: Option<u32>,
    /// What else is to be said about it.
    pub remarks: Vec<String>,
}

/// What an end is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EndKind {
    /// A GPU that NVIDIA's driver knows.
    Gpu,
    /// A device of another maker, or one of NVIDIA's that its driver does not show.
    Other,
    /// A network card.
    Nic,
}

impl End {
    /// What the bus knows of an end.
    fn new(
        label: String,
        kind: EndKind,
        pci: Option<&str>,
        node: &Reading<u32>,
        bus: &Bus<'_>,
    ) -> Self {
        let pci = pci.map(|address| place(&shown(address)));
        let on_bus = pci.as_deref().and_then(|place| bus.get(place));
        let by_bus = on_bus.and_then(|device| device.numa_node.known().copied());
        Self {
            label,
            kind,
            name: None,
            pci,
            numa_node: node.known().copied().or(by_bus),
            cpus: on_bus.and_then(|device| device.cpus.known().cloned()),
            memory_bytes: None,
            nvlinks: None,
            mig_devices: None,
            remarks: Vec::new(),
        }
    }

    pub(super) fn spot(&self) -> Spot {
        Spot {
            pci: self.pci.clone(),
            numa_node: self.numa_node,
        }
    }
}

/// All ends: GPUs in the driver's order, then other devices, then network cards.
pub(super) fn all(snapshot: &Snapshot, bus: &Bus<'_>) -> Vec<End> {
    let gpus = snapshot.devices.iter().map(|device| gpu(device, bus));
    let mut ends: Vec<End> = gpus.collect();
    let mut others: Vec<OtherDevice> = snapshot.others.iter().take(DEVICES_MAX).cloned().collect();
    others.retain(|device| !is_among(&ends, &device.pci));
    let mut hidden = hidden(bus, &ends);
    hidden.retain(|address| others.iter().all(|device| place(&device.pci) != *address));
    let hidden = left_over(&mut ends, hidden, bus);
    others.extend(hidden.into_iter().map(|pci| OtherDevice {
        maker: "NVIDIA".to_owned(),
        pci,
        ..OtherDevice::default()
    }));
    let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
    for device in &others {
        let maker = short(&device.maker);
        let number = numbers.entry(maker.clone()).or_default();
        ends.push(other(device, format!("{maker}{number}"), bus));
        *number += 1;
    }
    ends.extend(cards(snapshot, bus));
    ends
}

fn is_among(ends: &[End], address: &str) -> bool {
    let address = place(address);
    ends.iter().any(|end| end.pci.as_ref() == Some(&address))
}

/// NVIDIA's GPUs on the bus that are at no place of the driver's.
fn hidden(bus: &Bus<'_>, ends: &[End]) -> Vec<String> {
    let is_nvidias = |device: &PciDevice| device.kind == PciKind::Gpu && device.id.0 == NVIDIA;
    bus.devices()
        .filter(|(address, device)| is_nvidias(device) && !is_among(ends, address))
        .map(|(address, _)| shown(address))
        .take(DEVICES_MAX)
        .collect()
}

/// Network cards, those that do RDMA first: they are nvidia-smi's NIC0, NIC1 and so on.
fn cards(snapshot: &Snapshot, bus: &Bus<'_>) -> Vec<End> {
    let on_bus = snapshot.system.nics.iter().filter(|nic| nic.pci.is_some());
    let (rdma, plain): (Vec<&Nic>, Vec<&Nic>) = on_bus.partition(|nic| nic.is_rdma);
    let nics = rdma.into_iter().chain(plain).take(NICS_MAX).enumerate();
    nics.map(|(number, nic)| card(number, nic, bus)).collect()
}

/// Which of NVIDIA's GPUs on the bus are none of the driver's. Where the driver does not tell the places of some of its own,
/// these are probably among them: one and one are the same, of more it is not known which is which, and none is added.
fn left_over(ends: &mut [End], hidden: Vec<String>, bus: &Bus<'_>) -> Vec<String> {
    let mut unplaced = ends.iter_mut().filter(|end| end.pci.is_none());
    let (first, is_more) = (unplaced.next(), unplaced.next().is_some());
    match (first, is_more, &*hidden) {
        (None, _, _) => hidden,
        (Some(end), false, [only]) => {
            let on_bus = bus.get(only);
            end.pci = Some(only.clone());
            end.numa_node = end.numa_node.or_else(|| on_bus?.numa_node.known().copied());
            end.cpus = end.cpus.take().or_else(|| on_bus?.cpus.known().cloned());
            Vec::new()
        }
        _ => Vec::new(),
    }
}

/// A maker's name as a label begins: letters only, in capitals.
fn short(maker: &str) -> String {
    let letters = maker.chars().take_while(char::is_ascii_alphanumeric);
    let short: String = letters.take(6).collect::<String>().to_ascii_uppercase();
    if short.is_empty() {
        "DEV".to_owned()
    } else {
        short
    }
}

fn gpu(device: &Device, bus: &Bus<'_>) -> End {
    let cpus = device.cpus.known().filter(|cpus| !cpus.is_empty());
    let nvlinks = device.nvlinks.known().filter(|links| !links.is_empty());
    let up = |links: &Vec<crate::snapshot::NvLink>| {
        let up = links
            .iter()
            .filter(|link| link.is_active.known() == Some(&true));
        (up.count(), links.len())
    };
    let is_mig = device.mig.known().is_some_and(|mode| mode.is_on);
    let label = format!("GPU{}", device.index);
    let pci = device.pci.known().map(String::as_str);
    let end = End::new(label, EndKind::Gpu, pci, &device.numa_node, bus);
    End {
        name: device.name.known().map(|name| shown(name)),
        cpus: cpus.cloned().or(end.cpus),
        memory_bytes: device.memory.known().map(|memory| memory.total_bytes),
        nvlinks: nvlinks.map(up),
        mig_devices: is_mig.then(|| device.mig_devices.known().copied().unwrap_or(0)),
        ..end
    }
}

fn other(device: &OtherDevice, label: String, bus: &Bus<'_>) -> End {
    let name = device.name.known().map(|name| shown(name));
    End {
        name: Some(name.unwrap_or_else(|| format!("{} device", shown(&device.maker)))),
        memory_bytes: device.memory.known().map(|memory| memory.total_bytes),
        ..End::new(
            label,
            EndKind::Other,
            Some(&device.pci),
            &device.numa_node,
            bus,
        )
    }
}

fn card(number: usize, nic: &Nic, bus: &Bus<'_>) -> End {
    let mut remarks: Vec<String> = nic.interfaces.iter().map(|name| shown(name)).collect();
    remarks.retain(|name| *name != nic.name);
    if nic.is_rdma {
        remarks.push("RDMA".to_owned());
    }
    if let Some(is_up) = nic.is_up.known() {
        remarks.push(if *is_up { "up" } else { "down" }.to_owned());
    }
    if let Some(speed) = nic.speed_mbps.known().filter(|speed| **speed > 0) {
        remarks.push(match speed % 1000 {
            0 => format!("{} Gbit/s", speed / 1000),
            _ => format!("{speed} Mbit/s"),
        });
    }
    End {
        name: Some(shown(&nic.name)),
        remarks,
        ..End::new(
            format!("NIC{number}"),
            EndKind::Nic,
            nic.pci.as_deref(),
            &nic.numa_node,
            bus,
        )
    }
}
