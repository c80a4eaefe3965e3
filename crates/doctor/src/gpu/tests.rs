//! A sound machine for the tests of rules, and what all rules together make of one.

use paceline_gpu::snapshot::{
    Ancestor, Capability, Device, Errors, Gap, Holder, Link, Memory, Mode, OtherDevice, P2pStatus,
    PciDevice, PciKind, PcieLink, Reading, VERSION, Xid,
};
use paceline_words::Lang;

use super::*;
use crate::local::tests::{found, noted};

type Rule = fn(&Snapshot, &mut Notes);

/// What a rule says: the beginnings of severity, check and fix.
pub(super) fn check(rule: Rule, snapshot: &Snapshot, expect: &[&str]) {
    let notes = noted(|notes| rule(snapshot, notes));
    assert_eq!(found(&notes), expect, "{:#?}", notes.findings);
}

fn bridge(address: &str, parent: Option<&str>) -> PciDevice {
    PciDevice {
        address: address.to_owned(),
        parent: parent.map(str::to_owned),
        kind: PciKind::Bridge,
        acs_redirects: false.into(),
        ..PciDevice::default()
    }
}

fn card(address: &str, parent: &str) -> PciDevice {
    PciDevice {
        kind: PciKind::Gpu,
        id: (0x10de, 0x2330),
        driver: Some("nvidia".to_owned()),
        ..bridge(address, Some(parent))
    }
}

fn device(index: u32) -> Device {
    let mut device = Device {
        index,
        name: "Test GPU".to_owned().into(),
        uuid: format!("GPU-{index}").into(),
        pci: format!("0000:a{index:x}:00.0").into(),
        capability: (9, 0).into(),
        memory: Memory {
            used_bytes: 500 << 20,
            total_bytes: 80 << 30,
        }
        .into(),
        pcie: PcieLink {
            generation: 1,
            generation_max: 5,
            lanes: 16,
            lanes_max: 16,
        }
        .into(),
        mig: Mode::default().into(),
        errors: Errors {
            uncorrected: 0.into(),
            retirement_pending: false.into(),
            ..Errors::default()
        },
        compute_mode: "default".to_owned().into(),
        persistence: true.into(),
        has_display: false.into(),
        nvlinks: Reading::missing(Gap::NotSupported),
        processes: Vec::new().into(),
        ..Device::default()
    };
    device.now.temperature_c = 40.into();
    device.now.throttles = Vec::new().into();
    device
}

/// A machine with so many equal GPUs, each on a root port of its own, of which nothing bad is known.
pub(crate) fn machine(count: usize) -> Snapshot {
    let count = u32::try_from(count).expect("few");
    let mut snapshot = Snapshot {
        paceline_snapshot: VERSION,
        host: "node1".to_owned(),
        devices: (0..count).map(device).collect(),
        ..Snapshot::default()
    };
    snapshot.driver.version = "580.65.06".to_owned().into();
    snapshot.driver.cuda = (13, 0).into();
    let system = &mut snapshot.system;
    for index in 0..count {
        let port = format!("0000:00:{index:02x}.0");
        system.pci.push(bridge(&port, None));
        system
            .pci
            .push(card(&format!("0000:a{index:x}:00.0"), &port));
    }
    system.iommu.is_on = false.into();
    system.xids = Vec::new().into();
    system.shm = Memory {
        used_bytes: 0,
        total_bytes: 64 << 30,
    }
    .into();
    system.memlock_bytes = None.into();
    snapshot
}

/// Two GPUs and a network card below one PCIe switch.
pub(super) fn behind_one_switch() -> Snapshot {
    let mut snapshot = machine(2);
    let nic = PciDevice {
        kind: PciKind::Nic,
        ..bridge("0000:05:00.0", Some("0000:03:01.0"))
    };
    snapshot.system.pci = vec![
        bridge("0000:01:00.0", None),
        bridge("0000:02:00.0", Some("0000:01:00.0")),
        bridge("0000:03:00.0", Some("0000:02:00.0")),
        bridge("0000:03:01.0", Some("0000:02:00.0")),
        card("0000:a0:00.0", "0000:03:00.0"),
        card("0000:a1:00.0", "0000:03:01.0"),
        nic,
    ];
    snapshot
}

/// What the driver says of one direction: read and write so, no NVLink.
pub(super) fn linked(from: u32, to: u32, status: P2pStatus) -> Link {
    let answer = |asked: &Capability| match asked {
        Capability::Read | Capability::Write => status,
        Capability::NvLink | Capability::Atomics | Capability::Pcie => P2pStatus::NotSupported,
    };
    let mut link = Link {
        from,
        to,
        ancestor: Ancestor::Bridge.into(),
        ..Link::default()
    };
    for (slot, asked) in link.p2p.iter_mut().zip(&Capability::ALL) {
        *slot = answer(asked).into();
    }
    link
}

