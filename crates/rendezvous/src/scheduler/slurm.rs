//! Slurm: a step's variables, and those of an allocation without one.
//!
//! Only a step counts (`SLURM_STEP_ID` is set): in a batch script outside `srun`, `SLURM_PROCID` and `SLURM_NTASKS` are set
//! too, and a program that believed them would wait for ranks that never start.

use super::{Found, NODES_MAX, Scheduler, SchedulerError, hosts, number, port_of, required};
use crate::endpoint::MASTER_PORT;
use crate::env::names;

/// Slurm's own steps have the numbers from here on: the batch script, an interactive shell, what belongs to no step.
const OWN_STEPS_FROM: u32 = 0xffff_fff0;

/// Keeps the ports of a job's steps apart; prime to the number of ports.
const STEP_STRIDE: u64 = 7_919;

/// The number of the step that `srun` started this process in.
pub(super) fn step(get: &dyn Fn(&str) -> Option<String>) -> Option<u32> {
    let step = get("SLURM_STEP_ID")?.trim().parse().ok()?;
    (step < OWN_STEPS_FROM).then_some(step)
}

/// The step's value of one of torchrun's variables; `None` outside a step and for variables that Slurm does not have.
pub(super) fn value(name: &str, get: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let step = step(get)?;
    match name {
        names::RANK => get("SLURM_PROCID"),
        names::WORLD_SIZE => get("SLURM_STEP_NUM_TASKS").or_else(|| get("SLURM_NTASKS")),
        names::LOCAL_RANK => get("SLURM_LOCALID"),
        names::LOCAL_WORLD_SIZE => {
            let node = get("SLURM_NODEID").and_then(|node| node.parse().ok());
            let counts = get("SLURM_STEP_TASKS_PER_NODE").or_else(|| get("SLURM_TASKS_PER_NODE"));
            node.zip(counts)
                .and_then(|(node, counts)| tasks_on_node(&counts, node))
                .map(|count| count.to_string())
                .or_else(|| get("SLURM_NTASKS_PER_NODE"))
        }
        names::GROUP_RANK => get("SLURM_NODEID"),
        names::GROUP_WORLD_SIZE => node_count(get).and_then(get),
        names::MASTER_ADDR => {
            let is_one = node_count(get).and_then(get).as_deref() == Some("1");
            let first = || hosts(&get(node_list(get)?)?).ok()?.into_iter().next();
            // Ranks of one machine need not leave it to talk to each other.
            is_one.then(|| "127.0.0.1".to_owned()).or_else(first)
        }
        names::MASTER_PORT => Some(port(job_number(get)?, step).to_string()),
        names::TORCHELASTIC_RUN_ID => Some(run_id(&get("SLURM_JOB_ID")?, step)),
        names::TORCHELASTIC_RESTART_COUNT => get("SLURM_RESTART_COUNT"),
        _ => None,
    }
}

