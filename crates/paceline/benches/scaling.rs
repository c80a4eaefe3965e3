//! The speedup of two ranks over one: samples per second at the same global batch, one compute thread per rank.
//!
//! ```text
//! cargo bench -p paceline --bench scaling            # a table, and raw results with --out FILE
//! cargo bench -p paceline --bench scaling -- --rounds 9
//! cargo bench -p paceline --bench scaling -- --torch python3     # beside PyTorch DDP, if that Python has it
//! ```
//!
//! Two workloads: the multi-layer perceptron 784-1024-1024-10 with AdamW at a global batch of 1,024 (7.5 MB of gradients),
//! and the network that `paceline train` trains on the digits at its default batch of 64. Every round runs one rank and two
//! ranks back to back, and the ratio is taken per round, so that changes in the machine's speed do not decide the result.
//! Under `cargo test` it runs one tiny round and only checks that everything works.
//!
//! A third workload measures the cost that data parallelism adds to a step: the same perceptron with a batch of 128 per rank,
//! on one rank, on two independent ranks, and on two ranks that train together. Two busy cores slow each other down (caches,
//! memory, clock) whether they exchange gradients or not; the difference between the last two is the exchange.

#[path = "../../../examples/step_time/workloads/mlp.rs"]
mod mlp;

use std::error::Error;
use std::fmt;
use std::path::Path;
use std::time::Instant;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
use paceline::{Ddp, DdpError, DdpOptions};
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_launch::{Console, Job};
use paceline_rendezvous::env::WorkerEnv;
use paceline_rendezvous::token::Token;
use paceline_train::Network;
use paceline_train::config::ModelSize;
use paceline_train::data::Features;
use paceline_train::model::Net;
use serde::{Deserialize, Serialize};

use mlp::Mlp;

/// Variable with a rank's task as JSON; absent in the process that starts the ranks.
const TASK_VARIABLE: &str = "PACELINE_BENCH_TASK";

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Task {
    workload: Workload,
    arrangement: Arrangement,
    steps: usize,
    warmup: usize,
    out: String,
}

/// The number of ranks, and whether they train together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Arrangement {
    /// One rank.
    Alone,
    /// Two processes at the same time, each its own job.
    Apart,
    /// Two ranks.
    Together,
}

impl Arrangement {
    fn processes(self) -> usize {
        match self {
            Self::Alone => 1,
            Self::Apart | Self::Together => 2,
        }
    }
}

/// The trainer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Trainer {
    Paceline,
    Torch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Workload {
    Mlp,
    Digits,
    /// The perceptron with the same batch on each rank, for any number of ranks.
    MlpPerRank,
}

impl Workload {
    fn name(self) -> &'static str {
        match self {
            Self::Mlp => "mlp, batch 1,024",
            Self::Digits => "digits, batch 64",
            Self::MlpPerRank => "mlp, batch 128 per rank",
        }
    }

    fn global_batch(self, world: usize) -> usize {
        match self {
            Self::Mlp => 1024,
            Self::Digits => 64,
            Self::MlpPerRank => 128 * world,
        }
    }

    fn inputs(self) -> usize {
        match self {
            Self::Mlp | Self::MlpPerRank => 784,
            Self::Digits => 64,
        }
    }
}

/// One run: the median step of rank 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Measured {
    trainer: Trainer,
    workload: Workload,
    arrangement: Arrangement,
    step_seconds: f64,
    /// Time in which the step waited for gradients; unknown for PyTorch.
    waited_seconds: Option<f64>,
}

