//! A pipeline's plan played through with given costs: how long each rank waits and what it keeps. Pure.

use std::collections::{HashMap, HashSet};

use super::PipelineError;
use super::schedule::{Act, Action};

/// What a rank did in a stretch of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// What it computed.
    pub action: Action,
    /// When it began, since the start of the step.
    pub start: f64,
    /// When it ended.
    pub end: f64,
}

/// A step of a pipeline, simulated or recorded.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// What each rank computed, in its order.
    pub ranks: Vec<Vec<Interval>>,
}

impl Trace {
    /// When the last rank ended.
    pub fn end(&self) -> f64 {
        let all = self.ranks.iter().flatten();
        all.map(|interval| interval.end).fold(0.0, f64::max)
    }

    /// The share of the whole time in which a rank did not compute: its bubble.
    pub fn idle_share(&self, rank: usize) -> f64 {
        let intervals = self.ranks[rank].iter();
        let busy: f64 = intervals
            .map(|interval| interval.end - interval.start)
            .sum();
        match self.end() {
            0.0 => 0.0,
            end => (1.0 - busy / end).max(0.0),
        }
    }

    /// The mean idle share of all ranks.
    pub fn bubble(&self) -> f64 {
        let ranks = 0..self.ranks.len();
        ranks.map(|rank| self.idle_share(rank)).sum::<f64>() / self.ranks.len().max(1) as f64
    }
}

/// Most of what the forward passes of a rank's plan leave for its backward passes at once, if each leaves `kept`.
pub fn in_flight(plan: &[Action], kept: impl Fn(&Action) -> f64) -> f64 {
    let (mut now, mut most) = (0.0_f64, 0.0_f64);
    for action in plan {
        match action.act {
            Act::Forward => now += kept(action),
            Act::Backward | Act::BackwardWeight => now -= kept(action),
            _ => {}
        }
        most = most.max(now);
    }
    most
}

/// Plays `plan`, one list of actions for each rank, if computing takes `cost` and a message `latency`. A send never waits.
///
/// *Errors*: ranks that wait for each other, or for something that is never sent.
pub fn simulate(
    plan: &[Vec<Action>],
    cost: impl Fn(&Action) -> f64,
    latency: f64,
) -> Result<Trace, PipelineError> {
    Ok(play(plan, cost, latency)?.0)
}

/// The same with the moment at which each message has come.
pub(super) fn play(
    plan: &[Vec<Action>],
    cost: impl Fn(&Action) -> f64,
    latency: f64,
) -> Result<(Trace, HashMap<Action, f64>), PipelineError> {
    let mut come: HashMap<Action, f64> = HashMap::new();
    let mut asked: HashSet<Action> = HashSet::new();
    let mut next = vec![0; plan.len()];
    let mut now = vec![0.0_f64; plan.len()];
    let mut trace = Trace {
        ranks: vec![Vec::new(); plan.len()],
    };
    let awaited =
        |action: &Action, asked: &HashSet<Action>| action.awaited().filter(|it| asked.contains(it));
    loop {
        let mut has_moved = false;
        for (rank, actions) in plan.iter().enumerate() {
            while let Some(action) = actions.get(next[rank]) {
                match action.act {
                    Act::SendOutput | Act::SendGradient => {
                        come.extend(action.message().map(|sent| (sent, now[rank] + latency)));
                    }
                    Act::ReceiveInput | Act::ReceiveGradient => {
                        asked.insert(*action);
                    }
                    _ => {
                        if let Some(receive) = awaited(action, &asked) {
                            let Some(at) = come.get(&receive) else {
                                break;
                            };
                            now[rank] = now[rank].max(*at);
                        }
                        let start = now[rank];
                        now[rank] += cost(action);
                        trace.ranks[rank].push(Interval {
                            action: *action,
                            start,
                            end: now[rank],
                        });
                    }
                }
                next[rank] += 1;
                has_moved = true;
            }
        }
        if !has_moved {
            break;
        }
    }
    let stuck = (0..plan.len()).find_map(|rank| Some((rank, plan[rank].get(next[rank])?)));
    match stuck {
        Some((rank, pass)) => Err(PipelineError::Stuck {
            rank,
            action: awaited(pass, &asked).unwrap_or(*pass),
        }),
        None => Ok((trace, come)),
    }
}

/// Costs in which a backward pass takes as long as two forward passes, whether it is split or not.
pub fn unit_cost(action: &Action) -> f64 {
    match action.act {
        Act::Backward => 2.0,
        _ => 1.0,
    }
}

