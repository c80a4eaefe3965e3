//! Pairs of GPUs without peer-to-peer: why, what works all the same, and what can be changed.
//!
//! *Source*: what each code comes from: `p2p_caps.c` of NVIDIA's open kernel modules. What NCCL does: `ncclTopoCheckP2p` in its
//! `graph/paths.cc`, and "GPU troubleshooting" and "Shared memory" in its user guide. Cards without it: NVIDIA/nccl-tests issue 117.

use std::collections::BTreeMap;

use paceline_gpu::snapshot::{Device, P2pStatus, Snapshot};

use super::fabric::has_switches;
use super::pairs::{Pair, pairs};
use super::words::{self, joined, listed, model};
use crate::finding::{Notes, plain};

/// What still works.
const STILL_WORKS: &str = "what works: one GPU alone, and DDP with NCCL, which then copies through the host's memory: right results, slower \
                           exchange. What does not: PyTorch's DataParallel copies between the cards at every step, which is slow at best; \
                           it has hung on such machines where DDP ran";

/// The same where it has been said in full.
const AS_ABOVE: &str =
    "as above: DDP and NCCL work by way of the host's memory, DataParallel does not do well";

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let pairs = pairs(snapshot);
    if pairs.is_empty() {
        return;
    }
    let mut sheet = notes.sheet("peer-to-peer");
    sheet.fact(said(&pairs));
    let of = |pair: &Pair| pair.of;
    let mut is_said = false;
    for (status, some) in by_status(&pairs) {
        if status == P2pStatus::Ok {
            continue;
        }
        let (wired, rest): (Vec<Pair>, Vec<Pair>) =
            some.into_iter().partition(|pair| pair.has_nvlink);
        if !wired.is_empty() {
            let named = words::pairs(&wired.iter().map(of).collect::<Vec<_>>(), pairs.len());
            sheet.error(
                format!(
                    "peer-to-peer is {} between GPUs that NVLink joins: {named}",
                    status.code()
                ),
                "NCCL takes this for broken hardware and refuses to start (\"unhandled cuda error\")",
                "reset the GPUs (`sudo nvidia-smi -r`) or start the machine again, and look into `sudo dmesg | grep -i -e xid -e nvlink`; \
                 NCCL_IGNORE_DISABLED_P2P=1 makes NCCL go around the pair, slower",
            );
        }
        if !rest.is_empty() {
            let (cause, remedy) = cause(status, snapshot, &rest);
            let named = words::pairs(&rest.iter().map(of).collect::<Vec<_>>(), pairs.len());
            let (why, fix) = match is_said {
                false => (STILL_WORKS, format!("{remedy}; {}", settings(snapshot))),
                true => (AS_ABOVE, remedy),
            };
            is_said = true;
            sheet.warning(
                format!("peer-to-peer is {} between {named}: {cause}", status.code()),
                why,
                fix,
            );
        }
    }
}

fn by_status(pairs: &[Pair]) -> Vec<(P2pStatus, Vec<Pair>)> {
    let mut groups: Vec<(P2pStatus, Vec<Pair>)> = Vec::new();
    for pair in pairs {
        let Some(status) = pair.status else {
            continue;
        };
        match groups.iter_mut().find(|(known, _)| *known == status) {
            Some((_, some)) => some.push(*pair),
            None => groups.push((status, vec![*pair])),
        }
    }
    groups
}

/// "OK over NVLink: all 28 pairs of GPUs".
fn said(pairs: &[Pair]) -> String {
    let key = |pair: &Pair| match pair.status {
        Some(P2pStatus::Ok) if pair.has_nvlink => "OK over NVLink",
        Some(P2pStatus::Ok) => "OK over PCIe",
        Some(status) => status.code(),
        None => "not told",
    };
    let mut groups: BTreeMap<&str, Vec<(u32, u32)>> = BTreeMap::new();
    for pair in pairs {
        groups.entry(key(pair)).or_default().push(pair.of);
    }
    let words = groups
        .iter()
        .map(|(key, some)| format!("{key}: {}", words::pairs(some, pairs.len())));
    listed(words.collect())
}

