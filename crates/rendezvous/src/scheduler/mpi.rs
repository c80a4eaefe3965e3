//! MPI launchers: Open MPI's `mpirun`, and Hydra, the `mpiexec` of MPICH and Intel MPI.
//!
//! Neither says where rank 0 is. Open MPI says where `mpirun` itself runs, which is rank 0's machine unless a list of
//! hosts begins with another: rank 0 notices and refuses to start, upon which `mpirun` ends the others. Hydra says
//! nothing, so a job of several machines needs `MASTER_ADDR`.

use std::net::Ipv4Addr;

use super::{Found, NODES_MAX, Scheduler, SchedulerError, port_of, required};
use crate::endpoint::MASTER_PORT;
use crate::env::{WORLD_MAX, names};

/// The launcher that this process is a rank of. Slurm sets `PMI_RANK` too, without Hydra's local numbers.
pub(super) fn started_by(get: &dyn Fn(&str) -> Option<String>) -> Option<Scheduler> {
    [Scheduler::OpenMpi, Scheduler::Mpich]
        .into_iter()
        .find(|scheduler| {
            let names = Names::of(*scheduler);
            [names.rank, names.size, names.local_rank]
                .iter()
                .all(|name| get(name).is_some())
        })
}

/// An MPI launcher's value of one of torchrun's variables.
pub(super) fn value(
    scheduler: Scheduler,
    name: &str,
    get: &dyn Fn(&str) -> Option<String>,
) -> Option<String> {
    let own = Names::of(scheduler);
    match name {
        names::RANK => get(own.rank),
        names::WORLD_SIZE => get(own.size),
        names::LOCAL_RANK => get(own.local_rank),
        names::LOCAL_WORLD_SIZE => get(own.local_size),
        names::MASTER_ADDR => master(scheduler, get).ok(),
        names::MASTER_PORT => Some(port(get).to_string()),
        names::TORCHELASTIC_RUN_ID => get(NAMESPACE).map(|job| run_id(&job)),
        _ => None,
    }
}

/// The place of a launcher of ranks, of which an MPI launcher started one on each node.
pub(super) fn node(
    scheduler: Scheduler,
    get: &dyn Fn(&str) -> Option<String>,
) -> Result<Found, SchedulerError> {
    let own = Names::of(scheduler);
    let local = required(get, scheduler, own.local_size, (1, WORLD_MAX))?;
    if local > 1 {
        return Err(SchedulerError::tasks_per_node(scheduler, local));
    }
    let nodes = required(get, scheduler, own.size, (1, NODES_MAX))?;
    let node_rank = required(get, scheduler, own.rank, (0, nodes - 1))?;
    let given = super::number(get, names::MASTER_PORT, (1, 65_534))?;
    Ok(Found {
        scheduler,
        job: format!("{scheduler}'s job"),
        nodes: Some(nodes),
        node_rank,
        host: None,
        master_addr: match get(names::MASTER_ADDR) {
            Some(addr) => Ok(addr),
            None => master(scheduler, get),
        },
        // The bound above fits.
        master_port: given.map_or_else(|| port(get), |port| port as u16),
        run_id: get(NAMESPACE).map_or_else(|| "mpi".to_owned(), |job| run_id(&job)),
        restart_count: 0,
        advice: None,
    })
}

/// A name that Open MPI gives to each run of `mpirun`.
const NAMESPACE: &str = "PMIX_NAMESPACE";

/// One launcher's names.
struct Names {
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
}

impl Names {
    fn of(scheduler: Scheduler) -> Self {
        if scheduler == Scheduler::Mpich {
            Self {
                rank: "PMI_RANK",
                size: "PMI_SIZE",
                local_rank: "MPI_LOCALRANKID",
                local_size: "MPI_LOCALNRANKS",
            }
        } else {
            Self {
                rank: "OMPI_COMM_WORLD_RANK",
                size: "OMPI_COMM_WORLD_SIZE",
                local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
                local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
            }
        }
    }
}

/// The machine of rank 0.
fn master(
    scheduler: Scheduler,
    get: &dyn Fn(&str) -> Option<String>,
) -> Result<String, SchedulerError> {
    let own = Names::of(scheduler);
    if get(own.size) == get(own.local_size) {
        return Ok("127.0.0.1".to_owned());
    }
    let is_first = get(own.rank).as_deref() == Some("0");
    let mpirun = mpirun_4(get).or_else(|| mpirun_5(get));
    mpirun
        .filter(|mpirun| scheduler == Scheduler::OpenMpi && (mpirun.is_here || !is_first))
        .map(|mpirun| mpirun.host)
        .ok_or_else(|| SchedulerError::no_master(scheduler))
}

/// The machine where `mpirun` runs.
struct Mpirun {
    host: String,
    is_here: bool,
}

/// Open MPI 4 tells its ranks how to reach `mpirun`, and how the daemon that started them, which may be the same.
fn mpirun_4(get: &dyn Fn(&str) -> Option<String>) -> Option<Mpirun> {
    let uri = get("OMPI_MCA_orte_hnp_uri")?;
    let is_here = get("OMPI_MCA_orte_local_daemon_uri").as_ref() == Some(&uri);
    let host = address_of(&uri)?;
    Some(Mpirun { host, is_here })
}

/// Open MPI 5 names a job after the machine and the process of `mpirun`: `prterun-HOST-PID@1`.
fn mpirun_5(get: &dyn Fn(&str) -> Option<String>) -> Option<Mpirun> {
    let namespace = get(NAMESPACE)?;
    let (_, rest) = namespace.split_once('-')?;
    let (host, pid) = rest.split_once('@')?.0.rsplit_once('-')?;
    if host.is_empty() || pid.parse::<u64>().is_err() {
        return None;
    }
    let short = |name: &str| name.split('.').next().map(str::to_owned);
    let here = get("PMIX_HOSTNAME")?;
    Some(Mpirun {
        is_here: here == host || short(&here) == short(host),
        host: host.to_owned(),
    })
}

/// The first IPv4 address in `1.0;tcp://10.0.0.5,172.17.0.1:4711;tcp6://...`: the interface that the kernel found first is
/// hardly ever a container's. Open MPI has names of hosts too, but not in the variables of all ranks.
fn address_of(uri: &str) -> Option<String> {
    let (_, tcp) = uri.split_once("tcp://")?;
    let (addresses, _) = tcp.split_once(':')?;
    let first: Ipv4Addr = addresses.split(',').next()?.parse().ok()?;
    Some(first.to_string())
}

/// Runs of `mpirun` on one machine at the same time meet at ports of their own, where they can be told apart.
fn port(get: &dyn Fn(&str) -> Option<String>) -> u16 {
    let Some(namespace) = get(NAMESPACE) else {
        return MASTER_PORT;
    };
    // FNV-1a: any even spread will do.
    let hash = namespace
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
    port_of(hash >> 16)
}

fn run_id(namespace: &str) -> String {
    format!("mpi-{namespace}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mpiruns_address_is_the_first_of_its_interfaces() {
        for (uri, expected) in [
            (
                "1.0;tcp://10.0.0.5:4711;tcp6://[fd00::5]:4712",
                Some("10.0.0.5"),
            ),
            ("1.0;tcp://10.0.0.5,172.17.0.1:4711", Some("10.0.0.5")),
            ("1.0;tcp6://[fd00::5]:4712", None),
            ("1.0;tcp://x:1", None),
            ("", None),
        ] {
            assert_eq!(address_of(uri).as_deref(), expected, "{uri}");
        }
    }
}
