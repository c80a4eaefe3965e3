//! The forward and backward passes of a stage.

use std::collections::HashMap;

use burn::tensor::{Gradients, Tensor};
use paceline_ddp::{BackwardPart, ShardStep};
use paceline_nn::tape::Point;
use paceline_nn::{Pass, WeightGradients};

use super::super::error::PipelineError;
use super::super::model::Sequential;
use super::super::schedule::{Act, Action};
use super::super::tied::{self, Borrowed, Lent};
use super::super::wire::{Address, Asked, Content};
use super::{MicroBatches, Pipeline};

/// What has come in or been computed and is needed later, by stage and micro-batch.
#[derive(Default)]
pub(super) struct Work<const D: usize> {
    /// By receive; no pass has waited for it.
    pub(super) asked: HashMap<Action, Asked<D>>,
    pub(super) inputs: HashMap<(usize, usize), Tensor<D>>,
    pub(super) live: HashMap<(usize, usize), Live<D>>,
    /// Of a stage's output.
    pub(super) gradients: HashMap<(usize, usize), Tensor<D>>,
    /// Of a stage's input.
    pub(super) input_gradients: HashMap<(usize, usize), Tensor<D>>,
    /// Gradients of what a stage borrowed.
    pub(super) borrowed: HashMap<(usize, usize), Returned>,
    /// Gradients of weights that are computed later.
    later: HashMap<(usize, usize), WeightGradients>,
    pub(super) losses: Vec<(usize, Tensor<1>)>,
    /// Whether the values of tied parameters have been exchanged.
    pub(super) has_shared: bool,
}

/// A stage between its forward and its backward pass.
pub(super) struct Live<const D: usize> {
    input: Option<Tensor<D>>,
    pub(super) output: Output<D>,
    /// By number of the tied parameter.
    lent: Vec<(usize, Lent)>,
    borrowed: Vec<(usize, Borrowed)>,
    later: Option<WeightGradients>,
}

/// What goes back to the stages that lent it.
pub(super) struct Returned {
    /// By number of the tied parameter.
    pub(super) borrowed: Vec<(usize, Borrowed)>,
    pub(super) gradients: Gradients,
}

pub(super) enum Output<const D: usize> {
    Hidden(Tensor<D>),
    Loss(Tensor<1>),
}

impl<const D: usize> Output<D> {
    /// Of a stage before the last.
    pub(super) fn hidden(&self) -> &Tensor<D> {
        match self {
            Self::Hidden(output) => output,
            Self::Loss(_) => unreachable!("the last stage's output goes nowhere"),
        }
    }
}

impl<const D: usize> Pipeline<D> {
    /// Returns whether there was anything to compute.
    pub(super) fn compute<M: Sequential<D>>(
        &mut self,
        shard: &mut ShardStep<'_, M>,
        batches: &impl MicroBatches<M::Input, M::Output>,
        action: Action,
        ends_shard: bool,
    ) -> Result<bool, PipelineError> {
        let Action {
            act,
            stage,
            micro_batch,
        } = action;
        let key = (stage, micro_batch);
        match act {
            Act::Forward => {
                let input = self.work.inputs.remove(&key);
                let live = shard.forward_of(micro_batch, |model| {
                    self.forward(model, batches, action, input)
                })?;
                if let Output::Loss(loss) = &live.output {
                    self.work.losses.push((micro_batch, loss.clone().inner()));
                }
                self.work.live.insert(key, live);
            }
            Act::BackwardWeight => return self.backward_weight(shard, batches, action),
            _ => self.backward(shard, batches, action, ends_shard)?,
        }
        Ok(true)
    }

