//! What is looked at on this machine alone. Each check reads, within bounds, and then judges what it has read.

mod clock;
mod cpu;
mod disk;
mod environment;
mod gpus;
mod kernel;
mod leftovers;
mod limits;
mod memory;
mod network;
mod ports;

use std::net::IpAddr;
use std::time::Duration;

use crate::finding::Notes;
use crate::options::Options;
use paceline_gpu::host::{Host, within};
use paceline_gpu::places::Places;
use paceline_words::Lang;

/// For what may hang: file servers, and processes that the kernel holds.
const LOOK_TIMEOUT: Duration = Duration::from_secs(5);

/// For NVIDIA's driver, which takes seconds to wake each device that nothing keeps awake.
const GPUS_TIMEOUT: Duration = Duration::from_secs(30);

/// What other nodes are told about this one, and what the table of nodes shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) kernel: String,
    pub(crate) arch: String,
    /// Cores that threads can run on.
    pub(crate) cores: usize,
    pub(crate) memory_bytes: u64,
    /// Open files of a process.
    pub(crate) files: u64,
    /// Addresses that other machines may reach this one by.
    pub(crate) addrs: Vec<IpAddr>,
    /// A firewall that seems to be on.
    pub(crate) firewall: Option<&'static str>,
    /// From which the system chooses ports.
    pub(crate) ports: Option<(u16, u16)>,
}

/// Readings of this machine, to be judged in any language.
#[derive(Debug)]
pub(crate) struct Seen {
    kernel: kernel::Kernel,
    cpu: cpu::Cpu,
    memory: memory::Memory,
    limits: limits::Limits,
    disk: disk::Look,
    clock: clock::Clock,
    network: network::Network,
    ports: ports::Ports,
    /// Nothing where the driver took too long.
    gpus: Option<gpus::Seen>,
    /// Nothing where looking took too long.
    jobs: Option<Vec<leftovers::LeftoverJob>>,
}

/// Looks at everything. `name` is what this machine calls itself.
pub(crate) fn look(host: &Host<'_>, name: &str, options: &Options) -> Seen {
    let root = host.path("/");
    Seen {
        kernel: kernel::read(host),
        cpu: cpu::read(host),
        memory: memory::read(host),
        limits: limits::read(host),
        disk: look_at_disk(host, options),
        clock: clock::read(),
        network: network::read(host, name),
        ports: ports::read(host, &[ports::wanted(options).port]),
        gpus: look_at_gpus(host),
        jobs: within("doctor/jobs", LOOK_TIMEOUT, move || {
            leftovers::read(&Host::new(root, &|_| None))
        }),
    }
}

impl Seen {
    /// The notes about it, in this language.
    pub(crate) fn judge(&self, host: &Host<'_>, options: &Options, lang: Lang) -> Notes {
        let mut notes = Notes::new(lang);
        let several = options.has_several_nodes();
        kernel::judge(&self.kernel, &mut notes);
        cpu::judge(&self.cpu, options, &mut notes);
        memory::judge(&self.memory, options, &mut notes);
        limits::judge(&self.limits, options, self.cpu.threads(options), &mut notes);
        disk::judge(&self.disk, options, &mut notes);
        clock::judge(&self.clock, several, &mut notes);
        let endpoint = several.then_some(&options.endpoint);
        network::judge(&self.network, endpoint, &mut notes);
        ports::judge(&self.ports, options, &mut notes);
        environment::judge(host, options, self.cpu.usable(), &mut notes);
        gpus::judge(self.gpus.as_ref(), GPUS_TIMEOUT.as_secs(), &mut notes);
        leftovers::judge(self.jobs.as_deref(), &mut notes);
        notes
    }

    pub(crate) fn summary(&self) -> Summary {
        let machine = &self.memory.machine;
        let group = machine.group.map(|(most, _)| most);
        Summary {
            kernel: self.kernel.release.clone(),
            arch: self.kernel.arch.clone(),
            cores: self.cpu.usable(),
            memory_bytes: machine.total.into_iter().chain(group).min().unwrap_or(0),
            files: self.limits.files[0].unwrap_or(u64::MAX),
            addrs: self.network.candidates(),
            firewall: self.network.firewall,
            ports: self.ports.range,
        }
    }
}

