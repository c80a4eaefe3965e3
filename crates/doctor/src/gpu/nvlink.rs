//! NVLinks: those that are down while others are up, and errors on them.
//!
//! *Source*: NVLink counters in NVIDIA's NVML reference; how many links a device has is compared with its siblings, since a
//! board need not wire all of them.

use paceline_gpu::snapshot::{Device, NvLink, Snapshot};

use super::fabric::has_switches;
use super::pairs::active;
use super::words::{gpus, gpus_that, grouped, joined, listed, model};
use crate::finding::Notes;

/// From so many errors of one link on it is a warning. Our own choice: a link that is retrained now and then has a few.
const ERRORS_MANY: u64 = 100;

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let with = snapshot.devices.iter().filter(|device| all(device) > 0);
    let with: Vec<&Device> = with.collect();
    if with.is_empty() {
        return;
    }
    let mut sheet = notes.sheet("NVLink");
    let counts = with
        .iter()
        .map(|device| ((up(device), all(device)), device.index));
    let words = grouped(counts);
    let words = words
        .iter()
        .map(|((up, all), of)| format!("{up} of {all} links up on {}", gpus(of)));
    sheet.fact(listed(words.collect()));
    judge_setting(snapshot, notes);
    judge_missing(snapshot, &with, notes);
    judge_errors(&with, notes);
}

fn all(device: &Device) -> usize {
    device.nvlinks.known().map_or(0, Vec::len)
}

fn up(device: &Device) -> usize {
    active(device).count()
}

/// Whether every link of the device says if it is up.
fn tells_all(device: &Device) -> bool {
    let mut links = device.nvlinks.known().into_iter().flatten();
    links.all(|link| link.is_active.known().is_some())
}

fn judge_missing(snapshot: &Snapshot, with: &[&Device], notes: &mut Notes) {
    let mut sheet = notes.sheet("NVLink");
    let told: Vec<&&Device> = with.iter().filter(|device| tells_all(device)).collect();
    if told.len() > 1 && told.iter().all(|device| up(device) == 0) {
        // Without the fabric manager all are down, and that has been said.
        if !has_switches(snapshot) {
            sheet.note(
                "these GPUs have NVLinks, and none is up",
                "they talk over PCIe; with an NVLink bridge each pair has several times the speed, and peer-to-peer that works",
                "if there is a bridge, check its seat on both cards, and that both are in the slots that it is made for; `nvidia-smi nvlink -s`",
            );
        }
        return;
    }
    for (name, of) in grouped(told.iter().map(|device| (model(device), device.index))) {
        let siblings = told.iter().filter(|device| of.contains(&device.index));
        let most = siblings.clone().map(|device| up(device)).max().unwrap_or(0);
        let fewer = siblings.filter(|device| up(device) < most);
        for (number, some) in grouped(fewer.map(|device| (up(device), device.index))) {
            let whom = gpus_that(&some, "has", "have");
            sheet.warning(
                format!("{whom} {number} NVLinks up, others of this kind ({name}) have {most}"),
                "collectives run at the speed of the slowest link; with switches, a GPU whose links are down takes the whole job with it",
                "`nvidia-smi nvlink -s` names the links; reset the GPUs or start the machine again; if they stay down, seat the bridge or \
                 board anew or have it repaired",
            );
        }
    }
}

fn judge_setting(snapshot: &Snapshot, notes: &mut Notes) {
    let mut settings = snapshot.system.driver_parameters.iter();
    if settings.any(|(name, value)| name.ends_with("NvLinkDisable") && value.trim() != "0") {
        notes.sheet("NVLink").warning(
            "a setting of the driver (NVreg_NvLinkDisable) switches NVLink off",
            "GPUs talk over PCIe, at a fraction of the speed; on a board with NVSwitches they have no peer-to-peer at all",
            "take it out of /etc/modprobe.d or the kernel's command line, then `sudo update-initramfs -u` and start the machine again",
        );
    }
}

