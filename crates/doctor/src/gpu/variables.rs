//! Variables of CUDA and NCCL that do not fit this machine.
//!
//! *Source*: "CUDA Environment Variables" in NVIDIA's CUDA programming guide, "Environment Variables" in NCCL's user guide.

use paceline_gpu::devices::{Gpu, visible};
use paceline_gpu::snapshot::{Reading, Snapshot};

use super::pairs::{Pair, pairs};
use super::words::joined;
use crate::finding::{Notes, count, plain};

/// Entries of CUDA_VISIBLE_DEVICES that are looked at; a snapshot from elsewhere may have any number.
const ENTRIES_MAX: usize = 1_024;

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    if snapshot.devices.is_empty() {
        return;
    }
    let all = snapshot.system.variables.iter();
    let named: Vec<String> = all
        .map(|(name, value)| format!("{}={}", plain(name), plain(value)))
        .collect();
    notes.sheet("variables").fact(match named.is_empty() {
        true => "none of CUDA's or NCCL's is set".to_owned(),
        false => joined(named),
    });
    judge_visible(snapshot, notes);
    judge_nccl(snapshot, notes);
}

fn value<'a>(snapshot: &'a Snapshot, name: &str) -> Option<&'a str> {
    snapshot.system.variable(name).map(str::trim)
}

fn is_set(snapshot: &Snapshot, name: &str) -> bool {
    value(snapshot, name).is_some_and(|value| !value.is_empty() && value != "0")
}

fn judge_visible(snapshot: &Snapshot, notes: &mut Notes) {
    let Some(list) = value(snapshot, "CUDA_VISIBLE_DEVICES") else {
        return;
    };
    let mut sheet = notes.sheet("variables");
    let entries = list.split(',').map(str::trim);
    let entries: Vec<&str> = entries.take(ENTRIES_MAX).collect();
    let first_bad = entries.iter().position(|entry| !exists(snapshot, entry));
    let Some(left) = first_bad else {
        return;
    };
    let devices = count(snapshot.devices.len(), "GPU");
    let shown = plain(list);
    let fix = "`unset CUDA_VISIBLE_DEVICES`, or name devices that `nvidia-smi -L` shows; a launcher gives each rank its own";
    // Nothing, or a number below zero, is how one hides all devices on purpose.
    if left == 0 && matches!(entries[0], "" | "-1") {
        sheet.warning(
            format!("CUDA_VISIBLE_DEVICES is \"{shown}\", which hides every GPU"),
            "programs find no GPU and fail, or train on the CPU without a word",
            fix,
        );
        return;
    }
    let entry = plain(entries[left]);
    sheet.error(
        format!(
            "CUDA_VISIBLE_DEVICES is \"{shown}\", and there is no device \"{entry}\" among {devices}"
        ),
        match left {
            0 => "CUDA stops reading there, so programs see no GPU at all".to_owned(),
            _ => format!(
                "CUDA stops reading there, so programs see only the {} before it",
                count(left, "device")
            ),
        },
        fix,
    );
}

/// Whether an entry names a device, as far as that can be told from here.
fn exists(snapshot: &Snapshot, entry: &str) -> bool {
    let gpus: Vec<Gpu> = snapshot.devices.iter().map(Gpu::of).collect();
    if entry.starts_with("GPU-") && gpus.iter().any(|gpu| gpu.uuid.is_empty()) {
        return true;
    }
    // In which order devices are counted does not change which numbers there are.
    let variable = |name: &str| match name {
        "CUDA_VISIBLE_DEVICES" => Some(entry.to_owned()),
        "CUDA_DEVICE_ORDER" => Some("PCI_BUS_ID".to_owned()),
        _ => None,
    };
    visible(&gpus, &variable).map_or(true, |seen| !seen.is_empty())
}

