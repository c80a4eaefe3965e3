//! burn-train's own loop, made data-parallel by `DdpStrategy`.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::{Dataset, DatasetError};
use burn::tensor::{Device, Tensor};
use burn::train::logger::InMemoryMetricLogger;
use burn::train::metric::LossMetric;
use burn::train::metric::store::{Aggregate, Direction, EventStoreClient, Split};
use burn::train::{
    EarlyStoppingStrategy, ExecutionStrategy, InferenceStep, Interrupter, Learner, LearningResult,
    MetricEarlyStoppingStrategy, RegressionOutput, StoppingCondition, SupervisedTraining,
    TrainOutput, TrainStep, TrainingStrategy,
};
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_ddp::{Ddp, DdpError, DdpOptions, DdpStrategy, GradScaler, Precision, weights};

use crate::support::*;

const BATCH: usize = 4;

/// The numbers below `len`; some of them cannot be read.
struct Numbers {
    len: usize,
    broken: Option<usize>,
}

impl Dataset<usize> for Numbers {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        if self.broken == Some(index) {
            return Err(DatasetError::new(std::io::Error::other("a bad sector")));
        }
        Ok(index)
    }

    fn len(&self) -> usize {
        self.len
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Samples {
    x: Tensor<2>,
    y: Tensor<2>,
    slow: Option<Duration>,
}

#[derive(Clone, Default)]
struct Sampling {
    slow: Option<Duration>,
}

impl Batcher<usize, Samples> for Sampling {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Samples {
        let (x, y) = batch(&items, device);
        let slow = self.slow;
        Samples { x, y, slow }
    }
}

impl Net {
    fn regress(&self, samples: Samples) -> RegressionOutput {
        let Samples { x, y, .. } = samples;
        let x = x.cast(self.first.weight.val().dtype());
        // A single sample has no variance to normalise by.
        let output = match x.dims()[0] {
            1 => self.second.forward(self.first.forward(x)),
            _ => self.forward(x, false),
        };
        let output = output.cast(y.dtype());
        let loss = (output.clone() - y.clone()).powf_scalar(2.0).mean();
        RegressionOutput::new(loss, output, y)
    }
}

impl TrainStep for Net {
    type Input = Samples;
    type Output = RegressionOutput;

    fn step(&self, samples: Samples) -> TrainOutput<RegressionOutput> {
        let output = self.regress(samples);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Net {
    type Input = Samples;
    type Output = RegressionOutput;

    fn step(&self, samples: Samples) -> RegressionOutput {
        let start = Instant::now();
        while samples.slow.is_some_and(|slow| start.elapsed() < slow) {
            std::hint::spin_loop();
        }
        self.regress(samples)
    }
}

type Training = SupervisedTraining<Net>;

fn loader(numbers: Numbers, shuffle: Option<u64>) -> Arc<dyn DataLoader<Samples>> {
    let builder = DataLoaderBuilder::new(Sampling::default()).batch_size(BATCH);
    match shuffle {
        Some(seed) => builder.shuffle(seed).build(numbers),
        None => builder.build(numbers),
    }
}

fn numbers(len: usize) -> Numbers {
    Numbers { len, broken: None }
}

/// Two epochs over `train` and a small validation set; writes no files.
fn training(train: Arc<dyn DataLoader<Samples>>) -> Training {
    SupervisedTraining::new("", train, loader(numbers(8), None))
        .with_metric_logger(InMemoryMetricLogger::new())
        .with_application_logger(None)
        .metrics((LossMetric::new(),))
        .num_epochs(2)
}

fn learner() -> Learner<Net> {
    Learner::new(fixed_net(&device()), optimizer(), 0.01)
}

fn launch(training: Training, group: ProcessGroup, options: DdpOptions) -> LearningResult<Net> {
    let strategy = DdpStrategy::new(group, options);
    training
        .with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)))
        .launch(learner())
}

fn hash(result: &LearningResult<Net>) -> String {
    weights::sha256(&weights::export(&result.model))
}

