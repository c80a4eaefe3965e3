//! One pod: the launcher, its resources and its environment.

use serde_json::{Map, Value, json};

use paceline_rendezvous::endpoint::ENDPOINT_PORT;
use paceline_rendezvous::token::TOKEN_VARIABLE;

use super::{Options, POD_GROUP_LABEL, labels, pods_name, secret_name};
use crate::error::SubmitError;
use crate::submission::Submission;

/// The container's name.
pub(super) const CONTAINER: &str = "launcher";

/// Carries the pod's namespace, for its full name.
const NAMESPACE_VARIABLE: &str = "PACELINE_POD_NAMESPACE";

/// The template of a Job's pods.
pub(super) fn template(job: &Submission, options: &Options) -> Result<Value, SubmitError> {
    let grace = grace(job, options)?;
    let mut spec = json!({
        "containers": [container(job, options, &grace)?],
        // What the policy for failed pods demands: the Job decides about them, not the kubelet.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace.pod,
        // Hundreds of services would make as many variables, some of which the launcher might take for its own.
        "enableServiceLinks": false,
        "volumes": volumes(options),
    });
    match &options.service_account {
        Some(account) => spec["serviceAccountName"] = json!(account),
        None => spec["automountServiceAccountToken"] = json!(false),
    }
    if !options.jobset {
        spec["subdomain"] = json!(job.name);
    }
    if !options.node_selector.is_empty() {
        let labels = options.node_selector.iter();
        let labels: Map<_, _> = labels
            .map(|label| (label.key.clone(), json!(label.value)))
            .collect();
        spec["nodeSelector"] = labels.into();
    }
    if !options.tolerations.is_empty() {
        let tolerations = options.tolerations.iter().map(super::Toleration::manifest);
        spec["tolerations"] = tolerations.collect();
    }
    if !options.image_pull_secrets.is_empty() {
        let secrets = options.image_pull_secrets.iter();
        spec["imagePullSecrets"] = secrets.map(|name| json!({ "name": name })).collect();
    }
    let mut labels = labels(job);
    if let Some(scheduler) = &options.pod_group {
        labels[POD_GROUP_LABEL] = json!(job.name);
        spec["schedulerName"] = json!(scheduler);
    }
    Ok(json!({ "metadata": { "labels": labels }, "spec": spec }))
}

/// Seconds from the request to stop to the kill.
struct Grace {
    /// Of a pod.
    pod: u64,
    /// Of a rank, by its launcher.
    ranks: u64,
}

/// Time left for the launcher after its ranks have ended.
const RESERVE_SECONDS: u64 = 10;

/// Kubernetes' 30 s are what ranks have by default, which would leave the launcher nothing.
const GRACE_SECONDS: u64 = 60;

fn grace(job: &Submission, options: &Options) -> Result<Grace, SubmitError> {
    let pod = options.grace_seconds.unwrap_or_else(|| {
        let ranks = job.shutdown_timeout;
        ranks.map_or(GRACE_SECONDS, |ranks| ranks.saturating_add(RESERVE_SECONDS))
    });
    let left = pod.saturating_sub(RESERVE_SECONDS).max(1);
    let ranks = job.shutdown_timeout.unwrap_or(left);
    if ranks >= pod {
        return Err(SubmitError::grace(ranks, pod, "--grace-period"));
    }
    Ok(Grace { pod, ranks })
}

fn container(job: &Submission, options: &Options, grace: &Grace) -> Result<Value, SubmitError> {
    let mut container = json!({
        "name": CONTAINER,
        "image": options.image,
        "command": [escaped(&job.launcher)],
        "args": args(job, options, grace),
        "env": env(job),
        "volumeMounts": mounts(options),
    });
    if let Some(folder) = &options.chdir {
        container["workingDir"] = json!(folder);
    }
    let resources = resources(job, options)?;
    if !resources.is_empty() {
        // Asked for and limited alike: what a pod gets does not depend on its neighbours.
        container["resources"] = json!({ "requests": resources, "limits": resources });
    }
    Ok(container)
}

