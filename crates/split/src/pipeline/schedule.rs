//! `Schedule`: what each rank of a pipeline computes, sends and receives, in which order. Pure data.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::PipelineError;
use super::order::in_one_order;

/// The order in which the ranks of a pipeline work on micro-batches.
///
/// In every variant the gradient of a stage's input leaves before the gradients of the weights of its
/// [`linear`](paceline_nn::linear) layers are computed, so that the stage before waits for less. The first stage, which sends none, runs
/// whole backward passes. So does a stage whose gradients NCCL reduces, except under `ZeroBubbleH1`. Blocks whose weights are cut into
/// parts or gathered have no gradients to compute later. [`whole_cost`](super::whole_cost)s are those of such stages.
///
/// *Numerics*: the same bits in every variant: each stage runs its backward passes in the order of the micro-batches.
///
/// *Cost*: the share of time in which a rank waits for others, with `p` ranks, `m` micro-batches and `c` stages for each rank,
/// if all stages take the same time, half of a backward pass computes gradients of weights, and a message takes no time. *Memory*: inputs
/// of stages that wait for their backward pass.
///
/// | variant | idle share | stages in flight on the first rank |
/// |---|---|---|
/// | `GPipe` | 2 (p - 1) / (3 m + 2 (p - 1)) | m |
/// | `OneForwardOneBackward` | 2 (p - 1) / (3 m + 2 (p - 1)) | p |
/// | `Interleaved` | 2 (p - 1) / (3 c m + 2 (p - 1)) | p (c + 1) - 1, each 1 / c as large |
/// | `ZeroBubbleH1` | (p - 1) / (3 m + p - 1) | p |
///
/// *Source*: Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream", and 2021, "Efficient large-scale language model
/// training on GPU clusters using Megatron-LM" (interleaved stages); Qi et al. 2023, "Zero bubble pipeline parallelism".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Schedule {
    /// All forward passes, then all backward passes.
    #[serde(rename = "gpipe")]
    GPipe,
    /// Forward and backward passes in turns as soon as the pipeline is full, which bounds the memory.
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// The same with several stages for each rank: rank `r` has stages `r`, `r + p`, `r + 2 p`, ...
    #[serde(rename = "interleaved")]
    Interleaved,
    /// Like `OneForwardOneBackward`, with the gradients of weights put off until the rank would wait. Until then it keeps the
    /// input of each [`linear`](paceline_nn::linear) layer and the gradient of its output. PyTorch has its relatives,
    /// `ScheduleInterleavedZeroBubble` and `ScheduleZBVZeroBubble`.
    #[serde(rename = "zb-h1")]
    ZeroBubbleH1,
}

impl Schedule {
    /// All of them, by the names that [`FromStr`] takes.
    pub const NAMES: [(&'static str, Self); 4] = [
        ("gpipe", Self::GPipe),
        ("1f1b", Self::OneForwardOneBackward),
        ("interleaved", Self::Interleaved),
        ("zb-h1", Self::ZeroBubbleH1),
    ];

    /// Whether gradients of weights are put off until the rank would wait.
    pub fn puts_off_weights(self) -> bool {
        self == Self::ZeroBubbleH1
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = Self::NAMES.iter().find(|(_, schedule)| schedule == self);
        f.write_str(named.map_or("", |(name, _)| name))
    }
}

/// A text that is no [`Schedule`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("schedule: expected gpipe, 1f1b, interleaved or zb-h1, got {0:?}")]
pub struct ScheduleParseError(String);

impl FromStr for Schedule {
    type Err = ScheduleParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let named = Self::NAMES.iter().find(|(name, _)| *name == text);
        named
            .map(|(_, schedule)| *schedule)
            .ok_or_else(|| ScheduleParseError(text.to_string()))
    }
}

