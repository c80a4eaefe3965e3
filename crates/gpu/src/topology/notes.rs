//! What is missing from the picture and why, in sentences.

use std::collections::BTreeMap;

use super::ends::{End, EndKind, NICS_MAX};
use super::matrix::{UNKNOWN, capability_word, links};
use super::text::{listed, shown};
use super::tree::{self, Root};
use crate::bus::{Bus, NVIDIA};
use crate::snapshot::{Capability, Device, DriverError, Gap, PciKind, Snapshot};
use paceline_words::counted;

/// Everything that should be known about the picture.
pub(super) fn all(
    snapshot: &Snapshot,
    bus: &Bus<'_>,
    ends: &[End],
    connections: &[Vec<String>],
    roots: &[Root],
) -> Vec<String> {
    let mut notes = Vec::new();
    notes.extend(snapshot.driver.trouble.as_ref().map(trouble));
    notes.extend(lost(snapshot));
    notes.extend(hidden(snapshot, bus, ends));
    notes.extend(amd(ends));
    notes.extend(untold(snapshot, ends));
    notes.extend(untold_p2p(snapshot));
    if connections.iter().flatten().any(|code| code == UNKNOWN) {
        notes.push(format!(
            "`{UNKNOWN}` in the connections: neither the driver nor the system's PCI tree tells what both hang on"
        ));
    }
    notes.extend(not_in_tree(bus, ends, roots));
    let nics = snapshot.system.nics.iter();
    let nics = nics.filter(|nic| nic.pci.is_some()).count();
    if nics > NICS_MAX {
        let cards = counted(nics - NICS_MAX, "more network card");
        notes.push(format!("{cards} are not shown"));
    }
    notes.extend(confined(snapshot));
    notes
}

/// Why the driver answers nothing.
pub(super) fn trouble(error: &DriverError) -> String {
    match error {
        DriverError::NoLibrary(words) => format!("{error}: {}", shown(words)),
        error => shown(&error.to_string()),
    }
}

/// What to do about it.
pub(super) fn advice(trouble: Option<&DriverError>) -> String {
    let text = match trouble {
        Some(DriverError::NoLibrary(_)) => {
            "install NVIDIA's driver; in a container, start it with the GPUs (docker run --gpus all); a library in an \
             unusual place is named with --nvml-library FILE"
        }
        Some(DriverError::NoDriver) => {
            "load the driver (modprobe nvidia) and see the kernel's log (dmesg) for what kept it from loading; in a \
             container, start it with the GPUs (docker run --gpus all)"
        }
        Some(DriverError::Static) => {
            "use the program of the Python package, or one that `cargo install` built"
        }
        Some(DriverError::NoPermission) => {
            "look at the permissions of /dev/nvidia* and at the container's or the scheduler's device rules"
        }
        Some(DriverError::VersionMismatch) => {
            "the driver was updated while it ran: restart the machine, or unload and load its modules"
        }
        Some(DriverError::Other(_)) => "see what nvidia-smi and the kernel's log (dmesg) say",
        None => {
            "is this the machine that has them? In a container, start it with the GPUs; for the host's /proc and /sys \
             mounted elsewhere use --root DIR"
        }
    };
    text.to_owned()
}

fn labels<'a>(devices: impl Iterator<Item = &'a Device>) -> Vec<String> {
    devices
        .map(|device| format!("GPU{}", device.index))
        .collect()
}

fn lost(snapshot: &Snapshot) -> Option<String> {
    let lost = labels(snapshot.devices.iter().filter(|device| device.is_lost()));
    let (verb, it, answers) = match lost.len() {
        1 => ("is", "it", "answers"),
        _ => ("are", "they", "answer"),
    };
    (!lost.is_empty()).then(|| {
        format!(
            "{} {verb} lost: {it} no longer {answers}, and only what is still known is shown. The kernel's log has the \
             reason (an XID such as 79); a restart of the machine brings most back",
            listed(&lost)
        )
    })
}

/// GPUs of NVIDIA's on the bus that the driver does not show.
fn hidden(snapshot: &Snapshot, bus: &Bus<'_>, ends: &[End]) -> Vec<String> {
    let is_hidden = |end: &&End| {
        let on_bus = end.pci.as_deref().and_then(|pci| bus.get(pci));
        let is_theirs =
            on_bus.is_some_and(|device| device.id.0 == NVIDIA && device.kind == PciKind::Gpu);
        end.kind == EndKind::Other && is_theirs
    };
    let sentence = |end: &End| {
        let on_bus = end.pci.as_deref().and_then(|pci| bus.get(pci));
        let who = match on_bus.and_then(|device| device.driver.as_deref()) {
            None => "no driver has it".to_owned(),
            Some("nvidia") if snapshot.driver.trouble.is_none() => {
                "the driver has it and does not list it, as where it is failing or kept from a container".to_owned()
            }
            Some("nvidia") => "the driver has it".to_owned(),
            Some("vfio-pci") => "vfio-pci has it, for a virtual machine".to_owned(),
            Some(other) => format!("the kernel's {} has it in place of NVIDIA's driver", shown(other)),
        };
        let pci = end.pci.as_deref().unwrap_or(UNKNOWN);
        format!(
            "{} ({pci}) is a GPU of NVIDIA's without the driver's number: {who}",
            end.label
        )
    };
    ends.iter().filter(is_hidden).map(sentence).collect()
}

