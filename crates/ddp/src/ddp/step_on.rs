//! The step of a [`StepPlan`]: the program handles no shard numbers, weights or copies of the model.

use burn::module::Module;
use burn::tensor::Tensor;
use paceline_rendezvous::page;

use super::{Ddp, Reduced};
use crate::error::DdpError;
use crate::sampler::{
    BatchOptions, DistributedSampler, SamplerError, SamplerOptions, ShardedBatches, StepPlan,
    micro_batches,
};

impl Ddp {
    /// The steps of a training on `len` samples, shuffled every epoch with the job's seed.
    ///
    /// All ranks get the same plans. [`step_on`](Self::step_on) computes this rank's part of one; its
    /// [`after`](StepPlan::after) is the position to save.
    ///
    /// *Errors*: no samples, or a batch with fewer samples than the job has shards.
    pub fn batches(
        &self,
        len: usize,
        options: BatchOptions,
    ) -> Result<ShardedBatches, SamplerError> {
        let sampler = DistributedSampler::new(SamplerOptions {
            len,
            shards: self.shard_count(),
            seed: self.options.seed,
            ..SamplerOptions::default()
        });
        let batches = sampler.and_then(|sampler| ShardedBatches::new(sampler, options));
        page::tell_misconfigured(batches.is_err());
        batches
    }

    /// Runs one step on the samples of `plan`. `loss` computes the mean loss of the samples with the given indices.
    ///
    /// It is called once per micro-batch of this rank's shards ([`DdpOptions::accumulate`](super::DdpOptions) per shard),
    /// never with an empty list. Micro-batches are weighted by their number of samples, so the gradients are those of the
    /// mean over the whole step, and [`Reduced::loss`] is that mean.
    ///
    /// Use [`step`](Self::step) if micro-batches need other weights, or if computing the loss can fail.
    ///
    /// *Blocks*: like [`step`](Self::step). *Cost*: each micro-batch waits for its loss, which on a GPU means for its
    /// backward pass.
    ///
    /// *Errors*: [`DdpError::Plan`] if the plan's number of shards is not the job's, and those of `step`.
    ///
    /// *Example*:
    /// ```
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::SgdConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use paceline_collective::{GroupOptions, ProcessGroup};
    /// use paceline_ddp::sampler::BatchOptions;
    /// use paceline_ddp::{Ddp, DdpOptions};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let group = ProcessGroup::local(1, &GroupOptions::default())?.remove(0);
    /// let device = Device::flex().autodiff();
    /// let model: Linear = LinearConfig::new(4, 2).init(&device);
    /// let mut optimizer = SgdConfig::new().init();
    /// let (mut ddp, mut model) = Ddp::new(group, model, DdpOptions::default())?;
    /// for plan in ddp.batches(100, BatchOptions::new(32).epochs(2))? {
    ///     let reduced = ddp.step_on(&model, &plan, |model, indices| {
    ///         let input = Tensor::<2>::ones([indices.len(), 4], &device); // the samples with these indices
    ///         model.forward(input).powf_scalar(2.0).mean()
    ///     })?;
    ///     model = optimizer.step(0.1, model, reduced.grads);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn step_on<M: Module>(
        &mut self,
        model: &M,
        plan: &StepPlan,
        mut loss: impl FnMut(&M, &[usize]) -> Tensor<1>,
    ) -> Result<Reduced, DdpError> {
        if plan.shards.len() != self.shard_count() {
            return Err(DdpError::Plan {
                shards: plan.shards.len(),
                expected: self.shard_count(),
            });
        }
        let accumulate = self.options.accumulate;
        self.step(model, |shard| {
            let parts = micro_batches(&plan.shards[shard.shard()], accumulate);
            shard.micro_batches(parts.len());
            for indices in parts {
                let weight = indices.len() as f32;
                let loss = loss(&shard.model()?, indices);
                let value = loss.clone().inner();
                shard.backward(loss, weight)?;
                // Reading the loss any earlier would leave the device idle until the backward pass is submitted.
                let value = value.into_scalar::<f32>() * weight;
                shard.add_loss(value);
            }
            Ok(())
        })
    }
}
