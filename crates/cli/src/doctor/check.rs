//! `paceline doctor` before a job: looks at this machine and at the way between nodes, and prints what would go wrong.

use std::path::PathBuf;
use std::time::Duration;

use clap::ArgMatches;
use clap::builder::{Resettable, ValueParser};
use paceline_doctor::{DoctorError, Options, Verdict, examine};
use paceline_launch::shared_token;
use paceline_words::Lang;

use crate::exit::{Exit, Failure, tell};
use crate::flags::{print, required, seconds, valued};
use crate::job;
use crate::run::{Nodes, NodesArgs, Processes, RdzvBackend, cluster, shared};

/// The job that is to begin; names and meanings are those of `paceline run`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckArgs {
    /// How many ranks on this node.
    pub processes: Processes,
    /// Compute threads of a rank.
    pub threads_per_rank: Option<usize>,
    /// Folder for the output of every rank.
    pub log_dir: Option<PathBuf>,
    /// Fewest and most nodes.
    pub nodes: Nodes,
    /// How the nodes find each other; static where a node rank is given.
    pub backend: Option<RdzvBackend>,
    /// Number of this node.
    pub node_rank: Option<usize>,
    /// Where the nodes meet.
    pub endpoint: Option<String>,
    /// Host of node 0.
    pub master_addr: Option<String>,
    /// Port on that host for the program.
    pub master_port: Option<u16>,
    /// Address of this node for the others.
    pub local_addr: Option<String>,
    /// How long to wait for the other nodes.
    pub timeout: Duration,
}

/// The options that describe the job: those of `paceline run`.
const OF_RUN: [&str; 10] = [
    "nproc_per_node",
    "threads_per_rank",
    "log_dir",
    "nnodes",
    "rdzv_backend",
    "node_rank",
    "rdzv_endpoint",
    "master_addr",
    "master_port",
    "local_addr",
];

/// Options that say nothing about a job that is over.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    OF_RUN.into_iter().chain(["timeout"])
}

pub(super) fn add_to(command: clap::Command) -> clap::Command {
    command
        .args(OF_RUN.map(shared))
        // A node rank decides how nodes find each other, so it counts whether one was given.
        .mut_arg("node_rank", |arg| arg.default_value(Resettable::Reset))
        .mut_arg("rdzv_backend", |arg| {
            arg.default_value(Resettable::Reset)
                .help("How nodes find each other: static or c10d [default: static with --node-rank, else c10d]")
        })
        .arg(
            valued("timeout", "SECONDS", ValueParser::new(seconds(1..=86_400)))
                .default_value("60")
                .help("How long to wait for the other nodes"),
        )
}

pub(super) fn read(matches: &ArgMatches) -> CheckArgs {
    let text = |name| matches.get_one::<String>(name).cloned();
    let number = |name| matches.get_one(name).copied();
    CheckArgs {
        processes: required(matches, "nproc_per_node"),
        threads_per_rank: number("threads_per_rank"),
        log_dir: matches.get_one("log_dir").cloned(),
        nodes: required(matches, "nnodes"),
        backend: matches.get_one("rdzv_backend").copied(),
        node_rank: number("node_rank"),
        endpoint: text("rdzv_endpoint"),
        master_addr: text("master_addr"),
        master_port: matches.get_one("master_port").copied(),
        local_addr: text("local_addr"),
        timeout: required(matches, "timeout"),
    }
}

/// Looks, and prints the report.
///
/// *Errors*: what kept it from looking.
pub(crate) fn check(args: &CheckArgs, lang: Lang, json: bool) -> Result<Exit, Failure> {
    if args.backend == Some(RdzvBackend::Etcd) {
        let hint = "name one of the nodes: --rdzv-backend c10d --rdzv-endpoint HOST";
        let message = "the nodes to look at cannot meet in etcd";
        return Err(Failure::new(Exit::Usage, message, Some(hint.to_owned())));
    }
    let mut options = Options {
        lang,
        ..options(args, args.processes.here()?)
    };
    if options.nodes_max > 1 {
        options.token = Some(shared_token().map_err(job::refused)?);
    }
    let report = examine(&options, &|notice| tell(notice)).map_err(refused)?;
    print(|out| report.write(json, out)).map(|_| match report.verdict() {
        Verdict::Sound => Exit::Done,
        Verdict::Fault => Exit::JobFailed,
        Verdict::Late => Exit::Deadline,
    })
}

