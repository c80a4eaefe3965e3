//! Devices that differ: the slowest sets the pace, the smallest memory bounds the batch.
//!
//! *Source*: order of devices: "CUDA Environment Variables" in NVIDIA's CUDA programming guide.

use paceline_gpu::snapshot::{Device, Snapshot};

use super::words::{gpus, grouped, joined, model};
use crate::finding::{Notes, size};

/// Memory of one model differs by some percent, with error correction on or off.
const MEMORY_PERCENT: u64 = 90;

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let devices = snapshot.devices.iter();
    let devices: Vec<&Device> = devices
        .filter(|device| device.name.known().is_some())
        .collect();
    let models = grouped(devices.iter().map(|device| (model(device), device.index)));
    let memories = devices.iter().filter_map(|device| device.memory.known());
    let bytes = memories.map(|memory| memory.total_bytes);
    let least = bytes.clone().min().unwrap_or(0);
    let most = bytes.max().unwrap_or(0);
    let differs_in_memory = least < most / 100 * MEMORY_PERCENT;
    if models.len() > 1 {
        let smallest = differs_in_memory.then_some(least);
        judge_models(snapshot, &devices, &models, smallest, notes);
    } else if differs_in_memory {
        notes.sheet("GPUs").warning(
            format!("GPUs of one model have {} to {} of memory", size(least), size(most)),
            "each rank of data-parallel training gets the same share of a batch: the smallest memory decides how large it can be",
            "choose a batch for the smallest, or leave it out with CUDA_VISIBLE_DEVICES; a card that should have more may have memory put out \
             of use, or MIG on",
        );
    }
    judge_ecc(&devices, notes);
}

fn judge_models(
    snapshot: &Snapshot,
    devices: &[&Device],
    models: &[(String, Vec<u32>)],
    smallest: Option<u64>,
    notes: &mut Notes,
) {
    let named = models
        .iter()
        .map(|(name, of)| format!("{name} ({})", gpus(of)));
    let memory = smallest.map(size);
    let memory =
        memory.map(|size| format!(", the smallest memory ({size}) bounds the batch of all"));
    let mut sheet = notes.sheet("GPUs");
    sheet.warning(
        format!("the GPUs are of different models: {}", joined(named.collect())),
        format!(
            "in data-parallel training each step ends when the slowest is done{}; between different chips the driver offers no peer-to-peer",
            memory.unwrap_or_default()
        ),
        "train on one model at a time: name its GPUs in CUDA_VISIBLE_DEVICES, together with CUDA_DEVICE_ORDER=PCI_BUS_ID",
    );
    let mut capabilities: Vec<(u32, u32)> = devices
        .iter()
        .filter_map(|device| device.capability.known().copied())
        .collect();
    capabilities.sort_unstable();
    capabilities.dedup();
    if capabilities.len() > 1 {
        let named = capabilities
            .iter()
            .map(|(major, minor)| format!("{major}.{minor}"));
        sheet.note(
            format!("the GPUs have different compute capabilities: {}", joined(named.collect())),
            "kernels that were built for one of them do not run on the others, or run after a long compilation; numbers may differ in the \
             last digits between ranks",
            "build for all of them (TORCH_CUDA_ARCH_LIST, `nvcc -gencode`), or train on one kind",
        );
    }
    let order = snapshot.system.variable("CUDA_DEVICE_ORDER");
    if order.map(str::trim) != Some("PCI_BUS_ID") {
        sheet.note(
            "CUDA counts these GPUs in another order than `nvidia-smi` and this report",
            "without CUDA_DEVICE_ORDER CUDA puts the fastest first: CUDA_VISIBLE_DEVICES and `cuda:0` may mean another card than you think",
            "`export CUDA_DEVICE_ORDER=PCI_BUS_ID`, or name GPUs by UUID",
        );
    }
}

fn judge_ecc(devices: &[&Device], notes: &mut Notes) {
    let modes = devices
        .iter()
        .filter_map(|device| Some(((model(device), device.ecc.known()?.is_on), device.index)));
    let groups = grouped(modes);
    for ((name, _), off) in groups.iter().filter(|((_, is_on), _)| !is_on) {
        let on = groups
            .iter()
            .find(|((other, is_on), _)| *is_on && other == name);
        let Some((_, on)) = on else {
            continue;
        };
        notes.sheet("memory errors").note(
            format!(
                "memory of {} is error-corrected, that of {} of the same model is not",
                gpus(on),
                gpus(off)
            ),
            "errors go unseen on the latter; memory and speed differ by some percent between ranks",
            "`sudo nvidia-smi -i N -e 1`, and a reset or a start of the machine",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, machine};
    use paceline_gpu::snapshot::{Memory, Mode, Reading};

    fn sized(total_bytes: u64) -> Reading<Memory> {
        Memory {
            used_bytes: 0,
            total_bytes,
        }
        .into()
    }

    #[test]
    fn equal_devices_need_no_word() {
        check(judge, &machine(8), &[]);
        check(judge, &Snapshot::default(), &[]);
    }

    #[test]
    fn models_that_differ_are_a_warning_with_their_consequences() {
        let mut snapshot = machine(2);
        snapshot.devices[1].name = "Small GPU".to_owned().into();
        snapshot.devices[1].memory = sized(24 << 30);
        snapshot.devices[1].capability = (8, 6).into();
        let [models, capabilities, order] = [
            "warning: GPUs: train on one model at a time",
            "note: GPUs: build for all of them",
            "note: GPUs: `export CUDA_DEVICE_ORDER=PCI_BUS_ID`",
        ];
        check(judge, &snapshot, &[models, capabilities, order]);
        let set = ("CUDA_DEVICE_ORDER".to_owned(), "PCI_BUS_ID".to_owned());
        snapshot.system.variables = vec![set];
        check(judge, &snapshot, &[models, capabilities]);
        let mut notes = Notes::default();
        judge(&snapshot, &mut notes);
        assert!(notes.findings[0].why.contains("(24 GiB) bounds the batch"));
    }

    #[test]
    fn one_model_with_different_memory_is_a_warning() {
        let mut snapshot = machine(2);
        snapshot.devices[1].memory = sized(40 << 30);
        check(
            judge,
            &snapshot,
            &["warning: GPUs: choose a batch for the smallest"],
        );
        snapshot.devices[1].memory = sized(79 << 30);
        check(judge, &snapshot, &[]);
    }

    #[test]
    fn error_correction_should_be_alike_on_one_model() {
        let mode = |is_on| {
            Reading::Known(Mode {
                is_on,
                will_be_on: is_on,
            })
        };
        let mut snapshot = machine(2);
        snapshot.devices[0].ecc = mode(true);
        check(judge, &snapshot, &[]);
        snapshot.devices[1].ecc = mode(false);
        check(judge, &snapshot, &["note: memory errors: `sudo nvidia-smi"]);
        snapshot.devices[0].ecc = mode(false);
        check(judge, &snapshot, &[]);
    }
}