/// What a rank does with one micro-batch at one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Act {
    /// Asks for the stage's input. The forward pass waits for it.
    ReceiveInput,
    /// The forward pass.
    Forward,
    /// Sends the stage's output.
    SendOutput,
    /// Asks for the gradient of the stage's output. The backward pass waits for it.
    ReceiveGradient,
    /// The whole backward pass.
    Backward,
    /// The part of the backward pass that the stage before waits for: all but the gradients of the weights of
    /// [`linear`](paceline_nn::linear) layers.
    BackwardInput,
    /// The rest of it.
    BackwardWeight,
    /// Sends the gradient of the stage's input.
    SendGradient,
}

impl Act {
    /// Whether it is computing rather than communication.
    pub fn is_compute(self) -> bool {
        use Act::*;
        matches!(self, Forward | Backward | BackwardInput | BackwardWeight)
    }
}

/// One step of a rank's plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// What is done.
    pub act: Act,
    /// The stage, of all ranks' stages: `0..ranks * chunks`.
    pub stage: usize,
    /// The micro-batch.
    pub micro_batch: usize,
}

impl Action {
    /// The name of a message at both its ends: its receive. `None` for computing.
    pub fn message(self) -> Option<Self> {
        let (act, stage) = match self.act {
            Act::SendOutput => (Act::ReceiveInput, self.stage + 1),
            Act::SendGradient => (Act::ReceiveGradient, self.stage - 1),
            Act::ReceiveInput | Act::ReceiveGradient => (self.act, self.stage),
            _ => return None,
        };
        Some(Self { act, stage, ..self })
    }

    /// The receive that a pass waits for, if another stage sends something.
    pub fn awaited(self) -> Option<Self> {
        let act = match self.act {
            Act::Forward => Act::ReceiveInput,
            Act::Backward | Act::BackwardInput => Act::ReceiveGradient,
            _ => return None,
        };
        Some(Self { act, ..self })
    }
}

/// The size of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipelineSize {
    /// Ranks of the pipeline.
    pub ranks: usize,
    /// Micro-batches that go through it before the optimizer's step.
    pub micro_batches: usize,
    /// Stages of each rank: 1, except for [`Schedule::Interleaved`].
    pub chunks: usize,
}

impl PipelineSize {
    /// Number of stages.
    pub fn stages(&self) -> usize {
        self.ranks * self.chunks
    }

    /// The rank that computes a stage.
    pub fn rank_of(&self, stage: usize) -> usize {
        stage % self.ranks
    }

    /// The stages of a rank, in the order of the forward pass.
    pub fn stages_of(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        (rank..self.stages()).step_by(self.ranks)
    }

    /// What each rank does, in its order. All ranks have their messages in one order: a send right after its pass, and a receive
    /// possibly before passes that do not wait for it. So no rank needs room for a message that it has not asked for.
    ///
    /// *Errors*: no ranks, micro-batches or chunks; several chunks in a schedule that has one; a number of micro-batches that
    /// [`Schedule::Interleaved`] cannot deal to the ranks.
    pub fn plan(&self, schedule: Schedule) -> Result<Vec<Vec<Action>>, PipelineError> {
        self.check(schedule)?;
        in_one_order(self.as_needed(schedule))
    }

    /// The same with each receive right before the pass that waits for it.
    pub(super) fn as_needed(&self, schedule: Schedule) -> Vec<Vec<Action>> {
        let compute = |rank| match schedule {
            Schedule::GPipe => self.in_turns(rank, self.micro_batches),
            Schedule::OneForwardOneBackward => self.in_turns(rank, self.ranks - rank - 1),
            Schedule::Interleaved => self.interleaved(rank),
            Schedule::ZeroBubbleH1 => self.zero_bubble(rank),
        };
        let ranks = 0..self.ranks;
        ranks
            .map(|rank| self.with_messages(compute(rank)))
            .collect()
    }

    /// Whether there is a plan.
    ///
    /// *Errors*: see [`plan`](Self::plan).
    pub fn check(&self, schedule: Schedule) -> Result<(), PipelineError> {
        let Self {
            ranks,
            micro_batches,
            chunks,
        } = *self;
        if ranks == 0 || micro_batches == 0 || chunks == 0 {
            return Err(PipelineError::Empty(*self));
        }
        if chunks > 1 && schedule != Schedule::Interleaved {
            return Err(PipelineError::Chunks { schedule, chunks });
        }
        if schedule == Schedule::Interleaved && !micro_batches.is_multiple_of(ranks) {
            return Err(PipelineError::Uneven {
                micro_batches,
                ranks,
            });
        }
        Ok(())
    }