/// Why, and what could bring it.
fn cause(status: P2pStatus, snapshot: &Snapshot, pairs: &[Pair]) -> (String, String) {
    let fixed = |cause: &str, remedy: &str| (cause.to_owned(), remedy.to_owned());
    let is_of_pairs = |device: &&Device| {
        let mut pairs = pairs.iter();
        pairs.any(|pair| [pair.of.0, pair.of.1].contains(&device.index))
    };
    let devices: Vec<&Device> = snapshot.devices.iter().filter(is_of_pairs).collect();
    if status == P2pStatus::DisabledByRegkey {
        return by_setting(snapshot);
    }
    let has_mig = |device: &&Device| device.mig.known().is_some_and(|mig| mig.is_on);
    if devices.iter().any(has_mig) {
        return fixed(
            "MIG is on",
            "switch MIG off where whole cards are to train together",
        );
    }
    if devices.iter().any(|device| is_late_geforce(device)) {
        return fixed(
            "GeForce cards from the RTX 40 series on do not have it",
            "no setting brings it to these cards",
        );
    }
    match status {
        P2pStatus::NotSupported => not_supported(snapshot, &devices, pairs),
        P2pStatus::ChipsetNotSupported => fixed(
            "the driver does not trust this CPU or chipset to pass data from card to card",
            "put both cards below one PCIe switch where the machine has one; a newer driver knows more CPUs",
        ),
        P2pStatus::GpuNotSupported => fixed(
            "these cards do not have it",
            "no setting brings it to these cards",
        ),
        P2pStatus::TopologyNotSupported => fixed(
            "the cards hang on different sockets or I/O hubs, and nothing is passed on between those",
            "put both cards into slots of one CPU, as its manual draws them",
        ),
        P2pStatus::Unknown | P2pStatus::Ok | P2pStatus::DisabledByRegkey => fixed(
            "the driver cannot say why",
            "a newer driver may know; `sudo dmesg | grep -i nvrm` after a start of the machine",
        ),
    }
}

fn not_supported(snapshot: &Snapshot, devices: &[&Device], pairs: &[Pair]) -> (String, String) {
    let name = |index: u32| {
        let device = devices.iter().find(|device| device.index == index);
        device.map(|device| model(device))
    };
    let differ = |pair: &Pair| name(pair.of.0) != name(pair.of.1);
    let (cause, remedy) = if pairs.iter().all(differ) {
        (
            "the driver offers it between cards of one chip only, and these differ",
            "train together on cards of one model",
        )
    } else if has_switches(snapshot) {
        (
            "on a board with NVSwitches this means that the NVLinks are not set up",
            "let the fabric manager run (`systemctl status nvidia-fabricmanager`), and look for Xid and SXid in `sudo dmesg`",
        )
    } else if snapshot.system.virtual_machine().is_some() {
        (
            "this is a virtual machine, which hides how the cards are wired",
            "the host's administrator can pass cards through together with the switch above them, or offer NVLink; nothing inside the machine helps",
        )
    } else {
        (
            "the driver does not offer it for these cards in this machine",
            "a newer driver and a newer firmware of the mainboard are worth a try; most consumer cards never have it",
        )
    };
    (cause.to_owned(), remedy.to_owned())
}

fn by_setting(snapshot: &Snapshot) -> (String, String) {
    let all = snapshot.system.driver_parameters.iter();
    let named: Vec<String> = all
        .filter(|(name, _)| name.contains("ForceP2P"))
        .map(|(name, value)| format!("{}={}", plain(name), plain(value)))
        .collect();
    let (seen, which) = match named.is_empty() {
        true => (
            String::new(),
            "ForceP2P in `NVreg_RegistryDwords`".to_owned(),
        ),
        false => (format!(" ({})", joined(named.clone())), joined(named)),
    };
    (
        format!("a setting of the driver switches it off{seen}"),
        format!(
            "take {which} out of /etc/modprobe.d or the kernel's command line, then `sudo update-initramfs -u` and start the machine again; \
             it was set, perhaps after a hang: test the links before you train on them"
        ),
    )
}

/// Ada and later: the first GeForce cards of which the maker says that they have no peer-to-peer.
fn is_late_geforce(device: &Device) -> bool {
    let is_geforce = device
        .name
        .known()
        .is_some_and(|name| name.contains("GeForce"));
    is_geforce && device.capability.known() >= Some(&(8, 9))
}

