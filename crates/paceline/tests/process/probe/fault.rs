//! A small training program that misbehaves on request; the fault tests start it as ranks.
//!
//! `probe fault --dir DIR --fault NAME [--rank N] [--step N] [--recovery live]` trains a small model for some steps. The named rank
//! has the fault at that step. For the tests it writes into DIR: `rank<N>.pid`, `fault.at`, and for every rank that sees an error
//! `rank<N>.noticed` with the time and the error. The rank prints a line when its fault occurs.

use std::env::Args;
use std::fmt::Display;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use paceline::{Ddp, DdpOptions, ProcessGroup, Recovery, weights};
use rustix::process::{Signal, getpid, kill_process};

/// Steps of a run without a fault.
const STEPS: u64 = 40;
/// Longer than any test waits.
const FOREVER: Duration = Duration::from_secs(300);

#[derive(Module, Debug)]
struct Net {
    hidden: Linear,
    output: Linear,
}

/// The fault, its rank and its step.
struct Plan {
    dir: PathBuf,
    fault: String,
    rank: usize,
    step: u64,
    recovery: Recovery,
}

impl Plan {
    fn new(mut args: Args) -> Self {
        let mut plan = Self {
            dir: PathBuf::new(),
            fault: String::new(),
            rank: 1,
            step: 5,
            recovery: Recovery::None,
        };
        while let Some(flag) = args.next() {
            let value = args.next().expect("the flag has a value");
            match flag.as_str() {
                "--dir" => plan.dir = value.into(),
                "--fault" => plan.fault = value,
                "--rank" => plan.rank = value.parse().expect("a rank"),
                "--recovery" => plan.recovery = Recovery::Live,
                "--step" => plan.step = value.parse().expect("a step"),
                _ => panic!("unknown flag {flag}"),
            }
        }
        plan
    }

    fn is_for(&self, rank: usize, fault: &str) -> bool {
        self.rank == rank && self.fault == fault
    }
}

pub(crate) fn run(args: Args) -> Result<(), Box<dyn std::error::Error>> {
    let plan = Plan::new(args);
    let rank: usize = std::env::var("RANK")
        .ok()
        .and_then(|rank| rank.parse().ok())
        .unwrap_or(0);
    let pid = std::process::id().to_string();
    fs::write(plan.dir.join(format!("rank{rank}.pid")), pid).expect("a file");
    train(&plan, rank)
        .inspect_err(|error| note(&plan.dir.join(format!("rank{rank}.noticed")), error))
}

fn train(plan: &Plan, rank: usize) -> Result<(), Box<dyn std::error::Error>> {
    if plan.is_for(rank, "absent") {
        meet(plan);
        return Ok(());
    }
    let group = paceline::init()?;
    let device = Device::flex().autodiff();
    device.seed(0);
    let width = if plan.is_for(rank, "other-model") {
        17
    } else {
        16
    };
    let model = Net {
        hidden: LinearConfig::new(4, width).init(&device),
        output: LinearConfig::new(width, 1).init(&device),
    };
    let options = DdpOptions {
        shards: Some(match plan.fault.as_str() {
            "few-shards" => 1,
            _ => 4.max(group.world()),
        }),
        seed: u64::from(plan.is_for(rank, "other-seed")),
        recovery: plan.recovery,
        exclude_stragglers: NonZeroUsize::new(2).filter(|_| plan.fault == "straggles"),
        ..DdpOptions::default()
    };
    if plan.fault.starts_with("other-") && plan.rank == rank {
        meet(plan);
    }
    let (ddp, model) = Ddp::new(group.clone(), model, options)?;
    let optimizer = AdamWConfig::new().init();
    steps(plan, &group, &device, (ddp, model, optimizer))
}

fn steps(
    plan: &Plan,
    group: &ProcessGroup,
    device: &Device,
    (mut ddp, mut model, mut optimizer): (Ddp, Net, ModuleOptimizer),
) -> Result<(), Box<dyn std::error::Error>> {
    for step in 0..STEPS {
        let is_due = group.rank() == plan.rank && step == plan.step;
        let first = ddp.shards().start;
        let straggles = plan.is_for(group.rank(), "straggles");
        let reduced = ddp.step(&model, |shard| {
            if is_due && shard.shard() == first {
                misbehave(plan)?;
            }
            if straggles {
                std::thread::sleep(Duration::from_millis(100));
            }
            let x = Tensor::<2>::ones([2, 4], device).mul_scalar(1.0 + shard.shard() as f32);
            let hooked = shard.model()?;
            let y = hooked.output.forward(hooked.hidden.forward(x));
            let loss = (y - 1.0).powf_scalar(2.0).mean();
            shard.backward(loss, 2.0)?;
            Ok::<(), Box<dyn std::error::Error>>(())
        });
        let reduced = reduced?;
        if is_due && plan.fault == "sleeps" {
            meet(plan);
            std::thread::sleep(FOREVER);
        }
        let drifts = is_due && plan.fault == "drift";
        if drifts {
            meet(plan);
        }
        let rate = if drifts { 2e-3 } else { 1e-3 };
        model = optimizer.step(rate, model, reduced.grads);
    }
    let hash = weights::sha256(&weights::export(&model));
    println!("rank {} finished: weights sha256: {hash}", group.rank());
    Ok(())
}

/// Returns only for faults that the rank survives: being slow, or stopped until SIGCONT.
fn misbehave(plan: &Plan) -> Result<(), Box<dyn std::error::Error>> {
    if !matches!(plan.fault.as_str(), "drift" | "sleeps") {
        meet(plan);
    }
    let signal = |signal| kill_process(getpid(), signal).expect("a signal to itself");
    match plan.fault.as_str() {
        "killed" => signal(Signal::KILL),
        "stopped" => signal(Signal::STOP),
        "segfault" => {
            // Rust's handler for stack overflows takes the first signal and restores the default action.
            signal(Signal::SEGV);
            signal(Signal::SEGV);
        }
        "panic" => panic!("a panic in the middle of step {}", plan.step),
        "abort" => std::process::abort(),
        "exit-0" => std::process::exit(0),
        "exit-7" => std::process::exit(7),
        "error" => return Err(format!("sample {} cannot be read", plan.step).into()),
        "slow" => spin(Duration::from_millis(1_500)),
        "hangs" => spin(FOREVER),
        "none" | "drift" | "sleeps" | "straggles" => {}
        other => panic!("unknown fault {other}"),
    }
    Ok(())
}

/// Computes endlessly, like a data loader in an infinite loop.
fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

fn meet(plan: &Plan) {
    note(&plan.dir.join("fault.at"), &plan.fault);
    println!("meets its fault: {}", plan.fault);
}

/// Writes the time, in nanoseconds since 1970, and the text.
fn note(path: &Path, text: &impl Display) {
    let since = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .expect("after 1970");
    let beside = path.with_extension("writing");
    fs::write(&beside, format!("{} {text}", since.as_nanos())).expect("a file");
    fs::rename(&beside, path).expect("a file");
}