fn args(job: &Submission, options: &Options, grace: &Grace) -> Vec<String> {
    let (min, max) = (job.nodes.min(), job.nodes.max());
    let mut args = vec!["run".to_owned()];
    if max == 1 {
        args.extend(["--nnodes".to_owned(), "1".to_owned()]);
    } else {
        // The full name, because that is what a pod has in its own /etc/hosts.
        let endpoint = format!(
            "{}-0.{}.$({NAMESPACE_VARIABLE}).svc.{}:{ENDPOINT_PORT}",
            pods_name(job, options),
            job.name,
            options.cluster_domain
        );
        let nodes = format!("{min}:{max}");
        let meeting = [
            ["--nnodes", &nodes],
            ["--rdzv-backend", "c10d"],
            ["--rdzv-endpoint", &endpoint],
            ["--rdzv-id", &job.name],
        ];
        args.extend(meeting.concat().into_iter().map(str::to_owned));
    }
    let own = job.options(Some(grace.ranks));
    args.extend(
        own.iter()
            .map(String::as_str)
            .chain(job.command())
            .map(escaped),
    );
    args
}

/// Kubernetes replaces `$(NAME)` in command lines and variables, and takes two dollar signs for one.
fn escaped(text: &str) -> String {
    text.replace('$', "$$")
}

fn env(job: &Submission) -> Vec<Value> {
    let from_pod = |name: &str, path: &str| json!({ "name": name, "valueFrom": { "fieldRef": { "fieldPath": path } } });
    let token = json!({ "secretKeyRef": { "name": secret_name(job), "key": TOKEN_VARIABLE } });
    let mut env = vec![
        json!({ "name": TOKEN_VARIABLE, "valueFrom": token }),
        from_pod(NAMESPACE_VARIABLE, "metadata.namespace"),
    ];
    let own = job.env.iter();
    env.extend(own.map(|(name, value)| json!({ "name": name, "value": escaped(value) })));
    env
}

fn resources(job: &Submission, options: &Options) -> Result<Map<String, Value>, SubmitError> {
    let mut resources = Map::new();
    if let Some(cpus) = job.cpus_per_node()? {
        resources.insert("cpu".to_owned(), json!(cpus.to_string()));
    }
    if let Some(memory) = job.memory {
        resources.insert(
            "memory".to_owned(),
            json!(format!("{}Mi", memory.mebibytes())),
        );
    }
    if let Some(gpus) = job.gpus_per_node {
        resources.insert(options.gpu_resource.clone(), json!(gpus.to_string()));
    }
    Ok(resources)
}

const SHM: &str = "shm";

fn volumes(options: &Options) -> Vec<Value> {
    // A container's own /dev/shm has 64 MiB, which loaders of data and NCCL soon exceed.
    let mut shm = json!({ "medium": "Memory" });
    if let Some(size) = options.shm_size {
        shm["sizeLimit"] = json!(format!("{}Mi", size.mebibytes()));
    }
    let mut volumes = vec![json!({ "name": SHM, "emptyDir": shm })];
    for (index, claim) in options.claims.iter().enumerate() {
        let source = json!({ "claimName": claim.claim, "readOnly": claim.read_only });
        volumes.push(json!({ "name": volume_name(index), "persistentVolumeClaim": source }));
    }
    volumes
}

fn mounts(options: &Options) -> Vec<Value> {
    let mut mounts = vec![json!({ "name": SHM, "mountPath": "/dev/shm" })];
    for (index, claim) in options.claims.iter().enumerate() {
        let name = volume_name(index);
        mounts.push(json!({ "name": name, "mountPath": claim.path, "readOnly": claim.read_only }));
    }
    mounts
}

fn volume_name(index: usize) -> String {
    format!("claim-{index}")
}
