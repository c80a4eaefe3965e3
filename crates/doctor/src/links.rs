//! What the links mean: what is wrong, what NCCL has to be told, and what to do about it.

use paceline_nccl::pairs::{Link, LinkReport, Outcome};

use crate::finding::{Finding, Notes, Severity};

/// What NCCL takes from `/dev/shm` for two devices that go through the host, at most, with its defaults.
const SHM_PER_DEVICE: u64 = 32 << 20;

/// What a container has there unless told otherwise.
const SHM_OF_CONTAINERS: u64 = 64 << 20;

/// A link that is this many times slower than the way through the host is worth a word.
const SLOW: f64 = 1.25;

/// The variable that keeps NCCL from using peer-to-peer.
const P2P_DISABLE: &str = "NCCL_P2P_DISABLE";

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

    fn add(&mut self, severity: Severity, what: String, why: &str, fix: impl Into<String>) {
        let mut notes = Notes::default();
        let mut sheet = notes.sheet("links");
        sheet.add(severity, what, why.to_owned(), fix.into());
        self.findings.append(&mut notes.findings);
    }
}

/// Says what the links mean for a job that uses NCCL on these devices.
///
/// *Source*: "Troubleshooting" in NCCL's user guide, for ACS, IOMMU, and `/dev/shm`.
pub fn judge(report: &LinkReport, around: &Surroundings) -> Judgement {
    let mut judgement = Judgement::default();
    let is_off = around.p2p_disable.as_deref() == Some("1");
    let broken: Vec<&Link> = links(report, |link| link.says_ok && link.peer.is_bad());
    judge_broken(&broken, around, &mut judgement);
    judge_host(report, &mut judgement);
    let unsupported = links(report, |link| !link.says_ok);
    judge_unsupported(report, &unsupported, &mut judgement);
    let uses_host = is_off || !broken.is_empty() || !unsupported.is_empty();
    if uses_host && !report.links.is_empty() {
        judge_shm(report, around, &mut judgement);
    }
    judge_slow(report, &mut judgement);
    judge_untried(report, &mut judgement);
    judgement.findings.sort_by_key(|finding| finding.severity);
    judgement
}

fn links(report: &LinkReport, is_meant: impl Fn(&Link) -> bool) -> Vec<&Link> {
    report.links.iter().filter(|link| is_meant(link)).collect()
}

/// `0 to 1, 1 to 0`, as far as it can be read.
fn named(links: &[&Link]) -> String {
    const SHOWN_MAX: usize = 6;
    let shown: Vec<String> = links
        .iter()
        .take(SHOWN_MAX)
        .map(|link| format!("{} to {}", link.from, link.to))
        .collect();
    match links.len().saturating_sub(SHOWN_MAX) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// The slowest and the fastest of some speeds: `12.3 GB/s`, `11.0 to 12.3 GB/s`.
fn speeds<'a>(outcomes: impl Iterator<Item = &'a Outcome>) -> Option<String> {
    let mut all: Vec<f64> = outcomes.filter_map(Outcome::gb_per_second).collect();
    all.sort_by(f64::total_cmp);
    let (first, last) = (all.first()?, all.last()?);
    let (first, last) = (format!("{first:.1}"), format!("{last:.1}"));
    Some(if first == last {
        format!("{first} GB/s")
    } else {
        format!("{first} to {last} GB/s")
    })
}

/// The driver says that it works, and it does not: NCCL would believe it.
fn judge_broken(broken: &[&Link], around: &Surroundings, judgement: &mut Judgement) {
    if broken.is_empty() {
        return;
    }
    let how = |link: &&Link| match &link.peer {
        Outcome::Wrong { by, bytes } => format!("{bytes} bytes of {by} were wrong"),
        Outcome::Stuck => "a copy never ended".to_owned(),
        Outcome::Failed { reason } => reason.clone(),
        Outcome::Fine { .. } | Outcome::NotSupported | Outcome::NotTried => String::new(),
    };
    let first = broken.first().map(how).unwrap_or_default();
    let what = format!(
        "peer-to-peer does not work though the driver says so: GPU {} ({first})",
        named(broken)
    );
    let mend = "to mend it: turn the IOMMU off or to pass-through (`intel_iommu=off`, `amd_iommu=off` or `iommu=pt` for the kernel), \
                and Access Control Services in the firmware (ACS; `paceline gpu doctor` as root shows where it is on); in a \
                virtual machine it is the hypervisor's to set";
    let fix = match around.p2p_disable.as_deref() {
        Some("1") => format!(
            "{P2P_DISABLE}=1 is set: NCCL goes through the host's memory, which works; {mend}"
        ),
        Some(value) => format!(
            "{P2P_DISABLE} is set to {value}: set it to 1, so that NCCL goes through the host's memory; {mend}"
        ),
        None => {
            judgement
                .variables
                .push((P2P_DISABLE.to_owned(), "1".to_owned()));
            format!(
                "set {P2P_DISABLE}=1 for all ranks, so that NCCL goes through the host's memory; {mend}"
            )
        }
    };
    let why = "NCCL believes the driver: the first collective hangs, or a job trains on corrupted numbers";
    judgement.add(Severity::Error, what, why, fix);
}

