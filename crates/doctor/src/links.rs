//! What the links mean: what is wrong, what NCCL has to be told, and what to do about it.

use paceline_nccl::pairs::{Link, LinkReport, Outcome};
use paceline_words::{Lang, say, shortened, span};

use crate::checks;
use crate::finding::{Finding, Notes, Severity};

/// What NCCL takes from `/dev/shm` for two devices that go through the host, at most, with its defaults.
const SHM_PER_DEVICE: u64 = 32 << 20;

/// What a container has there unless told otherwise.
const SHM_OF_CONTAINERS: u64 = 64 << 20;

/// A link that is this many times slower than the way through the host is worth a word.
const SLOW: f64 = 1.25;

/// The variable that keeps NCCL from using peer-to-peer.
pub const P2P_DISABLE: &str = "NCCL_P2P_DISABLE";

/// What is around the devices.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Surroundings {
    /// `NCCL_P2P_DISABLE`, as ranks will have it.
    pub p2p_disable: Option<String>,
    /// `NCCL_SHM_DISABLE`, the same.
    pub shm_disable: Option<String>,
    /// What is free in `/dev/shm`; none where there is no such place.
    ///
    /// *Units*: bytes.
    pub shm_free_bytes: Option<u64>,
}

impl Surroundings {
    /// Those of this process.
    pub fn here() -> Self {
        let get = |name: &str| std::env::var(name).ok();
        let shm = rustix::fs::statvfs("/dev/shm").ok();
        Self {
            p2p_disable: get(P2P_DISABLE),
            shm_disable: get("NCCL_SHM_DISABLE"),
            shm_free_bytes: shm.map(|shm| shm.f_frsize.saturating_mul(shm.f_bavail)),
        }
    }
}

/// What is to be done about the links.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct Judgement {
    /// Worst first.
    pub findings: Vec<Finding>,
    /// What ranks have to have in their environment for NCCL to work, beyond what is there already.
    pub variables: Vec<(String, String)>,
}

impl Judgement {
    /// The worst severity that was found.
    pub fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(|finding| finding.severity).min()
    }
}

/// Says what the links mean for a job that uses NCCL on these devices, in this language.
///
/// *Source*: "Troubleshooting" in NCCL's user guide, for ACS, IOMMU, and `/dev/shm`.
pub fn judge(report: &LinkReport, around: &Surroundings, lang: Lang) -> Judgement {
    let (mut notes, mut variables) = (Notes::new(lang), Vec::new());
    let is_off = around.p2p_disable.as_deref() == Some("1");
    let broken: Vec<&Link> = links(report, |link| link.says_ok && link.peer.is_bad());
    judge_broken(&broken, around, &mut notes, &mut variables);
    judge_host(report, &mut notes);
    let unsupported = links(report, |link| !link.says_ok);
    judge_unsupported(report, &unsupported, &mut notes);
    let uses_host = is_off || !broken.is_empty() || !unsupported.is_empty();
    if uses_host && !report.links.is_empty() {
        judge_shm(report, around, &mut notes);
    }
    judge_slow(report, &mut notes);
    judge_untried(report, &mut notes);
    let mut findings = notes.findings;
    findings.sort_by_key(|finding| finding.severity);
    Judgement {
        findings,
        variables,
    }
}

fn links(report: &LinkReport, is_meant: impl Fn(&Link) -> bool) -> Vec<&Link> {
    report.links.iter().filter(|link| is_meant(link)).collect()
}

/// `0 to 1, 1 to 0`, as far as it can be read.
fn named(links: &[&Link], lang: Lang) -> String {
    const SHOWN_MAX: usize = 6;
    let words = links.iter().map(|link| match lang {
        Lang::En => format!("{} to {}", link.from, link.to),
        Lang::Ko => format!("{}→{}", link.from, link.to),
    });
    shortened(words.collect(), SHOWN_MAX, lang)
}

/// The slowest and the fastest of some speeds: `12.3 GB/s`, `11.0 to 12.3 GB/s`.
fn speeds<'a>(outcomes: impl Iterator<Item = &'a Outcome>, lang: Lang) -> Option<String> {
    let mut all: Vec<f64> = outcomes.filter_map(Outcome::gb_per_second).collect();
    all.sort_by(f64::total_cmp);
    let (first, last) = (all.first()?, all.last()?);
    let (first, last) = (format!("{first:.1}"), format!("{last:.1}"));
    let speeds = match first == last {
        true => first,
        false => span(first, last, lang),
    };
    Some(format!("{speeds} GB/s"))
}

