//! `paceline run`: any program as the ranks of a job.

use std::ffi::OsString;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;

use paceline_launch::{
    self as launch, Cluster, Console, Job, LaunchError, Plan, StaticPlace, Threads, shared_token,
};
use paceline_rendezvous::endpoint::MASTER_PORT;
use paceline_rendezvous::scheduler::{Pod, Scheduler};
use paceline_rendezvous::token::Token;

use super::args::{self, RunArgs};
use super::nodes::{NodesArgs, RdzvBackend};
use super::{alone, folder, over_ssh, scheduler, sense};
use crate::exit::{Exit, Failure, hint, note, tell, warn};
use crate::gpu::p2p;
use crate::job;
use crate::usage::lang;
use crate::variables::setting_variable;

/// Starts the program and waits for its end.
///
/// *Errors*: it could not be started.
pub fn run(args: &RunArgs) -> Result<Exit, Failure> {
    if let Some(hosts) = args.hosts.read()? {
        return over_ssh::run(args, &hosts);
    }
    if args.hosts.ssh.is_some() {
        warn("--ssh has no effect without --hosts or --hostfile");
    }
    let args = &with_master(args, &variable)?;
    let completed = scheduler::complete(args, &variable, &Pod::read)
        .map_err(|error| Failure::new(Exit::Usage, &error, error.hint()))?;
    if let Some(summary) = &completed.summary {
        tell(summary);
    }
    if let Some(advice) = &completed.advice {
        hint(advice);
    }
    let args = &completed.args;
    let mut job = prepared(args, true)?;
    job.restart_count = completed.restart_count;
    several_nodes(&mut job, args, completed.scheduler, None)?;
    finished(job, args, true)
}

/// The same on this machine alone, for a run that may be repeated: with these variables on top of the environment's, and
/// with notes and warnings only if `is_first`.
///
/// *Errors*: it could not be started.
pub(crate) fn repeat(
    args: &RunArgs,
    variables: &[(String, String)],
    is_first: bool,
) -> Result<Exit, Failure> {
    let mut job = prepared(args, is_first)?;
    job.run_id.clone_from(&args.nodes.id);
    job.env.extend_from_slice(variables);
    finished(job, args, is_first)
}

/// The job, with all that does not depend on its nodes.
pub(super) fn prepared(args: &RunArgs, is_told: bool) -> Result<Job, Failure> {
    let warnings = sense::check(&args.nodes)?;
    for warning in args.warnings.iter().chain(&warnings).filter(|_| is_told) {
        warn(warning);
    }
    let mut job = job::new(Path::new(&args.program), args.processes.here()?)?;
    job.run_as = args.run_as;
    job.args.clone_from(&args.args);
    job.stdin = args.stdin;
    job.console = Console::Prefixed;
    job.grace = args.shutdown_timeout;
    job.signals.clone_from(&args.signals);
    job.stall = args.stall;
    job.threads_per_rank = args.threads_per_rank;
    args.placement.apply(&mut job);
    let links = p2p::settings_for_program(job.nproc, lang(args.usage.lang));
    job.env.extend_from_slice(links);
    if let Some(timeout) = args.timeout {
        let timeout = timeout.to_string();
        job.env.push(("PACELINE_TIMEOUT_SECONDS".into(), timeout));
    }
    if let Some(dir) = &args.flight_dir {
        job.env
            .push((job::FLIGHT_DIR.into(), prepared_folder(dir)?));
    }
    if let Some(dir) = &args.run_dir {
        // That of `paceline train`, which programs of PyTorch heed, too.
        job.env
            .push((setting_variable("run_dir"), prepared_folder(dir)?));
    }
    Ok(job)
}

/// Runs the job to its end.
pub(super) fn finished(mut job: Job, args: &RunArgs, is_told: bool) -> Result<Exit, Failure> {
    // Other runs leave the folder alone as long as this lives.
    let _folder = match &args.run_dir {
        // Each node has a local rank 0, so several cannot share the run's folder.
        Some(dir) if args.log_dir.is_none() && args.nodes.nodes.max == 1 => {
            job.logs.clone_from(&args.logs);
            job.log_dir = Some(dir.join("logs"));
            None
        }
        _ => folder::prepare(&mut job, &args.logs, args.log_dir.as_deref())?,
    };
    let plan = job.plan().map_err(job::refused)?;
    if is_told && plan.nproc > plan.cores {
        warn(&format!(
            "{plan}; they take turns, so every rank waits for the others more than it computes"
        ));
    } else if is_told && is_chosen(&plan) {
        note(&plan.to_string());
    }
    let misplaced = misplaced(&args.args);
    let is_warned = misplaced.filter(|option| is_launchers(option) && !starts_jobs(args));
    if let Some(option) = is_warned.filter(|_| is_told) {
        let program = args.program.display();
        warn(&format!(
            "{option} comes after the program and is passed to it; the launcher's options go before it: `paceline run \
             {option} ... {program} ...`"
        ));
    }
    let exit = job::run(job, &args.usage)?;
    if exit != Exit::Done
        && is_warned.is_none()
        && let Some(option) = misplaced
    {
        hint(&format!(
            "{option} came after the program and was passed to it: options of `paceline run` go before it"
        ));
    }
    Ok(exit)
}

