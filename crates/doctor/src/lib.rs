//! Looks at what would make a job fail before it begins, and at what made one fail, and says what to do about it.
//!
//! | module | owns |
//! |---|---|
//! | `checks`, `finding` | the names of the checks in reports; findings and facts, which checks write down |
//! | `local` | this machine: kernel, cores, memory, limits, logs, clock, network, ports, variables, other jobs |
//! | `gpu` | GPUs: rules over one snapshot of devices and driver |
//! | `links` | what measured links between GPUs mean for NCCL |
//! | `nodes` | several machines: they meet in a store, and each tries to reach every address of every other |
//! | `flight` | the flight records of a job that failed: which rank diverged first |
//! | `report` | what is printed |
//!
//! Every check reads within bounds and judges apart from that, in a function that is tested by tables. Nothing here changes
//! the machine. What nodes tell each other goes through a store that asks for the job's token, and a connection between nodes
//! counts as one only when both ends have proved that they know it.
//!
//! ```
//! use paceline_doctor::{Options, Severity, examine};
//!
//! let report = examine(&Options::new(1), &|notice| eprintln!("{notice}"))?;
//! for finding in report.findings.iter().filter(|finding| finding.severity == Severity::Error) {
//!     println!("{}: {}", finding.what, finding.fix);
//! }
//! # Ok::<(), paceline_doctor::DoctorError>(())
//! ```

mod checks;
mod error;
mod finding;
pub mod flight;
pub mod gpu;
pub mod links;
mod local;
mod nodes;
mod options;
mod report;

use paceline_gpu::host::Host;
use paceline_rendezvous::{env, net};
use paceline_words::Lang;

pub use self::error::DoctorError;
pub use self::finding::{Fact, Finding, Severity};
pub use self::nodes::{Card, Measured, Miss, MissKind, Nodes, Outcome, Reach, Row};
pub use self::options::Options;
pub use self::report::{Report, Verdict};
pub use paceline_gpu::process::LAUNCHER_VARIABLE;

use self::finding::Notes;
use self::nodes::{Met, Speech};

/// Looks at this machine, and with several nodes at the way between them.
///
/// `notice` is told what is waited for.
///
/// *Blocks*: a few seconds; with several nodes for `options.timeout` at most until they have come, and about a minute more.
///
/// *Errors*: only what keeps it from looking. What it finds is in the report.
pub fn examine(options: &Options, notice: &dyn Fn(&str)) -> Result<Report, DoctorError> {
    let (min, max) = (options.nodes_min, options.nodes_max);
    paceline_rendezvous::nodes::check(min, max, options.node_rank)?;
    let variable = |name: &str| std::env::var(name).ok();
    let tls = env::asks_for_tls(&variable)?;
    let host = Host::new("/", &variable);
    let own = net::nodename();
    let name = options.host.clone().unwrap_or_else(|| own.clone());
    let seen = local::look(&host, &own, options);
    let (lang, ranks) = (options.lang, options.ranks);
    let mut notes = seen.judge(&host, options, lang);
    if !options.has_several_nodes() {
        return Ok(Report::new(name, ranks, notes, None));
    }

    let token = options.token.clone().ok_or(DoctorError::NoSharedToken)?;
    let speech = Speech { token, tls };
    // The readers of other nodes' reports may speak another language.
    let told = [Lang::En, Lang::Ko].map(|lang| seen.judge(&host, options, lang).findings);
    let (nodes, later, is_late) =
        match nodes::meet(options, &speech, &name, &seen.summary(), &told, notice)? {
            Met::Nodes(nodes) => {
                let mut between = Notes::new(lang);
                nodes::judge::judge(&nodes, options.timeout.as_secs(), &mut between);
                let is_late = nodes.cards.len() < nodes.min;
                notes.facts.append(&mut between.facts);
                (Some(nodes), between.findings, is_late)
            }
            Met::Not { finding, is_late } => (None, vec![finding], is_late),
        };
    let mut report = Report::new(name, ranks, notes, nodes);
    report.add(later);
    report.is_late = is_late;
    Ok(report)
}
