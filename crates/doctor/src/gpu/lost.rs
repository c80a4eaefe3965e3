//! Devices that do not answer any more.
//!
//! *Source*: `NVML_ERROR_GPU_IS_LOST` in NVIDIA's NVML reference; Xid 79 in NVIDIA's catalogue of Xid errors.

use paceline_gpu::snapshot::{Device, Snapshot};
use paceline_words::say;

use super::rules::indices;
use super::words::gpus;
use crate::checks;
use crate::finding::Notes;

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let lost = indices(&snapshot.devices, Device::is_lost);
    let left = indices(&snapshot.devices, |device| !device.is_lost());
    if lost.is_empty() {
        return;
    }
    let lang = notes.lang;
    let (does, it) = match lost.len() {
        1 => ("does", "it"),
        _ => ("do", "they"),
    };
    let (whom, names) = (gpus(&lost, lang), left.iter().map(u32::to_string));
    let names = names.collect::<Vec<_>>().join(",");
    let rest = match left.len() {
        0 => String::new(),
        1..=8 => say!(
            lang,
            "; until then `CUDA_VISIBLE_DEVICES={names}` trains on the rest, if CUDA starts at all",
            ". 그때까지는 CUDA가 초기화된다면 `CUDA_VISIBLE_DEVICES={names}`로 나머지 GPU에서 학습할 수 있습니다"
        ),
        _ => say!(
            lang,
            "; until then the others can be named in CUDA_VISIBLE_DEVICES, if CUDA starts at all",
            ". 그때까지는 CUDA가 초기화된다면 CUDA_VISIBLE_DEVICES로 나머지 GPU를 지정해 쓸 수 있습니다"
        ),
    };
    notes.sheet(checks::LOST_GPUS).error(
        say!(
            lang,
            "{whom} {does} not answer any more: {it} fell off the bus",
            "{whom}: 버스에서 떨어져 나가 응답하지 않음"
        ),
        say!(
            lang,
            "every program on it hangs or fails, often all programs that use CUDA; power, heat, a riser or the slot are the usual causes",
            "이 GPU를 쓰는 프로그램이 멈추거나 실패하고, CUDA를 쓰는 다른 프로그램까지 영향을 받는 경우가 많습니다. 전원, 발열, 라이저, 슬롯이 흔한 원인입니다"
        ),
        say!(
            lang,
            "save what `sudo dmesg | grep -i xid` says, switch the machine off and on (a restart alone often is not enough), check \
             power cables, riser and cooling; if it comes again, have the card replaced{rest}",
            "`sudo dmesg | grep -i xid`의 출력을 저장하고, 머신의 전원을 껐다 켜세요(재시작만으로는 부족할 때가 많습니다). 전원 케이블, 라이저, 냉각을 \
             확인하고, 다시 나타나면 카드를 교체하세요{rest}"
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
