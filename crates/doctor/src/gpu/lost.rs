//! Devices that do not answer any more.
//!
//! *Source*: `NVML_ERROR_GPU_IS_LOST` in NVIDIA's NVML reference; Xid 79 in NVIDIA's catalogue of Xid errors.

use paceline_gpu::snapshot::{Device, Snapshot};

use super::rules::indices;
use super::words::gpus;
use crate::finding::Notes;

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let lost = indices(&snapshot.devices, Device::is_lost);
    let left = indices(&snapshot.devices, |device| !device.is_lost());
    if lost.is_empty() {
        return;
    }
    let (does, it) = match lost.len() {
        1 => ("does", "it"),
        _ => ("do", "they"),
    };
    let names: Vec<String> = left.iter().map(u32::to_string).collect();
    let rest = match left.len() {
        0 => String::new(),
        1..=8 => format!(
            "; until then `CUDA_VISIBLE_DEVICES={}` trains on the rest, if CUDA starts at all",
            names.join(",")
        ),
        _ => "; until then the others can be named in CUDA_VISIBLE_DEVICES, if CUDA starts at all"
            .to_owned(),
    };
    notes.sheet("lost GPUs").error(
        format!("{} {does} not answer any more: {it} fell off the bus", gpus(&lost)),
        "every program on it hangs or fails, often all programs that use CUDA; power, heat, a riser or the slot are the usual causes",
        format!(
            "save what `sudo dmesg | grep -i xid` says, switch the machine off and on (a restart alone often is not enough), check \
             power cables, riser and cooling; if it comes again, have the card replaced{rest}"
        ),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, machine};
    use paceline_gpu::snapshot::{Gap, Reading};

    #[test]
    fn one_lost_reading_gives_a_device_away() {
        check(judge, &machine(2), &[]);
        let mut snapshot = machine(3);
        snapshot.devices[1].memory = Reading::missing(Gap::Lost);
        check(judge, &snapshot, &["error: lost GPUs: save what"]);
        let mut notes = Notes::default();
        judge(&snapshot, &mut notes);
        assert_eq!(
            notes.findings[0].what,
            "GPU 1 does not answer any more: it fell off the bus"
        );
        assert!(notes.findings[0].fix.contains("CUDA_VISIBLE_DEVICES=0,2"));
    }

    #[test]
    fn a_device_that_merely_cannot_tell_is_not_lost() {
        let mut snapshot = machine(1);
        snapshot.devices[0].memory = Reading::missing(Gap::NotSupported);
        check(judge, &snapshot, &[]);
    }
}
