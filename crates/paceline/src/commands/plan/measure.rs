//! Ranks that measure: how they are started, what they find, and what each of them does.

use std::path::{Path, PathBuf};

use paceline_cli::exit::{Exit, Failure};
use paceline_cli::job;
use paceline_cli::usage::{Summary, UsageArgs};
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_train::config::{FileText, Resolved};
use paceline_train::plan::{Depth, Layout, Link, ModelCosts, Shape};
use paceline_train::probe::{self, Dry, Probe};
use serde::de::DeserializeOwned;

use super::{json, work};
use crate::cli::PlanRankArgs;
use crate::commands::{allocator_settings, failed, wrong_settings};

/// Dry steps of a model, and the link between the ranks that made them.
#[derive(Default)]
pub(super) struct Measured {
    depths: Vec<Depth>,
    shape: Shape,
    pub(super) link: Option<Link>,
}

impl Measured {
    /// Measures on so many ranks. A second time, each figure is the better one.
    pub(super) fn measure(&mut self, resolved: &Resolved, ranks: usize) -> Result<(), Failure> {
        let work = work(resolved);
        let of = |layout: Layout, recompute| Dry {
            layers: None,
            tp: layout.tp,
            recompute,
            samples: layout.samples(&work),
            // What waits with recomputed blocks is what goes into them.
            waits: layout.pp > 1 && !recompute,
        };
        let mut all = vec![of(Layout::ddp(ranks), false), of(Layout::ddp(ranks), true)];
        self.dry(resolved, ranks, all.remove(0))?;
        if self.shape.layers == 0 {
            return Ok(());
        }
        // With parts, and with the micro-batches of a pipeline.
        let heads = self.shape.heads;
        for tp in (1..=ranks).filter(|tp| ranks.is_multiple_of(*tp) && heads.is_multiple_of(*tp)) {
            let dp = ranks / tp;
            let layout = Layout {
                tp,
                ..Layout::ddp(dp)
            };
            let pipeline = Layout {
                pp: 2,
                dp: (dp / 2).max(1),
                ..layout
            };
            for recompute in [false, true] {
                all.extend((tp > 1).then(|| of(layout, recompute)));
                all.extend((dp > 1).then(|| of(pipeline, recompute)));
            }
        }
        all.iter()
            .try_for_each(|dry| self.dry(resolved, ranks, *dry))
    }

    /// The model with several layers and with one, in processes of their own.
    fn dry(&mut self, resolved: &Resolved, ranks: usize, dry: Dry) -> Result<(), Failure> {
        let mut options = vec![
            format!("--tp={}", dry.tp),
            format!("--samples={}", dry.samples),
        ];
        options.extend(dry.recompute.then(|| "--recompute".into()));
        options.extend(dry.waits.then(|| "--waits".into()));
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
        let kind = |depth: &Depth| {
            let Depth {
                layers,
                tp,
                recompute,
                samples,
                ..
            } = *depth;
            (layers, tp, recompute, samples, depth.kept_bytes.is_some())
        };
        let mut depths = self.depths.iter_mut();
        match depths.find(|depth| kind(depth) == kind(&probe.depth)) {
            Some(depth) => *depth = depth.or_quieter(probe.depth),
            None => self.depths.push(probe.depth),
        }
    }

    pub(super) fn costs(&self) -> ModelCosts {
        ModelCosts::of(&self.depths, self.shape, self.link)
    }
}

/// Starts ranks that measure, and reads what they found.
pub(super) fn measure<T: DeserializeOwned>(
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
    // A training's ranks have them too.
    job.env.extend(allocator_settings());
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
pub(super) fn as_rank(args: &PlanRankArgs) -> Result<Exit, Failure> {
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
        waits: args.waits,
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
