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

/// Looks at everything. `name` is what this machine calls itself.
pub(crate) fn look(host: &Host<'_>, name: &str, options: &Options, notes: &mut Notes) -> Summary {
    let several = options.has_several_nodes();
    let kernel = kernel::read(host);
    let cpu = cpu::read(host);
    let memory = memory::read(host);
    let limits = limits::read(host);
    let network = network::read(host, name);
    let ports = ports::read(host, &[ports::wanted(options).port]);

    kernel::judge(&kernel, notes);
    cpu::judge(&cpu, options, notes);
    memory::judge(&memory, options, notes);
    limits::judge(&limits, options, cpu.threads(options), notes);
    look_at_disk(host, options, notes);
    clock::judge(&clock::read(), several, notes);
    network::judge(&network, several.then_some(&options.endpoint), notes);
    ports::judge(&ports, options, notes);
    environment::judge(host, options, cpu.usable(), notes);
    look_at_gpus(host, notes);
    let root = host.path("/");
    let jobs = within("doctor/jobs", LOOK_TIMEOUT, move || {
        leftovers::read(&Host::new(root, &|_| None))
    });
    leftovers::judge(jobs.as_deref(), notes);

    let group = memory.machine.group.map(|(most, _)| most);
    Summary {
        kernel: kernel.release,
        arch: kernel.arch,
        cores: cpu.usable(),
        memory_bytes: memory
            .machine
            .total
            .into_iter()
            .chain(group)
            .min()
            .unwrap_or(0),
        files: limits.files[0].unwrap_or(u64::MAX),
        addrs: network.candidates(),
        firewall: network.firewall,
        ports: ports.range,
    }
}

fn look_at_gpus(host: &Host<'_>, notes: &mut Notes) {
    let places = Places {
        root: host.path("/"),
        ..Places::from_env()
    };
    let seen = within("doctor/gpus", GPUS_TIMEOUT, move || gpus::look(&places));
    gpus::judge(seen.as_ref(), GPUS_TIMEOUT.as_secs(), notes);
}

fn look_at_disk(host: &Host<'_>, options: &Options, notes: &mut Notes) {
    let Some(folder) = disk::folder(host, options) else {
        return disk::judge(None, options, notes);
    };
    let asked = folder.clone();
    match within("doctor/disk", LOOK_TIMEOUT, move || disk::look(&asked)) {
        Some(disk) => disk::judge(Some(&disk), options, notes),
        None => disk::judge_silent(&folder, LOOK_TIMEOUT.as_secs(), notes),
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
            let (severity, check) = (
                finding.severity.word(paceline_words::Lang::En),
                &finding.check,
            );
            Said(format!("{severity}: {check}: {}", finding.fix))
        };
        notes.findings.iter().map(said).collect()
    }

    #[test]
    fn a_machine_that_tells_nothing_is_looked_at_without_a_word_too_many() {
        let folder = tempfile::tempdir().expect("a folder");
        let host = Host::new(folder.path(), &|_| None);
        let options = Options {
            log_dir: Some(folder.path().to_owned()),
            ..Options::new(1)
        };
        let mut notes = Notes::default();
        let summary = look(&host, "localhost", &options, &mut notes);
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