fn amd(ends: &[End]) -> Option<String> {
    let amd = ends.iter().filter(|end| end.label.starts_with("AMD"));
    let labels: Vec<String> = amd.map(|end| end.label.clone()).collect();
    (!labels.is_empty()).then(|| {
        format!(
            "P2P matrix of {}: not supported for AMD yet",
            listed(&labels)
        )
    })
}

/// The capabilities that some pairs have no answer for, by reason.
fn untold_p2p(snapshot: &Snapshot) -> Vec<String> {
    let links = links(snapshot);
    let mut gaps: BTreeMap<String, (Vec<Capability>, usize)> = BTreeMap::new();
    for (number, capability) in Capability::ALL.iter().enumerate() {
        let mut pairs: BTreeMap<String, usize> = BTreeMap::new();
        for from in &snapshot.devices {
            for to in snapshot.devices.iter().filter(|to| to.index != from.index) {
                let link = links.get(&(from.index, to.index));
                let gap = match link.and_then(|link| link.p2p.get(number)) {
                    Some(status) => status.gap(),
                    None => Some(&Gap::NotRead),
                };
                if let Some(gap) = gap {
                    *pairs.entry(shown(&gap.to_string())).or_default() += 1;
                }
            }
        }
        for (gap, pairs) in pairs {
            let (capabilities, most) = gaps.entry(gap).or_default();
            capabilities.push(*capability);
            *most = pairs.max(*most);
        }
    }
    let sentence = |(gap, (capabilities, pairs)): (String, (Vec<Capability>, usize))| {
        let words: Vec<String> = capabilities
            .iter()
            .map(|capability| capability_word(*capability).to_owned())
            .collect();
        let ways = counted(pairs, "way");
        format!(
            "`{UNKNOWN}` in P2P {}, {ways} from one GPU to another: {gap}",
            listed(&words)
        )
    };
    gaps.into_iter().map(sentence).collect()
}

/// What the driver does not tell about its devices, by reason.
fn untold(snapshot: &Snapshot, ends: &[End]) -> Vec<String> {
    let mut gaps: BTreeMap<(Vec<String>, String), Vec<String>> = BTreeMap::new();
    for (device, end) in snapshot.devices.iter().zip(ends) {
        // Without NVLinks it has none.
        let nvlinks = device.nvlinks.gap();
        let nvlinks = nvlinks.filter(|gap| **gap != Gap::NotSupported);
        // The place may be known in another way.
        let place = device.pci.gap().filter(|_| end.pci.is_none());
        let fields = [
            ("model", device.name.gap()),
            ("place on the bus", place),
            ("NVLinks", nvlinks),
        ];
        let mut reasons: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (field, gap) in fields.into_iter().filter(|_| !device.is_lost()) {
            if let Some(gap) = gap {
                let reason = shown(&gap.to_string());
                reasons.entry(reason).or_default().push(field.to_owned());
            }
        }
        for (reason, fields) in reasons {
            gaps.entry((fields, reason))
                .or_default()
                .push(end.label.clone());
        }
    }
    let sentence = |((fields, reason), labels): ((Vec<String>, String), Vec<String>)| {
        format!("{} of {}: {reason}", listed(&fields), listed(&labels))
    };
    gaps.into_iter().map(sentence).collect()
}

fn not_in_tree(bus: &Bus<'_>, ends: &[End], roots: &[Root]) -> Option<String> {
    if ends.iter().all(|end| end.kind == EndKind::Nic) {
        return None;
    }
    if bus.devices().next().is_none() {
        return Some("the system shows no PCI bus (/sys/bus/pci), so there is no tree".to_owned());
    }
    let missing = ends.iter().filter(|end| !tree::is_in(roots, end));
    let labels: Vec<String> = missing.map(|end| end.label.clone()).collect();
    (!labels.is_empty()).then(|| format!("not found in the system's PCI tree: {}", listed(&labels)))
}

fn confined(snapshot: &Snapshot) -> Option<String> {
    let machine = snapshot.system.virtual_machine()?;
    Some(format!(
        "connections and links are those that were given to this machine, which is virtual ({machine}); the hardware below \
         may be wired otherwise"
    ))
}