/// The hash of a training that went well.
fn trained(training: Training, group: ProcessGroup, shards: usize) -> String {
    let result = launch(training, group, options(shards));
    assert!(result.error.is_none(), "{:?}", result.error);
    assert_eq!(result.interrupted, None);
    hash(&result)
}

#[test]
fn one_rank_gives_the_bits_of_burns_single_device_strategy() {
    let device = TrainingStrategy::Default(ExecutionStrategy::SingleDevice(device()));
    let plain = training(loader(numbers(22), Some(7)))
        .with_training_strategy(device)
        .launch(learner());
    let group = ranks(1, |group| group).remove(0);
    let ours = trained(training(loader(numbers(22), Some(7))), group, 1);
    assert_eq!(ours, hash(&plain));
}

/// Two epochs over 15 samples in two shards, by hand.
fn by_hand(group: ProcessGroup) -> String {
    let device = device();
    let mut optimizer = optimizer();
    let (mut ddp, mut net) = Ddp::new(group, fixed_net(&device), options(2)).expect("ranks agree");
    for step in [0, 1, 0, 1] {
        let reduced = ddp.step(&net, |shard| {
            let first = shard.shard() * 8 + step * BATCH;
            let indices: Vec<usize> = (first..15.min(first + BATCH)).collect();
            let loss = loss(&shard.model()?, &indices, false, &device);
            shard.backward(loss, indices.len() as f32)
        });
        let reduced = reduced.unwrap_or_else(|error: DdpError| panic!("{error}"));
        net = optimizer.step(0.01, net, reduced.grads);
    }
    weights::sha256(&weights::export(&net))
}

#[test]
fn two_ranks_give_the_bits_of_a_loop_written_by_hand() {
    let expected = by_hand(ranks(1, |group| group).remove(0));
    for hash in ranks(2, |group| {
        trained(training(loader(numbers(15), None)), group, 2)
    }) {
        assert_eq!(hash, expected);
    }
}

#[test]
fn data_that_does_not_divide_ends_on_all_ranks_at_once_with_the_same_weights() {
    // Slices of 5 and 4: two batches against one. Slices of 1, 1 and 0: some shards have nothing at all.
    for (items, shards) in [(9, 2), (2, 3), (13, 3), (0, 2)] {
        let train = |group| trained(training(loader(numbers(items), Some(3))), group, shards);
        let expected = train(ranks(1, |group| group).remove(0));
        for hash in ranks(2, train) {
            assert_eq!(hash, expected, "{items} items, {shards} shards");
        }
    }
}

#[test]
fn a_training_in_bf16_gives_the_same_bits_on_any_number_of_ranks() {
    let train = |precision| {
        move |group| {
            let options = DdpOptions {
                precision,
                ..options(3)
            };
            let result = launch(training(loader(numbers(22), Some(7))), group, options);
            assert!(result.error.is_none(), "{:?}", result.error);
            hash(&result)
        }
    };
    let alone = ranks(1, train(Precision::Bf16)).remove(0);
    assert_eq!(ranks(3, train(Precision::Bf16)), vec![alone.clone(); 3]);
    assert_ne!(ranks(1, train(Precision::F32)), [alone]);
}

#[test]
fn a_scaler_is_refused_because_steps_run_their_own_backward_pass() {
    let errors = ranks(2, |group| {
        let options = DdpOptions {
            scaler: Some(GradScaler::default()),
            ..options(2)
        };
        let result = launch(training(loader(numbers(8), None)), group, options);
        result.error.map(|error| format!("{error:?}"))
    });
    for error in errors {
        let error = error.expect("refused");
        assert!(error.contains("gradient scaler: burn-train"), "{error}");
    }
}

