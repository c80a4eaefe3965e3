//! Kubernetes: a pod of an indexed Job, alone or in a JobSet.
//!
//! Such a pod has its index in a variable and, where the Job has a headless Service, a name like `resnet-3.resnet.ml.svc...`
//! that its `/etc/hosts` has. How many pods there are it is not told: `PET_NNODES` or `NNODES` in the pod template say it.

use std::fs::File;
use std::io::Read;

use super::{Found, NODES_MAX, Scheduler, SchedulerError, number};
use crate::endpoint::MASTER_PORT;

/// No machine's file of hosts is as long.
const HOSTS_BYTES_MAX: u64 = 1 << 20;

/// A pod's name, from its file system.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pod {
    /// The host name.
    pub host: String,
    /// The text of `/etc/hosts`.
    pub hosts: String,
}

impl Pod {
    /// Reads this machine's. A file that cannot be read is empty.
    pub fn read() -> Self {
        let text = |path| {
            let mut bytes = Vec::new();
            if let Ok(file) = File::open(path) {
                // The part before an error is used.
                let _ = file.take(HOSTS_BYTES_MAX).read_to_end(&mut bytes);
            }
            String::from_utf8_lossy(&bytes).into_owned()
        };
        Self {
            host: text("/proc/sys/kernel/hostname").trim().to_owned(),
            hosts: text("/etc/hosts"),
        }
    }

    /// The domain of this pod's own name, such as `resnet.ml.svc.cluster.local`.
    fn domain(&self) -> Option<&str> {
        if let Some((_, domain)) = self.host.split_once('.') {
            return Some(domain);
        }
        let lines = self.hosts.lines();
        let mut names = lines.flat_map(|line| {
            let line = line.split('#').next().unwrap_or_default();
            line.split_whitespace().skip(1)
        });
        names.find_map(|name| name.strip_prefix(&self.host)?.strip_prefix('.'))
    }
}

/// A launcher's place by its pod; `None` outside an indexed Job.
pub(super) fn node(
    get: &dyn Fn(&str) -> Option<String>,
    pod: &dyn Fn() -> Pod,
) -> Result<Option<Found>, SchedulerError> {
    let Some(index) = number(get, "JOB_COMPLETION_INDEX", (0, NODES_MAX - 1))? else {
        return Ok(None);
    };
    let nodes = number(get, "NNODES", (1, NODES_MAX))?;
    if let Some(nodes) = nodes {
        // Says that the index is not below the number of nodes.
        number(get, "JOB_COMPLETION_INDEX", (0, nodes - 1))?;
    }
    let pod = pod();
    let short = pod.host.split('.').next().unwrap_or_default();
    let job = short.strip_suffix(&format!("-{index}"));
    let first = match (job, pod.domain()) {
        (None, _) => Err(SchedulerError::new(
            format!(
                "the host name {:?} does not end in -{index}, the pod's JOB_COMPLETION_INDEX, so pod 0 cannot be named",
                pod.host
            ),
            "set PET_MASTER_ADDR in the pod template, or do not use the host's network",
        )),
        (_, None) => Err(SchedulerError::new(
            format!(
                "the pod {:?} has no domain in /etc/hosts, so the other pods of its Job have no names",
                pod.host
            ),
            "make a headless Service for the Job and name it as `subdomain` in the pod template; a JobSet does it by itself",
        )),
        (Some(job), Some(domain)) => Ok(format!("{job}-0.{domain}")),
    };
    let job = job.unwrap_or(short);
    Ok(Some(Found {
        scheduler: Scheduler::Kubernetes,
        job: format!("Kubernetes Job {job}"),
        nodes,
        node_rank: index,
        host: Some(short.to_owned()),
        master_addr: first,
        // A pod has ports of its own.
        master_port: MASTER_PORT,
        run_id: job.to_owned(),
        restart_count: 0,
        advice: None,
    }))
}
