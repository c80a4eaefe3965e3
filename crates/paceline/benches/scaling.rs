//! How much faster two ranks are than one: samples per second at the same global batch, one compute thread per rank.
//!
//! ```text
//! cargo bench -p paceline --bench scaling            # a table, and raw results with --out FILE
//! cargo bench -p paceline --bench scaling -- --rounds 9
//! ```
//!
//! A third workload is the same perceptron at a batch of 128 for each rank: what a second rank adds to a step's time.
//!
//! Two workloads: the multi-layer perceptron 784-1024-1024-10 with AdamW at a global batch of 1,024 (7.5 MB of gradients),
//! and the network that `paceline train` trains on the digits at its default batch of 64. Every round runs one rank and
//! two ranks right after one another, and the ratio is taken round by round, so that a machine that changes its speed does
//! not decide the result. Run by `cargo test` it makes one tiny round and checks only that everything works.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
use paceline::{Ddp, DdpError, DdpOptions};
use paceline_launch::{Console, Job};
use paceline_rendezvous::token::Token;
use paceline_train::config::ModelSize;
use paceline_train::data::Features;
use paceline_train::model::Net;
use serde::{Deserialize, Serialize};

/// Variable that tells a rank what to do, as JSON; absent in the process that starts the ranks.
const TASK_VARIABLE: &str = "PACELINE_BENCH_TASK";

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Task {
    workload: Workload,
    steps: usize,
    warmup: usize,
    out: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Workload {
    Mlp,
    Digits,
    /// The perceptron with the same batch on each rank, however many there are.
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

/// One run of one world: the median step.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Measured {
    workload: Workload,
    world: usize,
    step_seconds: f64,
    waited_seconds: f64,
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
    // `cargo bench` says so; `cargo test` does not.
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
    let mut results = Vec::new();
    for round in 0..rounds {
        for workload in [Workload::Mlp, Workload::Digits, Workload::MlpPerRank] {
            // One rank first in even rounds, two ranks first in odd ones.
            let worlds = if round % 2 == 0 { [1, 2] } else { [2, 1] };
            for world in worlds {
                results.push(measure(workload, world, real)?);
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

fn measure(workload: Workload, world: usize, real: bool) -> Result<Measured, Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let out = folder.path().join("measured.json");
    let steps = match (real, workload) {
        (false, _) => 2,
        (true, Workload::Mlp) => 30,
        (true, Workload::MlpPerRank) => 100,
        (true, Workload::Digits) => 300,
    };
    let task = Task {
        workload,
        steps,
        warmup: steps.div_ceil(6),
        out: out.display().to_string(),
    };
    let program = std::env::current_exe()?;
    let mut job = Job::new(&program, world, Token::generate()?);
    job.console = Console::Prefixed;
    job.threads_per_rank = Some(1);
    job.env
        .push((TASK_VARIABLE.into(), serde_json::to_string(&task)?));
    let outcome = paceline_launch::run(job)?;
    if let Some(failure) = outcome.failure {
        return Err(failure.to_string().into());
    }
    read(&out)
}

fn read(path: &Path) -> Result<Measured, Box<dyn Error>> {
    Ok(serde_json::from_str(&std::fs::read_to_string(path)?)?)
}

/// What one rank does.
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
            steps(task, net, &device, Net::forward)
        }
    }
}

#[derive(Module, Debug)]
struct Mlp {
    first: Linear,
    second: Linear,
    third: Linear,
}

impl Mlp {
    fn new(device: &Device) -> Self {
        Self {
            first: LinearConfig::new(784, 1024).init(device),
            second: LinearConfig::new(1024, 1024).init(device),
            third: LinearConfig::new(1024, 10).init(device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = relu(self.first.forward(x));
        self.third.forward(relu(self.second.forward(x)))
    }
}

fn steps<M: Module>(
    task: &Task,
    net: M,
    device: &Device,
    forward: impl Fn(&M, Tensor<2>) -> Tensor<2>,
) -> Result<(), Box<dyn Error>> {
    let group = paceline::init()?;
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
    let (mut ddp, mut net) = Ddp::new(group.clone(), net, DdpOptions::default())?;
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
    if group.rank() == 0 {
        let measured = Measured {
            workload: task.workload,
            world: group.world(),
            step_seconds: median(&mut seconds),
            waited_seconds: median(&mut waited),
        };
        std::fs::write(&task.out, serde_json::to_string(&measured)?)?;
    }
    Ok(())
}

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
        let of = |world: usize, figure: fn(&Measured) -> f64| -> Vec<f64> {
            results
                .iter()
                .filter(|m| m.workload == workload && m.world == world)
                .map(figure)
                .collect()
        };
        let (one, two) = (of(1, |m| m.step_seconds), of(2, |m| m.step_seconds));
        let mut ratios: Vec<f64> = one.iter().zip(&two).map(|(a, b)| a / b).collect();
        let middle = median(&mut ratios);
        let rate = |mut seconds: Vec<f64>| workload.global_batch(1) as f64 / median(&mut seconds);
        let waited = median(&mut of(2, |m| m.waited_seconds)) * 1e6;
        text += &format!(
            "| {} | {:.0} | {:.0} | {middle:.2} ({:.2} to {:.2}) | {waited:.0} us |\n",
            workload.name(),
            rate(one),
            rate(two),
            ratios[0],
            ratios[ratios.len() - 1],
        );
    }
    text + &added(results)
}

/// What the second rank adds to a step with the same work for each.
fn added(results: &[Measured]) -> String {
    let of = |world: usize| -> Vec<f64> {
        let those = results
            .iter()
            .filter(|m| m.workload == Workload::MlpPerRank && m.world == world);
        those.map(|m| m.step_seconds * 1e3).collect()
    };
    let (mut one, mut two) = (of(1), of(2));
    let mut added: Vec<f64> = one.iter().zip(&two).map(|(one, two)| two - one).collect();
    let middle = median(&mut added);
    format!(
        "\n{}: a step takes {:.2} ms on one rank and {:.2} ms on two; the second rank adds {middle:.2} ms ({:.2} to {:.2}).\n",
        Workload::MlpPerRank.name(),
        median(&mut one),
        median(&mut two),
        added[0],
        added[added.len() - 1],
    )
}