#[test]
fn accumulation_adds_gradients_as_burn_does() {
    // Plain gradient descent shows the scale that Adam hides.
    let learner = || {
        let optimizer = burn::optim::SgdConfig::new().init();
        Learner::new(fixed_net(&device()), optimizer, 0.01)
    };
    // Five batches of four: steps of two batches, two, and one.
    let train = || training(loader(numbers(20), None)).grads_accumulation(2);
    let values = |result: LearningResult<Net>| -> Vec<f32> {
        let tensors = weights::export(&result.model).into_iter();
        let trained = tensors.filter(|(path, _)| !path.starts_with("norm.running"));
        trained
            .flat_map(|(_, data)| data.try_to_vec::<f32>().expect("f32"))
            .collect()
    };
    let train_on = |strategy| {
        let result = train().with_training_strategy(strategy);
        values(result.launch(learner()))
    };
    let plain = train_on(TrainingStrategy::Default(ExecutionStrategy::SingleDevice(
        device(),
    )));
    let group = ranks(1, |group| group).remove(0);
    let strategy = DdpStrategy::new(group, options(1));
    let ours = train_on(TrainingStrategy::Custom(Arc::new(strategy)));
    for (a, b) in plain.iter().zip(&ours) {
        assert!((a - b).abs() < 1e-5, "{a} and {b}");
    }
}

#[test]
fn a_stop_on_one_rank_stops_all_after_the_same_step() {
    let found = ranks(2, |group| {
        let rank = group.rank();
        let training = training(loader(numbers(64), None)).num_epochs(1000);
        let interrupter = training.interrupter();
        if rank == 1 {
            interrupter.stop(Some("lunch"));
        }
        let result = launch(training, group, options(2));
        assert!(result.error.is_none(), "{:?}", result.error);
        let reason = result.interrupted.as_ref().and_then(|i| i.reason.clone());
        (hash(&result), reason.expect("a reason"))
    });
    assert_eq!(found[0].0, found[1].0);
    assert_eq!(found[0].1, "rank 1 was asked to stop: lunch");
    assert_eq!(found[1].1, "lunch");
}

#[test]
fn a_signal_interrupts_all_ranks_after_the_same_step() {
    let found = ranks(2, |group| {
        if group.rank() == 1 {
            group.page().request_stop(15);
        }
        let training = training(loader(numbers(64), None)).num_epochs(1000);
        let options = DdpOptions {
            stop_on_signal: true,
            ..options(2)
        };
        let result = launch(training, group, options);
        assert!(result.error.is_none(), "{:?}", result.error);
        let reason = result.interrupted.as_ref().and_then(|i| i.reason.clone());
        (hash(&result), reason.expect("a reason"))
    });
    assert_eq!(found[0], found[1]);
    assert_eq!(found[0].1, "the job was asked to stop by SIGTERM");
}

#[test]
fn a_sample_that_one_rank_cannot_read_is_an_error_on_all() {
    let found = ranks(2, |group| {
        let data = Numbers {
            len: 64,
            broken: Some(50),
        };
        let result = launch(training(loader(data, None)), group, options(2));
        (hash(&result), result.error.expect("an error").to_string())
    });
    assert_eq!(found[0].0, found[1].0);
    assert_eq!(
        found[0].1,
        "training worker on device 1 failed: Dataset error: a bad sector"
    );
    assert_eq!(found[1].1, "Dataset error: a bad sector");
}

#[test]
fn ranks_with_different_data_do_not_begin() {
    let found = ranks(2, |group| {
        let len = 16 + group.rank();
        let result = launch(training(loader(numbers(len), None)), group, options(2));
        result.error.expect("an error").to_string()
    });
    for error in found {
        assert_eq!(
            error,
            "training worker on device 1 failed: ranks do not agree on setting training items: \
             rank 0 has 16, rank 1 has 17"
        );
    }
}

#[test]
fn a_rank_that_dies_is_an_error_on_the_others() {
    let found = ranks(2, |group| {
        let rank = group.rank();
        if rank == 1 {
            group.abort("the power went out");
        }
        let result = launch(training(loader(numbers(16), None)), group, options(2));
        result.error.expect("an error").to_string()
    });
    assert!(found[0].contains("device 1"), "{}", found[0]);
    assert!(found[0].contains("the power went out"), "{}", found[0]);
}

/// Stops after an epoch; panics on ranks other than 0.
#[derive(Clone)]
struct After(Range<usize>);

