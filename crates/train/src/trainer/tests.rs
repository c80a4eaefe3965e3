//! Whole jobs on threads, with a rank whose weights go wrong.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use burn::module::Module;
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::optim::{ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Tensor, TensorData};
use paceline_checkpoint::ledger::Audit;
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_ddp::weights;

use super::{End, train, train_task};
use crate::config::{Given, Inputs, JobShape, Surroundings, TrainConfig};
use crate::console::Output;
use crate::error::TrainError;
use crate::run_dir;
use crate::task::{Compute, Loss, Part, Step, StepFigures, TrainTask};

/// What the weights of a rank get at the start of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// Another value.
    Value,
    /// A NaN, from which the loss gets one.
    Nan,
}

/// The folder of a run, and the ranks and steps of its faults, each of which happens once.
type Planned = (PathBuf, Vec<(usize, u64, Fault)>);

static FAULTS: Mutex<Vec<Planned>> = Mutex::new(Vec::new());

/// `net` at the start of a step.
pub(super) fn disturbed<M: Module>(net: M, run: &Path, rank: usize, step: u64) -> M {
    let mut planned = FAULTS.lock().expect("no test has panicked");
    let faults = planned.iter_mut().filter(|(of, _)| of == run);
    let mut due = faults.flat_map(|(_, faults)| {
        let at = faults
            .iter()
            .position(|(of, at, _)| (*of, *at) == (rank, step));
        at.map(|at| faults.remove(at).2)
    });
    let Some(fault) = due.next() else {
        return net;
    };
    // The last one is a norm's or a bias, of which every rank has the whole.
    let (path, data) = weights::export(&net).pop().expect("a parameter");
    let mut values: Vec<f32> = data.try_to_vec().expect("f32");
    values[0] = match fault {
        Fault::Value => values[0] + 0.5,
        Fault::Nan => f32::NAN,
    };
    let wrong = TensorData::new(values, data.shape().clone());
    weights::import(net, [(path, wrong)].into())
}

fn config(run: &Path, world: usize, more: &[(&str, &str)]) -> TrainConfig {
    let flags = [
        ("model", "tiny"),
        ("epochs", "2"),
        ("snapshot_every", "10"),
        ("save_every", "4"),
        ("run_dir", run.to_str().expect("a plain path")),
    ];
    let flags = flags.iter().chain(more);
    let flags = flags.map(|(key, value)| (key.to_string(), value.to_string()));
    let inputs = Inputs {
        flags: flags.collect(),
        ..Inputs::default()
    };
    let surroundings = Surroundings {
        job: Some(JobShape {
            world,
            local_world: world,
            recovers_live: false,
        }),
        ..Surroundings::of_process()
    };
    let resolved = Given::read(&inputs).expect("valid");
    let resolved = resolved.resolve(None, &surroundings).expect("valid");
    resolved.config().clone()
}

/// How each rank of a job with these faults ends.
fn ends(
    config: &TrainConfig,
    world: usize,
    faults: &[(usize, u64, Fault)],
) -> Vec<Result<End, TrainError>> {
    let mut planned = FAULTS.lock().expect("no test has panicked");
    planned.push((config.run_dir.clone(), faults.to_vec()));
    drop(planned);
    let groups = ProcessGroup::local(world, &GroupOptions::default()).expect("a local group");
    paceline_testing::on_threads(groups, |group| train(config, group, Output::Json))
}

/// A job whose ranks have these faults: its ledger and its records of steps.
fn trained(config: &TrainConfig, world: usize, faults: &[(usize, u64, Fault)]) -> Ended {
    let run = &config.run_dir;
    // Weights that differ at the end would be an error.
    for end in ends(config, world, faults) {
        assert_eq!(end.expect("it ends well"), End::Finished);
    }
    let lines = std::fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    let records = lines.lines().map(|line| {
        let record: serde_json::Value = serde_json::from_str(line).expect("JSON");
        record
    });
    let steps = records.filter(|record| record["kind"] == "step");
    let ledger = paceline_checkpoint::ledger::audit(&run_dir::checkpoints(run));
    let ledger = ledger.expect("a ledger");
    assert_eq!(ledger.faults, []);
    Ended {
        ledger,
        steps: steps.collect(),
    }
}

struct Ended {
    ledger: Audit,
    steps: Vec<serde_json::Value>,
}