/// The output of the PyTorch script.
#[derive(Debug, Deserialize)]
struct PeerStep {
    step_seconds: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    if let Ok(task) = std::env::var(TASK_VARIABLE) {
        return rank(&serde_json::from_str(&task)?);
    }
    let args: Vec<String> = std::env::args().collect();
    let value = |name: &str| {
        args.iter()
            .position(|a| a == name)
            .and_then(|at| args.get(at + 1))
    };
    // `cargo bench` passes this flag; `cargo test` does not.
    let real = args.iter().any(|arg| arg == "--bench");
    let rounds = match value("--rounds") {
        Some(rounds) => rounds.parse()?,
        None => {
            if real {
                7
            } else {
                1
            }
        }
    };
    let torch = value("--torch").map(Path::new);
    let mut results = Vec::new();
    for round in 0..rounds {
        for workload in [Workload::Mlp, Workload::Digits, Workload::MlpPerRank] {
            let mut arrangements = match workload {
                Workload::MlpPerRank => vec![
                    Arrangement::Alone,
                    Arrangement::Apart,
                    Arrangement::Together,
                ],
                _ => vec![Arrangement::Alone, Arrangement::Together],
            };
            // One rank first in even rounds, two ranks first in odd ones.
            if round % 2 == 1 {
                arrangements.reverse();
            }
            for arrangement in arrangements {
                results.push(measure(workload, arrangement, real)?);
                if let (Some(python), Workload::MlpPerRank) = (torch, workload) {
                    results.push(measure_torch(python, arrangement)?);
                }
            }
        }
    }
    print!("{}", table(&results));
    if let Some(path) = value("--out") {
        let lines: Result<Vec<String>, _> = results.iter().map(serde_json::to_string).collect();
        std::fs::write(path, lines?.join("\n") + "\n")?;
    }
    Ok(())
}

fn measure(
    workload: Workload,
    arrangement: Arrangement,
    real: bool,
) -> Result<Measured, Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let out = folder.path().join("measured.json");
    let steps = match (real, workload) {
        (false, _) => 2,
        (true, Workload::Mlp) => 30,
        (true, Workload::MlpPerRank) => 200,
        (true, Workload::Digits) => 300,
    };
    let task = Task {
        workload,
        arrangement,
        steps,
        warmup: steps.div_ceil(6),
        out: out.display().to_string(),
    };
    let mut job = Job::new(
        std::env::current_exe()?,
        arrangement.processes(),
        Token::generate()?,
    );
    job.env
        .push((TASK_VARIABLE.into(), serde_json::to_string(&task)?));
    run(job)?;
    Ok(serde_json::from_str(&std::fs::read_to_string(out)?)?)
}

/// Measures PyTorch DDP over Gloo in the same arrangement, with the same launcher.
fn measure_torch(python: &Path, arrangement: Arrangement) -> Result<Measured, Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let out = folder.path().join("measured.json");
    let mut job = Job::new(python, arrangement.processes(), Token::generate()?);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/peers/ddp.py");
    let mode = if arrangement == Arrangement::Together {
        "together"
    } else {
        "apart"
    };
    job.args = vec![script.into(), mode.into(), out.clone().into()];
    run(job)?;
    let step: PeerStep = serde_json::from_str(&std::fs::read_to_string(out)?)?;
    Ok(Measured {
        trainer: Trainer::Torch,
        workload: Workload::MlpPerRank,
        arrangement,
        step_seconds: step.step_seconds,
        waited_seconds: None,
    })
}

/// Runs a job with one compute thread per rank.
fn run(mut job: Job) -> Result<(), Box<dyn Error>> {
    job.console = Console::Prefixed;
    job.threads_per_rank = Some(1);
    match paceline_launch::run(job)?.failure {
        Some(failure) => Err(failure.to_string().into()),
        None => Ok(()),
    }
}

/// Runs one rank.
fn rank(task: &Task) -> Result<(), Box<dyn Error>> {
    let device = Device::flex().autodiff();
    device.seed(0);
    match task.workload {
        Workload::Mlp | Workload::MlpPerRank => {
            let net = Mlp::new(&device);
            steps(task, net, &device, Mlp::forward)
        }
        Workload::Digits => {
            let features = Features::Image {
                height: 8,
                width: 8,
                channels: 1,
            };
            let net = Net::new(features, 10, ModelSize::Small, &device);
            let forward = |net: &Net, input| net.forward(features, input);
            steps(task, net, &device, forward)
        }
    }
}

