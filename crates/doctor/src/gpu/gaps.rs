//! What could not be read or judged: one note that lists it, so that silence is not taken for health.

use std::collections::BTreeMap;

use paceline_gpu::snapshot::{Device, Gap, PciKind, Reading, Snapshot};

use super::words::{gpus, joined};
use crate::finding::{Notes, count, plain};

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    judge_others(snapshot, notes);
    if snapshot.devices.is_empty() {
        return;
    }
    let unread = unread(snapshot);
    if unread.is_empty() {
        return;
    }
    let words = unread
        .iter()
        .map(|(why, what)| format!("{} ({why})", joined(what.clone())));
    let mut fixes = Vec::new();
    if unread.contains_key(&Gap::NoPermission.to_string()) {
        fixes.push("run it as root (`sudo`) to see what needs that");
    }
    if unread.contains_key(&Gap::NoFunction.to_string()) {
        fixes.push("a newer driver tells more");
    }
    notes.sheet("not read").note(
        format!(
            "not everything could be read: {}",
            words.collect::<Vec<_>>().join("; ")
        ),
        "what depends on it was not judged: no finding about it does not mean that it is well",
        match fixes.is_empty() {
            true => "nothing, unless you suspect it: `nvidia-smi -q` may show more".to_owned(),
            false => fixes.join("; "),
        },
    );
}

fn judge_others(snapshot: &Snapshot, notes: &mut Notes) {
    let mut makers: BTreeMap<String, usize> = BTreeMap::new();
    for other in &snapshot.others {
        *makers.entry(plain(&other.maker)).or_default() += 1;
    }
    if makers.is_empty() {
        return;
    }
    let words = makers
        .iter()
        .map(|(maker, number)| format!("{} of {maker}", count(*number, "device")));
    notes.sheet("other GPUs").note(
        format!("{} are not diagnosed", joined(words.collect())),
        "this program knows the faults of NVIDIA's devices only",
        "use the maker's own tool, such as `rocm-smi` or `amd-smi` for AMD",
    );
}

/// What is missing for which reason. That a device or the system does not have something is no gap; that of a lost device
/// has been said.
fn unread(snapshot: &Snapshot) -> BTreeMap<String, Vec<String>> {
    let mut all: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut add = |why: &Gap, what: String| {
        if !matches!(why, Gap::NotSupported | Gap::Lost) {
            all.entry(plain(&why.to_string())).or_default().push(what);
        }
    };
    for (name, why) in of_system(snapshot).into_iter().chain(of_pairs(snapshot)) {
        add(&why, name.to_owned());
    }
    let mut of_devices: BTreeMap<(&str, String), (Gap, Vec<u32>)> = BTreeMap::new();
    for device in snapshot.devices.iter().filter(|device| !device.is_lost()) {
        for (name, why) in told(device) {
            let (_, of) = of_devices
                .entry((name, why.to_string()))
                .or_insert((why, Vec::new()));
            of.push(device.index);
        }
    }
    for ((name, _), (why, of)) in of_devices {
        match of.len() == snapshot.devices.len() {
            true => add(&why, name.to_owned()),
            false => add(&why, format!("{name} of {}", gpus(&of))),
        }
    }
    all
}

fn gap<T>(name: &'static str, reading: &Reading<T>) -> Option<(&'static str, Gap)> {
    Some((name, reading.gap()?.clone()))
}

fn of_system(snapshot: &Snapshot) -> Vec<(&'static str, Gap)> {
    let system = &snapshot.system;
    let bridges = system
        .pci
        .iter()
        .filter(|device| device.kind == PciKind::Bridge);
    let acs = bridges.filter_map(|bridge| gap("ACS of bridges", &bridge.acs_redirects));
    [
        gap("Xid lines of the kernel's log", &system.xids),
        gap("the IOMMU", &system.iommu.is_on),
        gap("/dev/shm", &system.shm),
        gap("the limit of locked memory", &system.memlock_bytes),
        gap("the driver's version", &snapshot.driver.version),
    ]
    .into_iter()
    .flatten()
    .chain(acs.take(1))
    .collect()
}

/// What a device does not tell; of one that does not even tell its name, only that.
fn told(device: &Device) -> Vec<(&'static str, Gap)> {
    let basic = [
        device.name.gap(),
        device.memory.gap(),
        device.pcie.gap(),
        device.now.temperature_c.gap(),
    ];
    match basic {
        [Some(why), Some(_), Some(_), Some(_)] => {
            let why = match why {
                Gap::NotSupported => Gap::other("not supported"),
                why => why.clone(),
            };
            vec![("nearly everything", why)]
        }
        _ => of_device(device),
    }
}

