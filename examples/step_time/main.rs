//! How long a training step takes: a perceptron, ResNet-20, a small GPT, ResNet-50 and ViT-Tiny, on any device and any number of
//! ranks.
//!
//! ```text
//! cargo build --release --example step_time
//! target/release/examples/step_time --workload mlp --steps 30
//! cargo run --release -- run --nproc-per-node 2 target/release/examples/step_time
//! ```
//!
//! Rank 0 prints one JSON object per workload. A step is timed from a barrier to the moment when the device is idle;
//! `streamed_seconds` is the time per step without waiting for the device in between, and `page_faults` are those of such a
//! step. `--losses` adds a line per step and the weights' SHA-256 at the end, which is the same on one and two ranks with equal
//! `--shards`. Waiting for every loss takes time, so such a run's figures are not comparable with others. With `--seconds`, all
//! ranks agree after the third step how many more steps fit; `steps` is then the number timed.

mod args;
mod workloads;

use std::error::Error;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use burn::optim::ModuleOptimizer;
use burn::tensor::{Device, Int, Tensor};
use paceline::device;
use paceline::nn::gpt::Gpt;
use paceline::nn::vit::Vit;
use paceline::nn::{AdamWConfig, cross_entropy};
use paceline::timeline::{Activity, Timeline};
use paceline::{Ddp, DdpOptions, Precision, ProcessGroup, ReduceOp, weights};
use serde_json::{Value, json};

use args::{Args, USAGE};
use workloads::mlp::Mlp;
use workloads::{ResNet20, ResNet50, Workload};

