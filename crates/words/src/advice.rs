//! The advice of errors that ranks have. A rank tells it to its launcher in English, and the launcher and what reads its files show it in
//! the reader's language.

use crate::{Lang, Word};

/// What errors advise, each as its source has it. Advice with a value in it is not among them.
const ALL: [Word; 29] = [
    // Numbers and data.
    Word::new(
        "lower --lr, set --clip-norm 1, or raise --warmup; earlier checkpoints are kept",
        "--lr을 낮추거나 --clip-norm 1을 주거나 --warmup을 키우세요. 이전 체크포인트는 남아 있습니다",
    ),
    Word::new(
        "train with --precision bf16, which has the range of f32, or check why the gradients are so large",
        "f32와 범위가 같은 --precision bf16으로 학습하거나, 그래디언트가 왜 이렇게 큰지 확인하세요",
    ),
    Word::new(
        "the file may not have been copied or downloaded completely",
        "파일이 끝까지 복사되거나 다운로드되지 않았을 수 있습니다",
    ),
    Word::new(
        "something outside the reduced gradients changed the weights: look for updates that depend on the rank, on time or on unseeded randomness, and on a GPU for sums that Burn does not repeat (its clipping by norm, Lamb, Muon: see docs/devices.md)",
        "all-reduce를 거친 그래디언트가 아닌 무언가가 가중치를 바꿨습니다. 랭크나 시간, 시드 없는 난수에 따라 달라지는 갱신이 있는지, GPU라면 Burn의 합 중 매번 달라지는 것(노름 클리핑, Lamb, Muon: docs/devices.md)이 있는지 확인하세요",
    ),
    Word::new(
        "take machines of one kind, or --same-bits warn (DdpOptions::same_bits) if the model does not use these operations",
        "같은 종류의 머신을 쓰거나, 모델이 이 연산을 쓰지 않는다면 --same-bits warn(DdpOptions::same_bits)을 주세요",
    ),
    // Files.
    Word::new(
        "free some space, then continue with --resume; earlier checkpoints are untouched",
        "디스크 공간을 확보한 뒤 --resume으로 이어서 실행하세요. 이전 체크포인트는 그대로입니다",
    ),
    Word::new(
        "free some space and resume; earlier checkpoints are untouched",
        "디스크 공간을 확보한 뒤 이어서 실행하세요. 이전 체크포인트는 그대로입니다",
    ),
    Word::new(
        "earlier checkpoints are untouched",
        "이전 체크포인트는 그대로입니다",
    ),
    Word::new(
        "start over without --resume",
        "--resume 없이 처음부터 실행하세요",
    ),
    Word::new(
        "wait for the other job to end, or save in another folder",
        "다른 작업이 끝나기를 기다리거나 다른 폴더에 저장하세요",
    ),
    Word::new(
        "look after the machine that the lost process ran on, then resume; earlier checkpoints are untouched",
        "잃은 프로세스가 돌던 머신을 점검한 뒤 이어서 실행하세요. 이전 체크포인트는 그대로입니다",
    ),
    Word::new(
        "start it with `paceline run` or `paceline train`, on hosts with /dev/shm",
        "/dev/shm이 있는 호스트에서 `paceline run`이나 `paceline train`으로 실행하세요",
    ),
    // Memory.
    Word::new(
        "raise the limit of the container or of `ulimit`, make the model or the batch smaller, or deal the model to several ranks (`paceline train --zero 3`)",
        "컨테이너나 `ulimit`의 한도를 늘리거나, 모델 또는 배치를 줄이거나, 모델을 여러 랭크에 나누세요(`paceline train --zero 3`)",
    ),
    Word::new(
        "raise GroupOptions::arena_bytes, drop buffers that are no longer needed, or deal the gradients to several ranks (`paceline train --zero 2`)",
        "GroupOptions::arena_bytes를 키우거나, 더 쓰지 않는 버퍼를 놓거나, 그래디언트를 여러 랭크에 나누세요(`paceline train --zero 2`)",
    ),
    // Other ranks.
    Word::new(
        "every rank must issue the same operations in the same order; look for a branch that depends on the rank",
        "모든 랭크가 같은 연산을 같은 순서로 호출해야 합니다. 랭크에 따라 갈리는 분기가 있는지 확인하세요",
    ),
    Word::new(
        "between hosts a long call is cut in one way for all ranks: bring a buffer of the group on every rank, or ordinary memory on every rank",
        "호스트 사이의 긴 호출은 모든 랭크에서 같은 방식으로 나뉩니다. 모든 랭크가 그룹의 버퍼를 쓰거나, 모든 랭크가 일반 메모리를 쓰게 하세요",
    ),
    Word::new(
        "that rank ran fewer steps; give all ranks the same number of batches",
        "그 랭크의 스텝 수가 더 적습니다. 모든 랭크에 같은 수의 배치를 주세요",
    ),
    Word::new(
        "see what the named rank is doing; raise PACELINE_TIMEOUT_SECONDS when it is merely slow",
        "해당 랭크가 무엇을 하는지 확인하세요. 느릴 뿐이라면 PACELINE_TIMEOUT_SECONDS를 늘리세요",
    ),
    Word::new(
        "look at the network between the hosts; when it is merely slow, raise PACELINE_TIMEOUT_SECONDS or send less (--comm-hook)",
        "호스트 사이의 네트워크를 확인하세요. 느릴 뿐이라면 PACELINE_TIMEOUT_SECONDS를 늘리거나 보내는 양을 줄이세요(--comm-hook)",
    ),
    Word::new(
        "start all ranks from the same build and with the same settings",
        "모든 랭크를 같은 빌드와 같은 설정으로 실행하세요",
    ),
    Word::new(
        "start every rank with the same program, model and settings",
        "모든 랭크를 같은 프로그램, 모델, 설정으로 실행하세요",
    ),
    Word::new(
        "look for what ends connections between these hosts, such as a firewall",
        "방화벽처럼 두 호스트 사이의 연결을 끊는 것이 있는지 확인하세요",
    ),
    Word::new(
        "look at that rank's own output for its panic, signal or exit code",
        "그 랭크의 출력에서 패닉, 시그널, 종료 코드를 확인하세요",
    ),
    Word::new(
        "look at the first error of those ranks; when they are alive, check that this host's addresses can be reached from theirs",
        "그 랭크들의 첫 오류를 확인하세요. 살아 있다면 그쪽 호스트에서 이 호스트의 주소에 닿을 수 있는지 확인하세요",
    ),
    Word::new(
        "change or unset PACELINE_SOCKET_IFNAME, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, whichever is set",
        "PACELINE_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME 중 설정된 것을 바꾸거나 지우세요",
    ),
    Word::new(
        "leave PACELINE_TRANSPORT unset to let the group choose; shm needs all ranks on one host and in one network namespace",
        "PACELINE_TRANSPORT를 지우면 그룹이 고릅니다. shm은 모든 랭크가 한 호스트, 한 네트워크 네임스페이스에 있어야 합니다",
    ),
    // The program.
    Word::new(
        "pass the model to Ddp::average after every step of the optimizer, and to Ddp::end_round before a checkpoint",
        "옵티마이저 스텝마다 모델을 Ddp::average에, 체크포인트 전에는 Ddp::end_round에 넘기세요",
    ),
    Word::new(
        "create the model on an autodiff device, for example Device::flex().autodiff()",
        "모델을 autodiff 장치에서 만드세요. 예: Device::flex().autodiff()",
    ),
    Word::new(
        "make a new Ddp for a changed model",
        "모델을 바꿨다면 Ddp를 새로 만드세요",
    ),
];

