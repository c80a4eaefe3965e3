//! What goes between the stages.

use burn::tensor::Tensor;

use super::super::error::PipelineError;
use super::super::model::Sequential;
use super::super::schedule::{Act, Action};
use super::super::tied::Lent;
use super::super::wire::{Address, Content};
use super::Pipeline;

impl<const D: usize> Pipeline<D> {
    /// Sends, or asks for what a pass is going to wait for.
    pub(super) fn pass_on(&mut self, action: Action) -> Result<(), PipelineError> {
        let Action {
            act,
            stage,
            micro_batch: number,
        } = action;
        let key = (stage, number);
        let to = |content, stage| Address {
            content,
            stage,
            number,
        };
        match act {
            Act::ReceiveInput => {
                let from = self.rank_of(stage - 1);
                let asked = self.wire.ask(None, from, to(Content::Input, stage))?;
                self.work.asked.insert(action, asked);
            }
            Act::SendOutput => {
                let output = self.work.live[&key].output.hidden().clone().inner();
                self.send_output(stage, number, output)?;
            }
            Act::ReceiveGradient => {
                let output = self.work.live[&key].output.hidden();
                let like = Some((output.dims(), output.dtype()));
                let from = self.rank_of(stage + 1);
                let asked = self.wire.ask(like, from, to(Content::Gradient, stage))?;
                self.work.asked.insert(action, asked);
            }
            Act::SendGradient => {
                let gradient = self.work.input_gradients.remove(&key);
                let gradient = gradient.expect("a backward pass comes before");
                let (rank, address) = (self.rank_of(stage - 1), to(Content::Gradient, stage - 1));
                self.wire.send_tensor(gradient, true, rank, address)?;
                self.return_borrowed(stage, key)?;
            }
            _ => unreachable!("computing is no message"),
        }
        Ok(())
    }

    /// Waits for what was asked for as the input of a pass.
    pub(super) fn receive(&mut self, receive: Action) -> Result<(), PipelineError> {
        let asked = self.work.asked.remove(&receive);
        let tensor = self.wire.take(asked.expect("the plan asks before"))?;
        let key = (receive.stage, receive.micro_batch);
        match receive.act {
            Act::ReceiveInput => self.work.inputs.insert(key, tensor),
            _ => self.work.gradients.insert(key, tensor.inner()),
        };
        Ok(())
    }

    /// Sends the gradients of the tied parameters that a stage borrowed, after that of its input, which has the longer way.
    fn return_borrowed(&mut self, stage: usize, key: (usize, usize)) -> Result<(), PipelineError> {
        let Some(mut returned) = self.work.borrowed.remove(&key) else {
            return Ok(());
        };
        for (number, borrowed) in returned.borrowed {
            let gradient = borrowed.gradient(&mut returned.gradients);
            let holder = self.holdings.holder(self.holdings.tied[number].0);
            let to = self.rank_of(holder.expect("a tied parameter is read"));
            let address = Address {
                content: Content::WeightGradient,
                stage,
                number,
            };
            self.wire.send(&gradient, to, address)?;
        }
        Ok(())
    }

    pub(super) fn send_output(
        &mut self,
        stage: usize,
        number: usize,
        output: Tensor<D>,
    ) -> Result<(), PipelineError> {
        let address = Address {
            content: Content::Input,
            stage: stage + 1,
            number,
        };
        let to = self.rank_of(stage + 1);
        self.wire.send_tensor(output, false, to, address)
    }

    /// Once in a step, sends the values of tied parameters that this rank holds, and receives those that it borrows, in the type
    /// that the model computes in.
    pub(super) fn share_weights<M: Sequential<D>>(
        &mut self,
        model: impl FnOnce() -> Result<M, PipelineError>,
    ) -> Result<(), PipelineError> {
        if self.holdings.tied.is_empty() || self.work.has_shared {
            return Ok(());
        }
        self.work.has_shared = true;
        let model = model()?;
        for (number, (id, readers)) in self.holdings.tied.iter().enumerate() {
            let holder = self.holdings.holder(*id).expect("a tied parameter is read");
            let from = self.rank_of(holder);
            let own = (from == self.rank).then(|| Lent::find(&model, *id));
            let value = own.flatten().map(|lent| lent.value());
            for &stage in readers {
                let address = Address {
                    content: Content::Weight,
                    stage,
                    number,
                };
                if let Some(value) = &value {
                    self.wire
                        .send_described(value, stage % self.options.ranks, address)?;
                }
                if self.rank_of(stage) == self.rank {
                    let rank = self.shapes[id].len();
                    let value = self.wire.receive_described(rank, from, address)?;
                    self.borrowed.insert(*id, value);
                }
            }
        }
        Ok(())
    }
}