    /// `ahead` forward passes, then forward and backward passes in turns.
    fn in_turns(&self, rank: usize, ahead: usize) -> Vec<Action> {
        let of = |act| {
            move |micro_batch| Action {
                act,
                stage: rank,
                micro_batch,
            }
        };
        let forward = (0..self.micro_batches).map(of(Act::Forward));
        let backward = (0..self.micro_batches).map(of(Act::Backward));
        alternate(forward, backward, ahead)
    }

    /// Groups of `ranks` micro-batches go through a rank's stages one after another, forward through the first stage first and
    /// backward through the last one first.
    fn interleaved(&self, rank: usize) -> Vec<Action> {
        let Self { ranks, chunks, .. } = *self;
        let turns = 0..self.micro_batches * chunks;
        let micro_batch = move |turn| turn / (ranks * chunks) * ranks + turn % ranks;
        let chunk = move |turn| turn / ranks % chunks;
        let forward = turns.clone().map(|turn| Action {
            act: Act::Forward,
            stage: chunk(turn) * ranks + rank,
            micro_batch: micro_batch(turn),
        });
        let backward = turns.map(|turn| Action {
            act: Act::Backward,
            stage: (chunks - 1 - chunk(turn)) * ranks + rank,
            micro_batch: micro_batch(turn),
        });
        let ahead = (chunks - 1) * ranks + 2 * (ranks - rank - 1);
        alternate(forward, backward, ahead)
    }

    /// As one forward, one backward; rank `r` puts off the gradients of the weights by `r` micro-batches, so that each rank
    /// keeps the activations of as many micro-batches as there are ranks.
    fn zero_bubble(&self, rank: usize) -> Vec<Action> {
        if rank == 0 {
            return self.in_turns(rank, self.ranks - 1);
        }
        let mut actions = Vec::with_capacity(3 * self.micro_batches);
        let weight = |micro_batch| Action {
            act: Act::BackwardWeight,
            stage: rank,
            micro_batch,
        };
        for action in self.in_turns(rank, self.ranks - rank - 1) {
            let Act::Backward = action.act else {
                actions.push(action);
                continue;
            };
            actions.push(Action {
                act: Act::BackwardInput,
                ..action
            });
            actions.extend(action.micro_batch.checked_sub(rank).map(weight));
        }
        let late = self.micro_batches.saturating_sub(rank)..self.micro_batches;
        actions.extend(late.map(weight));
        actions
    }

    /// Adds the messages. A backward pass for which another stage waits is cut in two, so that its message leaves earlier.
    fn with_messages(&self, compute: Vec<Action>) -> Vec<Action> {
        let last = self.stages() - 1;
        let mut actions = Vec::with_capacity(4 * compute.len());
        for action in compute {
            let (is_first, is_last) = (action.stage == 0, action.stage == last);
            let acts = match action.act {
                Act::Forward => [
                    (!is_first).then_some(Act::ReceiveInput),
                    Some(Act::Forward),
                    (!is_last).then_some(Act::SendOutput),
                    None,
                ],
                Act::Backward if !is_first => [
                    (!is_last).then_some(Act::ReceiveGradient),
                    Some(Act::BackwardInput),
                    Some(Act::SendGradient),
                    Some(Act::BackwardWeight),
                ],
                act @ (Act::Backward | Act::BackwardInput) => [
                    (!is_last).then_some(Act::ReceiveGradient),
                    Some(act),
                    (!is_first).then_some(Act::SendGradient),
                    None,
                ],
                act => [Some(act), None, None, None],
            };
            let acts = acts.into_iter().flatten();
            actions.extend(acts.map(|act| Action { act, ..action }));
        }
        actions
    }
}