impl Ended {
    /// Each step has one record, in order.
    #[track_caller]
    fn has_each_step_once(&self) {
        let numbers = self.steps.iter();
        let numbers: Vec<u64> = numbers
            .filter_map(|record| record["step"].as_u64())
            .collect();
        assert_eq!(numbers, (1..=46).collect::<Vec<_>>());
        assert_eq!(self.ledger.steps, 46);
        let epochs = self.ledger.epochs.iter();
        assert!(epochs.map(|epoch| epoch.once).eq([1437, 1437]));
    }
}

#[test]
fn a_job_goes_back_from_wrong_weights_and_each_step_counts_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = config(folder.path(), 3, &[("shards", "3")]);
    let ended = trained(&config, 3, &[(2, 25, Fault::Value)]);
    ended.has_each_step_once();
    assert!(ended.ledger.rolled_back > 0, "it has gone back");
}

#[test]
fn parts_that_end_with_different_weights_are_told_by_a_rank_of_the_job() {
    let folder = tempfile::tempdir().expect("a folder");
    let flags = [
        ("task", "lm"),
        ("model", "gpt-1m"),
        ("layers", "1"),
        ("heads", "2"),
        ("width", "8"),
        ("context", "8"),
        ("shards", "1"),
        ("global_batch", "512"),
        ("epochs", "1"),
        ("tp", "2"),
        ("snapshot_every", "0"),
    ];
    let config = config(folder.path(), 2, &flags);
    for end in ends(&config, 2, &[(1, 0, Fault::Value)]) {
        let error = end.expect_err("the parts differ");
        let says = "no majority agrees on the model";
        assert!(error.to_string().contains(says), "{error}");
        // No group of replicas has a second rank.
        assert!(matches!(error, TrainError::Ended(_)), "{error}");
        // Of two, none is the odd one.
        assert_eq!(error.spokesman(), Some(0));
    }
}

#[test]
fn a_job_goes_back_from_a_nan_and_gives_up_the_same_steps_on_any_number_of_ranks_and_resumed() {
    let flags = [("shards", "4"), ("non_finite", "back"), ("keep", "100")];
    let planned = |world: usize, steps: &[u64]| -> Vec<_> {
        let of_ranks = |step: u64| (0..world).map(move |rank| (rank, step, Fault::Nan));
        steps.iter().copied().flat_map(of_ranks).collect()
    };
    for (world, resumed_on) in [(1, 4), (4, 2)] {
        let folder = tempfile::tempdir().expect("a folder");
        let mut config = self::config(folder.path(), world, &flags);
        let ended = trained(&config, world, &planned(world, &[0, 14, 20, 30]));
        ended.has_each_step_once();
        let given_up = |ended: &Ended| -> Vec<_> {
            let attempts = ended.ledger.attempts.iter();
            let given_up = attempts.flat_map(|attempt| &attempt.given_up);
            given_up.map(|of| (of.first, of.last, of.samples)).collect()
        };
        // No step has followed the state of step 20 when step 21 fails. An epoch ends with step 23.
        let expected = [(1, 1, 64), (11, 15, 320), (16, 21, 384), (22, 31, 605)];
        assert_eq!(given_up(&ended), expected);
        assert_eq!(ended.ledger.skipped, 0);
        let back_to: Vec<_> = ended
            .steps
            .iter()
            .map(|record| record["back_to"].as_u64())
            .collect();
        assert_eq!(back_to[14], Some(10));
        assert_eq!(back_to.iter().flatten().count(), 4);

        // No checkpoint of a step that was given up is left.
        let checkpoints = run_dir::checkpoints(folder.path());
        let saved = |checkpoint: &PathBuf| {
            let name = checkpoint.file_name().expect("a name").to_string_lossy();
            name.trim_start_matches("step-")
                .parse::<u64>()
                .expect("a step")
        };
        let mut left = paceline_checkpoint::list(&checkpoints);
        assert_eq!(
            left.iter().map(saved).collect::<Vec<_>>(),
            [1, 4, 8, 15, 21, 31, 32, 36, 40, 44, 46]
        );
        left.retain(|checkpoint| saved(checkpoint) > 15);
        left.iter()
            .for_each(|later| std::fs::remove_dir_all(later).expect("removed"));
        config.resume = true;
        let resumed = trained(&config, resumed_on, &planned(resumed_on, &[20, 30]));
        resumed.has_each_step_once();
        assert_eq!(given_up(&resumed), expected);
    }
}