/// The driver says that it works, and it does not: NCCL would believe it.
fn judge_broken(
    broken: &[&Link],
    around: &Surroundings,
    notes: &mut Notes,
    variables: &mut Vec<(String, String)>,
) {
    let lang = notes.lang;
    if broken.is_empty() {
        return;
    }
    let how = |link: &&Link| match &link.peer {
        Outcome::Wrong { by, bytes } => match (lang, by.as_str()) {
            (Lang::En, by) => format!("{bytes} bytes of {by} were wrong"),
            (Lang::Ko, "a kernel") => format!("커널에서 {bytes}바이트가 틀림"),
            (Lang::Ko, _) => format!("복사에서 {bytes}바이트가 틀림"),
        },
        Outcome::Stuck => say!(lang, "a copy never ended", "복사가 끝나지 않음"),
        Outcome::Failed { reason } => reason.clone(),
        Outcome::Fine { .. } | Outcome::NotSupported | Outcome::NotTried => String::new(),
    };
    let (first, named) = (
        broken.first().map(how).unwrap_or_default(),
        named(broken, lang),
    );
    let what = say!(
        lang,
        "peer-to-peer does not work though the driver says so: GPU {named} ({first})",
        "드라이버는 된다고 하지만 P2P가 동작하지 않음: GPU {named}({first})"
    );
    let mend = say!(
        lang,
        "to mend it: turn the IOMMU off or to pass-through (`intel_iommu=off`, `amd_iommu=off` or `iommu=pt` for the kernel), \
         and Access Control Services in the firmware (ACS; `paceline gpu doctor` as root shows where it is on); in a \
         virtual machine it is the hypervisor's to set",
        "고치려면 IOMMU를 끄거나 통과 모드로 바꾸고(커널에 `intel_iommu=off`, `amd_iommu=off` 또는 `iommu=pt`), 펌웨어에서 ACS를 끄세요(켜진 곳은 root 권한의 \
         `paceline gpu doctor`에 나옵니다). 가상 머신에서는 하이퍼바이저에서 설정해야 합니다"
    );
    let fix = match around.p2p_disable.as_deref() {
        Some("1") => say!(
            lang,
            "{P2P_DISABLE}=1 is set: NCCL goes through the host's memory, which works; {mend}",
            "{P2P_DISABLE}=1이 설정되어 있어 NCCL이 호스트 메모리를 거치며, 이 경로는 동작합니다. {mend}"
        ),
        Some(value) => say!(
            lang,
            "{P2P_DISABLE} is set to {value}: set it to 1, so that NCCL goes through the host's memory; {mend}",
            "{P2P_DISABLE} 값이 {value}입니다. NCCL이 호스트 메모리를 거치도록 1로 설정하세요. {mend}"
        ),
        None => {
            variables.push((P2P_DISABLE.to_owned(), "1".to_owned()));
            say!(
                lang,
                "set {P2P_DISABLE}=1 for all ranks, so that NCCL goes through the host's memory; {mend}",
                "NCCL이 호스트 메모리를 거치도록 모든 랭크에 {P2P_DISABLE}=1을 설정하세요. {mend}"
            )
        }
    };
    let why = say!(
        lang,
        "NCCL believes the driver: the first collective hangs, or a job trains on corrupted numbers",
        "NCCL은 드라이버를 믿습니다. 그래서 첫 집합 통신에서 멈추거나, 깨진 값으로 학습하게 됩니다"
    );
    notes.sheet(checks::LINKS).error(what, why, fix);
}

