//! `paceline plan`: measures on this machine, and prints what each layout costs.

mod check;
mod measure;

use std::env;
use std::io::Write;

use paceline_cli::exit::{Exit, Failure, note, warn};
use paceline_cli::flags::print;
use paceline_ddp::CommHook;
use paceline_ddp::device::DeviceKind;
use paceline_gpu::host::Host;
use paceline_gpu::memory;
use paceline_train::config::{
    Fallback, Given, JobShape, Resolved, Source, Surroundings, TrainConfig, option,
};
use paceline_train::plan::{Cluster, Cost, Layout, Link, Plan, Workload};
use paceline_words::counted;

use self::measure::Measured;
use super::train::read_settings;
use super::{Program, rank as ranks, wrong_settings};
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
            let resolved = resolve(&args.train, &plain())?;
            check_scope(args, &resolved)?;
            let planned = planned(args, &resolved)?;
            match args.json {
                true => json(&planned),
                false => format!("{}\n{}", heading(args, resolved.config()), planned.text()),
            }
        }
        false => {
            let checked = check::check(args)?;
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
    let ranks = counted(args.nodes * config.nproc_per_node, "rank");
    let nodes = counted(args.nodes, "node");
    let batch = config.global_batch;
    format!("{ranks} on {nodes}, global batch {batch}; measured on this machine\n")
}

/// The settings with these flags in place of those given.
fn given(args: &TrainArgs, flags: &Flags) -> Result<Given, Failure> {
    let mut args = args.clone();
    args.settings
        .retain(|(key, _)| flags.iter().all(|(own, _)| own != key));
    let flags = flags.iter();
    args.settings
        .extend(flags.map(|(key, value)| ((*key).to_owned(), value.clone())));
    read_settings(&Program::PACELINE, &args)
}

fn resolve(args: &TrainArgs, flags: &Flags) -> Result<Resolved, Failure> {
    let resolved = given(args, flags)?.resolve(None, &Surroundings::of_process());
    resolved.map_err(wrong_settings)
}

/// Refuses what a plan does not count, and says of a GPU what it does not measure.
fn check_scope(args: &PlanArgs, resolved: &Resolved) -> Result<(), Failure> {
    let config = resolved.config();
    let refuse = |what: String, hint: &str| Err(Failure::new(Exit::Usage, what, Some(hint.into())));
    if config.comm_hook.is_per_shard() {
        let (hook, origin) = (config.comm_hook, resolved.setting("comm_hook").origin());
        return refuse(
            format!("`comm_hook` is {hook} ({origin}), whose bytes a plan does not count"),
            "plan with none, bf16 or fp16: docs/comm-hooks.md has the bytes of the other hooks",
        );
    }
    let device = config.device;
    if !device.is_gpu() {
        return Ok(());
    }
    if args.memory_gb.is_some() {
        let what = format!(
            "`--memory-gb` is a limit on a rank's memory, which a plan measures on the CPU only, not on {device} devices"
        );
        return refuse(
            what,
            "omit --memory-gb, or plan with --device cpu; `paceline train` shows what each device has held at its end",
        );
    }
    warn(&format!(
        "`device` is {device}: activations and peak are memory of the processes on the host, not of the devices, so no layout is \
         ruled out; weights, gradients, buckets and optimizer are arithmetic"
    ));
    Ok(())
}

fn planned(args: &PlanArgs, resolved: &Resolved) -> Result<Plan, Failure> {
    let config = resolved.config();
    let cores = Surroundings::of_process().cores;
    let ranks = config.nproc_per_node.min(cores.max(1));
    note(&format!("measuring with {}", counted(ranks, "rank")));
    let mut measured = Measured::default();
    measured.measure(resolved, ranks)?;
    let cluster = cluster(args, config, measured.link);
    let surroundings = Surroundings {
        job: Some(JobShape {
            world: cluster.ranks(),
            local_world: config.nproc_per_node,
            recovers_live: false,
        }),
        ..Surroundings::of_process()
    };
    let command = |layout: &Layout, cost: &Cost| {
        let flags = flags(layout, cost);
        let resolved = given(&args.train, &flags)
            .ok()?
            .resolve(None, &surroundings);
        resolved.ok()?;
        Some(command_line(args, config, &flags))
    };
    let costs = measured.costs();
    Ok(Plan::new(costs, cluster, work(resolved), command))
}

