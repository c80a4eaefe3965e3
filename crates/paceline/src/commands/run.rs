//! `paceline run`: any program as the ranks of a job.

use std::fs;
use std::path::Path;

use paceline_launch::{Cluster, Console, Job, StaticPlace, StopMode, shared_token};

use super::{job, logs};
use crate::cli::{Backend, NodesArgs, RunArgs};
use crate::exit::{Exit, Failure, warn};

/// Starts the program and waits for its end.
///
/// - Errors: it could not be started.
pub(crate) fn run(args: &RunArgs) -> Result<Exit, Failure> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut job = job::new(Path::new(&args.program), args.processes.on(cores))?;
    job.args.clone_from(&args.args);
    job.console = Console::Prefixed;
    job.stop = StopMode::Forward;
    job.grace = args.shutdown_timeout;
    job.threads_per_rank = args.threads_per_rank;
    several_nodes(&mut job, &args.nodes)?;
    if let Some(timeout) = args.timeout {
        let seconds = timeout.as_secs().to_string();
        job.env.push(("PACELINE_TIMEOUT_SECONDS".into(), seconds));
    }
    if let Some(dir) = &args.flight_dir {
        job.env
            .push((job::FLIGHT_DIR.into(), prepared_folder(dir)?));
    }
    // Other runs leave the folder alone as long as this lives.
    let _folder = logs::prepare(&mut job, &args.logs, args.log_dir.as_deref())?;
    job::run(job)
}

/// torchrun's port for the program on node 0.
const MASTER_PORT: u16 = 29_500;

/// What is said about nodes and restarts.
///
/// - Errors: several nodes, and no token that all of them know.
fn several_nodes(job: &mut Job, args: &NodesArgs) -> Result<(), Failure> {
    job.max_restarts = args.max_restarts;
    job.run_id.clone_from(&args.id);
    job.role.clone_from(&args.role);
    for key in &args.conf.unused {
        warn(&format!("--rdzv-conf {key} has no effect here"));
    }
    let addr = args.master_addr.clone();
    if args.nodes.max == 1 {
        job.master_addr = addr;
        job.master_port = args.master_port;
        return Ok(());
    }
    job.token = shared_token().map_err(job::refused)?;
    job.cluster = Some(cluster(args));
    Ok(())
}

/// Where and how this node's launcher meets the others.
fn cluster(args: &NodesArgs) -> Cluster {
    let (min, max) = (args.nodes.min, args.nodes.max);
    let mut cluster = match args.backend {
        Backend::Elastic => {
            let endpoint = args.endpoint.as_deref().or(args.master_addr.as_deref());
            Cluster::new(min, max, endpoint.unwrap_or("127.0.0.1"))
        }
        Backend::Static => {
            // torchrun's static rendezvous takes its endpoint for the master's address.
            let endpoint = args.endpoint.as_deref().unwrap_or_default();
            let (host, port) = endpoint.rsplit_once(':').unwrap_or((endpoint, ""));
            let host = Some(host).filter(|host| !host.is_empty());
            let addr = args.master_addr.as_deref().or(host).unwrap_or("127.0.0.1");
            let port = args
                .master_port
                .or(port.parse().ok())
                .unwrap_or(MASTER_PORT);
            let meet = port.saturating_add(1);
            let mut cluster = Cluster::new(max, max, format!("{addr}:{meet}"));
            cluster.place = Some(StaticPlace {
                node_rank: args.node_rank,
                master_addr: addr.to_owned(),
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
    cluster
}

/// Makes a folder and says where it is, for ranks that may work in another one.
///
/// - Errors: it cannot be made, or its name does not fit into a variable of the job.
fn prepared_folder(dir: &Path) -> Result<String, Failure> {
    let made = fs::create_dir_all(dir).and_then(|()| std::path::absolute(dir));
    let path = made.map_err(|error| {
        let message = format!("cannot make the folder {}: {error}", dir.display());
        Failure::new(Exit::Environment, message, None)
    })?;
    path.into_os_string().into_string().map_err(|path| {
        let message = format!("the folder's name is no text: {}", path.display());
        Failure::new(Exit::Usage, message, None)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
