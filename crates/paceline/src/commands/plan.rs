//! `paceline plan`: measures on this machine, and prints what each layout costs.

use std::io::Write;
use std::path::Path;

use paceline_cli::exit::{Exit, Failure, note};
use paceline_cli::flags::print;
use paceline_cli::job;
use paceline_cli::usage::{Summary, UsageArgs};
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_ddp::device::DeviceKind;
use paceline_gpu::words::count;
use paceline_train::config::{FileText, Resolved, Surroundings, TrainConfig};
use paceline_train::plan::{Check, Checked, Cluster, Layout, Link, ModelCosts, Plan, Workload};
use paceline_train::probe::{self, Probe, Rehearsal};
use serde::de::DeserializeOwned;

use super::train::read_settings;
use super::{failed, wrong_settings};
use crate::cli::{PlanArgs, PlanRankArgs, TrainArgs};

/// The link of ranks that were not measured, because there is one rank only.
const UNMEASURED: Link = Link {
    latency: 5e-6,
    bandwidth: 5e9,
};

/// Prints the plan, or with `--check` the errors of its predictions.
///
/// *Errors*: unusable settings or data; a measurement that failed.
pub(crate) fn plan(args: &PlanArgs) -> Result<Exit, Failure> {
    let text = match args.check.is_empty() {
        true => {
            let resolved = resolve(&args.train, &[])?;
            let planned = planned(args, &resolved)?;
            match args.json {
                true => json(&planned),
                false => format!("{}\n{}", heading(args, resolved.config()), planned.text()),
            }
        }
        false => {
            let checked = check(args)?;
            match args.json {
                true => json(&checked),
                false => checked.text(),
            }
        }
    };
    print(|out| out.write_all(text.as_bytes()))
}

fn json(value: &impl serde::Serialize) -> String {
    // Plain data: encoding does not fail.
    let text = serde_json::to_string(value).unwrap_or_default();
    format!("{text}\n")
}

fn heading(args: &PlanArgs, config: &TrainConfig) -> String {
    let ranks = count(args.nodes * config.nproc_per_node, "rank");
    let nodes = count(args.nodes, "node");
    let batch = config.global_batch;
    format!("{ranks} on {nodes}, global batch {batch}; measured on this machine\n")
}

/// The settings with these flags in place of those given.
fn resolve(args: &TrainArgs, flags: &[(&str, String)]) -> Result<Resolved, Failure> {
    let mut args = args.clone();
    args.settings
        .retain(|(key, _)| flags.iter().all(|(own, _)| own != key));
    let flags = flags.iter();
    args.settings
        .extend(flags.map(|(key, value)| ((*key).to_owned(), value.clone())));
    let resolved = read_settings(&args)?.resolve(None, &Surroundings::of_process());
    resolved.map_err(wrong_settings)
}

fn planned(args: &PlanArgs, resolved: &Resolved) -> Result<Plan, Failure> {
    let config = resolved.config();
    let cores = Surroundings::of_process().cores;
    let ranks = config.nproc_per_node.min(cores.max(1));
    note(&format!("measuring with {}", count(ranks, "rank")));
    let (costs, link) = costs(resolved, ranks)?;
    let cluster = cluster(args, config, link);
    Ok(Plan::new(costs, cluster, work(config)))
}

fn work(config: &TrainConfig) -> Workload {
    Workload {
        global_batch: config.global_batch,
        shards: config.shards,
        accumulate: config.accumulate,
        bucket: config.bucket_bytes() as f64,
    }
}

fn cluster(args: &PlanArgs, config: &TrainConfig, measured: Option<Link>) -> Cluster {
    let measured = measured.unwrap_or(UNMEASURED);
    let [bandwidth, latency] = args.within;
    let [node_bandwidth, node_latency] = args.between;
    let ranks_per_node = config.nproc_per_node;
    let free = || {
        paceline_gpu::host::kib(
            &std::fs::read_to_string("/proc/meminfo").ok()?,
            "MemAvailable:",
        )
    };
    Cluster {
        nodes: args.nodes,
        ranks_per_node,
        memory: match args.memory_gb {
            Some(gigabytes) => Some(gigabytes * 1e9),
            None => free().map(|bytes| bytes as f64 / ranks_per_node as f64),
        },
        within: Link {
            latency: latency.map_or(measured.latency, |latency| latency * 1e-6),
            bandwidth: bandwidth.map_or(measured.bandwidth, |bandwidth| bandwidth * 1e9),
        },
        between: Link {
            latency: node_latency * 1e-6,
            bandwidth: node_bandwidth * 1e9,
        },
        shares_cores: config.device == DeviceKind::Cpu,
    }
}