fn judge_nccl(snapshot: &Snapshot, notes: &mut Notes) {
    let pairs = pairs(snapshot);
    let over_nvlink = pairs.iter().any(|pair| pair.is_ok() && pair.has_nvlink);
    let over_pcie = pairs.iter().any(Pair::is_ok_over_pcie);
    let never = ["LOC", "0"].contains(&value(snapshot, "NCCL_P2P_LEVEL").unwrap_or_default());
    let disabled = is_set(snapshot, "NCCL_P2P_DISABLE");
    let setting = match (disabled, never) {
        (true, _) => Some("NCCL_P2P_DISABLE"),
        (false, true) => Some("NCCL_P2P_LEVEL"),
        (false, false) => None,
    };
    let mut sheet = notes.sheet("variables");
    if let Some(setting) = setting {
        const WHY: &str = "NCCL copies everything through the host's memory instead";
        if over_nvlink {
            sheet.warning(
                format!("{setting} switches peer-to-peer off, although NVLink joins these GPUs"),
                format!("{WHY}: many times slower than NVLink"),
                format!("`unset {setting}` (look into /etc/nccl.conf and ~/.nccl.conf too); NCCL_P2P_LEVEL=NVL allows it over NVLink only"),
            );
        } else if over_pcie {
            sheet.note(
                format!("{setting} switches peer-to-peer off, which the driver calls OK"),
                format!("{WHY}: slower, and right where the driver is wrong"),
                format!("`unset {setting}` once you have proved that peer-to-peer works here (see above)"),
            );
        }
    }
    let level = value(snapshot, "NCCL_P2P_LEVEL")
        .filter(|level| !level.is_empty() && !never && *level != "NVL");
    if let Some(level) = level
        && !disabled
        && !pairs.is_empty()
        && pairs
            .iter()
            .all(|pair| !pair.is_ok() && pair.status.is_some())
    {
        let level = plain(level);
        sheet.note(
            format!(
                "NCCL_P2P_LEVEL={level} asks for peer-to-peer, which the driver does not offer here"
            ),
            "it has no effect: NCCL copies through the host's memory",
            "`unset NCCL_P2P_LEVEL`",
        );
    }
    let is_refused = |pair: &Pair| !pair.is_ok() && pair.status.is_some();
    let needs_host = setting.is_some() || pairs.iter().any(is_refused);
    if is_set(snapshot, "NCCL_SHM_DISABLE") && needs_host && !pairs.is_empty() {
        sheet.warning(
            "NCCL_SHM_DISABLE takes the way through shared memory, which GPUs here need",
            "NCCL then sends what ranks of this machine exchange through the network, far slower; without a network card it fails",
            "`unset NCCL_SHM_DISABLE`",
        );
    }
    let mut nics = snapshot.system.nics.iter();
    let has_rdma = nics.any(|nic| nic.is_rdma && nic.is_up == Reading::Known(true));
    if is_set(snapshot, "NCCL_IB_DISABLE") && has_rdma {
        sheet.warning(
            "NCCL_IB_DISABLE is set, although there is an RDMA adapter that is up",
            "jobs of several nodes use TCP sockets instead: slower, and they take CPU time",
            "`unset NCCL_IB_DISABLE`, unless it hangs with it",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, joined_all, machine};
    use paceline_gpu::snapshot::{Capability, Nic, P2pStatus};

    fn with(variables: &[(&str, &str)], status: P2pStatus, has_nvlink: bool) -> Snapshot {
        let mut snapshot = machine(2);
        joined_all(&mut snapshot, status);
        if has_nvlink {
            let position = Capability::ALL
                .iter()
                .position(|known| *known == Capability::NvLink);
            for link in &mut snapshot.links {
                link.p2p[position.expect("known")] = P2pStatus::Ok.into();
            }
        }
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        snapshot.system.variables = variables.iter().map(owned).collect();
        snapshot
    }

    #[test]
    fn devices_that_do_not_exist_end_the_list() {
        let speaks = |list: &str, expect: &[&str]| {
            let snapshot = with(&[("CUDA_VISIBLE_DEVICES", list)], P2pStatus::Ok, false);
            check(judge, &snapshot, expect);
        };
        let error = ["error: variables: `unset CUDA_VISIBLE_DEVICES`"];
        speaks("0,1", &[]);
        speaks("1", &[]);
        speaks(" 1 , 0 ", &[]);
        speaks("2", &error);
        speaks("0,2", &error);
        speaks("0,two", &error);
        speaks("GPU-0", &[]);
        speaks("GPU-9", &error);
        speaks("MIG-77", &[]);
        speaks("", &["warning: variables: `unset"]);
        speaks("-1", &["warning: variables: `unset"]);
    }

    #[test]
    fn nccl_without_peer_to_peer_is_judged_by_what_it_loses() {
        let speaks = |name: &str, value: &str, status, has_nvlink, expect: &[&str]| {
            check(judge, &with(&[(name, value)], status, has_nvlink), expect);
        };
        let (ok, bad) = (P2pStatus::Ok, P2pStatus::GpuNotSupported);
        let warning = ["warning: variables: `unset NCCL_P2P_DISABLE`"];
        speaks("NCCL_P2P_DISABLE", "1", ok, true, &warning);
        speaks(
            "NCCL_P2P_LEVEL",
            "LOC",
            ok,
            true,
            &["warning: variables: `unset NCCL_P2P_LEVEL`"],
        );
        speaks("NCCL_P2P_LEVEL", "NVL", ok, true, &[]);
        speaks(
            "NCCL_P2P_DISABLE",
            "1",
            ok,
            false,
            &["note: variables: `unset NCCL_P2P_DISABLE`"],
        );
        speaks("NCCL_P2P_DISABLE", "1", bad, false, &[]);
        speaks(
            "NCCL_P2P_LEVEL",
            "SYS",
            bad,
            false,
            &["note: variables: `unset NCCL_P2P_LEVEL`"],
        );
        speaks("NCCL_P2P_LEVEL", "SYS", ok, false, &[]);
        speaks("NCCL_P2P_DISABLE", "0", ok, true, &[]);
    }

    #[test]
    fn shared_memory_must_stay_where_peer_to_peer_is_not() {
        let speaks = |variables: &[(&str, &str)], status, expect: &[&str]| {
            check(judge, &with(variables, status, false), expect);
        };
        let set = ("NCCL_SHM_DISABLE", "1");
        let warning = "warning: variables: `unset NCCL_SHM_DISABLE`";
        speaks(&[set], P2pStatus::Ok, &[]);
        speaks(&[set], P2pStatus::NotSupported, &[warning]);
        let both = [set, ("NCCL_P2P_DISABLE", "1")];
        speaks(
            &both,
            P2pStatus::Ok,
            &["note: variables: `unset NCCL_P2P_DISABLE`", warning],
        );
    }

    #[test]
    fn rdma_that_is_switched_off_is_told() {
        let mut snapshot = with(&[("NCCL_IB_DISABLE", "1")], P2pStatus::Ok, true);
        check(judge, &snapshot, &[]);
        snapshot.system.nics = vec![Nic {
            is_rdma: true,
            is_up: true.into(),
            ..Nic::default()
        }];
        check(
            judge,
            &snapshot,
            &["warning: variables: `unset NCCL_IB_DISABLE`"],
        );
    }
}