/// The way through the host is the last one that there is.
fn judge_host(report: &LinkReport, notes: &mut Notes) {
    let lang = notes.lang;
    let broken = links(report, |link| link.host.is_bad());
    if broken.is_empty() {
        return;
    }
    let named = named(&broken, lang);
    let what = say!(
        lang,
        "copies through the host's memory do not work: GPU {named}",
        "호스트 메모리를 거치는 복사가 동작하지 않음: GPU {named}"
    );
    let why = say!(
        lang,
        "no setting of NCCL helps: every batch goes that way",
        "모든 배치가 이 경로로 가므로 NCCL 설정으로는 해결되지 않습니다"
    );
    let fix = say!(
        lang,
        "see the kernel's log for Xid lines and PCIe errors (`paceline gpu doctor` as root shows them); look at the cards' seating, \
         cables and power",
        "커널 로그에서 Xid와 PCIe 오류를 찾으세요(root 권한의 `paceline gpu doctor`에 나옵니다). 카드의 장착 상태, 케이블, 전원도 확인하세요"
    );
    notes.sheet(checks::LINKS).error(what, why, fix);
}

/// The driver says that it does not work.
fn judge_unsupported(report: &LinkReport, unsupported: &[&Link], notes: &mut Notes) {
    let lang = notes.lang;
    if unsupported.is_empty() {
        return;
    }
    let host = speeds(unsupported.iter().map(|link| &link.host), lang);
    let host = host.map(|host| say!(lang, ", at {host} here", "(이 머신에서 {host})"));
    let host = host.unwrap_or_default();
    let are_all = unsupported.len() == report.links.len();
    let named = named(unsupported, lang);
    let which = match are_all {
        true => say!(lang, "between any two GPUs", "모든 GPU 쌍"),
        false => say!(lang, "from GPU {named}", "GPU {named} 사이"),
    };
    let what = say!(
        lang,
        "no peer-to-peer {which}: the driver does not offer it",
        "P2P 없음({which}): 드라이버가 제공하지 않음"
    );
    let why = say!(
        lang,
        "NCCL sees that and goes through the host's memory by itself{host}: right results, a slower exchange. Usual for GeForce cards \
         since the 40 series, for cards on two CPUs (different root complexes), and in virtual machines or behind an IOMMU",
        "NCCL이 이를 알고 스스로 호스트 메모리를 거칩니다{host}. 결과는 맞고 통신만 느립니다. GeForce 40 시리즈 이후의 카드, 두 CPU에 나뉜 카드(root complex가 다름), \
         가상 머신, IOMMU 뒤에서는 흔한 일입니다"
    );
    let fix = say!(
        lang,
        "nothing has to be set; do not set NCCL_SHM_DISABLE, which takes that way away; train with one process per GPU",
        "설정할 것은 없습니다. NCCL_SHM_DISABLE은 이 경로를 막으므로 설정하지 마세요. GPU마다 프로세스 하나로 학습하세요"
    );
    notes.sheet(checks::LINKS).note(what, why, fix);
}

/// What goes through the host goes through `/dev/shm`.
fn judge_shm(report: &LinkReport, around: &Surroundings, notes: &mut Notes) {
    let lang = notes.lang;
    if around.shm_disable.as_deref() == Some("1") {
        notes.sheet(checks::LINKS).warning(
            say!(
                lang,
                "NCCL_SHM_DISABLE=1 is set, and devices have to go through the host's memory",
                "호스트 메모리를 거쳐야 하는데 NCCL_SHM_DISABLE=1이 설정되어 있음"
            ),
            say!(
                lang,
                "where devices do not reach each other it is the way between them; what remains is the network, which is slower still",
                "직접 통신이 안 되는 장치 사이에는 이 경로를 씁니다. 막으면 더 느린 네트워크만 남습니다"
            ),
            say!(lang, "unset it", "이 변수를 지우세요"),
        );
        return;
    }
    let needed = SHM_OF_CONTAINERS.max(SHM_PER_DEVICE * report.devices.len() as u64);
    let Some(free) = around.shm_free_bytes.filter(|free| *free <= needed) else {
        return;
    };
    let what = say!(
        lang,
        "/dev/shm has {} MiB free, and NCCL goes through it here",
        "NCCL이 쓰는 /dev/shm에 {} MiB만 남음",
        free >> 20
    );
    let why = say!(
        lang,
        "it takes some MiB for each pair and channel: without them it ends with \"no space left on device\", \"failed to extend \
         /dev/shm/nccl-...\" or a bus error",
        "쌍과 채널마다 몇 MiB가 필요합니다. 모자라면 \"no space left on device\", \"failed to extend /dev/shm/nccl-...\"나 bus error로 끝납니다"
    );
    let fix = say!(
        lang,
        "start the container with `--shm-size=8g` or `--ipc=host`, or `sudo mount -o remount,size=8G /dev/shm`; `ls /dev/shm` shows \
         what earlier jobs left there",
        "컨테이너를 `--shm-size=8g`나 `--ipc=host`로 시작하거나 `sudo mount -o remount,size=8G /dev/shm`을 실행하세요. 이전 작업이 남긴 것은 `ls /dev/shm`에 \
         나옵니다"
    );
    notes.sheet(checks::LINKS).warning(what, why, fix);
}

