//! Devices that differ: the slowest sets the pace, the smallest memory bounds the batch.
//!
//! *Source*: order of devices: "CUDA Environment Variables" in NVIDIA's CUDA programming guide.

use paceline_gpu::snapshot::{Device, Snapshot};
use paceline_words::say;

use super::words::{gpus, grouped, joined, model};
use crate::checks;
use crate::finding::{Notes, size};

/// Memory of one model differs by some percent, with error correction on or off.
const MEMORY_PERCENT: u64 = 90;

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let devices = snapshot.devices.iter();
    let devices: Vec<&Device> = devices
        .filter(|device| device.name.known().is_some())
        .collect();
    let lang = notes.lang;
    let models = grouped(
        devices
            .iter()
            .map(|device| (model(device, lang), device.index)),
    );
    let memories = devices.iter().filter_map(|device| device.memory.known());
    let bytes = memories.map(|memory| memory.total_bytes);
    let least = bytes.clone().min().unwrap_or(0);
    let most = bytes.max().unwrap_or(0);
    let differs_in_memory = least < most / 100 * MEMORY_PERCENT;
    if models.len() > 1 {
        let smallest = differs_in_memory.then_some(least);
        judge_models(snapshot, &devices, &models, smallest, notes);
    } else if differs_in_memory {
        let (least, most) = (size(least), size(most));
        notes.sheet(checks::GPUS).warning(
            say!(
                lang,
                "GPUs of one model have {least} to {most} of memory",
                "같은 모델의 GPU인데 메모리 크기가 다름: {least}~{most}"
            ),
            say!(
                lang,
                "each rank of data-parallel training gets the same share of a batch: the smallest memory decides how large it can be",
                "데이터 병렬 학습에서는 모든 랭크가 배치를 똑같이 나눠 갖습니다. 배치 크기는 메모리가 가장 작은 GPU에 맞춰야 합니다"
            ),
            say!(
                lang,
                "choose a batch for the smallest, or leave it out with CUDA_VISIBLE_DEVICES; a card that should have more may have memory put out \
                 of use, or MIG on",
                "가장 작은 메모리에 맞는 배치를 고르거나, CUDA_VISIBLE_DEVICES로 그 GPU를 빼세요. 원래 더 커야 하는 카드라면 불량 메모리가 제외되었거나 \
                 MIG가 켜져 있을 수 있습니다"
            ),
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
    let lang = notes.lang;
    let named = models
        .iter()
        .map(|(name, of)| format!("{name} ({})", gpus(of, lang)));
    let named = joined(named.collect(), lang);
    let memory = smallest.map(size).map(|size| {
        say!(
            lang,
            ", the smallest memory ({size}) bounds the batch of all",
            ", 배치 크기는 가장 작은 메모리({size})에 맞춰야 합니다"
        )
    });
    let memory = memory.unwrap_or_default();
    let mut sheet = notes.sheet(checks::GPUS);
    sheet.warning(
        say!(
            lang,
            "the GPUs are of different models: {named}",
            "GPU 모델이 서로 다름: {named}"
        ),
        say!(
            lang,
            "in data-parallel training each step ends when the slowest is done{memory}; between different chips the driver offers no peer-to-peer",
            "데이터 병렬 학습에서는 가장 느린 GPU가 끝나야 스텝이 끝납니다{memory}. 서로 다른 칩 사이에는 드라이버가 P2P를 제공하지 않습니다"
        ),
        say!(
            lang,
            "train on one model at a time: name its GPUs in CUDA_VISIBLE_DEVICES, together with CUDA_DEVICE_ORDER=PCI_BUS_ID",
            "한 번에 한 모델의 GPU만 쓰세요. CUDA_DEVICE_ORDER=PCI_BUS_ID와 함께 CUDA_VISIBLE_DEVICES로 지정하면 됩니다"
        ),
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
        let named = joined(named.collect(), lang);
        sheet.note(
            say!(
                lang,
                "the GPUs have different compute capabilities: {named}",
                "GPU의 compute capability가 서로 다름: {named}"
            ),
            say!(
                lang,
                "kernels that were built for one of them do not run on the others, or run after a long compilation; numbers may differ in the \
                 last digits between ranks",
                "한쪽에 맞춰 빌드한 커널은 다른 쪽에서 실행되지 않거나, 오래 컴파일한 뒤에야 실행됩니다. 랭크마다 값의 끝자리가 다를 수도 있습니다"
            ),
            say!(
                lang,
                "build for all of them (TORCH_CUDA_ARCH_LIST, `nvcc -gencode`), or train on one kind",
                "모든 GPU에 맞게 빌드하거나(TORCH_CUDA_ARCH_LIST, `nvcc -gencode`), 한 종류만 써서 학습하세요"
            ),
        );
    }
    let order = snapshot.system.variable("CUDA_DEVICE_ORDER");
    if order.map(str::trim) != Some("PCI_BUS_ID") {
        sheet.note(
            say!(
                lang,
                "CUDA counts these GPUs in another order than `nvidia-smi` and this report",
                "CUDA가 매기는 GPU 번호가 `nvidia-smi`나 이 보고서의 번호와 다름"
            ),
            say!(
                lang,
                "without CUDA_DEVICE_ORDER CUDA puts the fastest first: CUDA_VISIBLE_DEVICES and `cuda:0` may mean another card than you think",
                "CUDA_DEVICE_ORDER가 없으면 CUDA는 가장 빠른 GPU를 맨 앞에 둡니다. CUDA_VISIBLE_DEVICES나 `cuda:0`이 생각과 다른 카드일 수 있습니다"
            ),
            say!(
                lang,
                "`export CUDA_DEVICE_ORDER=PCI_BUS_ID`, or name GPUs by UUID",
                "`export CUDA_DEVICE_ORDER=PCI_BUS_ID`를 실행하거나, GPU를 UUID로 지정하세요"
            ),
        );
    }
}

fn judge_ecc(devices: &[&Device], notes: &mut Notes) {
    let lang = notes.lang;
    let modes = devices.iter().filter_map(|device| {
        let is_on = device.ecc.known()?.is_on;
        Some(((model(device, lang), is_on), device.index))
    });
    let groups = grouped(modes);
    for ((name, _), off) in groups.iter().filter(|((_, is_on), _)| !is_on) {
        let on = groups
            .iter()
            .find(|((other, is_on), _)| *is_on && other == name);
        let Some((_, on)) = on else {
            continue;
        };
        let (on, off) = (gpus(on, lang), gpus(off, lang));
        notes.sheet(checks::MEMORY_ERRORS).note(
            say!(
                lang,
                "memory of {on} is error-corrected, that of {off} of the same model is not",
                "같은 모델인데 ECC 설정이 다름: 켜짐 {on}, 꺼짐 {off}"
            ),
            say!(
                lang,
                "errors go unseen on the latter; memory and speed differ by some percent between ranks",
                "ECC가 꺼진 GPU에서는 메모리 오류가 드러나지 않습니다. 랭크마다 메모리와 속도도 몇 퍼센트씩 다릅니다"
            ),
            say!(
                lang,
                "`sudo nvidia-smi -i N -e 1`, and a reset or a start of the machine",
                "`sudo nvidia-smi -i N -e 1`을 실행한 뒤 GPU를 리셋하거나 머신을 재시작하세요"
            ),
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
