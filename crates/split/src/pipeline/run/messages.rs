//! What goes between the stages.

use burn::tensor::Tensor;

use super::super::error::PipelineError;
use super::super::model::Sequential;
use super::super::schedule::{Act, Action};
use super::super::tied::Lent;
use super::super::wire::{Address, Content};
use super::Pipeline;

impl<const D: usize> Pipeline<D> {
    /// Sends, or notes what a pass is going to wait for: messages that were not asked for have room on the host.
    pub(super) fn pass_on(&mut self, action: Action) -> Result<(), PipelineError> {
        let Action {
            act,
            stage,
            micro_batch: number,
        } = action;
        let key = (stage, number);
        match act {
            Act::ReceiveInput | Act::ReceiveGradient => {
                self.work.asked.insert(action);
            }
            Act::SendOutput => {
                let output = self.work.live[&key].output.hidden().clone().inner();
                self.send_output(stage, number, output)?;
            }
            Act::SendGradient => {
                let gradient = self.work.input_gradients.remove(&key);
                let gradient = gradient.expect("a backward pass comes before").into_data();
                let address = Address {
                    content: Content::Gradient,
                    stage: stage - 1,
                    number,
                };
                self.wire
                    .send(&gradient, self.rank_of(stage - 1), address)?;
                self.return_borrowed(stage, key)?;
            }
            _ => unreachable!("computing is no message"),
        }
        Ok(())
    }

    /// Waits for a stage's input or the gradient of its output.
    pub(super) fn receive(&mut self, receive: Action) -> Result<(), PipelineError> {
        let Action {
            act,
            stage,
            micro_batch: number,
        } = receive;
        let key = (stage, number);
        let to = |content| Address {
            content,
            stage,
            number,
        };
        if act == Act::ReceiveInput {
            let from = self.rank_of(stage - 1);
            let data = self.wire.receive_described(D, from, to(Content::Input))?;
            self.work.inputs.insert(key, self.wire.tensor(data));
        } else {
            let output = self.work.live[&key].output.hidden();
            let (shape, dtype) = (output.dims(), output.dtype());
            let from = self.rank_of(stage + 1);
            let data = self
                .wire
                .receive(&shape, dtype, from, to(Content::Gradient))?;
            let gradient = self.wire.tensor::<D>(data).inner();
            self.work.gradients.insert(key, gradient);
        }
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
        self.wire.send_described(&output.into_data(), to, address)
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
