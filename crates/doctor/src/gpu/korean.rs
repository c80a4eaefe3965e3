//! The report in Korean: its frame, what each finding is about, and reason and advice of the commonest and the gravest ones. Other sentences
//! stay English, as do measurements, the drivers' messages and commands.

use std::io::{self, Write};

use paceline_words::Lang;

use crate::finding::{Finding, Severity};

/// The findings for people, then how many there are; `host` may be empty.
pub(super) fn write(findings: &[Finding], host: &str, out: &mut impl Write) -> io::Result<()> {
    for finding in findings {
        let (severity, topic) = (finding.severity.word(Lang::Ko), topic(&finding.check));
        writeln!(out, "{severity}: {topic}")?;
        writeln!(out, "  내용: {}", finding.what)?;
        writeln!(out, "  이유: {}", advice(&finding.why))?;
        if !finding.fix.is_empty() {
            writeln!(out, "  조치: {}", advice(&finding.fix))?;
        }
        writeln!(out)?;
    }
    let place = match host {
        "" => "이 머신",
        host => host,
    };
    if findings.is_empty() {
        return writeln!(out, "{place}: 발견된 문제 없음\n");
    }
    let counted = [Severity::Error, Severity::Warning, Severity::Note].map(|severity| {
        let found = findings.iter().filter(|found| found.severity == severity);
        format!("{} {}개", severity.word(Lang::Ko), found.count())
    });
    writeln!(out, "{place}: {}\n", counted.join(", "))
}

/// What a check is about.
pub(super) fn topic(check: &str) -> &str {
    match check {
        "/dev/shm" => "공유 메모리(/dev/shm)",
        "ACS" => "PCIe 접근 제어(ACS)",
        "GPUDirect RDMA" => "GPUDirect RDMA",
        "GPUs" => "GPU 구성",
        "IOMMU" => "IOMMU",
        "MIG" => "GPU 분할(MIG)",
        "NCCL" => "NCCL 라이브러리",
        "NUMA" => "CPU·메모리 배치(NUMA)",
        "NVLink" => "NVLink 연결",
        "NVSwitch" => "NVSwitch와 패브릭 매니저",
        "PCIe" => "PCIe 연결",
        "clocks" => "클럭 제한",
        "compute mode" => "컴퓨트 모드",
        "display" => "디스플레이 연결",
        "driver" => "NVIDIA 드라이버",
        "kernel log" => "커널 로그(Xid)",
        "locked memory" => "메모리 잠금 한도",
        "lost GPUs" => "응답하지 않는 GPU",
        "memory errors" => "GPU 메모리 오류(ECC)",
        "not read" => "읽지 못한 항목",
        "other GPUs" => "다른 제조사의 GPU",
        "peer-to-peer" => "GPU 간 직접 통신(P2P)",
        "persistence" => "지속 모드(persistence)",
        "power" => "전력 한도",
        "processes" => "GPU를 사용 중인 프로세스",
        "temperature" => "온도",
        "variables" => "CUDA·NCCL 환경 변수",
        other => other,
    }
}

/// A reason or an advice, in English if it is not in the table.
fn advice(english: &str) -> &str {
    let row = ADVICE.iter().find(|(key, _)| *key == english);
    row.map_or(english, |(_, korean)| korean)
}

