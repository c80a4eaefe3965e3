//! `paceline plan`: measures on this machine, and prints what each layout costs.

use std::io::Write;
use std::path::{Path, PathBuf};

use paceline_cli::exit::{Exit, Failure, note};
use paceline_cli::flags::print;
use paceline_cli::job;
use paceline_cli::usage::{Summary, UsageArgs};
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_ddp::device::DeviceKind;
use paceline_gpu::words::count;
use paceline_train::config::{
    FileText, Given, JobShape, Resolved, Source, Surroundings, TrainConfig,
};
use paceline_train::plan::{
    Check, Checked, Cluster, Cost, Depth, Layout, Link, ModelCosts, Plan, Shape, Workload,
};
use paceline_train::probe::{self, Dry, Probe, Rehearsal};
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
            let resolved = resolve(&args.train, &Flags::new())?;
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
fn given(args: &TrainArgs, flags: &Flags) -> Result<Given, Failure> {
    let mut args = args.clone();
    args.settings
        .retain(|(key, _)| flags.iter().all(|(own, _)| own != key));
    let flags = flags.iter();
    args.settings
        .extend(flags.map(|(key, value)| ((*key).to_owned(), value.clone())));
    read_settings(&args)
}

fn resolve(args: &TrainArgs, flags: &Flags) -> Result<Resolved, Failure> {
    let resolved = given(args, flags)?.resolve(None, &Surroundings::of_process());
    resolved.map_err(wrong_settings)
}