/// What helps NCCL, and what must not be set.
fn settings(snapshot: &Snapshot) -> String {
    let mut text = "train with one process per GPU (`paceline run`, torchrun) and DDP, not with DataParallel; if NCCL hangs at its first \
                    collective set NCCL_P2P_DISABLE=1; do not set NCCL_SHM_DISABLE, which takes the way through the host's memory away"
        .to_owned();
    // From NCCL 2.24 on host memory is taken by a way that needs CUDA 13's driver where there is no peer-to-peer.
    let cuda = snapshot.driver.cuda.known();
    if cuda.is_some_and(|cuda| ((12, 6)..(13, 0)).contains(cuda)) {
        text += "; if NCCL 2.24 or newer fails to start set NCCL_CUMEM_HOST_ENABLE=0";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, joined_all, machine};
    use paceline_gpu::snapshot::{Mode, NvLink, PciDevice, PciKind, Remote};

    fn with(count: usize, status: P2pStatus) -> Snapshot {
        let mut snapshot = machine(count);
        joined_all(&mut snapshot, status);
        snapshot
    }

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
    fn what_is_ok_or_alone_or_unknown_is_not_spoken_of() {
        check(judge, &with(2, P2pStatus::Ok), &[]);
        check(judge, &machine(1), &[]);
        check(judge, &machine(2), &[]);
    }

    #[test]
    fn each_code_has_its_cause_and_remedy() {
        let speaks = |status, cause: &str, remedy: &str| {
            let snapshot = with(2, status);
            check(
                judge,
                &snapshot,
                &[&format!("warning: peer-to-peer: {remedy}")],
            );
            let what = what(&snapshot);
            assert!(what.ends_with(cause), "{what}");
        };
        speaks(
            P2pStatus::ChipsetNotSupported,
            "pass data from card to card",
            "put both cards below one PCIe switch",
        );
        speaks(
            P2pStatus::GpuNotSupported,
            "these cards do not have it",
            "no setting",
        );
        speaks(
            P2pStatus::TopologyNotSupported,
            "nothing is passed on between those",
            "put both cards into slots of one CPU",
        );
        speaks(
            P2pStatus::DisabledByRegkey,
            "a setting of the driver switches it off",
            "take ForceP2P in `NVreg_RegistryDwords` out",
        );
        speaks(P2pStatus::NotSupported, "in this machine", "a newer driver");
        speaks(
            P2pStatus::Unknown,
            "cannot say why",
            "a newer driver may know",
        );
    }

    #[test]
    fn the_rest_of_the_machine_tells_why_it_is_not_supported() {
        let mut mixed = with(2, P2pStatus::NotSupported);
        mixed.devices[1].name = "Another GPU".to_owned().into();
        check(
            judge,
            &mixed,
            &["warning: peer-to-peer: train together on cards of one model"],
        );

        let mut mig = with(2, P2pStatus::NotSupported);
        mig.devices[0].mig = Mode {
            is_on: true,
            will_be_on: true,
        }
        .into();
        check(judge, &mig, &["warning: peer-to-peer: switch MIG off"]);

        let mut geforce = with(2, P2pStatus::ChipsetNotSupported);
        for device in &mut geforce.devices {
            device.name = "NVIDIA GeForce RTX 4090".to_owned().into();
            device.capability = (8, 9).into();
        }
        check(
            judge,
            &geforce,
            &["warning: peer-to-peer: no setting brings it"],
        );

        let mut board = with(2, P2pStatus::NotSupported);
        board.system.pci.push(PciDevice {
            kind: PciKind::NvSwitch,
            id: (0x10de, 0x22a3),
            ..PciDevice::default()
        });
        check(
            judge,
            &board,
            &["warning: peer-to-peer: let the fabric manager run"],
        );

        let mut guest = with(2, P2pStatus::NotSupported);
        guest.system.confined_by = vec!["kvm".to_owned()];
        check(
            judge,
            &guest,
            &["warning: peer-to-peer: the host's administrator"],
        );

        let mut set = with(2, P2pStatus::DisabledByRegkey);
        set.system.driver_parameters = vec![("ForceP2P".to_owned(), "0".to_owned())];
        check(
            judge,
            &set,
            &["warning: peer-to-peer: take ForceP2P=0 out of"],
        );
    }

    #[test]
    fn pairs_of_one_code_are_one_finding() {
        let mut snapshot = with(4, P2pStatus::Ok);
        for link in &mut snapshot.links {
            if (link.from < 2) != (link.to < 2) {
                link.p2p[0] = P2pStatus::TopologyNotSupported.into();
            }
        }
        assert!(what(&snapshot).starts_with(
            "peer-to-peer is TNS between 4 of 6 pairs of GPUs: 0-2, 0-3, 1-2 and 1-3: "
        ));
        let all = with(8, P2pStatus::GpuNotSupported);
        assert!(what(&all).starts_with("peer-to-peer is GNS between all 28 pairs of GPUs: "));
    }

    #[test]
    fn a_pair_that_nvlink_joins_stops_nccl() {
        let mut snapshot = with(2, P2pStatus::NotSupported);
        for device in &mut snapshot.devices {
            device.nvlinks = vec![NvLink {
                is_active: true.into(),
                remote: Remote::Switch.into(),
                ..NvLink::default()
            }]
            .into();
        }
        check(judge, &snapshot, &["error: peer-to-peer: reset the GPUs"]);
    }

    #[test]
    fn a_driver_before_cuda_13_may_need_another_way_to_host_memory() {
        let says = |cuda: (u32, u32)| {
            let mut snapshot = with(2, P2pStatus::GpuNotSupported);
            snapshot.driver.cuda = cuda.into();
            let mut notes = Notes::default();
            judge(&snapshot, &mut notes);
            notes.findings[0].fix.contains("NCCL_CUMEM_HOST_ENABLE=0")
        };
        assert!(!says((12, 4)));
        assert!(says((12, 6)));
        assert!(says((12, 9)));
        assert!(!says((13, 0)));
    }
}
