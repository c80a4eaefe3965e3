//! `paceline plan --check`: layouts that are run, beside their predictions.

use paceline_cli::exit::{Failure, note};
use paceline_train::config::Resolved;
use paceline_train::plan::{Check, Checked, Cluster, Layout, Plan};
use paceline_train::probe::Rehearsal;
use paceline_words::counted;

use super::measure::{Measured, measure};
use super::{check_scope, cluster, flags, plain, resolve, work};
use crate::cli::PlanArgs;

/// Rounds of a check. Measurements for the predictions take turns with the layouts, and of all rounds the quietest counts.
const ROUNDS: usize = 3;

/// Runs layouts on this machine, and compares them with their predictions.
pub(super) fn check(args: &PlanArgs) -> Result<Check, Failure> {
    let mut rows = Vec::new();
    for ranks in &args.check {
        let mut flags = plain();
        flags.push(("nproc_per_node", ranks.to_string()));
        let resolved = resolve(&args.train, &flags)?;
        check_scope(args, &resolved)?;
        rows.extend(check_with(args, &resolved, *ranks)?);
    }
    Ok(Check { rows })
}

fn check_with(args: &PlanArgs, resolved: &Resolved, ranks: usize) -> Result<Vec<Checked>, Failure> {
    let mut measured = Measured::default();
    let mut runs: Vec<(Layout, Resolved, Option<Rehearsal>)> = Vec::new();
    for round in 1..=ROUNDS {
        let of = format!("with {}, round {round} of {ROUNDS}", counted(ranks, "rank"));
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
                let mut flags = flags(&row.parts, &row.cost);
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
            predicted_sent: predicted.wire,
            sent: run.sent_bytes,
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