type Flags = Vec<(&'static str, String)>;

/// The settings of a layout without anything, whatever a file or the environment has.
fn plain() -> Flags {
    let flags = [
        ("strategy", "ddp"),
        ("dp", "auto"),
        ("tp", "none"),
        ("sequence_parallel", "off"),
        ("pp", "none"),
        ("zero", "0"),
        ("recompute", "none"),
    ];
    flags.map(|(key, value)| (key, value.to_owned())).into()
}

/// The settings of `paceline train` for a layout.
fn flags(layout: &Layout, cost: &Cost) -> Flags {
    let mut flags = plain();
    let mut set = |key, value| {
        flags.retain(|(plain, _)| *plain != key);
        flags.push((key, value));
    };
    set("shards", cost.shards.to_string());
    set("zero", layout.zero.to_string());
    if layout.recompute {
        set("recompute", "blocks".into());
    }
    if layout.tp > 1 {
        set("tp", layout.tp.to_string());
    }
    if layout.pp > 1 {
        let cuts: Vec<_> = cost.cuts.iter().map(ToString::to_string).collect();
        set("pp", layout.pp.to_string());
        flags.extend([
            ("schedule", layout.schedule.to_string()),
            ("accumulate", cost.accumulate.to_string()),
            ("pp_chunks", layout.chunks().to_string()),
            ("pp_cuts", cuts.join(",")),
        ]);
        if layout.chunks() == 1 {
            flags.retain(|(key, _)| *key != "pp_chunks");
        }
    }
    flags
}

/// What to type for a layout.
fn command_line(args: &PlanArgs, config: &TrainConfig, flags: &Flags) -> String {
    let given = args.train.settings.iter();
    let given =
        given.filter(|(key, _)| key != "nproc_per_node" && flags.iter().all(|(own, _)| own != key));
    let given = given.map(|(key, value)| (key.as_str(), value.as_str()));
    // A default need not be said, unless a file or the environment may have another value.
    let is_said = |(key, value): &&(&'static str, String)| {
        let row = option(key).expect("a setting of the table");
        let is_default = match row.fallback {
            Fallback::Value(text) => text == value,
            Fallback::Unset(_) => value == "none",
            Fallback::Derived(_) => false,
        };
        let is_elsewhere = args.train.config.is_some() || env::var_os(row.variable()).is_some();
        is_elsewhere || !is_default
    };
    let flags = flags.iter().filter(is_said);
    let settings = given.chain(flags.map(|(key, value)| (*key, value.as_str())));
    let ranks = config.nproc_per_node;
    let mut line = match args.nodes {
        1 => format!("paceline train --nproc-per-node {ranks}"),
        nodes => format!(
            "paceline run --nnodes {nodes} --nproc-per-node {ranks} --rdzv-backend c10d --rdzv-endpoint NODE paceline train"
        ),
    };
    if let Some(path) = &args.train.config {
        line += &format!(" --config {}", quoted(&path.display().to_string()));
    }
    for (key, value) in settings {
        line += &format!(" --{} {}", key.replace('_', "-"), quoted(value));
    }
    line
}

/// As one word of a shell.
fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./,:=@%+".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', "'\\''")),
    }
}

fn work(resolved: &Resolved) -> Workload {
    let config = resolved.config();
    let is_set = resolved.setting("shards").source != Source::Default;
    Workload {
        global_batch: config.global_batch,
        shards: is_set.then_some(config.shards),
        accumulate: config.accumulate,
        bucket: config.bucket_bytes() as f64,
        halves_gradients: config.comm_hook != CommHook::None,
    }
}

fn cluster(args: &PlanArgs, config: &TrainConfig, measured: Option<Link>) -> Cluster {
    let measured = measured.unwrap_or(UNMEASURED);
    let [bandwidth, latency] = args.within;
    let [node_bandwidth, node_latency] = args.between;
    let ranks_per_node = config.nproc_per_node;
    Cluster {
        nodes: args.nodes,
        ranks_per_node,
        memory: match args.memory_gb {
            Some(gigabytes) => Some(gigabytes * 1e9),
            // The devices' is not known.
            None if config.device.is_gpu() => None,
            None => {
                let left = memory::read(&Host::new("/", &|_| None)).left();
                left.map(|bytes| bytes as f64 / ranks_per_node as f64)
            }
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

/// Measures as one rank.
///
/// *Errors*: those of the measurement; a file that cannot be written.
pub(crate) fn rank(args: &PlanRankArgs) -> Result<Exit, Failure> {
    measure::as_rank(args).or_else(ranks::leave)
}