/// Whether people are told how the ranks share the machine: where they are bound to CPUs, or where several have a number of
/// threads that was not asked for.
fn is_chosen(plan: &Plan) -> bool {
    let is_set = |threads: &Threads| matches!(threads, Threads::Set(_));
    plan.bound.is_some() || (plan.nproc > 1 && plan.threads.iter().any(is_set))
}

/// Options that only a launcher has, whatever the program is.
const LAUNCHERS: [&str; 8] = [
    "nproc-per-node",
    "nnodes",
    "node-rank",
    "max-restarts",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "standalone",
];

fn is_launchers(option: &str) -> bool {
    let name = option.split('=').next().unwrap_or_default();
    let name = name.trim_start_matches('-').replace('_', "-");
    LAUNCHERS.contains(&name.as_str())
}

/// Whether the program is a launcher itself, whose options these may be.
fn starts_jobs(args: &RunArgs) -> bool {
    let first = std::iter::once(&args.program).chain(args.args.iter().take(2));
    let names = [
        "paceline",
        "torch",
        "accelerate",
        "deepspeed",
        "mpi",
        "srun",
    ];
    first
        .map(|word| word.to_string_lossy())
        .any(|word| names.iter().any(|name| word.contains(name)))
}

/// The command line with the address of node 0 from `MASTER_ADDR` and `MASTER_PORT`, where several numbered nodes are
/// asked for and it names none.
///
/// *Errors*: `MASTER_PORT` is no port.
fn with_master(args: &RunArgs, get: &dyn Fn(&str) -> Option<String>) -> Result<RunArgs, Failure> {
    let mut args = args.clone();
    if args.nodes.nodes.max > 1 {
        take_master(&mut args.nodes, get)?;
    }
    Ok(args)
}

/// Takes the address of node 0 from the environment, if the options name none. Returns whether it did.
///
/// *Errors*: `MASTER_PORT` is no port.
pub(super) fn take_master(
    nodes: &mut NodesArgs,
    get: &dyn Fn(&str) -> Option<String>,
) -> Result<bool, Failure> {
    let is_open = nodes.backend == RdzvBackend::Static
        && !nodes.standalone
        && nodes.endpoint.is_none()
        && nodes.master_addr.is_none();
    let set = |name| get(name).filter(|value| !value.is_empty());
    let Some(addr) = set("MASTER_ADDR").filter(|_| is_open) else {
        return Ok(false);
    };
    if let (None, Some(port)) = (nodes.master_port, set("MASTER_PORT")) {
        let number = port.parse().ok().filter(|port| (1..=65_534).contains(port));
        nodes.master_port = Some(number.ok_or_else(|| {
            let message = format!("MASTER_PORT is {port:?}, expected a port from 1 to 65534");
            let hint = "set it right, or give --master-port".to_owned();
            Failure::new(Exit::Usage, message, Some(hint))
        })?);
    }
    nodes.master_addr = Some(addr);
    Ok(true)
}

/// The first of a program's arguments that is an option of this command.
fn misplaced(words: &[OsString]) -> Option<&str> {
    let command = args::command();
    let is_ours = |word: &&str| {
        let name = word.split('=').next().unwrap_or_default();
        let name = name.strip_prefix("--").map(|name| name.replace('-', "_"));
        name.is_some_and(|name| command.get_arguments().any(|arg| *arg.get_id() == *name))
    };
    words.iter().filter_map(|word| word.to_str()).find(is_ours)
}