/// `ahead` of `forward`, then one of each in turns, then the rest of `backward`.
fn alternate(
    mut forward: impl Iterator<Item = Action>,
    backward: impl Iterator<Item = Action>,
    ahead: usize,
) -> Vec<Action> {
    let mut actions: Vec<_> = forward.by_ref().take(ahead).collect();
    for action in backward {
        actions.extend(forward.next());
        actions.push(action);
    }
    actions
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `F0 F1 B0 ...`; of several stages a rank's first is `a`.
    fn written(size: PipelineSize, schedule: Schedule) -> Vec<String> {
        let plan = size.plan(schedule).expect("it can be planned");
        let word = |action: &Action| {
            let act = match action.act {
                Act::Forward => 'F',
                Act::Backward => 'B',
                Act::BackwardInput => 'I',
                Act::BackwardWeight => 'W',
                _ => return None,
            };
            let chunk = (b'a' + (action.stage / size.ranks) as u8) as char;
            let chunk = (size.chunks > 1).then_some(chunk);
            let micro_batch = action.micro_batch.to_string();
            Some([act].into_iter().chain(chunk).collect::<String>() + &micro_batch)
        };
        let line = |actions: &Vec<Action>| {
            actions
                .iter()
                .filter_map(word)
                .collect::<Vec<_>>()
                .join(" ")
        };
        plan.iter().map(line).collect()
    }

    fn size(ranks: usize, micro_batches: usize, chunks: usize) -> PipelineSize {
        PipelineSize {
            ranks,
            micro_batches,
            chunks,
        }
    }

    #[test]
    fn the_plans_are_those_of_the_papers() {
        let check = |size, schedule, expect: &[&str]| {
            assert_eq!(written(size, schedule), expect, "{schedule}");
        };
        check(
            size(2, 3, 1),
            Schedule::GPipe,
            &["F0 F1 F2 B0 B1 B2", "F0 F1 F2 I0 W0 I1 W1 I2 W2"],
        );
        check(
            size(3, 4, 1),
            Schedule::OneForwardOneBackward,
            &[
                "F0 F1 F2 B0 F3 B1 B2 B3",
                "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3",
                "F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3",
            ],
        );
        check(
            size(2, 4, 2),
            Schedule::Interleaved,
            &[
                "Fa0 Fa1 Fb0 Fb1 Fa2 Ib0 Wb0 Fa3 Ib1 Wb1 Fb2 Ba0 Fb3 Ba1 Ib2 Wb2 Ib3 Wb3 Ba2 Ba3",
                "Fa0 Fa1 Fb0 Ib0 Wb0 Fb1 Ib1 Wb1 Fa2 Ia0 Wa0 Fa3 Ia1 Wa1 Fb2 Ib2 Wb2 Fb3 Ib3 Wb3 Ia2 Wa2 Ia3 Wa3",
            ],
        );
        check(
            size(3, 4, 1),
            Schedule::ZeroBubbleH1,
            &[
                "F0 F1 F2 B0 F3 B1 B2 B3",
                "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
                "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
            ],
        );
    }

    #[test]
    fn messages_stand_where_another_rank_waits() {
        use Act::*;
        let plan = size(2, 1, 1)
            .plan(Schedule::GPipe)
            .expect("it can be planned");
        let acts = |rank: usize| {
            plan[rank]
                .iter()
                .map(|action| action.act)
                .collect::<Vec<_>>()
        };
        assert_eq!(acts(0), [Forward, SendOutput, ReceiveGradient, Backward]);
        assert_eq!(
            acts(1),
            [
                ReceiveInput,
                Forward,
                BackwardInput,
                SendGradient,
                BackwardWeight
            ]
        );
    }

    #[test]
    fn names_are_read_back() {
        for (name, schedule) in Schedule::NAMES {
            assert_eq!(name.parse(), Ok(schedule));
            assert_eq!(schedule.to_string(), name);
        }
        let error = "dualpipe".parse::<Schedule>().unwrap_err().to_string();
        assert_eq!(
            error,
            "schedule: expected gpipe, 1f1b, interleaved or zb-h1, got \"dualpipe\""
        );
    }
}
