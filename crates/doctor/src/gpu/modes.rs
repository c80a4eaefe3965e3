//! Modes that an administrator has set: MIG, exclusive use, persistence; and monitors.
//!
//! *Source*: NVIDIA's MIG user guide (one instance for a CUDA process, no peer-to-peer), NCCL's `init.cc` and user guide (several
//! ranks on one GPU), compute modes and persistence in the manual of `nvidia-smi`.

use paceline_gpu::snapshot::{Device, Reading, Snapshot};

use super::rules::{self, Rule, rules};
use crate::finding::Notes;

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    rules::judge(RULES, &snapshot.devices, notes);
}

const RULES: &[Rule] = rules! {
    Error "MIG", has_no_instance =>
        "MIG is on, and {has|have} no instance",
        "no program can use the device before it is divided",
        "`sudo nvidia-smi mig -cgi PROFILE -C` makes instances (`nvidia-smi mig -lgip` lists profiles), or `sudo nvidia-smi -i N -mig 0` \
         switches MIG off";
    Warning "MIG", |device| is_divided(device) && !has_no_instance(device) =>
        "MIG divides {} into instances",
        "a process sees one instance only, and there is no peer-to-peer or NVLink between them; NCCL takes several ranks on one GPU for a \
         mistake and refuses to start (from 2.30 on NCCL_MULTI_RANK_GPU_ENABLE=1 lets it try)",
        "train with one process per instance, named in CUDA_VISIBLE_DEVICES (`nvidia-smi -L`), each a job of its own; to train on whole \
         GPUs `sudo nvidia-smi -i N -mig 0`, when nothing runs on them";
    Note "MIG", |device| device.mig.known().is_some_and(|mig| mig.is_on != mig.will_be_on) =>
        "MIG of {} changes with the next reset",
        "a job that begins after it finds other devices",
        "`sudo nvidia-smi -r -i N` when nothing runs on it, or start the machine again";
    Error "compute mode", |device| mode(device) == "prohibited" =>
        "{is|are} closed to programs (compute mode prohibited)",
        "no CUDA program can use it: \"all CUDA-capable devices are busy or unavailable\"",
        "`sudo nvidia-smi -i N -c DEFAULT`";
    Error "compute mode", |device| mode(device).starts_with("exclusive") && has_program(device) =>
        "{is|are} in exclusive mode and in use",
        "the next one fails: \"all CUDA-capable devices are busy or unavailable\"",
        "wait for it or end it; or `sudo nvidia-smi -i N -c DEFAULT`";
    Note "compute mode", |device| mode(device).starts_with("exclusive") && !has_program(device) =>
        "{takes|take} one process at a time (exclusive mode)",
        "several ranks on one GPU, a second job, or an evaluation beside the training fail",
        "start one rank per GPU; `sudo nvidia-smi -i N -c DEFAULT` if you mean several";
    Note "persistence", |device| device.persistence == Reading::Known(false) =>
        "persistence mode is off on {}",
        "the driver shuts a GPU down when the last program leaves it: each first start takes seconds longer, and clocks and limits that \
         were set are forgotten",
        "`sudo nvidia-smi -pm 1`, or `sudo systemctl enable --now nvidia-persistenced` for good";
    Note "display", |device| device.has_display == Reading::Known(true) =>
        "a monitor hangs on {}",
        "the desktop takes some memory and time of it; in data-parallel training all others wait for it",
        "connect the monitor to the CPU's graphics or to a card that does not train";
};

fn is_divided(device: &Device) -> bool {
    device.mig.known().is_some_and(|mig| mig.is_on)
}

fn has_no_instance(device: &Device) -> bool {
    is_divided(device) && device.mig_devices == Reading::Known(0)
}

fn mode(device: &Device) -> &str {
    device.compute_mode.known().map_or("", String::as_str)
}

fn has_program(device: &Device) -> bool {
    let processes = device.processes.known().into_iter().flatten();
    processes.into_iter().any(|process| process.is_compute)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, machine};
    use paceline_gpu::snapshot::{Holder, Mode};

    fn with(change: impl Fn(&mut Device)) -> Snapshot {
        let mut snapshot = machine(2);
        change(&mut snapshot.devices[0]);
        snapshot
    }

    fn mig(is_on: bool, will_be_on: bool, instances: u32) -> Snapshot {
        with(|device| {
            device.mig = Mode { is_on, will_be_on }.into();
            device.mig_devices = instances.into();
        })
    }

    #[test]
    fn mig_is_told_by_what_it_leaves_to_programs() {
        check(judge, &mig(false, false, 0), &[]);
        check(
            judge,
            &mig(true, true, 0),
            &["error: MIG: `sudo nvidia-smi mig -cgi"],
        );
        check(
            judge,
            &mig(true, true, 3),
            &["warning: MIG: train with one process"],
        );
        check(
            judge,
            &mig(false, true, 0),
            &["note: MIG: `sudo nvidia-smi -r"],
        );
    }

    #[test]
    fn an_exclusive_device_is_an_error_once_it_is_taken() {
        let mode = |mode: &str, is_taken: bool| {
            with(|device| {
                device.compute_mode = mode.to_owned().into();
                let holder = Holder {
                    pid: 7,
                    is_compute: true,
                    ..Holder::default()
                };
                device.processes = if is_taken { vec![holder] } else { Vec::new() }.into();
            })
        };
        check(judge, &mode("default", true), &[]);
        check(
            judge,
            &mode("exclusive_process", false),
            &["note: compute mode: start one rank"],
        );
        check(
            judge,
            &mode("exclusive_process", true),
            &["error: compute mode: wait for it"],
        );
        check(
            judge,
            &mode("prohibited", false),
            &["error: compute mode: `sudo nvidia-smi"],
        );
    }

    #[test]
    fn persistence_and_monitors_are_notes() {
        check(
            judge,
            &with(|device| device.persistence = false.into()),
            &["note: persistence: `sudo nvidia-smi -pm 1`"],
        );
        check(judge, &with(|device| device.persistence = true.into()), &[]);
        check(
            judge,
            &with(|device| device.has_display = true.into()),
            &["note: display: connect the monitor"],
        );
        check(
            judge,
            &with(|device| device.has_display = false.into()),
            &[],
        );
    }
}