    fn forward<M: Sequential<D>>(
        &self,
        mut model: M,
        batches: &impl MicroBatches<M::Input, M::Output>,
        action: Action,
        input: Option<Tensor<D>>,
    ) -> Live<D> {
        let Action {
            stage, micro_batch, ..
        } = action;
        let (mut lent, mut borrowed) = (Vec::new(), Vec::new());
        for (number, (id, readers)) in self.holdings.tied.iter().enumerate() {
            // A frozen parameter has no gradient to return.
            let is_trained = self.trained.contains(id);
            if readers.contains(&stage) {
                let (value, device) = (&self.borrowed[id], &self.device);
                let (filled, own) = tied::borrow(model, (*id, is_trained), value, device);
                model = filled;
                borrowed.extend(own.map(|own| (number, own)));
            } else if is_trained && self.holdings.holder(*id) == Some(stage) {
                lent.extend(Lent::find(&model, *id).map(|lent| (number, lent)));
            }
        }
        let mut blocks = self.cuts[stage].clone();
        let is_last = stage + 1 == self.cuts.len();
        blocks.end -= usize::from(is_last);
        let input = input.map(Tensor::require_grad);
        let pass = || {
            let mut x = match &input {
                Some(input) => input.clone(),
                None => {
                    blocks.start += 1;
                    model.first(batches.input(micro_batch))
                }
            };
            for block in blocks {
                x = model.middle(block, x);
            }
            match is_last {
                true => Output::Loss(batches.loss(micro_batch, model.last(x))),
                false => Output::Hidden(x),
            }
        };
        let later = (self.sends_early && stage > 0).then(|| {
            // The other stages wait for the gradients of tied parameters.
            WeightGradients::except(self.holdings.tied.iter().map(|(id, _)| *id))
        });
        let output = match &later {
            Some(later) => {
                let outer = Pass::current().unwrap_or_default();
                let output = outer.deferring(later).enter(pass);
                later.keep(&model);
                output
            }
            None => pass(),
        };
        Live {
            input,
            output,
            lent,
            borrowed,
            later,
        }
    }

    fn backward<M: Sequential<D>>(
        &mut self,
        shard: &mut ShardStep<'_, M>,
        batches: &impl MicroBatches<M::Input, M::Output>,
        action: Action,
        ends_shard: bool,
    ) -> Result<(), PipelineError> {
        let Action {
            stage, micro_batch, ..
        } = action;
        let key = (stage, micro_batch);
        let live = self.work.live.remove(&key);
        let live = live.expect("a forward pass comes before");
        let gradient = self.work.gradients.remove(&key);
        let mut deposits = Vec::new();
        for (number, lent) in live.lent {
            // The last reader's deposit is the deepest, and is therefore added first.
            for reader in self.holdings.tied[number].1.clone() {
                let address = Address {
                    content: Content::WeightGradient,
                    stage: reader,
                    number,
                };
                let (shape, dtype) = (&lent.shape, lent.dtype);
                let gradient = self
                    .wire
                    .receive(shape, dtype, self.rank_of(reader), address)?;
                deposits.push((lent.clone(), gradient));
            }
        }
        let part = BackwardPart {
            weight: batches.weight(micro_batch),
            is_first: stage + self.options.ranks >= self.cuts.len(),
            is_last: micro_batch + 1 == batches.count() && !self.holds_buckets,
            stage,
            runs_blocks: true,
            ends_shard,
        };
        self.work.later.extend(live.later.map(|later| (key, later)));
        let scaled = match live.output {
            Output::Loss(loss) => Output::Loss(shard.scale(loss)),
            hidden => hidden,
        };
        let mut gradients = None;
        shard.backward_part(part, || {
            gradients = match scaled {
                Output::Loss(loss) => Some(loss.backward()),
                Output::Hidden(output) => {
                    let tip = Point::origin(&output).deposit(output, move || gradient);
                    let tip = deposits
                        .into_iter()
                        .fold(tip, |tip, (lent, gradient)| lent.deposit(tip, gradient));
                    tip.backward()
                }
            };
        })?;
        // A first stage whose parameters are frozen computes no gradient, and no stage waits for one.
        let Some(mut gradients) = gradients else {
            return Ok(());
        };
        if let Some(input) = live.input {
            let zeros = input.clone().inner().zeros_like();
            let gradient = input.grad_remove(&mut gradients).unwrap_or(zeros);
            self.work.input_gradients.insert(key, gradient);
        }
        if !live.borrowed.is_empty() {
            let borrowed = live.borrowed;
            self.work.borrowed.insert(
                key,
                Returned {
                    borrowed,
                    gradients,
                },
            );
        }
        Ok(())
    }

    fn backward_weight<M: Sequential<D>>(
        &mut self,
        shard: &mut ShardStep<'_, M>,
        batches: &impl MicroBatches<M::Input, M::Output>,
        action: Action,
    ) -> Result<bool, PipelineError> {
        let Action {
            stage, micro_batch, ..
        } = action;
        let later = self.work.later.remove(&(stage, micro_batch));
        let later = later.expect("the gradients of inputs come before");
        let part = BackwardPart {
            weight: batches.weight(micro_batch),
            is_first: false,
            is_last: micro_batch + 1 == batches.count() && !self.holds_buckets,
            stage,
            runs_blocks: false,
            ends_shard: false,
        };
        let mut was_left = false;
        shard.backward_part(part, || was_left = later.backward().is_some())?;
        Ok(was_left)
    }
}