/// Advice that a rank has told, in this language; as it is, if it is not known here.
#[must_use]
pub fn advice(lang: Lang, told: &str) -> &str {
    let known = ALL.iter().find(|advice| advice.of(Lang::En) == told);
    known.map_or(told, |advice| advice.of(lang))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn known_advice_is_translated_and_other_advice_stays() {
        let known = "earlier checkpoints are untouched";
        assert_eq!(advice(Lang::En, known), known);
        assert_eq!(advice(Lang::Ko, known), "이전 체크포인트는 그대로입니다");
        assert_eq!(
            advice(Lang::Ko, "use at least 4 shards"),
            "use at least 4 shards"
        );
    }

    /// The source below a folder, without the line breaks of its literals.
    fn source(folder: &Path) -> String {
        let entries = fs::read_dir(folder).expect("a folder").flatten();
        let text = entries.map(|entry| match entry.path() {
            path if path.is_dir() => source(&path),
            path if path.extension().is_some_and(|end| end == "rs") => {
                fs::read_to_string(path).expect("text")
            }
            _ => String::new(),
        });
        let text: String = text.collect();
        let parts = text.split("\\\n");
        parts.map(str::trim_start).collect()
    }

    #[test]
    fn every_translated_advice_is_given_by_some_error() {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .expect("a folder");
        let sources = ["collective", "ddp", "checkpoint", "train"];
        let sources = sources.map(|name| source(&crates.join(name).join("src")));
        for advice in ALL {
            let told = format!("\"{}\"", advice.of(Lang::En));
            let is_given = sources.iter().any(|source| source.contains(&told));
            assert!(is_given, "no error says {told}");
        }
    }
}