fn steps<M: Module>(
    task: &Task,
    net: M,
    device: &Device,
    forward: impl Fn(&M, Tensor<2>) -> Tensor<2>,
) -> Result<(), Box<dyn Error>> {
    let env = WorkerEnv::from_process()?;
    let group = match task.arrangement {
        Arrangement::Apart => ProcessGroup::local(1, &GroupOptions::default())?.remove(0),
        _ => paceline::init()?,
    };
    let batch = task.workload.global_batch(group.world()) / group.world();
    let input = Tensor::<2>::random(
        [batch, task.workload.inputs()],
        Distribution::Default,
        device,
    );
    let labels: Vec<i32> = (0..batch as i32).map(|i| i % 10).collect();
    let labels = Tensor::<1, Int>::from_data(TensorData::new(labels, [batch]), device);
    let loss = CrossEntropyLossConfig::new().init(device);
    let mut optimizer = AdamWConfig::new().init();
    let options = DdpOptions {
        shards: Some(group.world()),
        ..DdpOptions::default()
    };
    let (mut ddp, mut net) = Ddp::new(group.clone(), net, options)?;
    let (mut seconds, mut waited) = (Vec::new(), Vec::new());
    for step in 0..task.warmup + task.steps {
        group.barrier()?;
        let start = Instant::now();
        let reduced = ddp.step(&net, |shard| {
            let scores = forward(&shard.model()?, input.clone());
            shard.backward(loss.forward(scores, labels.clone()), batch as f32)?;
            Ok::<(), DdpError>(())
        })?;
        waited.push(reduced.timeline.waited().as_secs_f64());
        net = optimizer.step(1e-3, net, reduced.grads);
        if step >= task.warmup {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    if env.rank == 0 {
        let measured = Measured {
            trainer: Trainer::Paceline,
            workload: task.workload,
            arrangement: task.arrangement,
            step_seconds: median(&mut seconds),
            waited_seconds: Some(median(&mut waited)),
        };
        std::fs::write(&task.out, serde_json::to_string(&measured)?)?;
    }
    Ok(())
}

/// Sorts `values` and returns the median. `values` must not be empty.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// One row per workload: median samples per second of one rank and of two, and the ratio with its spread.
fn table(results: &[Measured]) -> String {
    let mut text = String::from(
        "| workload | 1 rank, samples/s | 2 ranks, samples/s | ratio, median (min to max) | waiting per step, 2 ranks |\n\
         |---|---|---|---|---|\n",
    );
    for workload in [Workload::Mlp, Workload::Digits] {
        let of = |arrangement, figure: fn(&Measured) -> f64| -> Vec<f64> {
            results
                .iter()
                .filter(|m| m.workload == workload && m.arrangement == arrangement)
                .map(figure)
                .collect()
        };
        let one = of(Arrangement::Alone, |m| m.step_seconds);
        let two = of(Arrangement::Together, |m| m.step_seconds);
        let waited = of(Arrangement::Together, |m| m.waited_seconds.unwrap_or(0.0));
        let ratios = one.iter().zip(&two).map(|(a, b)| a / b).collect();
        let rate = |seconds: Vec<f64>| workload.global_batch(1) as f64 / Spread::of(seconds).median;
        text += &format!(
            "| {} | {:.0} | {:.0} | {:.2} | {:.0} us |\n",
            workload.name(),
            rate(one),
            rate(two),
            Spread::of(ratios),
            Spread::of(waited).median * 1e6,
        );
    }
    text + &added(results)
}

/// The time that training together adds to a step with the same work per rank.
fn added(results: &[Measured]) -> String {
    let mut text = format!(
        "\n{}, ms per step, median (min to max):\n\n\
         | | 1 rank | 2 apart | 2 together | together - apart | together - 1 rank |\n|---|---|---|---|---|---|\n",
        Workload::MlpPerRank.name()
    );
    for trainer in [Trainer::Paceline, Trainer::Torch] {
        let of = |arrangement| -> Vec<f64> {
            let those = results.iter().filter(|m| {
                m.workload == Workload::MlpPerRank
                    && m.arrangement == arrangement
                    && m.trainer == trainer
            });
            those.map(|m| m.step_seconds * 1e3).collect()
        };
        let alone = of(Arrangement::Alone);
        let apart = of(Arrangement::Apart);
        let together = of(Arrangement::Together);
        if alone.is_empty() {
            continue;
        }
        let more = |base: &[f64]| {
            let pairs = together.iter().zip(base);
            Spread::of(pairs.map(|(with, without)| with - without).collect())
        };
        let (exchange, second) = (more(&apart), more(&alone));
        text += &format!(
            "| {} | {:.1} | {:.1} | {:.1} | {exchange:.1} | {second:.1} |\n",
            match trainer {
                Trainer::Paceline => "paceline",
                Trainer::Torch => "PyTorch DDP, Gloo",
            },
            Spread::of(alone),
            Spread::of(apart),
            Spread::of(together),
        );
    }
    text
}

/// Median and range of some values.
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Self {
        Self {
            median: median(&mut values),
            min: values[0],
            max: values[values.len() - 1],
        }
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(2);
        let Self { median, min, max } = self;
        write!(f, "{median:.digits$} ({min:.digits$} to {max:.digits$})")
    }
}
