//! What is wrong with a machine's GPUs: rules over one snapshot, which say cause, consequence and remedy.
//!
//! | module | speaks of |
//! |---|---|
//! | `driver` | no library, no module, no permission, no device |
//! | `libraries` | NCCL that is newer than the driver, several NCCLs |
//! | `lost`, `errors`, `xid` | devices that fell off the bus, memory errors, failures in the kernel's log |
//! | `fabric`, `nvlink`, `p2p`, `proof`, `acs`, `iommu` | what runs between devices, and what is in its way |
//! | `pcie`, `numa` | lanes and generations of slots, memory nodes |
//! | `mixed`, `modes`, `heat` | models that differ, MIG and other modes, power and temperature |
//! | `holders` | processes on the devices |
//! | `limits`, `variables` | `/dev/shm`, locked memory, RDMA; variables of CUDA and NCCL |
//! | `gaps` | what could not be read |
//!
//! A rule is a pure function of the snapshot, so a snapshot that was saved elsewhere gives the same findings here. Nothing in a
//! snapshot is believed: text is stripped of what a terminal obeys, lists are shortened, bridges may lie in a circle.

mod acs;
mod driver;
mod errors;
mod fabric;
mod gaps;
mod heat;
mod holders;
mod iommu;
mod libraries;
mod limits;
mod lost;
mod mixed;
mod modes;
mod numa;
mod nvlink;
mod p2p;
mod pairs;
mod pcie;
mod proof;
mod rules;
mod variables;
mod words;
mod xid;

use std::io::{self, Write};

use paceline_gpu::snapshot::Snapshot;
use paceline_words::{Lang, say};
use serde::Serialize;

use crate::finding::{Fact, Finding, Notes, Severity, plain};
use crate::report::{Verdict, write_facts, write_findings};

pub(crate) use self::driver::trouble;
pub(crate) use self::words::models;

/// What a snapshot comes to.
#[derive(Debug, Clone, Serialize)]
pub struct GpuReport {
    #[serde(skip)]
    lang: Lang,
    /// Version of these fields.
    pub paceline_gpu_doctor: u32,
    /// The machine of the snapshot.
    pub host: String,
    /// When the snapshot was taken, in seconds since 1970.
    pub taken_unix_s: u64,
    /// What should be known, the worst first.
    pub findings: Vec<Finding>,
    /// What was looked at.
    pub facts: Vec<Fact>,
}

/// The rules, in the order in which findings of one severity are printed: the cause before what comes of it.
const RULES: [fn(&Snapshot, &mut Notes); 20] = [
    driver::judge,
    lost::judge,
    libraries::judge,
    errors::judge,
    xid::judge,
    fabric::judge,
    nvlink::judge,
    p2p::judge,
    proof::judge,
    acs::judge,
    iommu::judge,
    pcie::judge,
    numa::judge,
    mixed::judge,
    modes::judge,
    heat::judge,
    holders::judge,
    limits::judge,
    variables::judge,
    gaps::judge,
];

/// Judges one snapshot, in this language.
///
/// *Cost*: microseconds; nothing is read from the machine.
///
/// ```
/// use paceline_doctor::gpu::diagnose;
/// use paceline_gpu::snapshot::Snapshot;
/// use paceline_words::Lang;
///
/// let saved = br#"{"paceline_snapshot":1,"host":"a","driver":{"trouble":"no_driver"}}"#;
/// let report = diagnose(&Snapshot::from_json(saved)?, Lang::En);
/// assert_eq!(report.findings[0].what, "NVIDIA's kernel module is not loaded");
/// # Ok::<(), paceline_gpu::snapshot::SnapshotError>(())
/// ```
pub fn diagnose(snapshot: &Snapshot, lang: Lang) -> GpuReport {
    let mut notes = Notes::new(lang);
    for rule in RULES {
        rule(snapshot, &mut notes);
    }
    // Stable: within a severity in the order of the rules.
    notes.findings.sort_by_key(|finding| finding.severity);
    GpuReport {
        lang,
        paceline_gpu_doctor: 1,
        host: plain(&snapshot.host),
        taken_unix_s: snapshot.taken_unix_s,
        findings: notes.findings,
        facts: notes.facts,
    }
}

impl GpuReport {
    /// What it comes to, for the exit code.
    pub fn verdict(&self) -> Verdict {
        match self.worst() {
            Some(Severity::Error) => Verdict::Fault,
            _ => Verdict::Sound,
        }
    }

    /// The worst severity found.
    pub fn worst(&self) -> Option<Severity> {
        self.findings.first().map(|finding| finding.severity)
    }

    /// Writes it for people.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let (lang, host) = (self.lang, &self.host);
        let place = match host.is_empty() {
            true => say!(lang, "on this machine", "이 머신"),
            false => match lang {
                Lang::En => format!("on {host}"),
                Lang::Ko => host.clone(),
            },
        };
        write_findings(&self.findings, &place, lang, out)?;
        write_facts(&self.facts, out)
    }

    /// Writes it as one JSON object on one line.
    pub fn write_json(&self, out: &mut impl Write) -> io::Result<()> {
        serde_json::to_writer(&mut *out, self)?;
        writeln!(out)
    }
}

#[cfg(test)]
pub(crate) mod tests;
