//! A small GPT, its data, and a way to train it on one rank and in pipelines.

use std::time::Duration;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_ddp::{
    BucketCaps, Ddp, DdpOptions, Precision, ZeroRedundancyOptimizer, ZeroStage, weights,
};
use paceline_nn::gpt::{Gpt, GptConfig};
use paceline_split::pipeline::{
    MicroBatches, Pipeline, PipelineError, PipelineOptions, Schedule, Sequential,
};

pub(crate) const CONFIG: GptConfig = GptConfig {
    vocabulary: 11,
    context: 8,
    layers: 6,
    heads: 4,
    width: 8,
    // Threads share one source of random numbers.
    dropout: 0.0,
};
pub(crate) const STEPS: usize = 3;

/// Each schedule, with stages for each rank.
pub(crate) const SCHEDULES: [(Schedule, usize); 4] = [
    (Schedule::GPipe, 1),
    (Schedule::OneForwardOneBackward, 1),
    (Schedule::Interleaved, 2),
    (Schedule::ZeroBubbleH1, 1),
];

pub(crate) fn device() -> Device {
    Device::flex().autodiff()
}

/// Weights that do not depend on random numbers.
pub(crate) fn gpt() -> Gpt {
    let net = CONFIG.init(&device());
    let mut counter = 0u32;
    let values = weights::export(&net).into_iter().map(|(path, data)| {
        let values = (0..data.num_elements()).map(|_| {
            counter = counter.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (counter >> 8) as f32 / (1 << 24) as f32 - 0.5
        });
        let values: Vec<f32> = values.collect();
        (path, TensorData::new(values, data.shape().clone()))
    });
    let values = values.collect();
    weights::import(net, values)
}

/// The same with its first blocks frozen, of which the embedding is one.
pub(crate) fn frozen_gpt(blocks: usize) -> Gpt {
    let mut net = gpt();
    net.embedding = net.embedding.no_grad();
    for block in &mut net.blocks[..blocks - 1] {
        *block = block.clone().no_grad();
    }
    net
}

/// One shard's micro-batches of a step: sequences of tokens that are functions of their place.
pub(crate) struct Data {
    pub(crate) step: usize,
    pub(crate) shard: usize,
    pub(crate) micro_batches: usize,
    pub(crate) precision: Precision,
}

impl Data {
    /// Micro-batches differ in size.
    fn rows(&self, micro_batch: usize) -> usize {
        1 + (self.step + self.shard + micro_batch) % 2
    }

    pub(crate) fn labels(&self, micro_batch: usize) -> Tensor<1, Int> {
        self.tokens(micro_batch, 1).flatten(0, 1)
    }

    fn tokens(&self, micro_batch: usize, shift: usize) -> Tensor<2, Int> {
        let rows = self.rows(micro_batch);
        let first = self.step * 1000 + self.shard * 100 + micro_batch * 10 + shift;
        let length = CONFIG.context;
        let token = |at: usize| ((first + at * 7 + at / length) % CONFIG.vocabulary) as i32;
        let tokens: Vec<i32> = (0..rows * length).map(token).collect();
        Tensor::from_data(TensorData::new(tokens, [rows, length]), &device())
    }
}

/// Of a step with these options.
pub(crate) fn data(step: usize, shard: usize, options: &DdpOptions) -> Data {
    Data {
        step,
        shard,
        micro_batches: options.accumulate,
        precision: options.precision,
    }
}

impl MicroBatches<Tensor<2, Int>, Tensor<3>> for Data {
    fn count(&self) -> usize {
        self.micro_batches
    }

    fn weight(&self, micro_batch: usize) -> f32 {
        (self.rows(micro_batch) * CONFIG.context) as f32
    }

    fn input(&self, micro_batch: usize) -> Tensor<2, Int> {
        self.tokens(micro_batch, 0)
    }

    fn loss(&self, micro_batch: usize, output: Tensor<3>) -> Tensor<1> {
        let scores = self.precision.logits(output.flatten::<2>(0, 1));
        let labels = self.labels(micro_batch);
        CrossEntropyLossConfig::new()
            .init(&scores.device())
            .forward(scores, labels)
    }
}

pub(crate) fn ranks<R: Send>(world: usize, rank: impl Fn(ProcessGroup) -> R + Sync) -> Vec<R> {
    let options = GroupOptions {
        timeout: Duration::from_secs(20),
        ..GroupOptions::default()
    };
    let groups = ProcessGroup::local(world, &options).expect("a local group");
    paceline_testing::on_threads(groups, rank)
}

pub(crate) fn layout(ranks: usize, schedule: Schedule, chunks: usize) -> PipelineOptions {
    PipelineOptions {
        ranks,
        schedule,
        chunks,
        cuts: None,
    }
}

pub(crate) fn options(shards: usize, micro_batches: usize) -> DdpOptions {
    DdpOptions {
        shards: Some(shards),
        accumulate: micro_batches,
        clip_norm: Some(0.5),
        sums: 1,
        caps: BucketCaps {
            first_bytes: 1 << 9,
            bytes: 1 << 11,
        },
        ..DdpOptions::default()
    }
}

/// What a training ends with: the weights' hash, and loss and norm of each step.
pub(crate) type Outcome = (String, Vec<(u32, u64)>);

pub(crate) fn outcome(reduced: &paceline_ddp::Reduced) -> (u32, u64) {
    let loss = reduced.sums[0] / reduced.weight as f32;
    (loss.to_bits(), reduced.grad_norm.map_or(0, f64::to_bits))
}

pub(crate) fn alone(options: &DdpOptions) -> Outcome {
    alone_with(options, &counts(options))
}