/// Data that arrives intact may still take a detour.
fn judge_slow(report: &LinkReport, notes: &mut Notes) {
    let lang = notes.lang;
    let is_slow = |link: &Link| match (link.peer.gb_per_second(), link.host.gb_per_second()) {
        (Some(peer), Some(host)) => peer > 0.0 && host > peer * SLOW,
        _ => false,
    };
    let slow = links(report, is_slow);
    let peer = speeds(slow.iter().map(|link| &link.peer), lang);
    let host = speeds(slow.iter().map(|link| &link.host), lang);
    if let (Some(peer), Some(host)) = (peer, host) {
        let named = named(&slow, lang);
        let what = say!(
            lang,
            "peer-to-peer is slower than the host's memory: GPU {named}, {peer} against {host}",
            "P2P가 호스트 메모리보다 느림: GPU {named}, P2P {peer}, 호스트 메모리 {host}"
        );
        let why = say!(
            lang,
            "packets between the devices take a detour, mostly because ACS or the IOMMU sends them through the CPU",
            "장치 사이의 패킷이 돌아갑니다. 대개 ACS나 IOMMU가 CPU를 거치게 하기 때문입니다"
        );
        let fix = say!(
            lang,
            "see `paceline gpu doctor` as root for ACS and the IOMMU; until then try whether NCCL_P2P_DISABLE=1, or NCCL_P2P_LEVEL=PXB, \
             makes steps faster",
            "root 권한의 `paceline gpu doctor`에서 ACS와 IOMMU를 확인하세요. 그때까지는 NCCL_P2P_DISABLE=1이나 NCCL_P2P_LEVEL=PXB로 스텝이 빨라지는지 시험해 보세요"
        );
        notes.sheet(checks::LINKS).warning(what, why, fix);
    }
}