/// The first pair of which the driver does not say whether it has peer-to-peer.
fn of_pairs(snapshot: &Snapshot) -> Option<(&'static str, Gap)> {
    let mut links = snapshot.links.iter();
    links.find_map(|link| gap("peer-to-peer", &link.p2p[0]))
}

fn of_device(device: &Device) -> Vec<(&'static str, Gap)> {
    [
        gap("names", &device.name),
        gap("places on the bus", &device.pci),
        gap("memory", &device.memory),
        gap("PCIe links", &device.pcie),
        gap("MIG modes", &device.mig),
        gap("compute modes", &device.compute_mode),
        gap("uncorrected memory errors", &device.errors.uncorrected),
        gap(
            "memory that waits to be put out of use",
            &device.errors.retirement_pending,
        ),
        gap("NVLinks", &device.nvlinks),
        gap("processes", &device.processes),
        gap("temperatures", &device.now.temperature_c),
        gap("reasons for lower clocks", &device.now.throttles),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, linked, machine};
    use paceline_gpu::snapshot::{OtherDevice, P2pStatus};

    fn what(snapshot: &Snapshot) -> String {
        let mut notes = Notes::default();
        judge(snapshot, &mut notes);
        notes
            .findings
            .into_iter()
            .map(|finding| finding.what)
            .collect()
    }

    #[test]
    fn a_machine_that_tells_all_needs_no_note() {
        check(judge, &machine(2), &[]);
        check(judge, &Snapshot::default(), &[]);
    }

    #[test]
    fn gaps_are_listed_by_reason() {
        let mut snapshot = machine(2);
        snapshot.system.xids = Reading::missing(Gap::NoPermission);
        for device in &mut snapshot.devices {
            device.now.throttles = Reading::missing(Gap::NoFunction);
        }
        snapshot.devices[1].nvlinks = Reading::missing(Gap::NoFunction);
        check(judge, &snapshot, &["note: not read: run it as root"]);
        assert_eq!(
            what(&snapshot),
            "not everything could be read: Xid lines of the kernel's log (no permission); NVLinks of GPU 1 and reasons for lower clocks \
             (the driver is too old to tell)"
        );
    }

    #[test]
    fn what_a_device_does_not_have_is_no_gap() {
        let mut snapshot = machine(1);
        snapshot.devices[0].nvlinks = Reading::missing(Gap::NotSupported);
        check(judge, &snapshot, &[]);
    }

    #[test]
    fn a_device_that_tells_next_to_nothing_is_not_passed_over() {
        let mut snapshot = machine(2);
        snapshot.devices[1] = Device {
            index: 1,
            ..Device::default()
        };
        assert_eq!(
            what(&snapshot),
            "not everything could be read: nearly everything of GPU 1 (not read)"
        );
        let mute = &mut snapshot.devices[1];
        mute.name = Reading::missing(Gap::NotSupported);
        assert_eq!(
            what(&snapshot),
            "not everything could be read: nearly everything of GPU 1 (not supported)"
        );
    }

    #[test]
    fn pairs_that_nobody_tells_of_are_listed() {
        let mut snapshot = machine(2);
        let mut link = linked(0, 1, P2pStatus::Ok);
        link.p2p[0] = Reading::missing(Gap::NoFunction);
        snapshot.links = vec![link];
        check(
            judge,
            &snapshot,
            &["note: not read: a newer driver tells more"],
        );
    }

    #[test]
    fn a_lost_device_is_not_listed_again() {
        let mut snapshot = machine(2);
        snapshot.devices[1] = Device {
            index: 1,
            name: Reading::missing(Gap::Lost),
            ..Device::default()
        };
        check(judge, &snapshot, &[]);
    }

    #[test]
    fn words_from_outside_are_made_harmless() {
        let mut snapshot = machine(1);
        snapshot.devices[0].mig = Reading::Missing {
            missing: Gap::Other("odd\u{1b}[2J".to_owned()),
        };
        assert_eq!(
            what(&snapshot),
            "not everything could be read: MIG modes (odd [2J)"
        );
    }

    #[test]
    fn devices_of_others_are_not_passed_over_in_silence() {
        let mut snapshot = machine(1);
        snapshot.others = vec![OtherDevice {
            maker: "AMD".to_owned(),
            ..OtherDevice::default()
        }];
        check(
            judge,
            &snapshot,
            &["note: other GPUs: use the maker's own tool"],
        );
    }
}
