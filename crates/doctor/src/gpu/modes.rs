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
    Error MIG, has_no_instance =>
        ("MIG is on, and {} {has|have} no instance", "{}: MIG가 켜져 있지만 인스턴스가 없음"),
        ("no program can use the device before it is divided", "인스턴스로 나누기 전에는 어떤 프로그램도 이 장치를 쓸 수 없습니다"),
        ("`sudo nvidia-smi mig -cgi PROFILE -C` makes instances (`nvidia-smi mig -lgip` lists profiles), or `sudo nvidia-smi -i N -mig 0` \
         switches MIG off",
         "`sudo nvidia-smi mig -cgi PROFILE -C`로 인스턴스를 만들거나(프로파일 목록은 `nvidia-smi mig -lgip`), `sudo nvidia-smi -i N -mig 0`으로 \
         MIG를 끄세요");
    Warning MIG, |device| is_divided(device) && !has_no_instance(device) =>
        ("MIG divides {} into instances", "{}: MIG로 여러 인스턴스로 나뉘어 있음"),
        ("a process sees one instance only, and there is no peer-to-peer or NVLink between them; NCCL takes several ranks on one GPU for a \
         mistake and refuses to start (from 2.30 on NCCL_MULTI_RANK_GPU_ENABLE=1 lets it try)",
         "프로세스 하나는 인스턴스 하나만 볼 수 있고, 인스턴스 사이에는 P2P도 NVLink도 없습니다. NCCL은 GPU 하나에 여러 랭크가 있으면 잘못된 설정으로 보고 \
         시작을 거부합니다(2.30부터는 NCCL_MULTI_RANK_GPU_ENABLE=1로 시도할 수 있습니다)"),
        ("train with one process per instance, named in CUDA_VISIBLE_DEVICES (`nvidia-smi -L`), each a job of its own; to train on whole \
         GPUs `sudo nvidia-smi -i N -mig 0`, when nothing runs on them",
         "인스턴스마다 별도의 작업으로 프로세스를 하나씩 실행하고, CUDA_VISIBLE_DEVICES로 인스턴스를 지정하세요(`nvidia-smi -L`). GPU 전체로 \
         학습하려면 실행 중인 것이 없을 때 `sudo nvidia-smi -i N -mig 0`을 실행하세요");
    Note MIG, |device| device.mig.known().is_some_and(|mig| mig.is_on != mig.will_be_on) =>
        ("MIG of {} changes with the next reset", "{}: 다음 리셋 때 MIG 설정이 바뀜"),
        ("a job that begins after it finds other devices", "그 뒤에 시작하는 작업에는 다른 장치가 보입니다"),
        ("`sudo nvidia-smi -r -i N` when nothing runs on it, or start the machine again",
         "실행 중인 것이 없을 때 `sudo nvidia-smi -r -i N`을 실행하거나 머신을 재시작하세요");
    Error COMPUTE_MODE, |device| mode(device) == "prohibited" =>
        ("{} {is|are} closed to programs (compute mode prohibited)", "{}: 프로그램이 쓸 수 없게 막혀 있음(컴퓨트 모드 prohibited)"),
        ("no CUDA program can use it: \"all CUDA-capable devices are busy or unavailable\"",
         "어떤 CUDA 프로그램도 이 GPU를 쓸 수 없습니다: \"all CUDA-capable devices are busy or unavailable\""),
        ("`sudo nvidia-smi -i N -c DEFAULT`", "`sudo nvidia-smi -i N -c DEFAULT`를 실행하세요");
    Error COMPUTE_MODE, |device| mode(device).starts_with("exclusive") && has_program(device) =>
        ("{} {is|are} in exclusive mode and in use", "{}: 독점 모드이며 이미 사용 중"),
        ("the next one fails: \"all CUDA-capable devices are busy or unavailable\"",
         "다음 프로그램은 실패합니다: \"all CUDA-capable devices are busy or unavailable\""),
        ("wait for it or end it; or `sudo nvidia-smi -i N -c DEFAULT`",
         "끝나기를 기다리거나 그 프로그램을 끝내세요. 또는 `sudo nvidia-smi -i N -c DEFAULT`를 실행하세요");
    Note COMPUTE_MODE, |device| mode(device).starts_with("exclusive") && !has_program(device) =>
        ("{} {takes|take} one process at a time (exclusive mode)", "{}: 한 번에 프로세스 하나만 쓸 수 있음(독점 모드)"),
        ("several ranks on one GPU, a second job, or an evaluation beside the training fail",
         "GPU 하나에 여러 랭크를 두거나, 두 번째 작업이나 학습 중 평가를 실행하면 실패합니다"),
        ("start one rank per GPU; `sudo nvidia-smi -i N -c DEFAULT` if you mean several",
         "GPU마다 랭크를 하나씩 시작하세요. 여러 개를 의도했다면 `sudo nvidia-smi -i N -c DEFAULT`를 실행하세요");
    Note PERSISTENCE, |device| device.persistence == Reading::Known(false) =>
        ("persistence mode is off on {}", "{}: 지속 모드(persistence mode)가 꺼져 있음"),
        ("the driver shuts a GPU down when the last program leaves it: each first start takes seconds longer, and clocks and limits that \
         were set are forgotten",
         "마지막 프로그램이 끝나면 드라이버가 GPU를 내립니다. 그래서 첫 실행마다 몇 초씩 더 걸리고, 설정해 둔 클럭과 한도가 사라집니다"),
        ("`sudo nvidia-smi -pm 1`, or `sudo systemctl enable --now nvidia-persistenced` for good",
         "`sudo nvidia-smi -pm 1`을 실행하거나, 계속 유지하려면 `sudo systemctl enable --now nvidia-persistenced`를 실행하세요");
    Note DISPLAY, |device| device.has_display == Reading::Known(true) =>
        ("a monitor hangs on {}", "{}: 모니터가 연결되어 있음"),
        ("the desktop takes some memory and time of it; in data-parallel training all others wait for it",
         "데스크톱이 메모리와 연산 시간을 조금 쓰므로, 데이터 병렬 학습에서는 나머지 GPU가 모두 이 GPU를 기다립니다"),
        ("connect the monitor to the CPU's graphics or to a card that does not train",
         "모니터를 CPU 내장 그래픽이나 학습에 쓰지 않는 카드에 연결하세요");
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