/// As in the PyTorch script, so that both do the same work.
const LEARNING_RATE: f64 = 1e-3;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.iter().any(|word| word == "--help") {
        println!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    let args = match Args::read(words) {
        Ok(args) => args,
        Err(mistake) => {
            eprintln!("step_time: {mistake}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("step_time: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let group = paceline::init()?;
    let device = device::open_for_rank(args.device, group.local_rank());
    let device = device.map_err(|error| match error.hint() {
        Some(hint) => format!("{error}\nhint: {hint}"),
        None => error.to_string(),
    });
    let device = device?.autodiff();
    if args.wants(Mlp::NAME) {
        measure::<Mlp>(args, &group, &device)?;
    }
    if args.wants(ResNet20::NAME) {
        measure::<ResNet20>(args, &group, &device)?;
    }
    if args.wants(Gpt::NAME) {
        measure::<Gpt>(args, &group, &device)?;
    }
    if args.wants(ResNet50::NAME) {
        measure::<ResNet50>(args, &group, &device)?;
    }
    if args.wants(Vit::NAME) {
        measure::<Vit>(args, &group, &device)?;
    }
    Ok(())
}

/// Trains one workload and prints its times on rank 0.
fn measure<W: Workload>(
    args: &Args,
    group: &ProcessGroup,
    device: &Device,
) -> Result<(), Box<dyn Error>> {
    let (mut run, mut net) = Run::<W>::start(args, group, device)?;
    group.barrier()?;
    let origin = Instant::now();
    let (mut seconds, mut waited) = (Vec::new(), Vec::new());
    let (mut warmup, mut steps) = (args.warmup, args.steps);
    let mut step = 0;
    while step < warmup + steps {
        group.barrier()?;
        let start = Instant::now();
        let (next, timeline) = run.step(net)?;
        net = next;
        run.finish(device)?;
        let took = start.elapsed().as_secs_f64();
        if step >= warmup {
            seconds.push(took);
            waited.push(timeline.waited().as_secs_f64());
        }
        // The first step compiles a device's kernels and the second those that need optimizer state, so neither predicts
        // later steps.
        if step == 2
            && let Some(limit) = args.seconds
        {
            let mut slowest = [took];
            group.all_reduce(&mut slowest, ReduceOp::Max)?;
            (warmup, steps) = fitting(args, slowest[0], limit);
        }
        step += 1;
    }
    let mut line = json!({
        "peer": "paceline",
        "version": env!("CARGO_PKG_VERSION"),
        "workload": W::NAME,
        "world": group.world(),
        "shards": run.ddp.shard_count(),
        "device": args.device.name(),
        "card": device::name(device),
        "precision": args.precision.to_string(),
        "backend": format!("{:?}", args.backend).to_lowercase(),
        "reduction": format!("{:?}", args.reduction).to_lowercase(),
        "comm_hook": args.comm_hook,
        "batch": args.batch.unwrap_or(W::BATCH),
        "parameters": run.ddp.parameter_count(),
        "steps": steps,
        "step_seconds": median(&mut seconds),
        "min_seconds": seconds[0],
        "max_seconds": seconds[seconds.len() - 1],
        "waited_seconds": median(&mut waited),
    });
    if args.losses {
        line["weights_sha256"] = weights::sha256(&weights::export(&net)).into();
    } else {
        group.barrier()?;
        let (start, faults) = (Instant::now(), page_faults());
        for _ in 0..steps {
            (net, _) = run.step(net)?;
        }
        run.finish(device)?;
        line["streamed_seconds"] = (start.elapsed().as_secs_f64() / steps as f64).into();
        let more = page_faults().zip(faults).map(|(now, before)| now - before);
        line["page_faults"] = more.map(|more| more as f64 / steps as f64).into();
    }
    if let Some(path) = &args.trace {
        let timeline = run.traced(net, device)?;
        let (reduced, overlapped) = reducing(&timeline);
        line["reduced_seconds"] = reduced.as_secs_f64().into();
        line["overlapped_seconds"] = overlapped.as_secs_f64().into();
        write_trace(group, &timeline, origin, path)?;
    }
    line["rss_bytes"] = paceline::usage::peak_resident_bytes().into();
    say(group, &line)
}

/// Numbers of warm-up and timed steps, if one step takes `step` seconds and all may take `limit`.
fn fitting(args: &Args, step: f64, limit: usize) -> (usize, usize) {
    // Timed steps run twice, the second time streamed.
    let all = step * (args.warmup + 2 * args.steps) as f64;
    let share = (limit as f64 / all).min(1.0);
    // Three steps are already done, and a median needs at least three.
    let cut = |count: usize, least: usize| ((count as f64 * share) as usize).max(least.min(count));
    (cut(args.warmup, 3), cut(args.steps, 3))
}

/// A workload in training, all but the network.
struct Run<W: Workload> {
    ddp: Ddp,
    optimizer: ModuleOptimizer,
    /// This rank's shards.
    samples: Vec<(W::Input, Tensor<1, Int>)>,
    precision: Precision,
    batch: usize,
    losses: bool,
}

impl<W: Workload> Run<W> {
    /// The network's initial weights are the same on every device.
    fn start(
        args: &Args,
        group: &ProcessGroup,
        device: &Device,
    ) -> Result<(Self, W), Box<dyn Error>> {
        let cpu = Device::flex().autodiff();
        cpu.seed(0);
        let net = weights::export(&W::new(&cpu));
        let net = weights::import(W::new(device), net.into_iter().collect());
        let options = DdpOptions {
            shards: Some(args.shards.unwrap_or(group.world())),
            precision: args.precision,
            backend: args.backend,
            reduction: args.reduction,
            comm_hook: args.comm_hook,
            sums: usize::from(args.losses),
            settings: vec![("step_time".into(), format!("{args:?}"))],
            ..DdpOptions::default()
        };
        let (ddp, net) = Ddp::new(group.clone(), net, options)?;
        let batch = args.batch.unwrap_or(W::BATCH);
        let own = ddp.shards();
        // Weight decay and epsilon are PyTorch's defaults.
        let optimizer = AdamWConfig::new()
            .with_weight_decay(1e-2)
            .with_epsilon(1e-8);
        let run = Self {
            samples: own
                .map(|shard| W::samples(batch, shard, args.precision, device))
                .collect(),
            optimizer: optimizer.init(),
            precision: args.precision,
            losses: args.losses,
            batch,
            ddp,
        };
        Ok((run, net))
    }

    /// Waits until all work of a step is done.
    fn finish(&self, device: &Device) -> Result<(), Box<dyn Error>> {
        self.ddp.synchronize()?;
        Ok(device.sync()?)
    }

    /// One more step, with the device's own times.
    fn traced(&mut self, net: W, device: &Device) -> Result<Timeline, Box<dyn Error>> {
        self.ddp.time_device(true);
        let (_, mut timeline) = self.step(net)?;
        self.finish(device)?;
        timeline.settle();
        Ok(timeline)
    }

    fn step(&mut self, net: W) -> Result<(W, Timeline), Box<dyn Error>> {
        let first = self.ddp.shards().start;
        let (samples, losses) = (&self.samples, self.losses);
        let (precision, weight) = (self.precision, self.batch as f32);
        let reduced = self.ddp.step(&net, |shard| {
            let (input, classes) = samples[shard.shard() - first].clone();
            let scores = precision.logits(shard.model()?.scores(input));
            let loss = cross_entropy(scores, classes);
            if losses {
                shard.add(0, loss.clone().into_scalar());
            }
            shard.backward(loss, weight)
        })?;
        if losses {
            let step = self.ddp.next_step() - 1;
            let loss = reduced.sums[0] / self.ddp.shard_count() as f32;
            let line = json!({ "workload": W::NAME, "step": step, "loss": loss });
            say(self.ddp.group(), &line)?;
        }
        let net = self.optimizer.step(LEARNING_RATE, net, reduced.grads);
        // Of local SGD; without that hook it is the same network.
        Ok((self.ddp.average(net)?, reduced.timeline))
    }
}

/// Page faults of this process so far that needed no disk, on Linux.
fn page_faults() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/stat").ok()?;
    // A name with spaces, in brackets, comes before.
    let (_, fields) = text.rsplit_once(')')?;
    fields.split_whitespace().nth(7)?.parse().ok()
}

/// Prints a line on rank 0.
fn say(group: &ProcessGroup, line: &Value) -> Result<(), Box<dyn Error>> {
    if group.rank() == 0 {
        writeln!(std::io::stdout().lock(), "{line}")?;
    }
    Ok(())
}

/// Writes a trace of one step on all ranks, for ui.perfetto.dev.
fn write_trace(
    group: &ProcessGroup,
    step: &Timeline,
    origin: Instant,
    path: &Path,
) -> Result<(), Box<dyn Error>> {
    let own = serde_json::to_vec(&step.trace_events(group.rank(), origin))?;
    let all = group.all_gather_bytes(&own)?;
    if group.rank() != 0 {
        return Ok(());
    }
    let mut events: Vec<Value> = Vec::new();
    for own in all {
        events.extend(serde_json::from_slice::<Vec<Value>>(&own)?);
    }
    let text = json!({ "traceEvents": events }).to_string();
    Ok(std::fs::write(path, text)?)
}

/// The time spent reducing a step's gradients, and the part of it during a backward pass.
fn reducing(step: &Timeline) -> (Duration, Duration) {
    let passes: Vec<(Instant, Instant)> = step
        .spans
        .iter()
        .filter(|span| span.activity == Activity::Backward)
        .map(|span| (span.start, span.end))
        .collect();
    let (mut all, mut beside) = (Duration::ZERO, Duration::ZERO);
    for bucket in &step.buckets {
        all += bucket
            .finished
            .saturating_duration_since(bucket.peers_ready);
        beside += common((bucket.peers_ready, bucket.finished), &passes);
    }
    (all, beside)
}

/// The part of a time span that lies within `others`, which do not overlap each other.
fn common((start, end): (Instant, Instant), others: &[(Instant, Instant)]) -> Duration {
    others
        .iter()
        .map(|other| {
            end.min(other.1)
                .saturating_duration_since(start.max(other.0))
        })
        .sum()
}

/// Sorts `values` and returns the median. `values` must not be empty.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use paceline::GroupOptions;

    use super::*;

    #[test]
    fn what_two_stretches_have_in_common_is_counted() {
        let origin = Instant::now();
        let stretch = |(from, to): (u64, u64)| {
            let at = |ms| origin + Duration::from_millis(ms);
            (at(from), at(to))
        };
        let check = |one, others: &[(u64, u64)], expect: u64| {
            let others: Vec<_> = others.iter().copied().map(stretch).collect();
            assert_eq!(common(stretch(one), &others), Duration::from_millis(expect));
        };
        check((12, 16), &[(10, 30)], 4);
        check((26, 33), &[(10, 30)], 4);
        check((5, 40), &[(10, 20), (30, 50)], 20);
        check((30, 31), &[(10, 30)], 0);
        check((1, 2), &[], 0);
    }

    #[test]
    fn slow_steps_are_fewer() {
        let check = |(warmup, steps), step, expect| {
            let args = Args {
                warmup,
                steps,
                ..Args::default()
            };
            assert_eq!(fitting(&args, step, 10), expect);
        };
        check((15, 40), 0.0, (15, 40));
        check((15, 40), 0.1, (15, 40));
        check((15, 40), 0.25, (6, 16));
        check((15, 40), 60.0, (3, 3));
        check((0, 1), 60.0, (0, 1));
        check((1, 30), 60.0, (1, 3));
    }

    #[test]
    fn models_are_as_large_as_pytorchs() {
        fn check<W: Workload>(expect: usize) {
            let net = W::new(&Device::flex().autodiff());
            let group = ProcessGroup::local(1, &GroupOptions::default()).expect("a group");
            let (ddp, _) = Ddp::new(group[0].clone(), net, DdpOptions::default()).expect("a model");
            assert_eq!(ddp.parameter_count(), expect, "{}", W::NAME);
        }
        check::<Mlp>(1_863_690);
        check::<ResNet20>(272_282);
        check::<Gpt>(3_323_392);
        check::<ResNet50>(25_557_032);
        check::<Vit>(5_717_416);
    }

    #[test]
    fn every_model_scores_its_classes() {
        fn check<W: Workload>(expect: [usize; 2]) {
            let device = Device::flex();
            let (input, classes) = W::samples(2, 0, Precision::F32, &device);
            assert_eq!(W::new(&device).scores(input).dims(), expect, "{}", W::NAME);
            assert_eq!(classes.dims(), [expect[0]], "{}", W::NAME);
        }
        check::<Mlp>([2, 10]);
        check::<ResNet20>([2, 10]);
        check::<Gpt>([256, 512]);
        check::<ResNet50>([2, 1000]);
        check::<Vit>([2, 1000]);
    }
}