fn judge_untried(report: &LinkReport, notes: &mut Notes) {
    let lang = notes.lang;
    let untried = links(report, |link| {
        [&link.peer, &link.host].contains(&&Outcome::NotTried)
    });
    if !untried.is_empty() {
        let named = named(&untried, lang);
        let what = say!(
            lang,
            "not everything was tried: GPU {named}",
            "일부는 시험하지 못함: GPU {named}"
        );
        let why = say!(
            lang,
            "too many ways before them took the process that tried them along, or the driver did not answer any more",
            "앞선 경로를 시험하던 프로세스가 너무 여러 번 함께 종료되었거나, 드라이버가 더 이상 응답하지 않았습니다"
        );
        let fix = say!(
            lang,
            "mend the others, then test again",
            "다른 연결을 먼저 고치고 다시 시험하세요"
        );
        notes.sheet(checks::LINKS).note(what, why, fix);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::tests::assert_korean;
    use paceline_nccl::Version;
    use paceline_nccl::pairs::PairDevice;

    fn fine(gb_per_second: f64) -> Outcome {
        Outcome::Fine { gb_per_second }
    }

    /// Two devices with the same link both ways.
    fn report(says_ok: bool, peer: Outcome, host: Outcome) -> LinkReport {
        let place = PairDevice {
            name: "GPU".into(),
            bus: "0000:01:00.0".into(),
            uuid: "GPU-1".into(),
        };
        let link = |(from, to)| Link {
            from,
            to,
            says_ok,
            rank: Some(0),
            peer: peer.clone(),
            host: host.clone(),
        };
        LinkReport {
            cuda: Version::of_cuda(12080),
            devices: vec![place.clone(), place],
            message_bytes: 1 << 20,
            links: [(0, 1), (1, 0)].map(link).to_vec(),
        }
    }

    fn roomy() -> Surroundings {
        Surroundings {
            shm_free_bytes: Some(8 << 30),
            ..Surroundings::default()
        }
    }

    /// Checks the worst severity, a word of the first finding, and whether NCCL is told something.
    fn check(
        report: &LinkReport,
        around: &Surroundings,
        worst: Option<Severity>,
        word: &str,
        told: bool,
    ) {
        let judgement = judge(report, around, Lang::En);
        assert_korean(&judge(report, around, Lang::Ko).findings);
        assert_eq!(judgement.worst(), worst, "{judgement:?}");
        let first = judgement
            .findings
            .first()
            .map_or("", |finding| &finding.what);
        assert!(first.contains(word), "{first}");
        let expect: &[(String, String)] = &[("NCCL_P2P_DISABLE".into(), "1".into())];
        assert_eq!(
            judgement.variables,
            if told { expect } else { &[] },
            "{judgement:?}"
        );
    }

    #[test]
    fn links_that_work_need_nothing() {
        check(
            &report(true, fine(20.0), fine(10.0)),
            &roomy(),
            None,
            "",
            false,
        );
    }

    #[test]
    fn links_that_the_driver_does_not_offer_are_no_fault() {
        let report = report(false, Outcome::NotSupported, fine(5.5));
        check(
            &report,
            &roomy(),
            Some(Severity::Note),
            "no peer-to-peer between any two GPUs",
            false,
        );
        let judgement = judge(&report, &roomy(), Lang::En);
        assert!(judgement.findings[0].why.contains("at 5.5 GB/s here"));
    }

    #[test]
    fn links_that_the_driver_praises_and_that_do_not_work_are_switched_off() {
        let wrong = Outcome::Wrong {
            by: "a copy".into(),
            bytes: 12,
        };
        for (bad, word) in [
            (wrong, "12 bytes of a copy were wrong"),
            (Outcome::Stuck, "a copy never ended"),
            (
                Outcome::Failed {
                    reason: "it burns".into(),
                },
                "it burns",
            ),
        ] {
            let report = report(true, bad, fine(5.0));
            check(&report, &roomy(), Some(Severity::Error), word, true);
            let set = |value: &str| Surroundings {
                p2p_disable: Some(value.into()),
                ..roomy()
            };
            // What the user has set is the user's.
            check(&report, &set("1"), Some(Severity::Error), word, false);
            check(&report, &set("0"), Some(Severity::Error), word, false);
        }
    }

    #[test]
    fn nothing_helps_where_the_host_cannot_be_reached() {
        let report = report(true, fine(20.0), Outcome::Stuck);
        check(
            &report,
            &roomy(),
            Some(Severity::Error),
            "through the host's memory do not work",
            false,
        );
    }

    #[test]
    fn small_shared_memory_is_told_where_it_is_needed() {
        let small = Surroundings {
            shm_free_bytes: Some(64 << 20),
            ..Surroundings::default()
        };
        let needed = report(false, Outcome::NotSupported, fine(5.0));
        check(
            &needed,
            &small,
            Some(Severity::Warning),
            "/dev/shm has 64 MiB free",
            false,
        );
        check(
            &report(true, fine(20.0), fine(10.0)),
            &small,
            None,
            "",
            false,
        );
        let disabled = Surroundings {
            shm_disable: Some("1".into()),
            ..roomy()
        };
        check(
            &needed,
            &disabled,
            Some(Severity::Warning),
            "NCCL_SHM_DISABLE=1 is set",
            false,
        );
    }

    #[test]
    fn a_link_that_is_slower_than_a_detour_is_told() {
        check(
            &report(true, fine(2.0), fine(10.0)),
            &roomy(),
            Some(Severity::Warning),
            "2.0 GB/s against 10.0 GB/s",
            false,
        );
    }

    #[test]
    fn many_links_are_named_by_a_few() {
        let mut report = report(true, fine(1.0), fine(1.0));
        let link = report.links[0].clone();
        report.links = (1..=8).map(|to| Link { to, ..link.clone() }).collect();
        let all: Vec<&Link> = report.links.iter().collect();
        assert_eq!(
            named(&all, Lang::En),
            "0 to 1, 0 to 2, 0 to 3, 0 to 4, 0 to 5, 0 to 6 and 2 more"
        );
    }
}