fn planned(args: &PlanArgs, resolved: &Resolved) -> Result<Plan, Failure> {
    let config = resolved.config();
    let cores = Surroundings::of_process().cores;
    let ranks = config.nproc_per_node.min(cores.max(1));
    note(&format!("measuring with {}", count(ranks, "rank")));
    let mut measured = Measured::default();
    measured.measure(resolved, ranks)?;
    let cluster = cluster(args, config, measured.link);
    let surroundings = Surroundings {
        job: Some(JobShape {
            world: cluster.ranks(),
            local_world: config.nproc_per_node,
        }),
        ..Surroundings::of_process()
    };
    let command = |layout: &Layout, cost: &Cost| {
        let flags = flags(layout, cost, config);
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

/// The settings of `paceline train` for a layout, where `config` has others.
fn flags(layout: &Layout, cost: &Cost, config: &TrainConfig) -> Flags {
    let mut flags = vec![
        ("shards", cost.shards.to_string()),
        ("zero", layout.zero.to_string()),
    ];
    // Stage 3 of ZeRO recomputes blocks by itself.
    if layout.recompute && layout.zero < 3 {
        flags.push(("recompute", "blocks".into()));
    } else if config.recompute.is_some() {
        flags.push(("recompute", "none".into()));
    }
    if layout.tp > 1 {
        flags.push(("tp", layout.tp.to_string()));
    }
    if layout.pp > 1 {
        let cuts: Vec<_> = cost.cuts.iter().map(ToString::to_string).collect();
        flags.extend([
            ("pp", layout.pp.to_string()),
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
    // What a layout does not have is not in the file of settings either, if that is left out.
    let is_default = |flag: &&(&str, String)| {
        args.train.config.is_some() || !matches!(flag.1.as_str(), "0" | "none")
    };
    let flags = flags.iter().filter(is_default);
    let settings = given.chain(flags.map(|(key, value)| (*key, value.as_str())));
    let ranks = config.nproc_per_node;
    let mut line = match args.nodes {
        1 => format!("paceline train --nproc-per-node {ranks}"),
        nodes => format!(
            "paceline run --nnodes {nodes} --nproc-per-node {ranks} --rdzv-endpoint NODE paceline train"
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

/// Rounds of a check. Measurements for the predictions take turns with the layouts, and of all rounds the quietest counts.
const ROUNDS: usize = 3;

/// Runs layouts on this machine, and compares them with their predictions.
fn check(args: &PlanArgs) -> Result<Check, Failure> {
    let mut rows = Vec::new();
    for ranks in &args.check {
        let resolved = resolve(&args.train, &vec![("nproc_per_node", ranks.to_string())])?;
        rows.extend(check_with(args, &resolved, *ranks)?);
    }
    Ok(Check { rows })
}

fn check_with(args: &PlanArgs, resolved: &Resolved, ranks: usize) -> Result<Vec<Checked>, Failure> {
    let mut measured = Measured::default();
    let mut runs: Vec<(Layout, Resolved, Option<Rehearsal>)> = Vec::new();
    for round in 1..=ROUNDS {
        let of = format!("with {}, round {round} of {ROUNDS}", count(ranks, "rank"));
        note(&format!("measuring {of}"));
        measured.measure(resolved, ranks)?;
        if runs.is_empty() {
            let cluster = here(args, resolved, ranks, &measured);
            let (costs, work) = (measured.costs(), work(resolved));
            let plan = Plan::new(costs, cluster, work, |layout, _| {
                is_checked(layout).then(String::new)
            });
            let rows = plan.rows.iter().filter(|row| row.command.is_some());
            for row in rows {
                let mut flags = flags(&row.parts, &row.cost, resolved.config());
                flags.push(("nproc_per_node", ranks.to_string()));
                // A layout that the trainer refuses is not run.
                if let Ok(resolved) = resolve(&args.train, &flags) {
                    runs.push((row.parts, resolved, None));
                }
            }
        }
        for (layout, resolved, least) in &mut runs {
            note(&format!("running {layout} {of}"));
            let run: Rehearsal = measure(resolved, ranks, &["--whole".into()])?;
            *least = Some(least.map_or(run, |least| least.or_quieter(run)));
        }
    }
    let (costs, cluster) = (measured.costs(), here(args, resolved, ranks, &measured));
    let checked = runs.into_iter().filter_map(|(layout, resolved, run)| {
        // As it was run: the first round has decided how a pipeline is cut.
        let predicted = layout.cost(&costs, &cluster, &work(&resolved)).ok()?;
        let run = run?;
        Some(Checked {
            layout: layout.to_string(),
            ranks,
            predicted_seconds: predicted.seconds.step,
            seconds: run.seconds,
            predicted_bytes: predicted.memory.peak,
            bytes: run.peak_bytes,
        })
    });
    Ok(checked.collect())
}

/// This machine with so many ranks.
fn here(args: &PlanArgs, resolved: &Resolved, ranks: usize, measured: &Measured) -> Cluster {
    Cluster {
        nodes: 1,
        ranks_per_node: ranks,
        ..cluster(args, resolved.config(), measured.link)
    }
}

/// Whether `--check` runs a layout: each stage of ZeRO, each schedule, and each way to cut a model.
fn is_checked(layout: &Layout) -> bool {
    let Layout { dp, pp, tp, .. } = *layout;
    let is_cut = pp > 1 || tp > 1;
    let is_main = match is_cut {
        true => matches!(layout.zero, 0 | 3),
        false => true,
    };
    let needs_recompute = layout.zero == 3;
    let recomputes = layout.recompute == needs_recompute || layout.zero == 0 && !is_cut;
    let has_default_schedule = layout.schedule == Layout::ddp(1).schedule;
    is_main && recomputes && (has_default_schedule || dp == 1 && tp == 1)
}

/// Dry steps of a model, and the link between the ranks that made them.
#[derive(Default)]
struct Measured {
    depths: Vec<Depth>,
    shape: Shape,
    link: Option<Link>,
}

impl Measured {
    /// Measures on so many ranks. A second time, each figure is the better one.
    fn measure(&mut self, resolved: &Resolved, ranks: usize) -> Result<(), Failure> {
        let work = work(resolved);
        let plain = Dry {
            layers: None,
            tp: 1,
            recompute: false,
            samples: Layout::ddp(ranks).samples(&work),
        };
        self.dry(resolved, ranks, plain)?;
        if self.shape.layers == 0 {
            return Ok(());
        }
        let again = Dry {
            recompute: true,
            ..plain
        };
        self.dry(resolved, ranks, again)?;
        let heads = self.shape.heads;
        let parts = (2..=ranks).filter(|tp| ranks.is_multiple_of(*tp) && heads.is_multiple_of(*tp));
        for tp in parts {
            let samples = Layout::ddp(ranks / tp).samples(&work);
            let dry = Dry {
                tp,
                samples,
                ..plain
            };
            self.dry(resolved, ranks, dry)?;
        }
        // Micro-batches of a pipeline.
        let pipeline = Layout {
            pp: 2,
            ..Layout::ddp((ranks / 2).max(1))
        };
        let samples = pipeline.samples(&work);
        if ranks > 1 && samples < plain.samples {
            self.dry(resolved, ranks, Dry { samples, ..plain })?;
        }
        Ok(())
    }

    /// The model with several layers and with one, in processes of their own.
    fn dry(&mut self, resolved: &Resolved, ranks: usize, dry: Dry) -> Result<(), Failure> {
        let mut options = vec![
            format!("--tp={}", dry.tp),
            format!("--samples={}", dry.samples),
        ];
        options.extend(dry.recompute.then(|| "--recompute".into()));
        let deep: Probe = measure(resolved, ranks, &options)?;
        let layers = deep.depth.layers;
        self.take(deep);
        if layers > 1 {
            options.push("--layers=1".into());
            self.take(measure(resolved, ranks, &options)?);
        }
        Ok(())
    }

    fn take(&mut self, probe: Probe) {
        self.shape = probe.shape;
        let faster = |a: Link, b: Link| Link {
            latency: a.latency.min(b.latency),
            bandwidth: a.bandwidth.max(b.bandwidth),
        };
        self.link = match (self.link, probe.link) {
            (Some(a), Some(b)) => Some(faster(a, b)),
            (a, b) => a.or(b),
        };
        let kind = |depth: &Depth| (depth.layers, depth.tp, depth.recompute, depth.samples);
        let mut depths = self.depths.iter_mut();
        match depths.find(|depth| kind(depth) == kind(&probe.depth)) {
            Some(depth) => *depth = depth.or_quieter(probe.depth),
            None => self.depths.push(probe.depth),
        }
    }

    fn costs(&self) -> ModelCosts {
        ModelCosts::of(&self.depths, self.shape, self.link)
    }
}

/// Starts ranks that measure, and reads what they found.
fn measure<T: DeserializeOwned>(
    resolved: &Resolved,
    ranks: usize,
    options: &[String],
) -> Result<T, Failure> {
    let environment =
        |error: &dyn std::fmt::Display| Failure::new(Exit::Environment, error.to_string(), None);
    let folder = tempfile::tempdir().map_err(|error| environment(&error))?;
    let settings = folder.path().join("config.toml");
    std::fs::write(&settings, resolved.to_toml()).map_err(|error| environment(&error))?;
    let program = std::env::current_exe().map_err(|error| environment(&error))?;
    let mut job = job::new(&program, ranks)?;
    job.args = vec!["plan-rank".into(), "--config".into(), settings.into()];
    job.args.extend(["--out".into(), folder.path().into()]);
    job.args.extend(options.iter().map(Into::into));
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
    let text = std::fs::read(file(folder.path())).map_err(|error| environment(&error))?;
    serde_json::from_slice(&text).map_err(|error| environment(&error))
}

/// The figures of all ranks.
fn file(folder: &Path) -> PathBuf {
    folder.join("figures.json")
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
    let config = resolved.config();
    let dry = Dry {
        layers: args.layers,
        tp: args.tp,
        recompute: args.recompute,
        samples: args.samples,
    };
    let figures = match args.whole {
        true => probe::rehearse(config, &group).map(|found| json(&found)),
        false => probe::probe(config, &group, dry).map(|found| json(&found)),
    };
    let figures = figures.map_err(|error| failed(Some(group.rank()), &error))?;
    if group.rank() == 0 {
        let written = std::fs::write(file(&args.out), figures);
        written.map_err(|error| Failure::new(Exit::Environment, error, None))?;
    }
    Ok(Exit::Done)
}
