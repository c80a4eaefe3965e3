//! `paceline submit kubernetes`.

use clap::{ArgAction, ArgMatches, value_parser};
use paceline_submit::Memory;
use paceline_submit::kubernetes::{Claim, Options, Selector, Toleration};

use super::{Scheduler, SubmitArgs, common, many, passed, repeated, scheduler};
use crate::flags::{option, required, valued};

const EXAMPLES: &str = "\
Options go before PROGRAM: everything after it belongs to the program. Every other
option of `paceline run`, such as --max-restarts, is passed on to it. The image must
have `paceline` and the program.

Examples:
  See the manifests for two pods with eight GPUs each, one rank for each GPU:
    paceline submit kubernetes --dry-run --image registry/me/program:1 --nodes 2 --gpus-per-node 8 python train.py
  Go on with two pods when others are lost, and start again after failures of ranks:
    paceline submit kubernetes --image registry/me/program:1 --nodes 2:4 --max-restarts 3 ./my-program
  With data and results on volumes, in a namespace:
    paceline submit kubernetes --image registry/me/program:1 --namespace research \\
        --pvc data:/data:ro --pvc runs:/runs --chdir /runs ./my-program --data /data";

/// The command as clap knows it.
pub(super) fn command() -> clap::Command {
    let word = || value_parser!(String);
    scheduler("kubernetes", "yaml", "paceline")
        .about("Write the manifests of an indexed Job or a JobSet and give them to kubectl")
        .after_help(EXAMPLES)
        .arg(valued("image", "IMAGE", word()).required(true).help("Image with the program and `paceline`"))
        .arg(valued("namespace", "NAME", word()).help("Namespace [default: that of kubectl's context]"))
        .arg(
            option("jobset")
                .action(ArgAction::SetTrue)
                .help("Write a JobSet, for clusters with its controller"),
        )
        .arg(
            valued("chdir", "DIR", word())
                .help("Folder that the program works in [default: the image's]"),
        )
        .arg(
            repeated("pvc", "CLAIM:PATH[:ro]", str::parse::<Claim>)
                .help("Mount the volume of a PersistentVolumeClaim"),
        )
        .arg(
            valued("shm_size", "SIZE", str::parse::<Memory>)
                .help("Most memory for files in /dev/shm [default: what the pod may have]"),
        )
        .arg(
            repeated("node_selector", "LABEL=VALUE", str::parse::<Selector>)
                .help("A label that machines must have"),
        )
        .arg(
            repeated("toleration", "KEY[=VALUE][:EFFECT]", str::parse::<Toleration>)
                .help("A taint of machines that does not keep the pods away"),
        )
        .arg(
            valued("gpu_resource", "NAME", word())
                .default_value("nvidia.com/gpu")
                .help("Resource by which GPUs are asked for"),
        )
        .arg(valued("service_account", "NAME", word()).help(
            "Account of the pods [default: they get no access to Kubernetes]",
        ))
        .arg(repeated("image_pull_secret", "NAME", word()).help("A Secret for pulling the image"))
        .arg(
            valued("grace_period", "SECONDS", value_parser!(u64).range(2..=86_400))
                .help("Seconds between asking a pod to stop and killing it [default: 60, or 10 above --shutdown-timeout]"),
        )
        .arg(valued("backoff_limit", "N", value_parser!(u32).range(0..=1_000_000)).help(
            "How many pods may be killed, otherwise than by eviction, and made again [default: 3 for each node]",
        ))
        .arg(
            valued("ttl_seconds_after_finished", "SECONDS", value_parser!(u32).range(0..=i64::from(i32::MAX)))
                .help("Remove the ended job after so long [default: never]"),
        )
        .arg(
            valued("cluster_domain", "NAME", word())
                .default_value("cluster.local")
                .help("Domain of the cluster, for names of pods"),
        )
        .args(passed::hidden())
}

/// Reads the arguments of a command line.
pub(super) fn read(matches: &ArgMatches) -> Result<SubmitArgs, clap::Error> {
    let (job, file) = common("kubernetes", matches, "paceline")?;
    let text = |name| matches.get_one::<String>(name).cloned();
    let options = Options {
        namespace: text("namespace"),
        service_account: text("service_account"),
        node_selector: many(matches, "node_selector"),
        tolerations: many(matches, "toleration"),
        image_pull_secrets: many(matches, "image_pull_secret"),
        claims: many(matches, "pvc"),
        chdir: text("chdir"),
        shm_size: matches.get_one("shm_size").copied(),
        gpu_resource: required(matches, "gpu_resource"),
        backoff_limit: matches.get_one("backoff_limit").copied(),
        ttl_seconds: matches.get_one("ttl_seconds_after_finished").copied(),
        grace_seconds: matches.get_one("grace_period").copied(),
        cluster_domain: required(matches, "cluster_domain"),
        jobset: matches.get_flag("jobset"),
        ..Options::new(required::<String>(matches, "image"))
    };
    Ok(SubmitArgs {
        file: file.unwrap_or_else(|| format!("{}.yaml", job.name).into()),
        job,
        scheduler: Scheduler::Kubernetes(options),
        dry_run: matches.get_flag("dry_run"),
        no_submit: matches.get_flag("no_submit"),
    })
}
