//! Memory errors of devices, and PCIe packets that had to be sent again.
//!
//! *Source*: NVIDIA's "GPU Memory Error Management" (row remapping, containment) and "Dynamic Page Retirement".

use paceline_gpu::snapshot::{Device, Snapshot};

use super::rules::{self, Rule, rules};
use super::words::{gpus, grouped, joined, listed};
use crate::finding::{Notes, count};

/// Packets sent again that are worth a word. Our own choice: a sound link has a handful after months.
const REPLAYS_MIN: u64 = 1_000;

/// Corrected errors since the driver was loaded that are worth a word. Our own choice; each of them did no harm.
const CORRECTED_MIN: u64 = 1_000;

const RULES: &[Rule] = rules! {
    Error "memory errors", |device| device.errors.retirement_failed.known() == Some(&true) =>
        "{} could not put bad memory out of use",
        "no spare memory is left for it: programs go on using what is known to fail",
        "take the card out of training and have it replaced; `nvidia-smi -q -d ROW_REMAPPER,PAGE_RETIREMENT` is what the maker asks for";
    Error "memory errors", |device| device.errors.uncorrected.known().is_some_and(|errors| *errors > 0) =>
        "{} had memory errors that could not be corrected since the driver was loaded",
        "programs that met one were ended or computed with wrong numbers, and the next may be too",
        "do not trust results of that time; `sudo nvidia-smi -r -i N` when nothing runs on it, or start the machine again; if errors \
         come back, have the card replaced";
    Warning "memory errors", |device| device.errors.retirement_pending.known() == Some(&true) =>
        "{waits|wait} for a reset to put bad memory out of use",
        "until then the bad place may be met again",
        "when nothing runs on it `sudo nvidia-smi -r -i N`, or start the machine again";
    Note "memory errors", |device| device.errors.uncorrected.known() == Some(&0) && device.errors.uncorrected_ever.known().is_some_and(|errors| *errors > 0) =>
        "{} had memory errors that could not be corrected, in an earlier time",
        "none since the driver was loaded: what failed then has been put out of use or was a single event",
        "watch it: `nvidia-smi -q -d ECC`; a count that grows is a reason to have the card replaced";
    Note "memory errors", |device| device.errors.corrected.known().is_some_and(|errors| *errors >= CORRECTED_MIN) =>
        "{} corrected more than 1000 memory errors since the driver was loaded",
        "no result was wrong; many of them often come before one that cannot be corrected",
        "watch it: `nvidia-smi -q -d ECC`; check the cooling";
};

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let mut sheet = notes.sheet("memory errors");
    let devices = &snapshot.devices;
    let known = |device: &&Device| device.errors.uncorrected.known().is_some();
    match devices.iter().filter(known).count() {
        0 if devices.is_empty() => {}
        0 => sheet.fact("not counted: no GPU here tells of memory errors"),
        _ => sheet.fact(said(devices)),
    }

    rules::judge(RULES, devices, notes);
    judge_replays(devices, notes);
}

fn judge_replays(devices: &[Device], notes: &mut Notes) {
    let named = devices.iter().filter_map(|device| {
        let replays = device.errors.pcie_replays.known()?;
        (*replays >= REPLAYS_MIN).then(|| format!("{replays} of GPU {}", device.index))
    });
    let named: Vec<String> = named.collect();
    if named.is_empty() {
        return;
    }
    notes.sheet("PCIe").note(
        format!("PCIe packets had to be sent again: {}", joined(named)),
        "each costs time only, but a good link has next to none: a riser, a cable or dirty contacts",
        "seat the card anew, leave the riser out, or set the slot to a lower generation in the firmware",
    );
}

/// "none on 8 GPUs", or who has how many.
fn said(devices: &[Device]) -> String {
    let counted = devices.iter().filter_map(|device| {
        let errors = &device.errors;
        let corrected = errors.corrected.known().copied().unwrap_or(0);
        Some(((corrected, *errors.uncorrected.known()?), device.index))
    });
    let groups = grouped(counted);
    let words =
        groups.iter().map(
            |((corrected, uncorrected), of)| match (corrected, uncorrected) {
                (0, 0) => format!("none on {}", count(of.len(), "GPU")),
                _ => format!("{}: {corrected} corrected, {uncorrected} not", gpus(of)),
            },
        );
    listed(words.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, machine};
    use paceline_gpu::snapshot::Errors;

    #[test]
    fn errors_are_judged_by_what_they_do_to_results() {
        let speaks = |errors: Errors, expect: &[&str]| {
            let mut snapshot = machine(2);
            snapshot.devices[1].errors = errors;
            check(judge, &snapshot, expect);
        };
        let clean = || Errors {
            corrected: 3.into(),
            uncorrected: 0.into(),
            uncorrected_ever: 0.into(),
            retirement_pending: false.into(),
            retirement_failed: false.into(),
            pcie_replays: 5.into(),
            ..Errors::default()
        };
        speaks(Errors::default(), &[]);
        speaks(clean(), &[]);
        speaks(
            Errors {
                uncorrected: 1.into(),
                uncorrected_ever: 1.into(),
                ..clean()
            },
            &["error: memory errors: do not trust"],
        );
        speaks(
            Errors {
                uncorrected_ever: 2.into(),
                ..clean()
            },
            &["note: memory errors: watch it"],
        );
        speaks(
            Errors {
                retirement_pending: true.into(),
                ..clean()
            },
            &["warning: memory errors: when nothing runs"],
        );
        speaks(
            Errors {
                retirement_failed: true.into(),
                ..clean()
            },
            &["error: memory errors: take the card out"],
        );
        speaks(
            Errors {
                corrected: 5_000.into(),
                pcie_replays: 70_000.into(),
                ..clean()
            },
            &["note: memory errors: watch it", "note: PCIe: seat the card"],
        );
    }

    #[test]
    fn the_table_counts_them() {
        let fact = |errors: [u64; 2]| {
            let mut snapshot = machine(2);
            for (device, uncorrected) in snapshot.devices.iter_mut().zip(errors) {
                device.errors.uncorrected = uncorrected.into();
            }
            let mut notes = Notes::default();
            judge(&snapshot, &mut notes);
            notes.facts[0].value.clone()
        };
        assert_eq!(fact([0, 0]), "none on 2 GPUs");
        assert_eq!(fact([0, 2]), "none on 1 GPU; GPU 1: 0 corrected, 2 not");
    }
}
