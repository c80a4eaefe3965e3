//! The command line of `step_time`.

use std::path::PathBuf;

use paceline::device::{DeviceError, DeviceKind};
use paceline::nn::gpt::Gpt;
use paceline::nn::vit::Vit;
use paceline::{Backend, CommHook, CommHookParseError, Precision, Reduction};

use super::workloads::mlp::Mlp;
use super::workloads::{ResNet20, ResNet50, Workload};

pub(crate) const USAGE: &str = "\
usage: step_time [OPTION]...

  --workload NAME  mlp, resnet20, gpt, resnet50 or vit; default: the first three in turn
  --steps N        steps to time (30)
  --warmup N       untimed steps before them (5)
  --seconds N      approximate time limit per workload; runs fewer steps if they are slow
  --batch N        samples per shard (128, 64, 8, 4 and 8)
  --shards N       shards per step (one per rank)
  --device NAME    device: cpu, cuda, vulkan, metal or rocm (cpu)
  --precision NAME compute type: f32, or bf16 with weights in f32 (f32)
  --backend NAME   path of gradients between ranks: auto, host or nccl (auto)
  --reduction NAME order of NCCL's additions: tree or ring (tree)
  --comm-hook NAME how gradients travel between ranks, as in paceline train (none)
  --losses         print each step's loss, and the hash of the final weights
  --trace FILE     write a trace of one more step; needs --workload";

const SMALL: [&str; 3] = [Mlp::NAME, ResNet20::NAME, Gpt::NAME];
const LARGE: [&str; 2] = [ResNet50::NAME, Vit::NAME];

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Args {
    pub(crate) workload: Option<String>,
    pub(crate) steps: usize,
    pub(crate) warmup: usize,
    pub(crate) seconds: Option<usize>,
    pub(crate) batch: Option<usize>,
    pub(crate) shards: Option<usize>,
    pub(crate) device: DeviceKind,
    pub(crate) precision: Precision,
    pub(crate) backend: Backend,
    pub(crate) reduction: Reduction,
    pub(crate) comm_hook: CommHook,
    pub(crate) losses: bool,
    pub(crate) trace: Option<PathBuf>,
}

impl Default for Args {
    fn default() -> Self {
        Self {
            workload: None,
            steps: 30,
            warmup: 5,
            seconds: None,
            batch: None,
            shards: None,
            device: DeviceKind::Cpu,
            precision: Precision::default(),
            backend: Backend::default(),
            reduction: Reduction::default(),
            comm_hook: CommHook::None,
            losses: false,
            trace: None,
        }
    }
}

impl Args {
    pub(crate) fn read(words: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let mut args = Self::default();
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} needs a value"));
            match word.as_str() {
                "--workload" => {
                    let name = value()?;
                    if !SMALL.iter().chain(&LARGE).any(|known| *known == name) {
                        return Err(format!("there is no workload {name}"));
                    }
                    args.workload = Some(name);
                }
                "--steps" => args.steps = count(&word, &value()?, 1)?,
                "--warmup" => args.warmup = count(&word, &value()?, 0)?,
                "--seconds" => args.seconds = Some(count(&word, &value()?, 1)?),
                "--batch" => args.batch = Some(count(&word, &value()?, 1)?),
                "--shards" => args.shards = Some(count(&word, &value()?, 1)?),
                "--device" => {
                    args.device = value()?
                        .parse()
                        .map_err(|error: DeviceError| error.to_string())?;
                }
                "--precision" => {
                    args.precision = match value()?.as_str() {
                        "f32" => Precision::F32,
                        "bf16" => Precision::Bf16,
                        other => return Err(format!("there is no precision {other}")),
                    }
                }
                "--backend" => {
                    args.backend = match value()?.as_str() {
                        "auto" => Backend::Auto,
                        "host" => Backend::Host,
                        "nccl" => Backend::Nccl,
                        other => return Err(format!("there is no backend {other}")),
                    }
                }
                "--reduction" => {
                    args.reduction = match value()?.as_str() {
                        "tree" => Reduction::Tree,
                        "ring" => Reduction::Ring,
                        other => return Err(format!("there is no reduction {other}")),
                    }
                }
                "--comm-hook" => {
                    let hook = value()?.parse();
                    args.comm_hook = hook.map_err(|error: CommHookParseError| error.to_string())?;
                }
                "--losses" => args.losses = true,
                "--trace" => args.trace = Some(value()?.into()),
                _ => return Err(format!("unknown option {word}")),
            }
        }
        if args.trace.is_some() && args.workload.is_none() {
            return Err("--trace needs a --workload".into());
        }
        if args.losses && args.seconds.is_some() {
            // The hash is only comparable after the same number of steps.
            return Err("--losses runs all --steps: leave out --seconds".into());
        }
        Ok(args)
    }

    pub(crate) fn wants(&self, workload: &str) -> bool {
        match self.workload.as_deref() {
            Some(name) => name == workload,
            None => SMALL.contains(&workload),
        }
    }
}

/// A number from `least` to a million.
fn count(option: &str, text: &str, least: usize) -> Result<usize, String> {
    let number = text.parse().ok();
    number
        .filter(|number| (least..=1_000_000).contains(number))
        .ok_or(format!(
            "{option} takes a number from {least} to 1000000, not {text:?}"
        ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Args, String> {
        Args::read(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn options_are_read() {
        let expect = Args {
            workload: Some("gpt".into()),
            steps: 3,
            warmup: 0,
            seconds: None,
            batch: Some(2),
            shards: Some(4),
            device: DeviceKind::Cuda,
            precision: Precision::Bf16,
            backend: Backend::Host,
            reduction: Reduction::Ring,
            comm_hook: CommHook::Bf16Compress,
            losses: true,
            trace: Some("step.json".into()),
        };
        let line = "--workload gpt --steps 3 --warmup 0 --batch 2 --shards 4 --device cuda \
                    --precision bf16 --backend host --reduction ring --comm-hook bf16 --losses --trace step.json";
        assert_eq!(read(line), Ok(expect));
        assert_eq!(read(""), Ok(Args::default()));
        let limited = read("--seconds 5").expect("fine");
        assert_eq!(limited.seconds, Some(5));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let check = |line: &str, expect: &str| assert_eq!(read(line), Err(expect.into()));
        check("--workload vgg", "there is no workload vgg");
        check(
            "--steps 0",
            "--steps takes a number from 1 to 1000000, not \"0\"",
        );
        check(
            "--warmup -1",
            "--warmup takes a number from 0 to 1000000, not \"-1\"",
        );
        check("--batch", "--batch needs a value");
        check("--device abacus", "unknown kind of device `abacus`");
        check("--precision fp8", "there is no precision fp8");
        check("--backend mpi", "there is no backend mpi");
        check("--reduction star", "there is no reduction star");
        let expected = CommHook::EXPECTED;
        check(
            "--comm-hook copper",
            &format!("communication hook: expected {expected}, got \"copper\""),
        );
        check("--fast", "unknown option --fast");
        check("--trace step.json", "--trace needs a --workload");
        check(
            "--seconds 5 --losses",
            "--losses runs all --steps: leave out --seconds",
        );
    }
}