/// The same of stages that compute all gradients before that of their input leaves.
pub fn whole_cost(action: &Action) -> f64 {
    match action.act {
        Act::BackwardInput => 2.0,
        Act::BackwardWeight => 0.0,
        _ => unit_cost(action),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::schedule::{PipelineSize, Schedule};
    use super::*;

    /// Every size up to 6 ranks, 12 micro-batches and 3 chunks that `schedule` has a plan for.
    fn sizes(schedule: Schedule) -> impl Iterator<Item = PipelineSize> {
        let all = (1..=6).flat_map(|ranks| {
            (1..=12).flat_map(move |micro_batches| {
                (1..=3).map(move |chunks| PipelineSize {
                    ranks,
                    micro_batches,
                    chunks,
                })
            })
        });
        all.filter(move |size| size.check(schedule).is_ok())
    }

    pub(in super::super) fn every_plan()
    -> impl Iterator<Item = (Schedule, PipelineSize, Vec<Vec<Action>>)> {
        Schedule::NAMES.into_iter().flat_map(|(_, schedule)| {
            sizes(schedule).map(move |size| (schedule, size, size.plan(schedule).expect("checked")))
        })
    }

    #[test]
    fn no_plan_stops_and_each_stage_works_on_each_micro_batch_once() {
        let mut count = 0;
        for (schedule, size, plan) in every_plan() {
            let trace = simulate(&plan, unit_cost, 0.25).expect("it ends");
            for (rank, intervals) in trace.ranks.iter().enumerate() {
                for stage in size.stages_of(rank) {
                    let of = |act| {
                        let mine = intervals
                            .iter()
                            .filter(move |i| i.action.stage == stage && i.action.act == act);
                        mine.map(|interval| interval.action.micro_batch)
                            .collect::<Vec<_>>()
                    };
                    // In the order of the micro-batches, because gradients are added in this order.
                    let all: Vec<_> = (0..size.micro_batches).collect();
                    let acts: &[Act] = match stage {
                        0 => &[Act::Forward, Act::Backward],
                        _ => &[Act::Forward, Act::BackwardInput, Act::BackwardWeight],
                    };
                    for act in acts {
                        assert_eq!(of(*act), all, "{schedule} {size:?} {act:?}");
                    }
                }
            }
            count += 1;
        }
        assert!(count > 200, "{count}");
    }

    #[test]
    fn bubbles_are_those_of_the_papers_with_earlier_gradients() {
        for (schedule, size, plan) in every_plan() {
            let trace = simulate(&plan, unit_cost, 0.0).expect("it ends");
            let [p, m, c] = [size.ranks, size.micro_batches, size.chunks].map(|n| n as f64);
            let expect = match schedule {
                Schedule::GPipe | Schedule::OneForwardOneBackward | Schedule::Interleaved => {
                    2.0 * (p - 1.0) / (3.0 * c * m + 2.0 * (p - 1.0))
                }
                // With fewer micro-batches the pipeline is never full.
                Schedule::ZeroBubbleH1 if m < p => continue,
                Schedule::ZeroBubbleH1 => (p - 1.0) / (3.0 * m + p - 1.0),
            };
            assert!(
                (trace.bubble() - expect).abs() < 1e-9,
                "{schedule} {size:?}: {} is not {expect}",
                trace.bubble()
            );
        }
    }

    #[test]
    fn without_earlier_gradients_bubbles_are_those_of_whole_backward_passes() {
        for (schedule, size, plan) in every_plan() {
            let bubble = simulate(&plan, whole_cost, 0.0).expect("it ends").bubble();
            let [p, m, c] = [size.ranks, size.micro_batches, size.chunks].map(|n| n as f64);
            let expect = (p - 1.0) / (c * m + p - 1.0);
            assert!(
                (bubble - expect).abs() < 1e-9,
                "{schedule} {size:?}: {bubble} is not {expect}"
            );
        }
    }

    #[test]
    fn memory_is_bounded_by_the_ranks_except_in_gpipe() {
        for (schedule, size, plan) in every_plan() {
            let PipelineSize {
                ranks,
                micro_batches,
                chunks,
            } = size;
            for (rank, actions) in plan.iter().enumerate() {
                let expect = match schedule {
                    Schedule::GPipe => micro_batches,
                    Schedule::OneForwardOneBackward => (ranks - rank).min(micro_batches),
                    Schedule::Interleaved => ((chunks - 1) * ranks + 2 * (ranks - rank - 1) + 1)
                        .min(chunks * micro_batches),
                    Schedule::ZeroBubbleH1 => ranks.min(micro_batches),
                };
                assert_eq!(
                    in_flight(actions, |_| 1.0),
                    expect as f64,
                    "{schedule} {size:?} rank {rank}"
                );
            }
        }
    }

    #[test]
    fn ranks_that_wait_for_each_other_are_named() {
        let size = PipelineSize {
            ranks: 2,
            micro_batches: 2,
            chunks: 1,
        };
        let mut plan = size.plan(Schedule::GPipe).expect("it can be planned");
        // Rank 0 waits for the first gradient before it sends the second input, and rank 1 for both inputs.
        let is_first = |action: &Action| action.act == Act::Backward && action.micro_batch == 0;
        let at = plan[0].iter().position(is_first).expect("there is one");
        let [receive, backward] = [plan[0].remove(at - 1), plan[0].remove(at - 1)];
        assert_eq!(Some(receive), backward.awaited());
        plan[0].splice(2..2, [receive, backward]);
        let error = simulate(&plan, unit_cost, 0.0).unwrap_err().to_string();
        assert_eq!(
            error,
            "pipeline: rank 0 waits for ever in ReceiveGradient of stage 0, micro-batch 0"
        );
    }
}