/// Reasons and advice of the commonest and the gravest findings, word by word as the rules write them.
#[rustfmt::skip] // a table: two lines a row
const ADVICE: [(&str, &str); 41] = [
    ("what depends on it was not judged: no finding about it does not mean that it is well",
     "이 항목에 의존하는 판단은 하지 않았습니다. 관련 문제가 표시되지 않아도 정상이라는 뜻은 아닙니다"),
    ("run it as root (`sudo`) to see what needs that",
     "root 권한(`sudo`)으로 다시 실행하면 확인할 수 있습니다"),
    ("a job that begins now shares memory and time with them: it is slower, or ends with \"out of memory\"",
     "지금 작업을 시작하면 메모리와 연산 시간을 나눠 쓰게 되어, 느려지거나 \"out of memory\"로 끝납니다"),
    ("wait, choose other GPUs with CUDA_VISIBLE_DEVICES, or ask whose they are (`ps -o user,args -p PID`); harmless if they are the job that you look at",
     "기다리거나, CUDA_VISIBLE_DEVICES로 다른 GPU를 고르거나, `ps -o user,args -p PID`로 누구의 프로세스인지 확인하세요. 지금 살펴보는 작업 자신이라면 문제가 없습니다"),
    ("most likely left behind by a job that ended or was killed: it keeps memory, and a collective that it waits in keeps the GPU busy",
     "끝나거나 강제 종료된 작업이 남긴 프로세스일 가능성이 큽니다. 메모리를 차지하고, 집합 통신을 기다리는 동안 GPU를 계속 점유합니다"),
    ("usual under full load: clocks fall a little so that the limit holds",
     "최대 부하에서는 정상입니다. 전력 한도를 지키기 위해 클럭이 조금 내려갑니다"),
    ("nothing, unless the limit is lower than it need be (`nvidia-smi -q -d POWER`)",
     "조치가 필요 없습니다. 다만 한도가 필요 이상으로 낮은지 `nvidia-smi -q -d POWER`로 확인하세요"),
    ("the driver shuts a GPU down when the last program leaves it: each first start takes seconds longer, and clocks and limits that were set are forgotten",
     "마지막 프로그램이 끝나면 드라이버가 GPU를 내립니다. 그래서 첫 실행마다 몇 초씩 더 걸리고, 설정해 둔 클럭과 한도가 사라집니다"),
    ("`sudo nvidia-smi -pm 1`, or `sudo systemctl enable --now nvidia-persistenced` for good",
     "`sudo nvidia-smi -pm 1`을 실행하거나, 계속 유지하려면 `sudo systemctl enable --now nvidia-persistenced`를 실행하세요"),
    ("programs find no GPU: a job that asks for one fails when it starts, or trains on the CPU without a word",
     "프로그램이 GPU를 찾지 못합니다. GPU를 요청한 작업은 시작할 때 실패하거나, 아무 말 없이 CPU에서 학습합니다"),
    ("nothing here can use CUDA: jobs train on the CPU, or on another maker's devices",
     "이 머신에서는 CUDA를 쓸 수 없습니다. 작업은 CPU나 다른 제조사의 장치에서 학습합니다"),
    ("it may run at half its speed or less, and every other rank waits for it",
     "속도가 절반 이하로 떨어질 수 있고, 다른 모든 rank가 기다리게 됩니다"),
    ("clear dust and the way of the air, give cards room, raise the fans; a lower power limit (`sudo nvidia-smi -i N -pl WATTS`) costs less than the heat does",
     "먼지와 공기 통로를 정리하고, 카드 간격을 넓히고, 팬 속도를 올리세요. 발열로 잃는 것보다 전력 한도를 낮추는 것(`sudo nvidia-smi -i N -pl WATTS`)이 손해가 적습니다"),
    ("it is slower under full load, and data-parallel training waits for the slowest",
     "최대 부하에서 더 느리고, 데이터 병렬 학습은 가장 느린 장치를 기다립니다"),
    ("seat the card anew, clean its contacts, leave risers out; look in the firmware for how the slot's lanes are split (bifurcation)",
     "카드를 다시 꽂고 접점을 닦고 라이저 없이 연결하세요. 펌웨어에서 슬롯의 레인 분할(bifurcation) 설정도 확인하세요"),
    ("collectives run at the speed of the slowest link; with switches, a GPU whose links are down takes the whole job with it",
     "집합 통신은 가장 느린 링크의 속도로 동작합니다. 스위치가 있는 머신에서는 링크가 끊긴 GPU 하나가 작업 전체를 멈춥니다"),
    ("ranks that load different ones refuse to talk to each other (\"mismatched NCCL version\")",
     "서로 다른 버전을 읽은 rank들은 통신을 거부합니다(\"mismatched NCCL version\")"),
    ("start all ranks from one environment; `NCCL_DEBUG=VERSION` prints which one a program loads",
     "모든 rank를 같은 환경에서 시작하세요. `NCCL_DEBUG=VERSION`은 프로그램이 읽은 버전을 출력합니다"),
    ("every copy between host and GPU crosses from one CPU socket to the other, and waits for all others that do",
     "호스트와 GPU 사이의 모든 복사가 다른 CPU 소켓을 거치며, 같은 길을 쓰는 다른 복사를 기다립니다"),
    ("start the program again; reset the device when nothing runs on it, so that the bad memory is put out of use",
     "프로그램을 다시 시작하세요. 실행 중인 것이 없을 때 장치를 리셋하면 불량 메모리가 사용에서 제외됩니다"),
    ("every program on it hangs or fails, often all programs that use CUDA; power, heat, a riser or the slot are the usual causes",
     "이 GPU를 쓰는 프로그램이 멈추거나 실패하고, CUDA를 쓰는 다른 프로그램까지 영향을 받는 경우가 많습니다. 전원, 발열, 라이저, 슬롯이 흔한 원인입니다"),
    ("no spare memory is left for it: programs go on using what is known to fail",
     "대체할 예비 메모리가 남아 있지 않아, 불량으로 확인된 메모리를 계속 사용하게 됩니다"),
    ("take the card out of training and have it replaced; `nvidia-smi -q -d ROW_REMAPPER,PAGE_RETIREMENT` is what the maker asks for",
     "이 카드를 학습에서 빼고 교체를 요청하세요. 제조사에는 `nvidia-smi -q -d ROW_REMAPPER,PAGE_RETIREMENT`의 출력을 보내면 됩니다"),
    ("programs that met one were ended or computed with wrong numbers, and the next may be too",
     "오류를 만난 프로그램은 종료되었거나 잘못된 값으로 계산했으며, 다음 프로그램도 그럴 수 있습니다"),
    ("do not trust results of that time; `sudo nvidia-smi -r -i N` when nothing runs on it, or start the machine again; if errors come back, have the card replaced",
     "그 시간에 얻은 결과는 믿지 마세요. 실행 중인 것이 없을 때 `sudo nvidia-smi -r -i N`을 실행하거나 머신을 재시작하고, 오류가 다시 나타나면 카드를 교체하세요"),
    ("when nothing runs on it `sudo nvidia-smi -r -i N`, or start the machine again",
     "실행 중인 것이 없을 때 `sudo nvidia-smi -r -i N`을 실행하거나 머신을 재시작하세요"),
    ("no result was wrong; many of them often come before one that cannot be corrected",
     "잘못된 결과는 없었습니다. 다만 이런 오류가 많아지면 정정할 수 없는 오류가 뒤따르는 경우가 많습니다"),
    ("`sudo systemctl enable --now nvidia-fabricmanager`; its version must be the driver's to the last digit; where it fails `sudo journalctl -u nvidia-fabricmanager` says why",
     "`sudo systemctl enable --now nvidia-fabricmanager`를 실행하세요. 버전이 드라이버와 끝자리까지 같아야 하며, 실패한 이유는 `sudo journalctl -u nvidia-fabricmanager`에 나옵니다"),
    ("NCCL takes this for broken hardware and refuses to start (\"unhandled cuda error\")",
     "NCCL은 이를 하드웨어 고장으로 보고 시작을 거부합니다(\"unhandled cuda error\")"),
    ("what GPUs send each other, or a network card, takes the long way: jobs crawl, or hang where it does not arrive",
     "GPU끼리 또는 네트워크 카드와 주고받는 데이터가 먼 길로 돌아갑니다. 작업이 매우 느려지거나, 데이터가 도착하지 않으면 멈춥니다"),
    ("what GPUs send each other or a network card takes the way through the CPU, slower; on many mainboards it hangs or arrives wrong",
     "GPU끼리 또는 네트워크 카드와 주고받는 데이터가 CPU를 거쳐 느려집니다. 많은 메인보드에서는 멈추거나 잘못된 값이 도착합니다"),
    ("no CUDA program can use it: \"all CUDA-capable devices are busy or unavailable\"",
     "어떤 CUDA 프로그램도 이 GPU를 쓸 수 없습니다: \"all CUDA-capable devices are busy or unavailable\""),
    ("several ranks on one GPU, a second job, or an evaluation beside the training fail",
     "GPU 하나에 여러 rank를 두거나, 두 번째 작업이나 학습 중 평가를 실행하면 실패합니다"),
    ("start one rank per GPU; `sudo nvidia-smi -i N -c DEFAULT` if you mean several",
     "GPU마다 rank를 하나씩 시작하세요. 여러 개를 의도했다면 `sudo nvidia-smi -i N -c DEFAULT`를 실행하세요"),
    ("start the container with `--shm-size=8g`, or `--ipc=host`",
     "컨테이너를 `--shm-size=8g` 또는 `--ipc=host`로 시작하세요"),
    ("NCCL must lock what it sends over it: jobs of several nodes fail with \"Call to ibv_reg_mr failed\" or \"ibv_create_qp failed\"",
     "NCCL은 RDMA로 보내는 메모리를 잠가야 합니다. 여러 노드의 작업이 \"Call to ibv_reg_mr failed\" 또는 \"ibv_create_qp failed\"로 실패합니다"),
    ("a job with it fails at its first collective: \"CUDA driver version is insufficient for CUDA runtime version\"",
     "이 라이브러리를 쓰는 작업은 첫 집합 통신에서 실패합니다: \"CUDA driver version is insufficient for CUDA runtime version\""),
    ("the driver was updated while its old module runs: every program that starts fails to use a GPU, those that run go on",
     "이전 모듈이 동작하는 동안 드라이버가 업데이트되었습니다. 새로 시작하는 프로그램은 GPU를 쓰지 못하고, 실행 중인 프로그램은 계속됩니다"),
    ("start the machine again; or end what uses the GPUs, then `sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia`",
     "머신을 재시작하거나, GPU를 쓰는 프로그램을 끝낸 뒤 `sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia`를 실행하세요"),
    ("a job that asks for a GPU fails when it starts",
     "GPU를 요청한 작업이 시작할 때 실패합니다"),
    ("check power supplies, their cables and the machine's power budget; in a rack, what the management controller caps",
     "전원 공급 장치와 케이블, 머신의 전력 예산을 확인하세요. 랙에서는 관리 컨트롤러의 제한도 확인하세요"),
];

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn every_row_of_the_table_is_what_a_rule_writes() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/gpu");
        let mut rules = String::new();
        for entry in fs::read_dir(folder).expect("the rules") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|end| end == "rs") && !path.ends_with("korean.rs") {
                rules.push_str(&fs::read_to_string(path).expect("a file"));
            }
        }
        // As the compiler reads a literal of several lines.
        let joined: String = rules
            .split("\\\n")
            .map(str::trim_start)
            .collect::<String>()
            .replace("\\\"", "\"");
        for (english, korean) in ADVICE {
            assert!(joined.contains(english), "no rule writes: {english}");
            assert_eq!(advice(english), korean);
        }
        assert_eq!(advice("anything else"), "anything else");
    }
}