/// y = 2 x, with an optimizer of its own.
struct Line;

impl TrainTask for Line {
    type Model = Linear;
    type Batch = Vec<f32>;

    fn open(_: &TrainConfig, _: Option<&ProcessGroup>) -> Result<Self, TrainError> {
        Ok(Self)
    }

    fn name(&self) -> &str {
        "line"
    }

    fn len(&self, _: Part) -> usize {
        1437
    }

    fn model(&self, _: &TrainConfig, device: &Device) -> Result<Linear, TrainError> {
        // Tests that run at the same time share the generator of random weights.
        let begin = Initializer::Constant { value: 0.4 };
        let config = LinearConfig::new(1, 1).with_initializer(begin);
        Ok(config.init(device))
    }

    fn optimizer(&self, _: &TrainConfig, _: &Linear) -> Result<ModuleOptimizer, TrainError> {
        Ok(SgdConfig::new().build().into())
    }

    fn batch(
        &self,
        _: Part,
        _: Option<u64>,
        indices: impl Iterator<Item = usize>,
    ) -> Result<Vec<f32>, TrainError> {
        Ok(indices.map(|index| index as f32 / 1437.0).collect())
    }

    fn loss(
        &self,
        model: &Linear,
        batch: &Vec<f32>,
        compute: Compute<'_>,
    ) -> Result<Loss, TrainError> {
        let count = batch.len();
        let x = TensorData::new(batch.clone(), [count, 1]);
        let x = Tensor::<2>::from_data(x, compute.device);
        let y = model.forward(x.clone());
        Ok(Loss::new((y - x * 2.0).square().mean(), count))
    }

    /// Keeps the slope below that of the data.
    fn after_step(&self, model: Linear, step: &Step) -> Result<(Linear, StepFigures), TrainError> {
        let below = |weight: Tensor<2>| {
            Tensor::from_inner(weight.inner().clamp(-1.0, SLOPE_MAX)).require_grad()
        };
        let model = Linear {
            weight: model.weight.map(below),
            ..model
        };
        let slope = model.weight.val().into_scalar::<f32>();
        let figures = vec![("slope", slope.into()), ("double", 2.0 * step.loss)];
        Ok((model, figures))
    }
}

const SLOPE_MAX: f32 = 0.5;

#[test]
fn a_task_may_change_the_model_after_each_step_and_add_figures() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = config(folder.path(), 1, &[("lr", "0.1")]);
    let group = ProcessGroup::local(1, &GroupOptions::default()).expect("a local group");
    let group = group.into_iter().next().expect("a rank");
    train_task::<Line>(&config, group, Output::Json).expect("trained");
    let lines = std::fs::read_to_string(folder.path().join("metrics.jsonl")).expect("metrics");
    let lines = lines
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"));
    let steps: Vec<serde_json::Value> = lines
        .filter(|line: &serde_json::Value| line["kind"] == "step")
        .collect();
    let slopes = steps.iter().map(|step| step["slope"].as_f64());
    let slopes: Vec<f64> = slopes.map(|slope| slope.expect("a figure")).collect();
    assert!(slopes.iter().all(|slope| *slope <= f64::from(SLOPE_MAX)));
    assert_eq!(
        slopes.last(),
        Some(&f64::from(SLOPE_MAX)),
        "it wants to be 2"
    );
    let last = steps.last().expect("steps");
    let [loss, double] = ["loss", "double"].map(|key| last[key].as_f64().expect("a number"));
    assert!((double - 2.0 * loss).abs() < 1e-6 * loss, "{last}");
}

#[test]
fn an_optimizer_that_keeps_no_averages_is_refused_after_the_first_step() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = config(folder.path(), 1, &[("ema", "0.9")]);
    let group = ProcessGroup::local(1, &GroupOptions::default()).expect("a local group");
    let group = group.into_iter().next().expect("a rank");
    let error = train_task::<Line>(&config, group, Output::Json).expect_err("no averages");
    let expected = "`ema` is 0.9, but the task's optimizer keeps no averages";
    assert_eq!(error.to_string(), expected);
    let lines = std::fs::read_to_string(folder.path().join("metrics.jsonl")).expect("metrics");
    assert!(!lines.contains("\"kind\":\"step\""), "{lines}");
}