/// The nodes meet where the job's launchers would.
fn options(args: &CheckArgs, ranks: usize) -> Options {
    let is_numbered = args.node_rank.is_some();
    let of_run = NodesArgs {
        nodes: args.nodes,
        node_rank: args.node_rank.unwrap_or(0),
        master_addr: args.master_addr.clone(),
        master_port: args.master_port,
        backend: args.backend.unwrap_or(match is_numbered {
            true => RdzvBackend::Static,
            false => RdzvBackend::C10d,
        }),
        endpoint: args.endpoint.clone(),
        ..NodesArgs::default()
    };
    let cluster = cluster(&of_run);
    let place = cluster.place.filter(|_| args.nodes.max > 1);
    Options {
        threads_per_rank: args.threads_per_rank,
        log_dir: args.log_dir.clone(),
        nodes_min: cluster.nodes_min,
        nodes_max: cluster.nodes_max,
        node_rank: place.as_ref().map(|place| place.node_rank),
        endpoint: cluster.endpoint,
        master_port: place.map(|place| place.master_port).or(args.master_port),
        local_addr: args.local_addr.clone(),
        timeout: args.timeout,
        ..Options::new(ranks)
    }
}

fn refused(error: DoctorError) -> Failure {
    let exit = match error.exit_code() == Exit::Usage.code() {
        true => Exit::Usage,
        false => Exit::Environment,
    };
    Failure::new(exit, &error, error.hint())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(words: &str) -> Options {
        let command = add_to(clap::Command::new("doctor"));
        let words = std::iter::once("doctor").chain(words.split_whitespace());
        let args = read(&command.get_matches_from(words));
        let ranks = args.processes.on(8, || Ok(0)).expect("no GPU is asked for");
        options(&args, ranks)
    }

    #[test]
    fn the_nodes_meet_where_the_launchers_would() {
        let check = |words: &str, endpoint: &str, node_rank, master_port| {
            let options = asked(words);
            let got = (
                options.endpoint.as_str(),
                options.node_rank,
                options.master_port,
            );
            assert_eq!(got, (endpoint, node_rank, master_port), "{words}");
        };
        check("", "127.0.0.1", None, None);
        check("--master-port 5000", "127.0.0.1", None, Some(5000));
        check("--nnodes 2 --rdzv-endpoint node1", "node1", None, None);
        check("--nnodes 2 --rdzv-endpoint node1:5", "node1:5", None, None);
        let numbered = "--nnodes 2 --node-rank 1 --master-addr node1";
        check(numbered, "node1:29501", Some(1), Some(29_500));
        let named = "--nnodes 2 --node_rank=1 --rdzv-endpoint node1:5000";
        check(named, "node1:5001", Some(1), Some(5000));
        let forced = "--nnodes 2 --rdzv-backend static --master-addr node1";
        check(forced, "node1:29501", Some(0), Some(29_500));
    }

    #[test]
    fn ranks_and_nodes_are_those_of_run() {
        let options = asked("--nproc-per-node auto --nnodes 2:4 --timeout 5 --threads-per-rank 3");
        assert_eq!((options.ranks, options.threads_per_rank), (8, Some(3)));
        assert_eq!((options.nodes_min, options.nodes_max), (2, 4));
        assert_eq!(options.timeout, Duration::from_secs(5));
    }

    #[test]
    fn what_an_earlier_job_left_is_known_by_the_launchers_variable() {
        assert_eq!(
            paceline_doctor::LAUNCHER_VARIABLE,
            paceline_launch::LAUNCHER_VARIABLE
        );
    }
}