/// Micro-batches of each shard: the same for all.
pub(crate) fn counts(options: &DdpOptions) -> Vec<usize> {
    vec![options.accumulate; options.shards.expect("a number")]
}

/// Trains on one rank; shard `i` has `counts[i]` micro-batches.
pub(crate) fn alone_with(options: &DdpOptions, counts: &[usize]) -> Outcome {
    replicas(1, options, counts).remove(0)
}

/// Trains on so many ranks without a pipeline.
pub(crate) fn replicas(world: usize, options: &DdpOptions, counts: &[usize]) -> Vec<Outcome> {
    ranks(world, |group| {
        let (ddp, net) = Ddp::new(group, gpt(), options.clone()).expect("a replica");
        let of_shard = |step, shard| with_count(data(step, shard, options), counts);
        steps_alone(ddp, net, Gpt::forward, of_shard)
    })
}

fn with_count(data: Data, counts: &[usize]) -> Data {
    Data {
        micro_batches: counts[data.shard],
        ..data
    }
}

/// Trains without a pipeline, with the data of each step and shard.
pub(crate) fn steps_alone<M: Module, O, B: MicroBatches<Tensor<2, Int>, O>>(
    mut ddp: Ddp,
    mut net: M,
    forward: impl Fn(&M, Tensor<2, Int>) -> O,
    data: impl Fn(usize, usize) -> B,
) -> Outcome {
    let mut optimizer = AdamWConfig::new().init();
    let mut steps = Vec::new();
    for step in 0..STEPS {
        let reduced = ddp.step(&net, |shard| {
            let data = data(step, shard.shard());
            shard.micro_batches(data.count());
            for micro_batch in 0..data.count() {
                let output = forward(&shard.model()?, data.input(micro_batch));
                let loss = data.loss(micro_batch, output);
                let value = loss.clone().into_scalar::<f32>();
                shard.backward(loss, data.weight(micro_batch))?;
                shard.add(0, value * data.weight(micro_batch));
            }
            Ok::<_, paceline_ddp::DdpError>(())
        });
        let reduced = reduced.expect("a step");
        steps.push(outcome(&reduced));
        net = optimizer.step(0.01, net, reduced.grads);
        net = ddp.average(net).expect("the other workers");
    }
    (ddp.sha256(&net).expect("a hash"), steps)
}

pub(crate) fn train(
    group: &ProcessGroup,
    layout: PipelineOptions,
    options: &DdpOptions,
) -> Result<Outcome, PipelineError> {
    train_with(group, layout, options, &counts(options), None)
}

/// Trains in a pipeline, with a sharded optimizer if there is a `stage`.
pub(crate) fn train_with(
    group: &ProcessGroup,
    layout: PipelineOptions,
    options: &DdpOptions,
    counts: &[usize],
    stage: Option<ZeroStage>,
) -> Result<Outcome, PipelineError> {
    let made = Pipeline::new(group, gpt(), layout, options.clone())?;
    let of_shard = |step, shard| with_count(data(step, shard, options), counts);
    steps_in_pipeline(made, stage, of_shard)
}

/// Trains in a pipeline, with the data of each step and shard, and with a sharded optimizer if there is a `stage`.
pub(crate) fn steps_in_pipeline<M: Sequential<3>, B: MicroBatches<M::Input, M::Output>>(
    (mut pipeline, mut ddp, mut net): (Pipeline<3>, Ddp, M),
    stage: Option<ZeroStage>,
    data: impl Fn(usize, usize) -> B,
) -> Result<Outcome, PipelineError> {
    let mut whole = AdamWConfig::new().init();
    let mut sharded = None;
    if let Some(stage) = stage {
        let made = ZeroRedundancyOptimizer::at_stage(&mut ddp, net, whole.clone(), stage)?;
        net = made.1;
        sharded = Some(made.0);
        let is_whole = |(path, shape, _): &(String, Vec<usize>, _)| {
            path.starts_with("blocks.") && !shape.contains(&0)
        };
        let has_weights = weights::tensors(&net).iter().any(is_whole);
        assert!(!has_weights || stage != ZeroStage::Parameters, "dealt");
    }
    let mut steps = Vec::new();
    for step in 0..STEPS {
        let reduced = pipeline.step(&mut ddp, &net, |pipeline, shard| {
            let data = data(step, shard.shard());
            for (micro_batch, loss) in pipeline.shard(shard, &data)?.into_iter().enumerate() {
                shard.add(0, loss * data.weight(micro_batch));
            }
            Ok::<_, PipelineError>(())
        })?;
        steps.push(outcome(&reduced));
        net = match &mut sharded {
            Some(sharded) => sharded.step(0.01, net, reduced.grads)?,
            None => whole.step(0.01, net, reduced.grads),
        };
        net = ddp.average(net)?;
    }
    Ok((ddp.sha256(&net)?, steps))
}

/// The idle share that a pipeline calls the best, after a step.
pub(crate) fn idle_at_best<M: Sequential<3>, B: MicroBatches<M::Input, M::Output>>(
    (mut pipeline, mut ddp, net): (Pipeline<3>, Ddp, M),
    data: impl Fn(usize) -> B,
    micro_batches: usize,
) -> f64 {
    let reduced = pipeline.step(&mut ddp, &net, |pipeline, shard| {
        let data = data(shard.shard());
        pipeline.shard(shard, &data).map(drop)
    });
    reduced.expect("a step");
    pipeline.ideal(micro_batches).expect("a plan").bubble()
}

/// That of gradients that leave after whole backward passes, under every schedule.
pub(crate) fn whole_passes(ranks: usize, micro_batches: usize, chunks: usize) -> f64 {
    (ranks - 1) as f64 / (chunks * micro_batches + ranks - 1) as f64
}