impl EarlyStoppingStrategy for After {
    fn should_stop(&mut self, epoch: usize, _store: &EventStoreClient) -> bool {
        assert!(!self.0.is_empty(), "only rank 0 decides");
        !self.0.contains(&epoch)
    }
}

#[test]
fn early_stopping_is_decided_by_rank_0_for_all() {
    let hashes = ranks(2, |group| {
        let epochs = if group.rank() == 0 { 1..2 } else { 0..0 };
        let training = training(loader(numbers(15), None)).num_epochs(1000);
        trained(training.early_stopping(After(epochs)), group, 2)
    });
    let two_epochs = by_hand(ranks(1, |group| group).remove(0));
    assert_eq!(hashes, [two_epochs.clone(), two_epochs]);
}

#[test]
fn early_stopping_sees_the_metrics_of_the_epoch_on_rank_0() {
    // The loss cannot improve forever with a learning rate of zero.
    let errors = ranks(2, |group| {
        let stopping = MetricEarlyStoppingStrategy::new(
            &LossMetric::new(),
            Aggregate::Mean,
            Direction::Lowest,
            Split::Valid,
            StoppingCondition::NoImprovementSince { n_epochs: 2 },
        );
        let strategy = DdpStrategy::new(group, options(2));
        let result = training(loader(numbers(16), None))
            .num_epochs(usize::MAX)
            .early_stopping(stopping)
            .with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)))
            .launch(Learner::new(fixed_net(&device()), optimizer(), 0.0));
        result.error
    });
    assert!(errors.iter().all(Option::is_none), "{errors:?}");
}

#[test]
fn validation_may_last_longer_than_the_timeout() {
    let options = GroupOptions {
        timeout: Duration::from_secs(2),
        ..group_options()
    };
    let slow = Sampling {
        slow: Some(Duration::from_millis(300)),
    };
    let groups = ProcessGroup::local(2, &options).expect("a local group");
    let start = Instant::now();
    std::thread::scope(|scope| {
        for group in groups {
            let valid = DataLoaderBuilder::new(slow.clone())
                .batch_size(1)
                .build(numbers(10));
            scope.spawn(move || {
                let training = SupervisedTraining::new("", loader(numbers(8), None), valid)
                    .with_metric_logger(InMemoryMetricLogger::new())
                    .with_application_logger(None);
                trained(training, group, 2)
            });
        }
    });
    assert!(start.elapsed() > options.timeout, "not slow enough");
}

/// Trains on two ranks from epoch `from` (0: the beginning) to epoch `to`, with checkpoints in `folder`.
fn resumable(folder: &Path, from: usize, to: usize) -> Vec<String> {
    ranks(2, |group| {
        let train = loader(numbers(16), None);
        let training = SupervisedTraining::new(folder, train, loader(numbers(8), None))
            .with_metric_logger(InMemoryMetricLogger::new())
            .with_application_logger(None)
            .metrics((LossMetric::new(),))
            .with_default_checkpointers()
            .num_epochs(to);
        let training = match from {
            0 => training,
            from => training.checkpoint(from),
        };
        trained(training, group, 2)
    })
}

#[test]
fn a_resumed_training_ends_with_the_bits_of_one_that_was_not_interrupted() {
    let (whole, parts) = (tempfile::tempdir(), tempfile::tempdir());
    let (whole, parts) = (whole.expect("a folder"), parts.expect("a folder"));
    let expected = resumable(whole.path(), 0, 2);
    resumable(parts.path(), 0, 1);
    assert_eq!(resumable(parts.path(), 1, 2), expected);
}

#[test]
fn an_interrupter_given_from_outside_is_heard_between_epochs() {
    // Nothing to train on: the ranks meet only after validation.
    let found = ranks(2, |group| {
        let interrupter = Interrupter::new();
        if group.rank() == 1 {
            interrupter.stop(None);
        }
        let training = training(loader(numbers(0), None)).with_interrupter(interrupter);
        let result = launch(training.num_epochs(usize::MAX), group, options(2));
        result.interrupted.expect("an interruption").reason
    });
    assert_eq!(
        found,
        [
            Some("rank 1 was asked to stop: no reason given".into()),
            None
        ]
    );
}