/// All devices linked to all others in the same way.
pub(super) fn joined_all(snapshot: &mut Snapshot, status: P2pStatus) {
    let all: Vec<u32> = snapshot.devices.iter().map(|device| device.index).collect();
    let pairs = all
        .iter()
        .flat_map(|from| all.iter().map(move |to| (*from, *to)));
    snapshot.links = pairs
        .filter(|(from, to)| from != to)
        .map(|(from, to)| linked(from, to, status))
        .collect();
}

fn printed(report: &GpuReport, json: bool) -> String {
    let mut out = Vec::new();
    let written = match json {
        true => report.write_json(&mut out),
        false => report.write(&mut out),
    };
    written.expect("memory");
    String::from_utf8(out).expect("text")
}

/// A machine of which much is to be said.
fn ill() -> Snapshot {
    let mut snapshot = machine(2);
    joined_all(&mut snapshot, P2pStatus::NotSupported);
    snapshot.devices[1].name = "Another GPU".to_owned().into();
    snapshot.devices[1].errors.uncorrected = 4.into();
    snapshot.devices[0].processes = vec![Holder {
        pid: 4242,
        is_compute: true,
        is_orphan: true.into(),
        ..Holder::default()
    }]
    .into();
    snapshot.system.xids = vec![Xid {
        code: 48,
        pci: "0000:a1:00".to_owned(),
        age_s: Some(30),
        text: String::new(),
    }]
    .into();
    snapshot.system.confined_by = vec!["docker".to_owned()];
    snapshot.system.shm = Memory {
        used_bytes: 0,
        total_bytes: 64 << 20,
    }
    .into();
    snapshot.others = vec![OtherDevice {
        maker: "AMD".to_owned(),
        ..OtherDevice::default()
    }];
    snapshot
}

#[test]
fn of_a_sound_machine_nothing_is_said() {
    let mut snapshot = machine(8);
    joined_all(&mut snapshot, P2pStatus::Ok);
    let report = diagnose(&snapshot, Lang::En);
    assert_eq!(report.findings, Vec::new());
    assert_eq!(report.verdict(), Verdict::Sound);
    let expect = "\
nothing wrong found on node1

  driver         580.65.06, up to CUDA 13.0
  GPUs           8 x Test GPU
  NCCL           none found where programs look; PyTorch brings its own
  memory errors  none on 8 GPUs
  kernel log     no Xid line
  peer-to-peer   OK over PCIe: all 28 pairs of GPUs
  ACS            redirects at 0 of 8 bridges
  IOMMU          off
  PCIe           x16 of 16, generation 1 of 5: GPUs 0 to 7
  temperature    40 \u{b0}C
  processes      none computes on the GPUs
  /dev/shm       64 GiB, 64 GiB free
  locked memory  unlimited
  variables      none of CUDA's or NCCL's is set
";
    assert_eq!(printed(&report, false), expect);
}

#[test]
fn the_worst_comes_first_and_decides_the_verdict() {
    let report = diagnose(&ill(), Lang::En);
    let severities: Vec<Severity> = report
        .findings
        .iter()
        .map(|finding| finding.severity)
        .collect();
    assert!(severities.is_sorted(), "{severities:?}");
    assert_eq!(report.worst(), Some(Severity::Error));
    assert_eq!(report.verdict(), Verdict::Fault);
    let checks: Vec<&str> = report
        .findings
        .iter()
        .map(|finding| finding.check.as_str())
        .collect();
    assert_eq!(
        checks,
        [
            "memory errors",
            "kernel log",
            "peer-to-peer",
            "GPUs",
            "processes",
            "/dev/shm",
            "GPUs",
            "other GPUs"
        ]
    );
}

#[test]
fn a_korean_reader_gets_the_same_in_korean() {
    let english = diagnose(&ill(), Lang::En);
    let text = printed(&diagnose(&ill(), Lang::Ko), false);
    let begins = |word: &str| text.lines().filter(|line| line.starts_with(word)).count();
    let all = english.findings.len();
    assert_eq!(begins("오류: ") + begins("경고: ") + begins("참고: "), all);
    assert_eq!((begins("  이유: "), begins("  조치: ")), (all, all));
    assert!(
        text.contains("\nnode1: 오류 2개, 경고 4개, 참고 2개\n"),
        "{text}"
    );
    let mut sound = machine(8);
    joined_all(&mut sound, P2pStatus::Ok);
    let expect = "\
node1: 발견된 문제 없음

  드라이버               580.65.06, CUDA 13.0까지 지원
  GPU 구성               8 x Test GPU
  NCCL 라이브러리        프로그램이 찾는 경로에 없음; PyTorch에는 포함되어 있음
  GPU 메모리 오류        GPU 8개: 없음
  커널 로그(Xid)         Xid 줄 없음
  P2P 직접 통신          PCIe로 OK: GPU 28쌍 모두
  PCIe 접근 제어(ACS)    브리지 8개 중 0개에서 우회시킴
  IOMMU 상태             꺼짐
  PCIe 연결              x16(최대 x16), 1세대(최대 5세대): GPU 0~7
  온도                   40 \u{b0}C
  프로세스               GPU에서 계산 중인 프로세스 없음
  공유 메모리(/dev/shm)  64 GiB 중 64 GiB 남음
  메모리 잠금 한도       제한 없음
  환경 변수              설정된 CUDA·NCCL 변수 없음
";
    assert_eq!(printed(&diagnose(&sound, Lang::Ko), false), expect);
}

