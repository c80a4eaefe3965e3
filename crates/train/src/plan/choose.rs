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
    pub parts: Layout,
    /// Its cost.
    #[serde(flatten)]
    pub cost: Cost,
    /// Whether a training in it fits into the memory of a rank.
    pub fits: bool,
    /// What starts it; `None` if `paceline train` does not offer it.
    pub command: Option<String>,
}

impl Row {
    pub(super) fn runs(&self) -> bool {
        self.command.is_some()
    }
}

impl Plan {
    /// Costs every layout of `cluster`'s ranks, and chooses one of those that there is a `command` for.
    #[must_use]
    pub fn new(
        model: ModelCosts,
        cluster: Cluster,
        work: Workload,
        command: impl Fn(&Layout, &Cost) -> Option<String>,
    ) -> Self {
        let layouts = layouts(&model, &cluster).into_iter();
        let rows = layouts.filter_map(|layout| {
            let cost = layout.cost(&model, &cluster, &work).ok()?;
            let needed = cost.memory.with_saves();
            Some(Row {
                layout: layout.to_string(),
                parts: layout,
                fits: cluster.memory.is_none_or(|memory| needed <= memory),
                command: command(&layout, &cost),
                cost,
            })
        });
        let rows: Vec<Row> = rows.collect();
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

/// All layouts of this many ranks, simple ones first: parts of a layer stay within a node.
fn layouts(model: &ModelCosts, cluster: &Cluster) -> Vec<Layout> {
    let (ranks, heads) = (cluster.ranks(), model.shape.heads);
    let divisors = |of: usize| (1..=of).filter(move |part| of.is_multiple_of(*part));
    let mut found = Vec::new();
    for tp in divisors(cluster.ranks_per_node)
        .filter(|tp| *tp == 1 || heads > 0 && heads.is_multiple_of(*tp))
    {
        for pp in divisors(ranks / tp).take_while(|pp| *pp <= model.shape.layers + 2) {
            let layout = Layout {
                pp,
                tp,
                ..Layout::ddp(ranks / tp / pp)
            };
            let schedules = match pp {
                1 => vec![layout.schedule],
                _ => Schedule::NAMES.map(|(_, schedule)| schedule).to_vec(),
            };
            for schedule in schedules {
                found.extend(variants(Layout { schedule, ..layout }));
            }
        }
    }
    let axes = |layout: &Layout| usize::from(layout.pp > 1) + usize::from(layout.tp > 1);
    found.sort_by_key(|layout| (axes(layout), layout.zero, layout.recompute));
    found
}

/// The same with each stage of ZeRO, with and without recomputed blocks.
fn variants(layout: Layout) -> impl Iterator<Item = Layout> {
    let zeros = (0..=3).flat_map(|zero| [(zero, false), (zero, true)]);
    zeros.map(move |(zero, recompute)| Layout {
        zero,
        recompute,
        ..layout
    })
}

/// The fastest that fits; of equally fast ones the first.
fn choose(rows: &[Row]) -> Option<usize> {
    let rows = rows.iter().enumerate();
    let fitting = || rows.clone().filter(|(_, row)| row.fits && row.runs());
    let least = fitting()
        .map(|(_, row)| row.cost.seconds.step)
        .reduce(f64::min)?;
    let found = fitting().find(|(_, row)| row.cost.seconds.step <= least * SAME);
    found.map(|(at, _)| at)
}

fn reasons(rows: &[Row], choice: Option<usize>, cluster: &Cluster) -> Vec<String> {
    let running = rows.iter().filter(|row| row.runs());
    let Some(smallest) = running.min_by(|a, b| {
        a.cost
            .memory
            .with_saves()
            .total_cmp(&b.cost.memory.with_saves())
    }) else {
        let why = match rows.is_empty() {
            true => "No layout is possible: the global batch has fewer samples than replicas.",
            false => "No layout is possible that `paceline train` offers.",
        };
        return vec![why.into()];
    };
    let Some(at) = choice else {
        let memory = bytes_text(cluster.memory.unwrap_or_default());
        return vec![format!(
            "Nothing fits into {memory} for each rank: the smallest layout, {}, needs {}. Use more ranks, or a smaller batch.",
            smallest.layout,
            bytes_text(smallest.cost.memory.with_saves())
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
            bytes_text(plain.cost.memory.with_saves())
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
            "A rank needs {} in a step, of which {name} are {}, and {} to save too.",
            bytes_text(taken.cost.memory.own()),
            bytes_text(bytes),
            bytes_text(taken.cost.memory.with_saves())
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
