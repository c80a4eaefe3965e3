//! The report in Korean: its frame, what each finding is about, and reason and advice of the commonest ones. Other sentences
//! stay English, as do measurements, the drivers' messages and commands.

use std::io::{self, Write};

use crate::finding::{Finding, Severity};

/// The findings for people, then how many there are; `host` may be empty.
pub(super) fn write(findings: &[Finding], host: &str, out: &mut impl Write) -> io::Result<()> {
    for finding in findings {
        let (severity, topic) = (word(finding.severity), topic(&finding.check));
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
        format!("{} {}개", word(severity), found.count())
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

/// Reasons and advice of the commonest findings, word by word as the rules write them.
#[rustfmt::skip] // a table: two lines a row
const ADVICE: [(&str, &str); 20] = [
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
];

fn word(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "오류",
        Severity::Warning => "경고",
        Severity::Note => "참고",
    }
}

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
