//! The layouts worth looking at, and the one to take. Pure.

use paceline_split::pipeline::Schedule;
use serde::Serialize;

use super::render::bytes_text;
use super::{Cluster, Cost, Layout, ModelCosts, Workload};

/// Two predicted times closer than this are the same: then the simpler layout is taken.
const SAME: f64 = 1.03;

/// Every layout and its cost.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// The figures that the costs were computed from.
    pub model: ModelCosts,
    /// The machines.
    pub cluster: Cluster,
    /// What is trained.
    pub work: Workload,
    /// From the simplest to the most involved.
    pub rows: Vec<Row>,
    /// Index of the one to take; `None` if none fits.
    pub choice: Option<usize>,
    /// Why, one sentence each.
    pub reasons: Vec<String>,
}

/// A layout and its cost.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The layout in words.
    pub layout: String,
    /// The same as numbers.
    pub parts: Parts,
    /// Its cost.
    #[serde(flatten)]
    pub cost: Cost,
    /// Whether it fits into the memory of a rank.
    pub fits: bool,
}

/// A layout as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Parts {
    /// Replicas.
    pub dp: usize,
    /// Stages.
    pub pp: usize,
    /// Parts of a layer.
    pub tp: usize,
    /// Stage of ZeRO.
    pub zero: u8,
    /// Whether blocks are recomputed.
    pub recompute: bool,
}

impl Plan {
    /// Costs every layout of `cluster`'s ranks, and chooses one.
    #[must_use]
    pub fn new(model: ModelCosts, cluster: Cluster, work: Workload) -> Self {
        let rows: Vec<Row> = layouts(&model, &cluster)
            .into_iter()
            .filter_map(|layout| row(layout, &model, &cluster, &work))
            .collect();
        let choice = choose(&rows);
        let reasons = reasons(&rows, choice, &cluster);
        Self {
            model,
            cluster,
            work,
            rows,
            choice,
            reasons,
        }
    }
}

/// The cost of a layout with the best schedule for it; `None` if the layout is not possible.
fn row(layout: Layout, model: &ModelCosts, cluster: &Cluster, work: &Workload) -> Option<Row> {
    let schedules = Schedule::NAMES.iter().map(|(_, schedule)| *schedule);
    // Several stages for each rank need a model of more blocks, which the cut does not look at. ZB-H1 cannot be run yet.
    let tried = schedules.filter(|schedule| match schedule {
        Schedule::OneForwardOneBackward => true,
        Schedule::GPipe => layout.pp > 1,
        Schedule::Interleaved | Schedule::ZeroBubbleH1 => false,
    });
    let costs = tried.filter_map(|schedule| {
        let layout = Layout { schedule, ..layout };
        let cost = layout.cost(model, cluster, work).ok()?;
        Some((layout, cost))
    });
    let fits = |cost: &Cost| {
        cluster
            .memory
            .is_none_or(|memory| cost.memory.peak <= memory)
    };
    let (layout, cost) = costs.min_by(|(_, a), (_, b)| {
        let order = |cost: &Cost| (!fits(cost), cost.seconds.step, cost.memory.peak);
        order(a)
            .partial_cmp(&order(b))
            .unwrap_or(std::cmp::Ordering::Equal)
    })?;
    Some(Row {
        layout: layout.to_string(),
        parts: Parts {
            dp: layout.dp,
            pp: layout.pp,
            tp: layout.tp,
            zero: layout.zero,
            recompute: layout.recompute,
        },
        fits: fits(&cost),
        cost,
    })
}

/// All layouts of this many ranks, simple ones first: parts of a layer stay within a node.
fn layouts(model: &ModelCosts, cluster: &Cluster) -> Vec<Layout> {
    let ranks = cluster.ranks();
    let divisors = |of: usize| (1..=of).filter(move |part| of.is_multiple_of(*part));
    let mut found = Vec::new();
    for tp in divisors(cluster.ranks_per_node)
        .filter(|tp| *tp == 1 || (model.heads > 0 && model.heads.is_multiple_of(*tp)))
    {
        for pp in divisors(ranks / tp).take_while(|pp| *pp <= model.layers + 1) {
            for zero in 0..=3 {
                for recompute in [false, true] {
                    found.push(Layout {
                        pp,
                        tp,
                        zero,
                        recompute,
                        ..Layout::ddp(ranks / tp / pp)
                    });
                }
            }
        }
    }
    let axes = |layout: &Layout| usize::from(layout.pp > 1) + usize::from(layout.tp > 1);
    found.sort_by_key(|layout| (axes(layout), layout.zero, layout.recompute));
    found
}

/// The fastest that fits; of equally fast ones the first.
fn choose(rows: &[Row]) -> Option<usize> {
    let fitting = || rows.iter().enumerate().filter(|(_, row)| row.fits);
    let least = fitting()
        .map(|(_, row)| row.cost.seconds.step)
        .reduce(f64::min)?;
    let found = fitting().find(|(_, row)| row.cost.seconds.step <= least * SAME);
    found.map(|(at, _)| at)
}

fn reasons(rows: &[Row], choice: Option<usize>, cluster: &Cluster) -> Vec<String> {
    let Some(smallest) = rows
        .iter()
        .min_by(|a, b| a.cost.memory.peak.total_cmp(&b.cost.memory.peak))
    else {
        return vec![
            "No layout is possible: the global batch has fewer samples than replicas.".into(),
        ];
    };
    let Some(at) = choice else {
        let memory = bytes_text(cluster.memory.unwrap_or_default());
        return vec![format!(
            "Nothing fits into {memory} for each rank: the smallest layout, {}, needs {}. Use more ranks, or a smaller batch.",
            smallest.layout,
            bytes_text(smallest.cost.memory.peak)
        )];
    };
    let taken = &rows[at];
    let mut reasons = Vec::new();
    let plain = &rows[0];
    if at == 0 {
        reasons.push(format!(
            "{}: the simplest layout fits, and none is faster.",
            taken.layout
        ));
    } else if plain.fits {
        reasons.push(format!(
            "{}: {:.2} of the time of {}.",
            taken.layout,
            taken.cost.seconds.step / plain.cost.seconds.step,
            plain.layout
        ));
    } else {
        reasons.push(format!(
            "{}: {} needs {} and does not fit; this is the fastest that does.",
            taken.layout,
            plain.layout,
            bytes_text(plain.cost.memory.peak)
        ));
    }
    let kinds = |row: &Row| {
        let memory = row.cost.memory;
        [
            ("weights", memory.weights),
            (
                "gradients and their buckets",
                memory.gradients + memory.buckets,
            ),
            ("optimizer state", memory.optimizer),
            ("activations", memory.activations),
        ]
    };
    let most = kinds(taken).into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
    if let Some((name, bytes)) = most {
        reasons.push(format!(
            "A rank needs {}, of which {name} are {}.",
            bytes_text(taken.cost.memory.peak),
            bytes_text(bytes)
        ));
    }
    let seconds = taken.cost.seconds;
    let shares = [
        ("waiting for other stages", seconds.bubble),
        ("waiting for other ranks", seconds.communication),
    ];
    for (what, part) in shares {
        let share = part / seconds.step.max(f64::MIN_POSITIVE);
        if share >= 0.05 {
            reasons.push(format!("{:.0} % of its step is {what}.", share * 100.0));
        }
    }
    reasons
}