fn judge_errors(with: &[&Device], notes: &mut Notes) {
    let bad: Vec<(u64, String)> = with
        .iter()
        .flat_map(|device| {
            let links = device.nvlinks.known().into_iter().flatten();
            let errors = |link: &NvLink| link.errors.known().copied().filter(|errors| *errors > 0);
            links.filter_map(move |link| {
                let errors = errors(link)?;
                Some((
                    errors,
                    format!("{errors} on link {} of GPU {}", link.index, device.index),
                ))
            })
        })
        .collect();
    let Some(worst) = bad.iter().map(|(errors, _)| *errors).max() else {
        return;
    };
    let what = format!(
        "NVLinks counted errors: {}",
        joined(bad.into_iter().map(|(_, words)| words).collect())
    );
    let why = "each is repaired by sending again, which costs time; a link with many goes down in the end, and the job with it";
    let fix = "`nvidia-smi nvlink -e` now and after a run: a count that grows means a bad bridge, socket or board";
    let mut sheet = notes.sheet("NVLink");
    match worst >= ERRORS_MANY {
        true => sheet.warning(what, why, fix),
        false => sheet.note(what, why, fix),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, machine};
    use paceline_gpu::snapshot::{Gap, Reading};

    /// A machine whose devices have so many links up, of four.
    fn with(up: &[usize]) -> Snapshot {
        let mut snapshot = machine(up.len());
        for (device, up) in snapshot.devices.iter_mut().zip(up) {
            let link = |index: u32| NvLink {
                index,
                is_active: ((index as usize) < *up).into(),
                errors: 0.into(),
                ..NvLink::default()
            };
            device.nvlinks = (0..4).map(link).collect::<Vec<_>>().into();
        }
        snapshot
    }

    #[test]
    fn a_device_with_fewer_links_than_its_siblings_is_named() {
        check(judge, &with(&[4, 4, 4, 4]), &[]);
        check(judge, &with(&[2, 2]), &[]);
        check(
            judge,
            &with(&[4, 3, 4, 0]),
            &["warning: NVLink: `nvidia-smi nvlink -s`"; 2],
        );
        let mut mixed = with(&[4, 2]);
        mixed.devices[1].name = "Another GPU".to_owned().into();
        check(judge, &mixed, &[]);
    }

    #[test]
    fn cards_without_a_bridge_are_noted() {
        check(
            judge,
            &with(&[0, 0]),
            &["note: NVLink: if there is a bridge"],
        );
        check(judge, &with(&[0]), &[]);
        check(judge, &machine(2), &[]);
    }

    #[test]
    fn a_driver_that_was_told_to_leave_nvlink_alone_is_named() {
        let mut snapshot = with(&[2, 2]);
        let set = |value: &str| vec![("NVreg_NvLinkDisable".to_owned(), value.to_owned())];
        snapshot.system.driver_parameters = set("1");
        check(judge, &snapshot, &["warning: NVLink: take it out"]);
        snapshot.system.driver_parameters = set("0");
        check(judge, &snapshot, &[]);
    }

    #[test]
    fn links_that_do_not_tell_are_not_counted_as_down() {
        let mut snapshot = with(&[4, 4]);
        if let Reading::Known(links) = &mut snapshot.devices[1].nvlinks {
            links[3].is_active = Reading::missing(Gap::NoFunction);
        }
        check(judge, &snapshot, &[]);
    }

    #[test]
    fn errors_are_a_note_and_many_a_warning() {
        let speaks = |errors: u64, expect: &str| {
            let mut snapshot = with(&[4, 4]);
            if let Reading::Known(links) = &mut snapshot.devices[0].nvlinks {
                links[2].errors = errors.into();
            }
            check(judge, &snapshot, &[expect]);
        };
        speaks(1, "note: NVLink: `nvidia-smi nvlink -e`");
        speaks(9_000, "warning: NVLink: `nvidia-smi nvlink -e`");
    }
}