/// Runs layouts on this machine, and compares them with their predictions.
fn check(args: &PlanArgs) -> Result<Check, Failure> {
    let most = args.check.iter().copied().max().unwrap_or(1);
    let mut rows = Vec::new();
    for ranks in &args.check {
        let mut flags = vec![("nproc_per_node", ranks.to_string())];
        let is_set = |key: &str| args.train.settings.iter().any(|(own, _)| own == key);
        if !is_set("shards") {
            flags.push(("shards", most.to_string()));
        }
        let resolved = resolve(&args.train, &flags)?;
        note(&format!("measuring with {}", count(*ranks, "rank")));
        let (costs, link) = costs(&resolved, *ranks)?;
        let config = resolved.config();
        let cluster = Cluster {
            nodes: 1,
            ranks_per_node: *ranks,
            ..cluster(args, config, link)
        };
        for layout in runnable(*ranks, &costs) {
            let Ok(predicted) = layout.cost(&costs, &cluster, &work(config)) else {
                continue;
            };
            note(&format!("running {layout} on {}", count(*ranks, "rank")));
            let mut flags = flags.clone();
            flags.push(("zero", layout.zero.to_string()));
            flags.extend(layout.recompute.then(|| ("recompute", "blocks".into())));
            flags.extend((layout.tp > 1).then(|| ("tp", layout.tp.to_string())));
            let resolved = resolve(&args.train, &flags)?;
            let all: Vec<Rehearsal> = measure(&resolved, *ranks, Some("--whole"))?;
            rows.push(Checked {
                layout: layout.to_string(),
                ranks: *ranks,
                predicted_seconds: predicted.seconds.step,
                seconds: all.iter().map(|one| one.seconds).fold(0.0, f64::max),
                predicted_bytes: predicted.memory.peak + predicted.memory.mapped,
                bytes: all.iter().map(|one| one.peak_bytes).fold(0.0, f64::max),
            });
        }
    }
    Ok(Check { rows })
}

/// The layouts of so many ranks that `--check` runs, possible or not.
fn runnable(ranks: usize, costs: &ModelCosts) -> Vec<Layout> {
    let stages: &[u8] = if ranks > 1 { &[0, 1, 2, 3] } else { &[0] };
    let recomputes: &[bool] = if costs.layers > 0 {
        &[false, true]
    } else {
        &[false]
    };
    let of = |zero: &u8| {
        let zero = *zero;
        recomputes.iter().map(move |recompute| Layout {
            zero,
            recompute: *recompute,
            ..Layout::ddp(ranks)
        })
    };
    let parts = (ranks > 1).then(|| Layout {
        tp: ranks,
        ..Layout::ddp(1)
    });
    stages.iter().flat_map(of).chain(parts).collect()
}

/// The model's costs on one of so many ranks, and the link between them.
fn costs(resolved: &Resolved, ranks: usize) -> Result<(ModelCosts, Option<Link>), Failure> {
    let probe = |layers: Option<usize>| -> Result<Probe, Failure> {
        let layers = layers.map(|layers| format!("--layers={layers}"));
        let mut all: Vec<Probe> = measure(resolved, ranks, layers.as_deref())?;
        // Every rank has written its figures.
        let first = all.swap_remove(0);
        Ok(first.worst(all))
    };
    let deep = probe(None)?;
    let mut depths = vec![deep.depth];
    if deep.depth.layers > 1 {
        depths.insert(0, probe(Some(1))?.depth);
    }
    let costs = ModelCosts::of(&depths, deep.shape, deep.samples);
    Ok((costs, deep.link))
}

/// Starts ranks that measure, and reads what they found.
fn measure<T: DeserializeOwned>(
    resolved: &Resolved,
    ranks: usize,
    option: Option<&str>,
) -> Result<Vec<T>, Failure> {
    let environment =
        |error: &dyn std::fmt::Display| Failure::new(Exit::Environment, error.to_string(), None);
    let folder = tempfile::tempdir().map_err(|error| environment(&error))?;
    let settings = folder.path().join("config.toml");
    std::fs::write(&settings, resolved.to_toml()).map_err(|error| environment(&error))?;
    let program = std::env::current_exe().map_err(|error| environment(&error))?;
    let mut job = job::new(&program, ranks)?;
    job.args = vec!["plan-rank".into(), "--config".into(), settings.into()];
    job.args.extend(["--out".into(), folder.path().into()]);
    job.args.extend(option.map(Into::into));
    job.log_dir = Some(folder.path().join("logs"));
    let threads = resolved.config().threads_per_rank;
    job.threads_per_rank = Some(threads).filter(|threads| *threads > 0);
    let usage = UsageArgs {
        summary: Summary::Off,
        ..UsageArgs::off()
    };
    let exit = job::run(job, &usage)?;
    if exit != Exit::Done {
        return Err(Failure::new(exit, "a measurement failed", None));
    }
    let read = |rank: usize| {
        let text = std::fs::read(file(folder.path(), rank)).map_err(|error| environment(&error))?;
        serde_json::from_slice(&text).map_err(|error| environment(&error))
    };
    (0..ranks).map(read).collect()
}

fn file(folder: &Path, rank: usize) -> std::path::PathBuf {
    folder.join(format!("rank-{rank}.json"))
}

/// Measures as one rank.
///
/// *Errors*: those of the measurement; a file that cannot be written.
pub(crate) fn rank(args: &PlanRankArgs) -> Result<Exit, Failure> {
    work_as_rank(args).or_else(super::rank::leave)
}

fn work_as_rank(args: &PlanRankArgs) -> Result<Exit, Failure> {
    let saved = FileText::read(&args.config).map_err(wrong_settings)?;
    let resolved = Resolved::from_saved(&saved).map_err(wrong_settings)?;
    let group = ProcessGroup::init(&GroupOptions::default());
    let group = group.map_err(|error| failed(None, &error.into()))?;
    let figures = match args.whole {
        true => probe::rehearse(resolved.config(), &group).map(|found| json(&found)),
        false => probe::probe(resolved.config(), &group, args.layers).map(|found| json(&found)),
    };
    let figures = figures.map_err(|error| failed(Some(group.rank()), &error))?;
    let written = std::fs::write(file(&args.out, group.rank()), figures);
    written.map_err(|error| Failure::new(Exit::Environment, error, None))?;
    Ok(Exit::Done)
}