#[test]
fn a_warning_is_no_fault() {
    let mut snapshot = machine(2);
    joined_all(&mut snapshot, P2pStatus::GpuNotSupported);
    let report = diagnose(&snapshot, Lang::En);
    assert_eq!(report.worst(), Some(Severity::Warning));
    assert_eq!(report.verdict(), Verdict::Sound);
}

#[test]
fn a_saved_snapshot_is_judged_as_the_machine_was() {
    let snapshot = ill();
    let saved = serde_json::to_vec(&snapshot).expect("encodes");
    let back = Snapshot::from_json(&saved).expect("a snapshot");
    assert_eq!(
        printed(&diagnose(&back, Lang::En), true),
        printed(&diagnose(&snapshot, Lang::En), true)
    );
}

#[test]
fn json_is_one_object_with_everything() {
    let text = printed(&diagnose(&ill(), Lang::En), true);
    assert_eq!(text.lines().count(), 1);
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(json["paceline_gpu_doctor"], 1);
    assert_eq!(json["host"], "node1");
    let finding = &json["findings"][0];
    for field in ["severity", "check", "what", "why", "fix"] {
        assert!(
            finding[field].as_str().is_some_and(|text| !text.is_empty()),
            "{field}"
        );
    }
    assert_eq!(json["facts"][0]["check"], "driver");
}

/// Whatever the numbers and texts are, every rule ends, says something whole, and moves no cursor.
#[test]
fn a_hostile_snapshot_is_judged_without_harm() {
    let json = r#"{"paceline_snapshot":1,"host":"a\u001b[2J","taken_unix_s":18446744073709551615,
      "driver":{"version":"580\n","cuda":[4294967295,0]},
      "devices":[
        {"index":4294967295,"name":"\u001b]0;x\u0007","pci":"p","memory":{"used_bytes":18446744073709551615,"total_bytes":0},
         "pcie":{"generation":4294967295,"generation_max":1,"lanes":1,"lanes_max":4294967295},
         "nvlinks":[{"index":4294967295,"is_active":true,"errors":18446744073709551615},{"is_active":false}],
         "errors":{"uncorrected":18446744073709551615,"pcie_replays":18446744073709551615},
         "processes":[{"pid":0,"is_compute":true,"is_orphan":true,"memory_bytes":18446744073709551615,
                       "name":"\u001b[1m","age_s":18446744073709551615,"rank":4294967295}],
         "power_default_mw":4294967295,"slowdown_c":1,"numa_node":7,
         "now":{"temperature_c":4294967295,"power_limit_mw":0,"utilization_percent":4294967295}},
        {"index":4294967295,"name":"y","pci":"p"}],
      "links":[{"from":4294967295,"to":4294967295},{"from":0,"to":9,"p2p":["ok","ns","ok","ok","ok"]}],
      "system":{"pci":[{"address":"p","parent":"p","kind":"gpu","id":[4318,1],"acs_redirects":true}],
        "numa":[{"index":0,"cpus":[0]},{"index":1}],"allowed_cpus":[0],
        "nics":[{"name":"\u001b[5n","is_rdma":true,"is_up":true,"pci":"p"}],
        "shm":{"used_bytes":18446744073709551615,"total_bytes":18446744073709551615},"memlock_bytes":0,
        "xids":[{"code":4294967295,"pci":"\u001b[","text":"\u001b[8m","age_s":18446744073709551615}],
        "nccl":[{"path":"\u001b[3m","version":[1,2,3],"cuda":[4294967295,4294967295]}],
        "variables":[["CUDA_VISIBLE_DEVICES","7,"]]}}"#;
    // "ns" is no status as JSON has it, so that link must be refused before any rule sees it.
    assert!(Snapshot::from_json(json.as_bytes()).is_err());
    let snapshot = Snapshot::from_json(json.replace("\"ns\"", "\"not_supported\"").as_bytes());
    let report = diagnose(&snapshot.expect("well formed"), Lang::En);
    let is_whole = |text: &str| !text.is_empty() && !text.chars().any(char::is_control);
    assert!(report.findings.len() > 5);
    for finding in &report.findings {
        assert!(
            is_whole(&finding.what) && is_whole(&finding.why) && is_whole(&finding.fix),
            "{finding:?}"
        );
    }
    for fact in &report.facts {
        assert!(is_whole(&fact.value), "{fact:?}");
    }
}