/// The way through the host is the last one that there is.
fn judge_host(report: &LinkReport, judgement: &mut Judgement) {
    let broken = links(report, |link| link.host.is_bad());
    if broken.is_empty() {
        return;
    }
    let what = format!(
        "copies through the host's memory do not work: GPU {}",
        named(&broken)
    );
    let why = "no setting of NCCL helps: every batch goes that way";
    let fix = "see the kernel's log for Xid lines and PCIe errors (`paceline gpu doctor` as root shows them); look at the cards' seating, \
               cables and power";
    judgement.add(Severity::Error, what, why, fix);
}

/// The driver says that it does not work.
fn judge_unsupported(report: &LinkReport, unsupported: &[&Link], judgement: &mut Judgement) {
    if unsupported.is_empty() {
        return;
    }
    let host = speeds(unsupported.iter().map(|link| &link.host));
    let host = host.map_or_else(String::new, |host| format!(", at {host} here"));
    let are_all = unsupported.len() == report.links.len();
    let which = match are_all {
        true => "between any two GPUs".to_owned(),
        false => format!("from GPU {}", named(unsupported)),
    };
    let what = format!("no peer-to-peer {which}: the driver does not offer it");
    let why = format!(
        "NCCL sees that and goes through the host's memory by itself{host}: right results, a slower exchange. Usual for GeForce cards \
         since the 40 series, for cards on two CPUs (different root complexes), and in virtual machines or behind an IOMMU"
    );
    let fix = "nothing has to be set; do not set NCCL_SHM_DISABLE, which takes that way away; train with one process per GPU";
    judgement.add(Severity::Note, what, &why, fix);
}

/// What goes through the host goes through `/dev/shm`.
fn judge_shm(report: &LinkReport, around: &Surroundings, judgement: &mut Judgement) {
    if around.shm_disable.as_deref() == Some("1") {
        let why = "where devices do not reach each other it is the way between them; what remains is the network, which is slower still";
        judgement.add(
            Severity::Warning,
            "NCCL_SHM_DISABLE=1 is set, and devices have to go through the host's memory"
                .to_owned(),
            why,
            "unset it",
        );
        return;
    }
    let needed = SHM_OF_CONTAINERS.max(SHM_PER_DEVICE * report.devices.len() as u64);
    let Some(free) = around.shm_free_bytes.filter(|free| *free <= needed) else {
        return;
    };
    let what = format!(
        "/dev/shm has {} MiB free, and NCCL goes through it here",
        free >> 20
    );
    let why = "it takes some MiB for each pair and channel: without them it ends with \"no space left on device\", \"failed to extend \
               /dev/shm/nccl-...\" or a bus error";
    let fix = "start the container with `--shm-size=8g` or `--ipc=host`, or `sudo mount -o remount,size=8G /dev/shm`; `ls /dev/shm` shows \
               what earlier jobs left there";
    judgement.add(Severity::Warning, what, why, fix);
}

/// Data that arrives intact may still take a detour.
fn judge_slow(report: &LinkReport, judgement: &mut Judgement) {
    let is_slow = |link: &Link| match (link.peer.gb_per_second(), link.host.gb_per_second()) {
        (Some(peer), Some(host)) => peer > 0.0 && host > peer * SLOW,
        _ => false,
    };
    let slow = links(report, is_slow);
    let peer = speeds(slow.iter().map(|link| &link.peer));
    let host = speeds(slow.iter().map(|link| &link.host));
    if let (Some(peer), Some(host)) = (peer, host) {
        let what = format!(
            "peer-to-peer is slower than the host's memory: GPU {}, {peer} against {host}",
            named(&slow)
        );
        let why = "packets between the devices take a detour, mostly because ACS or the IOMMU sends them through the CPU";
        let fix = "see `paceline gpu doctor` as root for ACS and the IOMMU; until then try whether NCCL_P2P_DISABLE=1, or NCCL_P2P_LEVEL=PXB, \
                   makes steps faster";
        judgement.add(Severity::Warning, what, why, fix);
    }
}

fn judge_untried(report: &LinkReport, judgement: &mut Judgement) {
    let untried = links(report, |link| {
        [&link.peer, &link.host].contains(&&Outcome::NotTried)
    });
    if !untried.is_empty() {
        let what = format!("not everything was tried: GPU {}", named(&untried));
        let why = "too many ways before them took the process that tried them along, or the driver did not answer any more";
        judgement.add(
            Severity::Note,
            what,
            why,
            "mend the others, then test again",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let judgement = judge(report, around);
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
        let judgement = judge(&report, &roomy());
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
            named(&all),
            "0 to 1, 0 to 2, 0 to 3, 0 to 4, 0 to 5, 0 to 6 and 2 more"
        );
    }
}