/// A variable of this process; one that is no text is as good as none.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Sets the job's nodes and restarts. Without a token it is the environment's.
///
/// *Errors*: several nodes, and no token that all of them know.
pub(super) fn several_nodes(
    job: &mut Job,
    args: &RunArgs,
    scheduler: Option<Scheduler>,
    token: Option<Token>,
) -> Result<(), Failure> {
    let is_given = args.given.nodes;
    let args = &args.nodes;
    job.max_restarts = args.max_restarts;
    job.recovery = args.recovery;
    job.run_id.clone_from(&args.id);
    job.role.clone_from(&args.role);
    for key in &args.conf.unused {
        warn(&format!("--rdzv-conf {key} has no effect here"));
    }
    if args.nodes.max == 1 {
        if args.standalone && job.run_id == "none" {
            job.run_id = unique_id();
        } else if !args.standalone {
            if alone::finds_others(job, args, is_given, &variable)? {
                return Ok(());
            }
            (job.master_addr, job.master_port) = master(args);
        }
        return job.master_port.map_or(Ok(()), sense::check_port);
    }
    job.token = token
        .map_or_else(shared_token, Ok)
        .map_err(|error| match (&error, scheduler) {
            (LaunchError::NoSharedToken, Some(scheduler)) => {
                let hint = scheduler.token_hint().to_owned();
                Failure::new(Exit::Usage, &error, Some(hint))
            }
            _ => job::refused(error),
        })?;
    let cluster = cluster(args);
    if let Some(place) = &cluster.place
        && place.node_rank == 0
    {
        sense::check_port(place.master_port)?;
        if let Some(warning) = sense::not_here(&place.master_addr) {
            warn(&warning);
        }
    }
    job.cluster = Some(cluster);
    Ok(())
}

/// The address that is given for the program: torchrun's static rendezvous takes its endpoint for it, where the other
/// options say nothing.
fn master(args: &NodesArgs) -> (Option<String>, Option<u16>) {
    let endpoint = match args.backend {
        RdzvBackend::Static => args.endpoint.as_deref().unwrap_or_default(),
        RdzvBackend::C10d | RdzvBackend::Etcd => "",
    };
    let (host, port) = endpoint.rsplit_once(':').unwrap_or((endpoint, ""));
    let host = Some(host.to_owned()).filter(|host| !host.is_empty());
    (
        args.master_addr.clone().or(host),
        args.master_port.or(port.parse().ok()),
    )
}

/// A name that no other run has: a random number in the form of a UUID, as torchrun's.
fn unique_id() -> String {
    let half = |key: u8| u128::from(RandomState::new().hash_one((key, std::process::id())));
    // The two places that say which kind of UUID it is: a random one.
    let number = half(0) << 64 | half(1);
    let number = number & !(0xf << 76 | 0x3 << 62) | 0x4 << 76 | 0x2 << 62;
    let digits = format!("{number:032x}");
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &digits[part]);
    parts.join("-")
}

/// Where and how this node's launcher meets the others.
pub(crate) fn cluster(args: &NodesArgs) -> Cluster {
    let (min, max) = (args.nodes.min, args.nodes.max);
    let mut cluster = match args.backend {
        RdzvBackend::C10d => {
            let endpoint = args.endpoint.as_deref().or(args.master_addr.as_deref());
            Cluster::new(min, max, endpoint.unwrap_or("127.0.0.1"))
        }
        RdzvBackend::Etcd => {
            let endpoint = args.endpoint.as_deref().unwrap_or_default();
            let mut cluster = Cluster::new(min, max, endpoint);
            cluster.store = launch::StoreKind::Etcd;
            cluster
        }
        RdzvBackend::Static => {
            let (addr, port) = master(args);
            let addr = addr.unwrap_or_else(|| "127.0.0.1".to_owned());
            let port = port.unwrap_or(MASTER_PORT);
            let meet = port.saturating_add(1);
            let mut cluster = Cluster::new(max, max, format!("{addr}:{meet}"));
            cluster.place = Some(StaticPlace {
                node_rank: args.node_rank,
                master_addr: addr,
                master_port: port,
            });
            cluster
        }
    };
    cluster.local_addr.clone_from(&args.local_addr);
    let times = &args.conf;
    cluster.lease = times.lease.unwrap_or(cluster.lease);
    cluster.last_call = times.last_call.unwrap_or(cluster.last_call);
    cluster.join_timeout = times.join_timeout.unwrap_or(cluster.join_timeout);
    cluster.close_timeout = times.close.unwrap_or(cluster.close_timeout);
    cluster.outage = times.outage.unwrap_or(cluster.outage);
    cluster
}