fn look_at_gpus(host: &Host<'_>) -> Option<gpus::Seen> {
    let places = Places {
        root: host.path("/"),
        ..Places::from_env()
    };
    within("doctor/gpus", GPUS_TIMEOUT, move || gpus::look(&places))
}

fn look_at_disk(host: &Host<'_>, options: &Options) -> disk::Look {
    let Some(folder) = disk::folder(host, options) else {
        return disk::Look::NotKept;
    };
    let asked = folder.clone();
    match within("doctor/disk", LOOK_TIMEOUT, move || disk::look(&asked)) {
        Some(disk) => disk::Look::There(disk),
        None => disk::Look::Silent(folder, LOOK_TIMEOUT.as_secs()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::finding::{Finding, Severity};

    pub(crate) fn job(ranks: usize, nodes: usize) -> Options {
        Options {
            nodes_max: nodes,
            ..Options::new(ranks)
        }
    }

    /// Severity, check and fix of a finding. Equal to text that it begins with: tests say as much as tells it from others.
    #[derive(Debug)]
    pub(crate) struct Said(String);

    impl PartialEq<&str> for Said {
        fn eq(&self, begin: &&str) -> bool {
            self.0.starts_with(begin)
        }
    }

    pub(crate) fn found(notes: &Notes) -> Vec<Said> {
        let said = |finding: &Finding| {
            let (severity, check) = (finding.severity.word(Lang::En), &finding.check);
            Said(format!("{severity}: {check}: {}", finding.fix))
        };
        notes.findings.iter().map(said).collect()
    }

    /// The English notes of a check; asserts that the Korean ones are as many and without English.
    pub(crate) fn noted(judge: impl Fn(&mut Notes)) -> Notes {
        let [english, korean] = [Lang::En, Lang::Ko].map(|lang| {
            let mut notes = Notes::new(lang);
            judge(&mut notes);
            notes
        });
        let severities = |notes: &Notes| -> Vec<Severity> {
            let findings = notes.findings.iter();
            findings.map(|finding| finding.severity).collect()
        };
        assert_eq!(severities(&english), severities(&korean));
        assert_eq!(english.facts.len(), korean.facts.len());
        assert_korean(&korean.findings);
        for fact in &korean.facts {
            assert!(!has_english(&fact.value), "not all Korean: {fact:?}");
        }
        english
    }

    /// Each sentence has Korean in it, and none is in English.
    pub(crate) fn assert_korean(findings: &[Finding]) {
        for finding in findings {
            for text in [&finding.what, &finding.why, &finding.fix] {
                assert!(text.chars().any(is_hangul), "no Korean: {text}");
                assert!(!has_english(text), "not all Korean: {text}");
            }
        }
    }

    fn is_hangul(char: char) -> bool {
        ('가'..='힣').contains(&char)
    }

    /// Whether three words in a row are English, besides commands and quotations.
    fn has_english(text: &str) -> bool {
        let outside = text.split('`').step_by(2);
        let mut outside = outside.flat_map(|part| part.split('"').step_by(2));
        outside.any(|part| {
            let words: Vec<&str> = part.split_whitespace().collect();
            let is_english = |word: &&str| {
                let word = word.trim_matches(|char: char| !char.is_alphanumeric());
                word.len() > 1 && word.chars().all(|char| char.is_ascii_lowercase())
            };
            words.windows(3).any(|words| words.iter().all(is_english))
        })
    }

    #[test]
    fn a_machine_that_tells_nothing_is_looked_at_without_a_word_too_many() {
        let folder = tempfile::tempdir().expect("a folder");
        let host = Host::new(folder.path(), &|_| None);
        let options = Options {
            log_dir: Some(folder.path().to_owned()),
            ..Options::new(1)
        };
        let seen = look(&host, "localhost", &options);
        let notes = seen.judge(&host, &options, Lang::En);
        let summary = seen.summary();
        assert!(summary.cores >= 1 && !summary.arch.is_empty());
        let errors: Vec<&Finding> = notes
            .findings
            .iter()
            .filter(|finding| finding.severity == Severity::Error)
            .collect();
        let [error] = errors[..] else {
            panic!("{errors:?}");
        };
        assert_eq!(error.what, "/proc is not mounted");
        assert!(notes.facts.iter().all(|fact| !fact.value.is_empty()));
    }
}
