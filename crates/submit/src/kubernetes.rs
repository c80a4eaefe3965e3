//! Kubernetes: an indexed Job with one launcher in each pod, the Service that gives pods names, and the job's token as a
//! Secret; or a JobSet in place of Job and Service.
//!
//! The launchers meet at pod 0, which finds its own name in its `/etc/hosts`, whatever DNS knows by then. Nodes may always be
//! replaced: a pod that Kubernetes evicts comes again elsewhere and joins the next round, which costs neither a restart
//! of the launchers' nor a failure of the Job's. A launcher that ends by itself has tried what it was allowed to, so its end is
//! the Job's.

mod names;
mod pod;

use std::collections::BTreeMap;

use clap::value_parser;
use paceline_rendezvous::endpoint::ENDPOINT_PORT;
use paceline_rendezvous::token::{TOKEN_VARIABLE, Token};
use serde_json::{Value, json};

use crate::error::SubmitError;
use crate::submission::Submission;
use crate::units::Memory;

pub use names::{Claim, Selector, Toleration};

/// Kubernetes' own options. Their texts are their help.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args)]
pub struct Options {
    /// Image with the program and `paceline`
    #[arg(long, value_name = "IMAGE")]
    pub image: String,
    /// Namespace [default: that of kubectl's context]
    #[arg(long, value_name = "NAME")]
    pub namespace: Option<String>,
    /// Write a JobSet, for clusters with its controller
    #[arg(long)]
    pub jobset: bool,
    /// Queue of Kueue that the job waits in
    #[arg(long, value_name = "NAME")]
    pub queue: Option<String>,
    /// Place the pods of MIN nodes together or none, by a PodGroup for this scheduler, which has the coscheduling plugin
    #[arg(long, value_name = "SCHEDULER")]
    pub pod_group: Option<String>,
    /// Folder that the program works in [default: the image's]
    #[arg(long, value_name = "DIR")]
    pub chdir: Option<String>,
    /// Mount the volume of a PersistentVolumeClaim
    #[arg(long = "pvc", value_name = "CLAIM:PATH[:ro]")]
    pub claims: Vec<Claim>,
    /// Most memory for files in /dev/shm [default: what the pod may have]
    #[arg(long, value_name = "SIZE")]
    pub shm_size: Option<Memory>,
    /// A label that machines must have
    #[arg(long, value_name = "LABEL=VALUE")]
    pub node_selector: Vec<Selector>,
    /// A taint of machines that does not keep the pods away
    #[arg(long = "toleration", value_name = "KEY[=VALUE][:EFFECT]")]
    pub tolerations: Vec<Toleration>,
    /// Resource by which GPUs are asked for
    #[arg(long, value_name = "NAME", default_value = "nvidia.com/gpu")]
    pub gpu_resource: String,
    /// Account of the pods [default: they get no access to Kubernetes]
    #[arg(long, value_name = "NAME")]
    pub service_account: Option<String>,
    /// A Secret for pulling the image
    #[arg(long = "image-pull-secret", value_name = "NAME")]
    pub image_pull_secrets: Vec<String>,
    /// Seconds between asking a pod to stop and killing it [default: 60, or 10 above --shutdown-timeout]
    #[arg(long = "grace-period", value_name = "SECONDS", value_parser = value_parser!(u64).range(2..=86_400))]
    pub grace_seconds: Option<u64>,
    /// How many pods may be killed, otherwise than by eviction, and made again [default: 3 for each node]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(0..=1_000_000))]
    pub backoff_limit: Option<u32>,
    /// Remove the ended job after so long [default: never]
    #[arg(long = "ttl-seconds-after-finished", value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u32).range(0..=i64::from(i32::MAX)))]
    pub ttl_seconds: Option<u32>,
    /// Domain of the cluster, for names of pods
    #[arg(long, value_name = "NAME", default_value = "cluster.local")]
    pub cluster_domain: String,
}

impl Options {
    /// Defaults, for this image.
    pub fn new(image: impl Into<String>) -> Self {
        Self {
            image: image.into(),
            gpu_resource: "nvidia.com/gpu".to_owned(),
            cluster_domain: "cluster.local".to_owned(),
            ..Self::default()
        }
    }
}

/// Stands for the token where it must not be shown.
const PLACEHOLDER: &str = "made when the job is submitted";

/// The manifests as YAML.
///
/// Without a token a line of text stands in its place: the result is for reading, and a job made of it would not start.
///
/// *Errors*: something cannot be said to Kubernetes.
pub fn render(
    job: &Submission,
    options: &Options,
    token: Option<&Token>,
) -> Result<String, SubmitError> {
    let mut text = "# Written by `paceline submit kubernetes`.".to_owned();
    text.push_str(match token {
        Some(_) => " The Secret is what lets a process join the job: keep it.\n",
        None => " Not to be applied: the token is left out.\n",
    });
    for manifest in manifests(job, options, token)? {
        text.push_str("---\n");
        text.push_str(&yaml(&manifest)?);
    }
    Ok(text)
}

/// The manifests as data, in the order in which they are to be made.
///
/// *Errors*: something cannot be said to Kubernetes.
pub fn manifests(
    job: &Submission,
    options: &Options,
    token: Option<&Token>,
) -> Result<Vec<Value>, SubmitError> {
    job.check()?;
    names::check(job, options)?;
    let secret = secret(job, options, token);
    let work = work(job, options)?;
    let mut metadata = metadata(&job.name, job, options);
    if let Some(queue) = &options.queue {
        // Kueue suspends what has this label until there is room for all of its pods.
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = json!(queue);
    }
    let mut all = vec![secret];
    all.extend(options.pod_group.as_ref().map(|_| pod_group(job, options)));
    if options.jobset {
        all.push(jobset(job, options, &metadata, work));
    } else {
        all.push(service(job, options));
        all.push(resource("batch/v1", "Job", &metadata, work));
    }
    Ok(all)
}