/// A launcher's place by Slurm's variables; `None` outside an allocation.
///
/// An allocation without a step (a batch script, the shell of `salloc`) starts nothing on its other nodes, so it is one
/// node, with the advice to use `srun` where there are more.
pub(super) fn node(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Found>, SchedulerError> {
    let Some(job) = get("SLURM_JOB_ID") else {
        return Ok(None);
    };
    let restarts = number(get, "SLURM_RESTART_COUNT", (0, u32::MAX as usize))?.unwrap_or(0);
    let mut found = Found {
        scheduler: Scheduler::Slurm,
        job: format!("Slurm job {job}"),
        nodes: Some(1),
        node_rank: 0,
        host: get("SLURMD_NODENAME"),
        master_addr: Ok("127.0.0.1".to_owned()),
        master_port: MASTER_PORT,
        run_id: format!("slurm-{job}"),
        // The bound above fits.
        restart_count: restarts as u32,
        advice: None,
    };
    let Some(step) = step(get) else {
        let granted = number(get, "SLURM_JOB_NUM_NODES", (1, NODES_MAX))?;
        found.advice = granted.filter(|nodes| *nodes > 1).map(|nodes| {
            format!(
                "the job has {nodes} nodes, and outside of srun this is one: `srun --ntasks-per-node=1 paceline run ...` \
                 starts on all of them"
            )
        });
        return Ok(Some(found));
    };
    if let Some(list) = get("SLURM_STEP_TASKS_PER_NODE") {
        let tasks = most_tasks(&list).ok_or_else(|| {
            let expected = "counts such as 1(x2) or 2,1";
            SchedulerError::invalid("SLURM_STEP_TASKS_PER_NODE", &list, expected)
        })?;
        if tasks > 1 {
            return Err(SchedulerError::tasks_per_node(Scheduler::Slurm, tasks));
        }
    }
    let name = node_count(get).unwrap_or("SLURM_STEP_NUM_NODES");
    let nodes = required(get, Scheduler::Slurm, name, (1, NODES_MAX))?;
    let node_rank = required(get, Scheduler::Slurm, "SLURM_NODEID", (0, nodes - 1))?;
    let number = job_number(get)
        .ok_or_else(|| SchedulerError::invalid("SLURM_JOB_ID", &job, "a whole number"))?;
    found.job = format!("Slurm step {job}.{step}");
    found.nodes = Some(nodes);
    found.node_rank = node_rank;
    found.master_port = port(number, step);
    found.run_id = run_id(&job, step);
    if nodes > 1 {
        let all = all_hosts(get)?;
        found.host = all.get(node_rank).cloned().or(found.host);
        // A list that could be read has a host.
        found.master_addr = Ok(all.into_iter().next().unwrap_or_default());
    }
    Ok(Some(found))
}

/// GPUs of the job on this node, and the variable that says so.
pub(super) fn gpus(get: &dyn Fn(&str) -> Option<String>) -> Option<(usize, &'static str)> {
    let name = "SLURM_GPUS_ON_NODE";
    let gpus = number(get, name, (1, NODES_MAX)).ok()??;
    Some((gpus, name))
}

/// The hosts of the step.
fn all_hosts(get: &dyn Fn(&str) -> Option<String>) -> Result<Vec<String>, SchedulerError> {
    let found = node_list(get).and_then(|name| Some((name, get(name)?)));
    let (name, list) =
        found.ok_or_else(|| SchedulerError::missing(Scheduler::Slurm, "SLURM_STEP_NODELIST"))?;
    hosts(&list).map_err(|why| SchedulerError::host_list(name, &list, why))
}

/// The variable with the step's hosts.
fn node_list(get: &dyn Fn(&str) -> Option<String>) -> Option<&'static str> {
    ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"]
        .into_iter()
        .find(|name| get(name).is_some())
}

/// The variable with the step's number of nodes.
fn node_count(get: &dyn Fn(&str) -> Option<String>) -> Option<&'static str> {
    ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"]
        .into_iter()
        .find(|name| get(name).is_some())
}

fn job_number(get: &dyn Fn(&str) -> Option<String>) -> Option<u64> {
    get("SLURM_JOB_ID")?.trim().parse().ok()
}

fn port(job: u64, step: u32) -> u16 {
    port_of(job.wrapping_add(u64::from(step) * STEP_STRIDE))
}

fn run_id(job: &str, step: u32) -> String {
    format!("slurm-{job}.{step}")
}

/// The largest count in a list such as `2(x3),1`.
fn most_tasks(counts: &str) -> Option<usize> {
    let counts: Option<Vec<usize>> = runs(counts)
        .map(|run| run.map(|(count, _)| count))
        .collect();
    counts?.into_iter().max()
}

/// Node `node`'s count in such a list.
fn tasks_on_node(counts: &str, node: usize) -> Option<usize> {
    let mut first = 0_usize;
    for run in runs(counts) {
        let (count, times) = run?;
        first = first.checked_add(times)?;
        if node < first {
            return Some(count);
        }
    }
    None
}

/// Counts and how many nodes in a row have them.
fn runs(counts: &str) -> impl Iterator<Item = Option<(usize, usize)>> + '_ {
    counts.split(',').map(|part| {
        let (count, times) = match part.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        Some((count.trim().parse().ok()?, times))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nodes_share_is_read_from_the_compressed_list() {
        for (counts, node, expected) in [
            ("4", 0, Some(4)),
            ("2(x3),1", 0, Some(2)),
            ("2(x3),1", 2, Some(2)),
            ("2(x3),1", 3, Some(1)),
            ("2(x3),1", 4, None),
            ("", 0, None),
            ("2(x", 0, None),
            ("2(x99999999999999999999)", 0, None),
        ] {
            assert_eq!(tasks_on_node(counts, node), expected, "{counts} {node}");
        }
    }

    #[test]
    fn the_steps_of_a_job_and_jobs_in_a_row_have_ports_of_their_own() {
        let mut ports: Vec<u16> = (812..832)
            .flat_map(|job| (0..8).map(move |step| port(job, step)))
            .collect();
        assert!(
            ports
                .iter()
                .all(|port| (10_000..30_000).contains(port) && port % 2 == 0)
        );
        let all = ports.len();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), all);
    }
}
