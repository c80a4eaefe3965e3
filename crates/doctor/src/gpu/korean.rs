//! The report in Korean: its frame and what each finding is about. The findings' own sentences stay English, as the drivers'
//! messages and the commands that they quote.

use std::io::{self, Write};

use crate::finding::{Finding, Severity};

/// The findings for people, then how many there are; `host` may be empty.
pub(super) fn write(findings: &[Finding], host: &str, out: &mut impl Write) -> io::Result<()> {
    for finding in findings {
        let (severity, topic) = (word(finding.severity), topic(&finding.check));
        writeln!(out, "{severity}: {topic}")?;
        writeln!(out, "  내용: {}", finding.what)?;
        writeln!(out, "  이유: {}", finding.why)?;
        if !finding.fix.is_empty() {
            writeln!(out, "  조치: {}", finding.fix)?;
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

fn word(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "오류",
        Severity::Warning => "경고",
        Severity::Note => "참고",
    }
}