/// Makes a folder and says where it is, for ranks that may work in another one.
///
/// *Errors*: it cannot be made, or its name does not fit into a variable of the job.
fn prepared_folder(dir: &Path) -> Result<String, Failure> {
    let made = fs::create_dir_all(dir).and_then(|()| std::path::absolute(dir));
    let path = made.map_err(|error| {
        Failure::environment(format!("cannot make the folder {}: {error}", dir.display()))
    })?;
    path.into_os_string()
        .into_string()
        .map_err(|path| Failure::usage(format!("the folder's name is no text: {}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_standalone_run_has_an_id_of_its_own() {
        let (one, other) = (unique_id(), unique_id());
        assert_ne!(one, other);
        let lengths: Vec<_> = one.split('-').map(str::len).collect();
        assert_eq!(lengths, [8, 4, 4, 4, 12]);
        assert_eq!(one.chars().nth(14), Some('4'), "{one}");
    }

    #[test]
    fn a_static_endpoint_is_the_programs_address_where_nothing_else_is() {
        let check = |endpoint: &str, addr: Option<&str>, port, expect: (&str, Option<u16>)| {
            let args = NodesArgs {
                endpoint: Some(endpoint.to_owned()),
                master_addr: addr.map(str::to_owned),
                master_port: port,
                ..NodesArgs::default()
            };
            assert_eq!(master(&args), (Some(expect.0.to_owned()), expect.1));
        };
        check("node1:4444", None, None, ("node1", Some(4444)));
        check("node1", None, None, ("node1", None));
        check("node1:4444", Some("node2"), Some(5), ("node2", Some(5)));
    }

    #[test]
    fn several_nodes_meet_at_the_environments_master_unless_another_is_named() {
        let check = |line: &str, port: &str, expect: Option<(Option<&str>, Option<u16>)>| {
            let words = ["run"].into_iter().chain(line.split(' ')).chain(["true"]);
            let matches = args::command().try_get_matches_from(words).expect(line);
            let run = args::read(&matches).expect(line);
            let get = |name: &str| match name {
                "MASTER_ADDR" => Some("node0".to_owned()),
                _ => Some(port.to_owned()),
            };
            let nodes = with_master(&run, &get).map(|run| run.nodes);
            let found = nodes.as_ref().ok();
            let found = found.map(|nodes| (nodes.master_addr.as_deref(), nodes.master_port));
            assert_eq!(found, expect, "{line}");
        };
        let both = Some((Some("node0"), Some(4000)));
        check("--nnodes=2 --node_rank=1", "4000", both);
        check("--nnodes=2", "", Some((Some("node0"), None)));
        check(
            "--nnodes=2 --master_port=5",
            "x",
            Some((Some("node0"), Some(5))),
        );
        check(
            "--nnodes=2 --master_addr=b",
            "4000",
            Some((Some("b"), None)),
        );
        check("--nnodes=2 --rdzv_endpoint=b:1", "4000", Some((None, None)));
        check("--nnodes=1", "x", Some((None, None)));
        check("--nnodes=2", "70000", None);
    }

    #[test]
    fn only_a_launchers_own_options_are_warned_of_and_not_for_a_launcher() {
        for option in ["--nproc-per-node=2", "--nproc_per_node", "--standalone"] {
            assert!(is_launchers(option), "{option}");
        }
        for option in ["--role", "--timeout-seconds", "--epochs"] {
            assert!(!is_launchers(option), "{option}");
        }
        let of = |line: &str| {
            let matches = args::command().try_get_matches_from(line.split(' '));
            starts_jobs(&args::read(&matches.expect(line)).expect(line))
        };
        assert!(!of("run train.py --nnodes 2"));
        assert!(of("run torchrun --nnodes 2 train.py"));
        assert!(of("run -m torch.distributed.run --nnodes 2 train.py"));
        assert!(of("run ./paceline train --nproc-per-node 2"));
    }

    #[test]
    fn an_option_behind_the_program_is_found_when_it_fails() {
        let check = |args: &[&str], expect| {
            let args: Vec<_> = args.iter().map(OsString::from).collect();
            assert_eq!(misplaced(&args), expect);
        };
        check(&["--epochs", "3", "nnodes"], None);
        check(
            &["--epochs", "3", "--nproc_per_node=2"],
            Some("--nproc_per_node=2"),
        );
        check(&["--standalone"], Some("--standalone"));
    }

    #[test]
    fn the_folder_for_flight_records_is_made_and_named_in_full() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path().join("a").join("b");
        let path = prepared_folder(&dir).expect("made");
        assert!(Path::new(&path).is_absolute() && Path::new(&path).is_dir());
        assert_eq!(prepared_folder(&dir), Ok(path), "it may be there already");
        fs::write(folder.path().join("file"), "").expect("written");
        let refused = prepared_folder(&folder.path().join("file").join("b"));
        assert_eq!(
            refused.map_err(|failure| failure.exit()),
            Err(Exit::Environment)
        );
    }
}