fn yaml(manifest: &Value) -> Result<String, SubmitError> {
    // Folded and literal blocks save nothing here, and a quoted word is the same to every parser.
    let style = serde_saphyr::ser_options! { prefer_block_scalars: false };
    serde_saphyr::to_string_with_options(manifest, style).map_err(|error| {
        let message = format!("the manifest cannot be written as YAML: {error}");
        SubmitError::failed(message, None)
    })
}

fn resource(version: &str, kind: &str, metadata: &Value, spec: Value) -> Value {
    json!({ "apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec })
}

fn labels(job: &Submission) -> Value {
    json!({
        "app.kubernetes.io/managed-by": "paceline",
        "app.kubernetes.io/name": job.name,
    })
}

fn metadata(name: &str, job: &Submission, options: &Options) -> Value {
    let mut metadata = json!({ "name": name, "labels": labels(job) });
    if let Some(namespace) = &options.namespace {
        metadata["namespace"] = json!(namespace);
    }
    metadata
}

/// Name of the Secret, and of the one thing in it.
fn secret_name(job: &Submission) -> String {
    format!("{}-token", job.name)
}

fn secret(job: &Submission, options: &Options, token: Option<&Token>) -> Value {
    let text = token.map_or_else(|| PLACEHOLDER.to_owned(), Token::to_hex);
    json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(&secret_name(job), job, options),
        "type": "Opaque",
        "immutable": true,
        "stringData": BTreeMap::from([(TOKEN_VARIABLE, text)]),
    })
}

/// Label by which a pod belongs to a PodGroup.
const POD_GROUP_LABEL: &str = "scheduling.x-k8s.io/pod-group";

/// Holds pods back until so many can be placed at once: two jobs that have half of their pods each would wait for each other.
fn pod_group(job: &Submission, options: &Options) -> Value {
    let metadata = metadata(&job.name, job, options);
    let spec = json!({ "minMember": job.nodes.min() });
    resource("scheduling.x-k8s.io/v1alpha1", "PodGroup", &metadata, spec)
}

/// Gives every pod a name, from its start on: launchers meet before anything is ready.
fn service(job: &Submission, options: &Options) -> Value {
    let spec = json!({
        "clusterIP": "None",
        "publishNotReadyAddresses": true,
        "selector": { "batch.kubernetes.io/job-name": job.name },
        "ports": [{ "name": "rendezvous", "port": ENDPOINT_PORT }],
    });
    resource("v1", "Service", &metadata(&job.name, job, options), spec)
}

/// Failures per node that are not the launcher's own exit: a machine's failure hits all of its pods.
const FAILURES_PER_NODE: u32 = 3;

/// The Job's specification.
fn work(job: &Submission, options: &Options) -> Result<Value, SubmitError> {
    let pods = job.nodes.max();
    let failures = u32::try_from(pods).unwrap_or(u32::MAX);
    let mut spec = json!({
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": options.backoff_limit.unwrap_or(failures.saturating_mul(FAILURES_PER_NODE)),
        "podFailurePolicy": { "rules": rules() },
        "template": pod::template(job, options)?,
    });
    if let Some(limit) = job.time_limit {
        spec["activeDeadlineSeconds"] = json!(limit.seconds());
    }
    if job.nodes.is_elastic() {
        // All launchers end together; pods that never found a machine are not waited for.
        spec["successPolicy"] = json!({ "rules": [{ "succeededCount": job.nodes.min() }] });
    }
    if let Some(seconds) = options.ttl_seconds.filter(|_| !options.jobset) {
        spec["ttlSecondsAfterFinished"] = json!(seconds);
    }
    Ok(spec)
}

/// How a failed pod is treated, by the first rule that fits.
fn rules() -> Value {
    json!([
        // Evicted, preempted, or its machine is gone: it comes again, and does not count.
        { "action": "Ignore", "onPodConditions": [{ "type": "DisruptionTarget", "status": "True" }] },
        // The launcher has ended by itself, all restarts used up; but one that was killed, or asked to stop from outside, has
        // not: that pod comes again, as often as `backoffLimit` says.
        { "action": "FailJob", "onExitCodes": { "containerName": pod::CONTAINER, "operator": "NotIn", "values": [137, 143] } },
    ])
}

/// JobSet has the Service itself; the pods of its one job are named after both.
const REPLICATED_JOB: &str = "nodes";

fn jobset(job: &Submission, options: &Options, metadata: &Value, work: Value) -> Value {
    let mut spec = json!({
        "network": { "enableDNSHostnames": true, "publishNotReadyAddresses": true, "subdomain": job.name },
        "replicatedJobs": [{ "name": REPLICATED_JOB, "replicas": 1, "template": { "spec": work } }],
    });
    if let Some(seconds) = options.ttl_seconds {
        spec["ttlSecondsAfterFinished"] = json!(seconds);
    }
    resource("jobset.x-k8s.io/v1alpha2", "JobSet", metadata, spec)
}

/// The prefix of pod names: a pod is named this, a dash and its number.
fn pods_name(job: &Submission, options: &Options) -> String {
    if options.jobset {
        format!("{}-{REPLICATED_JOB}-0", job.name)
    } else {
        job.name.clone()
    }
}

#[cfg(test)]
mod tests;
